"""A machine whose guest keeps a checksummed counter in memory, on disk and in its devices, and never stands still by itself.

The guest takes a step whenever somebody touches the machine while it runs, so that a capture that does not stop it catches it
half way, every time. What its memory must be follows from the counter alone (``expected``): pages that become zero over a base
that is not, pages that become the base's again, pages that differ in a few words, pages that differ in all, pages that change
seldom, and a block that is never touched. Device state names the memory that it belongs to, as a virtqueue's does, and is refused
over any other.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xxhash

from perdure.core.errors import Busy, Conflict, MachineDied, NoSpace, RestoreFailed
from perdure.machines.driver import (
    PAGE_SIZE,
    DiskChain,
    DiskLayer,
    EventKind,
    MachineEvent,
    MachineState,
    PageNumbers,
    Pages,
    WrittenPages,
)
from perdure.machines.guestlink import LinkActivity
from perdure.machines.guestlink_stream import Moved
from perdure.wire.node import Confinement, FileWritten, Isolation
from tests.fakes.disk import RecordingDisk
from tests.fakes.layer import read_cluster, write_cluster
from tests.torture.agent import TortureAgent

PAGES = 160
COUNTER = 3  # the page that begins with the counter
BLOCK = slice(20, 44)  # rewritten by every step
SELDOM = slice(44, 60)  # pages that change with every 1st, 2nd, 4th, ... 128th step, and such with every 1st, ... 128th value
NEVER_TOUCHED = slice(60, PAGES)
STEPS_PER_VALUE = 1000  # a caller's value is the counter divided by this
CONFINEMENT = Confinement(Isolation.VM_EMULATED, False, False, False, False, False, False, True, {"jail": "it has no guest code"})

_RECORD = struct.Struct("<8sQQ")  # on disk: magic, counter, check
_MAGIC = b"torture1"
_AWAKE = (MachineState.RUNNING, MachineState.PAUSED, MachineState.NO_SPACE)


def base_ram() -> Pages:
    """The image's golden memory: every third page is zero."""
    content = np.random.default_rng(1).integers(0, 255, (PAGES, PAGE_SIZE), np.uint8)
    content[::3] = 0
    content[COUNTER] = _counter_page(0)
    return content


def expected(base: Pages, counter: int) -> Pages:
    """The whole memory of a guest at this counter. At 0 it is the base."""
    ram = base.copy()
    if counter:
        ram[COUNTER] = _counter_page(counter)
        ram[BLOCK] = _content(base[BLOCK], counter)
        ram[SELDOM] = _seldom(base[SELDOM], counter)
    return ram


def _content(base: Pages, counter: int) -> Pages:
    content = np.random.default_rng(counter).integers(0, 255, base.shape, np.uint8)
    kinds = (np.arange(len(content)) + counter) % 4
    content[kinds == 0] = 0
    content[kinds == 1] = base[kinds == 1]
    few = kinds == 2
    content[few] = base[few]
    content[few, :8] = np.frombuffer(struct.pack("<Q", counter), np.uint8)
    return content


def _seldom(base: Pages, counter: int) -> Pages:
    rows = []
    for row in range(len(base)):
        steps = 2 ** (row % 8) * (STEPS_PER_VALUE if row >= 8 else 1)
        since = counter // steps  # its own kind of page at each change: steps alone would always leave the same
        rows.append(_content(base[row : row + 1], since * steps + (since + row) % 4))
    return np.concatenate(rows)


