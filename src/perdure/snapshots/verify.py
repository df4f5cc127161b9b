"""A full check of stored snapshots: every byte that a wake would read, and those that it trusts.

What a wake checks, before its guest runs one instruction: the checksums of manifest, index and device state; header and length of
every segment; the checksum of every frame and page, while it is read; every disk layer, but for large ones that this process has
read before (``frozen``). It does not read the gigabytes that all workspaces of an image share. This module reads all.

Files are shared by snapshots, so one ``Verifier`` serves a whole pass and reads each of them once. Synchronous: call it in a
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import DiskId, SegmentId, SnapshotId
from perdure.machines.driver import PageNumbers
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.bases import check_base
from perdure.snapshots.layers import disk_file
from perdure.snapshots.manifest import MANIFEST, BaseFact, DiskFact, Manifest, base_file, is_as_written
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pins import Pins
from perdure.snapshots.segments import SegmentReader, corrupt, decode_head, decode_pages, needs_base, page_hashes, segment_file
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import Damage

#: Hears of each file that is read, by its name below the store, with the bytes read since it was last told. May raise to end it.
Told = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Found:
    """``disk_intact``: nothing that a boot of the snapshot's disk reads is damaged."""

    damage: tuple[Damage, ...]
    disk_intact: bool


class Verifier:
    """One pass. Remembers the layers, bases and frames it has read."""

    def __init__(self, store: SnapshotStore, told: Told) -> None:
        self._store = store
        self._told = told
        self._layers: dict[tuple[DiskId, int, str], Damage | None] = {}
        self._frames: dict[tuple[SegmentId, int, int], PageNumbers] = {}
        self._bases: dict[BaseFact, Damage | None] = {}

    def snapshot(self, snapshot_id: SnapshotId, base: BaseRam | None) -> Found:
        """Check a snapshot's own files; ``base`` is the intact RAM below its memory unless that is private, without which pages
        that are stored as differences are only checked for their frames. Raises NotFound when there is no such snapshot (any
        more)."""
        while True:
            try:
                with _held(self._store, snapshot_id) as manifest:
                    found = self._check(manifest, base)
            except CorruptSnapshot as error:  # the manifest itself: nothing is known of the rest
                return Found((damage_of(error, f"snapshots/{snapshot_id}/{MANIFEST}"),), disk_intact=False)
            # A compaction may have put another index in the place of the one that was being read.
            if not found.damage or self._store.manifest(snapshot_id) == manifest:
                return found

    def _check(self, manifest: Manifest, base: BaseRam | None) -> Found:
        self._check_manifest(manifest)
        disks = [found for fact in manifest.layers if (found := self._layer(fact)) is not None]
        return Found((*disks, *self._memory(manifest, base)), disk_intact=not disks)

    def _check_manifest(self, manifest: Manifest) -> None:
        """The file is read again: what this process remembers of it proves nothing about the next start."""
        name = f"snapshots/{manifest.snapshot_id}/{MANIFEST}"
        try:
            data = (self._store.root / name).read_bytes()
        except FileNotFoundError as error:
            raise CorruptSnapshot(f"The record {name} is missing.", file=name) from error
        except OSError as error:
            raise CorruptSnapshot(f"The record {name} cannot be read ({error.strerror}).", file=name) from error
        self._told(name, len(data))
        written = Manifest.from_bytes(data, name)
        if not is_as_written(data) or (written != manifest and self._store.manifest(manifest.snapshot_id) == manifest):
            raise CorruptSnapshot(f"The record {name} is damaged: it is not the one that was written.", file=name)

    def _layer(self, fact: DiskFact) -> Damage | None:
        key = (fact.disk_id, fact.size, fact.checksum)
        if key not in self._layers:
            self._layers[key] = self._read_layer(fact)
        return self._layers[key]

    def _read_layer(self, fact: DiskFact) -> Damage | None:
        name = f"disks/{disk_file(fact.disk_id)}"
        try:
            self._store.layers.read(fact, lambda count: self._told(name, count))
            self._store.layers.check_heads((fact,))
        except CorruptSnapshot as error:
            return damage_of(error, name)
        return None

    def _memory(self, manifest: Manifest, base: BaseRam | None) -> Iterator[Damage]:
        if manifest.memory is None:
            return
        below = f"snapshots/{manifest.snapshot_id}"
        if (own := manifest.private_base) is not None:
            base, damage = self._own_base(own)
            if damage is not None:
                yield damage
        try:
            self._told(f"{below}/{manifest.memory.devices.name}", manifest.memory.devices.size)
            self._store.devices(manifest)
        except CorruptSnapshot as error:
            yield damage_of(error, f"{below}/{manifest.memory.devices.name}")
        try:
            self._told(f"{below}/{manifest.memory.index.name}", manifest.memory.index.size)
            index = self._store.index(manifest)
        except CorruptSnapshot as error:
            yield damage_of(error, f"{below}/{manifest.memory.index.name}")
            index = None  # where the pages are is not known any more; that the segments are there still is
        for segment, end in manifest.memory.segments.items():
            try:
                self._segment(segment, end, index, base)
            except CorruptSnapshot as error:
                yield damage_of(error, f"segments/{segment_file(segment)}")

    def _own_base(self, fact: BaseFact) -> tuple[BaseRam | None, Damage | None]:
        """A private base if it is whole, or what is wrong with it."""
        name = f"bases/{base_file(fact.base_id)}"
        if fact not in self._bases:
            try:
                check_base(self._store.bases, fact, lambda count: self._told(name, count), content=True)
                self._bases[fact] = None
            except CorruptSnapshot as error:
                self._bases[fact] = damage_of(error, name)
        damage = self._bases[fact]
        return (BaseRam(self._store.bases / base_file(fact.base_id)) if damage is None else None), damage

    def _segment(self, segment: SegmentId, end: int, index: PageIndex | None, base: BaseRam | None) -> None:
        reader = SegmentReader(self._store.segments, segment)
        try:
            reader.check_end(end)
            for number in _frames_in(index, segment):
                assert index is not None
                pages = self._frame(reader, segment, index, number, base)
                mine = index.frame == number
                slots = index.slot[mine]
                if int(slots.max(initial=0)) >= len(pages) or not np.array_equal(pages[slots], index.pages[mine]):
                    raise corrupt(reader.name, "a frame holds other pages than its index says")
        finally:
            reader.close()

    def _frame(
        self, reader: SegmentReader, segment: SegmentId, index: PageIndex, number: int, base: BaseRam | None
    ) -> PageNumbers:
        """The numbers of a frame's pages, all of which were checked, also those that this index does not need."""
        offset, length = int(index.frames.offset[number]), int(index.frames.length[number])
        known = self._frames.get((segment, offset, length))
        if known is not None:
            return known
        self._told(f"segments/{reader.name}", length)
        stored = memoryview(reader.stored(offset, length))
        frame = decode_head(stored, reader.name)
        if any(stored[len(stored) - (-len(frame.payload) % 8) :]):
            raise corrupt(reader.name, "there is something between two frames")
        sparse = needs_base(frame.codec)
        if base is not None or not sparse:
            below = base.read(frame.pages) if sparse and base is not None else np.empty((0, 0), np.uint8)
            content = decode_pages(frame, below, reader.name)
            if not np.array_equal(page_hashes(content), frame.hashes):
                raise corrupt(reader.name, "a page's checksum does not hold")
        self._frames[segment, offset, length] = frame.pages.copy()
        return self._frames[segment, offset, length]


def damage_of(error: CorruptSnapshot, file: str) -> Damage:
    return Damage(error.file or file, error.message)


def _frames_in(index: PageIndex | None, segment: SegmentId) -> Iterable[int]:
    if index is None or segment not in index.frames.ids:
        return ()
    return [int(number) for number in np.flatnonzero(index.frames.segment == index.frames.ids.index(segment))]


@contextmanager
def _held(store: SnapshotStore, snapshot_id: SnapshotId) -> Iterator[Manifest]:
    """A snapshot whose segments and disks stay until it has been read, whatever is deleted or rewritten meanwhile."""
    with store.guard:
        manifest = store.manifest(snapshot_id)
        pins = Pins.of(manifest)

        def pinned() -> Pins:
            return pins

        store.pin(pinned)
    try:
        yield manifest
    finally:
        store.unpin(pinned)
        store.sweep(manifest.stored_files())
