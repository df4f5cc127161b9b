"""The few things that async and sync code do differently, side by side. ``tools/unasync.py`` swaps the names."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import threading
import time
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from perdure.sdk._core import CHUNK_BYTES

if TYPE_CHECKING:
    from perdure.sdk._async.client import AsyncClient
    from perdure.sdk._sync.client import Client

AsyncData = str | bytes | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]
Data = str | bytes | IO[bytes] | Iterable[bytes]


async def apause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def pause(seconds: float) -> None:
    time.sleep(seconds)


class AsyncSent:
    """Whether a request has left whole, as the HTTP client tells on the way: one that has not was never acted on."""

    def __init__(self) -> None:
        self.is_whole = False

    async def __call__(self, event: str, _: object) -> None:
        self.is_whole |= event.endswith("send_request_body.complete")


class Sent:
    """The same for the sync client."""

    def __init__(self) -> None:
        self.is_whole = False

    def __call__(self, event: str, _: object) -> None:
        self.is_whole |= event.endswith("send_request_body.complete")


async def acall(callback: Callable[[Any], Any] | None, what: Any) -> None:
    """Call a callback, which may be a coroutine function, unless there is nothing to say."""
    if callback is not None and what:
        answer = callback(what)
        if inspect.isawaitable(answer):
            await answer


def call(callback: Callable[[Any], Any] | None, what: Any) -> None:
    if callback is not None and what:
        callback(what)


class AsyncBackground:
    """Runs a function beside the block; leaving the block cancels it. What fails in it is its own to tell."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def _run(self) -> None:
        await self._work()

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Background:
    """The same with a thread. It cannot be cancelled, but it is a daemon: its request ends when the command has ended."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="perdure-stdin", daemon=True).start()
        return self

    def _run(self) -> None:
        with suppress(Exception):
            self._work()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return None


def _pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def chunks(data: Data) -> Iterator[bytes]:
    """Any kind of content as pieces of at most CHUNK_BYTES (an iterable's own pieces stay as they are)."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        yield from _pieces(bytes(data))
    elif hasattr(data, "read"):
        while piece := data.read(CHUNK_BYTES):
            yield piece
    else:
        yield from data


async def achunks(data: AsyncData) -> AsyncIterator[bytes]:
    """Like ``chunks``; takes async iterables too."""
    if isinstance(data, AsyncIterable):
        async for piece in data:
            yield piece
    else:
        for piece in chunks(data):
            yield piece


class AsyncHashing:
    """Content on its way out, with length and SHA-256 of what has left."""

    def __init__(self, data: AsyncData) -> None:
        self._data = data
        self._digest = hashlib.sha256()
        self.length = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in achunks(self._data):
            self._digest.update(piece)
            self.length += len(piece)
            yield piece


class Hashing:
    """Content on its way out, with length and SHA-256 of what has left."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._digest = hashlib.sha256()
        self.length = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[bytes]:
        for piece in chunks(self._data):
            self._digest.update(piece)
            self.length += len(piece)
            yield piece


_async_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient] = weakref.WeakKeyDictionary()
_client: Client | None = None
_client_lock = threading.Lock()


def default_async_client() -> AsyncClient:
    """The shared client of the running event loop, made from the environment."""
    from perdure.sdk._async.client import AsyncClient

    loop = asyncio.get_running_loop()
    if loop not in _async_clients:
        _async_clients[loop] = AsyncClient()
    return _async_clients[loop]


def close_default_client() -> None:
    """Close the connections of the shared client, if there is one; the next use makes a new one."""
    global _client
    with _client_lock:
        client, _client = _client, None
    if client is not None:
        client.close()


def default_client() -> Client:
    """The shared client of this process, made from the environment."""
    global _client  # noqa: PLW0603 - one per process by intent
    from perdure.sdk._sync.client import Client

    with _client_lock:
        if _client is None:
            _client = Client()
        return _client
