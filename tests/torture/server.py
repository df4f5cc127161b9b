"""One server in this process: the real service, reconciler, journal and node over a real database, with torture machines.

``Server.check`` is all that must hold after a recovery, whatever was interrupted; it raises Violation.
"""

from __future__ import annotations

import asyncio
import os
import select
from datetime import datetime, timedelta
from pathlib import Path
from random import Random

from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.core.errors import PerdureError
from perdure.core.ids import DEFAULT_TENANT, NodeId, RequestId
from perdure.db.database import Database
from perdure.fleet.nodes import NodeRegistry
from perdure.fleet.placement import LocalPlacement
from perdure.gateway.rules import EgressRules
from perdure.journal.entries import Journal
from perdure.workspaces import lifecycle
from perdure.workspaces.model import Context, Recovery, Workspace, WorkspaceState
from perdure.workspaces.service import WorkspaceService
from perdure.workspaces.store import SnapshotState, WorkspaceStore
from perdure.workspaces.tools import Tools
from tests.fakes.node import FakeImage, FakeImages
from tests.torture.ledger import Ledger
from tests.torture.machine import Proof
from tests.torture.model import Violation
from tests.torture.node import DIGEST, PATH, TortureNode
from tests.torture.registry import parts
from tests.torture.story import check

CTX = Context(principal="torture", request_id=RequestId("req_torture"), tenant_id=DEFAULT_TENANT)
END_DEADLINE_S = 10.0
SNAPSHOTS_WOKEN = 4


class SteppedClock(SystemClock):
    """The host's clock, which somebody sets."""

    offset_s = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.offset_s)


