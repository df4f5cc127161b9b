"""Cutting content into chunks and putting it together again.

**Blocks** are for files: base images, disk layers, device states. Block number N holds the bytes from N * 64 KiB; one that is all
zero, or lies in a hole of the file, is left out. What a file does not have allocated is never read.

**Regions** are for memory that differs from a base: region N holds the changed pages among the 16 of the 64 KiB from N * 64 KiB,
behind two bitmaps, u16 each: pages whose content follows, and pages that are zero where the base is not. A chunk of fixed 64 KiB
would carry the unchanged neighbours of every changed page along.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from perdure.core.errors import CorruptSnapshot
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages

BLOCK = 64 << 10
REGION_PAGES = BLOCK // PAGE_SIZE
_HEAD = struct.Struct("<HH")
_ZEROS = bytes(BLOCK)

Chunk = tuple[int, bytes]


class Kind(StrEnum):
    BLOCKS = "blocks"
    REGIONS = "regions"


@dataclass(frozen=True, slots=True)
class Source:
    """One file of an item. ``chunks`` gives its chunks by ascending number, once; it may read from a disk, so it runs in a
    thread.

    ``size`` is in bytes: of the file, or of the memory.
    """

    name: str
    kind: Kind
    size: int
    chunks: Iterable[Chunk]


def file_source(name: str, path: Path) -> Source:
    """A file that nobody writes. Raises CorruptSnapshot when it is missing."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise CorruptSnapshot(f"The stored file {path.name} is missing.", internal=str(path)) from error
    return Source(name, Kind.BLOCKS, size, blocks(path))


def bytes_source(name: str, data: bytes) -> Source:
    """Bytes at hand, as a file."""
    cut = ((at // BLOCK, data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    return Source(name, Kind.BLOCKS, len(data), ((number, block) for number, block in cut if any(block)))


def blocks(path: Path) -> Iterator[Chunk]:
    """The blocks of a file in which something is allocated that is not zero."""
    with path.open("rb", buffering=0) as file:
        descriptor, at, size = file.fileno(), 0, os.fstat(file.fileno()).st_size
        while at < size:
            at = _next_data(descriptor, at)
            if at < 0:
                return
            number = at // BLOCK
            block = _read(descriptor, number * BLOCK, min(BLOCK, size - number * BLOCK), path)
            if block != _ZEROS[: len(block)]:
                yield number, block
            at = (number + 1) * BLOCK


def _next_data(descriptor: int, at: int) -> int:
    """Where the next allocated byte is, -1 behind the last."""
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return -1
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return at  # a file system that cannot tell: read everything
        raise


def _read(descriptor: int, at: int, length: int, path: Path) -> bytes:
    parts = []
    while length:
        part = os.pread(descriptor, length, at)
        if not part:
            raise CorruptSnapshot(f"The stored file {path.name} was cut short while it was read.", internal=str(path))
        parts.append(part)
        at, length = at + len(part), length - len(part)
    return b"".join(parts)


def region(number: int, pages: PageNumbers, content: Pages, zeros: PageNumbers) -> Chunk:
    """One region of its changed pages, ascending, and its zero pages."""
    first = number * REGION_PAGES
    return number, _HEAD.pack(_bits(pages, first), _bits(zeros, first)) + np.ascontiguousarray(content).tobytes()


def regions(batches: Iterable[tuple[PageNumbers, Pages]], zeros: PageNumbers) -> Iterator[Chunk]:
    """Regions of pages that come in batches. Pages ascend, and no region's pages are in two batches; ``zeros`` ascend too."""
    rest = zeros
    for pages, content in batches:
        if not len(pages):
            continue
        upto = (int(pages[-1]) // REGION_PAGES + 1) * REGION_PAGES
        cut = int(np.searchsorted(rest, upto))
        yield from _of_batch(pages, content, rest[:cut])
        rest = rest[cut:]
    yield from _of_batch(rest[:0], np.empty((0, PAGE_SIZE), np.uint8), rest)


def _of_batch(pages: PageNumbers, content: Pages, zeros: PageNumbers) -> Iterator[Chunk]:
    for number in np.union1d(pages // REGION_PAGES, zeros // REGION_PAGES).tolist():
        bounds = (number * REGION_PAGES, (number + 1) * REGION_PAGES)
        low, high = np.searchsorted(pages, bounds)
        zero_low, zero_high = np.searchsorted(zeros, bounds)
        yield region(number, pages[low:high], content[low:high], zeros[zero_low:zero_high])


@dataclass(frozen=True, slots=True)
class Region:
    """A region read back."""

    pages: PageNumbers
    content: Pages
    zeros: PageNumbers


def read_region(number: int, data: bytes, name: str) -> Region:
    """Raises CorruptSnapshot naming ``name`` when this is no region."""
    if len(data) < _HEAD.size:
        raise CorruptSnapshot(f"The memory {name} is damaged: region {number} is too short.")
    located, zero = _HEAD.unpack_from(data)
    pages, zeros = _numbers(located, number), _numbers(zero, number)
    if located & zero or len(data) != _HEAD.size + PAGE_SIZE * len(pages) or not located | zero:
        raise CorruptSnapshot(f"The memory {name} is damaged: region {number} does not hold the pages that it says.")
    content = np.frombuffer(data, np.uint8, offset=_HEAD.size).reshape(len(pages), PAGE_SIZE)
    return Region(pages, content, zeros)


def _bits(pages: PageNumbers, first: int) -> int:
    return sum(1 << (page - first) for page in pages.tolist())


def _numbers(bits: int, number: int) -> PageNumbers:
    first = number * REGION_PAGES
    return np.array([first + bit for bit in range(REGION_PAGES) if bits >> bit & 1], np.uint32)
