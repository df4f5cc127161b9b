"""Frames: the bytes on a channel.

A frame is a 12-byte header (type, flags, payload length, stream id, CRC-32 of all that and the payload), the payload, and one end
byte; 64 KiB at most in all. Between frames any number of no-op bytes (zero) may stand.

**Resynchronisation.** A restored machine, or a host that connects anew, meets a peer that may have read half of a frame of a
connection that no longer exists, and nothing on a virtio port tells it so. Every host connection therefore begins with more no-
op bytes than the longest frame (``NOPS``), and then a *sync*: a magic, a random nonce and their CRC-32. The no-ops complete
whatever frame was half read; it never counts, because its last byte is the end byte, which is not zero. After a broken frame
the decoder hunts: it drops all up to the next sync. The guest answers with a sync of the same nonce and the host drops
everything that comes before it. From then on both are at a frame boundary of this connection. An agent that starts sends a sync
with a nonce of zeros, ``ANNOUNCE``: "all that went before is void".
"""

from __future__ import annotations

import struct
import zlib

#: Longest frame, header and end byte included.
FRAME_MAX = 65536
#: type, flags, payload length, stream id, CRC-32 (over the header without it, then the payload).
HEADER = struct.Struct("<BBHII")
_HEADER_BEFORE_CRC = struct.Struct("<BBHI")
END = 0xA5
OVERHEAD = HEADER.size + 1
PAYLOAD_MAX = FRAME_MAX - OVERHEAD
#: Data per frame. A guest's kernel cuts its write to a port at 32 KiB, but what counts is how often Python is asked.
DATA_MAX = PAYLOAD_MAX

NONCE_BYTES = 16
SYNC_MAGIC = b"\xf5perdure\x00\xfesync\xfd\n"
SYNC_BYTES = len(SYNC_MAGIC) + NONCE_BYTES + 4
ANNOUNCE = bytes(NONCE_BYTES)
#: What a host sends before its sync.
NOPS = bytes(FRAME_MAX)


class FrameType:
    """Type bytes. Plain integers: an enum lookup per frame is felt in an emulated guest."""

    OPEN = 1  # JSON: a new stream and what it is for
    ACCEPT = 2  # JSON: the stream is good
    RESET = 3  # JSON {code, message}: refused or broken, both directions at once
    DATA = 4  # bytes; the flags say which of the stream's sub-streams
    MESSAGE = 5  # JSON, in order with the data
    EOF = 6  # nothing more from this side
    CREDIT = 7  # u32: so many more bytes of data may be sent
    CALL = 8  # JSON; the stream id is the call's
    REPLY = 9  # JSON
    NOTE = 10  # JSON; something happened, no answer
    # What the decoder reports beside frames:
    SYNC = 254  # payload: the nonce
    BROKEN = 255  # payload: why, as ASCII; everything up to the next sync is dropped


_LAST_TYPE = FrameType.NOTE

#: What a decoder holds at most.
BUFFER_BYTES = 4 * FRAME_MAX

#: (type, flags, stream id, payload)
Frame = tuple[int, int, int, "bytes | memoryview"]


