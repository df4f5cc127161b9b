"""What snapshots weigh on disk, and how much of it would become free if one went."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.core.errors import CorruptSnapshot, NotFound
from perdure.core.files import stored_bytes
from perdure.core.ids import SnapshotId
from perdure.snapshots.manifest import MANIFEST
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import StoredSizes


def weigh(store: SnapshotStore, snapshot_ids: Iterable[SnapshotId]) -> dict[SnapshotId, StoredSizes]:
    """Those that are there and can be read; the others are absent. Call it in a thread."""
    found = {}
    for snapshot_id in snapshot_ids:
        try:
            manifest = store.manifest(snapshot_id)
        except (NotFound, CorruptSnapshot, OSError):
            continue
        names = (manifest.memory.index.name, manifest.memory.devices.name) if manifest.memory else ()
        directory = sum(stored_bytes(store.snapshots / snapshot_id / name) for name in (MANIFEST, *names))
        shared = {name: stored_bytes(store.place_of(name)) for name in manifest.stored_files()}
        own = sum(shared[name] for name in store.alone(manifest))
        found[snapshot_id] = StoredSizes(directory + sum(shared.values()), directory + own)
    return found
