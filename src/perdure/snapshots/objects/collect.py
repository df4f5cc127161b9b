"""Garbage collection of the store: two passes one epoch apart, strays, and packs that have become mostly dead.

What goes is decided by rows in one transaction; objects are deleted after it, and rows dropped after that, so that a crash
between any two is made good by the next pass. An epoch, an hour say, is the time that a reader may go on with what it had found;
several servers may collect, and the catalogue sees to it that none cuts it short.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import CorruptSnapshot, NotFound
from perdure.snapshots.objects.manifest import ItemManifest, read_manifest
from perdure.snapshots.objects.packs import HEAD, ChunkReader, PackIndex, Place
from perdure.snapshots.objects.remote import Remote, manifest_name, pack_name
from perdure.snapshots.objects.upload import PACK_BYTES, Packing
from perdure.wire.objects import Catalogue, Item, ItemKey, ItemState, Pack, PackId, PackState, Scope

#: A pack is rewritten when less than this share of its chunks' bytes is alive.
LIVE_MIN = 0.5


@dataclass(frozen=True, slots=True)
class Collected:
    """What one pass did. Bytes are of packs; what strays took is not counted."""

    epoch: int
    packs_deleted: int
    bytes_deleted: int
    strays_deleted: int


@dataclass(frozen=True, slots=True)
class Rewritten:
    """``packs`` were replaced; ``bytes_freed`` go with the passes to come."""

    packs: int
    bytes_freed: int


@dataclass(slots=True)
class _Worn:
    """A pack with less alive in it than it should have."""

    pack: Pack
    places: dict[bytes, Place]  # of what is alive


class Collector:
    """``owner`` names this installation; nothing is deleted from a store that belongs to another."""

    def __init__(self, remote: Remote, catalogue: Catalogue, owner: str, *, pack_bytes: int = PACK_BYTES) -> None:
        self._remote = remote
        self._catalogue = catalogue
        self._owner = owner
        self._pack_bytes = pack_bytes

    async def collect(self, scope: Scope) -> Collected | None:
        """One pass over one scope; None when another server has made this epoch's. Raises Conflict when the store is another's,
        Unavailable; then the next pass goes on.
        """
        remote, catalogue = self._remote, self._catalogue
        await remote.claim(self._owner, known=await durable(catalogue, scope))
        await remote.sweep()
        epoch = await catalogue.advance(scope)
        if epoch is None:
            return None
        listed, manifests = await remote.listed(scope)  # before any row is read: what is listed has had its row by then
        doomed = await catalogue.condemn(scope, epoch)
        crashpoint(CrashPoint.COLLECT_CONDEMNED)
        ids = [pack.pack_id for pack in doomed]
        await remote.objects.delete([pack_name(scope, pack_id) for pack_id in ids])
        remote.forget(ids)
        crashpoint(CrashPoint.COLLECT_DELETED)
        await catalogue.drop(ids)
        strays = await catalogue.strays(scope, epoch, sorted(set(listed) - set(ids)), manifests)
        await remote.objects.delete([_stray_name(scope, name) for name in strays])
        return Collected(epoch, len(doomed), sum(pack.size for pack in doomed), len(strays))

    async def rewrite(self, scope: Scope, *, live_min: float = LIVE_MIN) -> Rewritten:
        """Copy what is alive out of worn packs; these go with the next two passes. A damaged pack is left as it is."""
        manifests, holders = await self._read_all(scope)
        worn = await self._worn(scope, manifests, holders, live_min)
        seen = frozenset(manifests)
        if not worn:
            return Rewritten(0, 0)
        item = await self._catalogue.begin(ItemKey(scope, self._remote.new_name("rewrite")))
        replaced = [one for group in _grouped(worn, self._pack_bytes) for one in await self._replace(item, group, seen)]
        await self._catalogue.release(item.key)
        return Rewritten(len(replaced), sum(_dead_bytes(one) for one in replaced))

    async def _replace(self, item: Item, group: list[_Worn], seen: frozenset[ItemKey]) -> list[_Worn]:
        """Copy a group into one new pack; returns those that it took the place of."""
        # A packing of its own for each: what is alive in a group must be in the group's pack, whatever others have.
        packing = Packing(self._remote, self._catalogue, item, pack_bytes=1 << 62)
        copied = []
        for one in group:
            try:
                await packing.add(await self._alive(one))
            except CorruptSnapshot:
                continue
            copied.append(one)
        new = await packing.flush()
        crashpoint(CrashPoint.COLLECT_COPIED)
        replaced = [
            one
            for one in copied
            if await self._catalogue.replace(item.key, item.attempt, one.pack.pack_id, new if one.places else None, seen)
        ]
        crashpoint(CrashPoint.COLLECT_REPLACED)
        return replaced

    async def _read_all(self, scope: Scope) -> tuple[dict[ItemKey, ItemManifest], dict[PackId, set[ItemKey]]]:
        """The manifests of a scope, and who holds which pack. An item whose manifest cannot be read keeps all it holds."""
        keys = self._remote.keyring.of(scope)
        manifests: dict[ItemKey, ItemManifest] = {}
        holders: defaultdict[PackId, set[ItemKey]] = defaultdict(set)
        for item in await self._catalogue.items(scope):
            for pack in await self._catalogue.holds(item.key):
                holders[pack.pack_id].add(item.key)
            if item.state is ItemState.UPLOADING or item.checksum is None:
                continue
            try:
                data = await self._remote.objects.get(manifest_name(item.key, item.attempt))
                manifests[item.key] = await asyncio.to_thread(read_manifest, item.key, item.attempt, data, keys)
            except (CorruptSnapshot, NotFound):
                continue
        return manifests, holders

    async def _worn(
        self, scope: Scope, manifests: dict[ItemKey, ItemManifest], holders: dict[PackId, set[ItemKey]], live_min: float
    ) -> list[_Worn]:
        chunks = {key: manifest.chunk_ids() for key, manifest in manifests.items()}
        worn = []
        for pack in await self._catalogue.packs(scope):
            users = holders.get(pack.pack_id, set())
            if pack.state is not PackState.STORED or not users or not users <= chunks.keys():
                continue
            try:
                index = await self._remote.index(pack)
            except CorruptSnapshot:
                continue
            alive = _alive_places(index, [chunks[key] for key in users])
            if sum(place.stored for place in alive.values()) < live_min * index.stored_bytes():
                worn.append(_Worn(pack, alive))
        return worn

    async def _alive(self, worn: _Worn) -> list[tuple[bytes, bytes]]:
        """What is alive in a pack, checked. Raises CorruptSnapshot."""
        if not worn.places:
            return []
        pack = worn.pack
        places = sorted(worn.places.items(), key=lambda entry: entry[1].offset)
        start, end = places[0][1].offset, places[-1][1].offset + places[-1][1].stored
        try:
            data = memoryview(await self._remote.objects.read(pack_name(pack.scope, pack.pack_id), start, end - start))
        except NotFound as error:
            raise CorruptSnapshot(f"The stored object {pack.pack_id} is missing.") from error
        reader = ChunkReader(pack.pack_id, self._remote.keyring.of(pack.scope))

        def decode() -> list[tuple[bytes, bytes]]:
            return [
                (part, reader.content(part, place, data[place.offset - start : place.offset - start + place.stored]))
                for part, place in places
            ]

        return await asyncio.to_thread(decode)


async def durable(catalogue: Catalogue, scope: Scope) -> list[Item]:
    """What a scope has in the store by our rows."""
    return [item for item in await catalogue.items(scope) if item.state is ItemState.DURABLE]


def _grouped(worn: list[_Worn], limit: int) -> list[list[_Worn]]:
    """In groups that make a pack each."""
    groups, filled = list[list[_Worn]](), limit
    for one in worn:
        if filled >= limit:
            groups.append([])
            filled = HEAD
        groups[-1].append(one)
        filled += sum(place.stored for place in one.places.values())
    return groups


def _alive_places(index: PackIndex, users: list[frozenset[bytes]]) -> dict[bytes, Place]:
    return {part: place for part, place in index.places.items() if any(part in chunks for chunks in users)}


def _dead_bytes(worn: _Worn) -> int:
    return worn.pack.size - sum(place.stored for place in worn.places.values())


def _stray_name(scope: Scope, name: str) -> str:
    if "." in name:
        item, _, attempt = name.rpartition(".")
        return manifest_name(ItemKey(scope, item), int(attempt))
    return pack_name(scope, PackId(name))
