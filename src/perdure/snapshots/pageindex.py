"""The cumulative index of one snapshot's memory: every page that differs from the base, and where its content is.

A page is in the index if and only if its bytes differ from the base's: either located (segment, frame, slot) or zero. All other
pages are the base's. An index is complete by itself: a wake reads one index, whatever number of captures lies behind it.

On disk: magic "PDRIDX01" | header length u32 | JSON header, padded to 8 bytes | columns, compressed together | xxh3_64 of all
before it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import SegmentId, is_id
from perdure.machines.driver import PageNumbers

_MAGIC = b"PDRIDX01"
_VERSION = 1

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


def _none32() -> U32:
    return np.empty(0, np.uint32)


def _none8() -> U8:
    return np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames an index refers to. ``segment`` indexes ``ids``; offsets and lengths are bytes, counts pages."""

    ids: tuple[SegmentId, ...] = ()
    segment: U16 = field(default_factory=lambda: np.empty(0, np.uint16))
    offset: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    length: U32 = field(default_factory=_none32)
    count: U8 = field(default_factory=_none8)

    def __len__(self) -> int:
        return len(self.segment)

    def pick(self, frames: U32) -> Frames:
        """These frames in this order, with only the segments they are in."""
        used, segment = np.unique(self.segment[frames], return_inverse=True)
        ids = tuple(self.ids[number] for number in used)
        return Frames(ids, segment.astype(np.uint16), self.offset[frames], self.length[frames], self.count[frames])

    def plus(self, segment_id: SegmentId, offsets: Sequence[int], lengths: Sequence[int], counts: Sequence[int]) -> Frames:
        """These frames followed by new ones of one segment."""
        ids = self.ids if segment_id in self.ids else (*self.ids, segment_id)
        added = np.full(len(offsets), ids.index(segment_id), np.uint16)
        return Frames(
            ids,
            np.concatenate((self.segment, added)),
            np.concatenate((self.offset, np.array(offsets, np.uint64))),
            np.concatenate((self.length, np.array(lengths, np.uint32))),
            np.concatenate((self.count, np.array(counts, np.uint8))),
        )


@dataclass(frozen=True, slots=True)
class PageIndex:
    """``pages`` (ascending) are at (``frame``, ``slot``); ``zeros`` (ascending) are zero where the base is not."""

    page_count: int  # pages of RAM
    pages: PageNumbers = field(default_factory=_none32)
    frame: U32 = field(default_factory=_none32)
    slot: U8 = field(default_factory=_none8)
    zeros: PageNumbers = field(default_factory=_none32)
    frames: Frames = field(default_factory=Frames)

    def find(self, pages: PageNumbers) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """For each page whether it is located here, and its position in ``pages`` where it is."""
        return _find(self.pages, pages)

    def segments(self) -> frozenset[SegmentId]:
        return frozenset(self.frames.ids)

    def ends(self) -> dict[SegmentId, int]:
        """For each segment the end of the last frame referred to: a shorter file cannot hold this snapshot."""
        ends = self.frames.offset + self.frames.length
        return {name: int(ends[self.frames.segment == number].max()) for number, name in enumerate(self.frames.ids)}

    def live_bytes(self) -> dict[SegmentId, int]:
        """Bytes per segment that this index needs: of each frame the share of its pages still referred to."""
        used = np.bincount(self.frame, minlength=len(self.frames))
        live = self.frames.length * (used / np.maximum(self.frames.count, 1))
        sums = np.bincount(self.frames.segment, weights=live, minlength=len(self.frames.ids))
        return {name: int(total) for name, total in zip(self.frames.ids, sums, strict=True)}

    def stored_bytes(self) -> int:
        """Bytes of all frames this index refers to."""
        return int(self.frames.length.sum(dtype=np.int64))

    def to_bytes(self) -> bytes:
        """The file's content."""
        header = json.dumps(
            {
                "version": _VERSION,
                "page_count": self.page_count,
                "pages": len(self.pages),
                "zeros": len(self.zeros),
                "frames": len(self.frames),
                "segments": self.frames.ids,
            }
        ).encode()
        header += b" " * (-(len(_MAGIC) + 4 + len(header)) % 8)
        columns = (
            _steps(self.pages),
            _steps(self.zeros),
            self.frame.astype("<u4"),
            self.slot.astype("u1"),
            self.frames.segment.astype("<u2"),
            self.frames.offset.astype("<u8"),
            self.frames.length.astype("<u4"),
            self.frames.count.astype("u1"),
        )
        body = zstandard.ZstdCompressor(level=1).compress(b"".join(column.tobytes() for column in columns))
        data = b"".join((_MAGIC, struct.pack("<I", len(header)), header, body))
        return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))

    @staticmethod
    def from_bytes(data: bytes, name: str) -> PageIndex:
        """Raises CorruptSnapshot naming ``name`` unless every check holds."""
        try:
            return _decode(data)
        except (ValueError, KeyError, TypeError, IndexError, struct.error, zstandard.ZstdError) as error:
            raise CorruptSnapshot(f"The memory index {name} is damaged: {error}.", file=name) from error


