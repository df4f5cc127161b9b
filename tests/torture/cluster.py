"""A PostgreSQL of the suite's own, which rounds may kill, with a migrated database for each home."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psycopg

from perdure.db.embedded import EmbeddedPostgres
from perdure.db.migrations import migrate

_TEMPLATE = "template_torture"
#: A host that loses power is simulated for files. Here only processes die: what they have handed to the kernel is not lost. What
#: they have not (``synchronous_commit``) would be.
_SETTINGS = {"fsync": "off", "full_page_writes": "off"}


class Cluster:
    """``url`` starts it when it is first asked for."""

    def __init__(self, home: Path) -> None:
        self._postgres = EmbeddedPostgres(home, settings=_SETTINGS)
        self._is_up = False

    async def url(self, name: str) -> str:
        """Of a new, empty, migrated database."""
        if not self._is_up:
            await self._postgres.start()
            self._is_up = True
            await self._create(_TEMPLATE, "template0")
            await asyncio.to_thread(migrate, self._postgres.url(_TEMPLATE))
        elif self.pid() is None:
            await self.start()  # a round that was cut off while it was being started again must not cost all that follow
        await self._create(name, _TEMPLATE)
        return self._postgres.url(name)

    async def drop(self, name: str) -> None:
        await self._run(f"drop database if exists {name} with (force)")

    async def kill(self) -> None:
        """SIGKILL of the postmaster; it runs again when this returns."""
        pid = self.pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.start()

    def pid(self) -> int | None:
        """Of the postmaster, if one runs."""
        return self._postgres.pid()

    async def start(self) -> None:
        await self._postgres.start()

    @asynccontextmanager
    async def kept_up(self, tell: Callable[[], None]) -> AsyncIterator[int]:
        """Yields the postmaster's process id. When it dies, it is started again and that is told; it runs when this ends."""
        pid = self.pid()
        if pid is None:
            await self.start()
            pid = self.pid()
        assert pid is not None
        descriptor, died = os.pidfd_open(pid), asyncio.Event()
        loop = asyncio.get_running_loop()

        def seen() -> None:
            loop.remove_reader(descriptor)
            died.set()

        loop.add_reader(descriptor, seen)
        keeper = asyncio.create_task(self._start_after(died, tell))
        try:
            yield pid
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            if died.is_set():
                await keeper
            keeper.cancel()

    async def _start_after(self, died: asyncio.Event, tell: Callable[[], None]) -> None:
        await died.wait()
        await self.start()
        tell()

    async def stop(self) -> None:
        if self._is_up:
            await self._postgres.stop()

    async def _create(self, name: str, template: str) -> None:
        await self._run(f"create database {name} template {template}")

    async def _run(self, statement: str) -> None:
        async with await psycopg.AsyncConnection.connect(self._postgres.url("postgres"), autocommit=True) as connection:
            await connection.execute(statement.encode())
