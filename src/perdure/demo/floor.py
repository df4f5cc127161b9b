"""The bare floor: the same machine, snapshot and channel steps as the node takes, without control plane, database or HTTP.

What a wake costs here is what the host and QEMU cost; what the product adds is the ratio that the benchmark prints. A pooled
machine and the durable intent of a start are made before the clock starts.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
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
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.capture import Base, CaptureRequest, MachineRun, RunSpec
from perdure.snapshots.compact import compact
from perdure.snapshots.layers import create_layer
from perdure.snapshots.manifest import BaseRef
from perdure.snapshots.start import begin
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import ExecExited, ExecOutput, ExecSpec, Identity, Isolation

DEADLINE_S = 240.0
_WORKSPACE = WorkspaceId("ws_bench")
_PIECE = 1 << 18


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

    async def cold_boots(self, count: int) -> float:
        """Seconds until so many, begun at once, have all said hello."""
        return max(await asyncio.gather(*(self.cold_boot() for _ in range(count))))

    async def _intend(self, workspace_id: WorkspaceId, source: SnapshotId | None) -> MachineRun:
        """The intent of a start, on record."""
        self.generation += 1
        spec = RunSpec(
            workspace_id,
            DEFAULT_TENANT,
            self.generation,
            self.image.digest,
            self.golden.size,
            self.image.disk_gib,
            self.base,
            self.mark,
        )
        devices = self.golden.devices if source is None else None
        return await asyncio.to_thread(begin, self.store, spec, source, memory=True, devices=devices)

    async def _warm(self) -> Machine:
        """A machine as it waits in the pool."""
        machine = await self.driver.prepare(self._launch(self.golden.ram))
        self.running.append(machine)
        return machine

    async def _begin(self, source: SnapshotId | None) -> tuple[Machine, MachineRun]:
        """A pooled machine and the intent of a start: what is there, or not counted, when a request comes."""
        run = await self._intend(_WORKSPACE, source)
        return await self._warm(), run

    async def _end(self, machine: Machine, run: MachineRun, link: GuestLink) -> None:
        await link.close()
        await machine.kill()
        self.running.remove(machine)
        await asyncio.to_thread(run.end)

    # -------------------------------------------------------------------------------------------------------------- samples

    async def prepare(self, script: str) -> None:
        """Run ``script`` and the holder in a fresh workspace, capture it as a hibernation does, and keep the snapshot."""

        async def set_up(link: GuestLink) -> None:
            program = (files("perdure.demo") / "programs" / "holder.py").read_text()
            setup = f"{script}\ncat > /root/holder.py <<'END'\n{program}\nEND\n"
            await execute(link, "bash", "-c", setup + "setsid python3 /root/holder.py 9000 > /root/holder.log 2>&1 &\n")
            await execute(link, "bash", "-c", "tail -f /root/holder.log | grep -q ready")
            await _tell(link, "grow 5")

        self.snapshot = await self._changed(None, set_up)

    async def _changed(self, source: SnapshotId | None, change: Callable[[GuestLink], Awaitable[None]]) -> SnapshotId:
        """Wake a snapshot, or a fresh workspace, change it, and capture it as a hibernation does."""
        machine, run = await self._begin(source)
        link = GuestLink(machine.connect)
        try:
            await self._answer(machine, run, link, new_identity=source is None)
            await change(link)
            return await self._capture(machine, run, link)
        finally:
            await self._end(machine, run, link)

    @staticmethod
    async def _answer(machine: Machine, run: MachineRun, link: GuestLink, *, new_identity: bool = False) -> None:
        """Restore it, let it run, and wait for its agent's first reply."""
        await run.restore(machine)
        await machine.resume()
        await link.open(DEADLINE_S)
        await link.wake(WakeRequest(_identity(run), new_identity=new_identity))

    async def _capture(self, machine: Machine, run: MachineRun, link: GuestLink) -> SnapshotId:
        snapshot = SnapshotId(mint("snp", now_ms=0))
        await run.ready(machine, snapshot, goes_on=False)
        await link.sync()
        frozen = await link.stand_still()
        await machine.pause()
        captured = await run.capture(machine, CaptureRequest(snapshot, SystemClock().now(), quiesced=frozen, goes_on=False))
        await asyncio.to_thread(run.commit, captured, 0.0)
        return snapshot

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[GuestLink]:
        """A fresh workspace of the image, and the channel to its agent."""
        machine, run = await self._begin(None)
        link = GuestLink(machine.connect)
        try:
            await self._answer(machine, run, link, new_identity=True)
            yield link
        finally:
            await self._end(machine, run, link)

    async def wake(self) -> dict[str, float]:
        """Seconds from the request to: the guest running, the agent's first reply (repairs done), the first exec's exit."""
        machine, run = await self._begin(self.snapshot)
        link = GuestLink(machine.connect)
        taken: dict[str, float] = {}
        try:
            started = time.perf_counter()
            await run.restore(machine)
            await machine.resume()
            taken["running"] = time.perf_counter() - started
            await link.open(DEADLINE_S)
            await link.wake(WakeRequest(_identity(run)))
            taken["reply"] = time.perf_counter() - started
            await execute(link, "/bin/true")
            taken["exec"] = time.perf_counter() - started
            return taken
        finally:
            await self._end(machine, run, link)

    async def restores(self, count: int, pooled: int) -> float:
        """Seconds until so many new workspaces of the prepared snapshot, begun at once, have all replied. So many of their
        machines wait as in a pool; the others are started within that time."""
        runs = [await self._intend(WorkspaceId(f"{_WORKSPACE}{number}"), self.snapshot) for number in range(count)]
        warm = [await self._warm() for _ in range(pooled)]
        begun: list[tuple[Machine, MachineRun, GuestLink]] = []

        async def one(run: MachineRun) -> None:
            machine = warm.pop() if warm else await self._warm()
            link = GuestLink(machine.connect)
            begun.append((machine, run, link))
            await self._answer(machine, run, link, new_identity=True)

        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    group.create_task(one(run))
            return time.perf_counter() - started
        finally:
            for machine, run, link in begun:
                await self._end(machine, run, link)
            for run in runs:
                await asyncio.to_thread(run.end)

    async def compaction(self, held_mib: int, dropped_mib: int) -> Compacted:
        """Compact a sleeping workspace whose process held much and gave most of it back before it fell asleep."""
        full = await self._changed(self.snapshot, lambda link: _tell(link, f"grow {held_mib}"))
        emptier = await self._changed(full, lambda link: _tell(link, f"drop {dropped_mib}"))
        self.store.delete([full])
        cpu, wall = time.process_time(), time.perf_counter()
        freed = await asyncio.to_thread(compact, self.store, emptier, self.base.ram)
        taken = Compacted(time.process_time() - cpu, time.perf_counter() - wall, freed)
        self.store.delete([emptier])
        return taken


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction took of this process and of the clock, and what it freed."""

    cpu_s: float
    wall_s: float
    freed_bytes: int


def _identity(run: MachineRun) -> Identity:
    return Identity(run.spec.workspace_id, DEFAULT_TENANT, run.spec.generation, "bench", "0" * 32)


async def _tell(link: GuestLink, words: str) -> None:
    await execute(link, "bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/9000; echo {words} >&3; read -r answer <&3")


async def execute(link: GuestLink, *argv: str) -> None:
    """Run a command and wait for its end, which must be a good one."""
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


async def upload(link: GuestLink, path: str, content: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), _PIECE):
            yield content[start : start + _PIECE]

    await link.write_file(path, pieces())


async def download(link: GuestLink, path: str, size: int) -> None:
    received = 0
    async for piece in link.read_file(path):
        received += len(piece)
    expect(received == size, f"{received} of {size} bytes came from the bare machine.")
