"""One owner task per workspace with a bounded inbox: everything that moves a workspace happens here, one thing at a time.

An owner holds what only this process knows: the awake generation, who is inside ``awake``, the wake in flight. All of it is a
cache. Its task exists only while there is work, so a sleeping workspace costs an object and no task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from perdure.core import logs
from perdure.core.clock import Clock
from perdure.core.ids import WorkspaceId
from perdure.core.inbox import Inbox
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
    busy_at: float | None = None  # when its program last said that it is busy, if that was its last word
    done_at: float | None = None  # until when its program was busy, by its own word
    fresh_at: float | None = None  # since when every answer of its program has been as young as the question

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
        self.starting: Record | None = None  # while the node is asked to start it
        self.is_newborn = False  # its row is being inserted, or was and its first start is under way
        self.is_ticking = False  # an automatic job of this workspace is queued or running
        self._clock = clock
        self._on_defect = on_defect
        self._inbox = Inbox(workspace_id, INBOX_LIMIT, self._report_defect)

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
        self.touch()

    def release(self) -> None:
        self.held -= 1
        assert self.held >= 0, "released more often than held"
        self.touch()

    def touch(self) -> None:
        """Somebody uses it."""
        self.touched_at = self._clock.monotonic()

    @property
    def is_idle(self) -> bool:
        """Nothing is known here that a new owner would not learn from the database."""
        used = self.held or self.callers or self.waking is not None or self.is_busy or self.is_newborn
        return self.live is None and not used

    @property
    def is_busy(self) -> bool:
        return self._inbox.is_busy

    # ------------------------------------------------------------------------------------------------------------------ inbox

    async def run(self, job: Callable[[], Awaitable[T]], *, urgent: bool = False) -> T:
        """See ``Inbox.run``. What the job logs names the workspace."""

        async def named() -> T:
            logs.note(workspace=self.id, generation=self.live.generation if self.live is not None else None)
            return await job()

        return await self._inbox.run(named, urgent=urgent)

    def stop(self) -> None:
        """Drop everything at once, as a crash would: what was begun is left to the reconciler."""
        self._inbox.stop()
        if self.waking is not None:
            self.waking.cancel()

    def _report_defect(self, error: Exception) -> None:
        """The state in the database is whatever was committed last, and the repair that this asks for reads it from there."""
        _log.error("a job of workspace %s failed in a way nobody foresaw", self.id, exc_info=error)
        self._on_defect(self)
