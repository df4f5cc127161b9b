"""A machine without a VMM: complete, in memory, and held to the same contract as QEMU (tests/contract/machines).

Guest RAM is an array over the base file's content, device state is a small file, and a disk layer is a file of appended
records. The guest is a coroutine per connection that a test can replace; the default one speaks the line protocol of the tiny
guest (one command per line, answered by its output and ``[STATUS]``) and keeps what it remembers in guest RAM, so that it
survives exactly when the pages do.

Faults are methods: ``break_down`` (the process dies), ``fill_disk`` and ``make_room``, ``guest_event``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from perdure.core.errors import (
    AlreadyExists,
    Busy,
    Conflict,
    InvalidRequest,
    MachineDied,
    NotFound,
    RestoreFailed,
)
from perdure.machines.driver import (
    PAGE_SIZE,
    Accelerator,
    ChannelName,
    DiskChain,
    DiskLayer,
    EventKind,
    LaunchSpec,
    MachineEvent,
    MachineState,
    PageNumbers,
    Pages,
    Ram,
    VmmIdentity,
    WrittenPages,
)
from perdure.wire.node import Confinement, Isolation, NodeUsage

MEMO_PAGE = 7  # where the guest keeps what it was told to remember
_AWAKE = (MachineState.RUNNING, MachineState.PAUSED, MachineState.NO_SPACE)
_MAGIC = "fake-devices-1"

Guest = Callable[["FakeMachine", ChannelName, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class FakeMemory:
    """Implements ``GuestMemory`` over an array. ``tells_writes``: as on a host whose kernel has soft-dirty bits."""

    def __init__(self, ram: Ram, page_count: int, *, tells_writes: bool) -> None:
        self.page_count = page_count
        shape = (page_count, PAGE_SIZE)
        if ram.shared:
            self.ram: Pages = np.memmap(ram.path, dtype=np.uint8, mode="r+", shape=shape)
        else:
            self.ram = np.fromfile(ram.path, dtype=np.uint8).reshape(shape)
        self._shared = ram.shared
        self.private = np.zeros(page_count, dtype=bool)
        self.lately = np.zeros(page_count, dtype=bool)
        self._tells_writes = tells_writes
        self._is_marked = False
        self.is_alive = True
        self._lock = threading.Lock()

    def written_pages(self) -> PageNumbers:
        self._check_alive()
        with self._lock:
            return np.flatnonzero(self.private).astype(np.uint32)

    def touched_pages(self) -> PageNumbers:
        return self.written_pages()

    def scan(self) -> WrittenPages:
        pages = self.written_pages()
        with self._lock:
            return WrittenPages(pages, pages[self.lately[pages]] if self._is_marked else None)

    def mark(self) -> bool:
        self._check_alive()
        with self._lock:
            self.lately[:] = False
            self._is_marked = self._tells_writes
            return self._is_marked

    def read_pages(self, pages: PageNumbers, room: Pages | None = None) -> Pages:
        self._check(pages)
        with self._lock:
            if room is None or len(room) < len(pages):
                return self.ram[pages]
            return np.take(self.ram, pages, axis=0, out=room[: len(pages)], mode="clip")

    def write_pages(self, pages: PageNumbers, content: Pages) -> None:
        self._check(pages)
        if content.shape != (len(pages), PAGE_SIZE) or content.dtype != np.uint8:
            raise InvalidRequest(f"page content of shape {content.shape} does not belong to {len(pages)} pages")
        with self._lock:
            self.ram[pages] = content
            self.private[pages] = not self._shared
            self.lately[pages] = True

    def write_zeros(self, pages: PageNumbers) -> None:
        self.write_pages(pages, np.zeros((len(pages), PAGE_SIZE), dtype=np.uint8))

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise MachineDied("The virtual machine has ended.")

    def _check(self, pages: PageNumbers) -> None:
        self._check_alive()
        if len(pages) and int(pages[-1]) >= self.page_count:
            raise InvalidRequest(f"page {int(pages[-1])} lies outside of a machine with {self.page_count} pages")
        if len(pages) > 1 and not bool(np.all(pages[1:] > pages[:-1])):
            raise InvalidRequest("page numbers must be ascending and unique")


class FakeDriver:
    """Implements ``MachineDriver``. ``guest`` is what runs on each channel connection."""

    def __init__(self, guest: Guest | None = None, *, tells_writes: bool = False) -> None:
        self.guest = guest or tiny_guest
        self.tells_writes = tells_writes
        self.machines: list[FakeMachine] = []
        self.fail_next: list[BaseException] = []  # raised by the next starts, in order
        self._pids = itertools.count(1_000_000_000)  # beyond every real pid
        self._build = "fake 1"

    async def identity(self, accelerator: Accelerator) -> VmmIdentity:
        return VmmIdentity("fake", (1, 0, 0), self._build, "fake-machine", "fake-cpu", None)

    def upgrade(self, build: str) -> None:
        """Device states of another build no longer load."""
        self._build = build

    async def boot(self, spec: LaunchSpec, disk: DiskChain) -> FakeMachine:
        machine = self._start(spec, MachineState.RUNNING)
        try:
            machine.set_disk(disk)
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def prepare(self, spec: LaunchSpec) -> FakeMachine:
        if spec.ram.shared:
            raise InvalidRequest("A prepared machine maps its memory privately.")
        return self._start(spec, MachineState.PREPARED)

    def _start(self, spec: LaunchSpec, state: MachineState) -> FakeMachine:
        if self.fail_next:
            raise self.fail_next.pop(0)
        for path in (spec.ram.path, spec.shape.kernel, spec.shape.initrd, spec.shape.agent_disk):
            if not path.exists():
                raise NotFound(f"{path.name} does not exist.")
        size = spec.ram.path.stat().st_size
        if size != spec.shape.memory_mib << 20:
            raise InvalidRequest(f"The memory file {spec.ram.path.name} has {size} bytes, not {spec.shape.memory_mib} MiB.")
        spec.run_dir.mkdir(mode=0o700, parents=True)
        machine = FakeMachine(self, spec, next(self._pids), state)
        self.machines.append(machine)
        return machine

    @property
    def build(self) -> str:
        return self._build


class FakeMachine:
    """Implements ``Machine``."""

    def __init__(self, driver: FakeDriver, spec: LaunchSpec, pid: int, state: MachineState) -> None:
        self.name = spec.name
        self.pid = pid
        self.state = state
        self.confinement = Confinement(
            Isolation.VM_EMULATED, jail=False, seccomp=False, own_user=False, memory_limit=False, cpu_limit=False,
            pids_limit=False, readonly_base=True, missing={"jail": "a fake machine has no process"},
        )  # fmt: skip
        self.memory = FakeMemory(spec.ram, (spec.shape.memory_mib << 20) // PAGE_SIZE, tells_writes=driver.tells_writes)
        self.spec = spec
        self.collapse_gate: asyncio.Event | None = None  # set it to hold a collapse until the event comes
        self._driver = driver
        self._layers: tuple[DiskLayer, ...] = ()
        self._pending: DiskLayer | None = None
        self._collapsing: asyncio.Future[None] | None = None
        self._events: asyncio.Queue[MachineEvent | None] = asyncio.Queue()
        self._writers: dict[ChannelName, asyncio.StreamWriter] = {}
        self._guests: dict[ChannelName, asyncio.Task[None]] = {}
        self._running = asyncio.Event()
        self._full = False
        self._set(state)

    @property
    def disk(self) -> DiskChain:
        return DiskChain(self._layers)

    # ----------------------------------------------------------------------------------------------------------- commands

    def set_disk(self, disk: DiskChain) -> None:
        if not disk.layers:
            raise InvalidRequest("A machine's disk needs at least one layer.")
        if any(layer.format == "raw" for layer in disk.layers[1:]):
            raise InvalidRequest("A raw layer can only be the lowest of a disk.")
        for layer in disk.layers:
            if not layer.path.exists():
                raise NotFound(f"The disk layer {layer.path.name} does not exist.")
        self._layers = disk.layers

    async def attach_disk(self, disk: DiskChain) -> None:
        self._require("attach a disk", MachineState.PREPARED)
        if self._layers:
            raise Conflict(f"Machine {self.name} has its disk already.")
        self.set_disk(disk)

    async def load_devices(self, state: Path) -> None:
        self._require("load device state", MachineState.PREPARED)
        if not self._layers:
            raise Conflict(f"Machine {self.name} has no disk yet: attach it before loading device state.")
        try:
            found = json.loads(state.read_bytes())
        except ValueError:
            found = {}
        if found.get("magic") != _MAGIC or found.get("build") != self._driver.build:
            self._die("bad state")
            raise RestoreFailed("The device state could not be loaded: it is not one of this machine's build.")
        self._set(MachineState.PAUSED)

    async def pause(self) -> None:
        self._require("pause", *_AWAKE)
        self._interrupt_collapse()
        self._set(MachineState.PAUSED)

    async def resume(self) -> None:
        self._require("resume", MachineState.PAUSED, MachineState.NO_SPACE, MachineState.RUNNING)
        self._set(MachineState.RUNNING)

    async def save_devices(self, destination: Path) -> None:
        self._require("save device state", MachineState.PAUSED)
        if destination.exists():
            raise AlreadyExists(f"{destination.name} exists already; device state goes to a new file.")
        destination.write_text(json.dumps({"magic": _MAGIC, "build": self._driver.build}))

    async def open_overlay(self, overlay: DiskLayer) -> None:
        self._require("open a disk layer", *_AWAKE)
        if overlay.format != "qcow2":
            raise InvalidRequest("A layer that goes on top of others must be qcow2.")
        if not overlay.path.exists():
            raise NotFound(f"The disk layer {overlay.path.name} does not exist.")
        self._pending = overlay

    async def switch_overlay(self) -> None:
        self._require("switch the disk layer", *_AWAKE)
        self._interrupt_collapse()
        if self._pending is None:
            raise Conflict("No next disk layer is open.")
        self._layers = (*self._layers, self._pending)
        self._pending = None

    async def collapse_disk(self, keep: int) -> None:
        self._require("collapse disk layers", MachineState.RUNNING)
        if keep < 1:
            raise InvalidRequest(f"At least one layer must be kept, not {keep}.")
        if self._collapsing is not None:
            raise Conflict("The disk's layers are being collapsed already.")
        if len(self._layers) - keep <= 1:
            return
        self._collapsing = asyncio.get_running_loop().create_future()
        gate = asyncio.ensure_future(self.collapse_gate.wait() if self.collapse_gate else asyncio.sleep(0))
        try:
            await asyncio.wait({gate, self._collapsing}, return_when=asyncio.FIRST_COMPLETED)
            if self._collapsing.done():
                raise Busy("Collapsing the disk's layers was interrupted by a capture.")
        finally:
            gate.cancel()
            self._collapsing = None
        active, dropped = self._layers[-1], self._layers[keep:-1]
        below = b"".join(layer.path.read_bytes() for layer in dropped)
        active.path.write_bytes(below + active.path.read_bytes())
        self._layers = (*self._layers[:keep], active)

    async def connect(self, channel: ChannelName) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._require("connect to a channel", *_AWAKE)
        if (previous := self._writers.pop(channel, None)) is not None:
            previous.transport.abort()
        if (guest := self._guests.pop(channel, None)) is not None:
            guest.cancel()
        host_end, guest_end = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=host_end)
        guest_reader, guest_writer = await asyncio.open_unix_connection(sock=guest_end)
        self._writers[channel] = writer
        self._guests[channel] = serving = asyncio.ensure_future(self._driver.guest(self, channel, guest_reader, guest_writer))
        # Not at the end of a coroutine of ours: one that is cancelled before its first step never comes to its end.
        serving.add_done_callback(lambda _: guest_writer.transport.abort())
        return reader, writer

    async def events(self) -> AsyncIterator[MachineEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    async def usage(self) -> NodeUsage:
        self._check_alive()
        private = int(self.memory.private.sum()) * PAGE_SIZE
        return NodeUsage(cpu_s=0.01, rss_bytes=private + (1 << 20), pss_bytes=private + (1 << 20), private_bytes=private)

    def cpu_s(self) -> float:
        self._check_alive()
        return 0.01

    async def kill(self) -> None:
        if self.state is not MachineState.DEAD:
            self._die("killed")
        shutil.rmtree(self.spec.run_dir, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------- for tests: faults

    def break_down(self, detail: str = "killed by signal 9") -> None:
        """The VMM process is gone, as after SIGKILL or the kernel's OOM killer."""
        if self.state is not MachineState.DEAD:
            self._die(detail)

    def guest_event(self, kind: EventKind) -> None:
        """The guest reboots, panics or powers off; each ends the machine."""
        self._events.put_nowait(MachineEvent(kind))
        self._die("exit status 0")

    def fill_disk(self) -> None:
        """The host's disk is full: the machine stops at its next write."""
        self._full = True

    def make_room(self) -> None:
        self._full = False

    # -------------------------------------------------------------------------------------------------------------- guest

    async def until_running(self) -> None:
        """A guest computes only while its machine runs."""
        await self._running.wait()

    def remember(self, text: str) -> None:
        """Into guest RAM."""
        page = text.encode().ljust(PAGE_SIZE, b"\0")
        self.memory.write_pages(np.array([MEMO_PAGE], dtype=np.uint32), np.frombuffer(page, dtype=np.uint8).reshape(1, PAGE_SIZE))

    def recall(self) -> str:
        return bytes(self.memory.ram[MEMO_PAGE]).rstrip(b"\0").decode()

    async def store(self, text: str) -> None:
        """Onto the disk; waits where the host has no room."""
        while self._full:
            if self.state is MachineState.RUNNING:
                self._set(MachineState.NO_SPACE)
                self._events.put_nowait(MachineEvent(EventKind.NO_SPACE, "write failed: no space left on device"))
            await self.until_running()
        with self._layers[-1].path.open("ab") as file:
            file.write(f"{text}\n".encode())

    def load(self) -> str:
        for layer in reversed(self._layers):
            if lines := [line for line in layer.path.read_bytes().split(b"\n") if line.strip(b"\0")]:
                return lines[-1].decode()
        return ""

    # ------------------------------------------------------------------------------------------------------------ internal

    def _set(self, state: MachineState) -> None:
        self.state = state
        if state is MachineState.RUNNING:
            self._running.set()
        else:
            self._running.clear()

    def _interrupt_collapse(self) -> None:
        if self._collapsing is not None and not self._collapsing.done():
            self._collapsing.set_result(None)

    def _die(self, detail: str) -> None:
        self._set(MachineState.DEAD)
        self.memory.is_alive = False
        for guest in self._guests.values():
            guest.cancel()
        for writer in self._writers.values():
            writer.transport.abort()
        self._events.put_nowait(MachineEvent(EventKind.EXITED, detail))
        self._events.put_nowait(None)

    def _check_alive(self) -> None:
        if self.state is MachineState.DEAD:
            raise MachineDied(f"Machine {self.name} is dead.")

    def _require(self, what: str, *allowed: MachineState) -> None:
        self._check_alive()
        if self.state not in allowed:
            raise Conflict(f"Machine {self.name} is {self.state.value}: it cannot {what} now.")


async def tiny_guest(
    machine: FakeMachine, channel: ChannelName, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """The commands of the tiny guest that the contract uses."""
    while line := await reader.readline():
        await machine.until_running()
        command, _, argument = line.decode().strip().partition(" ")
        output, status = await _command(machine, command, argument)
        writer.write(f"{output}\n[{status}]\n".encode() if output else f"[{status}]\n".encode())
        await writer.drain()


async def _command(machine: FakeMachine, command: str, argument: str) -> tuple[str, int]:
    ends: dict[str, Any] = {"restart": EventKind.RESET, "crash": EventKind.PANIC, "shut": EventKind.POWEROFF}
    if command == "echo":
        return argument, 0
    if command == "remember":
        machine.remember(argument)
    elif command == "recall":
        return machine.recall(), 0
    elif command == "store":
        await machine.store(argument)
    elif command == "load":
        return machine.load(), 0
    elif command in ends:
        machine.guest_event(ends[command])
    else:
        return f"{command}: not found", 127
    return "", 0
