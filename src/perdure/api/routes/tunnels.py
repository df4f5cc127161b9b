"""One WebSocket per connection to a port inside a workspace.

Binary messages carry bytes in both directions; the text message ``eof`` half-closes one. The workspace stays awake meanwhile.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from perdure.api.deps import Call
from perdure.api.errors import error_response
from perdure.api.underway import Ending
from perdure.core.errors import InvalidRequest, PerdureError
from perdure.wire.node import ByteStream

log = logging.getLogger(__name__)
router = APIRouter(prefix="/workspaces/{ref}", tags=["tunnels"])

EOF = "eof"
CLOSE_NORMAL = 1000
CLOSE_GOING_AWAY = 1001
CLOSE_REFUSED = 1008
CLOSE_FAILED = 1011


@router.websocket("/tcp/{port}")
async def tunnel(websocket: WebSocket, ref: str, port: int, call: Call) -> None:
    """Refused with an HTTP error while nothing listens on the port; closed with 1011 when the workspace's side broke."""
    try:
        if not 0 < port < 65536:
            raise InvalidRequest(f"{port} is not a TCP port.", hint="Ports are 1 to 65535.")
        async with call.awake(ref) as awake:
            stream = await awake.guest.open_tcp(port)
            try:
                await websocket.accept()
                await _pump(websocket, stream, call.closing)
            finally:
                await stream.close()
    except PerdureError as error:
        if websocket.client_state is WebSocketState.CONNECTING:
            await websocket.send_denial_response(error_response(error))
        else:
            await _close(websocket, CLOSE_FAILED, error.code)


async def _pump(websocket: WebSocket, stream: ByteStream, closing: Ending) -> None:
    """Both directions until both have ended, one broke, the client left or the server stops."""
    inward = asyncio.create_task(_inward(websocket, stream))
    outward = asyncio.create_task(_outward(websocket, stream))
    stop = asyncio.create_task(closing.wait())
    waiting: set[asyncio.Task[bool]] = {inward, outward, stop}
    left = False
    try:
        while waiting & {inward, outward} and not stop.done() and not left:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            left = any(task.result() for task in done if task is not stop)
    finally:
        for task in (inward, outward, stop):
            task.cancel()
        await asyncio.gather(inward, outward, stop, return_exceptions=True)
    if left:
        return
    if not stop.done() or stop.cancelled():
        await _close(websocket, CLOSE_NORMAL, "")
    elif closing.why is None:
        await _close(websocket, CLOSE_GOING_AWAY, "")
    else:
        await _close(websocket, CLOSE_REFUSED, closing.why.code)


async def _inward(websocket: WebSocket, stream: ByteStream) -> bool:
    """Client to guest; True when the client left rather than half-closed."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return True
        if message.get("bytes"):
            await stream.write(message["bytes"])
        elif message.get("text") == EOF:
            await stream.close_write()
            return False


async def _outward(websocket: WebSocket, stream: ByteStream) -> bool:
    try:
        while data := await stream.read():
            await websocket.send_bytes(data)
        await websocket.send_text(EOF)
    except (WebSocketDisconnect, RuntimeError):  # Starlette raises either when the peer is gone
        return True
    return False


async def _close(websocket: WebSocket, code: int, reason: str) -> None:
    try:
        await websocket.close(code, reason)
    except (WebSocketDisconnect, RuntimeError):
        log.debug("the tunnel's client was gone before it could be closed")
