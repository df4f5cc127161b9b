"""One owner task per workspace with a bounded inbox: everything that moves a workspace happens here, one thing at a time.

An owner holds what only this process knows: the awake generation, who is inside ``awake``, the wake in flight. All of it is a
cache. Its task exists only while there is work, so a sleeping workspace costs an object and no task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from perdure.core.clock import Clock
from perdure.core.errors import Busy, PerdureError
from perdure.core.ids import WorkspaceId
from perdure.workspaces.rows import Record

T = TypeVar("T")
_log = logging.getLogger(__name__)

INBOX_LIMIT = 64
CALLERS_LIMIT = 4096  # callers that may wait for one wake


@dataclass(slots=True)
class Live:
    """The awake machine, on the monotonic clock."""

    record: Record
    captured_at: float
    keep_awake_until: float

    @property
    def generation(self) -> int:
        return self.record.generation


class Owner:
    """The single writer of one workspace in this process."""

    def __init__(self, workspace_id: WorkspaceId, clock: Clock, on_defect: Callable[[Owner], None]) -> None:
        self.id = workspace_id
        self.live: Live | None = None
        self.held = 0
        self.touched_at = clock.monotonic()
        self.waking: asyncio.Task[Record] | None = None
        self.callers = 0
        self.is_newborn = False  # its row is being inserted, or was and its first start is under way
        self.is_ticking = False  # an automatic job of this workspace is queued or running
        self._clock = clock
        self._on_defect = on_defect
        self._inbox: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._task: asyncio.Task[None] | None = None

    # --------------------------------------------------------------------------------------------------------------- liveness

    def woke(self, record: Record) -> None:
        now = self._clock.monotonic()
        kept = record.workspace.keep_awake_until
        left_s = (kept - record.now).total_seconds() if kept is not None else 0.0
        self.live = Live(record, captured_at=now, keep_awake_until=now + max(0.0, left_s))
        self.touched_at = now

    def captured(self, record: Record) -> None:
        if self.live is not None:
            self.live.record = record
            self.live.captured_at = self._clock.monotonic()

    def keep_awake(self, record: Record, seconds: float) -> None:
        if self.live is not None:
            self.live.record = record
            self.live.keep_awake_until = self._clock.monotonic() + seconds

    def hold(self) -> None:
        self.held += 1
        self.touched_at = self._clock.monotonic()

    def release(self) -> None:
        self.held -= 1
        assert self.held >= 0, "released more often than held"
        self.touched_at = self._clock.monotonic()

    @property
    def is_idle(self) -> bool:
        """Nothing is known here that a new owner would not learn from the database."""
        used = self.held or self.callers or self.waking is not None or self.is_busy or self.is_newborn
        return self.live is None and not used

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    # ------------------------------------------------------------------------------------------------------------------ inbox

    async def run(self, job: Callable[[], Awaitable[T]], *, urgent: bool = False) -> T:
        """Queue a job and wait for its result. A caller that goes away does not stop the job. Raises Busy when too many wait;
        ``urgent`` ones (what happened, not what is asked) are never refused."""
        if len(self._inbox) >= INBOX_LIMIT and not urgent:
            raise Busy(f"Too many operations wait for this workspace (limit {INBOX_LIMIT}).")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._inbox.append((job, future))
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=f"owner-{self.id}")
        return await asyncio.shield(future)

    def stop(self) -> None:
        """Drop everything at once, as a crash would: what was begun is left to the reconciler."""
        for task in (self._task, self.waking):
            if task is not None:
                task.cancel()

    async def _work(self) -> None:
        try:
            while self._inbox:
                job, future = self._inbox.popleft()
                try:
                    await self._attempt(job, future)
                finally:
                    if not future.done():
                        future.cancel()
        finally:
            self._task = None
            while self._inbox:
                self._inbox.popleft()[1].cancel()

    async def _attempt(self, job: Callable[[], Awaitable[T]], future: asyncio.Future[T]) -> None:
        try:
            result = await job()
        except PerdureError as error:
            if not future.done():
                future.set_exception(error)
        except Exception as error:  # noqa: BLE001 - see below
            # The top of a job: its state in the database is whatever was committed last, and the repair that this asks for
            # reads it from there.
            _log.exception("a job of workspace %s failed in a way nobody foresaw", self.id)
            if not future.done():
                future.set_exception(
                    PerdureError("The operation failed inside Perdure; the server's log says why.", internal=repr(error))
                )
            self._on_defect(self)
        else:
            if not future.done():
                future.set_result(result)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """A caller that went away must not make asyncio complain that nobody read the error."""
    if not future.cancelled():
        future.exception()
