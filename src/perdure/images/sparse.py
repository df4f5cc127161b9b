"""Sparse files: checksums and copies that skip holes, so that an 8 GiB disk with 400 MB in it costs 400 MB."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.core import files
from perdure.core.files import data_extents
from perdure.machines.driver import PAGE_SIZE

_CHUNK = 1 << 18
_COPY_BYTES = 4 << 20

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


def sparse_sha256(path: Path, told: Callable[[int], None] | None = None) -> str:
    """SHA-256 over the size and the non-zero 4 KiB pages with their offsets: how zeros are stored makes no difference. ``told``
    hears of the bytes of each part that was read."""
    digest = hashlib.sha256(path.stat().st_size.to_bytes(8, "little"))
    chunk = np.empty(_CHUNK, np.uint8)  # what is in the processor's cache is read from memory once
    room = np.empty((_CHUNK // PAGE_SIZE, 1 + PAGE_SIZE // 8), "<u8")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        for start, end in data_extents(descriptor, size):
            for offset in range(start - start % PAGE_SIZE, end, _CHUNK):
                count = os.preadv(descriptor, [chunk[: min(_CHUNK, end - offset)].data], offset)
                if told is not None:
                    told(count)
                _update(digest, chunk[:count], offset, room)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, chunk: Bytes, offset: int, room: Words) -> None:
    """Of every page that is not zero its offset, 64 bits, and its content: at once, for each call gives up the interpreter."""
    whole = len(chunk) - len(chunk) % PAGE_SIZE
    pages = chunk[:whole].view(np.uint64).reshape(-1, PAGE_SIZE // 8)
    used = np.flatnonzero(pages.any(axis=1))
    rows = room[: len(used)]
    rows[:, 0] = offset + used * PAGE_SIZE
    rows[:, 1:] = pages if len(used) == len(pages) else pages[used]
    digest.update(rows.data)
    if chunk[whole:].any():  # of a file that does not end with a page
        digest.update((offset + whole).to_bytes(8, "little") + chunk[whole:].tobytes())


def file_facts(path: Path) -> dict[str, Any]:
    """What image.json and golden.json say of a file."""
    return {"bytes": path.stat().st_size, "sha256": sparse_sha256(path)}


def copy_without_zeros(source: Path, destination: Path) -> int:
    """Copy a file so that each of its zero pages is a hole; returns the bytes of the other pages. Raises NoSpace."""
    copied = 0
    with files.no_space_named(destination), source.open("rb") as reader, destination.open("xb") as writer:
        size = os.fstat(reader.fileno()).st_size
        writer.truncate(size)
        for start, end in data_extents(reader.fileno(), size):
            for offset in range(start - start % PAGE_SIZE, end, _COPY_BYTES):
                chunk = os.pread(reader.fileno(), min(_COPY_BYTES, end - offset), offset)
                for first, last in _non_zero_runs(chunk):
                    copied += os.pwrite(writer.fileno(), memoryview(chunk)[first:last], offset + first)
    return copied


def _non_zero_runs(chunk: bytes) -> list[tuple[int, int]]:
    """(first, last) byte of each run of pages that are not all zeros."""
    pages = np.frombuffer(chunk, dtype=np.uint64).reshape(-1, PAGE_SIZE // 8)
    used = np.concatenate(([False], pages.any(axis=1), [False]))
    edges = np.flatnonzero(used[1:] != used[:-1]) * PAGE_SIZE
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
