"""The real node over torture machines: supervisor, residents, starts, captures, compaction and store are the product's own.

In place of images and goldens there is one small image; in place of QEMU and the guest channel, ``machine``.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from perdure.core.clock import Clock, SystemClock
from perdure.core.config import Settings
from perdure.core.errors import CorruptSnapshot, NotFound
from perdure.core.files import DISK, Disk
from perdure.core.ids import DEFAULT_TENANT, NodeId, SnapshotId, WorkspaceId
from perdure.gateway.egress import EgressUsage
from perdure.images.model import Golden, Image
from perdure.images.registry import ImageStore
from perdure.machines.driver import Accelerator, DiskChain, DiskLayer, Machine, VmmIdentity
from perdure.node import resident
from perdure.node.compaction import Compaction
from perdure.node.goldens import Origin
from perdure.node.pool import WarmPool
from perdure.node.starting import Plan, Starter
from perdure.node.supervisor import NodeParts, NodeSupervisor
from perdure.node.warming import Warming
from perdure.snapshots import capture, compact
from perdure.snapshots import merge as merging
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.capture import Base
from perdure.snapshots.manifest import BaseRef, Manifest
from perdure.snapshots.rebase import rebase
from perdure.snapshots.store import SnapshotStore
from perdure.snapshots.verify import Verifier
from perdure.wire.node import Checking, Damage, FromSnapshot, Identity, MachineSize, StartSpec, Verdict
from tests.torture.machine import Proof, TortureLink, TortureMachine, base_ram

DIGEST = "70" * 32
SIZE = MachineSize(512, 1)
DISK_GIB = 8
PATH = "/root/value"
NODE = NodeId("nod_torture")
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_names = itertools.count(1)

#: Thresholds of the product that the little memory of a torture machine would never reach.
SMALL: tuple[tuple[ModuleType, str, float], ...] = (
    (capture, "SEGMENT_BYTES_MAX", 96 << 10),
    (capture, "GARBAGE_BYTES_MIN", 16 << 10),
    (compact, "GARBAGE_BYTES_MIN", 16 << 10),
    (merging, "LAYERS_ASLEEP", 2),
    (resident, "LAYERS_MAX", 4),
    (resident, "LAYERS_KEPT", 2),
    (resident, "LAYERS_FULL", 6),
    (resident, "ROOM_CHECK_S", 0.05),
)


@contextmanager
def small_thresholds() -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in SMALL]
    for module, name, value in SMALL:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def make_image(directory: Path) -> None:
    """The one image and its golden snapshot, read by every torture node."""
    directory.mkdir(parents=True)
    base = base_ram()
    (directory / "ram.base").write_bytes(base.tobytes())
    (directory / "root.raw").write_bytes(b"root")
    (directory / "disk.qcow2").write_bytes(b"golden")
    machine = TortureMachine("golden", base, None, None)
    (directory / "devices.state").write_text(f"devices 0 {machine._queue()} ")


class _Nothing:
    """Egress and the guest's own API, of which a torture machine has none."""

    def register(self, *_: object) -> None:
        return None

    async def drop(self, *_: object) -> None:
        return None

    def open_streams(self, *_: object) -> int:
        return 0

    def usage(self, *_: object) -> EgressUsage:
        return EgressUsage()


class _Goldens:
    """Implements what a node asks of ``Goldens``, and is its own driver."""

    def __init__(self, image: Path, disk: Disk, token: str | None) -> None:
        self.driver = self
        self._disk = disk
        self._token = token
        self._ram = BaseRam(image / "ram.base")
        self._own: dict[str, Path] = {}
        self._turns = itertools.cycle((True, False))
        self._image = Image(
            *(DIGEST, "base", WHEN, image, SIZE, DISK_GIB),
            kernel_version="6",
            agent_protocol=1,
            environment={},
            egress_allow=(),
            warm_up=(),
            packages={},
            kernel_digest="",
            agent_release="",
            recipe_digest="",
            root_digest="",
        )
        self._golden = Golden(DIGEST, SIZE, image, "fp", "ab" * 32, 1.0, WHEN, 0, 0)
        self._identity = VmmIdentity("torture", (1, 0, 0), "torture 1", "torture", "torture", None)

    async def origin(self, _digest: str, size: MachineSize) -> Origin:
        return Origin(self._image, size, self._golden, self._identity, "fp", {"torture": "1"})

    def superseded(self, _origin: Origin) -> list[tuple[str, str]]:
        return []

    def forget(self, _digest: str) -> list[tuple[str, str]]:
        return []

    def lying_on(self, _path: Path) -> set[str]:
        return {DIGEST}

    def at(self, origin: Origin, _ref: str) -> Origin:
        return origin

    def base(self, origin: Origin, _manifest: Manifest | None) -> Base:
        ref = BaseRef(DIGEST, origin.golden.ref)
        disks = DiskChain((origin.image.root, DiskLayer(origin.golden.directory / "disk.qcow2", "qcow2")))
        return Base(self._ram, ref, disks, ref)

    def launch(self, _origin: Origin, prefix: str, ram: Path | None = None) -> str:
        name = f"{prefix}-{next(_names)}"
        if ram is not None:
            self._own[name] = ram
        return name

    async def prepare(self, launch: str) -> TortureMachine:
        """A machine that has mapped a base of its own."""
        machine = self.machine(launch)
        machine.memory.ram = np.array(BaseRam(self._own.pop(launch)).pages)
        return machine

    async def boot(self, launch: str, disk: DiskChain) -> TortureMachine:
        machine = self.machine(launch)
        machine.boot(disk)
        return machine

    def machine(self, name: str) -> TortureMachine:
        """Every other one on a host that can tell what it writes."""
        return TortureMachine(name, np.array(self._ram.pages), self._disk, self._token, tells_writes=next(self._turns))


