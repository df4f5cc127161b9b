"""What is in the page cache is told without touching it, and can be asked for."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from perdure.machines.driver import PAGE_SIZE
from perdure.machines.pagecache import ask_for, resident, resident_share

PAGES = 1024


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file that is on the disk and not in the page cache. Skips where the file system has no disk."""
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(1).integers(0, 255, PAGES * PAGE_SIZE, np.uint8).tobytes())
    forget(path)
    if resident(path).any():
        pytest.skip("the file system of the temporary directory keeps its files in memory")
    return path


def forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def test_looking_does_not_read(cold: Path) -> None:
    for _ in range(2):
        assert not resident(cold).any()
        assert resident_share(cold, np.arange(0, PAGES, 16, dtype=np.uint32)) == 0


def test_what_was_read_is_there(cold: Path) -> None:
    cold.read_bytes()
    assert resident(cold).all()
    assert resident_share(cold, np.array([0, 7, PAGES - 1], np.uint32)) == 1
    forget(cold)
    with cold.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 10, 500 * PAGE_SIZE)
    there = resident(cold)
    assert there[500] and not there[0]
    share = resident_share(cold, np.array([0, 1, 2, 500], np.uint32))
    assert share == 0.25


def test_what_is_asked_for_comes_by_itself_and_the_rest_does_not(cold: Path) -> None:
    ranges = [(0, 10 * PAGE_SIZE), (300 * PAGE_SIZE, 600 * PAGE_SIZE)]
    assert ask_for(cold, ranges) == 610 * PAGE_SIZE
    with cold.open("rb", buffering=0) as file:  # a read waits for what is under way
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for offset, length in ranges:
            os.pread(file.fileno(), length, offset)
    there = resident(cold)
    assert there[:10].all() and there[300:900].all()
    assert not there[20:290].any() and not there[910:].any()


def test_files_of_any_size(tmp_path: Path) -> None:
    empty, odd = tmp_path / "empty", tmp_path / "odd"
    empty.write_bytes(b"")
    odd.write_bytes(b"x" * (PAGE_SIZE + 1))
    assert resident(empty).tolist() == []
    assert resident(odd).tolist() == [True, True]
    assert resident_share(odd, np.array([0, 1, 2, 1000], np.uint32)) == 1, "what lies behind the end is not asked for"
    assert resident_share(empty, np.empty(0, np.uint32)) == 1
    assert ask_for(empty, [(0, 100)]) == 100
    for call in (resident, lambda path: resident_share(path, np.zeros(1, np.uint32)), lambda path: ask_for(path, [])):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none")
