"""A database that is killed comes back by itself, and the pool with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.db.database import Database
from perdure.db.embedded import EmbeddedPostgres
from perdure.db.keeper import DatabaseKeeper


class Kept:
    def __init__(self, home: Path) -> None:
        self.embedded = EmbeddedPostgres(home, settings={"fsync": "off"})
        self.again = asyncio.Event()

    async def restarted(self) -> None:
        await self.database.renew()
        self.again.set()

    async def open(self) -> None:
        self.database = Database(await self.embedded.start())
        await self.database.open()
        self.keeper = DatabaseKeeper(self.embedded, self.restarted)
        self.keeper.start()


@pytest.fixture
async def kept(home: Path) -> AsyncIterator[Kept]:
    home.chmod(0o711)
    kept = Kept(home)
    await kept.open()
    yield kept
    await kept.keeper.close()
    await kept.database.close()
    await kept.embedded.stop()


async def test_a_killed_one_is_started_again_every_time_and_the_next_statement_succeeds(kept: Kept) -> None:
    for _ in range(2):
        pid = kept.embedded.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(kept.again.wait(), 120)
        kept.again.clear()
        assert kept.embedded.pid() not in (None, pid)
        async with kept.database.transaction() as transaction, asyncio.timeout(60):
            await transaction.one("clock.shift", offset="0 seconds")


async def test_one_that_is_stopped_after_its_keeper_stays_stopped(kept: Kept) -> None:
    await kept.keeper.close()
    await kept.embedded.stop()
    assert kept.embedded.pid() is None
    assert not kept.again.is_set()
