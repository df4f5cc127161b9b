"""Carries a request to a program in a workspace, and its answer back. Nothing is kept: each side waits for the other.

The workspace is held awake until the answer has ended. Whoever leaves first ends it: the client (the program's connection is
closed), the program (the answer is visibly cut), or the server, which stops or knows its key or link no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from perdure.api.deps import awake_headers
from perdure.api.ingress import headers, pages
from perdure.api.ingress.headers import Way
from perdure.api.services import Services
from perdure.api.underway import Ending, Leave
from perdure.core.errors import PerdureError, Unavailable
from perdure.wire.node import Headers, PortLimits, PortPlace, PortRequest
from perdure.workspaces.model import Awake, Context

log = logging.getLogger(__name__)

#: Of a body, beside the one that the program is sent: as long as a connection gives them.
PIECES = 2


@dataclass(frozen=True, slots=True)
class Visit:
    """A request that may go in, and what it was let in by. ``is_keyed``: whoever asks has a key, so it may know how the workspace
    is."""

    ctx: Context
    ref: str
    way: Way
    target: bytes
    leave: Leave | None
    is_keyed: bool


def stopping() -> Unavailable:
    return Unavailable("The server is stopping.", hint="Ask again when it is back; the workspace is kept.")


def place_of(visit: Visit, awake: Awake) -> PortPlace:
    return PortPlace(awake.workspace.id, awake.workspace.generation, awake.guest, visit.way.port)


def told(visit: Visit, awake: Awake) -> Headers:
    """What an answer says of the workspace, to those who may know."""
    found = awake_headers(awake) if visit.is_keyed else {}
    return tuple((name.encode(), value.encode()) for name, value in found.items())


class _Client:
    """The other end: its body in pieces, as they come, and whether it has left.

    It is read from the first moment, so that one with a short body which leaves during the wake is seen to; of a longer one a
    few pieces are taken, and the rest when the program can take it. ``waits``: it sends nothing before it is told to go on, and
    it is told when the program is there.
    """

    def __init__(self, receive: Receive, *, waits: bool) -> None:
        self.left = asyncio.Event()
        self._receive = receive
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(PIECES)
        self._reader: asyncio.Task[None] | None = None
        if not waits:
            self._start()

    def _start(self) -> None:
        self._reader = asyncio.create_task(self._read(), name="perdure-relay-client")

    async def _read(self) -> None:
        more = True
        while (message := await self._receive())["type"] != "http.disconnect":
            if more:
                if body := message.get("body", b""):
                    await self._pieces.put(body)
                more = bool(message.get("more_body", False))
                if not more:
                    await self._pieces.put(None)
        self.left.set()

    async def body(self) -> AsyncIterator[bytes]:
        if self._reader is None:
            self._start()
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)


class Relay:
    """One request."""

    def __init__(self, services: Services, visit: Visit, scope: Scope, send: Send) -> None:
        self._services = services
        self._visit = visit
        self._scope = scope
        self._send = send
        self._has_begun = False
        self._came: Headers = tuple(scope["headers"])

    async def run(self, receive: Receive, closing: Ending) -> None:
        has_body, length = headers.body_length(self._came)
        client = _Client(receive, waits=has_body and any(name == b"expect" for name, _ in self._came))
        work = asyncio.create_task(self._carry(client, length if has_body else None, has_body=has_body), name="perdure-relay")
        left, stop = asyncio.create_task(client.left.wait()), asyncio.create_task(closing.wait())
        try:
            await asyncio.wait({work, left, stop}, return_when=asyncio.FIRST_COMPLETED)
            stopped = stop.done() and not work.done() and not left.done()
        finally:
            for task in (work, left, stop):
                task.cancel()
            await asyncio.gather(work, left, stop, return_exceptions=True)
            await client.close()
        if stopped:
            await self._fail(closing.reason(stopping()))
        elif not work.cancelled() and (failure := work.exception()) is not None:
            if not isinstance(failure, PerdureError):
                raise failure
            await self._fail(failure)

    async def _carry(self, client: _Client, length: int | None, *, has_body: bool) -> None:
        visit = self._visit
        request = PortRequest(
            method=self._scope["method"],
            target=visit.target,
            headers=headers.to_program(self._came, visit.way),
            body=client.body() if has_body else None,
            length=length,
        )
        limits = PortLimits(answer_s=self._services.settings.port_answer_s)
        async with self._services.workspaces.awake(visit.ctx, visit.ref) as awake:
            answer = await self._services.ports.request(place_of(visit, awake), request, limits)
            async with aclosing(answer), aclosing(answer.body()) as body:
                found = (*headers.from_program(answer.headers, answer.status, visit.way), *told(visit, awake))
                await self._pass({"type": "http.response.start", "status": answer.status, "headers": list(found)})
                async for piece in body:
                    await self._pass({"type": "http.response.body", "body": piece, "more_body": True})
                await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, message: Message) -> None:
        self._has_begun = True
        await self._send(message)

    async def _fail(self, error: PerdureError) -> None:
        """Say why there is no answer. One that has begun can only be cut: leaving without its end makes the client see that."""
        if self._has_begun:
            log.info("a program's answer was cut: %s", error.message)
            return
        if error.internal:
            log.info("%s: %s (%s)", error.code, error.message, error.internal)
        as_page = self._visit.way.form is headers.Form.HOST and headers.wants_page(self._came)
        await pages.send(pages.answer(error, as_page=as_page), self._scope, self._send)
