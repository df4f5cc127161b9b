"""One simulated installation: a workload against a service that may be killed anywhere, its recovery, and what must then hold."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from perdure.core.errors import CorruptSnapshot, PerdureError
from perdure.core.ids import NodeId, SnapshotId, TenantId, WorkspaceId
from perdure.db.database import Database
from perdure.fleet.nodes import NodeRegistry
from perdure.wire.node import Damage
from perdure.workspaces import lifecycle
from perdure.workspaces.model import Context, CreateWorkspace, Recovery, Workspace, WorkspaceKind, WorkspaceState
from perdure.workspaces.service import WorkspaceService
from perdure.workspaces.store import SnapshotState
from tests.fakes.control_plane import CTX, ControlPlane, bytes_of
from tests.fakes.node import FakeNode
from tests.simulation.fuse import Fuse, FusedDatabase, Killed, fused_node

PATH = "/root/value"
KILLED = (Killed, asyncio.CancelledError)


@dataclass
class Facts:
    """What callers were told about one workspace."""

    written: list[bytes] = field(default_factory=list)  # every acknowledged write, oldest first
    #: What the last acknowledged capture holds, or was written since. None: nobody was told that this workspace exists.
    allowed: set[bytes] | None = None
    named: dict[str, bytes] = field(default_factory=dict)
    generation: int = 0
    #: Last writes that a rewind or a promotion has set aside: each is in a branch of the workspace.
    also: set[bytes] = field(default_factory=set)

    def set_aside(self, value: bytes) -> None:
        """The workspace goes on from another value; what was written last must be kept."""
        self.also = (self.also | {*self.written[-1:]}) - {value}
        self.written[:] = [value]


S = TypeVar("S", bound="Simulation")


class Simulation:
    """``run`` does a step under a fuse; ``recover`` starts a new process; ``check`` asserts the invariants."""

    def __init__(self, database: Database, label: str, fuse: Fuse) -> None:
        self.tenant = TenantId(f"ten_{label}")
        self.ctx = Context(CTX.principal, CTX.request_id, self.tenant)
        self.plane = ControlPlane(database)
        self.plane.node = FakeNode(NodeId(f"nod_{label}"), clock=self.plane.clock)
        self.fuse = fuse
        self.facts: dict[WorkspaceId, Facts] = defaultdict(Facts)
        self.deleted: set[WorkspaceId] = set()
        self._values = 0

    @property
    def service(self) -> WorkspaceService:
        return self.plane.service

    @property
    def node(self) -> FakeNode:
        return self.plane.node

    async def begin(self) -> None:
        await NodeRegistry(self.plane.database, lease_s=20).register(self.node.node_id)
        self.plane.build(FusedDatabase(self.fuse, self.plane.database), fused_node(self.fuse, self.node))
        await self.attempt(self.service.upkeep.start(timers=False))

    async def attempt(self, work: Awaitable[Any]) -> bool:
        """Whether it was acknowledged. Errors of the product and the death of the process are both no."""
        try:
            await work
        except PerdureError:
            return False
        except KILLED:
            if self.fuse.blew_at is None:
                raise
            return False
        return True

    # ------------------------------------------------------------------------------------------------------------ workload

    async def create(self, name: str) -> None:
        async def work() -> None:
            workspace, _ = await self.service.create(self.ctx, CreateWorkspace(name))
            self.facts[workspace.id] = Facts(allowed={b""}, generation=1)

        await self.attempt(work())

    async def write(self, name: str) -> None:
        async def work() -> None:
            self._values += 1
            value = b"%d" % self._values
            async with self.service.awake(self.ctx, name) as awake:
                await awake.guest.write_file(PATH, bytes_of(value))
                self._seen(awake.workspace)
                facts = self.facts[awake.workspace.id]
                facts.written.append(value)
                if facts.allowed is not None:
                    facts.allowed.add(value)

        await self.attempt(work())

    async def checkpoint(self, name: str, label: str | None = None) -> None:
        async def work() -> None:
            snapshot = await self.service.checkpoint(self.ctx, name, name=label)
            facts = self.facts[snapshot.workspace_id]
            facts.allowed = {self._stored(snapshot.id)}
            if label:
                facts.named[label] = self._stored(snapshot.id)

        await self.attempt(work())

    async def sleep(self, name: str) -> None:
        async def work() -> None:
            workspace, snapshot = await self.service.sleep(self.ctx, name)
            self.facts[workspace.id].allowed = {self._stored(snapshot.id)}

        await self.attempt(work())

    def _stored(self, snapshot_id: SnapshotId) -> bytes:
        found = self.node.stored[snapshot_id].files.get(PATH)
        return bytes(found.content) if found else b""

    async def wake(self, name: str) -> None:
        async def work() -> None:
            workspace, _ = await self.service.wake(self.ctx, name)
            self._seen(workspace)

        await self.attempt(work())

    async def fork(self, name: str, count: int) -> None:
        async def work() -> None:
            for child in await self.service.fork(self.ctx, name, count):
                if isinstance(child, Workspace) and child.forked_from:
                    self.facts[child.id].allowed = {self._stored(child.forked_from)}

        await self.attempt(work())

    async def rewind(self, name: str, label: str | None = None) -> None:
        """To a named snapshot, or to its oldest one."""

        async def work() -> None:
            found = [one for one in await self.service.snapshots(self.ctx, name) if label in {None, one.name}]
            if not found:
                return
            at, value = await self.service.get(self.ctx, name), self._stored(found[0].id)
            facts = self.facts[at.id]
            if facts.allowed is not None:
                facts.allowed.add(value)  # asked for: from here on it may be there
            workspace, _ = await self.service.rewind(self.ctx, name, found[0].id)
            self._seen(workspace)
            facts.allowed = {value}
            facts.set_aside(value)

        await self.attempt(work())

    async def promote(self, name: str) -> None:
        """The newest branch of a workspace, if there is one."""

        async def work() -> None:
            parent = await self.service.get(self.ctx, name)
            branches = [one for one in await self.service.find(self.ctx) if one.parent_id == parent.id]
            if not branches:
                return
            branch = branches[-1]
            mine, theirs = self.facts[parent.id], self.facts[branch.id]
            head = branch.head_snapshot_id
            may_be = (theirs.allowed or set()) | set(theirs.written) | ({self._stored(head)} if head else set())
            if mine.allowed is not None:
                mine.allowed |= may_be  # asked for: from here on it may be there
            self.deleted.add(branch.id)
            workspace, report = await self.service.promote(self.ctx, branch.id)
            self._seen(workspace)
            assert workspace.id == parent.id
            assert report.snapshot_id is not None
            value = self._stored(report.snapshot_id)
            assert value in may_be, f"{name} has {value!r}, its branch was {may_be}"
            mine.allowed = {value}
            mine.also |= {*theirs.written[-1:], *theirs.also}
            mine.set_aside(value)

        await self.attempt(work())

    async def spoil(self, name: str) -> None:
        """The pages of its last snapshot are damaged: what only that held is lost, what named ones hold is not."""

        async def work() -> None:
            at = await self.service.get(self.ctx, name)
            if at.head_snapshot_id is not None:
                file = f"segments/seg_of_{at.head_snapshot_id}.pages"
                self.node.damage[at.head_snapshot_id] = (Damage(file, f"The stored file {file} is damaged."),)
                facts = self.facts[at.id]
                facts.written.clear()
                if facts.allowed is not None:
                    facts.allowed |= set(facts.named.values())

        await self.attempt(work())

    async def go_back(self, name: str) -> None:
        """To the newest intact snapshot before the last."""

        async def work() -> None:
            workspace, report = await self.service.recover(self.ctx, name, Recovery.REWIND)
            self._seen(workspace)
            assert report.snapshot_id is not None
            self.facts[workspace.id].allowed = {self._stored(report.snapshot_id)}

        await self.attempt(work())

    async def discard(self, name: str) -> None:
        """The newest branch of a workspace, if there is one. What only it held was given up with it."""

        async def work() -> None:
            parent = await self.service.get(self.ctx, name)
            branches = [one for one in await self.service.find(self.ctx) if one.parent_id == parent.id]
            if branches:
                self.deleted.add(branches[-1].id)
                self.facts[parent.id].also.clear()
                self.facts[parent.id].written.clear()
                await self.service.discard(self.ctx, branches[-1].id)

        await self.attempt(work())

    async def delete(self, name: str) -> None:
        async def work() -> None:
            before = await self.service.get(self.ctx, name)
            self.deleted.add(before.id)  # asked for: from here on it may be gone
            await self.service.delete(self.ctx, name)

        await self.attempt(work())

    async def happen(self, name: str, what: str) -> None:
        """die, reboot, power_off or panic, if it is awake; and let the service see it."""

        async def work() -> None:
            workspace = await self.service.get(self.ctx, name)
            machine = self.node.machines.get(workspace.id)
            if machine is not None and machine.alive:
                getattr(self.node, what)(workspace.id)
                for _ in range(5):
                    await asyncio.sleep(0)
                await self.service.upkeep.drain()

        await self.attempt(work())

    async def pass_time(self, seconds: float) -> None:
        async def work() -> None:
            self.plane.clock.advance(seconds)
            await self.service.upkeep.tick()
            await self.service.upkeep.drain()
            await self.service.upkeep.clean()

        await self.attempt(work())

    def _seen(self, workspace: Workspace) -> None:
        facts = self.facts[workspace.id]
        assert workspace.generation >= facts.generation, "a generation went back"
        facts.generation = workspace.generation

    # ------------------------------------------------------------------------------------------------------------ recovery

    async def recover(self, *, node_too: bool, fuse: Fuse | None = None) -> bool:
        """Kill what is left of the process, start another. Whether it got through its own fuse."""
        await self.plane.crash(node_too=node_too)
        self.fuse = fuse or Fuse()
        self.plane.build(FusedDatabase(self.fuse, self.plane.database), fused_node(self.fuse, self.node))
        started = await self.attempt(self.service.upkeep.start(timers=False))
        return started and await self.attempt(self.service.upkeep.clean())

    async def end(self) -> None:
        """Leave nothing that the next one on this database would meet."""
        await self.plane.crash()

    # ---------------------------------------------------------------------------------------------------------- invariants

    async def check(self) -> None:
        """What holds after every recovery, whatever was interrupted."""
        await self.service.upkeep.drain()
        await self.service.upkeep.clean()
        found = {workspace.id: workspace for workspace in await self.service.find(self.ctx)}
        self._check_states(found)
        await self._check_nothing_leaks(found)
        for workspace in found.values():
            self._seen(workspace)
        await self._check_nothing_lost(found)

    def _check_states(self, found: dict[WorkspaceId, Workspace]) -> None:
        for workspace in found.values():
            assert workspace.state not in lifecycle.MOVING, f"{workspace.name} is stuck in {workspace.state}"
            head = workspace.head_snapshot_id
            assert head is None or head in self.node.stored, f"the head of {workspace.name} is gone"
        for workspace_id in self.facts:
            assert workspace_id in found or workspace_id in self.deleted, f"{workspace_id} vanished"

    async def _check_nothing_leaks(self, found: dict[WorkspaceId, Workspace]) -> None:
        running = {(one.id, one.generation) for one in found.values() if one.state is WorkspaceState.RUNNING}
        assert {(key, machine.generation) for key, machine in self.node.machines.items()} == running, "machines leak"
        assert all(machine.alive for machine in self.node.machines.values())
        store = self.plane.service._store
        rows = await store.on_node(self.node.node_id)
        assert {row.id for row in rows} == set(self.node.stored), "rows and files differ"
        assert {row.state for row in rows} <= {SnapshotState.COMPLETE}, "something was begun and never ended"

    async def _check_nothing_lost(self, found: dict[WorkspaceId, Workspace]) -> None:
        values: dict[WorkspaceId, set[bytes]] = defaultdict(set)
        for workspace in found.values():
            value = await self._value(workspace)
            values[workspace.id].add(value)
            if workspace.parent_id and (workspace.kind is WorkspaceKind.LOST or "@before-" in workspace.name):
                values[workspace.parent_id].add(value)
                continue
            if workspace.id in self.facts:
                allowed = self.facts[workspace.id].allowed
                assert allowed is None or value in allowed, (
                    f"{workspace.name} woke before its last acknowledged capture: {value!r} not in {allowed}"
                )
        for workspace_id, facts in self.facts.items():
            if workspace_id not in found:
                continue
            name = found[workspace_id].name
            kept = not facts.written or facts.written[-1] in values[workspace_id]
            assert kept, f"the last value written to {name} is neither in it nor in a branch that was kept of it"
            family = values[workspace_id].union(*(values[one.id] for one in found.values() if one.parent_id == workspace_id))
            assert facts.also <= family, f"what was set aside for {name} is gone: {facts.also - family}"
            kept_ones = {one.name: one.id for one in await self.service.snapshots(self.ctx, workspace_id) if one.name}
            for label, value in facts.named.items():
                assert self._stored(kept_ones[label]) == value, f"an acknowledged named snapshot of {name} changed"

    async def _value(self, workspace: Workspace) -> bytes:
        """Wake it (every state has an exit) and read."""
        try:
            if workspace.state is WorkspaceState.FAILED:
                await self.service.recover(self.ctx, workspace.id, Recovery.RETRY)
            return await self._read(workspace)
        except CorruptSnapshot as error:
            workspace, report = await self.service.recover(self.ctx, workspace.id, Recovery.REWIND)
            assert report.snapshot_id == error.details["ancestor"], "it goes where the error says"
            return await self._read(workspace)

    async def _read(self, workspace: Workspace) -> bytes:
        async with self.service.awake(self.ctx, workspace.id) as awake:
            self._seen(awake.workspace)
            try:
                return b"".join([chunk async for chunk in awake.guest.read_file(PATH)])
            except PerdureError:
                return b""


async def kill_in(simulation: S, scenario: Callable[[S], Awaitable[None]], *, node_too: bool) -> Fuse:
    """A life whose fuse blows somewhere in the scenario, or does not; then another, of which all invariants are asked."""
    fuse = simulation.fuse
    await simulation.begin()
    await scenario(simulation)
    assert (fuse.blew_at is not None) == (fuse.at is not None and fuse.at <= fuse.count), "the fuse did what it was told"
    assert await simulation.recover(node_too=node_too)
    await simulation.check()
    await simulation.end()
    return fuse


async def random_workload(simulation: Simulation, random: Random, steps: int) -> None:
    """Until the fuse blows or the steps are done."""
    names = ["a", "b", "a-1"]
    await simulation.create("a")
    for step in range(steps):
        if simulation.fuse.blew_at is not None:
            return
        name = random.choice(names)
        action = random.choices(
            [
                "create",
                "write",
                "checkpoint",
                "named",
                "sleep",
                "wake",
                "fork",
                "rewind",
                "promote",
                "discard",
                "delete",
                "die",
                "reboot",
                "power_off",
                "panic",
                "time",
            ],
            [3, 12, 5, 2, 6, 4, 2, 3, 2, 1, 1, 3, 2, 1, 1, 4],
        )[0]
        match action:
            case "create":
                await simulation.create(name if name != "a-1" else "c")
            case "named":
                await simulation.checkpoint(name, f"s{step}")
            case "fork":
                await simulation.fork(name, 2)
            case "time":
                await simulation.pass_time(random.choice([10, 70, 1000]))
            case "die" | "reboot" | "power_off" | "panic":
                await simulation.happen(name, action)
            case _:
                await getattr(simulation, action)(name)
