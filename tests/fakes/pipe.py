"""A byte stream in memory with a small window, and the far end of it for a test to play: what a program in a workspace may do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import cast

from websockets.frames import Frame
from websockets.protocol import OPEN, SERVER, Protocol

from perdure.core.errors import MachineFailed

DEADLINE_S = 20.0
WINDOW_BYTES = 65536


class _Lane:
    """One direction."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.taken = 0
        self.ended = False
        self.broken = False
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()

    async def read(self, limit: int) -> bytes:
        while not self.data:
            if self.broken:
                raise MachineFailed("The connection was reset.")
            if self.ended:
                return b""
            await self.wait()
        part = bytes(self.data[:limit])
        del self.data[:limit]
        self.taken += len(part)
        self.tell()
        return part

    async def write(self, data: bytes) -> None:
        while True:
            if self.broken or self.ended:
                raise MachineFailed("The connection was reset.")
            room = WINDOW_BYTES - len(self.data)
            self.data += data[:room]
            data = data[room:]
            self.tell()
            if not data:
                return
            await self.wait()


class PipeStream:
    """Implements ``wire.node.ByteStream``."""

    def __init__(self, inward: _Lane, outward: _Lane) -> None:
        self._inward, self._outward = inward, outward
        self.closed = asyncio.Event()

    async def read(self, limit: int = 65536) -> bytes:
        return await self._inward.read(limit)

    async def write(self, data: bytes) -> None:
        await self._outward.write(data)

    async def close_write(self) -> None:
        self._outward.ended = True
        self._outward.tell()

    async def close(self) -> None:
        self.closed.set()
        for lane in (self._inward, self._outward):
            lane.broken = True
            lane.tell()


class Peer:
    """The far end. Every wait has a deadline."""

    def __init__(self) -> None:
        self._to_peer, self._from_peer = _Lane(), _Lane()
        self.stream = PipeStream(self._from_peer, self._to_peer)

    @property
    def unread(self) -> int:
        """Bytes that were written to it and that it has not looked at."""
        return len(self._to_peer.data)

    @property
    def accepted(self) -> int:
        """Bytes of its own that left it: read on the other side, or on their way there."""
        return self._from_peer.taken + len(self._from_peer.data)

    async def read(self, limit: int = 65536) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self._to_peer.read(limit)

    async def read_until(self, end: bytes) -> bytes:
        """All up to and with ``end``."""
        async with asyncio.timeout(DEADLINE_S):
            while (at := self._to_peer.data.find(end)) < 0:
                assert not (self._to_peer.ended or self._to_peer.broken), f"ended after {bytes(self._to_peer.data)!r}"
                await self._to_peer.wait()
            return await self._to_peer.read(at + len(end))

    async def drain(self, end: bytes) -> int:
        """Read and forget all up to and with ``end``, where nothing comes after it; how much that was."""
        count, tail = 0, b""
        while not tail.endswith(end):
            data = await self.read()
            assert data, "it ended before"
            count, tail = count + len(data), (tail + data)[-len(end) :]
        return count

    async def head(self) -> list[bytes]:
        """The lines of a request's head."""
        return (await self.read_until(b"\r\n\r\n")).split(b"\r\n")[:-2]

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self._from_peer.write(data)

    def end(self) -> None:
        """Say no more."""
        self._from_peer.ended = True
        self._from_peer.tell()

    def reset(self) -> None:
        """Break both directions."""
        for lane in (self._from_peer, self._to_peer):
            lane.broken = True
            lane.tell()

    async def left(self) -> None:
        """Until the other side has closed."""
        async with asyncio.timeout(DEADLINE_S):
            await self.stream.closed.wait()


class SocketProgram:
    """A program that speaks WebSocket at the far end."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.protocol = Protocol(SERVER, state=OPEN)
        self.head: list[bytes] = []

    async def accept(self, *more: bytes, key: bytes | None = None) -> None:
        """Answer the handshake, with ``more`` header lines; ``key`` instead of the right one."""
        self.head = await self.peer.head()
        (asked,) = [line.partition(b": ")[2] for line in self.head if line.startswith(b"sec-websocket-key")]
        good = base64.b64encode(hashlib.sha1(asked + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        lines = [b"HTTP/1.1 101 Go", b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Accept: " + (key or good)]
        await self.peer.send(b"\r\n".join([*lines, *more]) + b"\r\n\r\n")

    async def say(self, *frames: Frame) -> None:
        for frame in frames:
            self.protocol.send_frame(frame)
        await self.peer.send(b"".join(self.protocol.data_to_send()))

    async def hear(self) -> list[Frame]:
        """Frames that have arrived, at least one."""
        while True:
            self.protocol.receive_data(await self.peer.read())
            if found := self.protocol.events_received():
                return [cast(Frame, one) for one in found]
