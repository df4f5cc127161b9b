"""Calling a workspace's program by the container contract (reference: aws.md §2.3): when it is ready, and what passes.

Only what the contract names reaches the program: content type and what is accepted, session and request id, custom headers, trace
context. The key that the caller has for this server never does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from perdure.core.errors import NotFound, ProgramFailing, ProgramMissing, ProgramNotReady, ProgramSilent
from perdure.wire import node, public
from perdure.wire.node import Headers, ProgramState

#: How long one ``/ping`` may take. A handler that keeps its program from answering that is at fault by the contract.
PING_S = 5.0
FIRST_DELAY_S = 0.02
LONGEST_DELAY_S = 1.0
#: Ends in a row after which nobody waits for another start: it will end again.
FAILURES_MAX = 3
LOG_LINES = 20
LOG_BYTES_MAX = 4000

_PASSED = frozenset({b"content-type", b"accept", b"accept-language", b"traceparent", b"tracestate", b"baggage"})
_ANSWERED = frozenset({b"content-type", b"content-encoding", b"content-language", b"cache-control"})
_PREFIX = public.RUNTIME_PREFIX.encode()
_CUSTOM = public.CUSTOM_PREFIX.encode()
_SESSION = public.SESSION_HEADER.encode()
_REQUEST = public.RUNTIME_REQUEST_HEADER.encode()
#: What a program answers is not this server's own: a browser must not take it for that.
_FOREIGN: Headers = (
    (b"content-security-policy", b"sandbox"),
    (b"x-content-type-options", b"nosniff"),
    (public.ANSWERED_BY_HEADER.encode(), b"program"),
)


# ----------------------------------------------------------------------------------------------------------------- ready


async def await_ready(guest: node.Guest, deadline_s: float) -> int:
    """The port of a program that answers ``GET /ping``, once it does. Raises a ProgramNotReady that says why it does not."""
    loop = asyncio.get_running_loop()
    ends_at, delay_s = loop.time() + deadline_s, FIRST_DELAY_S
    while True:
        ping = await guest.ping_program(max(0.0, min(PING_S, ends_at - loop.time())))
        if ping is not None:
            return ping.port
        status = await guest.program()
        failure = _hopeless(status)
        if failure is None and loop.time() >= ends_at:
            failure = await _late(guest, status, deadline_s)
        if failure is not None:
            failure.details = {"reason": failure.details["reason"], **await _last_lines(guest, status)}
            raise failure
        await asyncio.sleep(min(delay_s, max(0.0, ends_at - loop.time())))
        delay_s = min(LONGEST_DELAY_S, 2 * delay_s)


def _hopeless(status: node.ProgramStatus) -> ProgramNotReady | None:
    """Why waiting is of no use; None while it may be."""
    if status.spec is None and status.state is ProgramState.NONE:
        why = status.problem or "None is named, and nothing answers on port 8080."
        return ProgramMissing(f"This workspace has no program to invoke: {why}", reason="no-program")
    if status.state is ProgramState.STOPPED:
        return ProgramFailing(
            "The workspace's program was stopped.", reason="stopped", hint="Start it: perdure program start NAME."
        )
    if status.state is ProgramState.ENDED:
        return ProgramFailing(f"The workspace's program has ended{_ended(status)}, and is not started again.", reason="ended")
    if status.state is ProgramState.BACKING_OFF and status.failures >= FAILURES_MAX:
        return ProgramFailing(
            f"The workspace's program has failed {status.failures} times in a row, the last time{_ended(status)}.",
            reason="crashed",
        )
    return None


def _ended(status: node.ProgramStatus) -> str:
    last = status.last
    if last is None or last.exit_code is None:
        return " for a reason nobody saw"
    why = last.detail.rstrip(".")
    return f" with exit code {last.exit_code}{f' ({why})' if why else ''}"


async def _late(guest: node.Guest, status: node.ProgramStatus, deadline_s: float) -> ProgramNotReady:
    """It runs, or will again, and has not answered in time."""
    if status.state is ProgramState.BACKING_OFF:
        return ProgramFailing(f"The workspace's program has ended{_ended(status)}; it will be started again.", reason="crashed")
    port = status.spec.port if status.spec else 0
    try:
        stream = await guest.open_tcp(port)
    except NotFound:
        return ProgramNotReady(
            f"The workspace's program runs, but did not listen on port {port} within {deadline_s:g} s.", reason="not-listening"
        )
    await stream.close()
    return ProgramSilent(
        f"The workspace's program did not answer GET /ping on port {port} with its status within {deadline_s:g} s.",
        reason="no-answer",
    )


async def _last_lines(guest: node.Guest, status: node.ProgramStatus) -> dict[str, str]:
    """The end of what it wrote, for whoever reads the error; nothing when it wrote nothing."""
    if status.log_end == 0:
        return {}
    content = b""
    async for chunk in guest.program_log(node.LogRequest(tail=LOG_LINES)):
        content = (content + chunk.data)[-LOG_BYTES_MAX:]
    return {"log": content.decode("utf-8", "replace").strip()}


# --------------------------------------------------------------------------------------------------------------- headers


def inward(headers: Iterable[tuple[bytes, bytes]], session_id: str, request_id: str) -> Headers:
    """What of a caller's headers the program gets, with the session (the workspace, unless he names one) and the request."""
    given = [(name.lower(), value) for name, value in headers]
    passed = [(name, value) for name, value in given if name in _PASSED or name.startswith(_CUSTOM)]
    session = next((value for name, value in given if name == _SESSION), session_id.encode())
    return (*passed, (_SESSION, session), (_REQUEST, request_id.encode()))


def outward(headers: Headers) -> Headers:
    """What of the program's answer its caller gets: no cookies, nothing about connections, nothing about origins."""
    passed = [(name, value) for name, value in headers if name in _ANSWERED or name.startswith(_PREFIX)]
    return (*passed, *_FOREIGN)


# ---------------------------------------------------------------------------------------------------------------- caller


class Caller:
    """The one who reads from a request's connection: first its body, then whether its client is still there."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_read = asyncio.Event()
        self._has_left = False

    async def body(self) -> AsyncIterator[bytes]:
        """The body in pieces; raises ClientDisconnect when the client leaves before its end."""
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._has_left = True
                    raise ClientDisconnect
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body"):
                    return
        finally:
            self._is_read.set()

    async def left(self) -> None:
        """Returns when the client is gone."""
        await self._is_read.wait()
        while not self._has_left:
            self._has_left = (await self._receive())["type"] == "http.disconnect"
