"""The catalogue of the object store in PostgreSQL: ``wire.objects.Catalogue``, one transaction per method.

Whoever changes something of a scope locks the scope's row first. There are a few such changes per pack of 16 MiB, so that this
costs nothing, and what a transaction has looked at cannot change before it ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from psycopg.rows import DictRow

from perdure.core.errors import Conflict, HostUnfit, NotFound, Shredded, StaleGeneration
from perdure.core.ids import DEFAULT_TENANT, NodeId, is_id
from perdure.db.database import Database, Transaction
from perdure.wire.objects import IMAGES, Item, ItemKey, ItemState, Pack, PackId, PackState, Scope, check_scope


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """What this node seals with. ``mark`` gives that of a scope's key, None for one that is not sealed."""

    node_id: NodeId
    mark: Callable[[Scope], str | None]


class StoreCatalogue:
    """Implements ``wire.objects.Catalogue``. With ``of_snapshots`` an item that is named by a snapshot's id can be begun only
    while that snapshot's row is complete: nothing is uploaded, and left to lie, that has been removed meanwhile.

    With ``keys`` a node whose key is not the one that the tenant's content is sealed with uploads nothing of it, and looks
    nothing of it up to be read: both raise HostUnfit.

    An epoch of the collection lasts ``epoch_s`` at least, by the database's clock, however many servers collect.
    """

    def __init__(
        self, database: Database, *, of_snapshots: bool = False, keys: NodeKeys | None = None, epoch_s: float = 0.0
    ) -> None:
        self._database = database
        self._epoch_s = epoch_s
        self._keys = keys
        self._of_snapshots = of_snapshots

    @asynccontextmanager
    async def _locked(self, scope: Scope) -> AsyncIterator[Transaction]:
        async with self._database.transaction() as tx:
            if await tx.one("objects.lock_scope", scope=check_scope(scope)) is None:
                await tx.run("objects.add_scope", scope=scope, tenant_id=_tenant(scope))
                await tx.one("objects.lock_scope", scope=scope)
            yield tx

    @asynccontextmanager
    async def _attempt(self, key: ItemKey, attempt: int) -> AsyncIterator[Transaction]:
        """The scope is locked, and this attempt is the one that counts."""
        async with self._locked(key.scope) as tx:
            await _touch(tx, key, attempt)
            yield tx

    # ---------------------------------------------------------------------------------------------------------- uploads

    async def begin(self, key: ItemKey, needs: Sequence[ItemKey] = ()) -> Item:
        async with self._locked(key.scope) as tx:
            row = await tx.one("objects.item", scope=key.scope, name=key.name)
            if row is not None and ItemState(row["state"]) is ItemState.DURABLE:
                return _item(row)
            if await tx.one("shreds.of", tenant_id=key.scope) is not None:
                raise Shredded(
                    f"Tenant {key.scope} was shredded: nothing of it goes into the object store any more.",
                    hint="What it has since is on its node only, and it gets no other key. For what is to be stored make another "
                    "tenant: perdure tenant create NAME.",
                )
            await self._mark_key(tx, key.scope)
            if row is not None and ItemState(row["state"]) is ItemState.RELEASED:
                raise Conflict(f"{key} was released and cannot be uploaded again.", hint="Take a new snapshot.")
            if self._of_snapshots and is_id(key.name, "snp") and await tx.one("homes.lock_wanted", id=key.name) is None:
                raise NotFound(f"Snapshot {key.name} has been removed; nothing of it is uploaded.")
            for need in needs:
                if await tx.one("objects.lock_durable", scope=need.scope, name=need.name) is None:
                    raise Conflict(f"{key} needs {need}, which is not in the store.", hint=f"Upload {need} first.")
            count = await tx.one("objects.next_attempt", scope=key.scope)
            assert count is not None, "the scope's row is locked"
            names = {"scope": key.scope, "name": key.name, "tenant_id": _tenant(key.scope)}
            await tx.run("objects.begin", **names, attempt=count["attempts"], epoch=count["epoch"])
            await tx.run("objects.clear_needs", scope=key.scope, name=key.name)
            for need in needs:
                await tx.run("objects.add_need", **names, need_scope=need.scope, need_name=need.name)
            return Item(key, ItemState.UPLOADING, int(count["attempts"]), tuple(needs))

    async def _mark_key(self, tx: Transaction, scope: Scope) -> None:
        """The scope's row is locked, so of two nodes that begin at once the second one finds the mark of the first."""
        mark = None if self._keys is None else self._keys.mark(scope)
        if self._keys is not None and mark is not None:
            row = await tx.one("objects.mark_key", scope=scope, mark=mark, node_id=self._keys.node_id)
            _check_key(scope, mark, row)

    async def pin(self, key: ItemKey, attempt: int, packs: Sequence[PackId]) -> frozenset[PackId]:
        async with self._attempt(key, attempt) as tx:
            rows = await tx.all("objects.pin_packs", scope=key.scope, packs=list(packs))
            granted = frozenset(PackId(row["id"]) for row in rows)
            await tx.run("objects.hold", scope=key.scope, name=key.name, packs=sorted(granted))
            return granted

    async def announce(self, key: ItemKey, attempt: int, pack: Pack) -> None:
        if pack.scope != key.scope:
            raise Conflict(f"The pack {pack.pack_id} belongs to {pack.scope}, not to {key.scope}.")
        async with self._attempt(key, attempt) as tx:
            await tx.run(
                "objects.announce",
                id=pack.pack_id,
                scope=pack.scope,
                tenant_id=_tenant(pack.scope),
                attempt=attempt,
                size=pack.size,
                index_bytes=pack.index_bytes,
            )
            await tx.run("objects.hold", scope=key.scope, name=key.name, packs=[pack.pack_id])

    async def stored(self, key: ItemKey, attempt: int, pack_id: PackId) -> None:
        async with self._attempt(key, attempt) as tx:
            if await tx.one("objects.stored", scope=key.scope, name=key.name, id=pack_id) is None:
                raise Conflict(f"{key} has no pack {pack_id}.")

    async def commit(self, key: ItemKey, attempt: int, packs: frozenset[PackId], manifest: tuple[int, str]) -> Item:
        names = {"scope": key.scope, "name": key.name}
        async with self._locked(key.scope) as tx:
            row = await tx.one("objects.item", **names)
            if row is not None and _is_that(_item(row), attempt, manifest):
                return _item(row)
            await _touch(tx, key, attempt)
            if await _count(tx, key, packs) != len(packs):
                raise Conflict(f"{key} cannot be durable: a pack of it is not.", hint="Upload it again.")
            await tx.run("objects.let_go", **names, packs=sorted(packs))
            await tx.run("objects.commit", **names, attempt=attempt, size=manifest[0], checksum=manifest[1])
            row = await tx.one("objects.item", **names)
            assert row is not None, "it was updated a moment ago"
            return _item(row)

    async def release(self, key: ItemKey) -> None:
        async with self._locked(key.scope) as tx:
            await tx.run("objects.release", scope=key.scope, name=key.name)

    async def release_unwanted(self, scope: Scope) -> int:
        """Release what no row wants any more: snapshots that were removed, images on which nothing lies. Returns how many."""
        async with self._locked(scope) as tx:
            query = "homes.release_images" if scope == IMAGES else "homes.release_snapshots"
            return len(await tx.all(query, scope=scope))

    async def scopes(self) -> list[Scope]:
        """Every scope that may be collected, the images' last: they go when what lies on them has gone."""
        return [Scope(row["scope"]) for row in await self._database.all("homes.scopes", images=IMAGES)]

    # --------------------------------------------------------------------------------------------------------- looking

    @asynccontextmanager
    async def alone(self, key: ItemKey) -> AsyncIterator[None]:
        async with self._database.transaction() as tx:  # its connection is the claim: PostgreSQL ends it with whoever held it
            await tx.run("objects.patient")
            await tx.run("objects.alone", key=str(key))
            yield

    async def item(self, key: ItemKey) -> Item:
        if self._keys is not None and key.scope != IMAGES:
            row = await self._database.one("objects.key_mark", scope=key.scope)
            if row is not None:
                _check_key(key.scope, self._keys.mark(key.scope), row)
        row = await self._database.one("objects.item", scope=key.scope, name=key.name)
        if row is None:
            raise NotFound(f"The object store has no {key}.", hint="Wait until it is uploaded, or look for another.")
        return _item(row)

    async def items(self, scope: Scope) -> list[Item]:
        return [_item(row) for row in await self._database.all("objects.items", scope=check_scope(scope))]

    async def holds(self, key: ItemKey) -> list[Pack]:
        return [_pack(row) for row in await self._database.all("objects.holds", scope=key.scope, name=key.name)]

    async def packs(self, scope: Scope) -> list[Pack]:
        return [_pack(row) for row in await self._database.all("objects.packs", scope=check_scope(scope))]

    # ------------------------------------------------------------------------------------------------------ collection

    async def advance(self, scope: Scope) -> int | None:
        async with self._locked(scope) as tx:
            row = await tx.one("objects.advance", scope=scope, epoch_s=self._epoch_s)
            return None if row is None else int(row["epoch"])

    async def condemn(self, scope: Scope, epoch: int) -> list[Pack]:
        async with self._locked(scope) as tx:
            if await tx.one("objects.in_epoch", scope=scope, epoch=epoch) is not None:
                while await tx.all("objects.collect_items", scope=scope, epoch=epoch):
                    pass
                await tx.run("objects.doom", scope=scope, epoch=epoch)
                await tx.run("objects.condemn", scope=scope, epoch=epoch)
            return [_pack(row) for row in await tx.all("objects.deleting", scope=scope)]

    async def drop(self, packs: Sequence[PackId]) -> None:
        await self._database.run("objects.drop", packs=list(packs))

    async def strays(self, scope: Scope, epoch: int, packs: Sequence[PackId], manifests: Sequence[tuple[str, int]]) -> list[str]:
        listed = {"names": [name for name, _ in manifests], "attempts": [attempt for _, attempt in manifests]}
        async with self._locked(scope) as tx:
            if await tx.one("objects.in_epoch", scope=scope, epoch=epoch) is None:
                return []
            unknown = [row["name"] for row in await tx.all("objects.unknown", scope=scope, packs=list(packs), **listed)]
            await tx.run("objects.forget_strays", scope=scope, names=unknown)
            await tx.run("objects.note_strays", scope=scope, names=unknown, epoch=epoch, tenant_id=_tenant(scope))
            return [row["name"] for row in await tx.all("objects.old_strays", scope=scope, epoch=epoch)]

    async def replace(self, key: ItemKey, attempt: int, old: PackId, new: PackId | None, seen: frozenset[ItemKey]) -> bool:
        async with self._attempt(key, attempt) as tx:
            if new is not None and await _count(tx, key, frozenset((new,))) != 1:
                raise Conflict(f"{key} has no stored pack {new}.")
            rows = await tx.all("objects.holders", pack_id=old)
            uploading = any(ItemState(row["state"]) is ItemState.UPLOADING for row in rows)
            if not rows or uploading or not {ItemKey(Scope(row["scope"]), row["name"]) for row in rows} <= seen:
                return False
            if new is not None:
                await tx.run("objects.hold_instead", old=old, new=new)
            await tx.run("objects.drop_holds", pack_id=old)
            return True


