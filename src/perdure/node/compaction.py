"""Background compaction of what sleeps: segments of which little is still needed are rewritten, one workspace at a time.

A wake that comes while its snapshot is being rewritten waits for the rewrite, which is short; the file it reads must not change
under it. One that comes before simply takes the workspace off the list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from perdure.core.errors import NotFound, PerdureError
from perdure.core.ids import SnapshotId
from perdure.snapshots.compact import compact
from perdure.snapshots.manifest import Manifest
from perdure.snapshots.pagelog import BaseRam
from perdure.snapshots.store import SnapshotStore

#: How long after falling asleep a snapshot is looked at; by then retention has dropped what it supersedes.
INTERVAL_S = 30.0

log = structlog.get_logger(__name__)


class Compaction:
    """``base_of`` finds the RAM that a snapshot lies on."""

    def __init__(self, store: SnapshotStore, base_of: Callable[[Manifest], Awaitable[BaseRam | None]]) -> None:
        self._store = store
        self._base_of = base_of
        self._waiting: dict[SnapshotId, None] = {}
        self._running: dict[SnapshotId, asyncio.Task[int]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="compaction")

    async def close(self) -> None:
        """End after the rewrite that is under way: cut off, it would leave files for the next start to sweep."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task, *self._running.values()])

    def sleeps(self, snapshot_id: SnapshotId) -> None:
        """A workspace fell asleep with this snapshot."""
        self._waiting[snapshot_id] = None

    async def out_of_the_way(self, snapshot_id: SnapshotId) -> None:
        """Call before a snapshot is read for a start."""
        self._waiting.pop(snapshot_id, None)
        if snapshot_id in self._running:
            await asyncio.wait([self._running[snapshot_id]])

    async def run_once(self) -> int:
        """Look at everything that fell asleep since; returns bytes freed."""
        freed = 0
        for snapshot_id in list(self._waiting):
            if snapshot_id not in self._waiting:
                continue  # woke meanwhile
            del self._waiting[snapshot_id]
            task = asyncio.create_task(self._compact(snapshot_id))
            self._running[snapshot_id] = task
            task.add_done_callback(lambda _, done=snapshot_id: self._running.pop(done, None))  # type: ignore[misc]
            freed += await asyncio.shield(task)
        return freed

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.run_once()

    async def _compact(self, snapshot_id: SnapshotId) -> int:
        try:
            base = await self._base_of(self._store.manifest(snapshot_id))
            return 0 if base is None else await asyncio.to_thread(compact, self._store, snapshot_id, base)
        except NotFound:
            return 0  # deleted meanwhile
        except (PerdureError, OSError) as error:  # the next one is compacted all the same
            log.warning("a sleeping snapshot was not compacted", snapshot=snapshot_id, error=str(error))
            return 0
