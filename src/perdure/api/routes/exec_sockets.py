"""A WebSocket to a command: its output, what is typed into it, its size and signals, over one connection.

Binary messages from the server are output: one byte that says which stream (1 stdout, 2 stderr), eight with the offset of the
first byte, big-endian, then the bytes. Its text messages are the other events of an exec's stream (``ExecEvent``). Binary
messages from the client are stdin, as they are; its text messages are ``ExecInput``. Going away detaches, and the command goes
on; to come back, connect again from the offset after the last byte that arrived.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from perdure.api import exec_streams, render
from perdure.api.deps import Call, awake_headers
from perdure.api.errors import error_info, error_response, validation_sentence
from perdure.api.streams import event_json
from perdure.api.underway import Ending
from perdure.core.errors import InvalidRequest, PerdureError, Unavailable
from perdure.core.ids import ExecId
from perdure.wire import node, public

log = logging.getLogger(__name__)
router = APIRouter(prefix="/workspaces/{ref}/execs", tags=["execs"])

CLOSE_NORMAL = 1000
CLOSE_GOING_AWAY = 1001
CLOSE_REFUSED = 1008
CLOSE_FAILED = 1011
#: Messages of stdin that wait for the command to take them; then the client waits.
TYPED_MAX = 64


@router.websocket("/{exec_id}/ws")
async def exec_socket(websocket: WebSocket, ref: str, exec_id: str, call: Call) -> None:
    """Query: ``stdout_offset``, ``stderr_offset``, ``generation``, as for ``GET …/output``. Refused with an HTTP error."""
    try:
        query = _query(websocket)
        await exec_streams.check_generation(call, ref, query.generation)
        async with AsyncExitStack() as stack:
            awake = await stack.enter_async_context(call.awake(ref))
            handle = await awake.guest.attach_exec(ExecId(exec_id), query.stdout_offset, query.stderr_offset)
            stack.push_async_callback(handle.close)
            exec_streams.register(stack, call.exec_handles, awake, handle)
            headers = [(name.encode(), value.encode()) for name, value in awake_headers(awake).items()]
            await websocket.accept(headers=headers)
            await _Session(websocket, awake.guest, handle).run(call.closing)
    except PerdureError as error:
        if websocket.client_state is WebSocketState.CONNECTING:
            await websocket.send_denial_response(error_response(error))
        else:
            await _fail(websocket, error, CLOSE_FAILED)


def _query(websocket: WebSocket) -> exec_streams.Follow:
    try:
        return exec_streams.Follow.model_validate(dict(websocket.query_params))
    except ValidationError as error:
        raise InvalidRequest(validation_sentence(error.errors())) from error


class _Session:
    """One client of a command."""

    def __init__(self, websocket: WebSocket, guest: node.Guest, handle: node.ExecHandle) -> None:
        self._websocket = websocket
        self._guest = guest
        self._handle = handle
        self._typed: asyncio.Queue[bytes | None] = asyncio.Queue(TYPED_MAX)  # None: the end

    async def run(self, closing: Ending) -> None:
        """Until the command has ended, the client has left, either side broke or the server stops. Raises what broke it."""
        show = asyncio.create_task(self._show())
        others = [asyncio.create_task(self._listen()), asyncio.create_task(self._feed())]
        stop = asyncio.create_task(closing.wait())
        tasks: list[asyncio.Task[Any]] = [show, *others, stop]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended, stopped = [task for task in (show, *others) if task.done()], stop.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not ended and stopped:
            stopping = Unavailable(
                "The server is stopping; the command goes on when the workspace wakes.", hint="Attach again later."
            )
            code = CLOSE_GOING_AWAY if closing.why is None else CLOSE_REFUSED
            await _fail(self._websocket, closing.reason(stopping), code)
        for task in ended:
            task.result()
        if show in ended:
            await _close(self._websocket, CLOSE_NORMAL)

    async def _show(self) -> None:
        try:
            async for event in self._handle.events():
                if isinstance(event, node.ExecOutput):
                    await self._websocket.send_bytes(public.pack_output(event.stream, event.offset, event.data))
                else:
                    await self._websocket.send_text(event_json(render.exec_event(event)))
        except (WebSocketDisconnect, RuntimeError):  # Starlette raises either when the client is gone
            log.debug("the client of a command left in the middle of its output")

    async def _listen(self) -> None:
        """Returns when the client has left."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if message.get("bytes") is not None:
                await self._typed.put(message["bytes"])
            else:
                await self._obey(message.get("text") or "")

    async def _obey(self, text: str) -> None:
        try:
            told = public.ExecInput.model_validate_json(text)
        except ValidationError as error:
            raise InvalidRequest(validation_sentence(error.errors())) from error
        exec_id = self._handle.exec_id
        if told.type == "eof":
            await self._typed.put(None)
        elif told.type == "kill":
            await self._guest.kill_exec(exec_id)
        elif told.signal is not None:
            await self._guest.signal_exec(exec_id, told.signal)
        elif told.rows is not None and told.cols is not None:
            await self._guest.resize_exec(exec_id, node.PtySize(told.rows, told.cols))

    async def _feed(self) -> None:
        """Apart from what listens, so that a signal reaches a command that does not read."""
        while True:
            typed = await self._typed.get()
            if typed is None:
                await self._handle.close_stdin()
            elif typed:
                await self._handle.write_stdin(typed)


async def _fail(websocket: WebSocket, error: PerdureError, code: int) -> None:
    """The last message says why."""
    try:
        await websocket.send_text(event_json(public.ExecEvent(type="error", error=error_info(error))))
    except (WebSocketDisconnect, RuntimeError):
        return
    await _close(websocket, code, error.code)


async def _close(websocket: WebSocket, code: int, reason: str = "") -> None:
    try:
        await websocket.close(code, reason)
    except (WebSocketDisconnect, RuntimeError):
        log.debug("a command's client was gone before it could be closed")
