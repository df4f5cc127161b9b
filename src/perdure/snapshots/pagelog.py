"""The page log: captures append what changed, the index says where everything is.

``record`` takes what a capture copied and the index of the last captured content. It runs after the VM goes on and decides for
every page, by its bytes: unchanged (keep its place), equal to the base (omit), zero (say so), or changed (append). Nothing is
decided by a hash: a guest could make two pages collide.

All functions are synchronous and use a few threads; call them through ``asyncio.to_thread``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import SegmentId
from perdure.machines.driver import GuestMemory, PageNumbers, Pages
from perdure.machines.pageroom import make_room
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.bases import Abandoned
from perdure.snapshots.flushes import Flushes
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pagekinds import Classified, Mask, classify, same_rows, take
from perdure.snapshots.pageread import Rows, SegmentReaders, by_frame, load, read, stored_hashes, threads
from perdure.snapshots.segments import (
    FRAME_PAGES,
    Codec,
    EncodedFrame,
    Hashes,
    SegmentWriter,
    encode_frame,
    page_hashes,
)

#: Units of work of a thread. Those that compare are small, so that both sides stay in the processor's cache.
BATCH_PAGES = 256
_FRAMES_PER_COMPARE = 4
_FRAMES_PER_WRITE = 16
_FRAMES_PER_MOVE = 64
FRAME_LIVE_SHARE = 0.5
_SLOT_BITS, _PLACE_BITS = 8, 52  # of the number of a place: slot, then offset, then segment

Places = npt.NDArray[np.uint64]

#: ``map``, here or in threads.
_Run = Callable[[Callable[[Rows], Classified], Iterable[Rows]], Iterable[Classified]]

#: Of a machine that stands still so many pages are read at once, and go through all steps in one thread: what lies in the
#: processor's cache is read from memory once.
_STILL_PAGES = 1024


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
class Recorded:
    """What one ``record`` did. Bytes are as stored, frame heads included. ``damaged``: something stored cannot be read, and was
    not copied; a capture of all pages writes it anew."""

    index: PageIndex
    pages_changed: int
    appended_bytes: int
    damaged: bool = False


def record(
    directory: Path,
    last: PageIndex,
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
        return _record_still(directory, _without(last, leave), base, content, writer)
    if isinstance(content, LatelyWritten):
        return _record_lately(directory, last, base, (written, content), writer, leave)
    last = _without(last, leave)
    kept, zeros, appended = _record_part(directory, last, base, (written, content), writer, crumbs=False)
    return _recorded(last, kept, zeros, (appended,))


def _record_still(directory: Path, last: PageIndex, base: BaseRam, still: StillPages, writer: SegmentWriter) -> Recorded:
    """Threads take part after part, from its reading to its writing, and the disk takes what is written meanwhile."""
    one_writes = threading.Lock()
    with Flushes(writer) as flushes, SegmentReaders(directory) as readers:
        readers.open_all(last.frames.ids)

        def record_part(at: int) -> tuple[Rows, PageNumbers, _Appended]:
            kept, zeros, pages, frames = _make_ready(readers, last, base, still, at)
            with one_writes:
                offsets = writer.append(frames) if frames else []
                flushes.look()
            appended = _Appended(writer.segment_id, pages, [], [], [])
            appended.add(frames, offsets)
            return kept, zeros, appended

        parts = [threads.submit(record_part, at) for at in range(0, max(1, len(still)), _STILL_PAGES)]
        try:
            done = [part.result() for part in parts]
        finally:
            for part in parts:
                part.cancel()
            wait(parts)  # nobody may read a machine that goes on, nor segments that are closed
    kept, zeros, appended = zip(*done, strict=True)
    kept, crumbs = _swept(last, np.concatenate(kept), base, still, writer)
    return _recorded(last, kept, np.concatenate(zeros), (*appended, *crumbs))


def _swept(last: PageIndex, kept: Rows, base: BaseRam, still: StillPages, writer: SegmentWriter) -> tuple[Rows, list[_Appended]]:
    """The last few pages that are needed of a frame are appended anew: how few they are is known when all parts are done."""
    few = _crumbs(last, kept)[last.frame[kept]]
    if not few.any():
        return kept, []
    pages = np.sort(last.pages[kept[few]])
    content = still.memory.read_pages(pages, make_room(len(pages), ahead=False))
    kinds = classify(base, pages, content, np.arange(len(pages)))
    return kept[~few], [_append(pages, content, _all_chunks(kinds), base, writer)]


def _make_ready(
    readers: SegmentReaders, last: PageIndex, base: BaseRam, still: StillPages, at: int
) -> tuple[Rows, PageNumbers, PageNumbers, list[EncodedFrame]]:
    """Of the part that begins there: positions of the last index that stand, zero pages, and frames with the pages in them."""
    written = still.pages[at : at + _STILL_PAGES]
    content = still.memory.read_pages(written, make_room(len(written), ahead=False))
    hashes = page_hashes(content)
    unchanged, kept = _unchanged_by_frame(readers, last, base, (written, content), hashes)
    zeros, chunks = _sorted_out(base, written, content, unchanged, map)
    frames = [_encode(written, content, chunk, base, hashes) for chunk in chunks]
    return kept, zeros, _pages_in(chunks, written), frames


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
    with Flushes(writer) as flushes, SegmentReaders(directory) as readers:
        part = (lately.pages, lately.content)
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
            part = (last.pages[some], content)
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
    captured: tuple[PageNumbers, Pages],
    writer: SegmentWriter,
    *,
    crumbs: bool,
) -> tuple[Rows, PageNumbers, _Appended]:
    """Append what of these pages differs; which positions of ``last`` stand, which pages are zero, and what was appended.

    ``crumbs`` may stand where these pages are not all: what is needed of a frame is known from all of them only.
    """
    written, content = captured
    unchanged, kept = _unchanged(directory, last, base, captured)
    if not crumbs:
        unchanged, kept = _without_crumbs(last, unchanged, kept)
    zeros, chunks = _sorted_out(base, written, content, unchanged, threads.map)
    return kept, zeros, _append(written, content, chunks, base, writer)


def _sorted_out(
    base: BaseRam, written: PageNumbers, content: Pages, unchanged: Mask, run: _Run
) -> tuple[PageNumbers, list[_Chunk]]:
    """Of the pages that are not unchanged: which are zero, and the frames that are to be made of the others."""
    rest = np.flatnonzero(~unchanged)
    batches = [rest[at : at + BATCH_PAGES] for at in range(0, max(1, len(rest)), BATCH_PAGES)]
    parts = list(run(lambda rows: classify(base, written, content, rows), batches))
    zeros = written[np.concatenate([part.zero for part in parts])]
    chunks: list[_Chunk] = []
    for sparse in (True, False):
        rows = np.concatenate([part.sparse if sparse else part.dense for part in parts])
        chunks += _chunks(rows, sparse=sparse)
    return zeros, chunks


def rewrite(
    directory: Path,
    indexes: Sequence[PageIndex],
    base: BaseRam,
    segments: frozenset[SegmentId],
    writer: SegmentWriter,
    enough: threading.Event,
) -> list[PageIndex]:
    """Append the pages that these indexes have in ``segments`` to another segment, what several have there once; the new indexes
    need those no more. All of them are differences from ``base``.

    Raises CorruptSnapshot when a page's checksum does not hold: damage is never copied as if it were good. Abandoned as soon as
    it is ``enough``; what is appended is then nobody's.
    """
    order = sorted(segments)
    found = [places(index, order) for index in indexes]
    pages, content, moved = [indexes[0].pages[:0]], [base.pages[:0]], [np.empty(0, np.uint64)]
    for index, (positions, where) in zip(indexes, found, strict=True):
        is_new = np.isin(where, np.concatenate(moved), invert=True)
        part, part_where = _only(index, positions[is_new]), where[is_new]
        for some, loaded in load(directory, part, base):
            if enough.is_set():
                raise Abandoned
            pages.append(some)
            content.append(loaded)
            moved.append(part_where[part.find(some)[1]])
    all_pages, all_content = np.concatenate(pages), np.concatenate(content)
    kinds = classify(base, all_pages, all_content, np.argsort(all_pages))
    chunks = _all_chunks(kinds)
    appended = _append(all_pages, all_content, chunks, base, writer)
    was = np.concatenate(moved)[np.concatenate([kinds.sparse[:0], *(chunk.rows for chunk in chunks)])]
    by_place = np.argsort(was)
    done = []
    for index, (positions, where) in zip(indexes, found, strict=True):
        mine = by_place[np.searchsorted(was, where, sorter=by_place)] if len(where) else by_place[:0]
        assert np.array_equal(was[mine], where), "what an index locates is neither zero nor the base's"
        kept = np.setdiff1d(np.arange(len(index.pages)), positions, assume_unique=True)
        done.append(_joined(index, kept, index.zeros, appended, mine))
    return done


def places(index: PageIndex, segments: Sequence[SegmentId]) -> tuple[Rows, Places]:
    """Positions of the pages that an index has in these segments, and where each is there, as one number: that of another index
    is the same for the same place."""
    number_of = np.array([segments.index(name) if name in segments else -1 for name in index.frames.ids], np.int64)
    segment = number_of[index.frames.segment[index.frame]]
    positions = np.flatnonzero(segment >= 0)
    frame = index.frame[positions]
    offset = index.frames.offset[frame] << np.uint64(_SLOT_BITS)
    return positions, segment[positions].astype(np.uint64) << np.uint64(_PLACE_BITS) | offset | index.slot[positions]


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


def _all_chunks(kinds: Classified) -> list[_Chunk]:
    return _chunks(kinds.sparse, sparse=True) + _chunks(kinds.dense, sparse=False)


def _chunks(rows: Rows, *, sparse: bool) -> list[_Chunk]:
    return [_Chunk(rows[at : at + FRAME_PAGES], sparse) for at in range(0, len(rows), FRAME_PAGES)]


def _places(last: PageIndex, written: PageNumbers) -> tuple[Mask, Rows, Rows]:
    """Which captured pages the last index has, where each is in it, and back: of those positions the rows."""
    found, at = last.find(written)
    row_of = np.zeros(len(last.pages), np.intp)
    row_of[at[found]] = np.flatnonzero(found)
    return found, at, row_of


def _unchanged(directory: Path, last: PageIndex, base: BaseRam, captured: tuple[PageNumbers, Pages]) -> tuple[Mask, Rows]:
    """Which captured pages are as they were, and their positions in the last index. Each frame is read once."""
    written, content = captured
    found, at, row_of = _places(last, written)
    same = np.zeros(len(written), bool)

    def compare(positions: Rows) -> None:
        try:
            before = read(readers, last, positions, base, False)
        except CorruptSnapshot:
            return  # what cannot be read is written anew: the log mends itself
        rows = row_of[positions]
        same[rows] = same_rows(take(content, rows), before)

    with SegmentReaders(directory) as readers:
        readers.open_all(last.frames.ids)
        for _ in threads.map(compare, by_frame(last, at[found], _FRAMES_PER_COMPARE)):
            pass
    return same, at[same]


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

    def add(self, frames: Sequence[EncodedFrame], offsets: Sequence[int]) -> None:
        self.offsets.extend(offsets)
        self.lengths.extend(frame.size for frame in frames)
        self.counts.extend(frame.count for frame in frames)


def _pages_in(chunks: Sequence[_Chunk], written: PageNumbers) -> PageNumbers:
    """The pages of these frames, one frame after the other."""
    return np.concatenate([written[:0], *(written[chunk.rows] for chunk in chunks)])


def _unchanged_by_frame(
    readers: SegmentReaders, last: PageIndex, base: BaseRam, captured: tuple[PageNumbers, Pages], hashes: Hashes
) -> tuple[Mask, Rows]:
    """As ``_unchanged``, in the calling thread. Of a frame none of whose pages has the checksum that is stored of it no more than
    the head is read: no page is as it was."""
    written, content = captured
    found, at, row_of = _places(last, written)
    same = np.zeros(len(written), bool)
    for positions in by_frame(last, at[found], 1):
        rows = row_of[positions]
        try:
            if (stored_hashes(readers, last, positions) == hashes[rows]).any():
                same[rows] = same_rows(take(content, rows), read(readers, last, positions, base, False))
        except CorruptSnapshot:
            continue  # what cannot be read is written anew: the log mends itself
    return same, at[same]


def _append(written: PageNumbers, content: Pages, chunks: list[_Chunk], base: BaseRam, writer: SegmentWriter) -> _Appended:
    """Write the chunks as frames, encoded by several threads and written in order while others encode."""

    def encode(chunk: _Chunk) -> EncodedFrame:
        return _encode(written, content, chunk, base, None)

    done = _Appended(writer.segment_id, _pages_in(chunks, written), [], [], [])
    encoded = threads.map(encode, chunks)
    with Flushes(writer) as flushes:
        while some := list(itertools.islice(encoded, _FRAMES_PER_WRITE)):
            done.add(some, writer.append(some))
            flushes.look()
    return done


def _encode(written: PageNumbers, content: Pages, chunk: _Chunk, base: BaseRam, hashes: Hashes | None) -> EncodedFrame:
    pages, some = written[chunk.rows], take(content, chunk.rows)
    codec = Codec.WORDS_ZSTD if chunk.sparse else Codec.ZSTD
    below = base.read(pages if chunk.sparse else pages[:0])
    return encode_frame(pages, some, below, codec, None if hashes is None else hashes[chunk.rows])


def _joined(last: PageIndex, kept: Rows, zeros: PageNumbers, appended: _Appended, mine: Rows | None = None) -> PageIndex:
    """The new index: kept places, and the new ones, or ``mine`` of those."""
    used, old_frame = np.unique(last.frame[kept], return_inverse=True)
    table = last.frames.pick(used.astype(np.uint32))
    counts = np.array(appended.counts, np.intp)
    new_frame = np.repeat(np.arange(len(counts)), counts)
    new_slot = np.arange(len(appended.pages)) - np.repeat(np.cumsum(counts) - counts, counts)
    new_pages, needed = appended.pages, np.arange(len(counts))
    if mine is not None:
        new_pages, new_slot = new_pages[mine], new_slot[mine]
        needed, new_frame = np.unique(new_frame[mine], return_inverse=True)
    if len(needed):
        columns = (appended.offsets, appended.lengths, appended.counts)
        table = table.plus(appended.segment, *([column[number] for number in needed] for column in columns))
    pages = np.concatenate((last.pages[kept], new_pages))
    frame = np.concatenate((old_frame.astype(np.uint32), (new_frame + len(used)).astype(np.uint32)))
    slot = np.concatenate((last.slot[kept], new_slot.astype(np.uint8)))
    by_page = np.argsort(pages, kind="stable")
    return PageIndex(last.page_count, pages[by_page], frame[by_page], slot[by_page], zeros, table)
