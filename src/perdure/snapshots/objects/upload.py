"""Uploading: what the store has is held, what it lacks is packed and sent, and one row makes it durable.

The order is all there is to it. A pack's row comes before its object; a pack that is reused is pinned by a row before it is
relied on; the manifest is written when all packs are; the commit, which names exactly the packs used, is last. After a crash
anywhere, the same call goes on: packs whose objects are whole are taken as they are, and nothing that is there is sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import CorruptSnapshot, InvalidRequest, NotFound, Unavailable
from perdure.snapshots.objects.chunks import Chunk, Source
from perdure.snapshots.objects.keys import ScopeKeys
from perdure.snapshots.objects.manifest import ItemManifest, StoredFile
from perdure.snapshots.objects.packs import PackBuilder
from perdure.snapshots.objects.remote import Remote, manifest_name, pack_name
from perdure.wire.objects import Item, ItemKey, ItemState, Pack, PackId, PackState, Rows

PACK_BYTES = 16 << 20
_CHUNKS_AT_ONCE = 64
_INDEXES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Contents:
    """What to upload. ``facts`` go into the manifest; they must be JSON."""

    key: ItemKey
    sources: Iterable[Source]
    needs: Sequence[ItemKey] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Moved:
    """What one call did. ``reused`` counts chunks that were there already, ``sent_bytes`` are as stored."""

    chunks: int = 0
    content_bytes: int = 0
    reused: int = 0
    packs: int = 0
    sent_bytes: int = 0


Watch = Callable[[Moved], Awaitable[None]]


class Uploader:
    """``watch`` hears, some megabytes apart, what was moved so far, and may take its time."""

    def __init__(
        self,
        remote: Remote,
        catalogue: Rows,
        *,
        pack_bytes: int = PACK_BYTES,
        watch: Callable[[Moved], Awaitable[None]] | None = None,
    ) -> None:
        self._remote = remote
        self._catalogue = catalogue
        self._pack_bytes = pack_bytes
        self._watch = watch

    async def upload(self, contents: Contents) -> tuple[Item, Moved]:
        """Make an item durable in the store; one that is, is returned at once. Repeat it after any failure.

        Raises Unavailable, NoSpace, StaleGeneration when another upload of the same item has taken over, Conflict when the
        item was released, Shredded, or CorruptSnapshot when a source is damaged.
        """
        item = await self._catalogue.begin(contents.key, contents.needs)
        if item.state is ItemState.DURABLE:
            return item, Moved()
        crashpoint(CrashPoint.UPLOAD_BEGUN)
        packing = Packing(self._remote, self._catalogue, item, pack_bytes=self._pack_bytes)
        await packing.look_around()
        files = [await self._file(packing, source) for source in contents.sources]
        await packing.flush()
        manifest = ItemManifest(item.key, item.attempt, tuple(files), tuple(contents.needs), contents.facts)
        data = await asyncio.to_thread(manifest.to_bytes, packing.keys)
        await put(self._remote, manifest_name(item.key, item.attempt), data)
        crashpoint(CrashPoint.UPLOAD_DESCRIBED)
        fact = (len(data), hashlib.sha256(data).hexdigest())
        durable = await self._catalogue.commit(item.key, item.attempt, frozenset(packing.used), fact)
        crashpoint(CrashPoint.UPLOAD_COMMITTED)
        return durable, packing.moved

    async def _file(self, packing: Packing, source: Source) -> StoredFile:
        numbers: list[int] = []
        ids: list[bytes] = []
        chunks = iter(source.chunks)
        while batch := await asyncio.to_thread(_take, chunks, packing.keys):
            await packing.add([(chunk_id, content) for _, chunk_id, content in batch])
            numbers.extend(number for number, _, _ in batch)
            ids.extend(chunk_id for _, chunk_id, _ in batch)
            if self._watch is not None:
                await self._watch(packing.moved)
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise InvalidRequest(f"The chunks of {source.name} do not come in order.")
        return StoredFile(source.name, source.kind, source.size, np.array(numbers, np.uint32), b"".join(ids))


class Packing:
    """Chunks into packs, for one attempt of one item."""

    def __init__(self, remote: Remote, catalogue: Rows, item: Item, *, pack_bytes: int = PACK_BYTES) -> None:
        self.keys = remote.keyring.of(item.key.scope)
        self.used: set[PackId] = set()
        self.moved = Moved()
        self._remote = remote
        self._catalogue = catalogue
        self._item = item
        self._pack_bytes = pack_bytes
        self._where: dict[bytes, PackId] = {}
        self._pinned: set[PackId] = set()
        self._builder: PackBuilder | None = None

    async def look_around(self) -> None:
        """Learn which chunks are there: from earlier attempts of this item, and from all of its scope."""
        key, attempt = self._item.key, self._item.attempt
        for pack in await self._catalogue.holds(key):
            if pack.state is PackState.PENDING and await self._is_whole(pack):
                await self._catalogue.stored(key, attempt, pack.pack_id)
        self._pinned = {pack.pack_id for pack in await self._catalogue.holds(key) if pack.state is PackState.STORED}
        packs = await self._catalogue.packs(key.scope)
        for at in range(0, len(packs), _INDEXES_AT_ONCE):
            await asyncio.gather(*(self._learn(pack) for pack in packs[at : at + _INDEXES_AT_ONCE]))

    async def _is_whole(self, pack: Pack) -> bool:
        """Whether the object of a pack that was announced has arrived, for good: it is sent again unless that is sure."""
        name = pack_name(pack.scope, pack.pack_id)
        if await self._remote.objects.size(name) != pack.size:
            return False
        try:
            await self._remote.index(pack)
        except CorruptSnapshot:
            return False
        try:
            await self._remote.objects.settle(name)
        except (NotFound, Unavailable):
            return False
        return True

    async def _learn(self, pack: Pack) -> None:
        try:
            index = await self._remote.index(pack)
        except CorruptSnapshot:
            return  # what it held is sent again: the store mends itself
        for chunk_id in index.places:
            # A pack that is pinned already costs no more.
            if chunk_id not in self._where or pack.pack_id in self._pinned:
                self._where[chunk_id] = pack.pack_id

    async def add(self, chunks: Sequence[tuple[bytes, bytes]]) -> None:
        """Chunks by id. Afterwards each is in a pack that this item has pinned, or in the one being built."""
        self.moved.chunks += len(chunks)
        self.moved.content_bytes += sum(len(content) for _, content in chunks)
        await self._pin({self._where[chunk_id] for chunk_id, _ in chunks if chunk_id in self._where} - self._pinned)
        new: dict[bytes, bytes] = {}
        for chunk_id, content in chunks:
            pack_id = self._where.get(chunk_id)
            if pack_id is not None:
                self.used.add(pack_id)
                self.moved.reused += 1
            elif chunk_id in new or (self._builder is not None and chunk_id in self._builder):
                self.moved.reused += 1
            else:
                new[chunk_id] = content
        await self._pack(list(new.items()))

    async def _pack(self, chunks: list[tuple[bytes, bytes]]) -> None:
        done = 0
        while done < len(chunks):
            if self._builder is None:
                pack_id = PackId(self._remote.new_name("pck"))
                self._builder = PackBuilder(pack_id, self._item.key.scope, self.keys)
            done += await asyncio.to_thread(_fill, self._builder, chunks[done:], self._pack_bytes)
            if self._builder.size >= self._pack_bytes:
                await self.flush()

    async def _pin(self, packs: set[PackId]) -> None:
        if not packs:
            return
        granted = await self._catalogue.pin(self._item.key, self._item.attempt, sorted(packs))
        self._pinned |= granted
        refused = packs - granted
        if refused:  # being deleted: their chunks are unknown from here on
            self._remote.forget(refused)
            self._where = {chunk_id: pack_id for chunk_id, pack_id in self._where.items() if pack_id not in refused}

    async def flush(self) -> PackId | None:
        """Send the pack being built, if there is one; returns its id."""
        builder, self._builder = self._builder, None
        if builder is None:
            return None
        pack, data, index = await asyncio.to_thread(builder.build)
        key, attempt = self._item.key, self._item.attempt
        await self._catalogue.announce(key, attempt, pack)
        crashpoint(CrashPoint.UPLOAD_ANNOUNCED)
        await put(self._remote, pack_name(pack.scope, pack.pack_id), data)
        crashpoint(CrashPoint.UPLOAD_SENT)
        await self._catalogue.stored(key, attempt, pack.pack_id)
        self._remote.remember(index)
        self._where |= dict.fromkeys(index.places, pack.pack_id)
        self._pinned.add(pack.pack_id)
        self.used.add(pack.pack_id)
        self.moved.packs += 1
        self.moved.sent_bytes += len(data)
        return pack.pack_id


async def put(remote: Remote, name: str, data: bytes) -> None:
    """PUT, and look: a PUT whose answer was lost may have happened, and one that was answered may be short."""
    lost: Unavailable | None = None
    try:
        await remote.objects.put(name, data)
    except Unavailable as error:
        if not error.ambiguous:
            raise
        lost = error
    try:
        size = await remote.objects.size(name)
    except Unavailable as error:
        raise lost or error from None
    if size != len(data):
        raise lost or Unavailable(
            f"The object store acknowledged {name} but has {size} of {len(data)} bytes.", hint="Try again.", ambiguous=True
        )


def _fill(builder: PackBuilder, chunks: list[tuple[bytes, bytes]], size: int) -> int:
    """Add chunks until the pack is full; returns how many."""
    for number, (chunk_id, content) in enumerate(chunks, 1):
        builder.add(chunk_id, content)
        if builder.size >= size:
            return number
    return len(chunks)


def _take(chunks: Iterator[Chunk], keys: ScopeKeys) -> list[tuple[int, bytes, bytes]]:
    """The next few chunks: number, id, content."""
    return [(number, keys.chunk_id(content), content) for number, content in itertools.islice(chunks, _CHUNKS_AT_ONCE)]
