"""Guest memory over a process that maps a file privately, as QEMU does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.errors import InvalidRequest, MachineDied, MachineFailed
from perdure.machines.driver import PAGE_SIZE
from perdure.machines.memory import ProcessMemory, coalesce

#: Beyond 4 GiB, so that no offset is cut to 32 bits; the file is sparse and few pages are touched.
PAGE_COUNT = (5 << 30) // PAGE_SIZE
TOUCHED = [0, 3, 4, 5, 1000, (4 << 30) // PAGE_SIZE, PAGE_COUNT - 1]

CHILD = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
ram = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
for page in map(int, sys.argv[2].split(",")):
    ram[page * 4096 : page * 4096 + 8] = b"%8d" % page
read = ram[2 * 4096]  # a page that is only read stays the file's
print("ready", flush=True)
sys.stdin.readline()
print(ram[9 * 4096 : 9 * 4096 + 5].decode(), flush=True)
sys.stdin.readline()
"""


@dataclass
class Mapped:
    process: subprocess.Popen[str]
    path: Path
    memory: ProcessMemory


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Mapped]:
    path = tmp_path / "ram"
    with path.open("wb") as file:
        file.truncate(PAGE_COUNT * PAGE_SIZE)
        file.seek(2 * PAGE_SIZE)
        file.write(b"base page")
    command = [sys.executable, "-c", CHILD, str(path), ",".join(map(str, TOUCHED))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        memory = ProcessMemory(process.pid, path.stat().st_ino, PAGE_COUNT, lambda: process.poll() is None)
        yield Mapped(process, path, memory)
        memory.close()
    finally:
        process.kill()
        process.communicate()


def test_written_pages_are_found_and_read(mapped: Mapped) -> None:
    pages = mapped.memory.written_pages()
    assert pages.tolist() == TOUCHED
    content = mapped.memory.read_pages(pages)
    assert [bytes(page[:8]) for page in content] == [b"%8d" % page for page in TOUCHED]
    assert not content[:, 8:].any()


def test_touched_pages_are_those_that_were_read_too(mapped: Mapped) -> None:
    touched = set(mapped.memory.touched_pages().tolist())
    assert {*TOUCHED, 2} <= touched
    assert len(touched) < 200, "some neighbours in the page cache are mapped along, not all the rest"


def test_pages_that_were_not_written_are_the_files(mapped: Mapped) -> None:
    (page,) = mapped.memory.read_pages(np.array([2], dtype=np.uint32))
    assert bytes(page[:9]) == b"base page"
    assert mapped.memory.written_pages().tolist() == TOUCHED


def test_what_is_written_is_seen_by_the_process_and_not_by_the_file(mapped: Mapped) -> None:
    page = np.frombuffer(b"hello".ljust(PAGE_SIZE, b"\0"), dtype=np.uint8).reshape(1, PAGE_SIZE)
    mapped.memory.write_pages(np.array([9], dtype=np.uint32), page)
    mapped.memory.write_zeros(np.array([2, 3], dtype=np.uint32))
    assert mapped.memory.written_pages().tolist() == sorted({*TOUCHED, 2, 9})
    assert not mapped.memory.read_pages(np.array([2, 3], dtype=np.uint32)).any()
    assert mapped.process.stdin is not None
    assert mapped.process.stdout is not None
    mapped.process.stdin.write("\n")
    mapped.process.stdin.flush()
    assert mapped.process.stdout.readline() == "hello\n"
    with mapped.path.open("rb") as file:
        file.seek(2 * PAGE_SIZE)
        assert file.read(9) == b"base page"


def test_more_scattered_pages_than_one_call_takes(mapped: Mapped) -> None:
    pages = np.arange(10_000, 16_000, 2, dtype=np.uint32)
    content = np.random.default_rng(7).integers(0, 256, (len(pages), PAGE_SIZE), dtype=np.uint8)
    mapped.memory.write_pages(pages, content)
    assert np.array_equal(mapped.memory.read_pages(pages), content)


def test_a_dead_process(mapped: Mapped) -> None:
    mapped.process.kill()
    mapped.process.wait()
    page = np.array([3], dtype=np.uint32)
    with pytest.raises(MachineDied):
        mapped.memory.read_pages(page)
    with pytest.raises(MachineDied):
        mapped.memory.write_zeros(page)
    with pytest.raises(MachineDied):
        mapped.memory.written_pages()


def test_a_closed_memory_refuses_and_closing_twice_is_fine(mapped: Mapped) -> None:
    mapped.memory.close()
    mapped.memory.close()
    with pytest.raises(MachineDied):
        mapped.memory.written_pages()


def test_closing_waits_for_a_reader(mapped: Mapped) -> None:
    """A descriptor closed under a thread could be another file's by its next call."""
    with mapped.memory._in_use():
        mapped.memory.close()
        os.fstat(mapped.memory._pagemap)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(mapped.memory._pagemap)


def test_pages_outside(mapped: Mapped) -> None:
    with pytest.raises(InvalidRequest, match="outside"):
        mapped.memory.read_pages(np.array([PAGE_COUNT], dtype=np.uint32))


def test_a_process_that_does_not_map_the_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    with pytest.raises(MachineFailed, match="not mapped"):
        ProcessMemory(os.getpid(), (tmp_path / "other").stat().st_ino, 1, lambda: True)


@given(st.sets(st.integers(0, 300)))
def test_runs_cover_exactly_the_pages(numbers: set[int]) -> None:
    pages = np.array(sorted(numbers), dtype=np.uint32)
    starts, lengths = coalesce(pages)
    covered = [page for start, length in zip(starts, lengths, strict=True) for page in range(int(start), int(start + length))]
    assert covered == pages.tolist()
    assert all(starts[i] + lengths[i] < starts[i + 1] for i in range(len(starts) - 1)), "neighbours make one run"
