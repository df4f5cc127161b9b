"""Invocations of a workspace's program: ``POST …/invocations`` and the WebSocket ``…/invocations/ws``.

A call wakes the workspace, waits until the program answers ``GET /ping``, and passes body and answer through as they come. The
workspace stays awake meanwhile. Whoever loses the connection does not know whether the program did its work: nothing is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from perdure.api import invoking
from perdure.api.deps import Bundle, Call, awake_headers
from perdure.api.errors import error_response
from perdure.api.invoking import Caller
from perdure.api.streams import _Lasting
from perdure.api.underway import Ending
from perdure.core.errors import PerdureError, PortClosed, Unavailable
from perdure.wire import public
from perdure.wire.node import PortAnswer, PortLimits, PortPlace, PortRequest, PortSocket, SocketClosed
from perdure.workspaces.model import Awake

if TYPE_CHECKING:
    from typing_extensions import TypeIs

router = APIRouter(prefix="/workspaces/{ref}/invocations", tags=["program"])
T = TypeVar("T")
_ANY: dict[str, Any] = {"application/json": {"schema": {}}, "text/event-stream": {"schema": {}}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": _ANY},
    502: {"model": public.ErrorAnswer, "description": "The program is not ready; the reason is in ``details``. Or it broke."},
    504: {"model": public.ErrorAnswer, "description": "The program does not answer."},
}
_BODY: dict[str, Any] = {"requestBody": {"content": {"application/json": {"schema": {}}}}}
CLOSE_NORMAL = 1000
CLOSE_GOING_AWAY = 1001
CLOSE_REFUSED = 1008
CLOSE_FAILED = 1011
_REASON_BYTES_MAX = 120
_DENIAL_BYTES_MAX = 65536


class Passed(_Lasting):
    """A program's answer, piece by piece as it comes: each waits until the client has taken the one before."""

    def __init__(self, answer: PortAnswer, caller: Caller, stack: AsyncExitStack, call: Bundle, headers: dict[str, str]) -> None:
        super().__init__(stack, call.closing, headers, "application/octet-stream")
        own = [(name, value) for name, value in self.raw_headers if name != b"content-type"]
        self.raw_headers = [*own, *invoking.outward(answer.headers)]
        self.status_code = answer.status
        self._answer = answer
        self._caller = caller

    async def _gone(self, receive: Receive) -> None:
        await self._caller.left()

    async def _pump(self, send: Send) -> None:
        await self._start(send)
        async for piece in self._answer.body():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@router.post("", response_class=Response, status_code=200, responses=_ANSWERS, openapi_extra=_BODY)
async def invoke(ref: str, request: Request, call: Call) -> Response:
    """Call the workspace's program: the body and its content type reach it as they are, and what it answers, JSON or server-sent
    events, comes back as it comes. 502 and 504 with a reason while it cannot answer. A lost connection is ambiguous."""
    caller = Caller(request.receive)
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        place = await _ready(awake, call)
        is_chunked = "transfer-encoding" in request.headers
        asked = PortRequest(
            "POST",
            b"/invocations",
            _inward(request.headers.raw, awake, call),
            body=caller.body(),
            length=None if is_chunked else int(request.headers.get("content-length", "0")),
            is_last=True,  # no other request may use it, and a sleep would reset it
        )
        limits = PortLimits(answer_s=call.services.settings.invoke_limit_s)
        answer = await _unless_left(call.services.ports.request(place, asked, limits), caller, call)
        stack.push_async_callback(answer.aclose)
        return Passed(answer, caller, stack.pop_all(), call, awake_headers(awake))


async def _ready(awake: Awake, call: Bundle) -> PortPlace:
    workspace, guest = awake.workspace, awake.guest
    port = await invoking.await_ready(guest, call.services.settings.program_deadline_s)
    return PortPlace(workspace.id, workspace.generation, guest, port)


def _inward(headers: list[tuple[bytes, bytes]], awake: Awake, call: Bundle) -> tuple[tuple[bytes, bytes], ...]:
    return invoking.inward(headers, awake.workspace.id, call.ctx.request_id)


