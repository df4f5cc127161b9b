"""The Machine protocol: all that Perdure needs of a virtual machine monitor, so that another VMM is one file.

Life of a machine::

    driver.boot ───────────────────────────────► RUNNING ◄──► PAUSED ──► DEAD
    driver.prepare ──► PREPARED ──load──► PAUSED ─resume─┘        │
                                          RUNNING ──(disk full)──► NO_SPACE ─resume─► RUNNING

A machine has guest RAM mapped privately over an immutable base file, one writable disk made of layers, one read-only agent disk,
two virtio-serial channels, and no network card. A PREPARED machine belongs to no workspace: it waits in a warm pool with the base
mapped and a placeholder for a disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from perdure.wire.node import Confinement, Isolation, NodeUsage

PAGE_SIZE = 4096

Pages = npt.NDArray[np.uint8]  # shape (n, PAGE_SIZE)
PageNumbers = npt.NDArray[np.uint32]  # guest page frame numbers in RAM-file order, ascending, unique


class Accelerator(StrEnum):
    KVM = "kvm"
    TCG = "tcg"

    @property
    def isolation(self) -> Isolation:
        """The grade that a machine under it has."""
        return Isolation.VM_HARDWARE if self is Accelerator.KVM else Isolation.VM_EMULATED


class ChannelName(StrEnum):
    CONTROL = "perdure.control"  # hello, wake handshake, quiesce, thaw, ping: never behind an upload
    DATA = "perdure.data"  # exec, files, tcp, egress


class MachineState(StrEnum):
    PREPARED = "prepared"
    PAUSED = "paused"
    RUNNING = "running"
    NO_SPACE = "paused_no_space"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class DiskLayer:
    path: Path
    format: Literal["raw", "qcow2"]


@dataclass(frozen=True, slots=True)
class DiskChain:
    """Bottom first; the last layer is written by the machine, all others are immutable and may be shared."""

    layers: tuple[DiskLayer, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything that decides the device tree. Equal shapes (and VMM builds) can exchange device states."""

    kernel: Path
    initrd: Path
    agent_disk: Path  # raw, read-only
    memory_mib: int
    vcpus: int
    disk_bytes: int  # capacity the guest sees
    cmdline_extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ram:
    """The file behind guest RAM. ``shared`` is for making a golden snapshot only: writes then reach the file."""

    path: Path
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the VMM process, set through cgroups where the host lets us."""

    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = 64


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What both ways to start a machine share. ``run_dir`` is created, writable by the VMM and removed when it is dead."""

    name: str  # for process titles and cgroups: file-name safe, ≤ 40 characters
    run_dir: Path
    shape: Shape
    ram: Ram
    accelerator: Accelerator
    limits: Limits = field(default_factory=Limits)
    #: Layers that the disk will probably lie on: ``prepare`` opens them ahead. Another disk can be attached all the same.
    disk_below: DiskChain = field(default_factory=lambda: DiskChain(()))


@dataclass(frozen=True, slots=True)
class VmmIdentity:
    """What of the VMM decides whether an old device state can be loaded."""

    name: str
    version: tuple[int, int, int]
    build: str  # version text and a hash of the binary
    machine: str  # machine type with version, e.g. pc-q35-7.2
    cpu_model: str
    tsc_khz: int | None  # part of the fingerprint under TCG


class EventKind(StrEnum):
    EXITED = "exited"  # the process is gone; ``detail`` has the tail of its stderr
    RESET = "reset"  # the guest asked for a reboot (the VMM ends instead)
    PANIC = "panic"
    POWEROFF = "poweroff"
    NO_SPACE = "no-space"
    IO_ERROR = "io-error"


@dataclass(frozen=True, slots=True)
class MachineEvent:
    kind: EventKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WrittenPages:
    """``pages`` as ``GuestMemory.written_pages`` tells them; ``lately`` are those among them that were written since the last
    ``mark``, and maybe others. None: nobody can tell."""

    pages: PageNumbers
    lately: PageNumbers | None


class GuestMemory(Protocol):
    """The guest's RAM seen from the host. Synchronous and fast; call it in a thread. The machine must not be running."""

    page_count: int

    def written_pages(self) -> PageNumbers:
        """Pages that are private to this machine, i.e. may differ from the base file. While it runs, an estimate."""
        ...

    def touched_pages(self) -> PageNumbers:
        """Pages that this machine has read or written. While it runs, an estimate; the kernel maps some neighbours along."""
        ...

    def scan(self) -> WrittenPages:
        """What is written, and what of it lately, at one look."""
        ...

    def mark(self) -> bool:
        """From now on ``scan`` tells what is written since now. False when the host cannot: then ``lately`` is None until a mark
        succeeds."""
        ...

    def read_pages(self, pages: PageNumbers, room: Pages | None = None) -> Pages:
        """A copy of these pages, in ``room`` (of ``machines.pageroom``) when it is given and large enough."""
        ...

    def write_pages(self, pages: PageNumbers, content: Pages) -> None: ...

    def write_zeros(self, pages: PageNumbers) -> None: ...


class Machine(Protocol):
    """One VM process. Calls that the state does not allow raise Conflict naming the state; a dead process raises MachineDied."""

    name: str
    pid: int
    state: MachineState
    confinement: Confinement

    @property
    def memory(self) -> GuestMemory: ...

    async def attach_disk(self, disk: DiskChain) -> None:
        """PREPARED only: put the real disk where the placeholder is."""
        ...

    async def load_devices(self, state: Path) -> None:
        """PREPARED only, after the disk and every page of memory are in place: load device state; PAUSED afterwards."""
        ...

    async def pause(self) -> None:
        """Stop all vCPUs and flush the block layer."""
        ...

    async def resume(self) -> None: ...

    async def save_devices(self, destination: Path) -> None:
        """PAUSED only: write device state (no RAM) to a new file; the caller makes it durable."""
        ...

    async def open_overlay(self, overlay: DiskLayer) -> None:
        """Open the next layer ahead of a capture, so that ``switch_overlay`` inside the pause costs little."""
        ...

    async def switch_overlay(self) -> None:
        """Freeze the active layer and write to the one opened last."""
        ...

    async def collapse_disk(self, keep: int) -> None:
        """While running: stream all but the lowest ``keep`` layers into the active one. Frozen files are not changed."""
        ...

    async def connect(self, channel: ChannelName) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new host connection to a channel; the previous one of that channel is closed."""
        ...

    def events(self) -> AsyncIterator[MachineEvent]:
        """What happened by itself; ends after EXITED. One consumer."""
        ...

    async def usage(self) -> NodeUsage: ...

    def cpu_s(self) -> float:
        """Processor seconds of the VMM since it began. Raises MachineDied."""
        ...

    async def kill(self) -> None:
        """SIGKILL and reap, and remove run_dir and cgroup. Safe in every state and twice."""
        ...


class MachineDriver(Protocol):
    async def identity(self, accelerator: Accelerator) -> VmmIdentity:
        """Raises HostUnfit when the VMM is missing, with the command that installs it."""
        ...

    async def boot(self, spec: LaunchSpec, disk: DiskChain) -> Machine:
        """Cold boot; returns when vCPUs run, long before the agent's hello."""
        ...

    async def prepare(self, spec: LaunchSpec) -> Machine:
        """A warm machine that waits for ``attach_disk``, memory and ``load_devices``."""
        ...
