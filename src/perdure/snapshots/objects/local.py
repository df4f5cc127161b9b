"""Snapshots between their two homes: from this node's files into the store, and back onto a node that has never seen them.

In the store a snapshot is an item of its tenant, complete in itself but for its image: the layers of its disk, the device state
and the private base of its memory, if it has one, in blocks, its memory in regions, and its local manifest among the facts. Its
image is another item, which it needs. A node that fetches one writes segments of its own; what it then has is the same snapshot,
page by page and byte by byte.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import Conflict, CorruptSnapshot
from perdure.core.files import create_file, make_dir, remove, rename
from perdure.core.ids import BaseId, DiskId, SnapshotId
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.bases import check_base
from perdure.snapshots.capture import mint_base, mint_disk, mint_segment
from perdure.snapshots.layers import disk_file
from perdure.snapshots.manifest import (
    DEVICES,
    INDEX,
    MANIFEST,
    BaseFact,
    BaseRef,
    DiskFact,
    FileFact,
    Manifest,
    MemoryFacts,
    base_file,
)
from perdure.snapshots.objects.chunks import REGION_PAGES, Kind, Source, bytes_source, file_source, read_region, regions
from perdure.snapshots.objects.download import Downloader, StoredItem
from perdure.snapshots.objects.upload import Contents, Moved, Uploader
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pagelog import record
from perdure.snapshots.pageread import load
from perdure.snapshots.pins import Pins
from perdure.snapshots.segments import SegmentWriter
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import SnapshotFacts
from perdure.wire.objects import IMAGES, Item, ItemKey, Scope

MEMORY = "memory"
FACT = "snapshot"
#: Ends the name of a snapshot without its memory.
DISK_ONLY = "-disk"
_WINDOW_PAGES = 4096

Bases = Callable[[BaseRef], BaseRam]


def snapshot_key(manifest: Manifest) -> ItemKey:
    return ItemKey(Scope(manifest.tenant_id), manifest.snapshot_id)


def disk_key(manifest: Manifest) -> ItemKey:
    """A snapshot without its memory, where that is damaged: another item than the whole."""
    return ItemKey(Scope(manifest.tenant_id), f"{manifest.snapshot_id}{DISK_ONLY}")


def image_key(base: BaseRef) -> ItemKey:
    """An image by its content: what ``base`` names is made once. The image's digest is in the name, so that rows can say which
    images somebody uses."""
    named = "\0".join((base.image, base.golden or ""))
    return ItemKey(IMAGES, f"img-{base.image}-{hashlib.sha256(named.encode()).hexdigest()[:40]}")


@dataclass(frozen=True, slots=True)
class _Coming:
    """A fetch, with names that nothing else has: what is fetched lies under these until it is known to be whole."""

    item: StoredItem
    told: Manifest
    writer: SegmentWriter
    afresh: bool
    disk_id: DiskId = field(default_factory=mint_disk)
    base_id: BaseId = field(default_factory=mint_base)

    @property
    def index(self) -> str:
        return f"ram.{self.writer.segment_id}.index" if self.afresh else INDEX

    @property
    def devices(self) -> str:
        return f"devices.{self.writer.segment_id}.state" if self.afresh else DEVICES

    def pins(self) -> Pins:
        needed = Pins.of(self.told)
        segments = frozenset((self.writer.segment_id,))
        return Pins(segments, needed.disks | {self.disk_id}, needed.bases | {self.base_id})


@dataclass(frozen=True, slots=True)
class Mover:
    """Both homes. ``bases`` opens the RAM below a snapshot's memory; it must be the one that the reference names."""

    store: SnapshotStore
    uploader: Uploader
    downloader: Downloader
    bases: Bases
    _fetching: asyncio.Lock = field(default_factory=asyncio.Lock)  # two snapshots may bring the same layer

    async def upload(
        self,
        snapshot_id: SnapshotId,
        needs: Sequence[ItemKey] = (),
        facts: Mapping[str, Any] | None = None,
        *,
        disk_only: bool = False,
    ) -> tuple[Item, Moved]:
        """Make a complete snapshot durable in the store. Every byte is checked before it is sent, for a damaged copy is no copy.

        ``disk_only``: as a snapshot without memory, which is not even looked at. ``facts`` is what else is known of it, by name,
        and must be JSON: what a catalogue is made of that has lost its database (``workspaces.facts``). Raises NotFound,
        CorruptSnapshot naming the file, or what ``Uploader.upload`` raises. Repeat it after any failure.
        """
        with _held(self.store, snapshot_id) as manifest:
            told, key = (replace(manifest, memory=None), disk_key(manifest)) if disk_only else (manifest, snapshot_key(manifest))
            sources = await asyncio.to_thread(self._sources, told)
            known = {**(facts or {}), FACT: json.loads(told.to_bytes())}
            return await self.uploader.upload(Contents(key, sources, needs, known))

    def _sources(self, manifest: Manifest) -> list[Source]:
        store = self.store
        store.layers.check_heads(manifest.layers)
        store.layers.read_all(manifest.layers)
        sources = [file_source(disk_file(layer.disk_id), store.disks / disk_file(layer.disk_id)) for layer in manifest.layers]
        if manifest.memory is not None:
            if (own := manifest.private_base) is not None:
                path = check_base(store.bases, own, content=True)
                sources.append(file_source(path.name, path))
            index, base = store.index(manifest), self._base(manifest.memory.base)
            batches = _batches(store.segments, index, base)
            sources.append(bytes_source(DEVICES, store.devices(manifest).read_bytes()))
            sources.append(Source(MEMORY, Kind.REGIONS, index.page_count * PAGE_SIZE, regions(batches, index.zeros)))
        return sources

    def _base(self, ref: BaseRef) -> BaseRam:
        return self.bases(ref) if ref.private is None else BaseRam(check_base(self.store.bases, ref.private))

    async def fetch(self, key: ItemKey) -> SnapshotFacts:
        """Bring a snapshot onto this node; one that is here is left as it is. A crash leaves nothing, or the whole.

        Raises NotFound, CorruptSnapshot naming what is damaged, NoSpace, Shredded or Unavailable.
        """
        return await self.adopt(await self.downloader.open(key))

    async def adopt(self, item: StoredItem, *, disk_only: bool = False, afresh: bool = False) -> SnapshotFacts:
        """The same of an item that was found by a survey. ``disk_only``: without its memory, which is not even read. ``afresh``:
        also when it is here, which may be damaged, or only what it lies on; what is here goes when the other copy is whole."""
        async with self._fetching:
            told = snapshot_of(item)
            return await self._adopt(item, replace(told, memory=None) if disk_only else told, afresh=afresh)

    async def _adopt(self, item: StoredItem, told: Manifest, *, afresh: bool) -> SnapshotFacts:
        known = {facts.snapshot_id: facts for facts in self.store.complete()}
        if told.snapshot_id in known and not afresh:
            return known[told.snapshot_id]
        writer = SegmentWriter(self.store.segments, mint_segment(), self.store.disk)
        coming = _Coming(item, told, writer, afresh=afresh)
        with _pinned(self.store, coming.pins()):
            try:
                manifest = await self._bring(coming)
                crashpoint(CrashPoint.FETCH_WRITTEN)
                await asyncio.to_thread(self.store.renew if afresh else self.store.publish, manifest)
            except BaseException:
                self._give_up(coming)
                raise
            finally:
                writer.close()
        crashpoint(CrashPoint.FETCH_PUBLISHED)
        return manifest.facts()

    def _give_up(self, coming: _Coming) -> None:
        directory = self.store.snapshots / coming.told.snapshot_id
        if not coming.afresh:
            self.store.discard(coming.told.snapshot_id)
        elif coming.writer.segment_id not in _text(directory / MANIFEST):  # else it has its place, though perhaps not for good
            for name in (coming.index, coming.devices):
                remove(directory / name, disk=self.store.disk)

    async def _bring(self, coming: _Coming) -> Manifest:
        store, item, told = self.store, coming.item, coming.told
        crashpoint(CrashPoint.FETCH_BEGUN)
        layers = tuple([await self._layer(coming, layer) for layer in told.layers])
        crashpoint(CrashPoint.FETCH_LAYERS)
        if coming.afresh:
            directory = store.snapshots / told.snapshot_id
            await asyncio.to_thread(make_dir, directory, mode=0o700, disk=store.disk)
        else:
            directory = await asyncio.to_thread(store.make_snapshot_dir, told.snapshot_id)
        memory = told.memory
        if memory is not None:
            await self.downloader.fetch_file(item, DEVICES, directory / coming.devices, disk=store.disk)
            data = await asyncio.to_thread((directory / coming.devices).read_bytes)
            if disk_layers.digest_of(data) != memory.devices.checksum:
                raise _differs(item, DEVICES)
            memory = replace(memory, devices=replace(memory.devices, name=coming.devices))
            if memory.base.private is not None:
                await self._own_base(coming, memory.base.private)
            memory = await self._memory(coming, memory, directory)
        await asyncio.to_thread(store.disk.sync_dir, directory)
        return replace(told, layers=layers, memory=memory)

    async def _layer(self, coming: _Coming, told: DiskFact) -> DiskFact:
        """A layer that is here already is the same one: it is never written again once it is frozen. What is damaged, or debris
        of its name, keeps its place until what is fetched is known to be what others that name it had; a machine that has it
        open keeps it."""
        store, path = self.store, self.store.disks / disk_file(told.disk_id)
        if any(known.checksum != told.checksum for known in store.frozen((told.disk_id,))):
            raise _differs(coming.item, path.name)
        if not await asyncio.to_thread(self._has_layer, told, path, coming.afresh):
            aside = store.disks / disk_file(coming.disk_id)
            await self.downloader.fetch_file(coming.item, path.name, aside, disk=store.disk)
            if (disk_layers.size_of(aside), await asyncio.to_thread(disk_layers.checksum, aside)) != (told.size, told.checksum):
                await asyncio.to_thread(remove, aside, disk=store.disk)
                raise _differs(coming.item, path.name)
            await asyncio.to_thread(rename, aside, path, disk=store.disk)
        return await asyncio.to_thread(store.freeze_layer, told.disk_id)

    def _has_layer(self, told: DiskFact, path: Path, afresh: bool) -> bool:
        """Whether the layer is here. ``afresh``, every byte of it is read."""
        if self.store.is_frozen(told.disk_id):
            try:
                (self.store.layers.read_all if afresh else self.store.layers.check)((told,))
            except CorruptSnapshot:
                return False
            return True
        if not path.exists():
            return False
        if disk_layers.size_of(path) == told.size and disk_layers.checksum(path) == told.checksum:
            return True
        if any(told.disk_id in record.layers for record in self.store.live()):
            raise Conflict(
                f"A machine on this node uses another disk layer {told.disk_id}.", hint="Put that workspace to sleep first."
            )
        return False

    async def _own_base(self, coming: _Coming, told: BaseFact) -> None:
        """One that is here and whole is the same. Another one's file is damaged or debris, and keeps its place until what is
        fetched is whole; a machine that maps it keeps it."""
        store, path = self.store, self.store.bases / base_file(told.base_id)
        with suppress(CorruptSnapshot):
            await asyncio.to_thread(check_base, store.bases, told, content=True)
            return
        aside = store.bases / base_file(coming.base_id)
        await self.downloader.fetch_file(coming.item, path.name, aside, disk=store.disk)
        await asyncio.to_thread(store.disk.chmod, aside, 0o444)
        try:
            await asyncio.to_thread(check_base, store.bases, replace(told, base_id=coming.base_id), content=True)
        except CorruptSnapshot as error:
            await asyncio.to_thread(remove, aside, disk=store.disk)
            raise _differs(coming.item, path.name) from error
        await asyncio.to_thread(rename, aside, path, disk=store.disk)

    async def _memory(self, coming: _Coming, told: MemoryFacts, directory: Path) -> MemoryFacts:
        item, writer = coming.item, coming.writer
        pages, content = await self._pages(item, told)
        base = self._base(told.base)
        file = item.manifest.file(MEMORY)
        if base.page_count * PAGE_SIZE != file.size:
            raise _differs(item, MEMORY)

        def write() -> MemoryFacts:
            recorded = record(self.store.segments, PageIndex(base.page_count), base, (pages, content), writer)
            writer.sync()
            index = recorded.index
            if len(index.pages) + len(index.zeros) != told.pages:  # a page that equals the base was not in any index
                raise _differs(item, MEMORY)
            data = index.to_bytes()
            create_file(directory / coming.index, data, mode=0o600, disk=self.store.disk)
            fact = FileFact(coming.index, len(data), disk_layers.digest_of(data))
            stored = index.stored_bytes()
            return replace(told, index=fact, segments=index.ends(), added_bytes=stored, total_bytes=stored)

        return await asyncio.to_thread(write)

    async def _pages(self, item: StoredItem, told: MemoryFacts) -> tuple[PageNumbers, Pages]:
        """All pages that differ from the base, ascending, zero pages among them."""
        content = np.zeros((told.pages, PAGE_SIZE), np.uint8)
        pages, filled = np.empty(told.pages, np.uint32), 0
        async for window in self.downloader.chunks(item, item.manifest.file(MEMORY)):
            for number, data in window:
                region = read_region(number, data, f"of {item.manifest.key}")
                both = np.sort(np.concatenate((region.pages, region.zeros)))
                if filled + len(both) > told.pages:
                    raise _differs(item, MEMORY)
                pages[filled : filled + len(both)] = both
                content[filled + np.searchsorted(both, region.pages)] = region.content
                filled += len(both)
        if filled != told.pages:
            raise _differs(item, MEMORY)
        return pages, content


