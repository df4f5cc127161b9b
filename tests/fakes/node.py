"""A complete ``wire.node.Node`` in memory: worlds with files (the disk) and commands (the memory), snapshots with content.

It is strict where the real one may be lenient, so that a control plane that passes here does not rely on leniency: a start while
an older machine's newer disk has not been settled is refused, and so is whatever names an older generation. Faults are injected
by ``fail`` (the next call of a method raises) and made to happen by ``die``, ``reboot``, ``power_off``, ``panic``, ``hang``,
``fill_disk``; ``crash`` is SIGKILL of the whole node process.
"""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from perdure.core.clock import Clock, SystemClock
from perdure.core.errors import Conflict, CorruptSnapshot, MachineDied, NotFound, PerdureError, RestoreFailed, StaleGeneration
from perdure.core.ids import ExecId, NodeId, SnapshotId, WorkspaceId
from perdure.wire.node import (
    Activity,
    CaptureMode,
    CaptureSpec,
    Checking,
    Confinement,
    Damage,
    FileKind,
    FromDisk,
    FromSnapshot,
    Inventory,
    Isolation,
    LiveMachine,
    MachineSize,
    MemoryFate,
    NodeEvent,
    NodeEventKind,
    NodeUsage,
    Reading,
    SecondHome,
    SnapshotFacts,
    StartReport,
    StartSpec,
    StoredSizes,
    Trial,
    TrialKind,
    Verdict,
)
from tests.fakes.memory_guest import Command, MemoryGuest, World
from tests.fakes.memory_guest import Node as FileNode
from tests.fakes.waking import wake_inside

NODE = NodeId("nod_fake")
CONFINEMENT = Confinement(Isolation.VM_EMULATED, True, True, True, True, True, True, False, {"readonly_base": "a fake has none"})

Files = dict[str, FileNode]


def _copy_commands(commands: dict[str, Command]) -> dict[str, Command]:
    """Commands as a snapshot of memory has them: those that ran go on running in whoever wakes it."""
    copies = {}
    for exec_id, command in commands.items():
        twin = Command(command.spec, command.pid)
        twin.output = copy.deepcopy(command.output)
        twin.exited = command.exited
        copies[exec_id] = twin
    return copies


def _running(commands: dict[str, Command]) -> tuple[ExecId, ...]:
    return tuple(ExecId(exec_id) for exec_id, command in commands.items() if command.exited is None)


@dataclass
class StoredSnapshot:
    facts: SnapshotFacts
    files: Files
    commands: dict[str, Command] | None  # None: disk only
    environment: dict[str, str]


@dataclass
class FakeMachine:
    spec: StartSpec
    world: World
    guest: MemoryGuest
    pid: int
    parent: SnapshotId | None
    captured: Files  # the disk at the last capture or start
    alive: bool = True
    changed: bool = True
    touched_at: float = 0.0
    cpu_s: float = 0.5  # what it took to start

    @property
    def generation(self) -> int:
        return self.spec.identity.generation

    @property
    def is_dirty(self) -> bool:
        return self.world.files != self.captured

    def end(self) -> None:
        self.alive = False
        self.guest.broken.set()
        self.world.program.kill()
        for command in self.world.commands.values():
            if command.task is not None:
                command.task.cancel()


