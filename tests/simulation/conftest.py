"""What every simulation runs on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perdure.db.database import Database
from tests.fakes.database import fresh_database


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    async with fresh_database() as database:
        yield database
