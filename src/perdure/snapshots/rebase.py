"""Rebase: a sleeping workspace whose memory has become too different from its base gets a base of its own.

A wake writes every changed page into the new machine, which for a gigabyte takes seconds. After a rebase it maps the private base
and writes nothing; its forks share that one file, and what is captured later are differences from it. The new base is written
beside everything else, and durable before the manifest names it; what only the old index needed goes after that. A crash at any
point leaves the snapshot with the one or the other, and opening the store removes what it has no use for.

A start may come at any time: it reads the manifest under the store's guard, and finds it as it was or as it will be.
"""

from __future__ import annotations

import threading

import numpy as np

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import NoSpace
from perdure.core.files import free_bytes
from perdure.core.ids import SnapshotId
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages
from perdure.snapshots.baseram import BaseRam, pages_with_data
from perdure.snapshots.bases import Abandoned, check_base, write_base
from perdure.snapshots.capture import mint_base
from perdure.snapshots.compact import put_index
from perdure.snapshots.manifest import BaseFact, BaseRef
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pageread import SegmentReaders, read_at
from perdure.snapshots.pins import Pins
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import SnapshotFacts

#: More than this share of its RAM is changed: a small workspace is rebased before it reaches the setting's megabytes.
SHARE_MAX = 0.6
#: A rebase is a convenience: it leaves at least as much room on the disk as it takes.
ROOM_LEFT = 2


def is_worthwhile(facts: SnapshotFacts, over_mib: int) -> bool:
    """Whether so much of a snapshot's memory differs from its base that it should have one of its own. 0 MiB: never."""
    changed, ram = facts.pages * PAGE_SIZE, facts.size.memory_mib << 20
    return over_mib > 0 and changed > min(over_mib << 20, SHARE_MAX * ram)


def rebase(store: SnapshotStore, snapshot_id: SnapshotId, base: BaseRam, enough: threading.Event) -> bool:
    """Give a snapshot's memory a private base; ``base`` is what it lies on now, and intact if it is a golden's. Whether that was
    done.

    It is not when it was ``enough`` before, when the snapshot changed or went meanwhile, or has no memory. Raises NotFound,
    CorruptSnapshot naming the file, NoSpace; the snapshot is then as it was. Synchronous and heavy, but of one thread alone.
    """
    base_id = mint_base()
    with store.guard:
        manifest = store.manifest(snapshot_id)
        if manifest.memory is None:
            return False
        index = store.index(manifest)
        before = Pins.of(manifest)
        pins = Pins(before.segments, before.disks, before.bases | {base_id})

        def pinned() -> Pins:
            return pins

        store.pin(pinned)
    try:
        _check_room(store, index, base)
        if (own := manifest.private_base) is not None:
            _check_whole(store, own, enough)
        crashpoint(CrashPoint.REBASE_BEGUN)
        with SegmentReaders(store.segments) as readers:
            readers.open_all(index.frames.ids)
            fact = write_base(store.bases, base_id, base, _Over(readers, index, base), enough, store.disk)
        crashpoint(CrashPoint.REBASE_WRITTEN)
        if enough.is_set():
            return False
        ref = BaseRef(manifest.memory.base.image, None, fact)
        done = put_index(store, manifest, PageIndex(index.page_count), base_id, ref)
        crashpoint(CrashPoint.REBASE_PUBLISHED)
        return done
    except Abandoned:
        return False
    finally:
        store.unpin(pinned)
        store.sweep(pins.files())


def _check_whole(store: SnapshotStore, own: BaseFact, enough: threading.Event) -> None:
    """Damage that was copied would look intact."""

    def told(_count: int) -> None:
        if enough.is_set():
            raise Abandoned

    check_base(store.bases, own, told, content=True)


class _Over:
    """Puts the pages of an index over those of its base."""

    def __init__(self, readers: SegmentReaders, index: PageIndex, base: BaseRam) -> None:
        self._readers = readers
        self._index = index
        self._base = base

    def __call__(self, pages: PageNumbers, content: Pages) -> None:
        index, bounds = self._index, (pages[0], pages[-1] + 1)
        low, high = np.searchsorted(index.zeros, bounds)
        content[index.zeros[low:high] - pages[0]] = 0
        low, high = np.searchsorted(index.pages, bounds)
        if low < high:
            content[index.pages[low:high] - pages[0]] = read_at(self._readers, index, np.arange(low, high), self._base)


def _check_room(store: SnapshotStore, index: PageIndex, base: BaseRam) -> None:
    there = pages_with_data(base.path, base.page_count)
    there[index.pages] = True
    there[index.zeros] = False
    needed = int(there.sum()) * PAGE_SIZE
    if free_bytes(store.root) < ROOM_LEFT * needed:
        raise NoSpace(
            f"A private base of {needed >> 20} MiB would leave too little room on the disk.",
            hint="Delete snapshots, or give the store a larger disk; the workspace wakes more slowly until then.",
        )
