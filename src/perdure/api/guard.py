"""Who may speak, decided per listener before a route is even looked up.

``SocketGuard`` stands before a Unix socket with mode 0600: the file system has checked the caller, who is an admin of the
default tenant. ``TcpGuard`` stands before TCP: a Bearer key is always needed, ``Host`` must be a name this server was given
(else a web page could reach it by rebinding its own DNS name to loopback), and an ``Origin``, which only browsers send, must be
such a name too. AWS's clients sign their requests instead of sending the key (``api.aws``). Whoever asks for a port of a
workspace with a share link needs no key, and is let in by nothing else (``ingress``). Without one of the guards in front the
application answers nobody. What a caller may do is asked per route (``policy``). Before a guard stands ``traffic.Traffic``,
which has given the request its id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.access import signatures
from perdure.access.audit import Act
from perdure.access.model import LOCAL, VISITOR, Principal
from perdure.api.aws import faults, paths
from perdure.api.aws.signing import signer
from perdure.api.errors import error_response
from perdure.api.ingress.admission import is_shared
from perdure.api.services import Services
from perdure.api.throttle import Throttle
from perdure.api.traffic import REQUEST_ID
from perdure.api.trail import TRAIL, Trail
from perdure.api.underway import ENDING, Underway
from perdure.core import ids, logs
from perdure.core.clock import epoch_ms
from perdure.core.errors import Forbidden, InvalidRequest, NotFound, PerdureError, Unauthenticated
from perdure.core.ids import DEFAULT_TENANT, RequestId

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
#: Bodies that are parsed as a whole may be this large; file contents and stdin are streamed and have no limit.
BODY_BYTES_MAX = 4 << 20
STREAMED = re.compile(
    r"/v1/workspaces/[^/]+/(?:files/(?:content|tar|uploads/[^/]+)|execs/[^/]+/stdin|ports/[0-9]+/.*|invocations)", re.DOTALL
)
#: Those that hold what an execution's function takes or returns.
LARGE_BODY_BYTES_MAX = 32 << 20
LARGE = re.compile(r"/v1/executions(?:/[^/]+/invocations/[^/]+/answer)?|/v1/callbacks/.+/succeed", re.DOTALL)
CALLER = "perdure.caller"
METRICS_PATH = "/metrics"


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    status = 413


@dataclass(frozen=True, slots=True)
class Caller:
    """Set in the ASGI scope by a guard."""

    principal: Principal
    request_id: RequestId


class SocketGuard:
    """For the 0600 Unix socket: no key."""

    def __init__(self, app: ASGIApp, services: Services, underway: Underway) -> None:
        self._app = app
        self._services = services
        self._underway = underway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        trail = _trail(self._services, scope)
        trail.who(LOCAL)
        with self._underway.request(None) as scope[ENDING]:
            await _forward(self._app, LOCAL, trail, scope, receive, send)


class TcpGuard:
    """For TCP: key, Host and Origin."""

    def __init__(self, app: ASGIApp, services: Services, throttle: Throttle, underway: Underway) -> None:
        self._app = app
        self._services = services
        self._throttle = throttle
        self._underway = underway
        settings = services.settings
        self._hosts = LOOPBACK_NAMES | {name.lower().strip("[]") for name in (settings.listen_host, *settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        trail = _trail(self._services, scope)
        try:
            principal, receive = await self._admit(scope, receive, trail)
        except ClientDisconnect:
            return
        except PerdureError as error:
            trail.asked("", scope["path"])
            trail.failed(error.code)
            await trail.over(error.status)
            await refuse(error, scope, receive, send)
            return
        with self._underway.request(principal.key_id) as scope[ENDING]:
            await _forward(self._app, principal, trail, scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, trail: Trail) -> tuple[Principal, Receive]:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _name(f"//{host}") not in self._hosts:
            raise Forbidden(
                f"This server does not answer to the host name {host!r}.",
                hint="Add the name to PERDURE_ALLOWED_HOSTS on the server if it is yours.",
            )
        origin = headers.get("origin")
        if origin is not None and _name(origin) not in self._hosts:
            raise Forbidden(f"Requests from web pages of {origin!r} are refused.", hint="Call the API from a program instead.")
        if is_shared(scope):
            return VISITOR, receive
        if paths.is_aws(scope) and signatures.is_signed(headers.get("authorization", ""), scope["query_string"]):
            whole = _within(scope, receive)
            principal, receive = await signer(self._services, self._throttle, scope, whole, trail.act.peer)
        else:
            principal = await who(self._services, self._throttle, headers, trail.act.peer)
        trail.who(principal)
        self._throttle.called(principal, scope["raw_path"])
        return principal, receive


async def who(services: Services, throttle: Throttle, headers: Headers, peer: str) -> Principal:
    """The principal of a request's API key. Raises Unauthenticated; RateLimited for an address that sends too many wrong ones."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        throttle.failed(peer)
        raise Unauthenticated("The request carries no API key.")
    principal = await services.access.authenticate(key.strip())
    if principal is None:
        throttle.failed(peer)
        raise Unauthenticated("The API key is not known to this server, or no longer.")
    return principal