def encode(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """One frame. Raises ValueError when the payload is longer than PAYLOAD_MAX."""
    size = len(payload)
    if size > PAYLOAD_MAX:
        raise ValueError(f"a payload of {size} bytes does not fit a frame")
    crc = zlib.crc32(payload, zlib.crc32(_HEADER_BEFORE_CRC.pack(kind, flags, size, stream)))
    return b"%b%b\xa5" % (HEADER.pack(kind, flags, size, stream, crc), payload)


def encode_sync(nonce: bytes) -> bytes:
    """A sync. The host sends it after NOPS; the guest echoes it, or sends it with ANNOUNCE."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError("a nonce has 16 bytes")
    body = SYNC_MAGIC + nonce
    return body + struct.pack("<I", zlib.crc32(body))


class Decoder:
    """Bytes in, whole frames out, whatever the cuts. It begins hunting: nothing counts before the first sync.

    A reader that wants no copies reads into ``space()`` and says how much with ``advance``; ``feed`` is for bytes at hand.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0
        self._lend = False
        self.hunting = True

    def space(self) -> memoryview:
        """Where the next bytes go: room for a whole frame at least. Ends the life of every payload lent before."""
        if self._begin == self._end:
            self._begin = self._end = 0  # the same pages again and again: each one touched is one more in the snapshot
        elif BUFFER_BYTES - self._end < FRAME_MAX:
            rest = self._end - self._begin
            self._view[:rest] = bytes(self._view[self._begin : self._end])
            self._begin, self._end = 0, rest
        return self._view[self._end :]

    def advance(self, count: int, *, lend: bool = False) -> list[Frame]:
        """All frames that ``count`` more bytes in ``space()`` complete, syncs and breaks among them, in order.

        With ``lend`` the payloads of data frames are views that hold until the next ``space()``.
        """
        self._end += count
        self._lend = lend
        frames: list[Frame] = []
        position = self._begin
        while True:
            step = self._hunt(position, frames) if self.hunting else self._take(position, frames)
            if step < 0:
                break
            position = step
        self._begin = ~step
        return frames

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """All frames that ``data`` completes."""
        frames: list[Frame] = []
        view = memoryview(data)
        while view:
            space = self.space()
            count = min(len(view), len(space))
            space[:count] = view[:count]
            frames += self.advance(count)
            view = view[count:]
        return frames

    def _hunt(self, position: int, frames: list[Frame]) -> int:
        """Drop everything before a sync. Returns the position after it, or ``~keep_from`` when more bytes are needed."""
        buffer, end = self._buffer, self._end
        while True:
            found = buffer.find(SYNC_MAGIC, position, end)
            if found < 0:
                return ~max(position, end - len(SYNC_MAGIC) + 1)
            if end - found < SYNC_BYTES:
                return ~found
            if self._sync(found, frames):
                return found + SYNC_BYTES
            position = found + 1

    def _sync(self, at: int, frames: list[Frame]) -> bool:
        body = bytes(self._buffer[at : at + SYNC_BYTES])
        if not body.startswith(SYNC_MAGIC) or zlib.crc32(body[:-4]) != int.from_bytes(body[-4:], "little"):
            return False
        self.hunting = False
        frames.append((FrameType.SYNC, 0, 0, body[len(SYNC_MAGIC) : -4]))
        return True

    def _take(self, position: int, frames: list[Frame]) -> int:
        """The next frame at a boundary. Returns the position after it, or ``~keep_from`` when more bytes are needed."""
        buffer, end = self._buffer, self._end
        if position < end and buffer[position] == 0:
            position = end - len(bytes(self._view[position:end]).lstrip(b"\0"))
        if position == end:
            return ~position
        kind = buffer[position]
        if kind == SYNC_MAGIC[0]:
            if end - position < SYNC_BYTES:
                return ~position
            if self._sync(position, frames):
                return position + SYNC_BYTES
            return self._broken(position, frames, b"sync checksum")
        if kind > _LAST_TYPE:
            return self._broken(position, frames, b"unknown frame type")
        if end - position < HEADER.size:
            return ~position
        return self._frame(position, frames)

    def _frame(self, position: int, frames: list[Frame]) -> int:
        buffer, view = self._buffer, self._view
        kind, flags, size, stream, crc = HEADER.unpack_from(buffer, position)
        stop: int = position + HEADER.size + size
        if size > PAYLOAD_MAX:
            return self._broken(position, frames, b"frame length")
        if self._end <= stop:
            return ~position
        if buffer[stop] != END:
            return self._broken(position, frames, b"frame end")
        payload = view[position + HEADER.size : stop]
        if zlib.crc32(payload, zlib.crc32(view[position : position + _HEADER_BEFORE_CRC.size])) != crc:
            return self._broken(position, frames, b"frame checksum")
        frames.append((kind, flags, stream, payload if self._lend and kind == FrameType.DATA else bytes(payload)))
        return stop + 1

    def _broken(self, position: int, frames: list[Frame], why: bytes) -> int:
        self.hunting = True
        frames.append((FrameType.BROKEN, 0, 0, why))
        return position  # hunt from the frame's own first byte: a sync may be inside what it claimed
