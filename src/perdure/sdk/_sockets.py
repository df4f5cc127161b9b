"""A WebSocket to the server, for async and sync code side by side (see ``_acompat``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as async_connect
from websockets.asyncio.client import unix_connect as async_unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection as Connection
from websockets.sync.client import connect, unix_connect

from perdure.core.errors import PerdureError
from perdure.sdk._core import CONNECT_TIMEOUT_S, Target, unreachable
from perdure.sdk.errors import ConnectionLost, rebuild

#: The handshake waits for the workspace to be awake.
OPEN_TIMEOUT_S = 180.0


def _options(target: Target) -> dict[str, Any]:
    return {
        "additional_headers": target.headers,
        "compression": None,
        "max_size": None,
        "open_timeout": OPEN_TIMEOUT_S,
        "close_timeout": CONNECT_TIMEOUT_S,
    }


def _refused(target: Target, error: Exception) -> PerdureError:
    """What a handshake that failed means."""
    if not isinstance(error, InvalidStatus):
        return unreachable(target, str(error))
    try:
        answer = json.loads(error.response.body or b"")
    except ValueError:
        answer = None
    return rebuild(answer, error.response.status_code)


def _lost(target: Target) -> ConnectionLost:
    return ConnectionLost(f"The connection to {target.label} was lost.")


async def open_websocket(target: Target, path: str) -> AsyncConnection:
    """Connect. Raises the error that a refusal stands for, or ServerUnreachable."""
    uri, options = target.websocket_url + path, _options(target)
    try:
        if target.socket is not None:
            return await async_unix_connect(str(target.socket), uri, **options)
        return await async_connect(uri, proxy=None, **options)
    except (OSError, WebSocketException) as error:
        raise _refused(target, error) from error


class AsyncSocket:
    """One connection. A peer that is gone is noticed, and raises ConnectionLost."""

    def __init__(self, target: Target, connection: AsyncConnection) -> None:
        self._target = target
        self._connection = connection

    @classmethod
    async def open(cls, target: Target, path: str) -> Self:
        return cls(target, await open_websocket(target, path))

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the answer to the handshake."""
        response = self._connection.response
        return response.headers if response is not None else {}

    async def send(self, message: str | bytes) -> None:
        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise _lost(self._target) from error

    async def receive(self) -> str | bytes:
        try:
            return await self._connection.recv()
        except ConnectionClosed as error:
            raise _lost(self._target) from error

    async def aclose(self) -> None:
        await self._connection.close()


class Socket:
    """The same for sync code. One thread may receive while another one sends."""

    def __init__(self, target: Target, connection: Connection) -> None:
        self._target = target
        self._connection = connection

    @classmethod
    def open(cls, target: Target, path: str) -> Self:
        uri, options = target.websocket_url + path, _options(target)
        try:
            if target.socket is not None:
                connection = unix_connect(str(target.socket), uri, legacy=True, **options)
            else:
                connection = connect(uri, proxy=None, legacy=True, **options)
        except (OSError, WebSocketException) as error:
            raise _refused(target, error) from error
        return cls(target, connection)

    @property
    def headers(self) -> Mapping[str, str]:
        response = self._connection.response
        return response.headers if response is not None else {}

    def send(self, message: str | bytes) -> None:
        try:
            self._connection.send(message)
        except ConnectionClosed as error:
            raise _lost(self._target) from error

    def receive(self) -> str | bytes:
        try:
            return self._connection.recv()
        except ConnectionClosed as error:
            raise _lost(self._target) from error

    def close(self) -> None:
        self._connection.close()
