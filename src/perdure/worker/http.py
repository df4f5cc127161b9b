"""A small HTTP/1.1 server on loopback, for what runs in the worker's processes: AWS clients and runtime clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import h11

#: What a handler may return is bounded by the server; this bounds what a defective client can make a worker hold.
BODY_LIMIT_BYTES = 64 << 20
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Request:
    """``target``: path and query as they came, still percent-encoded. Names of ``headers`` are in lower case."""

    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def header(self, name: bytes) -> str:
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class TooLarge(Exception):
    """The body is larger than ``BODY_LIMIT_BYTES``."""


class Loopback:
    """Serves ``answer`` on a free port of 127.0.0.1 until it is closed; what it raises is a defect and ends its connection."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """No request is answered any more."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(h11.RemoteProtocolError, ConnectionError, asyncio.CancelledError):
                await self._talk(h11.Connection(h11.SERVER), reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _talk(self, peer: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                request = await _request(peer, reader, writer)
            except TooLarge:
                await _respond(peer, writer, Response(413))
                return
            if request is None:
                return
            await _respond(peer, writer, await self._answer(request))
            if peer.our_state is not h11.DONE or peer.their_state is not h11.DONE:
                return
            peer.start_next_cycle()


async def _request(peer: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    """The next one, whole; None when the client has left."""
    head, body = None, bytearray()
    while True:
        event = peer.next_event()
        if event is h11.NEED_DATA:
            if peer.they_are_waiting_for_100_continue:
                writer.write(peer.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            peer.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > BODY_LIMIT_BYTES:
                raise TooLarge
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            return Request(head.method.decode(), head.target.decode("latin-1"), tuple(head.headers), bytes(body))
        else:
            return None


async def _respond(peer: h11.Connection, writer: asyncio.StreamWriter, response: Response) -> None:
    """In one write: a small answer in two would wait for an acknowledgement between them."""
    headers = [*response.headers.items(), ("content-length", str(len(response.body)))]
    head = h11.Response(status_code=response.status, headers=headers, reason=HTTPStatus(response.status).phrase.encode())
    pieces = [peer.send(head), peer.send(h11.Data(data=response.body)), peer.send(h11.EndOfMessage())]
    writer.write(b"".join(piece or b"" for piece in pieces))
    await writer.drain()
