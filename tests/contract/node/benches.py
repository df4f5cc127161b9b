"""What the node suite runs on. A bench is a node and the few things a test must do to it from outside.

``fake`` is ``tests.fakes.node``. ``real`` is the supervisor over QEMU and the base image, made by ``real.py`` beside this file,
which defines ``real_bench(home: Path)``, an async context manager that yields a ``Bench``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from perdure.core.clock import SystemClock, epoch_ms
from perdure.core.ids import DEFAULT_TENANT, SnapshotId, WorkspaceId, mint
from perdure.wire.node import (
    CaptureMode,
    CaptureSpec,
    Damage,
    FromGolden,
    Guest,
    Identity,
    MachineSize,
    Node,
    NodeEvent,
    NodeEventKind,
    SnapshotFacts,
    StartReport,
    StartSource,
    StartSpec,
    Told,
)
from tests.fakes.node import FakeNode

EVENT_DEADLINE_S = 120.0


class World(Protocol):
    """What differs between a fake and a real node, from outside."""

    node: Node
    image: str
    size: MachineSize
    disk_gib: int
    forever: tuple[str, ...]  # argv of a command that runs until it is killed
    machine_id_path: str

    async def kill(self, workspace_id: WorkspaceId) -> None:
        """SIGKILL of the VMM."""
        ...

    async def reboot(self, workspace_id: WorkspaceId) -> None:
        """The guest reboots itself."""
        ...

    async def crash(self) -> None:
        """SIGKILL of the node process, then a new one over what it left on disk: ``node`` is another one afterwards."""
        ...

    def damage(self, snapshot_id: SnapshotId, *, disk: bool = False) -> str:
        """Change a byte of the pages that only this snapshot needs, or of its newest disk layer; returns the file's name."""
        ...

    def estrange(self, snapshot_id: SnapshotId, **parts: str) -> None:
        """Let the snapshot be one that another machine made: these parts of its fingerprint are others."""
        ...


class Bench:
    """A world, and shorthands for what every test does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._events: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self._listening: asyncio.Task[None] | None = None

    @property
    def node(self) -> Node:
        return self.world.node

    def workspace_id(self) -> WorkspaceId:
        return WorkspaceId(mint("ws", now_ms=epoch_ms(SystemClock())))

    def snapshot_id(self) -> SnapshotId:
        return SnapshotId(mint("snp", now_ms=epoch_ms(SystemClock())))

    def spec(
        self,
        workspace_id: WorkspaceId,
        generation: int = 1,
        source: StartSource | None = None,
        *,
        new_identity: bool | None = None,
        take_over: int | None = None,
        told: Told | None = None,
    ) -> StartSpec:
        machine_id = f"{abs(hash(workspace_id)):032x}"[-32:]
        source = source or FromGolden()
        return StartSpec(
            identity=Identity(workspace_id, DEFAULT_TENANT, generation, f"host-{workspace_id[-6:]}", machine_id),
            image=self.world.image,
            size=self.world.size,
            disk_gib=self.world.disk_gib,
            source=source,
            new_identity=isinstance(source, FromGolden) if new_identity is None else new_identity,
            take_over_generation=take_over,
            told=told or Told({}),
        )

    async def begin(self, workspace_id: WorkspaceId | None = None, **fields: object) -> tuple[WorkspaceId, StartReport]:
        workspace_id = workspace_id or self.workspace_id()
        return workspace_id, await self.node.start(self.spec(workspace_id, **fields))  # type: ignore[arg-type]

    async def capture(self, workspace_id: WorkspaceId, generation: int, mode: CaptureMode) -> SnapshotFacts:
        return await self.node.capture(CaptureSpec(workspace_id, generation, self.snapshot_id(), mode))

    async def write(self, workspace_id: WorkspaceId, generation: int, path: str, content: bytes) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            yield content

        await self.node.guest(workspace_id, generation).write_file(path, chunks())

    async def read(self, guest: Guest, path: str) -> bytes:
        return b"".join([chunk async for chunk in guest.read_file(path)])

    async def event(self, *kinds: NodeEventKind) -> NodeEvent:
        """The next event of one of these kinds. Raises TimeoutError."""
        async with asyncio.timeout(EVENT_DEADLINE_S):
            while True:
                event = await self._events.get()
                if event.kind in kinds:
                    return event

    def listen(self) -> None:
        async def work() -> None:
            async for event in self.node.events():
                self._events.put_nowait(event)

        self._listening = asyncio.create_task(work())

    async def crash(self) -> None:
        self.deafen()
        await self.world.crash()
        self.listen()

    def deafen(self) -> None:
        if self._listening is not None:
            self._listening.cancel()


class FakeWorld:
    image = "ab" * 32
    size = MachineSize(512, 1)
    disk_gib = 8
    forever = ("hang",)
    machine_id_path = "/etc-machine-id"

    def __init__(self) -> None:
        self.node = FakeNode()

    async def kill(self, workspace_id: WorkspaceId) -> None:
        self.node.die(workspace_id)

    async def reboot(self, workspace_id: WorkspaceId) -> None:
        self.node.reboot(workspace_id)

    async def crash(self) -> None:
        self.node.crash()

    def damage(self, snapshot_id: SnapshotId, *, disk: bool = False) -> str:
        file = "disks/dsk_fake.qcow2" if disk else "segments/seg_fake.pages"
        self.node.damage[snapshot_id] = (Damage(file, f"The stored file {file} is damaged: its checksum does not hold."),)
        if disk:
            self.node.bad_disk.add(snapshot_id)
        return file

    def estrange(self, snapshot_id: SnapshotId, **parts: str) -> None:
        self.node.untrue[snapshot_id] = "; ".join(f"{name}: {value} is now fake" for name, value in sorted(parts.items()))


@asynccontextmanager
async def fake_bench(home: Path) -> AsyncIterator[Bench]:
    yield Bench(FakeWorld())
