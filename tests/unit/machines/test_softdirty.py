"""What is written since a moment: told by the kernel where it has soft-dirty bits, and by nobody elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from perdure.machines import memory as machine_memory
from perdure.machines import softdirty
from perdure.machines.driver import PAGE_SIZE
from perdure.machines.memory import ProcessMemory

PAGE_COUNT = 3000
CHILD = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
ram = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
for line in sys.stdin:
    how, *pages = line.split()
    for page in map(int, pages):
        if how == "write":
            ram[page * 4096 : page * 4096 + 8] = os.urandom(8)
        elif how == "give":
            ram.madvise(mmap.MADV_DONTNEED, page * 4096, 4096)
        else:
            ram[page * 4096]
    print("done", flush=True)
"""


@dataclass
class Mapped:
    process: subprocess.Popen[str]
    memory: ProcessMemory

    def do(self, how: str, *pages: int) -> None:
        """The process writes, reads or gives back these pages."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(how, *pages, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def lately(self) -> list[int] | None:
        found = self.memory.scan().lately
        return None if found is None else found.tolist()


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Mapped]:
    path = tmp_path / "ram"
    path.write_bytes(bytes(PAGE_COUNT * PAGE_SIZE))
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        print("write 0", file=process.stdin, flush=True)
        assert process.stdout.readline() == "done\n"
        memory = ProcessMemory(process.pid, path.stat().st_ino, PAGE_COUNT, lambda: process.poll() is None)
        yield Mapped(process, memory)
        memory.close()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def tried() -> Iterator[None]:
    """The trial is made anew in this test, and after it."""
    softdirty.works.cache_clear()
    yield
    softdirty.works.cache_clear()


@pytest.mark.skipif(not softdirty.works(), reason="this kernel has no soft-dirty bits (CONFIG_MEM_SOFT_DIRTY)")
def test_a_process_tells_what_it_writes_and_what_is_written_into_it(mapped: Mapped) -> None:
    mapped.do("write", 1, 2, 3, 1000, PAGE_COUNT - 1)
    assert mapped.lately() is None
    assert mapped.memory.mark()
    assert mapped.lately() == []
    mapped.do("write", 2, 1000, 1001)
    mapped.do("read", 3, 4)
    assert mapped.lately() == [2, 1000, 1001]
    mapped.memory.read_pages(np.array([1, 3], np.uint32))
    mapped.memory.write_zeros(np.array([3, 7], np.uint32))
    assert mapped.lately() == [2, 3, 7, 1000, 1001]
    mapped.do("give", 2, PAGE_COUNT - 1)
    assert mapped.lately() == [3, 7, 1000, 1001]
    assert mapped.memory.scan().pages.tolist() == mapped.memory.written_pages().tolist() == [0, 1, 3, 7, 1000, 1001]
    assert mapped.memory.mark()
    mapped.do("write", 2)
    assert mapped.lately() == [2], "the first write after it was given back"


@pytest.mark.parametrize(
    ("seen", "is_believed"),
    [
        ([[True] * 3, [False] * 3, [False, True, False]], True),
        ([[False] * 3], False),  # no such bits
        ([[True] * 3, [True] * 3], False),  # nothing clears them
        ([[True] * 3, [False] * 3, [False] * 3], False),  # and nothing sets them again
        ([[True] * 3, [False] * 3, [True] * 3], False),  # or all at once
        ([[True, False, True]], False),
        ([[]], False),
    ],
)
def test_only_a_kernel_that_tells_every_write_is_believed(
    seen: list[list[bool]], is_believed: bool, monkeypatch: pytest.MonkeyPatch, tried: None
) -> None:
    answers = iter(seen)
    monkeypatch.setattr(softdirty, "_bits", lambda _area: next(answers))
    assert softdirty.works() is is_believed
    assert softdirty.works() is is_believed, "it is tried once"


def test_a_trial_that_fails_is_a_no(monkeypatch: pytest.MonkeyPatch, tried: None) -> None:
    def refused(_area: object) -> list[bool]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(softdirty, "_bits", refused)
    assert softdirty.works() is False


def test_where_it_does_not_work_nobody_tells(mapped: Mapped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softdirty, "works", lambda: False)
    inode = (tmp_path / "ram").stat().st_ino
    memory = ProcessMemory(mapped.process.pid, inode, PAGE_COUNT, lambda: True)
    assert memory.mark() is False
    assert memory.scan().lately is None
    assert memory.scan().pages.tolist() == [0]
    memory.close()


def test_a_mark_that_is_refused_leaves_nothing_told(mapped: Mapped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another bit in the place of the kernel's: what is tested is what becomes of it."""
    monkeypatch.setattr(softdirty, "works", lambda: True)
    monkeypatch.setattr(machine_memory, "_SOFT_DIRTY", machine_memory._PRESENT)
    inode = (tmp_path / "ram").stat().st_ino
    memory = ProcessMemory(mapped.process.pid, inode, PAGE_COUNT, lambda: True)
    assert memory.mark() is True
    mapped.do("write", 5)
    assert memory.scan().lately is not None
    assert memory.scan().lately.tolist() == [0, 5]  # type: ignore[union-attr]
    assert memory._clear_refs is not None
    readable = os.open("/dev/null", os.O_RDONLY)
    os.dup2(readable, memory._clear_refs)
    os.close(readable)
    assert memory.mark() is False
    assert memory.scan().lately is None
    kept = memory._clear_refs
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)


def test_a_process_of_somebody_else_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softdirty, "works", lambda: True)
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert machine_memory._open_clear_refs(1) is None