class FakeNode:
    def __init__(self, node_id: NodeId = NODE, *, clock: Clock | None = None) -> None:
        self.node_id = node_id
        self.second_home: SecondHome | None = None
        self.clock = clock or SystemClock()
        self.machines: dict[WorkspaceId, FakeMachine] = {}
        self.stored: dict[SnapshotId, StoredSnapshot] = {}
        self.damage: dict[SnapshotId, tuple[Damage, ...]] = {}  # stored snapshots that are not as they were written
        self.bad_disk: set[SnapshotId] = set()  # of these the disk's part
        self.untrue: dict[SnapshotId, str] = {}  # snapshots that another machine made, and what of it differs
        self.is_quiet = True  # whether programs stand still at the next captures
        self.busy: dict[WorkspaceId, Activity] = {}  # overrides what ``activity`` would say
        self.moved: dict[WorkspaceId, tuple[int, int]] = defaultdict(lambda: (0, 0))  # sent and received since the process began
        self.counter = "1"  # this process's
        self.calls: list[str] = []
        self.starting = 0
        self.most_starting = 0
        self.gate: asyncio.Event | None = None  # starts wait for it
        self.entered = asyncio.Event()  # a start has begun
        self._generations: dict[WorkspaceId, int] = defaultdict(int)
        self._failures: dict[str, list[PerdureError]] = defaultdict(list)
        self._events: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self._pids = 1000
        self._boots = 0

    # ------------------------------------------------------------------------------------------------------- what tests do

    def fail(self, method: str, *errors: PerdureError) -> None:
        """The next calls of a method raise these, having done nothing."""
        self._failures[method] += errors

    def world(self, workspace_id: WorkspaceId) -> World:
        return self.machines[workspace_id].world

    def die(self, workspace_id: WorkspaceId) -> None:
        self._happen(workspace_id, NodeEventKind.DIED, "killed by signal 9")

    def panic(self, workspace_id: WorkspaceId) -> None:
        self._happen(workspace_id, NodeEventKind.GUEST_PANIC)

    def reboot(self, workspace_id: WorkspaceId) -> None:
        self._happen(workspace_id, NodeEventKind.GUEST_REBOOT)

    def power_off(self, workspace_id: WorkspaceId) -> None:
        self.world(workspace_id).files["/var-log-shutdown"] = FileNode(FileKind.FILE, bytearray(b"clean"))
        self._happen(workspace_id, NodeEventKind.GUEST_POWEROFF)

    def hang(self, workspace_id: WorkspaceId) -> None:
        """The guest stops answering; its VMM runs on."""
        machine = self.machines[workspace_id]
        machine.guest.broken.set()
        self._tell(machine, NodeEventKind.UNRESPONSIVE)

    def fill_disk(self, workspace_id: WorkspaceId, *, full: bool) -> None:
        self._tell(self.machines[workspace_id], NodeEventKind.NO_SPACE if full else NodeEventKind.ROOM_AGAIN)

    def crash(self) -> None:
        """SIGKILL of the node: every machine dies with it, nobody is told."""
        for machine in self.machines.values():
            machine.end()
        self._events = asyncio.Queue()
        self.moved.clear()
        self.counter = str(int(self.counter) + 1)

    def _happen(self, workspace_id: WorkspaceId, kind: NodeEventKind, detail: str = "") -> None:
        machine = self.machines[workspace_id]
        machine.end()
        self._tell(machine, kind, detail)

    def _tell(self, machine: FakeMachine, kind: NodeEventKind, detail: str = "") -> None:
        self._events.put_nowait(NodeEvent(kind, machine.spec.identity.workspace_id, machine.generation, detail))

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        if self._failures[method]:
            raise self._failures[method].pop(0)

    # -------------------------------------------------------------------------------------------------------------- starts

    async def start(self, spec: StartSpec) -> StartReport:
        self._enter("start")
        identity = spec.identity
        self.starting += 1
        self.entered.set()
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.starting -= 1
        if identity.generation <= self._generations[identity.workspace_id]:
            raise StaleGeneration(f"{identity.workspace_id} has been at generation {self._generations[identity.workspace_id]}.")
        files, commands, environment, memory, reason = self._source(spec)
        self._generations[identity.workspace_id] = identity.generation
        taken = self.machines.pop(identity.workspace_id, None)
        world = World()
        world.files, world.commands, world.environment = files, commands, environment
        if spec.new_identity:
            world.files["/etc-machine-id"] = FileNode(FileKind.FILE, bytearray(identity.machine_id.encode()))
            world.files["/etc-hostname"] = FileNode(FileKind.FILE, bytearray(identity.hostname.encode()))
        self._pids += 1
        parent = spec.source.snapshot_id if isinstance(spec.source, (FromSnapshot, FromDisk)) else None
        guest = MemoryGuest(world, identity.generation)
        hooks = await wake_inside(guest, spec, memory, reason, CONFINEMENT)
        await guest.begin_program()
        # What is taken over is as new as it was: the last capture knows nothing of it.
        captured = taken.captured if taken is not None else copy.deepcopy(files)
        machine = FakeMachine(spec, world, guest, self._pids, parent, captured, touched_at=self.clock.monotonic())
        self.machines[identity.workspace_id] = machine
        if memory is not MemoryFate.KEPT:
            self._boots += 1
        running = _running(commands)
        timings = {"claim": 1.0, "running": 8.0, "hello": 60.0, "repaired": 80.0}
        boot_id = f"{self._boots:032x}"
        pooled = memory is MemoryFate.KEPT
        return StartReport(memory, reason, boot_id, 0.0, 0, running, (), CONFINEMENT, pooled, timings, hooks=hooks)

    def _source(self, spec: StartSpec) -> tuple[Files, dict[str, Command], dict[str, str], MemoryFate, str]:
        """Files, commands, environment, and what became of memory."""
        workspace_id = spec.identity.workspace_id
        left = self.machines.get(workspace_id)
        if spec.take_over_generation is not None:
            if left is None or left.generation != spec.take_over_generation or left.alive:
                raise Conflict(f"{workspace_id} has no dead machine of generation {spec.take_over_generation} to take over.")
            assert isinstance(spec.source, FromDisk)
            return copy.deepcopy(left.world.files), {}, {}, MemoryFate.LOST, spec.source.reason
        if left is not None:
            raise Conflict(f"{workspace_id} still has a machine of generation {left.generation}; settle it first.")
        match spec.source:
            case FromSnapshot(snapshot_id):
                found = self._find(snapshot_id)
                self._refuse_damaged(snapshot_id, disk_only=snapshot_id in self.untrue)
                if snapshot_id in self.untrue:
                    reason = f"fingerprint: {self.untrue[snapshot_id]}"
                    return copy.deepcopy(found.files), {}, dict(spec.environment), MemoryFate.LOST, reason
                if found.commands is None:
                    raise RestoreFailed(f"{snapshot_id} has no memory.")
                return copy.deepcopy(found.files), _copy_commands(found.commands), dict(found.environment), MemoryFate.KEPT, ""
            case FromDisk(snapshot_id, reason, checked) if snapshot_id is not None:
                if checked:
                    self._refuse_damaged(snapshot_id, disk_only=True)
                return copy.deepcopy(self._find(snapshot_id).files), {}, dict(spec.environment), MemoryFate.LOST, reason
        return World().files, {}, dict(spec.environment), MemoryFate.NEW, ""

    def _refuse_damaged(self, snapshot_id: SnapshotId, *, disk_only: bool) -> None:
        damage = self.damage.get(snapshot_id, ())
        if damage and (not disk_only or snapshot_id in self.bad_disk):
            raise CorruptSnapshot(damage[0].problem, file=damage[0].file)

    def _find(self, snapshot_id: SnapshotId) -> StoredSnapshot:
        if snapshot_id not in self.stored:
            raise NotFound(f"There is no snapshot {snapshot_id}.")
        return self.stored[snapshot_id]

    # ------------------------------------------------------------------------------------------------------------ captures

    async def capture(self, spec: CaptureSpec) -> SnapshotFacts:
        self._enter("capture")
        machine = self._machine(spec.workspace_id, spec.generation)
        await asyncio.sleep(0)
        self._machine(spec.workspace_id, spec.generation)
        facts = self._facts(machine, spec.snapshot_id, has_memory=True)
        self.stored[spec.snapshot_id] = StoredSnapshot(
            facts, copy.deepcopy(machine.world.files), _copy_commands(machine.world.commands), dict(machine.world.environment)
        )
        if machine.parent in self.bad_disk:  # what lies below it is no more whole than before
            self.damage[spec.snapshot_id] = self.damage[machine.parent]
            self.bad_disk.add(spec.snapshot_id)
        machine.parent, machine.captured, machine.changed = spec.snapshot_id, copy.deepcopy(machine.world.files), False
        if spec.mode is CaptureMode.HIBERNATE:
            machine.end()
            del self.machines[spec.workspace_id]
        return facts

    def _facts(self, machine: FakeMachine, snapshot_id: SnapshotId, *, has_memory: bool) -> SnapshotFacts:
        identity, size = machine.spec.identity, sum(len(file.content) for file in machine.world.files.values())
        return SnapshotFacts(
            snapshot_id=snapshot_id,
            workspace_id=identity.workspace_id,
            tenant_id=identity.tenant_id,
            generation=identity.generation,
            parent_id=machine.parent,
            image=machine.spec.image,
            size=machine.spec.size,
            disk_gib=machine.spec.disk_gib,
            created_at=datetime.now(UTC),
            has_memory=has_memory,
            quiesced=has_memory and self.is_quiet,
            pages=10 if has_memory else 0,
            memory_bytes=40960 if has_memory else 0,
            memory_total_bytes=40960 if has_memory else 0,
            disk_bytes=size,
            disk_total_bytes=size,
            device_bytes=1000 if has_memory else 0,
            pause_s=0.01 if has_memory else 0.0,
            fingerprint="fake",
        )

    async def stop(self, workspace_id: WorkspaceId, generation: int, *, keep_overlay: bool = False) -> None:
        self._enter("stop")
        if generation < self._generations[workspace_id]:
            raise StaleGeneration(f"{workspace_id} is past generation {generation}.")
        machine = self.machines.get(workspace_id)
        if machine is None or machine.generation != generation:
            return
        machine.end()
        if not keep_overlay:
            del self.machines[workspace_id]

    async def salvage(self, workspace_id: WorkspaceId, generation: int, snapshot_id: SnapshotId) -> SnapshotFacts | None:
        self._enter("salvage")
        machine = self.machines.get(workspace_id)
        if machine is None:
            raise NotFound(f"{workspace_id} has no machine.")
        if machine.generation != generation:
            raise StaleGeneration(f"{workspace_id} is at generation {machine.generation}.")
        if machine.alive:
            raise Conflict(f"The machine of {workspace_id} is still running.")
        del self.machines[workspace_id]
        if not machine.is_dirty:
            return None
        facts = self._facts(machine, snapshot_id, has_memory=False)
        self.stored[snapshot_id] = StoredSnapshot(facts, copy.deepcopy(machine.world.files), None, {})
        return facts

    async def snapshot(self, snapshot_id: SnapshotId) -> SnapshotFacts:
        self._enter("snapshot")
        found = self._find(snapshot_id)
        self._refuse_damaged(snapshot_id, disk_only=False)
        return found.facts

    async def verify(
        self, snapshot_ids: tuple[SnapshotId, ...], *, trial: bool = False
    ) -> AsyncGenerator[Checking | Verdict, None]:
        self._enter("verify")
        for snapshot_id in snapshot_ids:
            await asyncio.sleep(0)
            stored = self.stored.get(snapshot_id)
            if stored is None:
                yield Verdict(snapshot_id, disk_intact=False, missing=True)
                continue
            yield Checking(snapshot_id, f"snapshots/{snapshot_id}/manifest.json", 1000)
            damage = self.damage.get(snapshot_id, ())
            kind = TrialKind.DISK if stored.commands is None or snapshot_id in self.untrue else TrialKind.MEMORY
            reason = f"fingerprint: {self.untrue[snapshot_id]}" if snapshot_id in self.untrue else ""
            reason = reason or ("no-memory-in-snapshot" if stored.commands is None else "")
            outcome = Trial(kind, reason, 0.5, "") if trial and not damage else None
            yield Verdict(snapshot_id, damage, disk_intact=snapshot_id not in self.bad_disk, trial=outcome)

    async def delete_snapshots(self, snapshot_ids: tuple[SnapshotId, ...]) -> int:
        self._enter("delete_snapshots")
        gone = [self.stored.pop(snapshot_id) for snapshot_id in snapshot_ids if snapshot_id in self.stored]
        return sum(stored.facts.disk_bytes + stored.facts.memory_bytes for stored in gone)

    # ---------------------------------------------------------------------------------------------------------------- views

    async def stored_sizes(self, snapshot_ids: tuple[SnapshotId, ...]) -> Mapping[SnapshotId, StoredSizes]:
        self._enter("stored_sizes")
        found = {key: self.stored[key].facts for key in snapshot_ids if key in self.stored}
        return {
            key: StoredSizes(
                facts.memory_total_bytes + facts.disk_total_bytes + facts.device_bytes, facts.memory_bytes + facts.device_bytes
            )
            for key, facts in found.items()
        }

    async def inventory(self) -> Inventory:
        self._enter("inventory")
        machines = tuple(
            LiveMachine(workspace_id, machine.generation, machine.alive, machine.pid if machine.alive else None, None)
            for workspace_id, machine in self.machines.items()
        )
        return Inventory(machines, tuple(stored.facts for stored in self.stored.values()), ())

    async def usage(self, workspace_id: WorkspaceId, generation: int) -> NodeUsage:
        self._machine(workspace_id, generation)
        return NodeUsage(1.0, 100 << 20, 60 << 20, 30 << 20)

    def reading(self, workspace_id: WorkspaceId, generation: int) -> Reading:
        machine = self._machine(workspace_id, generation)
        requests = machine.guest.moved
        return Reading(machine.cpu_s, *self.moved[workspace_id], self.counter, requests.inward, requests.outward)

    def activity(self, workspace_id: WorkspaceId, generation: int) -> Activity:
        machine = self._machine(workspace_id, generation)
        if workspace_id in self.busy:
            return self.busy[workspace_id]
        open_execs = sum(command.exited is None and not command.is_waiting for command in machine.world.commands.values())
        return Activity(open_execs, 0, 0, self.clock.monotonic() - machine.touched_at, machine.changed or machine.is_dirty)

    def guest(self, workspace_id: WorkspaceId, generation: int) -> MemoryGuest:
        return self._machine(workspace_id, generation).guest

    def _machine(self, workspace_id: WorkspaceId, generation: int) -> FakeMachine:
        machine = self.machines.get(workspace_id)
        if machine is None or machine.generation != generation:
            raise StaleGeneration(f"{workspace_id} does not run at generation {generation}.")
        if not machine.alive:
            raise MachineDied(f"The machine of {workspace_id} is dead.")
        return machine

    async def events(self) -> AsyncIterator[NodeEvent]:
        while True:
            yield await self._events.get()


@dataclass(frozen=True)
class FakeImage:
    """What ``workspaces.catalog.ImageFacts`` asks of an image."""

    digest: str = "ab" * 32
    name: str = "base"
    default_size: MachineSize = field(default_factory=lambda: MachineSize(512, 1))
    disk_gib: int = 8
    min_memory_mib: int = 0
    environment: dict[str, str] = field(default_factory=lambda: {"LANG": "C.UTF-8"})
    egress_allow: tuple[str, ...] = ()


class FakeImages:
    """A catalog with one image."""

    def __init__(self) -> None:
        self.images = [FakeImage(), replace(FakeImage(), digest="cd" * 32, name="other", disk_gib=4)]
        self.images.append(replace(FakeImage(), digest="ef" * 32, name="large", min_memory_mib=1024))

    async def find(self, ref: str) -> FakeImage:
        for image in self.images:
            if ref in {image.name, image.digest}:
                return image
        names = ", ".join(image.name for image in self.images)
        raise NotFound(f"There is no image {ref!r}.", hint=f"There are: {names}.")
