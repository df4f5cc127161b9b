"""HTTP/1.1 (RFC 9112) as a client, over a byte stream to a program in a workspace. The program may be anything, an attacker too.

One connection carries one exchange at a time::

    request ──▶ sender task: head, body as it comes ──▶ stream
    stream  ──▶ head (1xx passed over) ──▶ answer ──▶ body(), piece by piece; nothing is read ahead of whoever reads

An answer may come before the request's body has ended; the rest of it is sent for as long as the answer lasts. What does not fit
HTTP, ends early or is silent for too long is a PortFailed that says how far the exchange came. An exchange that fails or is
cancelled closes its stream. Trailers are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import h11

from perdure.core.errors import InvalidRequest, PerdureError, PortClosed, PortFailed, PortMalformed, PortSilent
from perdure.wire.node import ByteStream, Headers, PortLimits, PortPhase, PortRequest

CHUNK_BYTES = 65536
#: Answers of the kind 1xx before the real one.
INTERIM_MAX = 32
SWITCHING = 101
STATUS_END = 600


class GuestConnection:
    """A connection of its own stream, which it closes."""

    def __init__(self, stream: ByteStream, limits: PortLimits) -> None:
        self._stream = stream
        self.limits = limits
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.head_bytes)
        self._sender: asyncio.Task[None] | None = None
        self._read_ahead: asyncio.Task[bytes] | None = (
            None  # while idle: whatever it brings, the connection is of no use any more
        )
        self._is_over = False  # the program has closed its side
        self.has_heard = False  # of the current exchange: at least a byte of an answer

    # ------------------------------------------------------------------------------------------------------ one exchange

    async def request(self, request: PortRequest, done: Callable[[GuestConnection], None] | None = None) -> GuestAnswer:
        """Send it; returns with the answer's head. ``done`` is called when another request may follow on this connection."""
        try:
            opening = self._opening(request)
            self.has_heard = False
            self._sender = asyncio.create_task(self._send(opening, request), name="perdure-port-request")
            head = await self._head()
        except BaseException:
            await self.close()
            raise
        return GuestAnswer(self, head, done)

    def _opening(self, request: PortRequest) -> bytes:
        """The head, and all of a request that has no body: h11 must know that it is whole before it believes an upgrade."""
        if request.method == "CONNECT":  # h11 would hand the stream over
            raise InvalidRequest("CONNECT is for proxies.", hint="Use a tunnel to the port: perdure forward.")
        try:
            opening = self._http.send(h11.Request(method=request.method, target=request.target, headers=[*_framed(request)]))
            return opening if request.body is not None else opening + self._http.send(h11.EndOfMessage())
        except h11.LocalProtocolError as error:
            raise InvalidRequest(f"This request cannot be sent by HTTP: {error}.") from error

    async def _send(self, opening: bytes, request: PortRequest) -> None:
        await self._write(opening)
        if request.body is None:
            return
        try:
            async for piece in request.body:
                if piece:
                    await self._write(self._http.send(h11.Data(data=piece)))
            await self._write(self._http.send(h11.EndOfMessage()))
        except h11.LocalProtocolError as error:
            raise InvalidRequest(f"The request's body is not as long as it was said to be: {error}.") from error

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self.limits.answer_s):
                await self._stream.write(data)
        except TimeoutError:
            raise self._silent(PortPhase.SENDING) from None
        except PerdureError as error:
            raise _closed(PortPhase.SENDING, error) from error

    async def _head(self) -> h11.Response | h11.InformationalResponse:
        """Wait for the answer while the request is being sent. Silence counts while it is the program's turn."""
        assert self._sender is not None
        reader = asyncio.create_task(self._read_head(), name="perdure-port-answer")
        try:
            while not self._sender.done():
                await asyncio.wait({reader, self._sender}, return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    return await reader
            failure = self._sender.exception()
            if isinstance(failure, PortClosed):
                failure = None  # it reads no more, and may have said why
            if failure is None:
                await asyncio.wait({reader}, timeout=self.limits.answer_s)
            if reader.done():
                return await reader
            raise failure or self._silent(PortPhase.WAITING)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_head(self) -> h11.Response | h11.InformationalResponse:
        for _ in range(INTERIM_MAX):
            event = await self.next_event(PortPhase.WAITING, None)
            if isinstance(event, h11.Response) and event.status_code >= STATUS_END:
                raise _malformed(PortPhase.WAITING, f"{event.status_code} is no status")
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise _closed(PortPhase.WAITING)
            if event.status_code == SWITCHING:
                return event
        raise _malformed(PortPhase.WAITING, f"it sent {INTERIM_MAX} interim answers and no final one")

    # ----------------------------------------------------------------------------------------------------------- reading

    async def next_event(self, phase: PortPhase, silence_s: float | None) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event of the answer."""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                if self._is_over:
                    raise _closed(phase) from error
                raise _malformed(phase, str(error)) from error
            if event is not h11.NEED_DATA:
                return event
            data = await self._read(phase, silence_s)
            self._is_over = not data
            self.has_heard = self.has_heard or bool(data)
            self._http.receive_data(data)

    async def _read(self, phase: PortPhase, silence_s: float | None) -> bytes:
        ahead, self._read_ahead = self._read_ahead, None
        try:
            async with asyncio.timeout(silence_s):
                return await (ahead if ahead is not None else self._stream.read(CHUNK_BYTES))
        except TimeoutError:
            raise self._silent(phase) from None
        except PerdureError as error:
            raise _closed(phase, error) from error

    # ------------------------------------------------------------------------------------------------- between exchanges

    def is_reusable(self) -> bool:
        """Whether another request may follow: both sides have said all, and nothing has come that nobody asked for."""
        sent = self._sender is not None and self._sender.done() and not self._sender.cancelled() and not self._sender.exception()
        whole = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        return sent and whole and self._http.trailing_data == (b"", False)

    def rest(self) -> asyncio.Task[bytes]:
        """Make ready for the next request. The task ends when the program closes the connection or sends something unasked."""
        self._http.start_next_cycle()
        self._read_ahead = asyncio.create_task(self._stream.read(CHUNK_BYTES), name="perdure-port-idle")
        return self._read_ahead

    @property
    def is_quiet(self) -> bool:
        """Whether it still waits for another request."""
        return self._read_ahead is not None and not self._read_ahead.done()

    def upgraded(self) -> ByteStream:
        """After 101: the stream, with what has arrived behind the head before everything else."""
        data, is_over = self._http.trailing_data
        return _Rest(self._stream, data, is_over=is_over)

    async def close(self) -> None:
        """End it, whatever is under way. Safe to call twice."""
        tasks = [task for task in (self._sender, self._read_ahead) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._stream.close()

    def _silent(self, phase: PortPhase) -> PortFailed:
        did = {
            PortPhase.SENDING: "did not take the request",
            PortPhase.WAITING: "did not answer",
            PortPhase.ANSWERING: "did not go on with its answer",
        }
        waited_s = self.limits.body_silence_s if phase is PortPhase.ANSWERING else self.limits.answer_s
        return PortSilent(f"The program in the workspace {did[phase]} within {waited_s:g} s.", phase=phase)


class GuestAnswer:
    """Implements ``wire.node.PortAnswer``."""

    def __init__(
        self,
        connection: GuestConnection,
        head: h11.Response | h11.InformationalResponse,
        done: Callable[[GuestConnection], None] | None,
    ) -> None:
        self.status = head.status_code
        self.reason = bytes(head.reason)
        self.headers: Headers = tuple((bytes(name), bytes(value)) for name, value in head.headers)
        self.upgraded = connection.upgraded() if head.status_code == SWITCHING else None
        self._connection = connection
        self._done = done
        self._is_finished = False

    async def body(self) -> AsyncGenerator[bytes]:
        limits = self._connection.limits
        try:
            while isinstance(event := await self._connection.next_event(PortPhase.ANSWERING, limits.body_silence_s), h11.Data):
                yield bytes(event.data)
            if not isinstance(event, h11.EndOfMessage):
                raise _closed(PortPhase.ANSWERING)
            if self._done is not None and self._connection.is_reusable():
                self._is_finished = True
                self._done(self._connection)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            await self._connection.close()


class _Rest:
    """A stream whose first bytes were read already."""

    def __init__(self, stream: ByteStream, data: bytes, *, is_over: bool) -> None:
        self._stream, self._data, self._is_over = stream, data, is_over

    async def read(self, limit: int = CHUNK_BYTES) -> bytes:
        if self._data:
            data, self._data = self._data[:limit], self._data[limit:]
            return data
        return b"" if self._is_over else await self._stream.read(limit)

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def close_write(self) -> None:
        await self._stream.close_write()

    async def close(self) -> None:
        await self._stream.close()


def _framed(request: PortRequest) -> Headers:
    """The headers with framing of our own. A request that brings any is a defect of the caller: two framings are how requests are
    smuggled."""
    assert request.body is None or request.upgrade is None, "a request that changes protocols has no body here"
    names = {name.lower() for name, _ in request.headers}
    assert not names & {b"content-length", b"transfer-encoding", b"connection", b"upgrade"}, "framing is made here"
    framing: list[tuple[bytes, bytes]] = [] if b"host" in names else [(b"host", b"localhost")]
    if request.upgrade is not None:
        framing += [(b"connection", b"upgrade"), (b"upgrade", request.upgrade.encode("ascii"))]
    elif request.body is None and request.method.upper() in {"POST", "PUT", "PATCH"}:
        framing.append((b"content-length", b"0"))
    elif request.body is not None:
        known = (b"transfer-encoding", b"chunked") if request.length is None else (b"content-length", b"%d" % request.length)
        framing.append(known)
    if request.is_last and request.upgrade is None:
        framing.append((b"connection", b"close"))
    return (*request.headers, *framing)


def _closed(phase: PortPhase, cause: PerdureError | None = None) -> PortClosed:
    when = {
        PortPhase.SENDING: "before it had the whole request",
        PortPhase.WAITING: "before it answered",
        PortPhase.ANSWERING: "in the middle of its answer",
    }
    return PortClosed(
        f"The program in the workspace closed the connection {when[phase]}.", phase=phase, internal=cause.message if cause else ""
    )


def _malformed(phase: PortPhase, what: str) -> PortMalformed:
    return PortMalformed(f"The program in the workspace did not answer in HTTP/1.1: {_clean(what)}.", phase=phase)


def _clean(what: str) -> str:
    """h11 quotes what it did not understand, which is the program's."""
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in what[:200])
    return shown.removesuffix(".")
