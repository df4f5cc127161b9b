"""Cold starts: what a wake touched is noted, and asked of the disk ahead when the next wake finds it out of the page cache.

Before a start a few pages are looked up in the page cache. If most of them are there, as on a host that has been up for a while,
nothing is done. Otherwise the kernel is asked to read, in large pieces and many at once, what the guest would read page by page:
the parts of its memory's base and of its disk that the last wakes touched, what lies below the pages that the restore writes (a
write to a page of a private mapping reads it first), and the pages that the restore decodes. Nobody waits for it.

Some seconds after the guest runs, its memory says which pages of the base it has. What it read of its disk can be seen only when
the page cache was cold before: the pages that are there now and were not. Both are a hint for the next wake of that snapshot, and
of those that are captured later. Hints are no part of snapshots; whatever goes wrong here costs time and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from perdure.core.errors import NotFound, PerdureError
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.machines.driver import PAGE_SIZE, GuestMemory, PageNumbers
from perdure.machines.pagecache import ask_for, resident, resident_share
from perdure.snapshots.baseram import pages_with_data
from perdure.snapshots.capture import MachineRun
from perdure.snapshots.hints import Hint, Ranges, pages_of, ranges_of
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.segments import segment_file
from perdure.snapshots.store import SnapshotStore

#: When a guest that runs again has read what it needs to answer, and its programs have gone on.
NOTED_AFTER_S = 5.0
#: So many pages are looked up, and so many of them must be in the page cache, for a snapshot to be warm.
SAMPLES = 64
WARM_SHARE = 0.75

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Cold:
    """A start whose snapshot was not in the page cache. ``before``: what of its disk layers was."""

    hint: Hint
    before: Mapping[Path, npt.NDArray[np.bool_]]
    asked_bytes: int


@dataclass(slots=True)
class _Watch:
    """What is known of a workspace that is awake."""

    source: SnapshotId
    hint: Hint | None = None
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Warming:
    """One per node. ``noted_after_s`` is for tests."""

    def __init__(self, store: SnapshotStore, noted_after_s: float = NOTED_AFTER_S) -> None:
        self._store = store
        self._noted_after_s = noted_after_s
        self._watches: dict[WorkspaceId, _Watch] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Nothing is cut off: a thread must not go on in a store that is somebody else's."""
        for workspace_id in list(self._watches):
            self.ended(workspace_id)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------------------------------------------------------- before

    def ask(self, run: MachineRun, source: SnapshotId) -> asyncio.Task[Cold | None]:
        """Ask for what a restore and its guest will read, beside it. None if it is there. The task does not fail."""
        return self._begin(asyncio.to_thread(self._ask, run, source), f"warming-{source}")

    def _ask(self, run: MachineRun, source: SnapshotId) -> Cold | None:
        try:
            return self._ask_if_cold(run, source)
        except OSError as error:
            log.info("a snapshot was not read ahead", snapshot=source, error=str(error))
            return None

    def _ask_if_cold(self, run: MachineRun, source: SnapshotId) -> Cold | None:
        base, index, hint = run.spec.base.ram.path, run.index, None
        wanted = np.union1d(index.pages, index.zeros).astype(np.uint32)
        if len(wanted) < SAMPLES:  # else it is soon seen that all is there, and a wake needs no more than that
            hint = self._store.hints.read(source) or Hint()
            wanted = np.union1d(pages_of(hint.ram), wanted).astype(np.uint32)
        if resident_share(base, wanted[:: max(1, len(wanted) // SAMPLES)]) >= WARM_SHARE:
            return None
        if hint is None:
            hint = self._store.hints.read(source) or Hint()
            wanted = np.union1d(pages_of(hint.ram), wanted).astype(np.uint32)
        wanted = wanted[wanted < index.page_count]
        asked = ask_for(base, _bytes(ranges_of(wanted[pages_with_data(base, index.page_count)[wanted]])))
        for name, end in index.ends().items():
            asked += ask_for(self._store.segments / segment_file(name), [(0, end)])
        before = {layer.path: resident(layer.path) for layer in run.chain().layers}
        for path in before:
            if path.name in hint.files:
                asked += ask_for(path, _bytes(hint.files[path.name]))
        return Cold(hint, before, asked)

    # -------------------------------------------------------------------------------------------------------------- after

    def watch(self, run: MachineRun, memory: GuestMemory, source: SnapshotId, asked: asyncio.Task[Cold | None]) -> None:
        """A guest runs again: note some time later what it has touched."""
        workspace_id = run.spec.workspace_id
        self.ended(workspace_id)
        watch = self._watches[workspace_id] = _Watch(source)
        base, index = run.spec.base.ram.path, run.index  # as they are: captures move on

        def note(cold: Cold | None) -> Hint:
            ram = ranges_of(_of_base(memory, base, index))
            return Hint(ram, (self._store.hints.read(source) or Hint()).files if cold is None else _of_disk(cold))

        async def later() -> None:
            cold = await asked
            try:
                async with asyncio.timeout(self._noted_after_s):
                    await watch.is_over.wait()
            except TimeoutError:
                watch.hint = await asyncio.to_thread(note, cold)
                await asyncio.to_thread(self._put, source, watch.hint)

        self._begin(_quietly(later(), source), f"hint-{workspace_id}")

    def captured(self, workspace_id: WorkspaceId, snapshot_id: SnapshotId) -> None:
        """What the next wake of a new snapshot will touch is what this one has touched."""
        watch = self._watches.get(workspace_id)
        if watch is not None:
            self._begin(_quietly(asyncio.to_thread(self._pass_on, watch, snapshot_id), snapshot_id), f"hint-{snapshot_id}")

    def _pass_on(self, watch: _Watch, snapshot_id: SnapshotId) -> None:
        hint = watch.hint or self._store.hints.read(watch.source)
        if hint is not None:
            self._put(snapshot_id, hint)

    def ended(self, workspace_id: WorkspaceId) -> None:
        watch = self._watches.pop(workspace_id, None)
        if watch is not None:
            watch.is_over.set()

    def _put(self, snapshot_id: SnapshotId, hint: Hint) -> None:
        """The hint of a snapshot that went meanwhile goes, too."""
        self._store.hints.write(snapshot_id, hint)
        try:
            self._store.manifest(snapshot_id)
        except NotFound:
            self._store.hints.drop(snapshot_id)


async def _quietly(work: Awaitable[None], snapshot_id: SnapshotId) -> None:
    """The machine ended, or the disk is full: then there is no hint."""
    try:
        await work
    except (PerdureError, OSError) as error:
        log.info("what a wake touched was not noted", snapshot=snapshot_id, error=str(error))


def _of_base(memory: GuestMemory, base: Path, index: PageIndex) -> PageNumbers:
    """Pages that the guest has, of those that are not holes of its base and were not written by the restore."""
    restored = np.union1d(index.pages, index.zeros)
    touched = np.setdiff1d(memory.touched_pages(), restored, assume_unique=True).astype(np.uint32)
    return touched[pages_with_data(base, memory.page_count)[touched]]


def _of_disk(cold: Cold) -> dict[str, Ranges]:
    """What is in the page cache now and was not before, with what was known already."""
    files = {}
    for path, before in cold.before.items():
        try:
            now = resident(path)
        except FileNotFoundError:
            continue  # merged meanwhile
        count = min(len(now), len(before))
        known = cold.hint.files.get(path.name)
        grown = np.flatnonzero(now[:count] & ~before[:count])
        ranges = ranges_of(np.union1d(grown, [] if known is None else pages_of(known)).astype(np.uint32))
        if len(ranges):
            files[path.name] = ranges
    return files


def _bytes(ranges: Ranges) -> Iterable[tuple[int, int]]:
    return ((int(first) * PAGE_SIZE, int(count) * PAGE_SIZE) for first, count in ranges)
