"""A snapshot store with one image, tiny machines that run on it, and what may be left of it after a crash."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from perdure.core.files import DISK, Disk
from perdure.core.ids import SnapshotId, TenantId, WorkspaceId
from perdure.machines.driver import PAGE_SIZE, DiskChain, DiskLayer
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.capture import Base, CaptureRequest, MachineRun, RunSpec
from perdure.snapshots.manifest import BaseRef
from perdure.snapshots.start import begin
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import MachineSize, SnapshotFacts
from tests.fakes.disk import Crash, QuickDisk, RecordingDisk
from tests.fakes.tiny_machine import TinyMachine, TinyMemory

PAGES = 300
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
WS = WorkspaceId("ws_one")
_ids = itertools.count(1)


class Node:
    """A store with one image, and machines that run on it. ``tells_writes``: the machines do."""

    def __init__(self, home: Path, disk: Disk = DISK, *, tells_writes: bool = False) -> None:
        self.home = home
        image = home / "image"
        if not image.exists():
            image.mkdir()
            content = np.random.default_rng(1).integers(0, 255, (PAGES, PAGE_SIZE), np.uint8)
            content[::3] = 0
            (image / "ram.base").write_bytes(content.tobytes())
            (image / "root.raw").write_bytes(b"root")
            (image / "devices.state").write_text("devices 1 ")
        self.devices = image / "devices.state"
        ref = BaseRef("image", "golden")
        disks = DiskChain((DiskLayer(image / "root.raw", "raw"),))
        self.base = Base(BaseRam(image / "ram.base"), ref, disks, ref)
        self.disk = disk
        self.store = SnapshotStore(home / "store", disk)
        self.tells_writes = tells_writes

    def spec(self, generation: int, workspace: WorkspaceId = WS, disk_gib: int = 8, source: SnapshotId | None = None) -> RunSpec:
        """On the golden's RAM, or on the private base of ``source``."""
        parts = {"qemu": "7.2.22"}
        size = MachineSize(512, 1)
        base = self.base_of(source)
        return RunSpec(workspace, TenantId("ten_a"), generation, "image", size, disk_gib, base, "fp", parts)

    def base_of(self, source: SnapshotId | None) -> Base:
        manifest = None if source is None else self.store.manifest(source)
        own = None if manifest is None else self.store.own_base(manifest)
        if own is None or manifest is None or manifest.memory is None:
            return self.base
        return replace(self.base, ram=own, ram_ref=manifest.memory.base)

    async def wake(
        self, generation: int, source: SnapshotId | None = None, workspace: WorkspaceId = WS
    ) -> tuple[MachineRun, TinyMachine]:
        spec = self.spec(generation, workspace, source=source)
        run = begin(self.store, spec, source, memory=True, devices=self.devices)
        machine = TinyMachine(
            TinyMemory(spec.base.ram.pages, tells_writes=self.tells_writes),
            self.disk if isinstance(self.disk, RecordingDisk) else None,
        )
        await run.restore(machine)  # type: ignore[arg-type]
        return run, machine


def snapshot_id() -> SnapshotId:
    return SnapshotId(f"snp_{next(_ids):026d}")


async def capture(run: MachineRun, machine: TinyMachine, *, goes_on: bool = True, quiesced: bool = True) -> SnapshotFacts:
    name = snapshot_id()
    await run.ready(machine, name, goes_on=goes_on)  # type: ignore[arg-type]
    captured = await run.capture(machine, CaptureRequest(name, NOW, quiesced, goes_on))  # type: ignore[arg-type]
    return await asyncio.to_thread(run.commit, captured, 0.012)


def files_of(node: Node) -> set[str]:
    return {str(p.relative_to(node.store.root)) for p in node.store.root.rglob("*") if p.is_file()} - {"lock"}


async def check_crash(disk: RecordingDisk, node: Node, acknowledged: list, case: tuple[int, Crash, Path], seed: int) -> None:
    after, crash, target = case
    target.mkdir()
    disk.materialise(after, crash, target, seed=after + 1000 * seed)
    (target / "image").symlink_to(node.home / "image")
    crashed = Node(target, QuickDisk())
    report = crashed.store.open()
    assert report.damaged == (), (disk.operations[:after], crash)
    assert crashed.store.open().debris == ()
    present = {facts.snapshot_id for facts in crashed.store.complete()}
    for since, until, facts, _ in acknowledged:
        if since <= after <= until:
            assert facts.snapshot_id in present, (disk.operations[:after], crash)
    rams = {facts.snapshot_id: ram for _, _, facts, ram in acknowledged}
    for name in present:
        crashed.store.verify(name, crashed.base.ram)
        run, woken = await crashed.wake(9, name, WorkspaceId("ws_check"))
        assert np.array_equal(woken.memory.ram, rams[name])
        run.end()
    for live in crashed.store.live():
        crashed.store.salvage(live.workspace_id, live.generation, snapshot_id(), NOW)
    crashed.store.delete([facts.snapshot_id for facts in crashed.store.complete()])
    assert files_of(crashed) == set()
    crashed.store.close()