async def _unless_left(work: Awaitable[T], caller: Caller, call: Bundle) -> T:
    """What ``work`` gives, given up when the client leaves or the server stops. Raises ClientDisconnect or Unavailable then."""
    doing = asyncio.ensure_future(work)
    left = asyncio.create_task(caller.left())
    closing = asyncio.create_task(call.closing.wait())
    try:
        await asyncio.wait({doing, left, closing}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return await doing
    finally:
        for task in (doing, left, closing):
            task.cancel()
        await asyncio.gather(doing, left, closing, return_exceptions=True)
    if closing.done() and not closing.cancelled():
        ended = call.closing.reason(Unavailable("The server is stopping; the program may have done what was asked."))
        ended.ambiguous, ended.retryable = True, False
        raise ended
    raise ClientDisconnect


# ------------------------------------------------------------------------------------------------------------- WebSocket


@router.websocket("/ws")
async def invoke_socket(websocket: WebSocket, ref: str, call: Call) -> None:
    """The program's ``/ws``, message by message. Refused with an HTTP error while there is none."""
    try:
        async with call.awake(ref) as awake:
            place = await _ready(awake, call)
            asked = PortRequest("GET", b"/ws", _inward(websocket.headers.raw, awake, call))
            subprotocols = tuple(websocket.scope.get("subprotocols") or ())
            opened = await call.services.ports.open_socket(place, asked, subprotocols)
            try:
                await _serve(websocket, opened, call.closing)
            finally:
                await opened.aclose()
    except PerdureError as error:
        if websocket.client_state is WebSocketState.CONNECTING:
            await websocket.send_denial_response(error_response(error))
        else:
            await _close(websocket, CLOSE_FAILED, error.message)


async def _serve(websocket: WebSocket, opened: PortSocket | PortAnswer, closing: Ending) -> None:
    if not _is_socket(opened):
        await _deny(websocket, opened)
        return
    await websocket.accept(opened.subprotocol)
    await _pump(websocket, opened, closing)


def _is_socket(opened: PortSocket | PortAnswer) -> TypeIs[PortSocket]:
    return hasattr(opened, "subprotocol")


async def _deny(websocket: WebSocket, answer: PortAnswer) -> None:
    """The program does not want to open it, and its own words say why, as far as they have room."""
    content = b""
    async for piece in answer.body():
        content += piece
        if len(content) >= _DENIAL_BYTES_MAX:
            break
    status = answer.status if answer.status >= 300 else 502  # a success that is no WebSocket is none
    response = Response(content[:_DENIAL_BYTES_MAX], status)
    response.raw_headers += invoking.outward(answer.headers)
    await websocket.send_denial_response(response)


async def _pump(websocket: WebSocket, socket: PortSocket, closing: Ending) -> None:
    """Both directions until one side closes or breaks, or the server stops."""
    inward = asyncio.create_task(_inward_messages(websocket, socket))
    outward = asyncio.create_task(_outward_messages(websocket, socket))
    stop = asyncio.create_task(closing.wait())
    try:
        done, _ = await asyncio.wait({inward, outward, stop}, return_when=asyncio.FIRST_COMPLETED)
        ended = done.pop()
        if ended is stop:
            if closing.why is None:
                await _close(websocket, CLOSE_GOING_AWAY, "the server is stopping")
            else:
                await _close(websocket, CLOSE_REFUSED, closing.why.code)
        elif ended is outward:
            closed = outward.result()
            code = CLOSE_NORMAL if closed.code == _NO_CODE else closed.code
            await _close(websocket, code if code in _SENDABLE else CLOSE_FAILED, closed.reason)
        else:
            await socket.aclose(inward.result())
    finally:
        for task in (inward, outward, stop):
            task.cancel()
        await asyncio.gather(inward, outward, stop, return_exceptions=True)


_NO_CODE = 1005
#: Codes that may stand in a close frame; 1005, 1006 and 1015 say that none came.
_SENDABLE = frozenset({1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014, *range(3000, 5000)})


async def _inward_messages(websocket: WebSocket, socket: PortSocket) -> int:
    """Client to program; returns the code with which the client closed."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            code = int(message.get("code") or CLOSE_GOING_AWAY)
            return code if code in _SENDABLE else CLOSE_GOING_AWAY
        text, data = message.get("text"), message.get("bytes")
        try:
            await socket.send(text if text is not None else data or b"")
        except PortClosed:
            await asyncio.Event().wait()  # how it ended is for the other direction to say


async def _outward_messages(websocket: WebSocket, socket: PortSocket) -> SocketClosed:
    while not isinstance(message := await socket.receive(), SocketClosed):
        try:
            if isinstance(message, str):
                await websocket.send_text(message)
            else:
                await websocket.send_bytes(message)
        except (WebSocketDisconnect, RuntimeError):  # Starlette raises either when the peer is gone
            return SocketClosed(CLOSE_GOING_AWAY)
    return message


async def _close(websocket: WebSocket, code: int, reason: str) -> None:
    with suppress(WebSocketDisconnect, RuntimeError):  # gone before it could be closed
        await websocket.close(code, reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore"))
