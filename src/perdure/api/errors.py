"""One seam where errors become answers: ``{"error": {...}}`` with the error's own status."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.websockets import WebSocket

from perdure.api.trail import trail_of
from perdure.core import logs
from perdure.core.errors import Busy, InvalidRequest, NotFound, PerdureError, RateLimited, Unavailable
from perdure.wire import public

log = logging.getLogger(__name__)
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"
    status = 405


def error_info(error: PerdureError) -> public.ErrorInfo:
    """The public half of an error, and the request that it ends."""
    return public.ErrorInfo.model_validate(error.public() | _where())


def _where() -> dict[str, str]:
    request_id = logs.request_id()
    return {"request_id": request_id} if request_id else {}


def internal_error() -> public.ErrorInfo:
    """What a caller learns of a defect: that there is one, and where its details are."""
    where = _where()
    return public.ErrorInfo(
        code="internal",
        message=f"Perdure failed because of a defect of its own{' (request ' + where['request_id'] + ')' if where else ''}.",
        hint="The server's log has the details.",
        ambiguous=True,
        **where,
    )


def error_response(error: PerdureError, headers: Mapping[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if isinstance(error, Busy | Unavailable) and error.retryable:
        headers["retry-after"] = "1"
    if isinstance(error, RateLimited):
        headers["retry-after"] = str(math.ceil(float(error.details.get("retry_after_s", "1"))))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": error.public() | _where()}, status_code=error.status, headers=headers)


def validation_sentence(errors: Sequence[Any]) -> str:
    """The first mistake in one sentence: where and what."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part not in {"body", "query", "path"})
    what = str(first["msg"]).removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"The request is not valid: {where + ': ' if where else ''}{what[:1].lower()}{what[1:]}{more}."


def _told(connection: Request | WebSocket, error: PerdureError, headers: Mapping[str, str] | None = None) -> Response:
    """The answer, and the audit told why."""
    _note(connection, error.code)
    return error_response(error, headers)


def _note(connection: Request | WebSocket, code: str) -> None:
    trail = trail_of(connection)
    if trail is not None:
        trail.failed(code)


async def _on_perdure(connection: Request | WebSocket, error: Exception) -> Any:
    assert isinstance(error, PerdureError)
    if error.internal:
        log.warning("%s: %s (%s)", error.code, error.message, error.internal)
    response = _told(connection, error)
    if isinstance(connection, WebSocket):  # refused before the route had it, so it is not open yet
        return await connection.send_denial_response(response)
    return response


def _allowed(app: FastAPI, request: Request) -> list[str]:
    """The methods of all routes of a path. The router names only those of the first that it finds."""
    asked = ({**request.scope, "method": method} for method in _METHODS)
    return [one["method"] for one in asked if any(route.matches(one)[0] is Match.FULL for route in app.routes)]


def install(app: FastAPI) -> None:
    """Register the handlers."""

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        wrong = InvalidRequest(validation_sentence(error.errors()), hint="See /v1/openapi.json for the fields.")
        return _told(request, wrong)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, PerdureError):  # raised while FastAPI read the body
            return _told(request, error.__cause__)
        if error.status_code == 404:
            return _told(request, NotFound(f"There is no {request.url.path} here.", hint="See /v1/openapi.json for the routes."))
        if error.status_code == 405:
            refused = MethodNotAllowed(f"{request.method} is not allowed on {request.url.path}.")
            return _told(request, refused, {"allow": ", ".join(_allowed(app, request))})
        return _told(request, InvalidRequest(f"The request is not valid: {error.detail}."), error.headers)

    async def on_disconnect(_: Request, error: Exception) -> Response:
        log.info("client went away in the middle of its request")
        return Response(status_code=499)

    async def on_defect(request: Request, error: Exception) -> Response:
        _note(request, "internal")
        return JSONResponse({"error": internal_error().model_dump()}, status_code=500)

    app.add_exception_handler(PerdureError, _on_perdure)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_defect)
