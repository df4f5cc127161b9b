"""Segments: append-only files of page content, made of checksummed frames.

A frame holds up to 64 pages. Frames are immutable once a manifest refers to them, so forks share segments and a segment may grow
while older snapshots use it. A torn tail after a crash belongs to no manifest: nobody reads it.

Layout (little endian, everything aligned to 8 bytes)::

    segment   magic "PDRSEG01" | segment id, 56 bytes, zero padded | frame ...
    frame     magic "FRM1" | pages u16 | codec u8 | 0 u8 | payload bytes u32 | 0 u32 | check u64
              xxh3_64 of each page's content, u64 each | page numbers, u32 each, padded
              payload, padded

``check`` covers the header before it and both tables; the page hashes cover the payload after decoding. A page is believed only
when both hold and the frame says that the page is the one the index meant.

Codecs: ``RAW`` is the pages; ``WORDS`` is, against the base's pages, a bitmap of the 64-bit words that differ and those words;
``ZSTD`` and ``WORDS_ZSTD`` are the same, compressed where that pays. Most pages that a guest touches differ from the base in a
few words; sparse and dense pages do not share a frame.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from perdure.core.errors import CorruptSnapshot
from perdure.core.files import DISK, Disk, Handle, no_space_named
from perdure.core.ids import SegmentId
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages

FRAME_PAGES = 64
WORDS_PER_PAGE = PAGE_SIZE // 8
#: A page that differs from the base in at most so many words is sparse.
SPARSE_WORDS = WORDS_PER_PAGE // 4

_MAGIC = b"PDRSEG01"
_SEGMENT_HEADER = 64
_FRAME_MAGIC = b"FRM1"
_FRAME = struct.Struct("<4sHBBII")
_FRAME_HEADER = _FRAME.size + 8
_TABLES_END_MAX = _FRAME_HEADER + 12 * FRAME_PAGES
_NO_HEAD = "a frame has no valid head"
_ZSTD_LEVEL = 3
_PROBE = slice(PAGE_SIZE // 2 - 128, PAGE_SIZE // 2 + 128)
_PAGES_PROBED_MIN = 16  # of fewer the probe is no smaller than what it saves
_WORTH_COMPRESSING = 0.97  # of the size: what hardly shrinks is stored as it is and read without a copy

Hashes = npt.NDArray[np.uint64]


class Codec(IntEnum):
    RAW = 0
    ZSTD = 1
    WORDS = 2
    WORDS_ZSTD = 3


_CODECS = frozenset(map(int, Codec))
_PLAIN = {Codec.ZSTD: Codec.RAW, Codec.WORDS_ZSTD: Codec.WORDS}


class _Mine(threading.local):
    """A thread's own: to make one costs as much as to pack some frames with it, and no two threads may use one at a time."""

    def __init__(self) -> None:
        self.packer = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self.prober = zstandard.ZstdCompressor(level=1)
        self.unpacker = zstandard.ZstdDecompressor()


_mine = _Mine()


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame's head and its payload as stored."""

    codec: Codec
    pages: PageNumbers
    hashes: Hashes
    payload: memoryview


def page_hashes(content: Pages) -> Hashes:
    """xxh3_64 of every page."""
    digest = xxhash.xxh3_64_intdigest
    view = np.ascontiguousarray(content).reshape(-1).data
    ends = range(0, len(content) * PAGE_SIZE, PAGE_SIZE)
    return np.fromiter((digest(view[at : at + PAGE_SIZE]) for at in ends), np.uint64, len(content))


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A frame ready to be written: its parts in order, ``size`` bytes together."""

    parts: tuple[bytes | memoryview, ...]
    size: int
    count: int


def encode_frame(pages: PageNumbers, content: Pages, base: Pages, codec: Codec, hashes: Hashes | None = None) -> EncodedFrame:
    """One frame of at most 64 pages, padded. ``base`` is the base's content of the same pages. ``content`` is not copied.
    ``hashes`` are those of ``content``, where somebody has them already.

    A ``codec`` that compresses becomes its plain kin where that does not pay.
    """
    if not 0 < len(pages) <= FRAME_PAGES:
        raise ValueError(f"a frame holds 1 to {FRAME_PAGES} pages, not {len(pages)}")
    codec, payload = _pack(content, base, codec)
    head = _FRAME.pack(_FRAME_MAGIC, len(pages), codec, 0, len(payload), 0)
    tables = _padded((page_hashes(content) if hashes is None else hashes).astype("<u8").tobytes() + pages.astype("<u4").tobytes())
    check = struct.pack("<Q", xxhash.xxh3_64_intdigest(head + tables))
    parts = (head + check + tables, payload, bytes(-len(payload) % 8))
    return EncodedFrame(parts, sum(map(len, parts)), len(pages))


def decode_head(data: memoryview, where: str) -> Frame:
    """Check a frame's head; raises CorruptSnapshot naming ``where``."""
    frame, end = _decode_tables(data, where)
    if len(data) < end:
        raise corrupt(where, _NO_HEAD)
    return frame


