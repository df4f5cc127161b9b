"""Recording a machine that stands still, part by part, while it is read."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from perdure.core.errors import MachineDied
from perdure.machines.driver import PAGE_SIZE, GuestMemory, PageNumbers, Pages
from perdure.snapshots import flushes, pagekinds, pagelog, pageread, segments
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pagelog import StillPages, record
from perdure.snapshots.segments import SegmentReader
from tests.fakes.base_ram import RAM_PAGES
from tests.fakes.page_model import restored, writer


class Still:
    """The memory of a machine that stands still, and dies before a read."""

    def __init__(self, ram: Pages, dies_before: int = 10**9) -> None:
        self.ram, self.reads, self.dies_before = ram, 0, dies_before

    def read_pages(self, pages: PageNumbers, room: Pages | None = None) -> Pages:
        self.reads += 1
        if self.reads > self.dies_before:
            raise MachineDied("It has ended.")
        assert room is not None
        room[: len(pages)] = self.ram[pages]
        return room[: len(pages)]


@pytest.mark.parametrize("at_once", [1, 64, 70, RAM_PAGES, 1000])
def test_what_stands_still_is_recorded_as_what_was_copied(
    tmp_path: Path, base: BaseRam, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Over two captures, with pages of every kind and only some of them private."""
    monkeypatch.setattr(pagelog, "_STILL_PAGES", at_once)
    monkeypatch.setattr(flushes, "_BYTES_PER_FLUSH", 20 * PAGE_SIZE)
    rng = np.random.default_rng(5)
    ram = base.pages.copy()
    index, log = PageIndex(RAM_PAGES), writer(tmp_path)
    pages = np.flatnonzero(np.arange(RAM_PAGES) % 5 != 0).astype(np.uint32)
    for seed in range(2):
        changed = rng.choice(pages, 60, replace=False)
        ram[changed[:30]] = rng.integers(0, 255, (30, PAGE_SIZE), np.uint8)
        ram[changed[30:40]] = 0
        ram[changed[40:50]] = base.pages[changed[40:50]]
        ram[changed[50:], 8:16] = seed + 1
        still = StillPages(cast("GuestMemory", Still(ram)), pages)
        recorded = record(tmp_path, index, base, (pages, still), log)
        copied = record(tmp_path, index, base, (pages, ram[pages]), writer(tmp_path))
        assert (recorded.pages_changed, recorded.index.zeros.tolist()) == (copied.pages_changed, copied.index.zeros.tolist())
        assert recorded.index.pages.tolist() == copied.index.pages.tolist()
        index = recorded.index
        assert np.array_equal(restored(tmp_path, index, base), ram)
    none = np.empty(0, np.uint32)
    empty = record(tmp_path, index, base, (none, StillPages(cast("GuestMemory", Still(ram)), none)), log)
    assert (len(empty.index.pages), len(empty.index.zeros), empty.appended_bytes) == (0, 0, 0)


def test_a_machine_that_dies_while_it_is_recorded_leaves_the_log_as_it_was(
    tmp_path: Path, base: BaseRam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagelog, "_STILL_PAGES", 64)
    pages = np.arange(RAM_PAGES, dtype=np.uint32)
    log = writer(tmp_path)
    first = record(tmp_path, PageIndex(RAM_PAGES), base, (pages, base.pages[::-1].copy()), log)
    before = log.size
    dying = StillPages(cast("GuestMemory", Still(base.pages[::-1] ^ np.uint8(1), dies_before=2)), pages)
    with pytest.raises(MachineDied):
        record(tmp_path, first.index, base, (pages, dying), log)
    assert log.size == before == log.path.stat().st_size
    assert np.array_equal(restored(tmp_path, first.index, base), base.pages[::-1])


def recorded_still(directory: Path, last: PageIndex, base: BaseRam, ram: Pages) -> pagelog.Recorded:
    pages = np.arange(RAM_PAGES, dtype=np.uint32)
    log = writer(directory)
    done = record(directory, last, base, (pages, StillPages(cast("GuestMemory", Still(ram)), pages)), log)
    log.close()
    return done


