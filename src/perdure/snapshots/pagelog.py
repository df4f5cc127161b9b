"""The page log: captures append what changed, the index says where everything is.

``record`` takes what a capture copied and the index of the last captured content. It runs after the VM goes on and decides for
every page, by its bytes: unchanged (keep its place), equal to the base (omit), zero (say so), or changed (append). Nothing is
decided by a hash: a guest could make two pages collide.

All functions are synchronous and use a few threads; call them through ``asyncio.to_thread``.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from perdure.core.errors import CorruptSnapshot, InvalidRequest
from perdure.core.ids import SegmentId
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages
from perdure.snapshots.pageindex import U8, Frames, PageIndex
from perdure.snapshots.segments import (
    FRAME_PAGES,
    SPARSE_WORDS,
    EncodedFrame,
    SegmentReader,
    SegmentWriter,
    choose,
    decode_pages,
    encode_frame,
    needs_base,
    page_hashes,
    segment_file,
)

#: Pages handled as one unit of work by a thread: 4 MiB of content.
BATCH_PAGES = 1024
_FRAMES_PER_WRITE = 16

Mask = npt.NDArray[np.bool_]

_threads = ThreadPoolExecutor(max_workers=max(2, min(8, os.cpu_count() or 2)), thread_name_prefix="perdure-pages")


class BaseRam:
    """The immutable file that guest RAM is mapped over, read-only."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size == 0 or size % PAGE_SIZE:
                raise InvalidRequest(f"{path.name} is not a memory image: its size is {size} bytes.")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        self.path = path
        self.page_count = size // PAGE_SIZE
        self.pages: Pages = np.frombuffer(self._map, np.uint8).reshape(self.page_count, PAGE_SIZE)

    def read(self, pages: PageNumbers) -> Pages:
        """A copy of the base's content of these pages."""
        return self.pages[pages]


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


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one ``record`` did. Bytes are as stored, frame heads included."""

    index: PageIndex
    pages_changed: int
    appended_bytes: int


def load(directory: Path, index: PageIndex, base: BaseRam, *, verify: bool = True) -> Iterator[tuple[PageNumbers, Pages]]:
    """The located pages of an index with their content, in batches of ascending pages. Zero pages are not in it.

    Reads one batch ahead. Raises CorruptSnapshot naming the segment when a checksum does not hold.
    """
    with SegmentReaders(directory) as readers:
        readers.open_all(index.frames.ids)
        batches = [slice(at, at + BATCH_PAGES) for at in range(0, len(index.pages), BATCH_PAGES)]
        ahead = _threads._max_workers

        def start(batch: slice) -> Callable[[], Pages]:
            positions = np.arange(batch.start, min(batch.stop, len(index.pages)))
            return _threads.submit(_read, readers, index, positions, base, verify).result

        waiting = [start(batch) for batch in batches[:ahead]]
        for number, batch in enumerate(batches):
            content = waiting.pop(0)()
            if number + ahead < len(batches):
                waiting.append(start(batches[number + ahead]))
            yield index.pages[batch], content


def record(
    directory: Path, last: PageIndex, base: BaseRam, written: PageNumbers, content: Pages, writer: SegmentWriter
) -> Recorded:
    """Append what differs from ``last`` and return the new index. ``written`` are all pages that may differ from the base.

    Nothing is durable before ``writer.sync()``. Raises NoSpace, and then ``last`` is still the truth.
    """
    with SegmentReaders(directory) as readers:
        readers.open_all(last.frames.ids)
        batches = [slice(at, at + BATCH_PAGES) for at in range(0, max(1, len(written)), BATCH_PAGES)]
        parts = list(_threads.map(lambda at: _classify(readers, last, base, written[at], content[at]), batches))
    kept = np.concatenate([part.kept for part in parts])
    zeros = np.concatenate([part.zeros for part in parts])
    chunks: list[_Chunk] = []
    for sparse in (True, False):
        of_batches = [part.sparse if sparse else part.dense for part in parts]
        rows = np.concatenate([found + at.start for at, found in zip(batches, of_batches, strict=True)])
        chunks += [_Chunk(rows[at : at + FRAME_PAGES], sparse) for at in range(0, len(rows), FRAME_PAGES)]
    appended = _append(written, content, chunks, base, writer)
    return Recorded(_joined(last, kept, zeros, appended), len(appended.pages), sum(appended.lengths))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of the captured content that make one frame."""

    rows: npt.NDArray[np.intp]
    sparse: bool


@dataclass(frozen=True, slots=True)
class _Appended:
    """New frames, and the pages in them in order."""

    segment: SegmentId
    pages: PageNumbers
    offsets: list[int]
    lengths: list[int]
    counts: list[int]


@dataclass(frozen=True, slots=True)
class _Classified:
    """One batch of captured pages: rows to append, positions in the last index that stay, pages that are zero."""

    sparse: npt.NDArray[np.intp]
    dense: npt.NDArray[np.intp]
    kept: npt.NDArray[np.intp]
    zeros: PageNumbers