async def _touch(tx: Transaction, key: ItemKey, attempt: int) -> None:
    if await tx.one("objects.touch", scope=key.scope, name=key.name, attempt=attempt) is None:
        raise StaleGeneration(
            f"Attempt {attempt} to upload {key} is over: another has followed it, or it was given up.",
            hint="Upload it again; what is in the store already is not sent again.",
        )


async def _count(tx: Transaction, key: ItemKey, packs: frozenset[PackId]) -> int:
    row = await tx.one("objects.count_stored", scope=key.scope, name=key.name, packs=sorted(packs))
    assert row is not None, "count gives a row"
    return int(row["n"])


def _is_that(item: Item, attempt: int, manifest: tuple[int, str]) -> bool:
    return item.state is ItemState.DURABLE and (item.attempt, item.checksum) == (attempt, manifest[1])


def _check_key(scope: Scope, mark: str | None, row: DictRow | None) -> None:
    if row is not None and row["key_mark"] != mark:
        raise HostUnfit(
            f"This node has another key of tenant {scope} than the one that the object store is sealed with.",
            hint=f"Stop this server, copy 'master.key' and the directory 'keys' from the home of node {row['key_node']}, which "
            "stored first, over those in this home, and start it again.",
        )


def _tenant(scope: Scope) -> str:
    """Images belong to the installation."""
    return DEFAULT_TENANT if scope == IMAGES else scope


def _item(row: DictRow) -> Item:
    needs = tuple(ItemKey(Scope(scope), name) for scope, name in row["needs"])
    key = ItemKey(Scope(row["scope"]), row["name"])
    return Item(key, ItemState(row["state"]), int(row["generation"]), needs, int(row["size"]), row["checksum"])


def _pack(row: DictRow) -> Pack:
    return Pack(PackId(row["id"]), Scope(row["scope"]), int(row["size"]), int(row["index_bytes"]), PackState(row["state"]))