class _Starter(Starter):
    """A torture machine's guest needs no handshake and no repairs."""

    async def _handshake(self, request: Any, plan: Plan, machine: Machine, *_: Any) -> tuple[Any, dict[str, Any]]:
        return TortureLink(cast(TortureMachine, machine), request.identity.generation), {
            "memory": plan.memory,
            "memory_reason": plan.reason,
            "boot_id": "0" * 32,
            "clock_step_s": 0.0,
            "connections_dropped": 0,
            "execs_running": (),
            "execs_lost": (),
            "problems": (),
        }


class TortureNode(NodeSupervisor):
    """``token``: machines are processes of that name. ``image`` was made by ``make_image``."""

    def __init__(
        self,
        home: Path,
        image: Path,
        *,
        disk: Disk = DISK,
        clock: Clock | None = None,
        token: str | None = None,
        node_id: NodeId = NODE,
    ) -> None:
        settings = Settings(home=home, image_dir=image, pool_size=0, unresponsive_s=3600, crash_file=None)
        nothing = cast(Any, _Nothing())
        super().__init__(
            NodeParts(node_id, settings, clock or SystemClock(), nothing, Accelerator.TCG, ImageStore(image), nothing, nothing)
        )
        self._store = SnapshotStore(settings.store, disk)
        self._goldens = goldens = cast(Any, _Goldens(image, disk, token))
        self._pool = WarmPool(self._prepare, 0)
        starter = self._starter
        starter.__class__ = _Starter
        starter._goldens, starter._store, starter._pool = goldens, self._store, self._pool
        starter.warming = Warming(self._store)
        self._compaction = Compaction(self._store, self._base_of)

    async def _prepare(self, _key: tuple[str, str]) -> Machine:
        return cast(Machine, cast(_Goldens, self._goldens).machine(f"m{next(_names)}"))

    async def verify(
        self, snapshot_ids: tuple[SnapshotId, ...], *, trial: bool = False
    ) -> AsyncGenerator[Checking | Verdict, None]:
        """The snapshots' own files; a torture image has no descriptions to be held against."""
        for snapshot_id in snapshot_ids:
            try:
                base = await self._base_of(self._store.manifest(snapshot_id))
                found = await asyncio.to_thread(Verifier(self._store, lambda _file, _count: None).snapshot, snapshot_id, base)
            except NotFound:
                yield Verdict(snapshot_id, disk_intact=False, missing=True)
            except CorruptSnapshot as error:
                yield Verdict(snapshot_id, (Damage(error.file, error.message),), disk_intact=False)
            else:
                yield Verdict(snapshot_id, found.damage, disk_intact=found.disk_intact)

    async def compact(self) -> int:
        """What the background would do a while after a workspace fell asleep."""
        return await self._compaction.run_once()

    @property
    def store(self) -> SnapshotStore:
        return self._store

    async def rebase(self, snapshot_id: SnapshotId) -> bool:
        """The same, of a memory that is too different from its base."""
        base = await self._base_of(self._store.manifest(snapshot_id))
        return base is not None and await asyncio.to_thread(rebase, self._store, snapshot_id, base, threading.Event())

    async def merge(self, snapshot_id: SnapshotId) -> int:
        """The same, of a disk on too many layers."""
        return await asyncio.to_thread(merging.merge, self._store, snapshot_id, threading.Event())

    @property
    def machines(self) -> dict[WorkspaceId, TortureMachine]:
        return {key: cast(TortureMachine, one.machine) for key, one in self._residents.items()}

    async def crash(self) -> None:
        """This process is gone, as far as the store can see: nothing is ended in order, machines die with it."""
        for one in list(self._residents.values()):
            for task in one._tasks:
                task.cancel()
            await one.machine.kill()
        for task in (self._compaction._task, self._shared._task):
            if task is not None:
                task.cancel()
        self.store.close()

    # ----------------------------------------------------------------------------------------------- what the proofs need

    async def prove(self, workspace_id: WorkspaceId, generation: int) -> Proof:
        return Proof.from_bytes(b"".join([part async for part in self.guest(workspace_id, generation).read_file(PATH)]))

    async def put(self, workspace_id: WorkspaceId, generation: int, value: int) -> None:
        await self.guest(workspace_id, generation).write_file(PATH, text(value))

    async def prove_snapshot(self, snapshot_id: SnapshotId) -> Proof:
        """Wake a snapshot as a workspace of its own, ask it, and leave nothing of that."""
        spec = start_spec(WorkspaceId("ws_check"), 1, FromSnapshot(snapshot_id))
        await self.start(spec)
        try:
            return await self.prove(spec.identity.workspace_id, 1)
        finally:
            await self.stop(spec.identity.workspace_id, 1)
            self._residents.pop(spec.identity.workspace_id, None)


async def text(value: int) -> AsyncIterator[bytes]:
    yield b"%d" % value


def start_spec(workspace_id: WorkspaceId, generation: int, source: Any, take_over: int | None = None) -> StartSpec:
    identity = Identity(workspace_id, DEFAULT_TENANT, generation, "torture", hashlib.md5(workspace_id.encode()).hexdigest())
    return StartSpec(identity, DIGEST, SIZE, DISK_GIB, source, take_over_generation=take_over)
