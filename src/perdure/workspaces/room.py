"""Room in both homes: what the object store has may go from the node, and what nobody wants any more goes from the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from functools import partial

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.fleet.objects import StoreCatalogue
from perdure.wire.node import Node, SecondHome
from perdure.workspaces.owner import Owner
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)


class Room:
    def __init__(self, tools: Tools, node: Node, owner_of: Callable[[WorkspaceId], Owner]) -> None:
        self._database = tools.store.database
        self._catalogue = StoreCatalogue(tools.store.database)
        self._node = node
        self._owner_of = owner_of

    async def evict(self) -> int:
        """Remove from the node what need not stay there; returns how many snapshots that may be. Each in the turn of its
        workspace, so that no wake or capture comes between the look and the removal; a busy one is left to the next time.

        Raises Conflict when the store is not ours any more: then what the rows call durable in it may be gone.
        """
        home = self._node.second_home
        if home is None:
            return 0
        found = await self._evictable([facts.snapshot_id for facts in (await self._node.inventory()).snapshots])
        if found:
            await home.claim()
        for snapshot_id, workspace_id in found.items():
            owner = self._owner_of(workspace_id)
            if not owner.is_busy:
                await owner.run(partial(self._evict, home, snapshot_id))
        return len(found)

    async def clear(self, snapshot_ids: list[SnapshotId]) -> int:
        """Remove these from the node, in the turn of their workspace, which sleeps; returns how many are still there: the store
        does not have them yet, or another workspace that is awake stands on them. Raises Conflict like ``evict``."""
        home = self._node.second_home
        if home is None:
            return len(snapshot_ids)
        here = {facts.snapshot_id for facts in (await self._node.inventory()).snapshots} & set(snapshot_ids)
        going = await self._evictable(sorted(here))
        if going:
            await home.claim()
        for snapshot_id in going:
            await home.evict(snapshot_id)
        return len(here) - len(going) + (await self._count_here(going) if going else 0)

    async def _count_here(self, snapshot_ids: Container[SnapshotId]) -> int:
        """A start that reads one keeps it there."""
        return sum(facts.snapshot_id in snapshot_ids for facts in (await self._node.inventory()).snapshots)

    async def _evict(self, home: SecondHome, snapshot_id: SnapshotId) -> None:
        if snapshot_id in await self._evictable([snapshot_id]):
            await home.evict(snapshot_id)

    async def _evictable(self, here: list[SnapshotId]) -> dict[SnapshotId, WorkspaceId]:
        rows = await self._database.all("homes.evictable", node_id=self._node.node_id, here=here)
        return {SnapshotId(row["id"]): WorkspaceId(row["workspace_id"]) for row in rows}

    async def collect(self) -> None:
        """One pass of the store's garbage collection over every scope. What it was cut off from is made good by the next."""
        home = self._node.second_home
        if home is None:
            return
        await home.claim()
        for scope in await self._catalogue.scopes():
            released = await self._catalogue.release_unwanted(scope)
            crashpoint(CrashPoint.COLLECT_RELEASED)
            done = await home.collect(scope)
            if released or done.packs_deleted or done.strays_deleted or done.packs_rewritten:
                _log.info(
                    "object store, %s: %d items released, %d packs (%d bytes) and %d strays deleted, %d packs rewritten",
                    *(scope, released, done.packs_deleted, done.bytes_deleted, done.strays_deleted, done.packs_rewritten),
                )
