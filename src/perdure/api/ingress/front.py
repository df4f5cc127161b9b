"""Takes the requests for ports out of the stream of all others: those for a host below the domain before the API's own guard sees
them, those for a path behind it. No request for a host below the domain ever reaches the API."""

from __future__ import annotations

from starlette.datastructures import Headers as StarletteHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.access.model import VISITOR
from perdure.access.shares import NotShared, PortRef, Share
from perdure.api.guard import CALLER, Caller, who
from perdure.api.ingress import admission, headers, pages, sockets
from perdure.api.ingress.headers import Form, Way
from perdure.api.ingress.names import Address, Domain, path_address, take_share, with_query
from perdure.api.ingress.relay import Relay, Visit, stopping
from perdure.api.services import Services
from perdure.api.throttle import Throttle
from perdure.api.traffic import PORT, REQUEST_ID
from perdure.api.trail import TRAIL, Trail
from perdure.api.underway import Underway
from perdure.core import logs
from perdure.core.errors import Forbidden, InvalidRequest, NotFound, PerdureError, Unauthenticated
from perdure.core.ids import DEFAULT_TENANT, RequestId
from perdure.wire.node import Headers


class PathForm:
    """Behind a guard: ``/v1/workspaces/{ref}/ports/{port}/…`` is a program's, everything else is ``app``'s."""

    def __init__(self, app: ASGIApp, services: Services, underway: Underway) -> None:
        self._app = app
        self._services = services
        self._underway = underway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            visit = await self._admit(scope)
        except PerdureError as error:
            await _refuse(error, scope, send, as_page=False)
            return
        if visit is None:
            await self._app(scope, receive, send)
        else:
            if isinstance(trail := scope.get(TRAIL), Trail):
                trail.handed_over()
            await _carry(self._services, visit, self._underway, scope, receive, send)

    async def _admit(self, scope: Scope) -> Visit | None:
        _, query = take_share(scope["query_string"])
        address = path_address(scope["raw_path"], query)
        if address is None:
            return None
        scope["route"] = PORT
        caller = scope.get(CALLER)
        if not isinstance(caller, Caller):
            raise Unauthenticated("This listener is not guarded, so it answers nobody.")
        way = Way(Form.PATH, address.port, _host(scope), _scheme(scope), _client(scope), address.prefix)
        if caller.principal is not VISITOR:
            ctx = admission.by_key(caller.principal, caller.request_id)
            return Visit(ctx, address.ref, way, address.target, caller.principal.key_id, is_keyed=True)
        tokens = admission.shown(scope).tokens
        share = await admission.by_token(self._services, tokens, PortRef(address.ref, address.port))
        ctx = admission.visitor(share, caller.request_id)
        return Visit(ctx, share.workspace_id, way, address.target, share.grant, is_keyed=False)


