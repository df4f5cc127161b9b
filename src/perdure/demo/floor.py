"""The bare floor: the same machine, snapshot and channel steps as the node takes, without control plane, database or HTTP.

What a wake costs here is what the host and QEMU cost; what the product adds is the ratio that the benchmark prints. A pooled
machine and the durable intent of a start are made before the clock starts.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.core.ids import DEFAULT_TENANT, ExecId, SnapshotId, WorkspaceId, mint
from perdure.demo.steps import expect
from perdure.images.golden import GoldenSpec, ensure_golden, golden_parts
from perdure.images.model import Golden, Image
from perdure.images.registry import ImageStore
from perdure.machines.driver import Accelerator, DiskChain, DiskLayer, LaunchSpec, Machine, Ram
from perdure.machines.fingerprint import fingerprint
from perdure.machines.guestlink import GuestLink, WakeRequest
from perdure.machines.qemu import QemuConfig, QemuDriver
from perdure.snapshots.capture import Base, CaptureRequest, MachineRun, RunSpec
from perdure.snapshots.layers import create_layer
from perdure.snapshots.manifest import BaseRef
from perdure.snapshots.pagelog import BaseRam
from perdure.snapshots.start import begin
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import ExecExited, ExecOutput, ExecSpec, Identity, Isolation

DEADLINE_S = 240.0
_WORKSPACE = WorkspaceId("ws_bench")


@dataclass(slots=True)
class Rig:
    """One image, one golden, one store of its own. ``prepare`` makes the snapshot that ``wake`` wakes again and again."""

    directory: Path
    image: Image
    golden: Golden
    driver: QemuDriver
    accelerator: Accelerator
    store: SnapshotStore
    base: Base
    mark: str
    generation: int = 0
    snapshot: SnapshotId | None = None
    running: list[Machine] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings, isolation: Isolation) -> AsyncIterator[Rig]:
        """With the accelerator that stands behind ``isolation``: the one that the server runs its machines with."""
        accelerator = Accelerator.KVM if isolation is Isolation.VM_HARDWARE else Accelerator.TCG
        driver = QemuDriver(QemuConfig(settings.qemu, settings.qemu_data, settings.jail))
        with tempfile.TemporaryDirectory(prefix="perdure-floor-") as scratch:
            directory = Path(scratch)
            images = ImageStore(settings.images)
            image = images.resolve("base")
            spec = GoldenSpec(image, image.default_size, images, driver, accelerator, directory / "run")
            golden = await ensure_golden(spec)
            store = SnapshotStore(directory / "store")
            store.open()
            ref = BaseRef(image.digest, golden.directory.name)
            base = Base(BaseRam(golden.ram), ref, golden.disk(image), ref)
            mark = fingerprint(await golden_parts(spec))
            (directory / "run").mkdir(exist_ok=True)
            rig = cls(directory, image, golden, driver, accelerator, store, base, mark)
            try:
                yield rig
            finally:
                for machine in list(rig.running):
                    await machine.kill()
                store.close()

    # ------------------------------------------------------------------------------------------------------------ machines

    def _launch(self, ram: Path) -> LaunchSpec:
        name = f"floor-{os.urandom(4).hex()}"
        return LaunchSpec(name, self.directory / "run" / name, self.image.shape(self.golden.size), Ram(ram), self.accelerator)

    async def cold_boot(self) -> float:
        """Seconds from nothing to the agent's hello, with our own init, on the image's disk and empty memory."""
        name = os.urandom(4).hex()
        ram, overlay = self.directory / f"{name}.ram", self.directory / f"{name}.qcow2"
        with ram.open("xb") as file:
            file.truncate(self.golden.ram_bytes)
        create_layer(overlay, self.image.disk_gib << 30)
        started = time.perf_counter()
        machine = await self.driver.boot(self._launch(ram), DiskChain((self.image.root, DiskLayer(overlay, "qcow2"))))
        link = GuestLink(machine.connect)
        try:
            await link.open(DEADLINE_S)
            return time.perf_counter() - started
        finally:
            await link.close()
            await machine.kill()
            ram.unlink()
            overlay.unlink()

    async def _begin(self) -> tuple[Machine, MachineRun]:
        """A pooled machine and the intent of a start: what is there, or not counted, when a request comes."""
        self.generation += 1
        spec = RunSpec(
            _WORKSPACE,
            DEFAULT_TENANT,
            self.generation,
            self.image.digest,
            self.golden.size,
            self.image.disk_gib,
            self.base,
            self.mark,
        )
        devices = self.golden.devices if self.snapshot is None else None
        run = await asyncio.to_thread(begin, self.store, spec, self.snapshot, memory=True, devices=devices)
        machine = await self.driver.prepare(self._launch(self.golden.ram))
        self.running.append(machine)
        return machine, run

    async def _end(self, machine: Machine, run: MachineRun, link: GuestLink) -> None:
        await link.close()
        await machine.kill()
        self.running.remove(machine)
        await asyncio.to_thread(run.end)

    def _identity(self) -> Identity:
        return Identity(_WORKSPACE, DEFAULT_TENANT, self.generation, "bench", "0" * 32)

    # -------------------------------------------------------------------------------------------------------------- samples

    async def prepare(self, script: str) -> None:
        """Run ``script`` and the holder in a fresh workspace, capture it as a hibernation does, and keep the snapshot."""
        machine, run = await self._begin()
        link = GuestLink(machine.connect)
        try:
            await run.restore(machine)
            await machine.resume()
            await link.open(DEADLINE_S)
            await link.wake(WakeRequest(self._identity(), new_identity=True))
            program = (files("perdure.demo") / "programs" / "holder.py").read_text()
            setup = f"{script}\ncat > /root/holder.py <<'END'\n{program}\nEND\n"
            await _exec(link, "bash", "-c", setup + "setsid python3 /root/holder.py 9000 > /root/holder.log 2>&1 &\n")
            await _exec(link, "bash", "-c", "tail -f /root/holder.log | grep -q ready")
            await _exec(link, "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9000; echo grow 5 >&3; read -r answer <&3")
            self.snapshot = await self._capture(machine, run, link)
        finally:
            await self._end(machine, run, link)

    async def _capture(self, machine: Machine, run: MachineRun, link: GuestLink) -> SnapshotId:
        snapshot = SnapshotId(mint("snp", now_ms=0))
        await run.ready(machine, snapshot, goes_on=False)
        await asyncio.gather(link.sync(), run.rehearse(machine, threading.Event()))
        frozen = await link.stand_still()
        await machine.pause()
        captured = await run.capture(machine, CaptureRequest(snapshot, SystemClock().now(), quiesced=frozen, goes_on=False))
        await asyncio.to_thread(run.commit, captured, 0.0)
        return snapshot

    async def wake(self) -> dict[str, float]:
        """Seconds from the request to: the guest running, the agent's first reply (repairs done), the first exec's exit."""
        machine, run = await self._begin()
        link = GuestLink(machine.connect)
        taken: dict[str, float] = {}
        try:
            started = time.perf_counter()
            await run.restore(machine)
            await machine.resume()
            taken["running"] = time.perf_counter() - started
            await link.open(DEADLINE_S)
            await link.wake(WakeRequest(self._identity()))
            taken["reply"] = time.perf_counter() - started
            await _exec(link, "/bin/true")
            taken["exec"] = time.perf_counter() - started
            return taken
        finally:
            await self._end(machine, run, link)


async def _exec(link: GuestLink, *argv: str) -> None:
    handle = await link.start_exec(ExecSpec(ExecId(mint("exe", now_ms=0)), argv=argv))
    said = b""
    try:
        async for event in handle.events():
            if isinstance(event, ExecOutput):
                said += event.data
            elif isinstance(event, ExecExited):
                expect(
                    event.exit_code == 0, f"{argv[0]} failed on the bare machine: {said.decode(errors='replace')} {event.detail}"
                )
    finally:
        await handle.close()
