"""The server is killed at every point while policies change, snapshots are named and removed, and retention is applied.

Beside the invariants of ``world``: nothing that should go is left after one cleaning, what was removed does not come back, a name
and a policy that were acknowledged hold, and the tree has no loose ends.
"""

from __future__ import annotations

import pytest

from perdure.core.ids import SnapshotId
from perdure.db.database import Database
from perdure.wire.node import Activity
from perdure.workspaces import lineage
from perdure.workspaces.model import Configuration
from tests.simulation.fuse import Fuse, killed_everywhere, steps
from tests.simulation.world import Simulation, kill_in


class Keeping(Simulation):
    def __init__(self, database: Database, label: str, fuse: Fuse) -> None:
        super().__init__(database, label, fuse)
        self.removed: set[SnapshotId] = set()
        self.policy: set[int | None] = {None}

    async def configure(self, name: str, keep: int) -> None:
        async def work() -> None:
            self.policy.add(keep)
            workspace = await self.service.configure(self.ctx, name, Configuration(keep_snapshots=keep))
            assert workspace.keep_snapshots == keep
            self.policy = {keep}

        await self.attempt(work())

    async def rename(self, name: str, label: str, to: str | None) -> None:
        async def work() -> None:
            facts = self.facts[(await self.service.get(self.ctx, name)).id]
            value = facts.named.pop(label)  # asked for: from here on it may have lost that name
            await self.service.name_snapshot(self.ctx, name, label, to)
            if to is not None:
                facts.named[to] = value

        await self.attempt(work())

    async def remove(self, name: str, label: str) -> None:
        async def work() -> None:
            facts = self.facts[(await self.service.get(self.ctx, name)).id]
            facts.named.pop(label, None)
            self.removed.add((await self.service.remove_snapshot(self.ctx, name, label)).id)

        await self.attempt(work())

    async def checkpoints_by_itself(self, name: str, count: int) -> None:
        async def work() -> None:
            workspace = await self.service.get(self.ctx, name)
            self.node.busy[workspace.id] = Activity(1, 0, 0, 0.0, changed=True)
            for _ in range(count):
                self.plane.clock.advance(70)
                await self.service.upkeep.tick()
                await self.service.upkeep.drain()
                await self.service.upkeep.clean()
            del self.node.busy[workspace.id]
            after = await self.service.get(self.ctx, name)
            if after.head_snapshot_id is not None:
                self.facts[after.id].allowed = {self._stored(after.head_snapshot_id)}

        await self.attempt(work())
        self.node.busy.clear()

    async def check(self) -> None:
        await super().check()
        await self.service.upkeep.clean()
        default = self.plane.settings.keep_automatic_checkpoints
        assert await lineage.crowded(self.plane.database, self.node.node_id, default) == [], "something that should go is left"
        assert not self.removed & set(self.node.stored), "what was removed came back"
        for workspace in await self.service.find(self.ctx):
            if workspace.name == "a":
                assert workspace.keep_snapshots in self.policy
            tree = await lineage.tree_of(self.plane.database, workspace.id)
            parents = {entry.parent_id for entry in tree.entries.values()} - {None}
            assert parents <= set(tree.entries), "a snapshot hangs in the air"


async def scenario(simulation: Keeping) -> None:
    await simulation.create("a")
    await simulation.configure("a", 3)
    await simulation.checkpoint("a", "one")
    await simulation.write("a")
    await simulation.checkpoint("a", "two")
    await simulation.checkpoints_by_itself("a", 5)
    await simulation.rename("a", "one", "uno")
    await simulation.remove("a", "two")
    await simulation.fork("a", 1)
    await simulation.write("a")
    await simulation.sleep("a")
    await simulation.configure("a", 1)
    await simulation.rename("a", "uno", None)
    await simulation.delete("a-1")
    await simulation.checkpoint("a", "three")
    await simulation.sleep("a")
    await simulation.remove("a", "three")
    await simulation.pass_time(10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node_too", [True, False], ids=["with its machines", "alone"])
@pytest.mark.parametrize("step", steps(13))
async def test_killed_at_every_point_of_keeping(database: Database, step: int, node_too: bool) -> None:
    async def kill(at: int | None) -> Fuse:
        return await kill_in(Keeping(database, f"k{at or 0}", Fuse(at)), scenario, node_too=node_too)

    whole, fired = await killed_everywhere(kill, step)
    assert {"in transaction, before retention.mark", "in transaction, before retention.configure"} <= set(whole.passed)
    assert fired.total() * step > 100
