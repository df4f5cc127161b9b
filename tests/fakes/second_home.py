"""A second home for fake nodes: the bucket is a dictionary that several nodes share, the rows are whoever's catalogue."""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.core.errors import Conflict, NotFound, PerdureError
from perdure.core.ids import SnapshotId, TenantId
from perdure.wire.node import Damage, Fetched, Fetching, Reclaimed, Sent
from perdure.wire.objects import Catalogue, ItemKey, ItemState, Scope
from tests.fakes.node import FakeNode, StoredSnapshot


@dataclass
class FakeBucket:
    """What an object store holds. ``owner`` is the installation that has claimed it."""

    content: dict[str, tuple[StoredSnapshot, Mapping[str, Any]]] = field(default_factory=dict)
    damage: dict[str, tuple[Damage, ...]] = field(default_factory=dict)
    owner: str | None = None
    images: set[str] = field(default_factory=set)  # files of images that are in it, by their names in errors


class FakeSecondHome:
    """Implements ``wire.node.SecondHome`` for a fake node, and attaches itself to it. ``fail`` as the node has it."""

    def __init__(self, node: FakeNode, bucket: FakeBucket, catalogue: Catalogue, owner: str = "here") -> None:
        self.bucket = bucket
        self.calls: list[str] = []
        self.gate: asyncio.Event | None = None  # uploads and fetches wait for it, half done
        self._coming: set[SnapshotId] = set()
        self.begun = asyncio.Event()
        self.seals = True
        self.shredded: set[TenantId] = set()  # tenants whose key this node has thrown away
        self._node = node
        self._catalogue = catalogue
        self._owner = owner
        self._failures: dict[str, list[PerdureError]] = defaultdict(list)
        node.second_home = self

    def fail(self, method: str, *errors: PerdureError) -> None:
        self._failures[method] += errors

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        if self._failures[method]:
            raise self._failures[method].pop(0)

    async def shred(self, tenant_id: TenantId) -> None:
        self._enter("shred")
        self.shredded.add(tenant_id)

    async def claim(self) -> None:
        self._enter("claim")
        if self.bucket.owner not in (None, self._owner):
            raise Conflict("The object store belongs to another installation.")
        self.bucket.owner = self._owner

    async def upload(self, snapshot_id: SnapshotId, facts: Mapping[str, Any], told: Callable[[Sent], None]) -> Sent:
        self._enter("upload")
        if snapshot_id not in self._node.stored:
            raise NotFound(f"There is no snapshot {snapshot_id}.")
        stored = self._node.stored[snapshot_id]
        key = ItemKey(Scope(stored.facts.tenant_id), snapshot_id)
        item = await self._catalogue.begin(key)
        told(Sent(10, 5))
        self.begun.set()
        if self.gate is not None:
            await self.gate.wait()
        if item.state is not ItemState.DURABLE:
            self.bucket.content[snapshot_id] = (copy.copy(stored), dict(facts))
            await self._catalogue.commit(key, item.attempt, frozenset(), (10, "0" * 64))
        return Sent(20, 10)

    def has(self, snapshot_id: SnapshotId) -> bool:
        return snapshot_id in self._node.stored

    async def fetch(self, snapshot_id: SnapshotId, tenant_id: TenantId, *, afresh: bool = False) -> Fetched:
        self._enter("fetch")
        if snapshot_id in self._node.stored and not afresh:
            return Fetched(is_fetched=False)
        item = await self._catalogue.item(ItemKey(Scope(tenant_id), snapshot_id))
        if item.state is not ItemState.DURABLE:
            raise NotFound(f"The object store does not have {snapshot_id}.")
        self._coming.add(snapshot_id)
        self.begun.set()
        if self.gate is not None:
            await self.gate.wait()
        self._coming.discard(snapshot_id)
        self._node.stored[snapshot_id] = copy.copy(self.bucket.content[snapshot_id][0])
        self._node.damage.pop(snapshot_id, None)
        self._node.bad_disk.discard(snapshot_id)
        return Fetched(is_fetched=True, snapshot_bytes=100)

    async def mend_image(self, snapshot_id: SnapshotId, tenant_id: TenantId, file: str) -> Fetched:
        self._enter("mend_image")
        if file not in self.bucket.images:
            raise NotFound(f"The object store has no {file}.")
        return Fetched(is_fetched=True, with_image=True)

    def fetching(self, snapshot_id: SnapshotId) -> Fetching | None:
        return Fetching(50, 100) if snapshot_id in self._coming else None

    async def verify(self, snapshot_id: SnapshotId, tenant_id: TenantId) -> tuple[Damage, ...]:
        self._enter("verify")
        return self.bucket.damage.get(snapshot_id, ())

    async def evict(self, snapshot_id: SnapshotId) -> int:
        self._enter("evict")
        return 0 if self._node.stored.pop(snapshot_id, None) is None else 100

    async def collect(self, scope: str) -> Reclaimed:
        """Rows as the real one moves them; what no row names any more leaves the bucket."""
        self._enter("collect")
        epoch = await self._catalogue.advance(Scope(scope))
        if epoch is None:
            return Reclaimed(0, 0, 0, 0)
        await self._catalogue.condemn(Scope(scope), epoch)
        names = {item.key.name for item in await self._catalogue.items(Scope(scope))}
        gone = [
            name for name, (stored, _) in self.bucket.content.items() if stored.facts.tenant_id == scope and name not in names
        ]
        for name in gone:
            del self.bucket.content[name]
        return Reclaimed(len(gone), 100 * len(gone), 0, 0)