class Server:
    """``start`` recovers what an earlier process left."""

    def __init__(self, database: Database, home: Path, image: Path, node_id: NodeId, ledger: Ledger) -> None:
        self.database = database
        self.home = home
        self.ledger = ledger
        self.clock = SteppedClock()
        self.token = f"perdure-{home.parent.name}-{home.name}"  # another run of the suite has homes of the same names
        self.node = TortureNode(home, image, clock=self.clock, token=self.token, node_id=node_id)
        images = FakeImages()
        images.images = [FakeImage(digest=DIGEST)]
        settings = Settings(home=home, parallel_starts=2, wake_deadline_s=20, checkpoint_interval_s=0, idle_timeout_s=0)
        store = WorkspaceStore(database)
        self.tools = tools = Tools(store, LocalPlacement(self.node), images, settings, self.clock, EgressRules.parse)
        self.service = WorkspaceService(tools)
        self.store = tools.store

    async def start(self) -> None:
        await NodeRegistry(self.database, lease_s=20).register(self.node.node_id)
        await self.node.open()
        await self.service.upkeep.start(timers=False)
        await self.service.upkeep.clean()
        for part in parts():
            await part.begin(self)

    async def mend(self) -> None:
        """What was cut off without an end of this server: its timers would see to it."""
        await self.service.upkeep.reconcile()
        await self.service.upkeep.clean()
        for part in parts():
            await part.mend(self)

    async def settle(self) -> None:
        """Let what events have set off come to its end."""
        for _ in range(5):
            await asyncio.sleep(0)
        await self.service.upkeep.drain()

    # ---------------------------------------------------------------------------------------------------------- invariants

    async def check(self, random: Random) -> None:
        await self.settle()
        await self.service.upkeep.reconcile()
        await self.service.upkeep.clean()
        found = {one.id: one for one in await self.service.find(CTX)}
        self._check_states(found)
        await self._check_nothing_leaks(found)
        await self._check_values(found)
        await self._check_snapshots(random)
        checked, breaks = await Journal(self.database).verify()
        if breaks or not checked:
            raise Violation(f"the journal's chain is broken: {breaks}")
        for part in parts():
            await part.check(self)

    def _check_states(self, found: dict[str, Workspace]) -> None:
        present = {facts.snapshot_id for facts in self.node.store.complete()}
        for one in found.values():
            if one.state in lifecycle.MOVING:
                raise Violation(f"{one.name} is stuck: {one.state.value}")
            if one.head_snapshot_id is not None and one.head_snapshot_id not in present:
                raise Violation(f"the head of {one.name}, {one.head_snapshot_id}, is not on the node")
        for workspace, facts in self.ledger.facts.items():
            if workspace not in found and facts.is_known and not facts.is_doomed:
                raise Violation(f"{workspace} was acknowledged and vanished")

    async def _check_nothing_leaks(self, found: dict[str, Workspace]) -> None:
        running = {one.id for one in found.values() if one.state is WorkspaceState.RUNNING}
        machines = self.node.machines
        if set(machines) != running:
            raise Violation(f"machines run of {sorted(machines)}, rows say {sorted(running)}")
        if recorded := {record.workspace_id for record in self.node.store.live()} - running:
            raise Violation(f"starts of {sorted(recorded)} are on record, and none of them runs")
        rows = await self.store.on_node(self.node.node_id)
        files = {facts.snapshot_id for facts in self.node.store.complete()}
        if {row.id for row in rows} != files:
            raise Violation(f"snapshots in rows and in files differ: {sorted({row.id for row in rows} ^ files)}")
        if unfinished := [row.id for row in rows if row.state is not SnapshotState.COMPLETE]:
            raise Violation(f"begun and never ended: {unfinished}")
        if freed := self.node.store.sweep():
            raise Violation(f"{freed} bytes of files were unreachable and still there after a sweep")
        agents = {machine.agent.pid for machine in machines.values() if machine.agent is not None}
        self._check_processes({machine.pid for machine in machines.values()} | agents)

    def _check_processes(self, ours: set[int]) -> None:
        """No machine of this home, and no agent, but those that we have; one that is about to end is waited for."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in ours:
                continue
            try:
                if (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace") != self.token:
                    continue
                descriptor = os.pidfd_open(int(entry.name))
            except OSError:
                continue
            try:
                if not select.select([descriptor], [], [], END_DEADLINE_S)[0]:
                    raise Violation(f"the process {entry.name} of a machine is left over")
            finally:
                os.close(descriptor)

    async def _check_values(self, found: dict[str, Workspace]) -> None:
        """Each wakes, whatever its state, with a value that it may have; the newest acknowledged one is in it or kept beside it.

        What nobody was told of (branches of lost disks and of rewinds, half-acknowledged forks) is whole, and deleted then.
        """
        values: dict[str, set[int]] = {}
        known = {one.id: facts for one in found.values() if (facts := self.ledger.facts.get(one.id)) and facts.is_known}
        beside = [one for one in found.values() if one.id not in known]
        for one in beside:
            values.setdefault(one.parent_id or "", set()).add(await self._value(one))
        for workspace, facts in known.items():
            one, value = found[workspace], await self._value(found[workspace])
            if value not in facts.allowed:
                raise Violation(f"{one.name} woke with {value}, which is not among {sorted(facts.allowed)}")
            kept = values.get(one.id, set()) | {value}
            if max(kept) < facts.last:
                raise Violation(
                    f"{facts.last}, the last value of {one.name}, is neither in it nor kept beside it: {sorted(kept)}"
                )
            self.ledger.note("seen", one.id, value=value)
        for one in beside:
            await self.service.delete(CTX, one.id)
        await self.service.upkeep.clean()

    async def _value(self, one: Workspace) -> int:
        try:
            if one.state is WorkspaceState.FAILED:
                await self.service.recover(CTX, one.id, Recovery.RETRY)
            proof = await self.prove(one.id)
        except PerdureError as error:
            raise Violation(f"{one.name}, {one.state.value}, has no way back: {error.message} {error.internal}") from error
        if proof.wrong:
            raise Violation(f"{one.name}: {proof.wrong}")
        return proof.value

    async def prove(self, ref: str) -> Proof:
        async with self.service.awake(CTX, ref) as awake:
            facts = self.ledger.facts.get(awake.workspace.id)
            if facts is not None and awake.workspace.generation < facts.generation:
                raise Violation(f"the generation of {awake.workspace.name} went back to {awake.workspace.generation}")
            if facts is not None and awake.workspace.generation > facts.generation:
                self.ledger.note("generation", awake.workspace.id, generation=awake.workspace.generation)
            return Proof.from_bytes(b"".join([part async for part in awake.guest.read_file(PATH)]))

    async def _check_snapshots(self, random: Random) -> None:
        """Every acknowledged snapshot that is kept verifies; some, named ones first, are woken beside their workspace."""
        present = {facts.snapshot_id for facts in self.node.store.complete() if facts.has_memory}
        if gone := set(self.ledger.named) - present:
            raise Violation(f"named snapshots are gone: {sorted(gone)}")
        known = sorted(present & set(self.ledger.snapshots), key=lambda name: (name not in self.ledger.named, random.random()))
        for number, name in enumerate(known):
            try:
                await self.node.snapshot(name)
                if number >= SNAPSHOTS_WOKEN:
                    continue
                proof = await self.node.prove_snapshot(name)
            except PerdureError as error:
                raise Violation(f"snapshot {name} was acknowledged and does not wake: {error.message}") from error
            values = self.ledger.snapshots[name]
            check(proof, proof.value if proof.value in values else max(values), f"snapshot {name}")
