"""The page log: captures append what changed, the index says where everything is.

``record`` takes what a capture copied and the index of the last captured content. It runs after the VM goes on and decides for
every page, by its bytes: unchanged (keep its place), equal to the base (omit), zero (say so), or changed (append). Nothing is
decided by a hash: a guest could make two pages collide.

All functions are synchronous and use a few threads; call them through ``asyncio.to_thread``.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import SegmentId
from perdure.machines.driver import PAGE_SIZE, GuestMemory, PageNumbers, Pages
from perdure.machines.pageroom import make_room
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.pageindex import U32, PageIndex
from perdure.snapshots.segments import (
    FRAME_PAGES,
    SPARSE_WORDS,
    WORDS_PER_PAGE,
    Codec,
    EncodedFrame,
    SegmentReader,
    SegmentWriter,
    corrupt,
    decode_pages,
    encode_frame,
    needs_base,
    page_hashes,
    segment_file,
)

#: Units of work of a thread. Those that compare are small, so that both sides stay in the processor's cache.
BATCH_PAGES = 256
_FRAMES_PER_COMPARE = 4
_FRAMES_PER_LOAD = 16
_FRAMES_PER_RESTORE = 4
_FRAMES_PER_WRITE = 16
REHEARSED_AT_ONCE = 1024
FRAME_LIVE_SHARE = 0.5
#: So much is handed to the disk while the rest is still being made; a small capture is synced once.
_BYTES_PER_FLUSH = 64 << 20

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

_AHEAD = max(2, min(8, os.cpu_count() or 2))
_threads = ThreadPoolExecutor(max_workers=_AHEAD, thread_name_prefix="perdure-pages")
#: Of a machine that stands still so many pages are read at once: 16 MiB.
_STILL_PAGES = 4096
_flusher = ThreadPoolExecutor(max_workers=2, thread_name_prefix="perdure-flush")


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
class StillPages:
    """Pages of a machine that stands still until they are recorded, read some megabytes at a time: to find room for a copy of a
    gigabyte takes longer than to write it."""

    memory: GuestMemory
    pages: PageNumbers

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Pages as they were a moment before the machine stood still, and which were as in the index ``last``. One that still has
    these bytes is unchanged: to see that takes a fraction of decoding what is stored of it."""

    last: PageIndex
    pages: PageNumbers
    content: Pages
    same: Mask


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one ``record`` did. Bytes are as stored, frame heads included."""

    index: PageIndex
    pages_changed: int
    appended_bytes: int


def load(directory: Path, index: PageIndex, base: BaseRam) -> Iterator[tuple[PageNumbers, Pages]]:
    """The located pages of an index with their content, in batches; pages ascend within a batch. Zero pages are not in it.

    Reads a few batches ahead. Raises CorruptSnapshot naming the segment when a checksum does not hold.
    """
    with SegmentReaders(directory) as readers:
        readers.open_all(index.frames.ids)
        batches = _by_frame(index, np.arange(len(index.pages)), _FRAMES_PER_LOAD)
        waiting = deque[Future[Pages]]()
        for number, batch in enumerate(batches):
            while len(waiting) < min(_AHEAD, len(batches) - number):
                waiting.append(_threads.submit(_read, readers, index, batches[number + len(waiting)], base, True))
            yield index.pages[batch], waiting.popleft().result()


def read_at(readers: SegmentReaders, index: PageIndex, positions: Rows, base: BaseRam) -> Pages:
    """Content of the located pages at these positions of the index, verified; read in the calling thread alone."""
    return _read(readers, index, positions, base, True)


def restore(directory: Path, index: PageIndex, base: BaseRam, memory: GuestMemory) -> None:
    """Write the located pages of an index into a machine; each thread decodes and writes. Zero pages are not among them.

    Raises CorruptSnapshot naming the segment when a checksum does not hold; memory then holds a part.
    """
    with SegmentReaders(directory) as readers:
        readers.open_all(index.frames.ids)

        def write(positions: Rows) -> None:
            memory.write_pages(index.pages[positions], _read(readers, index, positions, base, True))

        list(_threads.map(write, _by_frame(index, np.arange(len(index.pages)), _FRAMES_PER_RESTORE)))


def record(
    directory: Path,
    last: PageIndex | Rehearsal,
    base: BaseRam,
    captured: tuple[PageNumbers, Pages | StillPages],
    writer: SegmentWriter,
    *,
    leave: frozenset[SegmentId] = frozenset(),
) -> Recorded:
    """Append what differs from ``last`` and return the new index. ``captured`` are all pages that may differ from the base.

    Pages that ``last`` has in the segments ``leave`` are appended too, so that the new index needs those no more, and so are the
    last few that are needed of a frame: a wake decodes whole frames. Nothing is durable before ``writer.sync()``.

    Raises NoSpace or what reading a machine raises, and then ``last`` is still the truth.
    """
    written, content = captured
    if isinstance(content, StillPages):
        last = last.last if isinstance(last, Rehearsal) else last
        return _record_still(directory, _without(last, leave), base, content, writer)
    known = np.zeros(len(written), bool)
    if isinstance(last, Rehearsal):
        known = _as_rehearsed(last, written, content)
        last = last.last
    last = _without(last, leave)
    part = _record_part(directory, last, base, (written, content, known), writer, crumbs=False)
    return Recorded(_joined(last, *part), len(part[2].pages), sum(part[2].lengths))


def _record_still(directory: Path, last: PageIndex, base: BaseRam, still: StillPages, writer: SegmentWriter) -> Recorded:
    room = make_room(min(len(still), _STILL_PAGES), ahead=False)
    parts, flushes = [], _Flushes(writer)
    try:
        for at in range(0, max(1, len(still)), _STILL_PAGES):
            pages = still.pages[at : at + _STILL_PAGES]
            content = still.memory.read_pages(pages, room)
            parts.append(_record_part(directory, last, base, (pages, content, np.zeros(len(pages), bool)), writer, crumbs=True))
            flushes.look()
        flushes.end()
    except BaseException:
        flushes.undo()
        raise
    kept, zeros, appended = zip(*parts, strict=True)
    whole = _Appended(
        writer.segment_id,
        np.concatenate([part.pages for part in appended]),
        *([one for part in appended for one in getattr(part, name)] for name in ("offsets", "lengths", "counts")),
    )
    index = _joined(last, np.concatenate(kept), np.concatenate(zeros), whole)
    return Recorded(index, len(whole.pages), sum(whole.lengths))


def _record_part(
    directory: Path,
    last: PageIndex,
    base: BaseRam,
    captured: tuple[PageNumbers, Pages, Mask],
    writer: SegmentWriter,
    *,
    crumbs: bool,
) -> tuple[Rows, PageNumbers, _Appended]:
    """Append what of these pages differs; which positions of ``last`` stand, which pages are zero, and what was appended.

    ``crumbs`` may stand where these pages are not all: what is needed of a frame is known from all of them only.
    """
    written, content, known = captured
    unchanged, kept = _unchanged(directory, last, base, (written, content), known)
    if not crumbs:
        unchanged, kept = _without_crumbs(last, unchanged, kept)
    rest = np.flatnonzero(~unchanged)
    batches = [rest[at : at + BATCH_PAGES] for at in range(0, max(1, len(rest)), BATCH_PAGES)]
    parts = list(_threads.map(lambda rows: _classify(base, written, content, rows), batches))
    zeros = written[np.concatenate([part.zero for part in parts])]
    chunks: list[_Chunk] = []
    for sparse in (True, False):
        rows = np.concatenate([part.sparse if sparse else part.dense for part in parts])
        chunks += _chunks(rows, sparse=sparse)
    return kept, zeros, _append(written, content, chunks, base, writer)


def rehearse(
    directory: Path, last: PageIndex, base: BaseRam, running: GuestMemory, pages: PageNumbers, enough: threading.Event
) -> Rehearsal:
    """Compare these pages of a running machine with ``last``, until it is enough. They may change while they are copied: what
    counts is the copy."""
    room = make_room(len(pages), ahead=False)
    same, done = np.zeros(len(pages), bool), 0
    while done < len(pages) and not enough.is_set():
        some = slice(done, done + REHEARSED_AT_ONCE)
        content = running.read_pages(pages[some], room[some])
        same[some], _ = _unchanged(directory, last, base, (pages[some], content), np.zeros(len(content), bool))
        done += len(content)
    return Rehearsal(last, pages[:done], room[:done], same[:done])


def rewrite(directory: Path, index: PageIndex, base: BaseRam, segments: frozenset[SegmentId], writer: SegmentWriter) -> PageIndex:
    """Append the pages that ``index`` has in ``segments`` to another segment; the new index needs those no more.

    Raises CorruptSnapshot when a page's checksum does not hold: damage is never copied as if it were good.
    """
    numbers = [number for number, name in enumerate(index.frames.ids) if name in segments]
    moving = np.isin(index.frames.segment[index.frame], numbers)
    movers = replace(index, pages=index.pages[moving], frame=index.frame[moving], slot=index.slot[moving])
    loaded = list(load(directory, movers, base))
    pages = np.concatenate([index.pages[:0], *(some for some, _ in loaded)])
    content = np.concatenate([base.pages[:0], *(some for _, some in loaded)])
    kinds = _classify(base, pages, content, np.argsort(pages))
    appended = _append(pages, content, _chunks(kinds.sparse, sparse=True) + _chunks(kinds.dense, sparse=False), base, writer)
    return _joined(index, np.flatnonzero(~moving), index.zeros, appended)


def _without(index: PageIndex, segments: frozenset[SegmentId]) -> PageIndex:
    """The index as if it located nothing in these segments."""
    numbers = [number for number, name in enumerate(index.frames.ids) if name in segments]
    if not numbers:
        return index
    kept = ~np.isin(index.frames.segment[index.frame], numbers)
    return replace(index, pages=index.pages[kept], frame=index.frame[kept], slot=index.slot[kept])


def _without_crumbs(last: PageIndex, unchanged: Mask, kept: Rows) -> tuple[Mask, Rows]:
    """The same without the pages of frames that would be needed for less than ``FRAME_LIVE_SHARE`` of their pages."""
    live = np.bincount(last.frame[kept], minlength=len(last.frames))
    crumbs = (live < FRAME_LIVE_SHARE * last.frames.count)[last.frame[kept]]
    unchanged[np.flatnonzero(unchanged)[crumbs]] = False
    return unchanged, kept[~crumbs]


def _chunks(rows: Rows, *, sparse: bool) -> list[_Chunk]:
    return [_Chunk(rows[at : at + FRAME_PAGES], sparse) for at in range(0, len(rows), FRAME_PAGES)]


def _by_frame(index: PageIndex, positions: Rows, frames: int) -> list[Rows]:
    """Positions grouped so that each group holds all those of ``frames`` frames, ascending."""
    order = positions[np.argsort(index.frame[positions], kind="stable")]
    begins = np.flatnonzero(np.diff(index.frame[order], prepend=np.uint32(0xFFFFFFFF)))
    return [np.sort(group) for group in np.split(order, begins[frames::frames])] if len(order) else []


def _as_rehearsed(rehearsal: Rehearsal, written: PageNumbers, content: Pages) -> Mask:
    """Which captured pages are as they were in the rehearsal, and so as in the last index."""
    _, here, there = np.intersect1d(written, rehearsal.pages, assume_unique=True, return_indices=True)
    here, there = here[rehearsal.same[there]], there[rehearsal.same[there]]
    same = np.zeros(len(written), bool)

    def compare(at: int) -> None:
        rows, before = here[at : at + BATCH_PAGES], there[at : at + BATCH_PAGES]
        same[rows] = _same_rows(_take(content, rows), rehearsal.content[before])

    list(_threads.map(compare, range(0, len(here), BATCH_PAGES)))
    return same


def _same_rows(some: Pages, others: Pages) -> Mask:
    equal: Mask = (some.view(np.uint64) == others.view(np.uint64)).all(axis=1)
    return equal


def _unchanged(
    directory: Path, last: PageIndex, base: BaseRam, captured: tuple[PageNumbers, Pages], known: Mask
) -> tuple[Mask, Rows]:
    """Which captured pages are as they were, and their positions in the last index. Each frame is read once at most; of pages
    that are ``known`` to be so nothing is."""
    written, content = captured
    found, at = last.find(written)
    row_of = np.zeros(len(last.pages), np.intp)
    row_of[at[found]] = np.flatnonzero(found)
    same = found & known

    def compare(positions: Rows) -> None:
        try:
            before = _read(readers, last, positions, base, False)
        except CorruptSnapshot:
            return  # what cannot be read is written anew: the log mends itself
        rows = row_of[positions]
        same[rows] = _same_rows(_take(content, rows), before)

    with SegmentReaders(directory) as readers:
        readers.open_all(last.frames.ids)
        for _ in _threads.map(compare, _by_frame(last, at[found & ~known], _FRAMES_PER_COMPARE)):
            pass
    return same, at[same]


class _Flushes:
    """Hands what is written to the disk while the rest is still being made."""

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        self._begun = self._handed = writer.size
        self._running: list[Future[None]] = []

    def look(self) -> None:
        if self._writer.size - self._handed >= _BYTES_PER_FLUSH and (not self._running or self._running[-1].done()):
            self._handed = self._writer.size
            self._running.append(_flusher.submit(self._writer.sync))

    def end(self) -> None:
        """An error is told once: the caller's own sync would not hear of it."""
        for flush in self._running:
            flush.result()

    def undo(self) -> None:
        """Take back all that was written since."""
        wait(self._running)
        self._writer.cut(self._begun)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of the captured content that make one frame."""

    rows: Rows
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
    """Rows of captured pages that differ from the base, by what is stored of them."""

    zero: Rows
    sparse: Rows
    dense: Rows


def _classify(base: BaseRam, written: PageNumbers, content: Pages, rows: Rows) -> _Classified:
    words, pages, half = _take(content, rows).view(np.uint64), written[rows], WORDS_PER_PAGE // 2
    below = _take(base.pages, pages).view(np.uint64)
    count = _differing(words[:, :half], below[:, :half])
    open_ = np.flatnonzero(count <= SPARSE_WORDS)  # of the others it is known what they are
    count[open_] += _differing(words[open_, half:], below[open_, half:])
    zero = _zero_rows(words) & (count > 0)
    sparse = ~zero & (count > 0) & (count <= SPARSE_WORDS)
    return _Classified(rows[zero], rows[sparse], rows[~zero & (count > SPARSE_WORDS)])


def _differing(words: npt.NDArray[np.uint64], below: npt.NDArray[np.uint64]) -> U32:
    """In how many words each row differs from what is below."""
    count: U32 = np.bitwise_count(np.packbits(words != below, axis=1).view(np.uint64)).sum(axis=1, dtype=np.uint32)
    return count


def _take(content: Pages, rows: Rows | PageNumbers) -> Pages:
    """These rows in this order, without a copy where they are neighbours: to copy costs as much as all that is done with them."""
    if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows) and bool((rows[1:] > rows[:-1]).all()):
        return content[int(rows[0]) : int(rows[-1]) + 1]
    return content[rows]


def _zero_rows(words: npt.NDArray[np.uint64]) -> Mask:
    """Which rows are all zero; looks closely only at those that begin with zeros."""
    zero = np.zeros(len(words), bool)
    candidates = np.flatnonzero((words[:, :8] == 0).all(axis=1))
    zero[candidates] = (words[candidates] == 0).all(axis=1)
    return zero


def _append(written: PageNumbers, content: Pages, chunks: list[_Chunk], base: BaseRam, writer: SegmentWriter) -> _Appended:
    """Write the chunks as frames, encoded by several threads and written in order while others encode."""

    def encode(chunk: _Chunk) -> EncodedFrame:
        pages, some = written[chunk.rows], _take(content, chunk.rows)
        codec = Codec.WORDS_ZSTD if chunk.sparse else Codec.ZSTD
        return encode_frame(pages, some, base.read(pages if chunk.sparse else pages[:0]), codec)

    pages = np.concatenate([written[:0], *(written[chunk.rows] for chunk in chunks)])
    done = _Appended(writer.segment_id, pages, [], [], [])
    encoded = _threads.map(encode, chunks)
    flushes = _Flushes(writer)
    try:
        while some := list(itertools.islice(encoded, _FRAMES_PER_WRITE)):
            done.offsets.extend(writer.append(some))
            done.lengths.extend(frame.size for frame in some)
            done.counts.extend(frame.count for frame in some)
            flushes.look()
        flushes.end()
    except BaseException:
        flushes.undo()
        raise
    return done


def _joined(last: PageIndex, kept: Rows, zeros: PageNumbers, appended: _Appended) -> PageIndex:
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


def _read(readers: SegmentReaders, index: PageIndex, positions: Rows, base: BaseRam, verify: bool) -> Pages:
    """Content of the index's pages at these positions. Each frame is read once."""
    out = np.empty((len(positions), PAGE_SIZE), np.uint8)
    for rows in _rows_by_frame(index, positions):
        out[rows] = _read_frame(readers, index, positions[rows], base, verify)
    return out


