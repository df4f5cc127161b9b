"""Carries a WebSocket to a program in a workspace: message by message, both ways, each side at the other's pace.

The client's handshake is answered when the program has answered ours: with its subprotocol, or with the refusal it gave.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from starlette.types import Message, Receive, Scope, Send

from perdure.api.ingress import headers, pages
from perdure.api.ingress.relay import Visit, place_of, stopping, told
from perdure.api.services import Services
from perdure.api.underway import Ending
from perdure.core.errors import PerdureError, PortClosed
from perdure.wire.node import Headers, PortAnswer, PortLimits, PortRequest, PortSocket, SocketClosed
from perdure.workspaces.model import Awake

NORMAL, GOING_AWAY, REFUSED, FAILED = 1000, 1001, 1008, 1011
#: Codes that may stand in a close frame (RFC 6455, section 7.4); others only say how a connection ended.
_SENDABLE = frozenset({1000, 1001, 1002, 1003, *range(1007, 1015), *range(3000, 5000)})
#: Of a refusal's body. It is not a stream: the server holds it until it is whole.
REFUSAL_BYTES = 64 * 1024


class SocketRelay:
    """One WebSocket."""

    def __init__(self, services: Services, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        self._services = services
        self._visit = visit
        self._scope = scope
        self._receive = receive
        self._send = send
        self._came: Headers = tuple(scope["headers"])
        self._is_open = False
        self._early: asyncio.Task[Message] | None = None  # what the client says before it is answered: mostly that it has left

    async def run(self, closing: Ending) -> None:
        await self._receive()  # websocket.connect
        work = asyncio.create_task(self._carry(), name="perdure-relay-socket")
        stop = asyncio.create_task(closing.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            stopped = not work.done()
            was_open = self._is_open
            if stopped and was_open:
                await self._fail(closing.reason(stopping()), _code(closing))  # before the program is given its moment to agree
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
        if stopped:
            if not was_open:
                await self._fail(closing.reason(stopping()), _code(closing))
        elif not work.cancelled() and (failure := work.exception()) is not None:
            if not isinstance(failure, PerdureError):
                raise failure
            await self._fail(failure, FAILED)

    async def _carry(self) -> None:
        early = self._early = asyncio.create_task(_receive(self._receive), name="perdure-relay-early")
        opening = asyncio.create_task(self._open(), name="perdure-relay-open")
        try:
            await asyncio.wait({opening, early}, return_when=asyncio.FIRST_COMPLETED)
            if not self._is_open and early.done() and early.result()["type"] == "websocket.disconnect":
                return
            await opening
        finally:
            opening.cancel()
            early.cancel()
            await asyncio.gather(opening, early, return_exceptions=True)

    async def _open(self) -> None:
        visit = self._visit
        request = PortRequest("GET", visit.target, headers.to_program(self._came, visit.way))
        limits = PortLimits(answer_s=self._services.settings.port_answer_s)
        offered = tuple(self._scope.get("subprotocols", ()))
        async with self._services.workspaces.awake(visit.ctx, visit.ref) as awake:
            found = await self._services.ports.open_socket(place_of(visit, awake), request, offered, limits)
            if not isinstance(found, PortSocket):
                await self._decline(found)
                return
            code, reason = GOING_AWAY, ""
            try:
                await self._accept(found, awake)
                code, reason = await self._both(found)
            finally:
                await found.aclose(code, reason)

    async def _accept(self, socket: PortSocket, awake: Awake) -> None:
        kept = headers.from_program(socket.headers, 101, self._visit.way)
        found = [pair for pair in kept if not pair[0].startswith(b"sec-websocket-")] + [*told(self._visit, awake)]
        await self._send({"type": "websocket.accept", "subprotocol": socket.subprotocol, "headers": found})
        self._is_open = True

    async def _decline(self, answer: PortAnswer) -> None:
        """Pass on why the program does not want to."""
        found = headers.from_program(answer.headers, answer.status, self._visit.way)
        kept = [pair for pair in found if pair[0] != b"content-length"]
        body = b""
        async with aclosing(answer), aclosing(answer.body()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) >= REFUSAL_BYTES:
                    break
        status = answer.status if answer.status >= 300 else 502  # a success that is no WebSocket is none
        await self._send({"type": "websocket.http.response.start", "status": status, "headers": kept})
        await self._send({"type": "websocket.http.response.body", "body": body[:REFUSAL_BYTES]})

    async def _both(self, socket: PortSocket) -> tuple[int, str]:
        """Until either side ends; returns what the program is to be told."""
        inward, outward = asyncio.create_task(self._inward(socket)), asyncio.create_task(self._outward(socket))
        try:
            await asyncio.wait({inward, outward}, return_when=asyncio.FIRST_COMPLETED)
            return await inward if inward.done() else await outward
        finally:
            for task in (inward, outward):
                task.cancel()
            await asyncio.gather(inward, outward, return_exceptions=True)

    async def _inward(self, socket: PortSocket) -> tuple[int, str]:
        while (message := await self._next())["type"] != "websocket.disconnect":
            text = message.get("text")
            try:
                await socket.send(text if text is not None else message.get("bytes") or b"")
            except PortClosed:
                await asyncio.Event().wait()  # how it ended is for the other direction to say
        code = int(message.get("code") or NORMAL)
        return (code if code in _SENDABLE else GOING_AWAY), str(message.get("reason") or "")

    async def _outward(self, socket: PortSocket) -> tuple[int, str]:
        while not isinstance(message := await socket.receive(), SocketClosed):
            kind = "text" if isinstance(message, str) else "bytes"
            await self._send({"type": "websocket.send", kind: message})
        code = NORMAL if message.code == 1005 else message.code
        code = code if code in _SENDABLE else FAILED
        await self._send({"type": "websocket.close", "code": code, "reason": message.reason})
        self._is_open = False
        return NORMAL, ""

    async def _next(self) -> Message:
        """The client's next message."""
        early, self._early = self._early, None
        return await (early if early is not None else self._receive())

    async def _fail(self, error: PerdureError, code: int) -> None:
        if self._is_open:
            await self._send({"type": "websocket.close", "code": code, "reason": error.code})
            return
        await refuse(error, self._send)


def _code(closing: Ending) -> int:
    return GOING_AWAY if closing.why is None else REFUSED


async def refuse(error: PerdureError, send: Send) -> None:
    """Answer a handshake with an error."""
    response = pages.answer(error, as_page=False)
    await send({"type": "websocket.http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "websocket.http.response.body", "body": response.body})


async def _receive(receive: Receive) -> Message:
    return await receive()
