"""Compaction: rewriting what is still needed of a sleeping workspace's segments, so that the rest can go.

Only segments that no other snapshot uses are looked at: rewriting shared ones would add bytes and free none. The new segment and
index are durable before the manifest is replaced, and the old ones go after that; a crash at any point leaves one or the other.

A start may come at any time: it reads manifest and index under the store's guard, and pins what they name.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.files import create_file, remove, stored_bytes
from perdure.core.ids import SegmentId, SnapshotId
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.bases import Abandoned
from perdure.snapshots.capture import GARBAGE_BYTES_MIN, LIVE_SHARE, mint_segment
from perdure.snapshots.manifest import MANIFEST, BaseRef, FileFact, Manifest
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pagelog import rewrite
from perdure.snapshots.pins import Pins
from perdure.snapshots.segments import SegmentWriter, segment_file
from perdure.snapshots.store import SnapshotStore


def compact(store: SnapshotStore, snapshot_id: SnapshotId, base: BaseRam, enough: threading.Event | None = None) -> int:
    """Rewrite a snapshot's own segments if under half of them is needed. Returns bytes freed, 0 when it is not worth it, was
    ``enough`` before, or the snapshot changed meanwhile.

    For the newest snapshot of a workspace that sleeps. Raises NotFound, CorruptSnapshot naming the file, NoSpace; the snapshot is
    then as it was. Synchronous and heavy: call it in a thread.
    """
    enough = enough or threading.Event()
    with store.guard:
        manifest = store.manifest(snapshot_id)
        if manifest.memory is None:
            return 0
        index = store.index(manifest)
        victims = _worth_rewriting(store, index)
        if not victims:
            return 0
        writer = SegmentWriter(store.segments, mint_segment(), store.disk)
        pins = Pins(index.segments() | {writer.segment_id}, frozenset())

        def pinned() -> Pins:
            return pins

        store.pin(pinned)
    done = False
    try:
        compacted = rewrite(store.segments, index, base, victims, writer, enough)
        writer.sync()
        crashpoint(CrashPoint.COMPACT_WRITTEN)
        done = not enough.is_set() and put_index(store, manifest, compacted, writer.segment_id)
    except Abandoned:
        pass
    finally:
        writer.close()
        store.unpin(pinned)
        freed = store.sweep([segment_file(name) for name in pins.segments])
    return max(0, freed - stored_bytes(writer.path)) if done else 0


def _worth_rewriting(store: SnapshotStore, index: PageIndex) -> frozenset[SegmentId]:
    live = {name: size for name, size in index.live_bytes().items() if store.users(segment_file(name)) == 1}
    total = sum(stored_bytes(store.segments / segment_file(name)) for name in live)
    needed = sum(live.values())
    return frozenset(live) if needed < LIVE_SHARE * total and total - needed >= GARBAGE_BYTES_MIN else frozenset()


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
