"""A real HTTP server that receives webhooks, and does to them what receivers do: takes, refuses, redirects, hangs, breaks off."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = bytes | Callable[[], Any]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
FAILS = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\n\r\nsecret"
MOVED = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
GARBAGE = b"\x00\x01 this is not HTTP\r\n\r\n"
NOTHING = b""  # the connection ends without a word
EARLY = b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK
HANGS = None


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


@dataclass
class Receiver:
    """``answers`` are given one after the other, then ``OK``. HANGS answers when ``release`` is set."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    answers: deque[bytes | None] = field(default_factory=deque)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/hook?token=t"

    @property
    def seqs(self) -> list[int]:
        return [one.event["data"]["seq"] for one in self.received]

    async def until(self, count: int) -> None:
        """Until so many were received."""
        async with asyncio.timeout(30):
            while len(self.received) < count:
                self.arrived.clear()
                await self.arrived.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.received.append(Received(head[0].split()[1], headers, body))
            self.arrived.set()
            answer = self.answers.popleft() if self.answers else OK
            if answer is None:
                await self.release.wait()
                answer = OK
            writer.write(answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # whoever sent it has gone
        finally:
            writer.close()


@asynccontextmanager
async def receiver(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """Listens on loopback."""
    made = Receiver(scheme="https" if tls else "http")
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.release.set()
        server.close()
