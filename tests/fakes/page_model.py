"""A machine's memory, kept in full beside its page log, so that a test can tell what the log must give back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from perdure.core.ids import SegmentId
from perdure.machines.driver import PAGE_SIZE, GuestMemory, PageNumbers, Pages
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pagelog import LatelyWritten, StillPages, record
from perdure.snapshots.pageread import load, restore
from perdure.snapshots.segments import SegmentWriter
from tests.fakes.base_ram import RAM_PAGES

_count = itertools.count()


@dataclass(eq=False)
class Model:
    """A machine's memory, kept in full: what the log must give back."""

    base: BaseRam
    ram: Pages
    index: PageIndex
    private: set[int] = field(default_factory=set)
    lately: set[int] | None = None  # written since the last capture, where that is known

    def write(self, page: int, kind: str, seed: int) -> None:
        self.private.add(page)
        if self.lately is not None:
            self.lately.add(page)
        if kind == "zero":
            self.ram[page] = 0
        elif kind == "base":
            self.ram[page] = self.base.pages[page]
        elif kind == "gone":  # the machine gave the page back: it is the file's again
            self.ram[page] = self.base.pages[page]
            self.private.discard(page)
            if self.lately is not None:
                self.lately.discard(page)
        elif kind == "word":
            self.ram[page, seed % PAGE_SIZE] ^= 1 + seed % 255
        elif kind == "text":
            self.ram[page] = np.resize(np.frombuffer(b"%d lines of text " % seed, np.uint8), PAGE_SIZE)
        else:
            self.ram[page] = np.random.default_rng(seed).integers(0, 255, PAGE_SIZE, np.uint8)

    def written(self) -> PageNumbers:
        return np.array(sorted(self.private), np.uint32)

    def copied(self, *, lately: bool) -> tuple[PageNumbers, Pages | LatelyWritten]:
        """What a capture has of it now: all, or what was written ``lately`` where that is known."""
        pages, some, self.lately = self.written(), self.lately, set()
        if not lately or some is None:
            return pages, self.ram[pages]
        numbers = np.array(sorted(some), np.uint32)
        return pages, LatelyWritten(numbers, self.ram[numbers])

    def still(self) -> tuple[PageNumbers, StillPages]:
        """What a hibernation has of it."""

        class Standing:
            @staticmethod
            def read_pages(some: PageNumbers, room: Pages) -> Pages:
                return np.take(self.ram, some, axis=0, out=room[: len(some)], mode="clip")

        self.lately = set()
        return self.written(), StillPages(cast("GuestMemory", Standing), self.written())


def writer(directory: Path) -> SegmentWriter:
    return SegmentWriter(directory, SegmentId(f"seg_{next(_count):026d}"))


def restored(directory: Path, index: PageIndex, base: BaseRam) -> Pages:
    index = PageIndex.from_bytes(index.to_bytes(), "ram.index")
    ram = base.pages.copy()
    ram[index.zeros] = 0
    for pages, content in load(directory, index, base):
        ram[pages] = content
    written = base.pages.copy()
    written[index.zeros] = 0

    class Machine:
        @staticmethod
        def write_pages(pages: PageNumbers, content: Pages) -> None:
            written[pages] = content

    restore(directory, index, base, cast("GuestMemory", Machine))
    assert np.array_equal(written, ram)
    return ram


def captured(tmp_path: Path, base: BaseRam) -> tuple[Model, SegmentWriter]:
    machine = Model(base, base.pages.copy(), PageIndex(RAM_PAGES))
    for page in range(130):
        machine.write(page, "random", page)
    log = writer(tmp_path)
    machine.index = record(tmp_path, machine.index, base, (machine.written(), machine.ram[:130]), log).index
    return machine, log
