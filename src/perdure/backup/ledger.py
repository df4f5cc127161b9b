"""The rows of a place of backups, made from what lies in it: a place has no database of its own.

That is enough because nothing is ever removed from a place: a pack that is whole stays, so no pin must be remembered, and an item
whose manifest and chunks are there is durable. Two backups at once into one place send the same chunk twice at worst.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from perdure.backup.record import StoredItem
from perdure.core.errors import Conflict, CorruptSnapshot, NotFound, StaleGeneration, Unavailable
from perdure.snapshots.objects.manifest import read_manifest
from perdure.snapshots.objects.remote import Remote, manifest_name, pack_name
from perdure.wire.objects import Item, ItemKey, ItemState, Pack, PackId, PackState, Scope, check_scope

_AT_ONCE = 8


@dataclass(slots=True)
class _Shelf:
    """What is known of a scope."""

    packs: dict[PackId, Pack] = field(default_factory=dict)
    chunks: set[bytes] = field(default_factory=set)
    items: dict[str, Item] = field(default_factory=dict)


class PlaceLedger:
    """Implements ``wire.objects.Rows``. ``only``: know of these items and no others, without a look at their manifests."""

    def __init__(self, remote: Remote, now_ms: Callable[[], int], only: Iterable[StoredItem] | None = None) -> None:
        self._remote = remote
        self._now_ms = now_ms
        self._only: dict[Scope, dict[str, Item]] | None = None
        self._shelves: dict[Scope, _Shelf] = {}
        self._held: defaultdict[ItemKey, set[PackId]] = defaultdict(set)
        self._looking = asyncio.Lock()
        if only is not None:
            self._only = defaultdict(dict)
            for one in only:
                told = Item(one.key, ItemState.DURABLE, one.attempt, size=one.size, checksum=one.checksum)
                self._only[one.key.scope][one.name] = told

    async def _shelf(self, scope: Scope) -> _Shelf:
        async with self._looking:
            if check_scope(scope) not in self._shelves:
                self._shelves[scope] = await self._look(scope)
            return self._shelves[scope]

    async def _look(self, scope: Scope) -> _Shelf:
        shelf = _Shelf()
        sizes, manifests = await self._remote.listed(scope)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def learn(pack_id: PackId, size: int) -> None:
            async with gate:
                try:
                    pack = await self._remote.pack_facts(scope, pack_id, size)
                    index = await self._remote.index(pack)
                except (CorruptSnapshot, NotFound):
                    return  # cut short by a crash, or damaged: what it held counts as missing
                if not await self._settles(pack_name(scope, pack_id)):
                    return
            shelf.packs[pack_id] = replace(pack, state=PackState.STORED)
            shelf.chunks.update(index.places)

        await asyncio.gather(*(learn(pack_id, size) for pack_id, size in sizes.items()))
        if self._only is not None:
            shelf.items = dict(self._only.get(scope, {}))
            return shelf
        for name, attempt in sorted(manifests, key=lambda one: one[1]):
            item = await self._whole(shelf, ItemKey(scope, name), attempt)
            if item is not None:
                shelf.items[name] = item
        return shelf

    async def _settles(self, name: str) -> bool:
        """Whether an object is durable now. A new backup relies on what an earlier one has left, which may have died before it
        was; whoever only reads does not."""
        if self._only is not None:
            return True
        try:
            await self._remote.objects.settle(name)
        except (NotFound, Unavailable):
            return False
        return True

    async def _whole(self, shelf: _Shelf, key: ItemKey, attempt: int) -> Item | None:
        """An item of which nothing is missing. Its chunks are checked when they are read."""
        try:
            data = await self._remote.objects.get(manifest_name(key, attempt))
            manifest = read_manifest(key, attempt, data, self._remote.keyring.of(key.scope))
        except (CorruptSnapshot, NotFound):
            return None
        if not manifest.chunk_ids() <= shelf.chunks or not await self._settles(manifest_name(key, attempt)):
            return None
        checksum = hashlib.sha256(data).hexdigest()
        return Item(key, ItemState.DURABLE, attempt, manifest.needs, len(data), checksum)

    # ---------------------------------------------------------------------------------------------------------------- uploads

    async def begin(self, key: ItemKey, needs: Sequence[ItemKey] = ()) -> Item:
        shelf = await self._shelf(key.scope)
        known = shelf.items.get(key.name)
        if known is not None and known.state is ItemState.DURABLE:
            return known
        for need in needs:
            if (await self.item(need)).state is not ItemState.DURABLE:
                raise Conflict(f"{key} needs {need}, which is not in the backup.")
        # Of two backups that send the same item at the same time, each has an attempt of its own.
        attempt = max(self._now_ms() << 10 | int.from_bytes(os.urandom(2)) & 1023, (known.attempt if known else 0) + 1)
        shelf.items[key.name] = Item(key, ItemState.UPLOADING, attempt, tuple(needs))
        return shelf.items[key.name]

    def _current(self, key: ItemKey, attempt: int) -> _Shelf:
        shelf = self._shelves[key.scope]
        known = shelf.items.get(key.name)
        if known is None or known.attempt != attempt:
            raise StaleGeneration(f"Attempt {attempt} to store {key} is over.", hint="Begin the backup again.")
        return shelf

    async def pin(self, key: ItemKey, attempt: int, packs: Sequence[PackId]) -> frozenset[PackId]:
        shelf = self._current(key, attempt)
        granted = frozenset(pack_id for pack_id in packs if pack_id in shelf.packs)
        self._held[key] |= granted
        return granted

    async def announce(self, key: ItemKey, attempt: int, pack: Pack) -> None:
        self._current(key, attempt).packs[pack.pack_id] = pack
        self._held[key].add(pack.pack_id)

    async def stored(self, key: ItemKey, attempt: int, pack_id: PackId) -> None:
        packs = self._current(key, attempt).packs
        packs[pack_id] = replace(packs[pack_id], state=PackState.STORED)

    async def commit(self, key: ItemKey, attempt: int, packs: frozenset[PackId], manifest: tuple[int, str]) -> Item:
        shelf = self._current(key, attempt)
        missing = [pack_id for pack_id in packs if shelf.packs[pack_id].state is not PackState.STORED]
        if missing:
            raise Conflict(f"{key} cannot be in the backup: its pack {missing[0]} is not.", hint="Begin the backup again.")
        size, checksum = manifest
        known = shelf.items[key.name]
        shelf.items[key.name] = replace(known, state=ItemState.DURABLE, size=size, checksum=checksum)
        return shelf.items[key.name]

    # ---------------------------------------------------------------------------------------------------------------- looking

    async def item(self, key: ItemKey) -> Item:
        shelf = await self._shelf(key.scope)
        if key.name not in shelf.items:
            raise NotFound(f"The backup has no {key}.")
        return shelf.items[key.name]

    async def holds(self, key: ItemKey) -> list[Pack]:
        """All packs of the scope, where it is not known which an item needs: those that are durable already."""
        shelf = await self._shelf(key.scope)
        known = shelf.items.get(key.name)
        if known is not None and known.state is ItemState.UPLOADING:
            return [shelf.packs[pack_id] for pack_id in sorted(self._held[key])]
        return [shelf.packs[pack_id] for pack_id in sorted(shelf.packs)]

    async def packs(self, scope: Scope) -> list[Pack]:
        shelf = await self._shelf(scope)
        return [shelf.packs[pack_id] for pack_id in sorted(shelf.packs) if shelf.packs[pack_id].state is PackState.STORED]
