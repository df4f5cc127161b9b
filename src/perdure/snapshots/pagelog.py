"""The page log: captures append what changed, the index says where everything is.

``record`` takes what a capture copied and the index of the last captured content. It runs after the VM goes on and decides for
every page, by its bytes: unchanged (keep its place), equal to the base (omit), zero (say so), or changed (append). Nothing is
decided by a hash: a guest could make two pages collide.

All functions are synchronous and use a few threads; call them through ``asyncio.to_thread``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import SegmentId
from perdure.machines.driver import GuestMemory, PageNumbers, Pages
from perdure.machines.pageroom import make_room
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.pageindex import U32, PageIndex
from perdure.snapshots.pageread import Rows, SegmentReaders, by_frame, load, read, threads
from perdure.snapshots.segments import (
    FRAME_PAGES,
    SPARSE_WORDS,
    WORDS_PER_PAGE,
    Codec,
    EncodedFrame,
    SegmentWriter,
    encode_frame,
)

#: Units of work of a thread. Those that compare are small, so that both sides stay in the processor's cache.
BATCH_PAGES = 256
_FRAMES_PER_COMPARE = 4
_FRAMES_PER_WRITE = 16
_FRAMES_PER_MOVE = 64
REHEARSED_AT_ONCE = 1024
FRAME_LIVE_SHARE = 0.5
#: So much is handed to the disk while the rest is still being made; a small capture is synced once.
_BYTES_PER_FLUSH = 64 << 20

Mask = npt.NDArray[np.bool_]

#: Of a machine that stands still so many pages are read at once: 16 MiB.
_STILL_PAGES = 4096
_flusher = ThreadPoolExecutor(max_workers=2, thread_name_prefix="perdure-flush")


@dataclass(frozen=True, slots=True)
class StillPages:
    """Pages of a machine that stands still until they are recorded, read some megabytes at a time: to find room for a copy of a
    gigabyte takes longer than to write it."""

    memory: GuestMemory
    pages: PageNumbers

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(frozen=True, slots=True)
class LatelyWritten:
    """Copies of the pages that were written since the capture that the last index is of. All others are as they were then."""

    pages: PageNumbers
    content: Pages


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
    """What one ``record`` did. Bytes are as stored, frame heads included. ``damaged``: something stored cannot be read, and was
    not copied; a capture of all pages writes it anew."""

    index: PageIndex
    pages_changed: int
    appended_bytes: int
    damaged: bool = False


def record(
    directory: Path,
    last: PageIndex | Rehearsal,
    base: BaseRam,
    captured: tuple[PageNumbers, Pages | StillPages | LatelyWritten],
    writer: SegmentWriter,
    *,
    leave: frozenset[SegmentId] = frozenset(),
) -> Recorded:
    """Append what differs from ``last`` and return the new index. ``captured`` are all pages that may differ from the base,
    whether all of them were copied or only the ``LatelyWritten``.

    Pages that ``last`` has in the segments ``leave`` are appended too, so that the new index needs those no more, and so are the
    last few that are needed of a frame: a wake decodes whole frames. Nothing is durable before ``writer.sync()``.

    Raises NoSpace or what reading a machine raises, and then ``last`` is still the truth.
    """
    written, content = captured
    if isinstance(content, StillPages):
        last = last.last if isinstance(last, Rehearsal) else last
        return _record_still(directory, _without(last, leave), base, content, writer)
    if isinstance(content, LatelyWritten):
        last = last.last if isinstance(last, Rehearsal) else last
        return _record_lately(directory, last, base, (written, content), writer, leave)
    known = np.zeros(len(written), bool)
    if isinstance(last, Rehearsal):
        known = _as_rehearsed(last, written, content)
        last = last.last
    last = _without(last, leave)
    kept, zeros, appended = _record_part(directory, last, base, (written, content, known), writer, crumbs=False)
    return _recorded(last, kept, zeros, (appended,))


def _record_still(directory: Path, last: PageIndex, base: BaseRam, still: StillPages, writer: SegmentWriter) -> Recorded:
    room = make_room(min(len(still), _STILL_PAGES), ahead=False)
    parts = []
    with _Flushes(writer) as flushes:
        for at in range(0, max(1, len(still)), _STILL_PAGES):
            pages = still.pages[at : at + _STILL_PAGES]
            content = still.memory.read_pages(pages, room)
            parts.append(_record_part(directory, last, base, (pages, content, np.zeros(len(pages), bool)), writer, crumbs=True))
            flushes.look()
    kept, zeros, appended = zip(*parts, strict=True)
    return _recorded(last, np.concatenate(kept), np.concatenate(zeros), appended)


def _record_lately(
    directory: Path,
    last: PageIndex,
    base: BaseRam,
    captured: tuple[PageNumbers, LatelyWritten],
    writer: SegmentWriter,
    leave: frozenset[SegmentId],
) -> Recorded:
    """What was not copied keeps its place. What of it must be written anew all the same comes from the log, as in ``rewrite``."""
    private, lately = captured
    copied = np.isin(last.pages, lately.pages, assume_unique=True)
    left = _in_segments(last, leave)
    still_private = np.isin(last.pages, private, assume_unique=True)  # the others have been given back and are the base's again
    quiet = np.flatnonzero(still_private & ~copied)
    compared = np.flatnonzero(copied & ~left)
    quiet_zeros = np.setdiff1d(np.intersect1d(last.zeros, private, assume_unique=True), lately.pages, assume_unique=True)
    with _Flushes(writer) as flushes, SegmentReaders(directory) as readers:
        part = (lately.pages, lately.content, np.zeros(len(lately.pages), bool))
        kept, zeros, appended = _record_part(directory, _only(last, compared), base, part, writer, crumbs=True)
        flushes.look()
        moving = left[quiet] | _crumbs(last, np.concatenate((quiet, compared[kept])))[last.frame[quiet]]
        stay, parts, damaged = [quiet[~moving], compared[kept]], [appended], False
        readers.open_all(last.frames.ids)
        for some in by_frame(last, quiet[moving], _FRAMES_PER_MOVE):
            try:
                content = read(readers, last, some, base, True)
            except CorruptSnapshot:
                stay.append(some)
                damaged = True
                continue
            part = (last.pages[some], content, np.zeros(len(some), bool))
            parts.append(_record_part(directory, _only(last, some[:0]), base, part, writer, crumbs=True)[2])
            flushes.look()
    recorded = _recorded(last, np.concatenate(stay), np.union1d(zeros, quiet_zeros).astype(np.uint32), parts)
    return replace(recorded, damaged=damaged)


def _recorded(last: PageIndex, kept: Rows, zeros: PageNumbers, parts: Sequence[_Appended]) -> Recorded:
    whole = _Appended(
        parts[0].segment,
        np.concatenate([part.pages for part in parts]),
        *([one for part in parts for one in getattr(part, name)] for name in ("offsets", "lengths", "counts")),
    )
    return Recorded(_joined(last, kept, zeros, whole), len(whole.pages), sum(whole.lengths))


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
    parts = list(threads.map(lambda rows: _classify(base, written, content, rows), batches))
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
    moving = _in_segments(index, segments)
    loaded = list(load(directory, _only(index, np.flatnonzero(moving)), base))
    pages = np.concatenate([index.pages[:0], *(some for some, _ in loaded)])
    content = np.concatenate([base.pages[:0], *(some for _, some in loaded)])
    kinds = _classify(base, pages, content, np.argsort(pages))
    appended = _append(pages, content, _chunks(kinds.sparse, sparse=True) + _chunks(kinds.dense, sparse=False), base, writer)
    return _joined(index, np.flatnonzero(~moving), index.zeros, appended)


def _only(index: PageIndex, positions: Rows) -> PageIndex:
    """The index as if it located nothing but what is at these positions."""
    return replace(index, pages=index.pages[positions], frame=index.frame[positions], slot=index.slot[positions])


def _without(index: PageIndex, segments: frozenset[SegmentId]) -> PageIndex:
    """The index as if it located nothing in these segments."""
    left = _in_segments(index, segments)
    return _only(index, np.flatnonzero(~left)) if left.any() else index


def _in_segments(index: PageIndex, segments: frozenset[SegmentId]) -> Mask:
    """Which located pages are in these segments."""
    numbers = [number for number, name in enumerate(index.frames.ids) if name in segments]
    return np.isin(index.frames.segment[index.frame], numbers)


def _crumbs(index: PageIndex, needed: Rows) -> Mask:
    """Which frames would be needed for less than ``FRAME_LIVE_SHARE`` of their pages, if these positions are what is needed."""
    live = np.bincount(index.frame[needed], minlength=len(index.frames))
    few: Mask = live < FRAME_LIVE_SHARE * index.frames.count
    return few


def _without_crumbs(last: PageIndex, unchanged: Mask, kept: Rows) -> tuple[Mask, Rows]:
    """The same without the pages of frames that would be needed for little."""
    crumbs = _crumbs(last, kept)[last.frame[kept]]
    unchanged[np.flatnonzero(unchanged)[crumbs]] = False
    return unchanged, kept[~crumbs]


def _chunks(rows: Rows, *, sparse: bool) -> list[_Chunk]:
    return [_Chunk(rows[at : at + FRAME_PAGES], sparse) for at in range(0, len(rows), FRAME_PAGES)]


def _as_rehearsed(rehearsal: Rehearsal, written: PageNumbers, content: Pages) -> Mask:
    """Which captured pages are as they were in the rehearsal, and so as in the last index."""
    _, here, there = np.intersect1d(written, rehearsal.pages, assume_unique=True, return_indices=True)
    here, there = here[rehearsal.same[there]], there[rehearsal.same[there]]
    same = np.zeros(len(written), bool)

    def compare(at: int) -> None:
        rows, before = here[at : at + BATCH_PAGES], there[at : at + BATCH_PAGES]
        same[rows] = _same_rows(_take(content, rows), rehearsal.content[before])

    list(threads.map(compare, range(0, len(here), BATCH_PAGES)))
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
            before = read(readers, last, positions, base, False)
        except CorruptSnapshot:
            return  # what cannot be read is written anew: the log mends itself
        rows = row_of[positions]
        same[rows] = _same_rows(_take(content, rows), before)

    with SegmentReaders(directory) as readers:
        readers.open_all(last.frames.ids)
        for _ in threads.map(compare, by_frame(last, at[found & ~known], _FRAMES_PER_COMPARE)):
            pass
    return same, at[same]


class _Flushes:
    """Hands what is written to the disk while the rest is still being made. A failure takes back all that was written since."""

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        self._begun = self._handed = writer.size
        self._running: list[Future[None]] = []

    def __enter__(self) -> _Flushes:
        return self

    def look(self) -> None:
        if self._writer.size - self._handed >= _BYTES_PER_FLUSH and (not self._running or self._running[-1].done()):
            self._handed = self._writer.size
            self._running.append(_flusher.submit(self._writer.sync))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        wait(self._running)
        try:
            if error is None:  # an error of theirs is told once: the caller's own sync would not hear of it
                for flush in self._running:
                    flush.result()
        except BaseException:
            self._writer.cut(self._begun)
            raise
        if error is not None:
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
    encoded = threads.map(encode, chunks)
    with _Flushes(writer) as flushes:
        while some := list(itertools.islice(encoded, _FRAMES_PER_WRITE)):
            done.offsets.extend(writer.append(some))
            done.lengths.extend(frame.size for frame in some)
            done.counts.extend(frame.count for frame in some)
            flushes.look()
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
