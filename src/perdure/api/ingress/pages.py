"""Answers of our own where a program's was asked for: JSON for programs, a small page for people, the reason in a header."""

from __future__ import annotations

from html import escape

from starlette.responses import HTMLResponse, Response
from starlette.types import Message, Scope, Send

from perdure.api.errors import error_response
from perdure.core.errors import PerdureError
from perdure.wire.public import REASON_HEADER

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{status}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;margin:15vh auto;max-width:36em;padding:0 1em}}</style></head>
<body><h1>{status}</h1><p>{message}</p><p>{hint}</p></body></html>
"""


def answer(error: PerdureError, *, as_page: bool) -> Response:
    """What a client is told instead of the program's answer. Nobody keeps it."""
    response = error_response(error)
    if as_page:
        page = _PAGE.format(status=error.status, message=escape(error.message), hint=escape(error.hint))
        more = {name: response.headers[name] for name in ("retry-after", "www-authenticate") if name in response.headers}
        policy = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
        response = HTMLResponse(page, error.status, {**more, "content-security-policy": policy})
    response.headers[REASON_HEADER] = error.code
    response.headers["cache-control"] = "no-store"
    response.headers["x-content-type-options"] = "nosniff"
    return response


async def send(response: Response, scope: Scope, to: Send) -> None:
    """Send an answer that needs nothing more of its request."""
    await response(scope, _nothing, to)


async def _nothing() -> Message:
    raise AssertionError("an answer that is ready needs no more of its request")
