"""WebSockets (RFC 6455) as a client, over a byte stream to a program in a workspace.

Messages are passed on whole, up to a size; pings are answered here. No extensions are offered, so nothing is compressed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from contextlib import suppress
from dataclasses import replace

from websockets.exceptions import InvalidState, ProtocolError
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol

from perdure.core.errors import PerdureError, PortClosed, PortMalformed
from perdure.wire.node import ByteStream, Headers, PortAnswer, PortLimits, PortPhase, PortRequest, SocketClosed

#: RFC 6455, section 1.3.
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
ABNORMAL = 1006
TOO_BIG = 1009
#: How long the program may take to agree to an end.
CLOSE_S = 2.0
REASON_BYTES = 123


class Handshake:
    """Makes the request and judges the answer to it."""

    def __init__(self, subprotocols: tuple[str, ...] = ()) -> None:
        self._key = base64.b64encode(os.urandom(16))
        self._subprotocols = subprotocols

    def request(self, request: PortRequest) -> PortRequest:
        """``request`` with what asks for a WebSocket; what it says of that itself is dropped."""
        kept = tuple(pair for pair in request.headers if not pair[0].lower().startswith(b"sec-websocket-"))
        asked: Headers = ((b"sec-websocket-version", b"13"), (b"sec-websocket-key", self._key))
        if self._subprotocols:
            asked = (*asked, (b"sec-websocket-protocol", ", ".join(self._subprotocols).encode("latin-1")))
        return replace(request, method="GET", headers=(*kept, *asked), upgrade="websocket")

    def opened(self, answer: PortAnswer, stream: ByteStream, limits: PortLimits) -> GuestSocket:
        """The socket that an answer of status 101 has opened. Raises PortMalformed when it is the answer to something else."""
        wanted = base64.b64encode(hashlib.sha1(self._key + _MAGIC, usedforsecurity=False).digest())
        found = [value for name, value in answer.headers if name == b"sec-websocket-accept"]
        upgrade = [value.lower() for name, value in answer.headers if name == b"upgrade"]
        chosen = [value.decode("latin-1").strip() for name, value in answer.headers if name == b"sec-websocket-protocol"]
        extended = any(name == b"sec-websocket-extensions" for name, _ in answer.headers)
        if found != [wanted] or upgrade != [b"websocket"] or extended or len(chosen) > 1:
            raise _malformed("its handshake is not the answer to ours")
        if chosen and chosen[0] not in self._subprotocols:
            raise _malformed("it chose a subprotocol that nobody offered")
        return GuestSocket(stream, limits, chosen[0] if chosen else None, answer.headers)


class GuestSocket:
    """Implements ``wire.node.PortSocket``; owns the stream."""

    def __init__(self, stream: ByteStream, limits: PortLimits, subprotocol: str | None, headers: Headers) -> None:
        self.subprotocol = subprotocol
        self.headers = headers
        self._stream = stream
        self._protocol = Protocol(CLIENT, state=OPEN, max_size=limits.message_bytes)
        self._frames: list[Frame] = []
        self._parts: list[bytes] = []
        self._is_text = False
        self._writing = asyncio.Lock()  # messages of one side and pongs of the other
        self._is_closed = False

    async def receive(self) -> str | bytes | SocketClosed:
        while True:
            while self._frames:
                message = self._message(self._frames.pop(0))
                if message is not None:
                    return message
            if self._protocol.parser_exc is not None:  # it broke the rules, and was told so
                sent = self._protocol.close_sent
                return SocketClosed(TOO_BIG if sent is not None and sent.code == TOO_BIG else ABNORMAL)
            try:
                data = await self._stream.read()
            except PerdureError:
                return SocketClosed(ABNORMAL)
            if not data:
                return SocketClosed(ABNORMAL)
            self._protocol.receive_data(data)
            self._frames = [event for event in self._protocol.events_received() if isinstance(event, Frame)]
            with suppress(PortClosed):  # what has arrived is still told
                await self._flush()

    def _message(self, frame: Frame) -> str | bytes | SocketClosed | None:
        """What a frame completes, if anything."""
        if frame.opcode is Opcode.CLOSE:
            close = self._protocol.close_rcvd
            assert close is not None, "its frame was parsed"
            return SocketClosed(close.code, close.reason)
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return None
        if frame.opcode is not Opcode.CONT:
            self._parts, self._is_text = [], frame.opcode is Opcode.TEXT
        self._parts.append(bytes(frame.data))
        if not frame.fin:
            return None
        whole, self._parts = b"".join(self._parts), []
        if not self._is_text:
            return whole
        try:
            return whole.decode()
        except UnicodeDecodeError as error:
            raise _malformed("a text message is not UTF-8") from error

    async def send(self, message: str | bytes) -> None:
        try:
            if isinstance(message, str):
                self._protocol.send_text(message.encode())
            else:
                self._protocol.send_binary(message)
        except InvalidState as error:
            raise _gone() from error
        await self._flush()

    async def _flush(self) -> None:
        async with self._writing:
            data = b"".join(self._protocol.data_to_send())
            if data:
                try:
                    await self._stream.write(data)
                except PerdureError as error:
                    raise _gone(error) from error

    async def aclose(self, code: int = 1001, reason: str = "") -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with suppress(TimeoutError, PerdureError, InvalidState, ProtocolError):
                async with asyncio.timeout(CLOSE_S):
                    if self._protocol.state is OPEN:
                        self._protocol.send_close(code, short(reason))
                    await self._flush()
                    await self._stream.close_write()
                    while await self._stream.read():
                        pass
        finally:
            await self._stream.close()


def short(reason: str) -> str:
    """As much of a reason as a close frame holds."""
    return reason.encode()[:REASON_BYTES].decode(errors="ignore")


def _malformed(what: str) -> PortMalformed:
    return PortMalformed(f"The program in the workspace does not speak WebSocket: {what}.", phase=PortPhase.ANSWERING)


def _gone(cause: PerdureError | None = None) -> PortClosed:
    return PortClosed(
        "The program in the workspace closed the WebSocket.", phase=PortPhase.ANSWERING, internal=cause.message if cause else ""
    )
