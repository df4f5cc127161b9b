"""The outermost layer of every listener: each request gets an id, a line in the log, a place in the counts, and a trace.

A caller's own ``X-Request-Id`` is taken if it is sane, else one is made: every answer has it in its head, every error in its
body, every line that the request causes names it. Queries, keys and bodies are in no line: what is told of the path is the route,
and the workspace that it leads to.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.core import ids, logs, metrics, tracing
from perdure.core.clock import Clock, epoch_ms
from perdure.core.ids import RequestId
from perdure.wire.public import CLIENT_REQUEST_ID_HEADER, REQUEST_ID_HEADER

log = logging.getLogger(__name__)

REQUEST_ID = "perdure.request_id"
#: Of requests that come every few seconds and say nothing.
UNTOLD = frozenset({"health", "metrics"})
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=-]{0,127}")
_SWITCHED = 101
_GONE = 499  # the client went away before it had an answer
_PATH_SHOWN = 200
#: What a program in a workspace makes of its paths is its own affair.
_INSIDE = re.compile(r"(/ports/[0-9]+/).*", re.DOTALL)


class Named(NamedTuple):
    """A route that no router has found: for ``scope["route"]``."""

    name: str
    path: str


#: Of requests that are carried to a port of a workspace.
PORT = Named("port", "/v1/workspaces/{ref}/ports/{port}/{path}")


@dataclass(slots=True)
class _Exchange:
    """What is counted of one request."""

    watch: metrics.Stopwatch = field(default_factory=metrics.Stopwatch)
    status: int = _GONE
    received_bytes: int = 0
    sent_bytes: int = 0


class Traffic:
    """Put it before a guard."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers, exchange = Headers(scope=scope), _Exchange()
        request_id = scope[REQUEST_ID] = self._request_id(headers)
        traced = tracing.request(
            headers.get("traceparent", ""),
            headers.get("tracestate", ""),
            http__request__method=scope.get("method", "WEBSOCKET"),
            perdure__request_id=request_id,
        )
        with logs.exactly({"request_id": request_id}), traced as served:
            try:
                await self._app(scope, _received(receive, exchange), _sent(send, exchange, request_id))
            except Exception:
                exchange.status = 500
                raise
            finally:
                _tell(scope, exchange, served)

    def _request_id(self, headers: Headers) -> RequestId:
        given = headers.get(CLIENT_REQUEST_ID_HEADER, "")
        return RequestId(given if _SANE.fullmatch(given) else ids.mint("req", now_ms=epoch_ms(self._clock)))


def _received(receive: Receive, exchange: _Exchange) -> Receive:
    async def received() -> Message:
        message = await receive()
        exchange.received_bytes += len(message.get("body") or message.get("bytes") or b"")
        return message

    return received


def _sent(send: Send, exchange: _Exchange, request_id: RequestId) -> Send:
    stamps = [(name.encode(), request_id.encode()) for name in (REQUEST_ID_HEADER, CLIENT_REQUEST_ID_HEADER)]

    async def sent(message: Message) -> None:
        kind = message["type"]
        if kind in {"http.response.start", "websocket.http.response.start"}:
            exchange.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *stamps]}
        elif kind == "websocket.accept":
            exchange.status = _SWITCHED
            message = {**message, "headers": [*message.get("headers", ()), *stamps]}
        elif kind == "websocket.close" and exchange.status == _GONE:
            exchange.status = 403  # how a server refuses a handshake without more words
        exchange.sent_bytes += len(message.get("body") or message.get("bytes") or b"")
        await send(message)

    return sent


def _tell(scope: Scope, exchange: _Exchange, served: tracing.Served) -> None:
    route = getattr(scope.get("route"), "name", None)
    metrics.HTTP_REQUESTS.add(route=route or "none", status=f"{exchange.status // 100}xx")
    metrics.HTTP_RECEIVED.add(exchange.received_bytes)
    metrics.HTTP_SENT.add(exchange.sent_bytes)
    facts = logs.facts()
    served.told(
        f"{scope.get('method', 'WEBSOCKET')} {route or 'none'}",
        exchange.status,
        http__route=getattr(scope.get("route"), "path", None),
        perdure__workspace=facts.get("workspace"),
        perdure__tenant=facts.get("tenant"),
    )
    if route in UNTOLD:
        return
    told = {
        "method": scope.get("method", "WEBSOCKET"),
        "route": route,
        # Of a path that leads nowhere, what it was; every other may hold what is nobody's business.
        "path": _INSIDE.sub(r"\1…", scope["path"])[:_PATH_SHOWN] if route is None else None,
        "status": exchange.status,
        "ms": round(exchange.watch.seconds * 1000, 1),
        "received_bytes": exchange.received_bytes,
        "sent_bytes": exchange.sent_bytes,
    }
    log.info("request", extra={name: value for name, value in told.items() if value is not None})