class HostForm:
    """Before the guard: a host below the domain is a program's, every other one is ``app``'s."""

    def __init__(self, app: ASGIApp, services: Services, throttle: Throttle, domain: Domain, underway: Underway) -> None:
        self._app = app
        self._throttle = throttle
        self._services = services
        self._domain = domain
        self._underway = underway
        self._cookie = headers.cookie_name(is_secure=domain.is_secure)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        as_page = headers.wants_page(tuple(scope["headers"]))
        try:
            address = self._domain.address(_host(scope))
            if address is not None:
                scope["route"] = PORT
                visit = await self._admit(address, scope, scope[REQUEST_ID])
        except PerdureError as error:
            scope["route"] = PORT
            await _refuse(error, scope, send, as_page=as_page)
            return
        if address is None:
            await self._app(scope, receive, send)
        elif isinstance(visit, Response):
            await visit(scope, receive, send)
        else:
            await _carry(self._services, visit, self._underway, scope, receive, send)

    async def _admit(self, address: Address, scope: Scope, request_id: RequestId) -> Visit | Response:
        came: Headers = tuple(scope["headers"])
        token, query = take_share(scope["query_string"])
        target = with_query(_origin_form(scope["raw_path"]), query)
        if not target.startswith(b"/"):
            raise InvalidRequest("The request's target is not a path.", hint="Ask for a path that begins with '/'.")
        way = Way(Form.HOST, address.port, _host(scope), self._domain.scheme, _client(scope))
        found = StarletteHeaders(scope=scope)
        if headers.is_our_key(found.get("authorization", "").encode("latin-1")):
            principal = await who(self._services, self._throttle, found, _client(scope) or "")
            self._throttle.called(principal)
            ctx = admission.by_key(principal, request_id)
            if address.by_name and ctx.tenant_id != DEFAULT_TENANT:  # names in host names are the default tenant's
                raise NotFound(f"There is no workspace {address.ref!r}.", hint="Name it by its id.")
            return Visit(ctx, address.ref, way, target, principal.key_id, is_keyed=True)
        share = await self._shared(address, scope, came)
        method = scope.get("method")
        if token is not None and method in {"GET", "HEAD"} and headers.wants_page(came) and not share.is_public:
            return self._exchange(token, f"{self._domain.scheme}://{_host(scope)}".encode("latin-1") + target)
        ctx = admission.visitor(share, request_id)
        return Visit(ctx, share.workspace_id, way, target, share.grant, is_keyed=False)

    async def _shared(self, address: Address, scope: Scope, came: Headers) -> Share:
        shown = admission.shown(scope, self._cookie)
        to = PortRef(address.ref, address.port, DEFAULT_TENANT)
        try:
            if shown.tokens:
                return await admission.by_token(self._services, shown.tokens, to)
            share = await admission.by_token(self._services, shown.cookies, to)
            admission.check_same_site(came, scope.get("method", "GET"))
            return share
        except (NotShared, Forbidden):
            public = await self._services.shares.public(to)
            if public is None:
                raise
            return public

    def _exchange(self, token: str, url: bytes) -> Response:
        """The token goes into a cookie of this host, and out of the address bar, the history and what other sites are told."""
        made = Response(status_code=303, headers={"cache-control": "no-store", "referrer-policy": "no-referrer"})
        secure = "; Secure" if self._domain.is_secure else ""
        made.headers["set-cookie"] = f"{self._cookie}={token}; Path=/; HttpOnly; SameSite=Lax{secure}"
        made.headers["location"] = url.decode("latin-1")
        return made


async def _carry(services: Services, visit: Visit, underway: Underway, scope: Scope, receive: Receive, send: Send) -> None:
    logs.note(tenant=visit.ctx.tenant_id, by=visit.ctx.principal)
    with underway.request(visit.leave) as ending:
        if ending.is_set():
            await _refuse(stopping(), scope, send, as_page=False)
        elif scope["type"] == "websocket":
            await sockets.SocketRelay(services, visit, scope, receive, send).run(ending)
        else:
            await Relay(services, visit, scope, send).run(receive, ending)


async def _refuse(error: PerdureError, scope: Scope, send: Send, *, as_page: bool) -> None:
    if scope["type"] == "websocket":
        await sockets.refuse(error, send)
    else:
        await pages.send(pages.answer(error, as_page=as_page), scope, send)


def _host(scope: Scope) -> str:
    return StarletteHeaders(scope=scope).get("host", "")


def _scheme(scope: Scope) -> str:
    return "https" if scope["scheme"] in {"https", "wss"} else "http"


def _client(scope: Scope) -> str | None:
    client = scope.get("client")
    return client[0] if client and client[0] else None


def _origin_form(raw_path: bytes) -> bytes:
    """A path as a program expects it. A client that believes it speaks to a proxy sends a whole URL."""
    if raw_path.lower().startswith((b"http://", b"https://")):
        return b"/" + raw_path.partition(b"://")[2].partition(b"/")[2]
    return raw_path
