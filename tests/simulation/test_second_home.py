"""The server is killed at any point while snapshots are uploaded, leave the node, come back with a wake, and leave the store.

Beside the invariants of ``world``: what rows call durable is in the store and is what the node had, nothing stays there that no
row wants, and uploads that were cut off come to their end.
"""

from __future__ import annotations

import pytest

from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.db.database import Database
from perdure.fleet.objects import StoreCatalogue
from perdure.journal.entries import Journal
from perdure.wire.objects import ItemState, Scope
from tests.fakes.second_home import FakeBucket, FakeSecondHome
from tests.simulation.fuse import Fuse, FusedCalls, killed_everywhere, steps
from tests.simulation.world import PATH, Simulation, kill_in

#: Calls that change something have two points, as those of the node have.
CHANGING = ("claim", "upload", "fetch", "evict", "collect", "shred")


class TwoHomes(Simulation):
    def __init__(self, database: Database, label: str, fuse: Fuse) -> None:
        super().__init__(database, label, fuse)
        self.bucket = FakeBucket()
        self.catalogue = StoreCatalogue(database, of_snapshots=True)
        self.home = FakeSecondHome(self.node, self.bucket, self.catalogue)
        self.node.second_home = FusedCalls(lambda: self.fuse, "home", self.home, CHANGING)  # type: ignore[assignment]

    async def upload(self) -> None:
        async def work() -> None:
            for _ in range(4):
                await self.service.upkeep.uploads.begin()
                await self.service.upkeep.uploads.drain()

        await self.attempt(work())

    async def push(self, name: str) -> None:
        async def work() -> None:
            snapshot = await self.service.push_snapshot(self.ctx, name, None)
            assert snapshot.id in self.bucket.content, "it was acknowledged as durable in the store"

        await self.attempt(work())

    async def evict(self) -> None:
        await self.attempt(self.service.upkeep.room.evict())

    async def collect(self) -> None:
        await self.attempt(self._collect(2))

    async def _collect(self, passes: int) -> None:
        for _ in range(passes):
            await self.service.upkeep.room.collect()

    async def remove(self, name: str, label: str) -> None:
        async def work() -> None:
            facts = self.facts[(await self.service.get(self.ctx, name)).id]
            facts.named.pop(label, None)
            await self.service.remove_snapshot(self.ctx, name, label)
            await self.service.upkeep.clean()

        await self.attempt(work())

    def _stored(self, snapshot_id: SnapshotId) -> bytes:
        if snapshot_id in self.node.stored:
            return super()._stored(snapshot_id)
        found = self.bucket.content[snapshot_id][0].files.get(PATH)
        return bytes(found.content) if found else b""

    async def end(self) -> None:
        """A collection goes over every tenant's scope: those of the runs before would make each longer than the last."""
        await super().end()
        await self.plane.execute("delete from store_items")
        await self.plane.execute("delete from store_scopes")
        await self.plane.execute("delete from tenant_shreds")

    async def check(self) -> None:
        for row in await self.service._store.on_node(self.node.node_id):
            if row.id not in self.node.stored:
                await self.home.fetch(row.id, self.tenant)  # only what the store has was let go
        await super().check()
        await self.upload()
        await self._collect(3)
        rows = {row.id for row in await self.service._store.on_node(self.node.node_id)}
        durable = {item.key.name for item in await self.catalogue.items(Scope(self.tenant)) if item.state is ItemState.DURABLE}
        mine = {name for name, (stored, _) in self.bucket.content.items() if stored.facts.tenant_id == self.tenant}
        assert durable == rows == mine, "after an upload and three collections the store has what rows want, and no more"
        for name in mine:
            assert self.bucket.content[name][0].files == self.node.stored[SnapshotId(name)].files


async def scenario(simulation: TwoHomes) -> None:
    await simulation.create("a")
    await simulation.write("a")
    await simulation.checkpoint("a", "one")
    await simulation.upload()
    await simulation.write("a")
    await simulation.sleep("a")
    await simulation.push("a")
    await simulation.evict()
    await simulation.wake("a")
    await simulation.write("a")
    await simulation.fork("a", 1)
    await simulation.remove("a", "one")
    await simulation.collect()
    await simulation.sleep("a")
    await simulation.sleep("a-1")
    await simulation.upload()
    await simulation.evict()
    await simulation.write("a-1")
    await simulation.delete("a-1")
    await simulation.collect()
    await simulation.wake("a")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node_too", [True, False], ids=["with its machines", "alone"])
@pytest.mark.parametrize("step", steps(13))
async def test_killed_at_every_point_of_both_homes(database: Database, step: int, node_too: bool) -> None:
    async def kill(at: int | None) -> Fuse:
        return await kill_in(TwoHomes(database, f"k{at or 0}", Fuse(at)), scenario, node_too=node_too)

    whole, fired = await killed_everywhere(kill, step)
    calls = {f"after home.{name}" for name in CHANGING if name != "shred"}
    assert calls | {"in transaction, before homes.release_snapshots"} <= set(whole.passed)
    assert fired.total() * step > 100


class Shredded(TwoHomes):
    """The tenant ends: with everything, or not at all."""

    acknowledged = False

    async def shred(self) -> None:
        async def work() -> None:
            self.deleted |= {one.id for one in await self.service.find(self.ctx)}  # asked for: from here on they may be gone
            await self.service.shred_tenant(self.ctx, self.tenant, with_workspaces=True)
            self.acknowledged = True

        await self.attempt(work())

    async def check(self) -> None:
        row = await self.plane.database.one("shreds.of", tenant_id=self.tenant)
        assert (self.tenant in self.home.shredded) <= (row is not None), "a key went without intent"
        if row is None:
            assert not self.acknowledged
            await super().check()
            return
        assert row["state"] == "done", "what was asked for has come to its end"
        assert self.tenant in self.home.shredded
        assert await self.service.find(self.ctx) == []
        await super().check()  # neither home has anything of it
        entries = await Journal(self.plane.database).read(self.tenant, WorkspaceId(self.tenant))
        assert [entry.kind for entry in entries] == ["shredding", "shredded"], "said once, however often it was begun"


async def ending(simulation: Shredded) -> None:
    await simulation.create("a")
    await simulation.write("a")
    await simulation.sleep("a")
    await simulation.create("b")
    await simulation.checkpoint("b", "one")
    await simulation.upload()
    await simulation.write("b")
    await simulation.shred()
    await simulation.upload()
    await simulation.collect()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node_too", [True, False], ids=["with its machines", "alone"])
@pytest.mark.parametrize("step", steps(5))
async def test_killed_at_every_point_of_a_tenants_end(database: Database, step: int, node_too: bool) -> None:
    async def kill(at: int | None) -> Fuse:
        return await kill_in(Shredded(database, f"e{at or 0}", Fuse(at)), ending, node_too=node_too)

    whole, fired = await killed_everywhere(kill, step)
    assert {"after home.shred", "in transaction, before shreds.ask", "after shreds.done"} <= set(whole.passed)
    assert fired.total() * step > 60