def _decode(data: bytes) -> PageIndex:
    if len(data) < 20 or data[:8] != _MAGIC or xxhash.xxh3_64_intdigest(data[:-8]) != struct.unpack("<Q", data[-8:])[0]:
        raise ValueError("its checksum does not hold")
    (header_bytes,) = struct.unpack_from("<I", data, 8)
    header = json.loads(data[12 : 12 + header_bytes])
    if header["version"] != _VERSION:
        raise ValueError(f"it has format {header['version']}, this release reads {_VERSION}")
    pages, zeros, frames = (int(header[key]) for key in ("pages", "zeros", "frames"))
    sizes = (4 * pages, 4 * zeros, 4 * pages, pages, 2 * frames, 8 * frames, 4 * frames, frames)
    body = zstandard.ZstdDecompressor().decompress(data[12 + header_bytes : -8], max_output_size=sum(sizes) or 1)
    if len(body) != sum(sizes):
        raise ValueError("its columns have the wrong length")
    cuts = np.cumsum((0, *sizes))
    types = ("<u4", "<u4", "<u4", "u1", "<u2", "<u8", "<u4", "u1")
    cols = [np.frombuffer(body[int(cuts[i]) : int(cuts[i + 1])], types[i]) for i in range(len(types))]
    index = PageIndex(
        page_count=int(header["page_count"]),
        pages=np.cumsum(cols[0], dtype=np.uint32),
        zeros=np.cumsum(cols[1], dtype=np.uint32),
        frame=cols[2],
        slot=cols[3],
        frames=Frames(tuple(SegmentId(name) for name in header["segments"]), *cols[4:8]),
    )
    _check(index)
    return index


def _check(index: PageIndex) -> None:
    if not all(is_id(name, "seg") for name in index.frames.ids):
        raise ValueError("it has a name of a segment that none can have")
    for pages in (index.pages, index.zeros):
        if len(pages) and (int(pages[-1]) >= index.page_count or not (pages[1:] > pages[:-1]).all()):
            raise ValueError("its page numbers are out of order")
    if len(index.frame) and int(index.frame.max()) >= len(index.frames):
        raise ValueError("it names a frame that it does not have")
    if len(index.frames) and int(index.frames.segment.max()) >= len(index.frames.ids):
        raise ValueError("it names a segment that it does not have")


def _steps(pages: PageNumbers) -> U32:
    """Differences between neighbours, which compress to almost nothing."""
    return np.diff(pages, prepend=np.uint32(0)).astype("<u4")


def _find(where: PageNumbers, pages: PageNumbers) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    if not len(where):
        return np.zeros(len(pages), bool), np.zeros(len(pages), np.intp)
    at = np.minimum(np.searchsorted(where, pages), len(where) - 1)
    return where[at] == pages, at
