"""One transaction for whatever wants to be committed at this moment.

While a transaction is on its way, others gather; the next takes them all, as one statement of each kind, in one round trip and
one flush of the disk. Nothing waits for a batch to fill. Each change guards itself, so that in a batch one may change no row
while its neighbours do. What raises spoils a whole transaction: then each is tried alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import AlreadyExists, PerdureError
from perdure.db.database import Database

_MOST = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """``is_done``: it was written; else its guard did not hold. ``now``: the database's clock."""

    is_done: bool
    now: datetime


@dataclass(frozen=True, slots=True)
class _Waiting:
    query: str
    change: Mapping[str, Any]
    news: Sequence[str]
    future: asyncio.Future[Outcome]


class Committer:
    """``payload`` makes one notification for other servers of all that a batch has to tell them."""

    def __init__(self, database: Database, payload: Callable[[Iterable[str]], str | None]) -> None:
        self._database = database
        self._payload = payload
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def commit(self, query: str, change: Mapping[str, Any], news: Sequence[str] = ()) -> Outcome:
        """When it is durable. ``query`` is ``runs.begin`` or ``runs.commit``; ``news`` is for other servers. Raises what the
        database raises; Unavailable may then be ambiguous."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(query, change, news, future))
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

    async def _commit(self, batch: list[_Waiting]) -> None:
        kinds = {one.query: [other for other in batch if other.query == one.query] for one in batch}
        statements = [(query, {"changes": _text(waiting), "news": self._news(waiting)}) for query, waiting in kinds.items()]
        crashpoint(CrashPoint.RUNS_BATCH_GATHERED)
        try:
            rows = await self._database.batch(statements)
        except AlreadyExists:
            if len(batch) == 1:
                raise
            for one in batch:
                await self._alone(one)
            return
        crashpoint(CrashPoint.RUNS_BATCH_COMMITTED)
        for waiting, row in zip(kinds.values(), rows, strict=True):
            assert row is not None, "each of these statements has a row"
            done = set(row["done"])
            for ord_, one in enumerate(waiting):
                if not one.future.done():
                    one.future.set_result(Outcome(ord_ in done, row["now"]))

    def _news(self, waiting: list[_Waiting]) -> str | None:
        return self._payload(news for one in waiting for news in one.news)

    async def _alone(self, one: _Waiting) -> None:
        try:
            await self._commit([one])
        except PerdureError as error:
            _refuse([one], error)


def _text(waiting: list[_Waiting]) -> str:
    return json.dumps([{**one.change, "ord": ord_} for ord_, one in enumerate(waiting)])


def _refuse(batch: list[_Waiting], error: BaseException) -> None:
    for one in batch:
        if one.future.done():
            continue
        if isinstance(error, asyncio.CancelledError):
            one.future.cancel()
        else:
            one.future.set_exception(error)
