"""Reading items back: every chunk is checked against its name, and what is missing or damaged is named.

An item can be found by its row, or without any database by what lies in the store (``survey``).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.core.errors import AlreadyExists, CorruptSnapshot, NotFound
from perdure.core.files import DISK, Disk, Handle, no_space_named, remove
from perdure.snapshots.objects.chunks import BLOCK, Chunk, Kind
from perdure.snapshots.objects.manifest import ItemManifest, StoredFile, read_manifest
from perdure.snapshots.objects.packs import ChunkReader, Place, joined
from perdure.snapshots.objects.remote import Remote, manifest_name, missing, pack_name
from perdure.wire.objects import ItemKey, ItemState, Pack, PackId, Rows, Scope

_CHUNKS_AT_ONCE = 256
_READS_AT_ONCE = 8
_GAP = 64 << 10
_READ_MAX = 8 << 20

Places = dict[bytes, Place]


def _nobody(_read_bytes: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item and where each of its chunks is. ``heard`` is told of the stored bytes of it that were read."""

    manifest: ItemManifest
    places: Places
    heard: Callable[[int], None] = _nobody

    def stored_bytes(self) -> int:
        """What is read of it when all of it is."""
        return sum(self.places[part].stored for file in self.manifest.files for part in file.chunk_ids())


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of an item that cannot be read. ``number`` is the chunk's in the file."""

    file: str
    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Survey:
    """What the store itself says of a scope. ``damaged`` are objects that could not be read, by name, with the reason."""

    items: tuple[StoredItem, ...]  # complete ones, the newest attempt of each
    incomplete: tuple[ItemManifest, ...]  # chunks are missing
    damaged: dict[str, str]


