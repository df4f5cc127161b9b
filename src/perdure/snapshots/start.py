"""The beginning of a run: the intent on record and an active layer to write, before any machine starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from perdure.core.errors import Conflict, CorruptSnapshot, InvalidRequest
from perdure.core.ids import DiskId, SnapshotId
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.capture import MachineRun, RunSpec, create_overlay, mint_disk
from perdure.snapshots.manifest import LiveRecord, Manifest
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.store import SnapshotStore


def begin(
    store: SnapshotStore, spec: RunSpec, source: SnapshotId | None, *, memory: bool, devices: Path | None = None
) -> MachineRun:
    """Record the intent of a start and make its active layer; all durable when this returns. Call it in a thread.

    From a snapshot with its memory (``memory``) or only its disk; from the golden snapshot with ``source`` None and its
    ``devices``; or from nothing but the image's disk. Raises NotFound, CorruptSnapshot naming the file, NoSpace.
    """
    with store.guard:
        manifest = None if source is None else store.manifest(source)
        own: tuple[DiskId, ...] = ()
        index = PageIndex(spec.base.ram.page_count)
        if manifest is not None:
            _fits(manifest, spec, memory)
            store.layers.check_heads(manifest.layers)
            own = manifest.disk_ids
            if memory:
                store.own_base(manifest)
                store.check_segments(manifest)
                index, devices = store.index(manifest), store.devices(manifest)
                if index.page_count != spec.base.ram.page_count:
                    raise InvalidRequest(f"Snapshot {source} has other memory than its base {spec.base.ram.path.name}.")
        if any(live.workspace_id == spec.workspace_id for live in store.live()):
            raise Conflict(
                f"Workspace {spec.workspace_id} has an earlier start on record.",
                hint="End or salvage that one first; its disk may hold news.",
            )
        disk_id = mint_disk()
        live = LiveRecord(
            spec.workspace_id,
            spec.tenant_id,
            spec.generation,
            spec.image,
            spec.size,
            spec.disk_gib,
            spec.base.disk_ref,
            (*own, disk_id),
            source,
        )
        run = MachineRun(store, spec, live, index, devices)
    try:
        store.record(live)
        create_overlay(store, disk_id, spec.disk_gib)
    except BaseException:
        run.end()
        raise
    return run


def take_over(store: SnapshotStore, spec: RunSpec, generation: int) -> MachineRun:
    """Record a disk boot that goes on with the layers of ``generation``, whose machine is dead. Memory starts anew.

    Raises NotFound, StaleGeneration, CorruptSnapshot or NoSpace; the earlier record is then still there. A run that fails to boot
    must be ended with ``keep_layers``.
    """
    before = store.live_record(spec.workspace_id, generation)
    layers = before.layers
    for disk_id in layers[:-1]:
        disk_layers.inspect(store.disks / disk_layers.disk_file(disk_id))
    live = replace(before, generation=spec.generation, disk_gib=spec.disk_gib, layers=layers, pid=None, pid_started=None)
    fresh = _needs_new_layer(store, before, spec)
    if fresh is not None:
        live = replace(live, layers=(*_usable(store, layers), fresh))
    run = MachineRun(store, spec, live, PageIndex(spec.base.ram.page_count), None)
    try:
        if fresh is not None:
            create_overlay(store, fresh, spec.disk_gib)
        # The record comes last here: until then the earlier one stands, and a layer that nobody names is swept.
        store.record(live)
    except BaseException:
        run.end(keep_layers=True)
        store.sweep([disk_layers.disk_file(name) for name in live.layers])
        raise
    return run


def _needs_new_layer(store: SnapshotStore, before: LiveRecord, spec: RunSpec) -> DiskId | None:
    """A layer to put on top: when the last one belongs to a snapshot, is not whole, or is smaller than the disk is to be."""
    last = before.layers[-1]
    whole = last in _usable(store, before.layers)
    return mint_disk() if not whole or store.is_frozen(last) or spec.disk_gib > before.disk_gib else None


def _usable(store: SnapshotStore, layers: tuple[DiskId, ...]) -> tuple[DiskId, ...]:
    """All layers, without a last one that a crash caught while it was made."""
    try:
        disk_layers.inspect(store.disks / disk_layers.disk_file(layers[-1]))
    except CorruptSnapshot:
        return layers[:-1]
    return layers


def _fits(manifest: Manifest, spec: RunSpec, memory: bool) -> None:
    base = spec.base
    if manifest.disk_base != base.disk_ref:
        raise InvalidRequest(f"Snapshot {manifest.snapshot_id} lies on {manifest.disk_base}, not on {base.disk_ref}.")
    if memory and manifest.memory is not None and manifest.memory.base != base.ram_ref:
        raise InvalidRequest(f"The memory of {manifest.snapshot_id} lies on {manifest.memory.base}, not on {base.ram_ref}.")
    if spec.disk_gib < manifest.disk_gib:
        raise InvalidRequest(
            f"A disk of {spec.disk_gib} GiB is smaller than the snapshot's {manifest.disk_gib} GiB.", hint="Disks only grow."
        )
