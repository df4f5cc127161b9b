"""Reading the page log: the content of pages that an index locates, and a machine's memory made what it says.

All functions are synchronous; those that use a few threads say so. Call them through ``asyncio.to_thread``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from perdure.core.ids import SegmentId
from perdure.machines.driver import PAGE_SIZE, GuestMemory, PageNumbers, Pages
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.segments import Hashes, SegmentReader, corrupt, decode_pages, needs_base, page_hashes, segment_file

#: Units of work of a thread.
_FRAMES_PER_LOAD = 16
_FRAMES_PER_RESTORE_MAX = 16
_UNITS_PER_THREAD = 3

Rows = npt.NDArray[np.intp]

THREADS = max(2, min(8, os.cpu_count() or 2))
threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="perdure-pages")


class SegmentReaders:
    """Open segments of one directory, for the length of one operation."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[SegmentId, SegmentReader] = {}

    def __enter__(self) -> SegmentReaders:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for reader in self._open.values():
            reader.close()

    def open_all(self, segments: Sequence[SegmentId]) -> None:
        """Open what is not open yet; afterwards threads may share this object."""
        for segment in segments:
            if segment not in self._open:
                self._open[segment] = SegmentReader(self._directory, segment)

    def __getitem__(self, segment: SegmentId) -> SegmentReader:
        return self._open[segment]


def load(directory: Path, index: PageIndex, base: BaseRam) -> Iterator[tuple[PageNumbers, Pages]]:
    """The located pages of an index with their content, in batches; pages ascend within a batch. Zero pages are not in it.

    Reads a few batches ahead. Raises CorruptSnapshot naming the segment when a checksum does not hold.
    """
    with SegmentReaders(directory) as readers:
        readers.open_all(index.frames.ids)
        batches = by_frame(index, np.arange(len(index.pages)), _FRAMES_PER_LOAD)
        waiting = deque[Future[Pages]]()
        for number, batch in enumerate(batches):
            while len(waiting) < min(THREADS, len(batches) - number):
                waiting.append(threads.submit(read, readers, index, batches[number + len(waiting)], base, True))
            yield index.pages[batch], waiting.popleft().result()


def read_at(readers: SegmentReaders, index: PageIndex, positions: Rows, base: BaseRam) -> Pages:
    """Content of the located pages at these positions of the index, verified; read in the calling thread alone."""
    return read(readers, index, positions, base, True)


def restore(directory: Path, index: PageIndex, base: BaseRam, memory: GuestMemory) -> None:
    """Write the located pages of an index into a machine; each thread decodes and writes. Zero pages are not among them.

    Raises CorruptSnapshot naming the segment when a checksum does not hold; memory then holds a part.
    """
    with SegmentReaders(directory) as readers:
        readers.open_all(index.frames.ids)

        def write(positions: Rows) -> None:
            memory.write_pages(index.pages[positions], read(readers, index, positions, base, True))

        # As large as leaves each thread some: every unit costs a dozen hand-overs of the interpreter's lock.
        frames = min(_FRAMES_PER_RESTORE_MAX, 1 + len(index.frames) // (_UNITS_PER_THREAD * THREADS))
        list(threads.map(write, by_frame(index, np.arange(len(index.pages)), frames)))


def by_frame(index: PageIndex, positions: Rows, frames: int) -> list[Rows]:
    """Positions grouped so that each group holds all those of ``frames`` frames, ascending."""
    order = positions[np.argsort(index.frame[positions], kind="stable")]
    begins = np.flatnonzero(np.diff(index.frame[order], prepend=np.uint32(0xFFFFFFFF)))
    return [np.sort(group) for group in np.split(order, begins[frames::frames])] if len(order) else []


def read(readers: SegmentReaders, index: PageIndex, positions: Rows, base: BaseRam, verify: bool) -> Pages:
    """Content of the index's pages at these positions. Each frame is read once."""
    out = np.empty((len(positions), PAGE_SIZE), np.uint8)
    for rows in _rows_by_frame(index, positions):
        out[rows] = _read_frame(readers, index, positions[rows], base, verify)
    return out


def _rows_by_frame(index: PageIndex, positions: Rows) -> list[Rows]:
    frame = index.frame[positions]
    order = np.argsort(frame, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(frame[order])) + 1) if len(order) else []


def stored_hashes(readers: SegmentReaders, index: PageIndex, positions: Rows) -> Hashes:
    """The checksums that are stored of the index's pages at these positions, all of one frame. Its payload is not read."""
    frames, number = index.frames, int(index.frame[positions[0]])
    name = frames.ids[frames.segment[number]]
    head = readers[name].head(int(frames.offset[number]), int(frames.length[number]))
    return head.hashes[_checked_slots(index, positions, head.pages, segment_file(name))]


def _checked_slots(index: PageIndex, positions: Rows, stored: PageNumbers, where: str) -> npt.NDArray[np.uint8]:
    """Where in their frame, which holds the pages ``stored``, the index has the pages at these positions."""
    slots = index.slot[positions]
    if int(slots.max()) >= len(stored) or not np.array_equal(stored[slots], index.pages[positions]):
        raise corrupt(where, "a frame holds other pages than its index says")
    return slots


def _read_frame(readers: SegmentReaders, index: PageIndex, positions: Rows, base: BaseRam, verify: bool) -> Pages:
    """Content of the index's pages at these positions, all of one frame."""
    frames, number = index.frames, int(index.frame[positions[0]])
    name = frames.ids[frames.segment[number]]
    frame = readers[name].frame(int(frames.offset[number]), int(frames.length[number]))
    where = segment_file(name)
    slots = _checked_slots(index, positions, frame.pages, where)
    below = base.read(frame.pages) if needs_base(frame.codec) else base.pages[:0]
    content, hashes = decode_pages(frame, below, where), frame.hashes
    if len(slots) < len(frame.pages):
        content, hashes = content[slots], hashes[slots]
    elif not np.array_equal(slots, np.arange(len(slots))):
        raise corrupt(where, "a frame's pages are out of order")
    if verify and not np.array_equal(page_hashes(content), hashes):
        raise corrupt(where, "a page's checksum does not hold")
    return content
