"""Checksums of sparse files: holes are skipped, so that an 8 GiB disk with 400 MB in it costs 400 MB."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20


def data_extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, end) of the parts of an open file that are not holes."""
    offset = 0
    while offset < size:
        try:
            start = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        offset = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, min(offset, size)


def sparse_sha256(path: Path) -> str:
    """SHA-256 over the size and the non-zero 4 KiB pages with their offsets: how zeros are stored makes no difference."""
    digest = hashlib.sha256(path.stat().st_size.to_bytes(8, "little"))
    zero = bytes(4096)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        for start, end in data_extents(descriptor, size):
            for offset in range(start - start % 4096, end, _CHUNK):
                chunk = os.pread(descriptor, min(_CHUNK, end - offset), offset)
                if chunk.strip(b"\0"):
                    for at in range(0, len(chunk), 4096):
                        page = chunk[at : at + 4096]
                        if page != zero[: len(page)]:
                            digest.update((offset + at).to_bytes(8, "little"))
                            digest.update(page)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def file_facts(path: Path) -> dict[str, Any]:
    """What image.json and golden.json say of a file."""
    return {"bytes": path.stat().st_size, "sha256": sparse_sha256(path)}
