"""WebSockets carried to programs, message by message."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message
from websockets.frames import Close, Frame, Opcode

from perdure.access.model import LOCAL
from perdure.api.guard import CALLER, Caller
from perdure.api.ingress.front import HostForm
from perdure.api.ingress.names import Domain
from perdure.api.traffic import REQUEST_ID
from perdure.core.ids import RequestId
from tests.fakes.ingress import CTX, Stage, settled, the_api, unlimited
from tests.fakes.pipe import DEADLINE_S, WINDOW_BYTES, SocketProgram


class Socket:
    """A client's WebSocket, as an ASGI server would bring it."""

    def __init__(self, stage: Stage, path: str = "/v1/workspaces/demo/ports/80/chat?x=1", **headers: str) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self._told = asyncio.Event()
        raw_path, _, query = path.partition("?")
        found = {"host": "127.0.0.1:1", "sec-websocket-key": "theirs", "upgrade": "websocket", **headers}
        scope: dict[str, Any] = {
            "type": "websocket",
            "path": raw_path,
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "scheme": "ws",
            "client": None,
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in found.items()],
            "subprotocols": ["one", "two"],
            "extensions": {"websocket.http.response": {}},
            REQUEST_ID: RequestId("req_1"),
            CALLER: Caller(LOCAL, RequestId("req_1")),
        }
        self.messages.put_nowait({"type": "websocket.connect"})
        app = HostForm(stage.app, stage.services, unlimited(), Domain.parse("ws.localhost"), stage.underway)
        self.task = asyncio.ensure_future(app(scope, self.messages.get, self._send))
        stage.tasks.append(self.task)

    async def _send(self, message: Message) -> None:
        await self.reading.wait()
        self.sent.append(message)
        self._told.set()

    async def next(self) -> Message:
        """What it is sent next."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.sent:
                self._told.clear()
                await self._told.wait()
        return self.sent.pop(0)

    def say(self, **message: Any) -> None:
        self.messages.put_nowait({"type": "websocket.receive", **message})

    def leave(self, code: int = 1005, reason: str = "") -> None:
        self.messages.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.task

    async def refusal(self) -> tuple[int, Any]:
        start, body = await self.next(), await self.next()
        assert start["type"] == "websocket.http.response.start"
        return start["status"], json.loads(body["body"])["error"]["code"]


async def opened(stage: Stage, **headers: str) -> tuple[Socket, SocketProgram]:
    socket = Socket(stage, **headers)
    program = SocketProgram(await stage.peer())
    await program.accept(b"Sec-WebSocket-Protocol: two", b"X-Own: 1", b"Set-Cookie: a=1")
    accepted = await socket.next()
    assert (accepted["type"], accepted["subprotocol"]) == ("websocket.accept", "two")
    names = [name for name, _ in accepted["headers"]]
    assert b"x-own" in names and b"set-cookie" not in names and not [name for name in names if name.startswith(b"sec-")]
    assert b"perdure-generation" in names
    return socket, program


async def test_messages_pass_both_ways(stage: Stage) -> None:
    socket, program = await opened(stage)
    assert program.head[0] == b"GET /chat?x=1 HTTP/1.1" and b"host: localhost:80" in program.head
    assert b"sec-websocket-protocol: one, two" in program.head and b"sec-websocket-key: theirs" not in program.head
    socket.say(text="hé")
    socket.say(bytes=b"\x00\xff")
    heard: list[Frame] = []
    while len(heard) < 2:
        heard += await program.hear()
    assert [(one.opcode, bytes(one.data)) for one in heard] == [(Opcode.TEXT, "hé".encode()), (Opcode.BINARY, b"\x00\xff")]
    await program.say(Frame(Opcode.TEXT, "né".encode()), Frame(Opcode.BINARY, b"\xfe"))
    assert await socket.next() == {"type": "websocket.send", "text": "né"}
    assert await socket.next() == {"type": "websocket.send", "bytes": b"\xfe"}
    socket.leave(4002, "done")
    (frame,) = await program.hear()
    close = Close.parse(bytes(frame.data))
    assert (close.code, close.reason) == (4002, "done")
    program.peer.end()
    await socket.ended()
    await program.peer.left()


@pytest.mark.parametrize(("code", "told"), [(4001, 4001), (1000, 1000), (1009, 1009)])
async def test_a_program_that_ends_says_how(stage: Stage, code: int, told: int) -> None:
    socket, program = await opened(stage)
    await program.say(Frame(Opcode.CLOSE, Close(code, "why").serialize()))
    assert await socket.next() == {"type": "websocket.close", "code": told, "reason": "why"}
    program.peer.end()
    await socket.ended()


async def test_a_program_that_vanishes_or_ends_without_a_code(stage: Stage) -> None:
    socket, program = await opened(stage)
    program.peer.reset()
    assert await socket.next() == {"type": "websocket.close", "code": 1011, "reason": ""}
    await socket.ended()
    socket, program = await opened(stage)
    await program.say(Frame(Opcode.CLOSE, b""))
    assert await socket.next() == {"type": "websocket.close", "code": 1000, "reason": ""}
    program.peer.end()
    await socket.ended()


@pytest.mark.parametrize("code", [1005, 1006, 999])
async def test_a_client_that_vanishes(stage: Stage, code: int) -> None:
    socket, program = await opened(stage)
    socket.leave(code)
    (frame,) = await program.hear()
    assert Close.parse(bytes(frame.data)).code == 1001
    program.peer.end()
    await socket.ended()


async def test_neither_side_is_faster_than_the_other(stage: Stage) -> None:
    socket, program = await opened(stage)
    for _ in range(64):
        socket.say(bytes=b"x" * 65536)
    await settled()
    assert 64 - socket.messages.qsize() <= WINDOW_BYTES // 65536 + 3
    socket.reading.clear()
    frames = [Frame(Opcode.BINARY, b"y" * 60000)] * 64
    flood = asyncio.create_task(program.say(*frames))
    await settled()
    assert not flood.done() and program.peer.accepted <= WINDOW_BYTES * 4
    flood.cancel()
    socket.task.cancel()
    await asyncio.gather(flood, socket.task, return_exceptions=True)
    await program.peer.left()


async def test_text_that_is_none_ends_it_with_the_reason(stage: Stage) -> None:
    socket, program = await opened(stage)
    await program.say(Frame(Opcode.TEXT, b"\xff"))
    program.peer.end()
    assert await socket.next() == {"type": "websocket.close", "code": 1011, "reason": "port_malformed"}
    await socket.ended()


async def test_a_program_that_does_not_want_to(stage: Stage) -> None:
    socket = Socket(stage)
    peer = await stage.peer()
    await peer.head()
    await peer.send(b"HTTP/1.1 403 No\r\nx-why: because\r\ncontent-length: 2\r\n\r\nno")
    start, body = await socket.next(), await socket.next()
    assert (start["status"], body["body"]) == (403, b"no")
    assert (b"x-why", b"because") in start["headers"] and not [1 for name, _ in start["headers"] if name == b"content-length"]
    await socket.ended()


async def test_a_success_that_is_no_websocket_and_a_body_without_end(stage: Stage) -> None:
    socket = Socket(stage)
    peer = await stage.peer()
    await peer.head()
    flood = asyncio.create_task(peer.send(b"HTTP/1.1 200 OK\r\n\r\n" + b"z" * (1 << 20)))
    start, body = await socket.next(), await socket.next()
    assert (start["status"], len(body["body"])) == (502, 65536)
    await socket.ended()
    await peer.left()
    await asyncio.gather(flood, return_exceptions=True)


async def test_refusals_before_anything_is_open(stage: Stage) -> None:
    assert await Socket(stage, "/v1/workspaces/demo/ports/81/").refusal() == (502, "port_refused")
    assert await Socket(stage, "/v1/workspaces/absent/ports/80/").refusal() == (404, "not_found")
    assert await Socket(stage, "/", host="demo--80.ws.localhost").refusal() == (401, "unauthenticated")
    socket = Socket(stage)
    peer = await stage.peer()
    await peer.head()
    peer.end()
    assert await socket.refusal() == (502, "port_closed")


async def test_a_visitors_cookie_and_whose_page_it_is(stage: Stage) -> None:
    token = (await stage.services.shares.share(LOCAL, "demo", 80, expires_s=3600)).token
    headers = {"host": "demo--80.ws.localhost", "cookie": f"perdure-share={token}"}
    assert await Socket(stage, "/", **headers, origin="http://evil--80.ws.localhost").refusal() == (403, "forbidden")
    socket = Socket(stage, "/", **headers, origin="http://demo--80.ws.localhost")
    program = SocketProgram(await stage.peer())
    await program.accept()
    assert (await socket.next())["type"] == "websocket.accept"
    assert not [line for line in program.head if b"perdure" in line]
    socket.leave()
    await program.hear()
    program.peer.end()
    await socket.ended()


@pytest.mark.parametrize("phase", ["waking", "handshake"])
async def test_a_client_that_leaves_before_it_is_open(stage: Stage, phase: str) -> None:
    if phase == "waking":
        await stage.workspaces.sleep(CTX, "demo")
        stage.workspaces.hold = asyncio.Event()
    socket = Socket(stage)
    if phase == "waking":
        await settled()
    else:
        peer = await stage.peer()
        await peer.head()
    socket.leave()
    await socket.ended()
    if phase == "waking":
        assert stage.peers.empty()
    else:
        await peer.left()


async def test_a_server_that_stops(stage: Stage) -> None:
    socket, program = await opened(stage)
    stage.underway.stop()
    assert await socket.next() == {"type": "websocket.close", "code": 1001, "reason": "unavailable"}
    program.peer.end()
    await socket.ended()
    await program.peer.left()
    assert await Socket(stage).refusal() == (503, "unavailable")


async def test_the_apis_own_sockets_are_the_apis(stage: Stage) -> None:
    socket = Socket(stage, "/v1/workspaces/demo/tcp/80")
    assert (await socket.next())["type"] == "http.response.start", the_api
    await socket.ended()
