"""WebSockets to programs that keep the rules and to some that do not."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from websockets.frames import Close, Frame, Opcode

from perdure.core.errors import PortClosed, PortMalformed
from perdure.core.ids import WorkspaceId
from perdure.gateway.ingress import GuestPorts
from perdure.wire.node import ByteStream, Guest, PortAnswer, PortLimits, PortPlace, PortRequest, PortSocket, SocketClosed
from tests.fakes.pipe import Peer, SocketProgram

REQUEST = PortRequest("GET", b"/chat?x=1", ((b"Sec-WebSocket-Key", b"theirs"), (b"Sec-WebSocket-Extensions", b"x"), (b"a", b"b")))


class Opening:
    """A handshake under way and the program that answers it."""

    def __init__(self, subprotocols: tuple[str, ...] = (), limits: PortLimits | None = None) -> None:
        self.peer = Peer()
        self.program = SocketProgram(self.peer)
        place = PortPlace(WorkspaceId("ws_a"), 1, cast(Guest, self), 80)
        self.task = asyncio.create_task(GuestPorts().open_socket(place, REQUEST, subprotocols, limits))

    async def open_tcp(self, port: int) -> ByteStream:
        return self.peer.stream

    async def socket(self, *more: bytes) -> PortSocket:
        await self.program.accept(*more)
        opened = await self.task
        assert not hasattr(opened, "status")
        return cast(PortSocket, opened)


async def test_the_handshake_is_ours_and_all_else_is_passed_on() -> None:
    opening = Opening(("one", "two"))
    socket = await opening.socket(b"Sec-WebSocket-Protocol: two", b"X-Any: y")
    assert opening.program.head[0] == b"GET /chat?x=1 HTTP/1.1"
    names = [line.partition(b":")[0].lower() for line in opening.program.head[1:]]
    assert names.count(b"sec-websocket-key") == 1 and b"sec-websocket-extensions" not in names
    assert b"a: b" in opening.program.head and b"sec-websocket-protocol: one, two" in opening.program.head
    assert socket.subprotocol == "two" and (b"x-any", b"y") in socket.headers
    opening.peer.end()
    await socket.aclose()


async def test_messages_of_both_kinds_fragments_and_pings() -> None:
    opening = Opening()
    socket = await opening.socket()
    await opening.program.say(
        Frame(Opcode.TEXT, "é".encode()[:1], fin=False),
        Frame(Opcode.PING, b"alive?"),
        Frame(Opcode.CONT, "é".encode()[1:]),
        Frame(Opcode.BINARY, bytes(range(256))),
    )
    assert await socket.receive() == "é"
    assert [(frame.opcode, frame.data) for frame in await opening.program.hear()] == [(Opcode.PONG, b"alive?")]
    assert await socket.receive() == bytes(range(256))
    await socket.send("hello")
    await socket.send(b"\x00\xff")
    heard: list[Frame] = []
    while len(heard) < 2:
        heard += await opening.program.hear()
    assert [(frame.opcode, bytes(frame.data)) for frame in heard] == [(Opcode.TEXT, b"hello"), (Opcode.BINARY, b"\x00\xff")]
    await opening.program.say(Frame(Opcode.CLOSE, Close(4001, "enough").serialize()))
    assert await socket.receive() == SocketClosed(4001, "enough")
    opening.peer.end()
    await socket.aclose()
    assert opening.peer.stream.closed.is_set()


@pytest.mark.parametrize("how", ["end", "reset"])
async def test_one_that_ends_without_a_word(how: str) -> None:
    opening = Opening()
    socket = await opening.socket()
    getattr(opening.peer, how)()
    assert await socket.receive() == SocketClosed(1006)
    if how == "reset":
        with pytest.raises(PortClosed):
            await socket.send("too late")
    await socket.aclose()
    assert opening.peer.stream.closed.is_set()


async def test_our_end_is_told_and_agreed() -> None:
    opening = Opening()
    socket = await opening.socket()
    closing = asyncio.create_task(socket.aclose(4000, "x" * 200))
    (frame,) = await opening.program.hear()
    close = Close.parse(bytes(frame.data))
    assert (close.code, close.reason) == (4000, "x" * 123)
    opening.peer.end()
    await closing
    await socket.aclose()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x82\x7e\x07\xd0", 1009),  # 2000 bytes are announced
        (b"\x80\x02of", 1006),  # goes on with a message that has not begun
        (b"\xc2\x00", 1006),  # a reserved bit
        (b"\x82\x80\x00\x00\x00\x00", 1006),  # masked, which only clients do
        (b"\x88\x01x", 1006),  # half a code
    ],
    ids=["too-large", "no-beginning", "reserved", "masked", "bad-close"],
)
async def test_one_that_breaks_the_rules_is_ended(sent: bytes, code: int) -> None:
    opening = Opening(limits=PortLimits(message_bytes=1000))
    socket = await opening.socket()
    await opening.peer.send(sent)
    assert await socket.receive() == SocketClosed(code)
    (heard,) = await opening.program.hear()
    assert heard.opcode is Opcode.CLOSE
    opening.peer.end()
    await socket.aclose()


async def test_fragments_count_together() -> None:
    opening = Opening(limits=PortLimits(message_bytes=1000))
    socket = await opening.socket()
    await opening.program.say(Frame(Opcode.BINARY, b"x" * 600, fin=False), Frame(Opcode.CONT, b"x" * 600))
    assert await socket.receive() == SocketClosed(1009)
    opening.peer.end()
    await socket.aclose()


async def test_text_that_is_none() -> None:
    opening = Opening()
    socket = await opening.socket()
    await opening.program.say(Frame(Opcode.TEXT, b"\xff"))
    with pytest.raises(PortMalformed):
        await socket.receive()
    opening.peer.end()
    await socket.aclose()


@pytest.mark.parametrize(
    "line", [b"Sec-WebSocket-Protocol: unasked", b"Sec-WebSocket-Extensions: permessage-deflate", b"Upgrade: other"]
)
async def test_a_handshake_that_is_not_the_answer_to_ours(line: bytes) -> None:
    opening = Opening()
    await opening.program.accept(line)
    with pytest.raises(PortMalformed):
        await opening.task
    assert opening.peer.stream.closed.is_set()


async def test_a_replayed_handshake() -> None:
    opening = Opening()
    await opening.program.accept(key=b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
    with pytest.raises(PortMalformed):
        await opening.task


async def test_a_program_that_does_not_want_to() -> None:
    opening = Opening()
    await opening.peer.head()
    await opening.peer.send(b"HTTP/1.1 403 No\r\ncontent-length: 2\r\n\r\nno")
    answer = cast(PortAnswer, await opening.task)
    assert (answer.status, b"".join([part async for part in answer.body()])) == (403, b"no")
