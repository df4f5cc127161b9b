"""Sparse files: checksums and copies that skip holes, so that an 8 GiB disk with 400 MB in it costs 400 MB."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perdure.core import files
from perdure.core.files import data_extents
from perdure.machines.driver import PAGE_SIZE

_CHUNK = 1 << 20
_COPY_BYTES = 4 << 20
_ZERO = bytes(PAGE_SIZE)


def sparse_sha256(path: Path, told: Callable[[int], None] | None = None) -> str:
    """SHA-256 over the size and the non-zero 4 KiB pages with their offsets: how zeros are stored makes no difference. ``told``
    hears of the bytes of each part that was read."""
    digest = hashlib.sha256(path.stat().st_size.to_bytes(8, "little"))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        for start, end in data_extents(descriptor, size):
            for offset in range(start - start % PAGE_SIZE, end, _CHUNK):
                chunk = os.pread(descriptor, min(_CHUNK, end - offset), offset)
                if told is not None:
                    told(len(chunk))
                if chunk.strip(b"\0"):
                    digest.update(b"".join(_pages_with_offsets(chunk, offset)))  # at once: each call gives up the interpreter
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _pages_with_offsets(chunk: bytes, offset: int) -> Iterator[bytes]:
    for at in range(0, len(chunk), PAGE_SIZE):
        page = chunk[at : at + PAGE_SIZE]
        if page != _ZERO[: len(page)]:
            yield (offset + at).to_bytes(8, "little")
            yield page


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
