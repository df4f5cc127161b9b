"""The guest's own API: HTTP/1.1 (RFC 9112) from a program in the workspace into an ASGI app in this process, with no listener.

A program connects to 127.0.0.1:7071 in its workspace; the agent turns each connection into a stream; this module parses it with
h11 and calls the app with ``scope["state"]["identity"]`` set to the identity that the host gave the machine. The guest holds no
token, so nothing it sends is believed about who it is; what it sends is bounded in size and time.

Half-close: a client that has sent its request and closed its writing side still gets its answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import h11

from perdure.core.errors import Busy, DeadlineExceeded, Forbidden, InvalidRequest, MachineFailed, PerdureError, StaleGeneration
from perdure.core.ids import WorkspaceId
from perdure.gateway.streams import Generations
from perdure.wire.node import ByteStream, Identity

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

#: What a Host or Origin may say: anything else is a web page in the workspace's browser that had its name rebound.
_LOCAL_HOSTS = frozenset({b"127.0.0.1", b"localhost"})


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    status = 413
    default_hint = "Send less; files do not belong here."


class BadHttp(InvalidRequest):
    code = "bad_http"
    status = 400
    default_hint = "Send HTTP/1.1, as any HTTP client does."


class AppFailed(PerdureError):
    """The app raised or broke the ASGI protocol; only the log says what."""

    default_hint = "The server's log says more."


@dataclass(frozen=True, slots=True)
class HttpLimits:
    connections_per_workspace: int = 32
    header_bytes: int = 16 * 1024
    body_bytes: int = 1 << 20
    idle_deadline_s: float = 75.0  # between requests of one connection
    request_deadline_s: float = 30.0  # from a request's first byte to its last
    answer_deadline_s: float = 120.0  # from the whole request to the whole answer
    linger_s: float = 2.0  # how long a refused client may go on sending


Report = Callable[[str, BaseException], None]


def _silent(_what: str, _error: BaseException) -> None:
    return None


class SelfService:
    """Serves the API streams of every registered (workspace, generation)."""

    def __init__(self, app: App, *, limits: HttpLimits | None = None, report: Report = _silent) -> None:
        self._app, self._report = app, report
        self._limits = limits or HttpLimits()
        self._running = Generations(self._limits.connections_per_workspace, "connections to its API")

    def register(self, identity: Identity) -> None:
        self._running.register(identity.workspace_id, identity.generation)

    async def drop(self, workspace_id: WorkspaceId, generation: int) -> int:
        """End every connection of a generation; returns how many there were. Safe twice."""
        return await self._running.drop(workspace_id, generation)

    async def serve(self, identity: Identity, stream: ByteStream) -> None:
        """Answer the requests of one connection until it ends, then close it. Never raises for what the guest sends."""
        connection = _Connection(stream, identity, self._limits)
        try:
            self._running.check(identity.workspace_id, identity.generation)
            with self._running.hold(identity.workspace_id, identity.generation):
                while await connection.next_request():
                    await connection.answer(self._app, self._report)
        except (Busy, StaleGeneration) as error:
            await connection.refuse(error if isinstance(error, Busy) else Busy(error.message), status=503)
        except (BadHttp, BodyTooLarge, DeadlineExceeded, Forbidden, AppFailed) as error:
            await connection.refuse(error)
        except MachineFailed:
            pass  # the program is gone
        finally:
            await stream.close()


class _Connection:
    """One HTTP connection: h11 on one side, the ASGI messages of one request at a time on the other."""

    def __init__(self, stream: ByteStream, identity: Identity, limits: HttpLimits) -> None:
        self._stream, self._identity, self._limits = stream, identity, limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes)
        self._request: h11.Request | None = None
        self._body_left = limits.body_bytes
        self._body_ended = False
        self._failure: PerdureError | None = None  # of the request's body; decides the answer
        self._answered = asyncio.Event()
        self._deadline: float | None = None  # on the loop's clock, once a request has begun
        self._app_task: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------------------------------------------------ requests

    async def next_request(self) -> bool:
        """Read the next request's head; False when the client is done."""
        if self._http.our_state is h11.DONE:
            while not self._body_ended and self._failure is None:
                await self._receive()  # the app answered without the body; a next request begins after it
            if self._failure is not None or self._http.their_state is not h11.DONE:
                return False
            self._http.start_next_cycle()
        elif self._http.our_state is not h11.IDLE:
            return False
        self._request, self._body_left, self._body_ended = None, self._limits.body_bytes, False
        self._answered.clear()
        self._deadline = None
        event = await self._next_event()
        if not isinstance(event, h11.Request):
            return False
        self._request = event
        _check_request(event, self._limits)
        return True

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event of the client's side: a request's first byte by the idle deadline, its last by the request's."""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise BadHttp(f"This is not an HTTP request that can be answered: {error}.") from error
            if event is not h11.NEED_DATA:
                return event
            if self._http.they_are_waiting_for_100_continue and self._http.our_state is h11.SEND_RESPONSE:
                await self._write(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._read())

    async def _read(self) -> bytes:
        now = asyncio.get_running_loop().time()
        if self._deadline is None and (self._request is not None or self._http.trailing_data[0]):
            self._deadline = now + self._limits.request_deadline_s
        try:
            async with asyncio.timeout_at(self._deadline or now + self._limits.idle_deadline_s):
                return await self._stream.read(65536)
        except TimeoutError:
            if self._deadline is None:
                return b""  # an idle connection ends without a word
            raise DeadlineExceeded(f"The request did not arrive within {self._limits.request_deadline_s:g} s.") from None

    # -------------------------------------------------------------------------------------------------------------- answer

    async def answer(self, app: App, report: Report) -> None:
        """Run the app on the request that was read; raises what the client must be told instead."""
        assert self._request is not None
        scope = _scope(self._request, self._identity)
        task = self._app_task = asyncio.ensure_future(app(scope, self._receive, self._send))
        try:
            await asyncio.wait({task}, timeout=self._limits.answer_deadline_s)
        finally:
            unfinished = not task.done()
            if unfinished:
                task.cancel()
                await asyncio.wait({task})
        if self._failure is not None:
            raise self._failure
        if unfinished:
            raise DeadlineExceeded(f"The answer took longer than {self._limits.answer_deadline_s:g} s.", ambiguous=True)
        error = task.exception()
        if isinstance(error, MachineFailed):
            raise error
        if error is not None:
            report("guest API", error)
            raise AppFailed("The server could not answer this request.", internal=repr(error)) from error
        if not self._answered.is_set():
            raise AppFailed("The server gave no complete answer to this request.")

    async def _receive(self) -> Message:
        """ASGI receive: the body in pieces, then nothing until the answer is complete."""
        if self._body_ended:
            await self._answered.wait()
            return {"type": "http.disconnect"}
        try:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                self._body_left -= len(event.data)
                if self._body_left < 0:
                    raise _too_large(self._limits)
                return {"type": "http.request", "body": bytes(event.data), "more_body": True}
        except (BadHttp, BodyTooLarge, DeadlineExceeded, MachineFailed) as failure:
            self._failure = failure
            self._body_ended = True
            if self._app_task is not None:
                self._app_task.cancel()
            return {"type": "http.disconnect"}
        self._body_ended = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Message) -> None:
        """ASGI send. After a broken body the app's own answer is not wanted any more."""
        if self._failure is not None:
            return
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            await self._write(h11.Response(status_code=message["status"], headers=headers))
            return
        body = message.get("body", b"")
        if body and not (self._request and self._request.method == b"HEAD"):
            await self._write(h11.Data(data=body))
        if not message.get("more_body", False):
            await self._write(h11.EndOfMessage())
            self._answered.set()

    async def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            await self._stream.write(data)

    async def refuse(self, error: PerdureError, *, status: int | None = None) -> None:
        """Answer with a plain JSON error where the protocol still allows one; the connection ends afterwards."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = json.dumps({"error": error.public()}).encode() + b"\n"
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        try:
            await self._write(h11.Response(status_code=status or error.status, headers=headers))
            await self._write(h11.Data(data=b"" if self._request and self._request.method == b"HEAD" else body))
            await self._write(h11.EndOfMessage())
            await self._stream.close_write()
            await self._linger()
        except MachineFailed:
            return  # the program is gone

    async def _linger(self) -> None:
        """Discard what still comes: closing with unread bytes is a reset, which can take the answer with it (RFC 9112 §9.6)."""
        left = self._limits.body_bytes
        try:
            async with asyncio.timeout(self._limits.linger_s):
                while left > 0 and (data := await self._stream.read(65536)):
                    left -= len(data)
        except TimeoutError:
            return


def _too_large(limits: HttpLimits) -> BodyTooLarge:
    return BodyTooLarge(f"The request's body is larger than {limits.body_bytes} bytes.")


def _check_request(request: h11.Request, limits: HttpLimits) -> None:
    """What can be refused before the app sees it."""
    if request.method == b"CONNECT":
        raise BadHttp("This is the workspace's own API, not a proxy.", hint="The proxy is in $HTTP_PROXY.")
    headers = dict(request.headers)
    if headers.get(b"host", b"127.0.0.1").lower().rpartition(b":")[0] not in _LOCAL_HOSTS and (
        headers.get(b"host", b"127.0.0.1").lower() not in _LOCAL_HOSTS
    ):
        raise Forbidden("This API answers only to its own address.", hint="Use http://127.0.0.1:7071.")
    origin = headers.get(b"origin")
    if origin is not None and origin.lower().removeprefix(b"http://").rpartition(b":")[0] not in _LOCAL_HOSTS:
        raise Forbidden("A web page of another origin may not use this API.", hint="Call it from a program.")
    length = headers.get(b"content-length")
    if length is not None and int(length) > limits.body_bytes:
        raise _too_large(limits)


def _scope(request: h11.Request, identity: Identity) -> dict[str, Any]:
    target = bytes(request.target)
    if target.lower().startswith(b"http://"):  # absolute form, as a client that believes it speaks to a proxy sends
        target = b"/" + target[7:].partition(b"/")[2]
    raw_path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.http_version.decode("ascii"),
        "method": request.method.decode("ascii"),
        "scheme": "http",
        "path": unquote_to_bytes(raw_path).decode("utf-8", "replace"),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": [(bytes(name), bytes(value)) for name, value in request.headers],
        "client": None,
        "server": ("127.0.0.1", 7071),
        "state": {"identity": identity},
    }
