"""The bench over the real thing: supervisor, QEMU, the base image."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.core.ids import ExecId, NodeId, SnapshotId, WorkspaceId
from perdure.gateway.egress import Dialer, EgressGateway
from perdure.gateway.selfservice import SelfService
from perdure.images.registry import ImageStore
from perdure.machines.driver import Accelerator
from perdure.machines.fingerprint import fingerprint
from perdure.machines.qemu import QemuConfig, QemuDriver
from perdure.node.supervisor import NodeParts, NodeSupervisor
from perdure.snapshots.layers import disk_file
from perdure.snapshots.segments import segment_file
from perdure.wire.node import ExecExited, ExecOutput, ExecSpec
from tests.contract.node.benches import Bench


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no test of the node calls the guest's API")


def make_node(home: Path, **settings: Any) -> NodeSupervisor:
    """A supervisor as ``wiring`` makes it, without a control plane. The image cache is the shared one."""
    chosen = Settings(home=home, image_dir=Settings().images, **settings)
    return NodeSupervisor(
        NodeParts(
            node_id=NodeId("nod_test"),
            settings=chosen,
            clock=SystemClock(),
            driver=QemuDriver(QemuConfig()),
            accelerator=Accelerator.TCG,
            images=ImageStore(chosen.images),
            egress=EgressGateway(Dialer()),
            selfservice=SelfService(_no_app),
        )
    )


class RealWorld:
    forever = ("sleep", "100000")
    machine_id_path = "/etc/machine-id"

    def __init__(self, home: Path, **settings: Any) -> None:
        self._make_node = lambda: make_node(home, **settings)
        self.node = self._make_node()
        image = ImageStore(Settings().images).resolve("base")
        self.image, self.size, self.disk_gib = image.digest, image.default_size, image.disk_gib

    async def kill(self, workspace_id: WorkspaceId) -> None:
        (machine,) = [one for one in (await self.node.inventory()).machines if one.workspace_id == workspace_id]
        assert machine.pid is not None
        os.kill(machine.pid, signal.SIGKILL)

    async def reboot(self, workspace_id: WorkspaceId) -> None:
        """As a careful user would: what was written is on the disk before the kernel goes down."""
        guest = self.node.guest(workspace_id, 1)
        spec = ExecSpec(ExecId("exe_reboot"), shell="sync; echo b > /proc/sysrq-trigger")
        await guest.start_exec(spec)

    async def crash(self) -> None:
        """What SIGKILL leaves: dead VMMs, files as they are, a lock that the kernel has released; nothing is tidied."""
        for pid in [*self.node.pids(), *self.node.pool_pids()]:
            os.kill(pid, signal.SIGKILL)
        before, self.node = self.node, self._make_node()
        for resident in before._residents.values():
            for task in resident._tasks:
                task.cancel()
            await resident.link.close()
        await asyncio.to_thread(before._store.close)
        await self.node.open()

    def damage(self, snapshot_id: SnapshotId, *, disk: bool = False) -> str:
        store = self.node._store
        manifest = store.manifest(snapshot_id)
        assert manifest.memory is not None
        parent = store.manifest(manifest.parent_id).memory if manifest.parent_id else None
        if disk:
            path = store.disks / disk_file(manifest.disk_ids[-1])
        else:
            own = set(manifest.memory.segments) - set(parent.segments if parent else ())
            path = store.segments / segment_file(max(own))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return f"{path.parent.name}/{path.name}"

    def estrange(self, snapshot_id: SnapshotId, **parts: str) -> None:
        before = self.node._store.manifest(snapshot_id)
        assert before.memory is not None
        assert parts.keys() <= before.memory.fingerprint_parts.keys()
        other = {**before.memory.fingerprint_parts, **parts}
        memory = replace(before.memory, fingerprint_parts=other, fingerprint=fingerprint(other))
        assert self.node._store.replace(before, replace(before, memory=memory))


@asynccontextmanager
async def real_bench(home: Path, **settings: Any) -> AsyncIterator[Bench]:
    world = RealWorld(home, **settings)
    await world.node.open()
    try:
        yield Bench(world)
    finally:
        await world.node.close()


async def shell(bench: Bench, workspace: WorkspaceId, generation: int, line: str) -> str:
    """Run a line in a workspace; its output. A nonzero status fails the test."""
    spec = ExecSpec(ExecId(f"exe_{os.urandom(6).hex()}"), shell=line)
    handle = await bench.node.guest(workspace, generation).start_exec(spec)
    output = bytearray()
    async for event in handle.events():
        if isinstance(event, ExecOutput):
            output += event.data
        elif isinstance(event, ExecExited):
            assert event.exit_code == 0, (line, event, output)
    return output.decode().strip()
