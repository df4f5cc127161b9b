"""Merge: the disk of a sleeping workspace lies on fewer layers.

Every sleep leaves a layer behind, and what a wake and the guest's reads cost grows with them. Here adjacent layers are written
together into a new one, which the snapshot then names in their place. None of them is changed: those that only this snapshot used
go after that, others stay with whoever else uses them. The new layer is durable before the manifest names it, so a crash at any
point leaves the snapshot with the ones or with the other, and opening the store removes what nobody names.

A start may come at any time: it reads the manifest under the store's guard, and finds it as it was or as it will be.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import NoSpace
from perdure.core.files import free_bytes, stored_bytes
from perdure.core.ids import SnapshotId
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.bases import Abandoned
from perdure.snapshots.capture import mint_disk
from perdure.snapshots.clusters import Union, Written
from perdure.snapshots.layers import CLUSTER, LayerFacts, disk_file
from perdure.snapshots.manifest import DiskFact, Manifest
from perdure.snapshots.pins import Pins
from perdure.snapshots.rebase import ROOM_LEFT
from perdure.snapshots.store import SnapshotStore

#: So many layers of its own a workspace may sleep on. Awake it may have twice as many (``node.resident``).
LAYERS_ASLEEP = 8


@dataclass(frozen=True, slots=True)
class Link:
    """A layer of a chain. ``is_own``: it would go if this snapshot did not name it."""

    fact: DiskFact
    is_own: bool
    facts: LayerFacts

    @property
    def cost(self) -> int:
        """Of merging it, in bytes written and, where others keep it, held twice."""
        return self.fact.stored * (1 if self.is_own else 2)


def is_deep(manifest: Manifest) -> bool:
    """Whether a sleeping workspace's disk should lie on fewer layers."""
    return len(manifest.layers) > LAYERS_ASLEEP


def merge(store: SnapshotStore, snapshot_id: SnapshotId, enough: threading.Event) -> int:
    """Bring a snapshot down to as many layers as one may sleep on. Returns how many fewer it has.

    Fewer than that, or none, when it was ``enough`` before, when the snapshot changed or went meanwhile, or when what is too much
    cannot be merged: layers of earlier releases, and of disks that have grown. Raises NotFound, CorruptSnapshot naming the file,
    NoSpace; the snapshot is then as it was. Synchronous and heavy, but of one thread alone.
    """
    fewer = 0
    while count := _merge_some(store, snapshot_id, enough):
        fewer += count
    return fewer


def _merge_some(store: SnapshotStore, snapshot_id: SnapshotId, enough: threading.Event) -> int:
    disk_id = mint_disk()
    with store.guard:
        manifest = store.manifest(snapshot_id)
        if not is_deep(manifest) or enough.is_set():
            return 0
        alone = store.alone(manifest)
        before = Pins.of(manifest)
        pins = replace(before, disks=before.disks | {disk_id})

        def pinned() -> Pins:
            return pins

        store.pin(pinned)
    try:
        chain = [
            Link(fact, disk_file(fact.disk_id) in alone, disk_layers.inspect(store.disks / disk_file(fact.disk_id)))
            for fact in manifest.layers
        ]
        part = choose(chain, LAYERS_ASLEEP)
        if part is None:
            return 0
        crashpoint(CrashPoint.MERGE_BEGUN)
        path = store.disks / disk_file(disk_id)
        written = _write(store, path, manifest.layers[part], enough)
        store.disk.sync_dir(store.disks)
        crashpoint(CrashPoint.MERGE_WRITTEN)
        if enough.is_set():
            return 0
        merged = DiskFact(disk_id, written.size, stored_bytes(path), written.checksum)
        layers = (*manifest.layers[: part.start], merged, *manifest.layers[part.stop :])
        done = store.replace(manifest, replace(manifest, layers=layers))
        crashpoint(CrashPoint.MERGE_PUBLISHED)
        return len(manifest.layers) - len(layers) if done else 0
    except Abandoned:
        return 0
    finally:
        store.unpin(pinned)
        store.sweep(pins.files())


def choose(chain: Sequence[Link], most: int) -> slice | None:
    """The adjacent layers that bring a chain to ``most`` at the least cost, and the lowest of several such; fewer if it must be.

    The newest layer is none of them: what a snapshot has added stays known. Only layers of one size go together, for where a
    smaller one ends, the disk is empty and not what lies below.
    """
    for length in range(len(chain) - most + 1, 1, -1):
        parts = [slice(start, start + length) for start in range(len(chain) - length)]
        costs = {part.start: sum(link.cost for link in chain[part]) for part in parts if _go_together(chain[part])}
        if costs:
            start = min(costs, key=lambda at: costs[at])
            return slice(start, start + length)
    return None


def _link(store: SnapshotStore, fact: DiskFact, alone: frozenset[str]) -> Link:
    name = disk_file(fact.disk_id)
    return Link(fact, name in alone, disk_layers.inspect(store.disks / name))


def _go_together(links: Sequence[Link]) -> bool:
    return all(link.facts.is_plain for link in links) and len({link.facts.virtual_bytes for link in links}) == 1


def _write(store: SnapshotStore, path: Path, facts: Sequence[DiskFact], enough: threading.Event) -> Written:
    """What these layers hold together. Every byte of them is checked before: damage that is copied is not found any more."""

    def told(_count: int) -> None:
        if enough.is_set():
            raise Abandoned

    for fact in facts:
        store.layers.read(fact, told)
    with Union([store.disks / disk_file(fact.disk_id) for fact in facts], enough) as union:
        needed = union.layout.clusters * CLUSTER
        if free_bytes(store.root) < ROOM_LEFT * needed:
            raise NoSpace(
                f"Merged disk layers of {needed >> 20} MiB would leave too little room on the disk.",
                hint="Delete snapshots, or give the store a larger disk; the workspace wakes more slowly until then.",
            )
        return union.write(path, store.disk)
