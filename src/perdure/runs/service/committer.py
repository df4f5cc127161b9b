"""One transaction for whatever wants to be committed at this moment.

While a transaction is on its way, others gather; the next takes them all, in one round trip and one flush of the disk. Nothing
waits for a batch to fill. Each statement guards itself, so that in a batch one may change no row while its neighbours do. What
raises spoils a whole transaction: then each is tried alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from perdure.core.errors import AlreadyExists, PerdureError
from perdure.db.database import Database

_MOST = 64
Statement = tuple[str, Mapping[str, Any]]
Waiting = tuple[Statement, asyncio.Future[dict[str, Any]]]


class Committer:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def commit(self, query: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The statement's row, when it is durable. Raises what the database raises; Unavailable may then be ambiguous."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append(((query, parameters), future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="runs-commit")
        return await future

    async def close(self) -> None:
        """After the last commit that somebody waits for."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            try:
                await self._commit(batch)
            except PerdureError as error:
                _refuse(batch, error)
            except BaseException as error:  # a defect, or the end: whoever waits must not wait for ever
                _refuse(batch, error)
                raise

    async def _commit(self, batch: list[Waiting]) -> None:
        try:
            rows = await self._database.batch([statement for statement, _ in batch])
        except AlreadyExists:
            if len(batch) == 1:
                raise
            for one in batch:
                await self._alone(one)
            return
        for (_, future), row in zip(batch, rows, strict=True):
            assert row is not None, "each of these statements has a row"
            if not future.done():
                future.set_result(row)

    async def _alone(self, one: Waiting) -> None:
        try:
            await self._commit([one])
        except PerdureError as error:
            _refuse([one], error)


def _refuse(batch: list[Waiting], error: BaseException) -> None:
    for _, future in batch:
        if future.done():
            continue
        if isinstance(error, asyncio.CancelledError):
            future.cancel()
        else:
            future.set_exception(error)
