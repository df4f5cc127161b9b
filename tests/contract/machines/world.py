"""What the contract needs of a kind of machine: a driver, files to start from, and a way to talk to the guest."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from perdure.machines.driver import (
    PAGE_SIZE,
    Accelerator,
    ChannelName,
    DiskChain,
    DiskLayer,
    LaunchSpec,
    Limits,
    Machine,
    MachineDriver,
    PageNumbers,
    Pages,
    Ram,
    Shape,
)

DISK_BYTES = 256 << 20
#: Generous, because the suite shares its host with others; nothing here waits that long when it works.
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Captured:
    """A machine's content at one instant."""

    devices: Path
    disk: DiskChain
    pages: PageNumbers
    content: Pages


@dataclass
class World:
    """``golden`` is filled by the first boot; files live in ``directory``."""

    name: str
    make_driver: Callable[[], MachineDriver]
    make_layer: Callable[[Path], None]
    directory: Path
    shape: Shape
    tells_writes: bool
    golden: Captured | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def ram(self) -> Path:
        return self.directory / "ram.base"

    def layer(self) -> DiskLayer:
        """A new empty layer."""
        path = self.directory / f"layer{next(self._numbers)}.qcow2"
        self.make_layer(path)
        return DiskLayer(path, "qcow2")

    def spec(self, *, shared: bool = False, ram: Path | None = None, limits: Limits | None = None) -> LaunchSpec:
        name = f"m{next(self._numbers)}"
        return LaunchSpec(
            name,
            self.directory / "run" / name,
            self.shape,
            Ram(ram or self.ram, shared),
            Accelerator.TCG,
            limits or Limits(memory_bytes=1 << 30, cpus=2.0),
        )

    def fresh_disk(self) -> DiskChain:
        """The golden disk under a new layer."""
        assert self.golden is not None
        return DiskChain((*self.golden.disk.layers, self.layer()))

    def state_file(self) -> Path:
        return self.directory / f"state{next(self._numbers)}"


async def make_golden(world: World) -> None:
    """Boot once with shared memory and capture: what every other test of the session starts from."""
    with world.ram.open("wb") as file:
        file.truncate(world.shape.memory_mib << 20)
    root = world.directory / "root.raw"
    with root.open("wb") as file:
        file.truncate(DISK_BYTES)
    machine = await world.make_driver().boot(world.spec(shared=True), DiskChain((DiskLayer(root, "raw"), world.layer())))
    try:
        assert await ask(machine, "echo up") == "up"
        world.golden = await capture(world, machine)
    finally:
        await machine.kill()
    world.ram.chmod(0o444)


async def ask(
    machine: Machine, command: str, channel: ChannelName = ChannelName.CONTROL, *, deadline_s: float = DEADLINE_S
) -> str:
    """Run a command in the guest over a new connection; its output. A nonzero status fails the test."""
    reader, writer = await machine.connect(channel)
    try:
        async with asyncio.timeout(deadline_s):
            writer.write(f"{command}\n".encode())
            answer = (await reader.readuntil(b"]\n")).decode()
    finally:
        writer.transport.abort()
    output, _, status = answer.rstrip("]\n").rpartition("[")
    assert status == "0", f"{command!r}: {answer}"
    return output.strip()


async def capture(world: World, machine: Machine) -> Captured:
    """Everything of a machine, which stays paused."""
    await machine.pause()
    disk: DiskChain = machine.disk  # type: ignore[attr-defined]
    devices = world.state_file()
    await machine.save_devices(devices)
    pages = machine.memory.written_pages()
    return Captured(devices, disk, pages, machine.memory.read_pages(pages))


async def restore(
    world: World,
    captured: Captured,
    *,
    resume: bool = True,
    shape: Shape | None = None,
    disk_below: DiskChain | None = None,
) -> Machine:
    """A new machine with that content, on a new layer."""
    spec = replace(world.spec(), disk_below=disk_below or DiskChain(()))
    machine = await world.make_driver().prepare(replace(spec, shape=shape) if shape else spec)
    try:
        await machine.attach_disk(DiskChain((*captured.disk.layers, world.layer())))
        machine.memory.write_pages(captured.pages, captured.content)
        await machine.load_devices(captured.devices)
        if resume:
            await machine.resume()
    except BaseException:
        await machine.kill()
        raise
    return machine


def all_memory(machine: Machine) -> Pages:
    """The whole of guest RAM."""
    return machine.memory.read_pages(np.arange(machine.memory.page_count, dtype=np.uint32))


def base_memory(world: World) -> Pages:
    return np.fromfile(world.ram, dtype=np.uint8).reshape(-1, PAGE_SIZE)


def make_qcow2(path: Path) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(path), str(DISK_BYTES)], check=True)