class MetricsGuard:
    """For the port of loopback that an operator has opened for metrics: no key, and no other path."""

    def __init__(self, app: ASGIApp, underway: Underway) -> None:
        self._app = app
        self._underway = underway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _name(f"//{Headers(scope=scope).get('host', '')}") not in LOOPBACK_NAMES:
            await refuse(Forbidden("This port answers on loopback only."), scope, receive, send)
        elif scope["type"] != "http" or scope["path"] != METRICS_PATH:
            await refuse(NotFound("This port has metrics, and nothing else."), scope, receive, send)
        else:
            with self._underway.request(None) as scope[ENDING]:
                await _forward(self._app, LOCAL, None, scope, receive, send)


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _trail(services: Services, scope: Scope) -> Trail:
    """Of a request of which nothing is known yet but where it comes from."""
    peer = scope["client"][0] if scope.get("client") else "unix"
    note = ids.mint("req", now_ms=epoch_ms(services.clock))  # the request's own id may be its caller's, and come twice
    return Trail(services.audit, Act(DEFAULT_TENANT, "", "", "", scope[REQUEST_ID], peer, note=note))


#: What of a WebSocket's messages tells its outcome, and how; an HTTP answer says its own.
_OUTCOMES = {"websocket.accept": 101, "websocket.close": 403}


async def _forward(app: ASGIApp, principal: Principal, trail: Trail | None, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await app(scope, receive, send)
        return
    scope[CALLER] = Caller(principal, scope[REQUEST_ID])
    logs.note(tenant=principal.tenant_id, by=principal.name)
    if trail is not None:
        scope[TRAIL] = trail
        send = _told(send, trail)
    if scope["type"] == "http" and not STREAMED.fullmatch(scope["path"]):
        try:
            receive = _within(scope, receive)
        except BodyTooLarge as error:
            await refuse(error, scope, receive, send)
            return
    await app(scope, receive, send)


def _told(send: Send, trail: Trail) -> Send:
    """``send`` that tells the audit how the request ended."""

    async def tell(message: Message) -> None:
        if (status := message.get("status") or _OUTCOMES.get(message["type"])) is not None:
            await trail.over(status, is_ours=bool(trail.act.outcome) or message["type"] != "http.response.start")
        await send(message)

    return tell


def _within(scope: Scope, receive: Receive) -> Receive:
    """``receive`` that takes no more of a body than it may have. Raises BodyTooLarge for one that says that it has more."""
    is_large = LARGE.fullmatch(scope["path"]) is not None or paths.is_aws(scope)
    most = LARGE_BODY_BYTES_MAX if is_large else BODY_BYTES_MAX
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    return _bounded(receive, most)


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request's body is larger than {most >> 20} MiB.", hint="Send large content as files.")


def _bounded(receive: Receive, most: int) -> Receive:
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > most:
            raise _too_large(most)
        return message

    return bounded


async def refuse(error: PerdureError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request or a WebSocket handshake with an error, before the application sees it."""
    if scope["type"] == "http":
        response = faults.answer(error, scope) if paths.is_aws(scope) else error_response(error)
        await response(scope, receive, send)
        return
    if "websocket.http.response" in scope.get("extensions", {}):
        response = error_response(error)
        await send({"type": "websocket.http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "websocket.http.response.body", "body": response.body})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})
