"""Guests to test, and how to speak to them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perdure.core.config import Settings
from perdure.core.ids import ExecId, TenantId, WorkspaceId
from perdure.images.golden import GoldenSpec, ensure_golden
from perdure.images.registry import ImageStore
from perdure.machines.driver import Accelerator, DiskChain, DiskLayer, LaunchSpec, Machine, Ram
from perdure.machines.guestlink import GuestLink, WakeReport, WakeRequest
from perdure.machines.guestlink_stream import LinkStream
from perdure.machines.qemu import QemuDriver
from perdure.snapshots.layers import create_layer
from perdure.wire.node import ExecExited, ExecOutput, ExecSpec, Guest, Identity, MachineSize
from tests.fakes.guest_agent import HostAgent, why_not
from tests.fakes.memory_guest import MemoryGuest

#: Generous: these machines are emulated on busy hosts.
DEADLINE_S = 60.0
VM_MIB = 384

_IN_SHELL = {
    "say": "echo {}",
    "warn": "echo {} >&2",
    "bytes": "printf '{}'",
    "spew": "head -c {} /dev/zero | tr '\\0' x",
    "hang": "exec sleep 1000",
    "cat": "cat",
    "env": 'echo "${}"',
    "exit": "exit {}",
    "whoami": "id -un",
    "pwd": "pwd",
}
_IN_FAKE = {"say": "echo {}", "warn": "warn {}", "bytes": "bytes {}", "spew": "spew {}", "env": "env {}", "exit": "exit {}"}


@dataclass
class Done:
    """What a command said, and how it ended."""

    exited: ExecExited
    stdout: bytes
    stderr: bytes
    events: list[Any]


@dataclass
class Place:
    """A guest to test, and how to speak to it. ``streams`` collects what programs inside ask of the host."""

    guest: Guest
    kind: str
    streams: list[tuple[str, dict[str, Any], LinkStream]] = field(default_factory=list)
    on_stream: Callable[[str, dict[str, Any], LinkStream], None] | None = None
    woken: WakeReport | None = None

    @property
    def link(self) -> GuestLink:
        assert isinstance(self.guest, GuestLink)
        return self.guest

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that callers have brought in and got out since its generation began."""
        assert isinstance(self.guest, GuestLink | MemoryGuest)
        return self.guest.moved.inward, self.guest.moved.outward

    def shell(self, verb: str, argument: object = "") -> str:
        """A command line that does ``verb`` in this kind of guest."""
        if verb == "bytes" and self.kind != "fake":
            argument = "".join(f"\\{byte:03o}" for byte in bytes.fromhex(str(argument)))
        words = _IN_FAKE.get(verb, verb) if self.kind == "fake" else _IN_SHELL[verb]
        return words.format(argument)

    async def run(self, shell: str | None = None, *, stdin: bytes | None = None, **fields: Any) -> Done:
        """Run a command to its end."""
        spec = ExecSpec(new_id(), shell=shell, stdin=stdin is not None, **fields)
        handle = await self.guest.start_exec(spec)
        if stdin is not None:
            await handle.write_stdin(stdin)
            await handle.close_stdin()
        return await collect(handle)


async def collect(handle: Any) -> Done:
    events = [event async for event in handle.events()]
    await handle.close()
    output = {"stdout": b"", "stderr": b""}
    lost = dict.fromkeys(output, 0)
    for event in events:
        if isinstance(event, ExecOutput):
            lost[event.stream] += event.gap
            assert event.offset == len(output[event.stream]) + lost[event.stream]
            output[event.stream] += event.data
    assert isinstance(events[-1], ExecExited)
    return Done(events[-1], output["stdout"], output["stderr"], events)


def new_id() -> ExecId:
    return ExecId(f"exe_{os.urandom(6).hex()}")


def identity(generation: int = 1, hostname: str = "box") -> Identity:
    return Identity(WorkspaceId("ws_1"), TenantId("ten_default"), generation, hostname, f"{generation:032x}")


@asynccontextmanager
async def linked(
    connect: Any, kind: str, generation: int = 1, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Place]:
    """A link that is awake at that generation."""
    place: Place

    def on_stream(what: str, info: dict[str, Any], stream: LinkStream) -> None:
        place.streams.append((what, info, stream))
        if place.on_stream is not None:
            place.on_stream(what, info, stream)

    link = GuestLink(connect, generation=generation, on_guest_stream=on_stream, unresponsive_s=DEADLINE_S)
    place = Place(link, kind)
    await link.open(DEADLINE_S * 3)
    try:
        place.woken = await link.wake(WakeRequest(identity(generation), environment={"COLOUR": "green", **(environment or {})}))
        yield place
    finally:
        await link.close()


@asynccontextmanager
async def host_agent(environment: Mapping[str, str] | None = None, **fields: Any) -> AsyncIterator[tuple[HostAgent, Place]]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    agent = HostAgent(**fields)
    await agent.start()
    try:
        async with linked(agent.connect, "agent", environment=environment) as place:
            yield agent, place
    finally:
        await agent.stop()


@asynccontextmanager
async def booted(*, more_gib: int = 0) -> AsyncIterator[tuple[Machine, Path]]:
    """A VM of the image ``base`` and its directory; RAM is private over a file of zeros, as a workspace's is over its golden.
    Its disk is ``more_gib`` larger than the file system on it."""
    image = ImageStore(Settings().images).resolve("base")
    with tempfile.TemporaryDirectory(prefix="perdure-guest-", dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        ram, disk = directory / "ram", directory / "disk.qcow2"
        with ram.open("xb") as file:
            file.truncate(VM_MIB << 20)
        create_layer(disk, (image.disk_gib + more_gib) << 30)
        spec = LaunchSpec("guest-test", directory / "run", image.shape(MachineSize(VM_MIB, 1)), Ram(ram), Accelerator.TCG)
        machine = await QemuDriver().boot(spec, DiskChain((image.root, DiskLayer(disk, "qcow2"))))
        try:
            yield machine, directory
        finally:
            await machine.kill()


@asynccontextmanager
async def woken() -> AsyncIterator[Machine]:
    """A VM of the image ``base`` that begins where its golden snapshot was taken: nobody has to wait for a boot."""
    store, driver = ImageStore(Settings().images), QemuDriver()
    image = store.resolve("base")
    with tempfile.TemporaryDirectory(prefix="perdure-guest-", dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        wanted = GoldenSpec(image, image.default_size, store, driver, Accelerator.TCG, directory / "golden")
        golden = await ensure_golden(wanted)
        disk = directory / "disk.qcow2"
        create_layer(disk, image.disk_gib << 30)
        spec = LaunchSpec("guest-test", directory / "run", image.shape(golden.size), Ram(golden.ram), Accelerator.TCG)
        machine = await driver.prepare(spec)
        try:
            await machine.attach_disk(DiskChain((*golden.disk(image).layers, DiskLayer(disk, "qcow2"))))
            await machine.load_devices(golden.devices)
            await machine.resume()
            yield machine
        finally:
            await machine.kill()
