"""A Catalogue in memory: every method is atomic, as a transaction is. Fit for tests of all that moves bytes."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from perdure.core.errors import Conflict, NotFound, StaleGeneration
from perdure.wire.objects import Item, ItemKey, ItemState, Pack, PackId, PackState, Scope, check_scope


@dataclass
class _PackRow:
    pack: Pack
    whole: bool = False
    condemned_at: int = 0


@dataclass
class FakeCatalogue:
    rows: dict[PackId, _PackRow] = field(default_factory=dict)
    items_by_key: dict[ItemKey, Item] = field(default_factory=dict)
    touched: dict[ItemKey, int] = field(default_factory=dict)
    held: set[tuple[ItemKey, PackId]] = field(default_factory=set)
    epochs: dict[Scope, int] = field(default_factory=dict)
    epoch_s: float = 0.0
    now_s: float = 0.0  # tests move it
    epoch_at_s: dict[Scope, float] = field(default_factory=dict)
    first_seen: dict[tuple[Scope, str], int] = field(default_factory=dict)
    attempts: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    locks: defaultdict[ItemKey, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    # ---------------------------------------------------------------------------------------------------------- uploads

    async def begin(self, key: ItemKey, needs: Sequence[ItemKey] = ()) -> Item:
        row = self.items_by_key.get(key)
        if row is not None and row.state is ItemState.DURABLE:
            return row
        if row is not None and row.state is ItemState.RELEASED:
            raise Conflict(f"{key} was released and cannot be uploaded again.")
        for need in needs:
            other = self.items_by_key.get(need)
            if other is None or other.state is not ItemState.DURABLE:
                raise Conflict(f"{key} needs {need}, which is not in the store.")
        self.items_by_key[key] = Item(key, ItemState.UPLOADING, next(self.attempts), tuple(needs))
        self.touched[key] = self.epochs.get(key.scope, 0)
        return self.items_by_key[key]

    def _touch(self, key: ItemKey, attempt: int) -> Item:
        row = self.items_by_key.get(key)
        if row is None or row.attempt != attempt or row.state is not ItemState.UPLOADING:
            raise StaleGeneration(f"Attempt {attempt} to upload {key} is over.")
        self.touched[key] = self.epochs.get(key.scope, 0)
        return row

    async def pin(self, key: ItemKey, attempt: int, packs: Sequence[PackId]) -> frozenset[PackId]:
        self._touch(key, attempt)
        granted = set()
        for pack_id in packs:
            row = self.rows.get(pack_id)
            if row is None or row.pack.scope != key.scope or not row.whole or row.pack.state is PackState.DELETING:
                continue
            self._set(row, PackState.STORED)
            self.held.add((key, pack_id))
            granted.add(pack_id)
        return frozenset(granted)

    async def announce(self, key: ItemKey, attempt: int, pack: Pack) -> None:
        self._touch(key, attempt)
        if pack.pack_id in self.rows or pack.scope != key.scope:
            raise Conflict(f"The pack {pack.pack_id} was announced already, or belongs elsewhere.")
        self.rows[pack.pack_id] = _PackRow(replace(pack, state=PackState.PENDING))
        self.held.add((key, pack.pack_id))

    async def stored(self, key: ItemKey, attempt: int, pack_id: PackId) -> None:
        self._touch(key, attempt)
        row = self.rows.get(pack_id)
        if row is None or (key, pack_id) not in self.held:
            raise Conflict(f"{key} has no pack {pack_id}.")
        row.whole = True
        self._set(row, PackState.STORED)

    async def commit(self, key: ItemKey, attempt: int, packs: frozenset[PackId], manifest: tuple[int, str]) -> Item:
        row = self.items_by_key.get(key)
        if row is not None and (row.state, row.attempt, row.checksum) == (ItemState.DURABLE, attempt, manifest[1]):
            return row
        row = self._touch(key, attempt)
        for pack_id in packs:
            if (key, pack_id) not in self.held or self.rows[pack_id].pack.state is not PackState.STORED:
                raise Conflict(f"{key} cannot be durable: its pack {pack_id} is not.")
        self.held = {(other, pack_id) for other, pack_id in self.held if other != key or pack_id in packs}
        self.items_by_key[key] = replace(row, state=ItemState.DURABLE, size=manifest[0], checksum=manifest[1])
        return self.items_by_key[key]

    async def release(self, key: ItemKey) -> None:
        if key in self.items_by_key:
            self.items_by_key[key] = replace(self.items_by_key[key], state=ItemState.RELEASED)

    @staticmethod
    def _set(row: _PackRow, state: PackState) -> None:
        row.pack = replace(row.pack, state=state)

    # ----------------------------------------------------------------------------------------------------------- looking

    @asynccontextmanager
    async def alone(self, key: ItemKey) -> AsyncIterator[None]:
        async with self.locks[key]:
            yield

    async def item(self, key: ItemKey) -> Item:
        if key not in self.items_by_key:
            raise NotFound(f"The store has no {key}.")
        return self.items_by_key[key]

    async def items(self, scope: Scope) -> list[Item]:
        return [self.items_by_key[key] for key in sorted(self.items_by_key) if key.scope == check_scope(scope)]

    async def holds(self, key: ItemKey) -> list[Pack]:
        return [self.rows[pack_id].pack for other, pack_id in sorted(self.held) if other == key]

    async def packs(self, scope: Scope) -> list[Pack]:
        check_scope(scope)
        usable = (PackState.STORED, PackState.CONDEMNED)
        rows = [self.rows[pack_id] for pack_id in sorted(self.rows)]
        return [row.pack for row in rows if row.pack.scope == scope and row.whole and row.pack.state in usable]

    # -------------------------------------------------------------------------------------------------------- collection

    async def advance(self, scope: Scope) -> int | None:
        at = self.epoch_at_s.get(check_scope(scope))
        if at is not None and at + self.epoch_s > self.now_s:
            return None
        self.epochs[scope] = self.epochs.get(scope, 0) + 1
        self.epoch_at_s[scope] = self.now_s
        return self.epochs[scope]

    def _in(self, scope: Scope, epoch: int) -> bool:
        if self.epochs.get(scope, 0) != epoch:
            return False
        self.epoch_at_s[scope] = self.now_s
        return True

    async def condemn(self, scope: Scope, epoch: int) -> list[Pack]:
        is_current = self._in(scope, epoch)
        if is_current:
            self._let_go(scope, epoch)
        held = {pack_id for _, pack_id in self.held}
        ours = [row for row in self.rows.values() if row.pack.scope == scope and row.pack.pack_id not in held]
        for row in ours if is_current else ():
            if row.pack.state is PackState.CONDEMNED and row.condemned_at < epoch:
                self._set(row, PackState.DELETING)
            elif row.pack.state in (PackState.PENDING, PackState.STORED):
                self._set(row, PackState.CONDEMNED)
                row.condemned_at = epoch
        return sorted((row.pack for row in ours if row.pack.state is PackState.DELETING), key=lambda pack: pack.pack_id)

    def _let_go(self, scope: Scope, epoch: int) -> None:
        gone = True
        while gone:  # one that goes may have needed another
            needed = {need for item in self.items_by_key.values() for need in item.needs}
            gone = {
                key
                for key, item in self.items_by_key.items()
                if key.scope == scope
                and (
                    (item.state is ItemState.RELEASED and key not in needed)
                    or (item.state is ItemState.UPLOADING and self.touched[key] < epoch - 1)
                )
            }
            for key in gone:
                del self.items_by_key[key], self.touched[key]
            self.held = {(key, pack_id) for key, pack_id in self.held if key not in gone}

    async def drop(self, packs: Sequence[PackId]) -> None:
        for pack_id in packs:
            if pack_id in self.rows and self.rows[pack_id].pack.state is PackState.DELETING:
                del self.rows[pack_id]

    async def strays(self, scope: Scope, epoch: int, packs: Sequence[PackId], manifests: Sequence[tuple[str, int]]) -> list[str]:
        if not self._in(scope, epoch):
            return []
        unknown = {str(pack_id) for pack_id in packs if pack_id not in self.rows}
        for name, attempt in manifests:
            item = self.items_by_key.get(ItemKey(scope, name))
            if item is None or item.attempt != attempt:
                unknown.add(f"{name}.{attempt}")
        self.first_seen = {
            (other, name): seen for (other, name), seen in self.first_seen.items() if other != scope or name in unknown
        }
        for name in unknown:
            self.first_seen.setdefault((scope, name), epoch)
        return sorted(name for name in unknown if self.first_seen[scope, name] < epoch)

    async def replace(self, key: ItemKey, attempt: int, old: PackId, new: PackId | None, seen: frozenset[ItemKey]) -> bool:
        self._touch(key, attempt)
        if new is not None and ((key, new) not in self.held or self.rows[new].pack.state is not PackState.STORED):
            raise Conflict(f"{key} has no stored pack {new}.")
        holders = {other for other, pack_id in self.held if pack_id == old}
        uploading = {other for other in holders if self.items_by_key[other].state is ItemState.UPLOADING}
        if not holders or uploading or not holders <= seen:
            return False
        self.held -= {(other, old) for other in holders}
        if new is not None:
            self.held |= {(other, new) for other in holders}
        return True
