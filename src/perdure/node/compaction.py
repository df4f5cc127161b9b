"""Background work on what sleeps, one workspace at a time. A disk on too many layers gets fewer (``snapshots.merge``). A memory
too different from its base gets one of its own (``snapshots.rebase``); of one that is not, segments of which little is needed are
rewritten (``snapshots.compact``).

A wake that comes before takes the workspace off the list. One that comes in the middle tells it that it is enough and does not
wait, since a start finds the one disk, base or index, or the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from perdure.core.errors import NotFound, PerdureError
from perdure.core.ids import SnapshotId
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.compact import compact, is_worn
from perdure.snapshots.manifest import Manifest
from perdure.snapshots.merge import merge
from perdure.snapshots.rebase import is_worthwhile, rebase
from perdure.snapshots.store import SnapshotStore

#: How long after falling asleep a snapshot is looked at; by then retention has dropped what it supersedes.
INTERVAL_S = 30.0

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Work:
    """On one snapshot. ``enough`` ends it, and that nothing more follows."""

    task: asyncio.Task[int] | None = None
    enough: threading.Event = field(default_factory=threading.Event)


class Compaction:
    """``base_of`` finds the RAM that a snapshot lies on; ``rebase_mib`` is the setting, 0 never; ``rebased`` hears of each."""

    def __init__(
        self,
        store: SnapshotStore,
        base_of: Callable[[Manifest], Awaitable[BaseRam | None]],
        rebase_mib: int = 0,
        rebased: Callable[[SnapshotId], None] = lambda _snapshot_id: None,
    ) -> None:
        self._store = store
        self._base_of = base_of
        self._rebase_mib = rebase_mib
        self._rebased = rebased
        self._waiting: dict[SnapshotId, None] = {}
        self._running: dict[SnapshotId, _Work] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with what an earlier process left undone. Nobody has noted that: the newest snapshot of everyone is looked at."""
        for snapshot_id in {facts.workspace_id: facts.snapshot_id for facts in self._store.complete()}.values():
            self.sleeps(snapshot_id)
        self._task = asyncio.create_task(self._work(), name="compaction")

    async def close(self) -> None:
        """End what is under way in its own order: cut off, it would leave files for the next start to sweep. What waits is left
        to that start, whoever goes through the list."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            for work in self._running.values():
                work.enough.set()
            await asyncio.wait([self._task, *(work.task for work in self._running.values() if work.task is not None)])

    def sleeps(self, snapshot_id: SnapshotId) -> None:
        """A workspace fell asleep with this snapshot."""
        self._waiting[snapshot_id] = None

    def out_of_the_way(self, snapshot_id: SnapshotId) -> bool:
        """Call before a snapshot is read for a start. Whether something was still to be done: if the workspace sleeps on after
        all, or it was a fork that started, say so with ``sleeps``."""
        listed = snapshot_id in self._waiting
        self._waiting.pop(snapshot_id, None)
        work = self._running.get(snapshot_id)
        if work is None:
            return listed
        work.enough.set()
        return True

    async def run_once(self) -> int:
        """Look at everything that fell asleep since; returns bytes freed by rewriting."""
        freed = 0
        for snapshot_id in list(self._waiting):
            if snapshot_id not in self._waiting:
                continue  # woke meanwhile
            del self._waiting[snapshot_id]
            work = self._running[snapshot_id] = _Work()
            work.task = asyncio.create_task(self._do(snapshot_id, work))
            work.task.add_done_callback(lambda _, done=snapshot_id: self._running.pop(done, None))  # type: ignore[misc]
            freed += await asyncio.shield(work.task)
        return freed

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.run_once()

    async def _do(self, snapshot_id: SnapshotId, work: _Work) -> int:
        """The disk first, and each for itself: what keeps the one from being done need not concern the other."""
        await self._attempt(snapshot_id, self._merge(snapshot_id, work))
        return await self._attempt(snapshot_id, self._memory(snapshot_id, work))

    async def _merge(self, snapshot_id: SnapshotId, work: _Work) -> int:
        if fewer := await asyncio.to_thread(merge, self._store, snapshot_id, work.enough):
            log.info("a sleeping workspace's disk layers were merged", snapshot=snapshot_id, fewer=fewer)
        return 0

    async def _memory(self, snapshot_id: SnapshotId, work: _Work) -> int:
        manifest = self._store.manifest(snapshot_id)
        is_large = is_worthwhile(manifest.facts(), self._rebase_mib)
        if not is_large and not await asyncio.to_thread(is_worn, self._store, snapshot_id):
            return 0  # most are not: what they lie on need not be read for that
        base = await self._base_of(manifest)
        if base is None or work.enough.is_set():
            return 0
        if not is_large:
            return await asyncio.to_thread(compact, self._store, snapshot_id, base, work.enough)
        if await asyncio.to_thread(rebase, self._store, snapshot_id, base, work.enough):
            self._rebased(snapshot_id)
            log.info("a sleeping workspace was given a base of its own", snapshot=snapshot_id)
        return 0

    async def _attempt(self, snapshot_id: SnapshotId, doing: Awaitable[int]) -> int:
        try:
            return await doing
        except NotFound:
            return 0  # deleted meanwhile
        except (PerdureError, OSError) as error:  # the next one is looked at all the same
            log.warning("a sleeping snapshot was not compacted", snapshot=snapshot_id, error=str(error))
            return 0
