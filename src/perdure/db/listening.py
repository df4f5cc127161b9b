"""Listening to NOTIFY, on a connection of its own. Nothing may depend on it: what is said while that is away is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import psycopg
from psycopg.conninfo import make_conninfo

from perdure.core.pauses import pause
from perdure.db import queries

#: How long after a connection broke the next one is tried.
AGAIN_S = 1.0
_CONNECT_S = 10
#: A peer that is gone without a word is noticed within a minute.
_ALIVE = {"keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


class Listener:
    """``query`` names the LISTEN. ``heard`` is called with each payload, and with None after each connect: nobody knows what was
    said before. ``start`` before use, ``close`` after."""

    def __init__(self, url: str, query: str, heard: Callable[[str | None], None]) -> None:
        self.listens = asyncio.Event()
        self._url = url
        self._query = query
        self._heard = heard
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="database-listener")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            with suppress(psycopg.Error):
                await self._listen()
            await pause(AGAIN_S)

    async def _listen(self) -> None:
        where = make_conninfo(self._url, connect_timeout=_CONNECT_S, application_name="perdure-listener", **_ALIVE)
        async with await psycopg.AsyncConnection.connect(where, autocommit=True) as connection:
            await connection.execute(queries.load()[self._query])
            self.listens.set()
            try:
                self._heard(None)
                async for notification in connection.notifies():
                    self._heard(notification.payload)
            finally:
                self.listens.clear()