def test_of_what_changed_as_a_whole_no_more_than_heads_are_read(
    tmp_path: Path, base: BaseRam, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(17)
    ram = rng.integers(0, 255, (RAM_PAGES, PAGE_SIZE), np.uint8)
    first = recorded_still(tmp_path, PageIndex(RAM_PAGES), base, ram)
    read: list[int] = []
    stored = SegmentReader.stored

    def counted(self: SegmentReader, offset: int, length: int) -> bytes:
        read.append(length)
        return stored(self, offset, length)

    monkeypatch.setattr(SegmentReader, "stored", counted)
    other = rng.integers(0, 255, (RAM_PAGES, PAGE_SIZE), np.uint8)
    other[130] = ram[130]
    second = recorded_still(tmp_path, first.index, base, other)
    assert (second.pages_changed, len(second.index.pages)) == (RAM_PAGES, RAM_PAGES), "the last page of a frame goes along"
    assert sum(length > 1024 for length in read) == 1, "of one frame a page was left"
    assert np.array_equal(restored(tmp_path, second.index, base), other)


def test_pages_of_equal_checksums_are_compared(tmp_path: Path, base: BaseRam, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest could make two pages collide."""
    ram = base.pages[::-1].copy()
    with monkeypatch.context() as collide:
        collide.setattr(pagelog, "page_hashes", lambda content: np.full(len(content), 42, np.uint64))
        collide.setattr(segments, "page_hashes", lambda content: np.full(len(content), 42, np.uint64))
        collide.setattr(pageread, "page_hashes", lambda content: np.full(len(content), 42, np.uint64))
        first = recorded_still(tmp_path, PageIndex(RAM_PAGES), base, ram)
        other = ram.copy()
        other[::3] ^= 1
        second = recorded_still(tmp_path, first.index, base, other)
        assert second.pages_changed >= len(other[::3])
        assert np.array_equal(restored(tmp_path, second.index, base), other)


@pytest.mark.parametrize("at", ["head", "payload", "end"])
def test_a_damaged_log_mends_itself_when_what_stands_still_is_recorded(tmp_path: Path, base: BaseRam, at: str) -> None:
    ram = np.random.default_rng(17).integers(0, 255, (RAM_PAGES, PAGE_SIZE), np.uint8)
    first = recorded_still(tmp_path, PageIndex(RAM_PAGES), base, ram)
    (path,) = tmp_path.glob("*.pages")
    damaged = bytearray(path.read_bytes())
    if at == "end":
        del damaged[200:]
    else:
        damaged[{"head": 100, "payload": 5000}[at]] ^= 1
    path.write_bytes(damaged)
    second = recorded_still(tmp_path, first.index, base, ram)
    assert second.pages_changed > 0
    assert np.array_equal(restored(tmp_path, second.index, base), ram)


def test_a_page_that_is_sparse_but_looks_dense_comes_back(tmp_path: Path, base: BaseRam) -> None:
    """It is looked at in two places: there every word differs, and nowhere else."""
    ram = base.pages.copy()
    ram[:, :512] ^= 3
    ram[:, 2048:2560] ^= 3
    assert len(pagekinds.classify(base, np.arange(RAM_PAGES, dtype=np.uint32), ram, np.arange(RAM_PAGES)).dense) == RAM_PAGES
    done = recorded_still(tmp_path, PageIndex(RAM_PAGES), base, ram)
    assert np.array_equal(restored(tmp_path, done.index, base), ram)


def test_holes_of_the_base_are_known_while_its_file_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "base.ram"
    content = np.random.default_rng(1).integers(0, 255, 16 * PAGE_SIZE, np.uint8).tobytes()

    def fresh() -> BaseRam:
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            file.write(content)
            file.truncate(64 * PAGE_SIZE)
        return BaseRam(path)

    hole, data = np.arange(20, 40, dtype=np.uint32), np.arange(10, 40, dtype=np.uint32)
    base = fresh()
    assert not base.has_data(hole)
    assert base.has_data(data)
    gone = fresh()
    path.unlink()
    assert gone.has_data(hole), "nobody can tell any more"
    replaced = fresh()
    fresh()
    assert replaced.has_data(hole)