class Downloader:
    def __init__(self, remote: Remote, catalogue: Rows) -> None:
        self._remote = remote
        self._catalogue = catalogue

    async def open(self, key: ItemKey) -> StoredItem:
        """Find an item and all of its chunks. Raises NotFound unless it is durable, CorruptSnapshot naming what is missing."""
        found = await self.inspect(key)
        lost = [file.name for file in found.manifest.files if any(part not in found.places for part in file.chunk_ids())]
        if lost:
            raise CorruptSnapshot(
                f"The stored item {key} is incomplete: parts of {', '.join(lost)} are missing from the store.",
                hint="Wake the workspace from another snapshot (perdure snapshot ls NAME).",
            )
        return found

    async def inspect(self, key: ItemKey) -> StoredItem:
        """The same without the check that nothing is missing."""
        item = await self._catalogue.item(key)
        if item.state is ItemState.UPLOADING or item.checksum is None:  # a released one may be needed by another
            raise NotFound(f"{key} is not in the object store: it is {item.state.value}.", hint="Wait until it is uploaded.")
        try:
            data = await self._remote.objects.get(manifest_name(key, item.attempt))
        except NotFound as error:
            raise CorruptSnapshot(f"The stored manifest of {key} is missing.") from error
        if hashlib.sha256(data).hexdigest() != item.checksum:
            raise CorruptSnapshot(f"The stored manifest of {key} is damaged: it is not the one that was committed.")
        manifest = read_manifest(key, item.attempt, data, self._remote.keyring.of(key.scope))
        wanted = manifest.chunk_ids()
        return StoredItem(manifest, await self._places(await self._catalogue.holds(key), wanted))

    async def _places(self, packs: Sequence[Pack], wanted: frozenset[bytes]) -> Places:
        places: Places = {}
        for pack in packs:
            try:
                index = await self._remote.index(pack)
            except CorruptSnapshot:
                continue  # what only this pack has is found missing by the caller
            places |= {chunk_id: place for chunk_id, place in index.places.items() if chunk_id in wanted}
        return places

    async def chunks(self, item: StoredItem, file: StoredFile) -> AsyncIterator[list[Chunk]]:
        """A file's chunks in order, a window at a time. Raises CorruptSnapshot, Unavailable or Shredded.

        A pack that was rewritten since the item was opened is looked up again.
        """
        ids, numbers = file.chunk_ids(), file.numbers.tolist()
        for at in range(0, len(ids), _CHUNKS_AT_ONCE):
            window = ids[at : at + _CHUNKS_AT_ONCE]
            try:
                contents = await self._read(item, window)
            except CorruptSnapshot as error:
                item = await self._moved(item, error)
                contents = await self._read(item, window)
            item.heard(sum(item.places[chunk_id].stored for chunk_id in window))
            yield [(number, contents[chunk_id]) for number, chunk_id in zip(numbers[at:], window, strict=False)]

    async def _moved(self, item: StoredItem, error: CorruptSnapshot) -> StoredItem:
        """The item looked up again. Raises the first error when there is no such item, or it is all where it was."""
        try:
            found = await self.open(item.manifest.key)
        except NotFound:
            raise error from None
        if found.places == item.places:
            raise error
        return replace(found, heard=item.heard)

    async def _read(self, item: StoredItem, ids: Iterable[bytes]) -> dict[bytes, bytes]:
        scope, wanted = item.manifest.key.scope, frozenset(ids)
        by_pack: defaultdict[PackId, list[Place]] = defaultdict(list)
        id_of = {(place.pack_id, place.number): chunk_id for chunk_id in wanted for place in (item.places[chunk_id],)}
        for chunk_id in wanted:
            by_pack[item.places[chunk_id].pack_id].append(item.places[chunk_id])
        gate = asyncio.Semaphore(_READS_AT_ONCE)

        async def fetch(pack_id: PackId, group: list[Place]) -> list[tuple[bytes, bytes]]:
            async with gate:
                start, end = group[0].offset, group[-1].offset + group[-1].stored
                try:
                    data = memoryview(await self._remote.objects.read(pack_name(scope, pack_id), start, end - start))
                except NotFound as error:
                    raise missing(pack_id) from error
            reader = ChunkReader(pack_id, self._remote.keyring.of(scope))
            return await asyncio.to_thread(_decoded, reader, data, group, id_of)

        reads = [(pack_id, group) for pack_id, some in by_pack.items() for group in joined(some, gap=_GAP, limit=_READ_MAX)]
        done = await asyncio.gather(*(fetch(pack_id, group) for pack_id, group in reads))
        return {chunk_id: content for part in done for chunk_id, content in part}

    async def fetch_file(self, item: StoredItem, name: str, path: Path, *, disk: Disk = DISK) -> None:
        """Write a file of blocks, fsynced (its directory is not); what is zero becomes a hole. Nothing is left after a failure.

        Raises AlreadyExists, NoSpace, or what ``chunks`` raises.
        """
        file = item.manifest.file(name)
        if file.kind is not Kind.BLOCKS:
            raise CorruptSnapshot(f"The stored file {name} of {item.manifest.key} is memory, not a file of blocks.")
        try:
            with no_space_named(path):
                handle = disk.create(path, 0o600)
        except FileExistsError as error:
            raise AlreadyExists(f"{path.name} exists already.", internal=str(path)) from error
        done = False
        try:
            async for window in self.chunks(item, file):
                await asyncio.to_thread(_write, handle, file, window)
            await asyncio.to_thread(_finish, handle, file.size)
            done = True
        finally:
            handle.close()
            if not done:
                remove(path, disk=disk)

    async def verify(self, key: ItemKey) -> list[Damage]:
        """Read every chunk of an item; returns what is missing or damaged, nothing when all is well.

        Raises NotFound or CorruptSnapshot when the item or its manifest cannot be read at all.
        """
        item = await self.inspect(key)
        damages: list[Damage] = []
        for file in item.manifest.files:
            ids, numbers = file.chunk_ids(), file.numbers.tolist()
            for at in range(0, len(ids), _CHUNKS_AT_ONCE):
                window = list(zip(numbers[at : at + _CHUNKS_AT_ONCE], ids[at : at + _CHUNKS_AT_ONCE], strict=True))
                damages += await self._check(item, file, window)
        return damages

    async def _check(self, item: StoredItem, file: StoredFile, window: list[tuple[int, bytes]]) -> list[Damage]:
        absent = [Damage(file.name, number, "it is missing") for number, part in window if part not in item.places]
        present = [(number, part) for number, part in window if part in item.places]
        try:
            await self._read(item, [part for _, part in present])
        except CorruptSnapshot:
            return absent + [damage for number, part in present for damage in await self._one(item, file, number, part)]
        return absent

    async def _one(self, item: StoredItem, file: StoredFile, number: int, part: bytes) -> list[Damage]:
        try:
            await self._read(item, [part])
        except CorruptSnapshot as error:
            return [Damage(file.name, number, error.message)]
        return []

    async def survey(self, scope: Scope) -> Survey:
        """Everything in the store that belongs to a scope, asking no database."""
        remote, keys = self._remote, self._remote.keyring.of(scope)
        sizes, names = await remote.listed(scope)
        places: Places = {}
        damaged: dict[str, str] = {}
        for pack_id, size in sizes.items():
            try:
                places |= (await remote.index(await remote.pack_facts(scope, pack_id, size))).places
            except (CorruptSnapshot, NotFound) as error:
                damaged[pack_name(scope, pack_id)] = error.message
        complete: dict[str, StoredItem] = {}
        incomplete: dict[str, ItemManifest] = {}
        for name, attempt in sorted(names, key=lambda entry: entry[1]):
            key = ItemKey(scope, name)
            try:
                manifest = read_manifest(key, attempt, await remote.objects.get(manifest_name(key, attempt)), keys)
            except (CorruptSnapshot, NotFound) as error:
                damaged[manifest_name(key, attempt)] = error.message
                continue
            wanted = manifest.chunk_ids()
            if wanted <= places.keys():
                complete[name] = StoredItem(manifest, {part: places[part] for part in wanted})
            else:
                incomplete[name] = manifest
        lost = tuple(manifest for name, manifest in incomplete.items() if name not in complete)
        return Survey(tuple(complete[name] for name in sorted(complete)), lost, damaged)


def _decoded(
    reader: ChunkReader, data: memoryview, group: list[Place], id_of: dict[tuple[PackId, int], bytes]
) -> list[tuple[bytes, bytes]]:
    out, start = [], group[0].offset
    for place in group:
        chunk_id, at = id_of[place.pack_id, place.number], place.offset - start
        out.append((chunk_id, reader.content(chunk_id, place, data[at : at + place.stored])))
    return out


def _write(handle: Handle, file: StoredFile, window: list[Chunk]) -> None:
    with no_space_named(handle.path):
        for number, content in window:
            if len(content) != file.length_of(number):
                raise CorruptSnapshot(f"The stored file {file.name} is damaged: block {number} has the wrong length.")
            if handle.size != number * BLOCK:
                handle.cut(number * BLOCK)
            handle.write(content)


def _finish(handle: Handle, size: int) -> None:
    with no_space_named(handle.path):
        if handle.size != size:
            handle.cut(size)
        handle.sync()