def _counter_page(counter: int) -> Pages:
    head = struct.pack("<QQ", counter, xxhash.xxh3_64_intdigest(struct.pack("<Q", counter)))
    return np.frombuffer(head.ljust(PAGE_SIZE, b"\0"), np.uint8)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a guest proves when it is asked. ``wrong`` is empty when all that it keeps is of one instant."""

    memory: int
    disk: int
    devices: int
    wrong: str = ""

    @property
    def value(self) -> int:
        return self.memory // STEPS_PER_VALUE

    def to_bytes(self) -> bytes:
        return json.dumps({"memory": self.memory, "disk": self.disk, "devices": self.devices, "wrong": self.wrong}).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Proof:
        return Proof(**json.loads(data))


class TortureMemory:
    """Implements ``GuestMemory``. The guest takes a step under whoever reads it while it runs. ``tells_writes``: as on a host
    whose kernel has soft-dirty bits."""

    def __init__(self, machine: TortureMachine, base: Pages, *, tells_writes: bool) -> None:
        self.page_count = len(base)
        self.base = base
        self.ram = base.copy()
        self.private = np.zeros(len(base), bool)
        self._machine = machine
        self._lately = np.zeros(len(base), bool)
        self._tells_writes = tells_writes
        self._is_marked = False

    def put(self, pages: Any, content: Any) -> None:
        """What whoever writes does: the guest, and the host."""
        self.ram[pages] = content
        self.private[pages] = self._lately[pages] = True

    def scan(self) -> WrittenPages:
        pages = self.written_pages()
        return WrittenPages(pages, pages[self._lately[pages]] if self._is_marked else None)

    def mark(self) -> bool:
        self._machine.check_alive()
        self._lately[:] = False
        self._is_marked = self._tells_writes
        self._machine.step()
        return self._is_marked

    def written_pages(self) -> PageNumbers:
        self._machine.check_alive()
        self._machine.step()
        return np.flatnonzero(self.private).astype(np.uint32)

    def touched_pages(self) -> PageNumbers:
        return self.written_pages()

    def read_pages(self, pages: PageNumbers, room: Pages | None = None) -> Pages:
        self._machine.check_alive()
        half = len(pages) // 2
        content = self.ram[pages]
        if self._machine.state is MachineState.RUNNING:  # torn, as a copy under a running guest is
            self._machine.step()
            content[half:] = self.ram[pages[half:]]
        if room is None or len(room) < len(pages):
            return content
        room[: len(pages)] = content
        return room[: len(pages)]

    def write_pages(self, pages: PageNumbers, content: Pages) -> None:
        assert content.shape == (len(pages), PAGE_SIZE)
        self._machine.check_alive()
        self.put(pages, content)

    def write_zeros(self, pages: PageNumbers) -> None:
        self.write_pages(pages, np.zeros((len(pages), PAGE_SIZE), np.uint8))


class TortureMachine:
    """Implements ``Machine``. With ``token`` it is a real process that can be killed; without, only an object."""

    confinement = CONFINEMENT
    by_pid: ClassVar[dict[int, TortureMachine]] = {}  # those of this process that are alive

    def __init__(self, name: str, base: Pages, disk: object, token: str | None, *, tells_writes: bool = False) -> None:
        self.name = name
        self.state = MachineState.PREPARED
        self.layers: list[Path] = []
        self.devices = 0
        self.memory = TortureMemory(self, base, tells_writes=tells_writes)
        self.pid = 0
        self.running = asyncio.Event()  # not while the host's disk is full
        self.running.set()
        self._disk = disk if isinstance(disk, RecordingDisk) else None
        self._opened: Path | None = None
        self._found = ""  # wrong, when it went on after a restore or a pause
        self._unlinked: dict[Path, int] = {}  # layers that went while they were open: they live on in this process only
        self._events: asyncio.Queue[MachineEvent | None] = asyncio.Queue()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.agent: TortureAgent | None = None
        if token is not None:
            self._start(token)

    def _start(self, token: str) -> None:
        """A process that ends with this one, whatever becomes of it: its input ends."""
        self._process = subprocess.Popen([token], executable="/bin/cat", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._died, "killed by signal 9")
        self.agent = TortureAgent(token)
        self.by_pid[self.pid] = self

    # -------------------------------------------------------------------------------------------------------------- guest

    def step(self) -> None:
        """The guest goes on, if it runs; on a full disk it stops before its next write."""
        if self.state is MachineState.RUNNING:
            with suppress(NoSpace):
                self.put(self.counter + 1)

    @property
    def counter(self) -> int:
        return int(struct.unpack_from("<Q", self.memory.ram[COUNTER].tobytes())[0])

    def put(self, counter: int) -> None:
        """Raises NoSpace when its host's disk is full: it has stopped then, and nothing of this has happened."""
        try:
            self._write_disk(counter)
        except NoSpace as error:
            self.state = MachineState.NO_SPACE
            self.running.clear()
            self._events.put_nowait(MachineEvent(EventKind.NO_SPACE, error.message))
            raise
        memory = self.memory
        memory.put(COUNTER, _counter_page(counter))
        memory.put(BLOCK, _content(memory.base[BLOCK], counter))
        seldom = _seldom(memory.base[SELDOM], counter)
        changed = np.flatnonzero((memory.ram[SELDOM] != seldom).any(axis=1))
        memory.put(SELDOM.start + changed, seldom[changed])
        self.devices = counter

    def _write_disk(self, counter: int) -> None:
        """Into the active layer, as QEMU would."""
        record = _RECORD.pack(_MAGIC, counter, xxhash.xxh3_64_intdigest(struct.pack("<Q", counter)))
        if not self.layers[-1].exists():
            self._unlinked[self.layers[-1]] = counter
            return
        try:
            write_cluster(self.layers[-1], 0, record)
        except OSError as error:
            raise NoSpace("There is no room left for the guest's disk.", internal=str(error)) from error
        if self._disk is not None:
            self._disk.wrote(self.layers[-1])

    def read_disk(self) -> int:
        """The counter of the newest layer that has one; 0 on the image's own disk."""
        for path in reversed(self.layers):
            if path in self._unlinked:
                return self._unlinked[path]
            data = read_cluster(path, 0) if path.exists() else b""
            if len(data) >= _RECORD.size and data.startswith(_MAGIC):
                _, counter, check = _RECORD.unpack_from(data)
                return int(counter) if check == xxhash.xxh3_64_intdigest(struct.pack("<Q", counter)) else -1
        return 0

    def prove(self) -> Proof:
        """What the guest finds when it looks at itself, or has found since it was started."""
        return Proof(self.counter, self.read_disk(), self.devices, self._found or self._look())

    def _look(self) -> str:
        ram, counter, disk = self.memory.ram, self.counter, self.read_disk()
        wrong = []
        if not np.array_equal(ram, truth := expected(self.memory.base, counter)):
            pages = np.flatnonzero((ram != truth).any(axis=1)).tolist()
            wrong.append(f"memory is not that of counter {counter}: pages {pages[:8]}")
        if disk != counter:
            wrong.append(f"memory is of counter {counter}, the disk of {disk}")
        if self.devices != counter:
            wrong.append(f"memory is of counter {counter}, the devices of {self.devices}")
        return "; ".join(wrong)

    # -------------------------------------------------------------------------------------------------------------- driver

    def boot(self, disk: DiskChain) -> None:
        """Cold: memory begins anew, and the guest reads where it was from its disk."""
        self.layers = [layer.path for layer in disk.layers]
        self.state = MachineState.RUNNING
        self.put(max(0, self.read_disk()) + 1)

    async def attach_disk(self, disk: DiskChain) -> None:
        await self._call()
        for layer in disk.layers:
            if not layer.path.exists():
                raise RestoreFailed(f"The disk layer {layer.path.name} does not exist.")
        self.layers = [layer.path for layer in disk.layers]

    async def load_devices(self, state: Path) -> None:
        await self._call()
        word, counter, queue = state.read_text().split()[:3]
        if word != "devices" or queue != self._queue():
            raise RestoreFailed("The device state could not be loaded: its queues are not in memory.")
        self.devices = int(counter)
        self.state = MachineState.PAUSED

    async def save_devices(self, destination: Path) -> None:
        await self._call()
        self.step()
        try:
            destination.write_text(f"devices {self.devices} {self._queue()} ".ljust(2000))
        except OSError as error:
            destination.unlink(missing_ok=True)
            raise NoSpace(f"Device state cannot be written to {destination.name}.", internal=str(error)) from error
        if self._disk is not None:
            self._disk.wrote(destination)

    def _queue(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.memory.ram[COUNTER].tobytes())

    async def pause(self) -> None:
        await self._call(*_AWAKE)
        self.state = MachineState.PAUSED

    async def resume(self) -> None:
        await self._call(*_AWAKE)
        if not self._found:
            self._found = self._look()  # before a step writes over what is wrong
        self.state = MachineState.RUNNING
        self.running.set()
        self.step()

    async def open_overlay(self, overlay: DiskLayer) -> None:
        await self._call(*_AWAKE)
        assert overlay.path.exists()
        self._opened = overlay.path
        self.step()

    async def switch_overlay(self) -> None:
        await self._call(*_AWAKE)
        assert self._opened is not None
        self.step()
        self.layers.append(self._opened)
        self._opened = None

    async def collapse_disk(self, keep: int) -> None:
        await self._call(MachineState.RUNNING)
        dropped, before = self.layers[keep:-1], self.layers[-1]
        self.step()
        await asyncio.sleep(0)
        if self.layers[-1] != before or self.state is not MachineState.RUNNING:
            raise Busy("Collapsing the disk's layers was interrupted by a capture.")
        self._write_disk(self.counter)  # the newest record is all that a guest reads
        self.layers = [path for path in self.layers if path not in dropped]

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._died("killed")

    async def events(self) -> AsyncIterator[MachineEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    async def usage(self) -> Any:
        raise NotImplementedError("nobody asks a torture machine what it costs")

    def cpu_s(self) -> float:
        self.check_alive()
        return 0.0

    def kill_agent(self) -> None:
        assert self.agent is not None
        self.agent.kill()

    def check_alive(self) -> None:
        if self.state is MachineState.DEAD:
            raise MachineDied(f"Machine {self.name} is dead.")

    async def _call(self, *allowed: MachineState) -> None:
        await asyncio.sleep(0)
        self.check_alive()
        if allowed and self.state not in allowed:
            raise Conflict(f"Machine {self.name} is {self.state.value}.")

    def _died(self, detail: str) -> None:
        if self.state is MachineState.DEAD:
            return
        self.state = MachineState.DEAD
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
        if self.agent is not None:
            self.agent.end()
            del self.by_pid[self.pid]
        self._events.put_nowait(MachineEvent(EventKind.EXITED, detail))
        self._events.put_nowait(None)


class TortureLink:
    """The host's connection to the guest of one generation, with what the node asks of a ``GuestLink``."""

    def __init__(self, machine: TortureMachine, generation: int) -> None:
        self.machine = machine
        self.generation = generation
        self._heard = 0  # what this connection was told last: it never goes back
        self._operations = 0
        self.moved = Moved()
        if machine.agent is not None:
            machine.agent.reconnect()  # a handshake asks until somebody answers

    async def write_file(self, path: str, content: AsyncIterator[bytes], *, mode: int | None = None) -> FileWritten:
        value = b"".join([chunk async for chunk in content])
        self._ask()
        self.moved.inward += len(value)
        self.machine.put(int(value) * STEPS_PER_VALUE)
        return FileWritten(path, len(value), 0, "")

    async def read_file(self, _path: str, _offset: int = 0, _length: int | None = None) -> AsyncIterator[bytes]:
        self._ask()
        proof = self.machine.prove()
        if proof.memory < self._heard:
            proof = Proof(proof.memory, proof.disk, proof.devices, f"{proof.wrong}; the connection had heard {self._heard}")
        self._heard = proof.memory
        answer = proof.to_bytes()
        self.moved.outward += len(answer)
        yield answer

    def _ask(self) -> None:
        self._reach()
        self._operations += 1
        self.machine.step()

    def _reach(self) -> None:
        """A call, of which the agent is the other end. It answers nothing while the machine stands still."""
        self.machine.check_alive()
        if self.machine.agent is not None:
            self.machine.agent.ask()

    async def stand_still(self) -> bool:
        self._reach()
        self.machine.step()
        return True

    def release(self) -> None:
        return None

    async def thaw(self) -> float:
        self._reach()
        self.machine.step()
        return 0.0

    async def sync(self, **_: object) -> int:
        self._reach()
        return 0

    async def cpu_s(self) -> float:
        self._reach()
        return float(self._operations)

    async def ping(self) -> float:
        return await self.cpu_s()

    def activity(self) -> LinkActivity:
        return LinkActivity(0, 0, 0, 0, 0.0, self._operations)

    async def retire(self) -> None:
        return None

    close = retire
