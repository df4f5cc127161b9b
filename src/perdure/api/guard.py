"""Who may speak, decided per listener before a route is even looked up.

``SocketGuard`` stands before a Unix socket with mode 0600: the file system has checked the caller, who is an admin of the
default tenant. ``TcpGuard`` stands before TCP: a Bearer key is always needed, ``Host`` must be a name this server was given
(else a web page could reach it by rebinding its own DNS name to loopback), and an ``Origin``, which only browsers send, must be
such a name too. Whoever asks for a port of a workspace with a share link needs no key, and is let in by nothing else
(``ingress``). Without one of the guards in front the application answers nobody. What a caller may do is asked per route
(``policy``). Before a guard stands ``traffic.Traffic``, which has given the request its id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.access.model import LOCAL, VISITOR, Principal
from perdure.api.errors import error_response
from perdure.api.ingress.admission import is_shared
from perdure.api.services import Services
from perdure.api.traffic import REQUEST_ID
from perdure.core import logs
from perdure.core.errors import Forbidden, InvalidRequest, NotFound, PerdureError, Unauthenticated
from perdure.core.ids import RequestId

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
#: Bodies that are parsed as a whole may be this large; file contents and stdin are streamed and have no limit.
BODY_BYTES_MAX = 4 << 20
STREAMED = re.compile(
    r"/v1/workspaces/[^/]+/(?:files/(?:content|tar|uploads/[^/]+)|execs/[^/]+/stdin|ports/[0-9]+/.*|invocations)", re.DOTALL
)
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

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _forward(self._app, LOCAL, scope, receive, send)


class TcpGuard:
    """For TCP: key, Host and Origin."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services
        settings = services.settings
        self._hosts = LOOPBACK_NAMES | {name.lower().strip("[]") for name in (settings.listen_host, *settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._admit(scope)
        except PerdureError as error:
            await refuse(error, scope, receive, send)
            return
        await _forward(self._app, principal, scope, receive, send)

    async def _admit(self, scope: Scope) -> Principal:
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
        return VISITOR if is_shared(scope) else await who(self._services, headers)


async def who(services: Services, headers: Headers) -> Principal:
    """The principal of a request's API key. Raises Unauthenticated."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("The request carries no API key.")
    principal = await services.access.authenticate(key.strip())
    if principal is None:
        raise Unauthenticated("The API key is not known to this server, or no longer.")
    return principal


class MetricsGuard:
    """For the port of loopback that an operator has opened for metrics: no key, and no other path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _name(f"//{Headers(scope=scope).get('host', '')}") not in LOOPBACK_NAMES:
            await refuse(Forbidden("This port answers on loopback only."), scope, receive, send)
        elif scope["type"] != "http" or scope["path"] != METRICS_PATH:
            await refuse(NotFound("This port has metrics, and nothing else."), scope, receive, send)
        else:
            await _forward(self._app, LOCAL, scope, receive, send)


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def _forward(app: ASGIApp, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await app(scope, receive, send)
        return
    scope[CALLER] = Caller(principal, scope[REQUEST_ID])
    logs.note(tenant=principal.tenant_id, by=principal.name)
    if scope["type"] == "http" and not STREAMED.fullmatch(scope["path"]):
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > BODY_BYTES_MAX:
            await refuse(_too_large(), scope, receive, send)
            return
        receive = _bounded(receive)
    await app(scope, receive, send)


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"The request's body is larger than {BODY_BYTES_MAX >> 20} MiB.", hint="Send large content as files.")


def _bounded(receive: Receive) -> Receive:
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > BODY_BYTES_MAX:
            raise _too_large()
        return message

    return bounded


async def refuse(error: PerdureError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request or a WebSocket handshake with an error, before the application sees it."""
    if scope["type"] == "http":
        await error_response(error)(scope, receive, send)
        return
    if "websocket.http.response" in scope.get("extensions", {}):
        response = error_response(error)
        await send({"type": "websocket.http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "websocket.http.response.body", "body": response.body})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})