def snapshot_of(item: StoredItem) -> Manifest:
    """The snapshot that an item is, as the node knew it that uploaded it. Raises CorruptSnapshot when it is none."""
    key = item.manifest.key
    told = Manifest.from_bytes(json.dumps(item.manifest.facts.get(FACT)).encode(), f"of {key}")
    if key != snapshot_key(told) and (told.memory is not None or key != disk_key(told)):
        raise CorruptSnapshot(f"The stored item {key} says that it is {snapshot_key(told)}.")
    return told


@contextmanager
def _held(store: SnapshotStore, snapshot_id: SnapshotId) -> Iterator[Manifest]:
    """A snapshot whose segments and layers stay as long as this lasts, whatever becomes of it."""
    with ExitStack() as held:
        with store.guard:
            manifest = store.manifest(snapshot_id)
            held.enter_context(_pinned(store, Pins.of(manifest)))
        yield manifest


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@contextmanager
def _pinned(store: SnapshotStore, pins: Pins) -> Iterator[None]:
    def pinned() -> Pins:
        return pins

    store.pin(pinned)
    try:
        yield
    finally:
        store.unpin(pinned)
        store.sweep(pins.files())


def _batches(segments: Path, index: PageIndex, base: BaseRam) -> Iterator[tuple[PageNumbers, Pages]]:
    """The located pages in order, some megabytes at a time; no region is cut."""
    low, total = 0, len(index.pages)
    while low < total:
        high = min(total, low + _WINDOW_PAGES)
        last = int(index.pages[high - 1]) // REGION_PAGES
        high = int(np.searchsorted(index.pages, (last + 1) * REGION_PAGES))
        some = replace(index, pages=index.pages[low:high], frame=index.frame[low:high], slot=index.slot[low:high])
        parts = list(load(segments, some, base))
        pages = np.concatenate([part for part, _ in parts])
        order = np.argsort(pages)
        yield pages[order], np.concatenate([part for _, part in parts])[order]
        low = high


def _differs(item: StoredItem, name: str) -> CorruptSnapshot:
    return CorruptSnapshot(
        f"What the store has as {name} of {item.manifest.key} is not what its snapshot says.",
        hint="Wake the workspace from another snapshot (perdure snapshot ls NAME).",
    )
