"""Starts the embedded database again when it ends by itself (the kernel's memory killer, an operator's mistake).

The machines of awake workspaces run on meanwhile: the freeze watchdog gives a database several seconds before they must stand
still. A call that fell into the gap gets ``Unavailable``; what it had committed is there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import psycopg
import structlog

from perdure.core.errors import PerdureError
from perdure.db.embedded import EmbeddedPostgres

#: Between attempts to start one that does not start.
RETRY_S = 2.0

log = structlog.get_logger(__name__)


class DatabaseKeeper:
    """``start`` once the database runs; ``close`` before it is stopped. ``restarted`` is called after each new start."""

    def __init__(self, embedded: EmbeddedPostgres, restarted: Callable[[], Awaitable[None]]) -> None:
        self._embedded = embedded
        self._restarted = restarted
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name="database-keeper")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            pid = self._embedded.pid()
            if pid is not None:
                await _end_of(pid)
                log.error("the embedded database ended by itself; it is started again", pid=pid)
            try:
                await self._embedded.start()
                await self._restarted()
            except (PerdureError, psycopg.Error, OSError) as error:
                log.error("the embedded database does not start", error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                log.info("the embedded database serves again", pid=self._embedded.pid())


async def _end_of(pid: int) -> None:
    """Wait until the process has ended; it need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
