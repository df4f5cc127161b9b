"""A bounded inbox with one worker: jobs of one owner run one at a time, in the order they came.

The worker is a task that exists only while there is work, so an idle owner costs an object and no task. A caller that goes away
does not stop its job. What a job logs and traces belongs to whoever asked for it, not to whoever happened to start the worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from perdure.core import logs, tracing
from perdure.core.errors import Busy, PerdureError

T = TypeVar("T")

#: Told of an exception that no one foresaw; the job's caller gets a PerdureError without details.
OnDefect = Callable[[Exception], None]


class Inbox:
    """``limit`` jobs may wait. ``name`` is what errors and task names call the owner."""

    def __init__(self, name: str, limit: int, on_defect: OnDefect) -> None:
        self.name = name
        self._limit = limit
        self._on_defect = on_defect
        self._waiting: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._worker is not None

    async def run(self, job: Callable[[], Awaitable[T]], *, urgent: bool = False) -> T:
        """Queue a job and wait for its result. Raises Busy when too many wait; ``urgent`` ones (what happened, not what is
        asked) are never refused."""
        if len(self._waiting) >= self._limit and not urgent:
            raise Busy(f"Too many operations wait for this workspace (limit {self._limit}).")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._waiting.append((_carrying(job), future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name=f"inbox-{self.name}")
        return await asyncio.shield(future)

    def stop(self) -> None:
        """Drop everything at once, as a crash would: what was begun is left to whoever reconciles."""
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        try:
            while self._waiting:
                job, future = self._waiting.popleft()
                try:
                    await self._attempt(job, future)
                finally:
                    if not future.done():
                        future.cancel()
        finally:
            self._worker = None
            while self._waiting:
                self._waiting.popleft()[1].cancel()

    async def _attempt(self, job: Callable[[], Awaitable[T]], future: asyncio.Future[T]) -> None:
        try:
            result = await job()
        except PerdureError as error:
            if not future.done():
                future.set_exception(error)
        except Exception as error:  # noqa: BLE001
            # The top of a job: ``on_defect`` records it and asks for the repair that reads the truth anew.
            if not future.done():
                future.set_exception(
                    PerdureError("The operation failed inside Perdure; the server's log says why.", internal=repr(error))
                )
            self._on_defect(error)
        else:
            if not future.done():
                future.set_result(result)


def _carrying(job: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
    facts, trace = logs.facts(), tracing.carry()

    async def carried() -> T:
        with logs.exactly(facts), tracing.carried(trace):
            return await job()

    return carried


def _retrieve(future: asyncio.Future[Any]) -> None:
    """A caller that went away must not make asyncio complain that nobody read the error."""
    if not future.cancelled():
        future.exception()
