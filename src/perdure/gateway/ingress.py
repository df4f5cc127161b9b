"""The way in: HTTP and WebSockets to a port of an awake workspace. Implements ``wire.node.Ports``.

A connection that has done its work is kept for a moment, for a page asks for many things at once. It may be used again only

* in the same generation: memory that a wake or a rewind has brought back knows nothing of it;
* when both sides have said all they had to and nothing came unasked since;
* for a request that may be sent again (GET, HEAD, OPTIONS without a body), since a program may close just as it is written to.

Everything else gets a connection of its own. One that is kept is watched: it goes when the program closes it or its time is over.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from perdure.core.errors import NotFound, PortClosed, PortRefused
from perdure.core.ids import WorkspaceId
from perdure.gateway import guestsocket
from perdure.gateway.guesthttp import GuestAnswer, GuestConnection
from perdure.wire.node import ByteStream, PortAnswer, PortLimits, PortPhase, PortPlace, PortRequest, PortSocket

#: How long a connection is kept. An open one counts as use of the workspace, so this is a part of what it stays awake for.
IDLE_S = 2.0
IDLE_MAX = 8  # of one port
REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})
DEFAULT_LIMITS = PortLimits()


@dataclass(frozen=True, slots=True)
class _Key:
    workspace_id: WorkspaceId
    generation: int
    port: int
    limits: PortLimits


class GuestPorts:
    """``close`` it in the end."""

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._idle: dict[_Key, dict[GuestConnection, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def request(self, place: PortPlace, request: PortRequest, limits: PortLimits | None = None) -> PortAnswer:
        key = _Key(place.workspace_id, place.generation, place.port, limits or DEFAULT_LIMITS)
        self._drop_older(key)
        request = _addressed(place, request)
        repeatable = request.method in REPEATABLE and request.body is None and request.upgrade is None
        if repeatable and (kept := self._take(key)) is not None:
            try:
                return await kept.request(request, partial(self._keep, key))
            except PortClosed:
                if kept.has_heard:
                    raise  # else it was on its way out; nothing of this request was answered
        return await self._fresh(place, request, key)

    async def _fresh(self, place: PortPlace, request: PortRequest, key: _Key) -> GuestAnswer:
        connection = GuestConnection(await _connect(place), key.limits)
        return await connection.request(request, partial(self._keep, key))

    async def open_socket(
        self, place: PortPlace, request: PortRequest, subprotocols: tuple[str, ...] = (), limits: PortLimits | None = None
    ) -> PortSocket | PortAnswer:
        key = _Key(place.workspace_id, place.generation, place.port, limits or DEFAULT_LIMITS)
        handshake = guestsocket.Handshake(subprotocols)
        answer = await self._fresh(place, handshake.request(_addressed(place, request)), key)
        if answer.upgraded is None:
            return answer
        try:
            return handshake.opened(answer, answer.upgraded, key.limits)
        except BaseException:
            await answer.aclose()
            raise

    # -------------------------------------------------------------------------------------------------- kept connections

    def kept(self, workspace_id: WorkspaceId) -> int:
        """Connections that wait for another request."""
        return sum(len(found) for key, found in self._idle.items() if key.workspace_id == workspace_id)

    def _keep(self, key: _Key, connection: GuestConnection) -> None:
        found = self._idle.setdefault(key, {})
        if len(found) >= IDLE_MAX:
            self._close_soon(connection)
            return
        found[connection] = asyncio.create_task(self._lapse(key, connection, connection.rest()), name="perdure-port-kept")

    def _take(self, key: _Key) -> GuestConnection | None:
        while found := self._idle.get(key):
            connection, lapse = found.popitem()  # the one that was used last
            lapse.cancel()
            if connection.is_quiet:
                return connection
            self._close_soon(connection)
        self._idle.pop(key, None)
        return None

    async def _lapse(self, key: _Key, connection: GuestConnection, unasked: asyncio.Task[bytes]) -> None:
        await asyncio.wait({unasked}, timeout=self._idle_s)
        found = self._idle.get(key, {})
        if found.pop(connection, None) is not None:
            if not found:
                self._idle.pop(key, None)
            await connection.close()

    async def drop(self, workspace_id: WorkspaceId, generation: int) -> None:
        """Close what is kept of a generation that is about to end: its programs see that now, not when they wake."""
        for key in [key for key in self._idle if (key.workspace_id, key.generation) == (workspace_id, generation)]:
            self._drop(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _drop_older(self, now: _Key) -> None:
        for key in [key for key in self._idle if key.workspace_id == now.workspace_id and key.generation != now.generation]:
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        for connection, lapse in self._idle.pop(key, {}).items():
            lapse.cancel()
            self._close_soon(connection)

    def _close_soon(self, connection: GuestConnection) -> None:
        task = asyncio.create_task(connection.close(), name="perdure-port-close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close what is kept. What is under way ends by itself."""
        for key in list(self._idle):
            self._drop(key)
        await asyncio.gather(*self._closing, return_exceptions=True)


async def _connect(place: PortPlace) -> ByteStream:
    try:
        return await place.guest.open_tcp(place.port)
    except NotFound as error:
        raise PortRefused(
            f"Nothing listens on port {place.port} in the workspace.", phase=PortPhase.CONNECTING, internal=error.message
        ) from error


def _addressed(place: PortPlace, request: PortRequest) -> PortRequest:
    """With a Host, which HTTP/1.1 asks for."""
    if any(name.lower() == b"host" for name, _ in request.headers):
        return request
    return replace(request, headers=((b"host", b"localhost:%d" % place.port), *request.headers))