def _classify(readers: SegmentReaders, last: PageIndex, base: BaseRam, pages: PageNumbers, content: Pages) -> _Classified:
    words = content.view(np.uint64)
    found, at = last.find(pages)
    same = np.zeros(len(pages), bool)
    where = np.flatnonzero(found)
    if len(where):
        try:
            before = _read(readers, last, at[where], base, False)
        except CorruptSnapshot:
            pass  # what cannot be read is written anew: the log mends itself
        else:
            same[where] = (words[where] == before.view(np.uint64)).all(axis=1)
    rest = np.flatnonzero(~same)
    differing = np.count_nonzero(words[rest] != base.read(pages[rest]).view(np.uint64), axis=1)
    rest, differing = rest[differing > 0], differing[differing > 0]
    zero = _zero_rows(words[rest])
    sparse = differing <= SPARSE_WORDS
    return _Classified(rest[~zero & sparse], rest[~zero & ~sparse], at[same], pages[rest[zero]])


def _zero_rows(words: npt.NDArray[np.uint64]) -> Mask:
    """Which rows are all zero; looks closely only at those that begin with zeros."""
    zero = np.zeros(len(words), bool)
    candidates = np.flatnonzero((words[:, :8] == 0).all(axis=1))
    zero[candidates] = (words[candidates] == 0).all(axis=1)
    return zero


def _append(written: PageNumbers, content: Pages, chunks: list[_Chunk], base: BaseRam, writer: SegmentWriter) -> _Appended:
    """Write the chunks as frames, encoded by several threads and written in order while others encode."""

    def encode(chunk: _Chunk) -> EncodedFrame:
        pages, some = written[chunk.rows], content[chunk.rows]
        codec = choose(some, sparse=chunk.sparse)
        return encode_frame(pages, some, base.read(pages if needs_base(codec) else pages[:0]), codec)

    pages = np.concatenate([written[:0], *(written[chunk.rows] for chunk in chunks)])
    done = _Appended(writer.segment_id, pages, [], [], [])
    before = writer.size
    encoded = _threads.map(encode, chunks)
    try:
        while some := list(itertools.islice(encoded, _FRAMES_PER_WRITE)):
            done.offsets.extend(writer.append(some))
            done.lengths.extend(frame.size for frame in some)
            done.counts.extend(frame.count for frame in some)
    except BaseException:
        writer.cut(before)
        raise
    return done


def _joined(last: PageIndex, kept: npt.NDArray[np.intp], zeros: PageNumbers, appended: _Appended) -> PageIndex:
    """The new index: kept places, and the new ones."""
    used, old_frame = np.unique(last.frame[kept], return_inverse=True)
    table = last.frames.pick(used.astype(np.uint32))
    if appended.offsets:
        table = table.plus(appended.segment, appended.offsets, appended.lengths, appended.counts)
    counts = np.array(appended.counts, np.intp)
    new_frame = np.repeat(np.arange(len(counts)) + len(used), counts)
    new_slot = np.arange(len(appended.pages)) - np.repeat(np.cumsum(counts) - counts, counts)
    pages = np.concatenate((last.pages[kept], appended.pages))
    frame = np.concatenate((old_frame.astype(np.uint32), new_frame.astype(np.uint32)))
    slot = np.concatenate((last.slot[kept], new_slot.astype(np.uint8)))
    by_page = np.argsort(pages, kind="stable")
    return PageIndex(last.page_count, pages[by_page], frame[by_page], slot[by_page], zeros, table)


def _read(readers: SegmentReaders, index: PageIndex, positions: npt.NDArray[np.intp], base: BaseRam, verify: bool) -> Pages:
    """Content of the index's pages at these positions. Each frame is read once."""
    out = np.empty((len(positions), PAGE_SIZE), np.uint8)
    frame, slot, pages = index.frame[positions], index.slot[positions], index.pages[positions]
    order = np.argsort(frame, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(frame[order])) + 1) if len(order) else ():
        _read_frame(readers, index.frames, int(frame[rows[0]]), base, (pages[rows], slot[rows], rows, verify), out)
    return out


def _read_frame(
    readers: SegmentReaders,
    frames: Frames,
    number: int,
    base: BaseRam,
    wanted: tuple[PageNumbers, U8, npt.NDArray[np.intp], bool],
    out: Pages,
) -> None:
    pages, slots, rows, verify = wanted
    name = frames.ids[frames.segment[number]]
    frame = readers[name].frame(int(frames.offset[number]), int(frames.length[number]))
    where = segment_file(name)
    if int(slots.max()) >= len(frame.pages) or not np.array_equal(frame.pages[slots], pages):
        raise CorruptSnapshot(f"The stored pages in {where} are damaged: a frame holds other pages than its index says.")
    below = base.read(frame.pages) if needs_base(frame.codec) else base.pages[:0]
    content, hashes = decode_pages(frame, below, where), frame.hashes
    if len(slots) < len(frame.pages):
        content, hashes = content[slots], hashes[slots]
    elif not np.array_equal(slots, np.arange(len(slots))):
        raise CorruptSnapshot(f"The stored pages in {where} are damaged: a frame's pages are out of order.")
    if verify and not np.array_equal(page_hashes(content), hashes):
        raise CorruptSnapshot(
            f"The stored pages in {where} are damaged: a page's checksum does not hold.",
            hint="Wake the workspace from an earlier snapshot (perdure recover NAME --rewind) or boot its disk.",
        )
    out[rows] = content
