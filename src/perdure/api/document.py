"""The OpenAPI document: what FastAPI finds in the routes, and what holds for all of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from perdure.core.errors import error_classes
from perdure.wire import public

#: A key may be sent by anybody; the Unix socket needs none.
KEY = "key"
_ERROR = "Error"
#: Of every route: whatever it asks of the rest may end in any error of the tree.
ANSWERS: dict[int | str, dict[str, Any]] = {"default": {"model": public.ErrorAnswer}}


def describe(app: FastAPI) -> None:
    """Let ``app.openapi`` say how callers prove who they are, and how each error is answered, once for all routes."""
    found = app.openapi

    def described() -> dict[str, Any]:
        document = found()
        if "security" in document:  # FastAPI makes it once, and gives out the same one
            return document
        shared, scheme = document["components"], {"type": "http", "scheme": "bearer"}
        shared["securitySchemes"] = {KEY: {**scheme, "description": "An API key, pdk_…; over the Unix socket none is needed."}}
        document["security"] = [{KEY: []}]
        for operation in (one for item in document["paths"].values() for one in item.values()):
            if (answer := operation["responses"].get("default")) is not None:
                shared["responses"] = {_ERROR: {**answer, "description": _statuses()}}
                operation["responses"]["default"] = {"$ref": f"#/components/responses/{_ERROR}"}
        return document

    app.openapi = described  # type: ignore[method-assign]


def _statuses() -> str:
    codes: dict[int, list[str]] = {}
    for code, kind in error_classes().items():
        if kind.__module__.startswith(("perdure.core.", "perdure.api.")):  # a client's own errors are no answers
            codes.setdefault(kind.status, []).append(code)
    table = "; ".join(f"{status}: {', '.join(sorted(codes[status]))}" for status in sorted(codes))
    return f"Anything else is an error. Codes by status: {table}."
