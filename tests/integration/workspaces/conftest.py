"""A control plane over the fake node and a real database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.control_plane import ControlPlane, control_plane


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with control_plane() as plane:
        yield plane
