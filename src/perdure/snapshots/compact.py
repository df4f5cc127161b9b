"""Compaction: rewriting what is still needed of a sleeping workspace's segments, so that the rest can go.

What other snapshots use too is rewritten for all of them at once, each place once, when all together need less than half of a
segment. The new segment and each new index are durable before the index's manifest is replaced, one snapshot after another, and
the old segments go when nobody names them any more; a crash at any point leaves each snapshot with one or the other.

A start may come at any time: it reads manifest and index under the store's guard, and pins what they name.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import CorruptSnapshot
from perdure.core.files import create_file, remove, stored_bytes
from perdure.core.ids import SegmentId, SnapshotId
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.bases import Abandoned
from perdure.snapshots.capture import GARBAGE_BYTES_MIN, LIVE_SHARE, mint_segment
from perdure.snapshots.manifest import MANIFEST, BaseRef, FileFact, Manifest
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pagelog import places, rewrite
from perdure.snapshots.pins import Pins
from perdure.snapshots.segments import SegmentWriter, segment_file
from perdure.snapshots.store import SnapshotStore

Segments = frozenset[SegmentId]


def is_worn(store: SnapshotStore, snapshot_id: SnapshotId) -> bool:
    """Whether a rewrite is worth a look: what others need of the segments is not known yet. Reads an index.

    Raises NotFound, CorruptSnapshot naming the file.
    """
    with store.guard:
        manifest = store.manifest(snapshot_id)
        return manifest.memory is not None and any(_victims(store, store.index(manifest)))


def compact(store: SnapshotStore, snapshot_id: SnapshotId, base: BaseRam, enough: threading.Event | None = None) -> int:
    """Rewrite a snapshot's segments of which under half is needed. Returns bytes freed, 0 when it is not worth it, was ``enough``
    before, or the snapshot changed meanwhile.

    For the newest snapshot of a workspace that sleeps. Raises NotFound, CorruptSnapshot naming the file, NoSpace; the snapshot is
    then as it was. Synchronous and heavy: call it in a thread.
    """
    enough = enough or threading.Event()
    with store.guard:
        manifest = store.manifest(snapshot_id)
        if manifest.memory is None:
            return 0
        index = store.index(manifest)
        own, shared = _victims(store, index)
        if not own and not shared:
            return 0
        others = _sharers(store, manifest, shared)
        writer = SegmentWriter(store.segments, mint_segment(), store.disk)
        named = frozenset[SegmentId]().union(*(one.memory.segments for one in (manifest, *others) if one.memory))
        pins = Pins(named | {writer.segment_id}, frozenset())

        def pinned() -> Pins:
            return pins

        store.pin(pinned)
    done = False
    try:
        group, shared = _worth_sharing(store, (manifest, index), others, shared)
        if own or shared:
            after = rewrite(store.segments, [one for _, one in group], base, own | shared, writer, enough)
            writer.sync()
            crashpoint(CrashPoint.COMPACT_WRITTEN)
            done = _replace(store, [one for one, _ in group], after, writer.segment_id, enough)
    except Abandoned:
        pass
    finally:
        writer.close()
        store.unpin(pinned)
        freed = store.sweep([segment_file(name) for name in pins.segments])
    return max(0, freed - stored_bytes(writer.path)) if done else 0


def _victims(store: SnapshotStore, index: PageIndex) -> tuple[Segments, Segments]:
    """Segments that nobody else uses, if they are worth a rewrite together; and of the others those that are if nobody needs more
    of them. What a machine uses stays for it in any case."""
    live = index.live_bytes()
    stored = {name: stored_bytes(store.segments / segment_file(name)) for name in live}
    own = frozenset(name for name in live if store.users(segment_file(name)) == 1)
    if not _is_worth_it(sum(live[name] for name in own), sum(stored[name] for name in own)):
        own = frozenset()
    worn = {name for name in live if store.users(segment_file(name)) > 1 and _is_worth_it(live[name], stored[name])}
    held = store.held() if worn else set()
    return own, frozenset(name for name in worn if segment_file(name) not in held)


def _is_worth_it(live: float, stored: int) -> bool:
    return live < LIVE_SHARE * stored and stored - live >= GARBAGE_BYTES_MIN


def _sharers(store: SnapshotStore, manifest: Manifest, segments: Segments) -> list[Manifest]:
    """Other snapshots that use one of these segments."""
    others = [store.manifest(facts.snapshot_id) for facts in store.complete()] if segments else []
    return [one for one in others if one is not manifest and one.memory is not None and segments & one.memory.segments.keys()]


def _worth_sharing(
    store: SnapshotStore, mine: tuple[Manifest, PageIndex], others: Sequence[Manifest], shared: Segments
) -> tuple[list[tuple[Manifest, PageIndex]], Segments]:
    """Those of the segments that are worth it by what all their users need, and the snapshots that are to be rewritten."""
    group = [mine]
    for other in others:
        assert other.memory is not None and mine[0].memory is not None
        try:
            if other.memory.base == mine[0].memory.base:
                group.append((other, store.index(other)))
                continue
        except CorruptSnapshot:
            pass  # nobody knows what it needs, or it has changed since
        shared -= other.memory.segments.keys()
    worth = frozenset(
        name
        for name in shared
        if _is_worth_it(_needed([index for _, index in group], name), stored_bytes(store.segments / segment_file(name)))
    )
    return [(one, index) for one, index in group if one is mine[0] or worth & index.segments()], worth


def _needed(indexes: Sequence[PageIndex], name: SegmentId) -> float:
    """Bytes of a segment that these indexes need together: of each frame the share of its pages that one of them refers to."""
    needed, seen = 0.0, np.empty(0, np.uint64)
    for index in indexes:
        positions, where = places(index, (name,))
        is_new = np.isin(where, seen, invert=True)
        frame = index.frame[positions[is_new]]
        needed += float((index.frames.length[frame] / index.frames.count[frame]).sum())
        seen = np.concatenate((seen, where[is_new]))
    return needed


def _replace(
    store: SnapshotStore, before: Sequence[Manifest], after: Sequence[PageIndex], name: SegmentId, enough: threading.Event
) -> bool:
    """Whether any of the snapshots has its new index; one that changed meanwhile keeps its own."""
    done = False
    for manifest, index in zip(before, after, strict=True):
        if enough.is_set():
            break
        with suppress(FileNotFoundError):  # deleted meanwhile
            done |= put_index(store, manifest, index, name)
    return done


def put_index(store: SnapshotStore, manifest: Manifest, index: PageIndex, name: str, base: BaseRef | None = None) -> bool:
    """Replace the manifest by one with another index (and base), and remove the old index's file. ``name`` is used once.

    False, and nothing has changed, when the snapshot is not as it was any more; nor has anything after NoSpace.
    """
    assert manifest.memory is not None
    directory = store.snapshots / manifest.snapshot_id
    data = index.to_bytes()
    fact = FileFact(f"ram.{name}.index", len(data), disk_layers.digest_of(data))
    create_file(directory / fact.name, data, mode=0o600, disk=store.disk)
    store.disk.sync_dir(directory)
    crashpoint(CrashPoint.COMPACT_INDEXED)
    memory = replace(manifest.memory, index=fact, segments=index.ends(), total_bytes=index.stored_bytes())
    if base is not None:
        memory = replace(memory, base=base, pages=len(index.pages) + len(index.zeros))
    try:
        replaced = store.replace(manifest, replace(manifest, memory=memory))
    except BaseException:
        if fact.name.encode() not in (directory / MANIFEST).read_bytes():
            remove(directory / fact.name, disk=store.disk)
        raise
    crashpoint(CrashPoint.COMPACT_REPLACED)
    remove(directory / (manifest.memory.index if replaced else fact).name, disk=store.disk)
    return replaced