def _decode_tables(data: memoryview, where: str) -> tuple[Frame, int]:
    """A frame with as much of its payload as there is, and where that ends."""
    if len(data) < _FRAME_HEADER:
        raise corrupt(where, "it ends too early")
    magic, count, codec, _, payload_bytes, _ = _FRAME.unpack_from(data)
    tables_end = _FRAME_HEADER + _aligned(12 * count)
    if magic != _FRAME_MAGIC or not 0 < count <= FRAME_PAGES or len(data) < tables_end:
        raise corrupt(where, _NO_HEAD)
    (check,) = struct.unpack_from("<Q", data, _FRAME.size)
    digest = xxhash.xxh3_64(data[: _FRAME.size])
    digest.update(data[_FRAME_HEADER:tables_end])
    if digest.intdigest() != check or codec not in _CODECS:
        raise corrupt(where, "a frame's checksum does not hold")
    hashes = np.frombuffer(data, "<u8", count, _FRAME_HEADER)
    pages = np.frombuffer(data, "<u4", count, _FRAME_HEADER + 8 * count)
    end = tables_end + payload_bytes
    return Frame(Codec(codec), pages, hashes, data[tables_end:end]), end


def decode_pages(frame: Frame, base: Pages, where: str) -> Pages:
    """The content of all pages of a frame. Hashes are not checked here.

    ``base`` is a copy of the base's content of ``frame.pages``, which is overwritten; it may be empty unless ``needs_base``.
    """
    count = len(frame.pages)
    try:
        return _unpack(frame, base, count)
    except (ValueError, zstandard.ZstdError) as error:
        raise corrupt(where, "a frame cannot be decoded") from error


def needs_base(codec: Codec) -> bool:
    return codec in (Codec.WORDS, Codec.WORDS_ZSTD)


class SegmentWriter:
    """Appends frames to one segment. One writer at a time; made durable by ``sync``."""

    def __init__(self, directory: Path, segment_id: SegmentId, disk: Disk = DISK) -> None:
        self.segment_id = segment_id
        self.path = directory / segment_file(segment_id)
        self._directory = directory
        self._disk = disk
        self._handle: Handle | None = None
        self.size = 0  # bytes of complete frames, header included; 0 while there is no file

    def append(self, frames: Sequence[EncodedFrame]) -> list[int]:
        """Write frames; returns their offsets. On a full disk raises NoSpace, and the file ends where it ended before."""
        with no_space_named(self.path):
            handle = self._handle or self._create()
            offsets, at = [], self.size
            for frame in frames:
                offsets.append(at)
                at += frame.size
            try:
                handle.write(*(part for frame in frames for part in frame.parts))
            except OSError:
                handle.cut(self.size)
                raise
        self.size = at
        return offsets

    def cut(self, size: int) -> None:
        """Take back what was appended after ``size`` and is referred to by nobody."""
        if self._handle is not None and self.size > size:
            self._handle.cut(max(size, _SEGMENT_HEADER))
            self.size = self._handle.size

    def sync(self) -> None:
        if self._handle is not None:
            with no_space_named(self.path):
                self._handle.sync()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _create(self) -> Handle:
        """The file, with its header; its name is durable when this returns, so that ``sync`` need not touch the directory."""
        handle = self._disk.create(self.path, 0o644)
        try:
            handle.write(_MAGIC + self.segment_id.encode().ljust(_SEGMENT_HEADER - len(_MAGIC), b"\0"))
            self._disk.sync_dir(self._directory)
        except OSError:
            handle.close()
            self._disk.unlink(self.path)
            raise
        self._handle, self.size = handle, handle.size
        return handle


