"""Answers that last: event streams, as NDJSON or server-sent events, and file contents.

Each holds what it needs (an awake workspace, an attachment) in an exit stack that is closed when the answer ends, however it
ends: the last event was sent, the client went away or lost its key, or the server stops. Going away detaches; it never kills.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.api.errors import error_info, internal_error
from perdure.api.underway import Ending
from perdure.core.errors import PerdureError, Unavailable
from perdure.wire.public import HEARTBEAT_S, Answer, ErrorInfo

log = logging.getLogger(__name__)


class _Lasting(Response):
    """Runs ``_pump`` until it is done, the client is gone or the server stops; then closes the stack."""

    def __init__(self, stack: AsyncExitStack, closing: Ending, headers: dict[str, str], media_type: str) -> None:
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._stack = stack
        self._closing = closing

    async def _pump(self, send: Send) -> None:
        raise NotImplementedError

    async def _farewell(self, send: Send) -> None:
        """Called instead of the rest when the server stops, or what let the request in counts no more."""

    async def _gone(self, receive: Receive) -> None:
        """Returns when the client has left."""
        await _disconnected(receive)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(self._gone(receive))
        closing = asyncio.create_task(self._closing.wait())
        tasks = {pump, gone, closing}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            stopped = closing.done() and not pump.done() and not gone.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stack.aclose()
        if stopped:
            await self._farewell(send)
        elif pump.done() and not pump.cancelled() and (error := pump.exception()) is not None:
            # The status is long sent. Leaving without the last chunk makes the client see a cut answer, not a short one.
            log.warning("an answer was cut: %s", error)

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where a stream's lines come from. ``wait_s`` bounds the stream, not the work: ``waited`` is then its last line."""

    events: AsyncIterator[Answer]
    heartbeat: Answer
    failed: Callable[[ErrorInfo], Answer]
    wait_s: float | None = None
    waited: Answer | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """How events become bytes."""

    media_type: str
    encode: Callable[[Answer], bytes]


def event_json(event: Answer) -> str:
    """One event on one line."""
    return event.model_dump_json(exclude_unset=True, exclude_none=True, ensure_ascii=True)


NDJSON = Format("application/x-ndjson", lambda event: event_json(event).encode() + b"\n")


class EventStream(_Lasting):
    """Events with heartbeats. An error in the middle is the last one, since the status has been sent."""

    def __init__(
        self,
        source: EventSource,
        stack: AsyncExitStack,
        closing: Ending,
        headers: dict[str, str],
        form: Format = NDJSON,
    ) -> None:
        super().__init__(stack, closing, {**headers, "cache-control": "no-store"}, form.media_type)
        self._source = source
        self._encode = form.encode

    async def _pump(self, send: Send) -> None:
        await self._start(send)
        try:
            async with aclosing(_paced(self._source)) as events:
                async for event in events:
                    await self._line(send, event)
        except PerdureError as error:
            await self._line(send, self._source.failed(error_info(error)))
        except Exception:  # the top of this answer's task: the stream's last line records the failure
            log.exception("an event stream failed")
            await self._line(send, self._source.failed(internal_error()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _line(self, send: Send, event: Answer) -> None:
        await send({"type": "http.response.body", "body": self._encode(event), "more_body": True})

    async def _farewell(self, send: Send) -> None:
        stopping = Unavailable(
            "The server is stopping; what was started goes on when the workspace wakes.", hint="Attach again later."
        )
        await self._line(send, self._source.failed(error_info(self._closing.reason(stopping))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _paced(source: EventSource) -> AsyncGenerator[Answer]:
    """The source's events with heartbeats in between, ended by ``waited`` when the wait is over first."""
    loop = asyncio.get_running_loop()
    deadline = None if source.wait_s is None else loop.time() + source.wait_s
    upcoming: asyncio.Task[Answer] | None = None
    try:
        while True:
            if upcoming is None:
                upcoming = asyncio.ensure_future(_next(source.events))
            patience = HEARTBEAT_S if deadline is None else min(HEARTBEAT_S, max(0.0, deadline - loop.time()))
            done, _ = await asyncio.wait({upcoming}, timeout=patience)
            if done:
                try:
                    event = upcoming.result()
                except StopAsyncIteration:
                    return
                upcoming = None
                yield event
            elif deadline is not None and loop.time() >= deadline:
                if source.waited is not None:
                    yield source.waited
                return
            else:
                yield source.heartbeat
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)
        if isinstance(source.events, AsyncGenerator):
            await source.events.aclose()


async def _next(events: AsyncIterator[Answer]) -> Answer:
    return await anext(events)


class ServerSentEvents(_Lasting):
    """The ``text/event-stream`` of the HTML standard. Each event's id is its ``seq``; the first line is the id that the stream
    begins after, so that a client which loses the connection before its first event misses none."""

    def __init__(self, source: EventSource, stack: AsyncExitStack, closing: Ending, *, first_id: int) -> None:
        super().__init__(stack, closing, {"cache-control": "no-store"}, "text/event-stream")
        self._source = source
        self._first_id = first_id

    async def _pump(self, send: Send) -> None:
        await self._start(send)
        await _part(send, f"id: {self._first_id}\n\n".encode())
        try:
            async with aclosing(_paced(self._source)) as events:
                async for event in events:
                    if event is self._source.heartbeat:
                        await _part(send, b": heartbeat\n\n")
                    else:
                        await _part(send, f"id: {event.seq}\ndata: ".encode() + event_json(event).encode() + b"\n\n")  # type: ignore[attr-defined]
        except PerdureError as error:
            await self._fail(send, error_info(error))
        except Exception:  # the top of this answer's task: the stream's last event records the failure
            log.exception("an event stream failed")
            await self._fail(send, internal_error())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, send: Send, error: ErrorInfo) -> None:
        await _part(send, b"event: error\ndata: " + event_json(self._source.failed(error)).encode() + b"\n\n")

    async def _farewell(self, send: Send) -> None:
        """Clients connect again by themselves: to a server that stops. Of a key that counts no more they are told."""
        if self._closing.why is not None:
            await self._fail(send, error_info(self._closing.why))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


class ContentStream(_Lasting):
    """A file's bytes, or a directory's. With ``length`` the answer has exactly that many or is visibly cut."""

    kind = "application/octet-stream"

    def __init__(
        self,
        content: AsyncIterator[bytes],
        length: int | None,
        stack: AsyncExitStack,
        closing: Ending,
        headers: dict[str, str],
    ) -> None:
        super().__init__(stack, closing, headers, self.kind)
        self._content = content
        self._remaining = length
        if length is not None:
            self.headers["content-length"] = str(length)

    async def _pump(self, send: Send) -> None:
        await self._start(send)
        async for part in self._content:
            chunk = part
            if self._remaining is not None:
                chunk = part[: self._remaining]
                self._remaining -= len(chunk)
            if chunk:
                await send({"type": "http.response.body", "body": bytes(chunk), "more_body": True})
            if self._remaining == 0:
                break
        if self._remaining:
            raise Unavailable("The file became shorter while it was read.")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ArchiveStream(ContentStream):
    kind = "application/x-tar"
