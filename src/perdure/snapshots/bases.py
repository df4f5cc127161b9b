"""Private bases: RAM files of the store's own, which a workspace's memory lies on instead of its image's golden.

A base is written once, under a name that nothing else ever has, is not changed after that, and is only read by whoever maps it.
Its zero pages are holes. Its checksum is over the windows of 1 MiB that are not all zero, each behind its offset, so that neither
writing nor checking it reads its holes, and so that a copy with other holes is the same base.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from perdure.core.files import Disk, Handle, data_extents, no_space_named, stored_bytes
from perdure.core.ids import BaseId
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.baseram import BaseRam, pages_with_data
from perdure.snapshots.manifest import BaseFact, base_file

WINDOW_BYTES = 1 << 20
#: Some windows, made and handed to the disk at once: a gigabyte that waits for one fsync would stand in everybody else's way.
PART_PAGES = (32 << 20) // PAGE_SIZE

#: Content of these pages (ascending), to be put over what was there before.
Overlay = Callable[[PageNumbers, Pages], None]


class Abandoned(Exception):
    """Nobody wants the base any more that was being written."""


def write_base(directory: Path, base_id: BaseId, below: BaseRam, over: Overlay, enough: threading.Event, disk: Disk) -> BaseFact:
    """Write a new base: what is ``below``, with what ``over`` changes of it, part by part. Durable when this returns.

    Raises NoSpace, what ``over`` raises, or Abandoned as soon as it is ``enough``; the file is then there and nobody's.
    """
    path, size = directory / base_file(base_id), below.page_count * PAGE_SIZE
    digest, there = _digest(size), pages_with_data(below.path, below.page_count)
    with no_space_named(path):
        handle = disk.create(path, 0o444)
        try:
            for first in range(0, below.page_count, PART_PAGES):
                if enough.is_set():
                    raise Abandoned
                content = _part(below, there, first, over)
                _write(handle, content)
                _add(digest, first * PAGE_SIZE, content)
                handle.sync()
        finally:
            handle.close()
        disk.sync_dir(directory)
    return BaseFact(base_id, size, stored_bytes(path), digest.hexdigest())


def _part(below: BaseRam, there: npt.NDArray[np.bool_], first: int, over: Overlay) -> Pages:
    pages = np.arange(first, min(first + PART_PAGES, below.page_count), dtype=np.uint32)
    content = np.zeros((len(pages), PAGE_SIZE), np.uint8)
    kept = np.flatnonzero(there[pages])
    if len(kept):
        content[kept] = below.read(pages[kept])
    over(pages, content)
    return content


def _write(handle: Handle, content: Pages) -> None:
    """Append a part; its zero pages become holes."""
    used = np.concatenate(([False], content.view(np.uint64).any(axis=1), [False]))
    edges = np.flatnonzero(used[1:] != used[:-1]).reshape(-1, 2)
    at = handle.size
    end = at + content.nbytes
    for low, high in edges.tolist():
        if at + low * PAGE_SIZE > handle.size:
            handle.cut(at + low * PAGE_SIZE)
        handle.write(content[low:high].data.cast("B"))
    if end > handle.size:
        handle.cut(end)


def check_base(directory: Path, fact: BaseFact, told: Callable[[int], None] | None = None, *, content: bool = False) -> Path:
    """Size of a base, and with ``content`` its checksum; returns where it is. Raises CorruptSnapshot naming it.

    A wake looks at the size: to read a gigabyte would cost more than the wake. ``told`` hears of each part's bytes.
    """
    path = directory / base_file(fact.base_id)
    if disk_layers.size_of(path) != fact.size:
        raise disk_layers.corrupt(path, "its size is not the one recorded")
    if content and checksum(path, told) != fact.checksum:
        raise disk_layers.corrupt(path, "its checksum does not hold")
    return path


def checksum(path: Path, told: Callable[[int], None] | None = None) -> str:
    """The checksum of a base, in hex; what lies in a hole is not read. Raises CorruptSnapshot when it is missing."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest = _digest(size)
            for offset in _windows_with_data(file.fileno(), size):
                data = os.pread(file.fileno(), min(WINDOW_BYTES, size - offset), offset)
                if told is not None:
                    told(len(data))
                _add(digest, offset, np.frombuffer(data, np.uint8))
    except FileNotFoundError as error:
        raise disk_layers.corrupt(path, "the file is missing") from error
    except OSError as error:
        raise disk_layers.corrupt(path, f"it cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _windows_with_data(descriptor: int, size: int) -> Iterator[int]:
    following = 0
    for start, end in data_extents(descriptor, size):
        for offset in range(max(following, start - start % WINDOW_BYTES), end, WINDOW_BYTES):
            yield offset
            following = offset + WINDOW_BYTES


def _digest(size: int) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(size.to_bytes(8, "little"))


def _add(digest: xxhash.xxh3_128, offset: int, content: npt.NDArray[np.uint8]) -> None:
    """Whole windows in order; only the file's last one may be shorter."""
    data = content.data.cast("B")
    for at in range(0, len(data), WINDOW_BYTES):
        window = data[at : at + WINDOW_BYTES]
        if np.frombuffer(window, np.uint8).any():
            digest.update((offset + at).to_bytes(8, "little"))
            digest.update(window)
