"""A local TCP port that leads to a port inside a workspace: one WebSocket per connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from perdure.core.errors import InvalidRequest, PerdureError
from perdure.sdk._core import Target, workspace_path
from perdure.sdk._sockets import open_websocket

EOF = "eof"


class AsyncForward:
    """Listens while the ``async with`` block runs. ``last_error`` says why the latest connection was refused."""

    def __init__(self, target: Target, workspace_id: str, port: int, local: tuple[str, int]) -> None:
        if not 0 < port < 65536 or not 0 <= local[1] < 65536:
            raise InvalidRequest(
                f"{port if 0 <= local[1] < 65536 else local[1]} is not a TCP port.", hint="Ports are 1 to 65535."
            )
        self._target = target
        self._path = workspace_path(workspace_id, "tcp", str(port))
        self._local = local
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self.last_error: PerdureError | None = None
        self.on_error: Callable[[PerdureError], None] | None = None

    @property
    def local_port(self) -> int:
        assert self._server is not None, "the tunnel is not open"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://{self._local[0]}:{self.local_port}"

    async def __aenter__(self) -> Self:
        host, port = self._local
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            raise InvalidRequest(
                f"The local port {host}:{port} cannot be used: {error.strerror}.", hint="Choose another local port, or 0 for any."
            ) from error
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        connections = tuple(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Tasks of our own: asyncio complains on stderr about one of its own that is cancelled (before Python 3.12).
        task = asyncio.create_task(self._serve(reader, writer), name="perdure-forward")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: writer.close())  # also when it was cancelled before its first step

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with await open_websocket(self._target, self._path) as websocket:
                await _pump(reader, writer, websocket)
        except PerdureError as error:
            self.last_error = error
            if self.on_error is not None:
                self.on_error(error)
        except (ConnectionClosed, ConnectionError):
            pass


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, websocket: ClientConnection) -> None:
    """Both directions until both have ended or either broke."""
    tasks = [asyncio.create_task(_outward(reader, websocket)), asyncio.create_task(_inward(websocket, writer))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _outward(reader: asyncio.StreamReader, websocket: ClientConnection) -> None:
    while data := await reader.read(65536):
        await websocket.send(data)
    await websocket.send(EOF)


async def _inward(websocket: ClientConnection, writer: asyncio.StreamWriter) -> None:
    async for message in websocket:
        if isinstance(message, bytes):
            writer.write(message)
            await writer.drain()
        elif message == EOF:
            if writer.can_write_eof():
                writer.write_eof()
            return
    raise ConnectionResetError("the workspace's side closed the tunnel")


class Forward:
    """The same for sync code: an event loop in a thread of its own."""

    def __init__(self, target: Target, workspace_id: str, port: int, local: tuple[str, int]) -> None:
        self._tunnel = AsyncForward(target, workspace_id, port, local)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="perdure-forward", daemon=True)

    @property
    def local_port(self) -> int:
        return self._tunnel.local_port

    @property
    def url(self) -> str:
        return self._tunnel.url

    @property
    def last_error(self) -> PerdureError | None:
        return self._tunnel.last_error

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._tunnel.__aenter__(), self._loop).result()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._tunnel.__aexit__(None, None, None), self._loop).result()
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
