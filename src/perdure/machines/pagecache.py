"""The host's page cache: which pages of a file are in it, and how to ask for some ahead.

mincore(2) tells what is there, without touching it, of files that this process may write or owns; of others the kernel says that
all is there. posix_fadvise(2) with WILLNEED begins to read and does not wait.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perdure.machines.driver import PAGE_SIZE, PageNumbers

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
#: One request of more than this would be cut by some kernels.
_ASKED_BYTES = 2 << 20


def resident(path: Path) -> npt.NDArray[np.bool_]:
    """For each page of a file whether it is in the page cache. Raises OSError."""
    with _mapped(path) as (address, size):
        return _ask(address, -(-size // PAGE_SIZE))


def resident_share(path: Path, pages: PageNumbers) -> float:
    """How much of these pages of a file is in the page cache; 1 of none. Raises OSError."""
    with _mapped(path) as (address, size):
        inside = [page for page in pages.tolist() if page * PAGE_SIZE < size]
        there = [bool(_ask(address + page * PAGE_SIZE, 1)[0]) for page in inside]
    return sum(there) / len(there) if there else 1.0


def ask_for(path: Path, ranges: Iterable[tuple[int, int]]) -> int:
    """Begin to read these ranges (offset, length, in bytes); returns how many bytes were asked for. Raises OSError."""
    asked = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for offset, length in ranges:
            for at in range(offset, offset + length, _ASKED_BYTES):
                os.posix_fadvise(descriptor, at, min(_ASKED_BYTES, offset + length - at), os.POSIX_FADV_WILLNEED)
            asked += length
    finally:
        os.close(descriptor)
    return asked


@contextmanager
def _mapped(path: Path) -> Iterator[tuple[int, int]]:
    """Address and size of a mapping that is not touched; 0 and 0 of an empty file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0) if size else 0
    finally:
        os.close(descriptor)
    if address == _FAILED:
        raise _failure(path)
    try:
        yield address, size
    finally:
        if size:
            _libc.munmap(address, size)


def _ask(address: int, count: int) -> npt.NDArray[np.bool_]:
    there = np.zeros(count, np.uint8)
    if count and _libc.mincore(address, count * PAGE_SIZE, there.ctypes.data) != 0:
        raise _failure(None)
    return (there & 1).astype(bool)


def _failure(path: Path | None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), None if path is None else str(path))
