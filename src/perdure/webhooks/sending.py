"""One POST to a receiver: no redirects, no proxy, no cookies, short deadlines; of the answer only its status counts.

Where to connect is decided by whoever gives ``connect`` (see ``gateway.outward``): the address that was judged is the one that is
spoken to, and a name that leads elsewhere a moment later changes nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import h11

from perdure.core.errors import MachineFailed, PerdureError
from perdure.core.metrics import Stopwatch
from perdure.webhooks.messages import Target
from perdure.webhooks.model import Attempt

#: Name resolution, connecting, TLS, sending, and waiting for the status, together.
DEADLINE_S = 15.0
#: A head of an answer that is longer is none.
_HEAD_BYTES_MAX = 65536


class Connection(Protocol):
    async def secure(self, context: ssl.SSLContext, name: str) -> None: ...

    async def read(self, limit: int = 65536) -> bytes: ...

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


Connect = Callable[[str, int], Awaitable[Connection]]


class Sender:
    """``tls`` makes the context that judges certificates; it is made at the first URL of https."""

    def __init__(
        self, connect: Connect, *, deadline_s: float = DEADLINE_S, tls: Callable[[], ssl.SSLContext] = ssl.create_default_context
    ) -> None:
        self._connect = connect
        self._deadline_s = deadline_s
        self._make_tls = tls
        self._tls: ssl.SSLContext | None = None

    async def post(self, to: Target, headers: Mapping[str, str], body: bytes) -> Attempt:
        """What became of it; never raises for what network or receiver do."""
        watch = Stopwatch()
        try:
            async with asyncio.timeout(self._deadline_s):
                status = await self._post(to, headers, body)
        except TimeoutError:
            return Attempt(None, f"The receiver did not answer within {self._deadline_s:g} s.", watch.seconds)
        except h11.RemoteProtocolError:
            return Attempt(None, "The receiver's answer is not HTTP.", watch.seconds)
        except PerdureError as error:
            return Attempt(None, error.message, watch.seconds)
        return Attempt(status, _judged(status), watch.seconds)

    async def _post(self, to: Target, headers: Mapping[str, str], body: bytes) -> int:
        connection = await self._connect(to.host, to.port)
        try:
            if to.scheme == "https":
                if self._tls is None:
                    self._tls = await asyncio.to_thread(self._make_tls)
                await connection.secure(self._tls, to.host)
            http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)
            request = h11.Request(method="POST", target=to.path, headers=_head(to, headers, body))
            await connection.write(b"".join([http.send(request) or b"", http.send(h11.Data(data=body)) or b""]))
            http.send(h11.EndOfMessage())
            return await _status(connection, http)
        finally:
            await connection.close()


def _head(to: Target, headers: Mapping[str, str], body: bytes) -> list[tuple[str, str]]:
    own = {"host": to.host_header, "user-agent": "perdure-webhooks", "content-length": str(len(body)), "connection": "close"}
    return [*own.items(), *headers.items()]


async def _status(connection: Connection, http: h11.Connection) -> int:
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            data = await connection.read()
            if not data and http.their_state is h11.SEND_RESPONSE:
                raise MachineFailed("The receiver ended the connection without an answer.")
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            return event.status_code
        elif not isinstance(event, h11.InformationalResponse):
            raise MachineFailed("The receiver ended the connection without an answer.")


def _judged(status: int) -> str:
    if 200 <= status < 300:
        return ""
    if 300 <= status < 400:
        return f"The receiver answered with HTTP status {status}; a redirect is not followed."
    return f"The receiver answered with HTTP status {status}."