class SegmentReader:
    """Reads frames of one segment. Raises CorruptSnapshot when the file is missing or is not that segment."""

    def __init__(self, directory: Path, segment_id: SegmentId) -> None:
        self.name = segment_file(segment_id)
        self._fd = -1
        try:
            self._fd = os.open(directory / self.name, os.O_RDONLY | os.O_CLOEXEC)
            header = os.pread(self._fd, _SEGMENT_HEADER, 0)
        except FileNotFoundError as error:
            raise corrupt(self.name, "the file is missing") from error
        except OSError as error:
            self.close()
            raise corrupt(self.name, f"it cannot be read ({error.strerror})") from error
        if header[: len(_MAGIC)] != _MAGIC or header[len(_MAGIC) :].rstrip(b"\0") != segment_id.encode():
            self.close()
            raise corrupt(self.name, "its header is not that of this segment")

    def frame(self, offset: int, length: int) -> Frame:
        return decode_head(memoryview(self.stored(offset, length)), self.name)

    def head(self, offset: int, length: int) -> Frame:
        """The frame with a piece of its payload at most: no more is read."""
        return _decode_tables(memoryview(self.stored(offset, min(length, _TABLES_END_MAX))), self.name)[0]

    def stored(self, offset: int, length: int) -> bytes:
        """A frame as it is in the file."""
        try:
            data = os.pread(self._fd, length, offset)
        except OSError as error:
            raise corrupt(self.name, f"it cannot be read ({error.strerror})") from error
        if len(data) != length:
            raise corrupt(self.name, "it ends too early")
        return data

    def check_end(self, end: int) -> None:
        """Raises CorruptSnapshot when the file is shorter than what a snapshot needs of it."""
        if os.fstat(self._fd).st_size < end:
            raise corrupt(self.name, "it ends too early")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def segment_file(segment_id: SegmentId) -> str:
    return f"{segment_id}.pages"


def _pack(content: Pages, base: Pages, codec: Codec) -> tuple[Codec, bytes | memoryview]:
    plain: bytes | memoryview = np.ascontiguousarray(content).data.cast("B")
    if needs_base(codec):
        words = np.ascontiguousarray(content).view(np.uint64)
        mask = words != np.ascontiguousarray(base).view(np.uint64)
        plain = np.packbits(mask).tobytes() + words[mask].tobytes()
    if codec not in _PLAIN:
        return codec, plain
    if codec is Codec.ZSTD and not _shrinks(content):
        return _PLAIN[codec], plain
    packed = _mine.packer.compress(plain)
    return (codec, packed) if len(packed) < _WORTH_COMPRESSING * len(plain) else (_PLAIN[codec], plain)


def _shrinks(content: Pages) -> bool:
    """Whether it pays to try: a sixteenth of each page, its middle, is tried first. Of random bytes zstd finds out no faster
    than it compresses others."""
    if len(content) < _PAGES_PROBED_MIN:
        return True
    probe = np.ascontiguousarray(content[:, _PROBE]).data.cast("B")
    return len(_mine.prober.compress(probe)) < _WORTH_COMPRESSING * len(probe)


def _unpack(frame: Frame, base: Pages, count: int) -> Pages:
    payload: bytes | memoryview = frame.payload
    if frame.codec in _PLAIN:
        bitmap = count * WORDS_PER_PAGE // 8
        payload = _mine.unpacker.decompress(payload, max_output_size=bitmap + count * PAGE_SIZE)
    if not needs_base(frame.codec):
        return np.frombuffer(payload, np.uint8).reshape(count, PAGE_SIZE)
    bits = np.frombuffer(payload, np.uint8, count * WORDS_PER_PAGE // 8)
    mask = np.unpackbits(bits).view(bool).reshape(count, WORDS_PER_PAGE)
    words = np.frombuffer(payload, np.uint64, -1, len(bits))
    base.view(np.uint64)[mask] = words
    return base


def _aligned(size: int) -> int:
    return (size + 7) & ~7


def _padded(data: bytes) -> bytes:
    return data if len(data) % 8 == 0 else data + bytes(-len(data) % 8)


def corrupt(name: str, why: str) -> CorruptSnapshot:
    """The error that names a damaged segment."""
    return CorruptSnapshot(f"The stored pages in {name} are damaged: {why}.", file=f"segments/{name}")
