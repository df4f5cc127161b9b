"""One server over HTTP/1.1 as cheaply as Python can: a request for each checkpoint goes this way, and its caller waits for it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from perdure.sdk import _core
from perdure.sdk._core import Target
from perdure.worker.http import Response

#: Connections that are kept open while nobody uses them.
IDLE_MAX = 20


class Lost(ConnectionError):
    """The connection ended before the answer did. ``was_idle``: it may have ended while nobody used it."""

    def __init__(self, *, was_idle: bool = False) -> None:
        super().__init__("the connection ended before the answer")
        self.was_idle = was_idle


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: h11.Connection
    is_used: bool = False
    is_answering: bool = False  # a byte of the answer has come


class Upstream:
    """Connections to the server, which are used again. Answers are read whole."""

    def __init__(self, target: Target) -> None:
        self._target = target
        parts = urlsplit(target.base_url)
        self._host, self._netloc, self._prefix = parts.hostname or "", parts.netloc, parts.path.rstrip("/")
        self._port = parts.port or (443 if target.has_tls else 80)
        self._own = [("host", self._netloc), *target.headers.items()]
        self._tls = ssl.create_default_context() if target.has_tls else None
        self._idle: list[_Connection] = []

    async def request(self, method: str, target: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Response:
        """``target``: path and query, passed on byte for byte. Raises OSError when the server does not answer."""
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            head = h11.Request(method=method, target=self._prefix + target, headers=self._headers(headers, body))
            try:
                return await self._exchange(connection, head, body)
            except BaseException as error:
                connection.writer.close()
                if not (isinstance(error, Lost) and error.was_idle):
                    raise

    def _headers(self, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
        own = [(name.encode(), value.encode()) for name, value in self._own]
        return [*own, *headers, (b"content-length", str(len(body)).encode())]

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(_core.CONNECT_TIMEOUT_S):  # its TimeoutError is an OSError
            if self._target.socket is not None:
                reader, writer = await asyncio.open_unix_connection(str(self._target.socket))
            else:
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return _Connection(reader, writer, h11.Connection(h11.CLIENT))

    async def _exchange(self, connection: _Connection, head: h11.Request, body: bytes) -> Response:
        peer = connection.peer
        was_used, connection.is_used, connection.is_answering = connection.is_used, True, False
        pieces = [peer.send(head), peer.send(h11.Data(data=body)), peer.send(h11.EndOfMessage())]
        try:
            connection.writer.write(b"".join(piece or b"" for piece in pieces))
            await connection.writer.drain()
            response = await _answer(connection)
        except (ConnectionError, h11.RemoteProtocolError) as error:
            raise Lost(was_idle=was_used and not connection.is_answering) from error
        if peer.our_state is h11.DONE and peer.their_state is h11.DONE and len(self._idle) < IDLE_MAX:
            peer.start_next_cycle()
            self._idle.append(connection)
        else:
            connection.writer.close()
        return response

    async def close(self) -> None:
        """Of those that nobody uses; the others are closed when their request is cancelled."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()


async def _answer(connection: _Connection) -> Response:
    peer, status, headers, body = connection.peer, 0, dict[str, str](), bytearray()
    while True:
        event = peer.next_event()
        if event is h11.NEED_DATA:
            piece = await connection.reader.read(1 << 16)
            connection.is_answering |= bool(piece)
            peer.receive_data(piece)
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return Response(status, bytes(body), headers)
        elif isinstance(event, h11.ConnectionClosed):
            raise Lost
