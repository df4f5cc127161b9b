"""The least of a machine that snapshots need: memory over a base, a disk that grows, device state that is a number."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perdure.core.errors import RestoreFailed
from perdure.machines.driver import PAGE_SIZE, DiskChain, DiskLayer, MachineState, PageNumbers, Pages, WrittenPages
from tests.fakes.disk import RecordingDisk
from tests.fakes.layer import CLUSTER, read_cluster, write_cluster


class TinyMemory:
    """Implements ``GuestMemory``. ``tells_writes``: as on a host whose kernel has soft-dirty bits."""

    def __init__(self, base: Pages, *, tells_writes: bool = False) -> None:
        self.page_count = len(base)
        self.ram = base.copy()
        self.private = np.zeros(len(base), bool)
        self.tells_writes = tells_writes
        self.lately = np.zeros(len(base), bool)
        self.is_marked = False

    def wrote(self, pages: Any) -> None:
        self.private[pages] = True
        self.lately[pages] = True

    def give_back(self, pages: Any, base: Pages) -> None:
        """The pages are the file's again."""
        self.ram[pages] = base[pages]
        self.private[pages] = self.lately[pages] = False

    def scan(self) -> WrittenPages:
        lately = np.flatnonzero(self.private & self.lately).astype(np.uint32)
        return WrittenPages(self.written_pages(), lately if self.is_marked else None)

    def mark(self) -> bool:
        self.lately[:] = False
        self.is_marked = self.tells_writes
        return self.is_marked

    def written_pages(self) -> PageNumbers:
        return np.flatnonzero(self.private).astype(np.uint32)

    def read_pages(self, pages: PageNumbers, room: Pages | None = None) -> Pages:
        if room is None or len(room) < len(pages):
            return self.ram[pages]
        return np.take(self.ram, pages, axis=0, out=room[: len(pages)], mode="clip")

    def write_pages(self, pages: PageNumbers, content: Pages) -> None:
        assert content.shape == (len(pages), PAGE_SIZE)
        self.ram[pages] = content
        self.wrote(pages)

    def write_zeros(self, pages: PageNumbers) -> None:
        self.ram[pages] = 0
        self.wrote(pages)


@dataclass
class TinyMachine:
    """Only the parts of ``Machine`` that ``snapshots`` calls. ``disk`` makes writes seen by a recording disk."""

    memory: TinyMemory
    disk: RecordingDisk | None = None
    state: MachineState = MachineState.PREPARED
    layers: list[Path] = field(default_factory=list)
    devices: int = 0
    fail: dict[str, BaseException] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    _opened: Path | None = None
    pid: int = 0

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if name in self.fail:
            raise self.fail.pop(name)

    async def attach_disk(self, disk: DiskChain) -> None:
        await self._call("attach_disk")
        self.layers = [layer.path for layer in disk.layers]

    async def load_devices(self, state: Path) -> None:
        await self._call("load_devices")
        text = state.read_text()
        if not text.startswith("devices "):
            raise RestoreFailed("not a device state")
        self.devices = int(text.split()[1])
        self.state = MachineState.PAUSED

    async def save_devices(self, destination: Path) -> None:
        destination.write_text(f"devices {self.devices} ".ljust(5000))
        await self._call("save_devices")

    async def open_overlay(self, overlay: DiskLayer) -> None:
        await self._call("open_overlay")
        assert overlay.path.exists()
        self._opened = overlay.path

    async def switch_overlay(self) -> None:
        await self._call("switch_overlay")
        assert self._opened is not None
        self.layers.append(self._opened)
        self._opened = None

    async def collapse_disk(self, keep: int) -> None:
        await self._call("collapse_disk")
        self.layers = [*self.layers[:keep], self.layers[-1]]

    # ------------------------------------------------------------------------------------------------- what a guest does

    def write_memory(self, pages: Any, content: Any) -> None:
        self.memory.ram[pages] = content
        self.memory.wrote(pages)

    def write_disk(self, data: bytes, cluster: int = 0) -> None:
        """Put data on the disk from this cluster on: into the active layer, as QEMU would."""
        for number, at in enumerate(range(0, len(data), CLUSTER), cluster):
            write_cluster(self.layers[-1], number, data[at : at + CLUSTER])
        if self.disk is not None:
            self.disk.wrote(self.layers[-1])

    def read_disk(self, cluster: int = 0) -> bytes:
        """What the topmost layer that knows it says; empty when none does. Zeros at its end are left out."""
        found = (read_cluster(path, cluster) for path in reversed(self.layers))
        return next((data for data in found if data), b"").rstrip(b"\0")
