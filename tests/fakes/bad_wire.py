"""A TCP relay that loses what it is told to lose: a request before the server sees it, or an answer when the server has acted."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from enum import Enum, auto
from typing import Self
from urllib.parse import urlsplit

DEADLINE_S = 60
CHUNK = 65536
FOREIGN = (
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 20\r\nconnection: close\r\n\r\n<h1>Bad Gateway</h1>"
)


def _narrow() -> socket.socket:
    """A socket with little room: who sends much waits until it is read, and so knows when it was not."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.bind(("127.0.0.1", 0))
    return made


class Loss(Enum):
    REQUEST = auto()  # the connection is closed when the request's first bytes come; the server never sees them
    FOREIGN = auto()  # somebody else answers, as a proxy does that has nobody behind it; the server never sees the request
    ANSWER = auto()  # the server gets the whole request; the connection is closed when its answer's first bytes come


class BadWire:
    """``with BadWire(url) as wire``: speak to ``wire.url``. ``losses`` are what happens to the next exchanges, in order; after
    them nothing is lost. ``lost`` counts."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._server = (parts.hostname, parts.port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._listener: asyncio.Server
        self.url = ""
        self.losses: list[Loss] = []
        self.lost = 0

    def __enter__(self) -> Self:
        self._thread.start()

        async def begin() -> None:
            self._listener = await asyncio.start_server(self._serve, sock=_narrow())

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(DEADLINE_S)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._listener.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def _lose(self, kind: Loss) -> bool:
        if self.losses[:1] != [kind]:
            return False
        self.losses.pop(0)
        self.lost += 1
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inward, outward = await asyncio.open_connection(*self._server)
        try:
            await asyncio.wait(
                {
                    asyncio.create_task(self._relay(reader, outward, Loss.REQUEST, writer)),
                    asyncio.create_task(self._relay(inward, writer, Loss.ANSWER)),
                },
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for side in (outward, writer):
                side.close()

    async def _relay(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, loss: Loss, back: asyncio.StreamWriter | None = None
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(CHUNK):
                if self._lose(loss):
                    return
                if back is not None and self._lose(Loss.FOREIGN):
                    back.write(FOREIGN)
                    await back.drain()
                    return
                target.write(data)
                await target.drain()