def _rows_by_frame(index: PageIndex, positions: Rows) -> list[Rows]:
    frame = index.frame[positions]
    order = np.argsort(frame, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(frame[order])) + 1) if len(order) else []


def _read_frame(readers: SegmentReaders, index: PageIndex, positions: Rows, base: BaseRam, verify: bool) -> Pages:
    """Content of the index's pages at these positions, all of one frame."""
    frames, number = index.frames, int(index.frame[positions[0]])
    pages, slots = index.pages[positions], index.slot[positions]
    name = frames.ids[frames.segment[number]]
    frame = readers[name].frame(int(frames.offset[number]), int(frames.length[number]))
    where = segment_file(name)
    if int(slots.max()) >= len(frame.pages) or not np.array_equal(frame.pages[slots], pages):
        raise corrupt(where, "a frame holds other pages than its index says")
    below = base.read(frame.pages) if needs_base(frame.codec) else base.pages[:0]
    content, hashes = decode_pages(frame, below, where), frame.hashes
    if len(slots) < len(frame.pages):
        content, hashes = content[slots], hashes[slots]
    elif not np.array_equal(slots, np.arange(len(slots))):
        raise corrupt(where, "a frame's pages are out of order")
    if verify and not np.array_equal(page_hashes(content), hashes):
        raise corrupt(where, "a page's checksum does not hold")
    return content
