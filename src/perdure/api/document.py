"""The OpenAPI document: what FastAPI finds in the routes, and what holds for all of them.

A route that answers a stream names the model of its events and the stream's media types, with nothing said of those. In the
document the schema of NDJSON is that of each line, and the schema of server-sent events that of each event.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from perdure.api.confined import NO_WORKSPACE, PROTECTIONS
from perdure.core.errors import error_classes
from perdure.wire import public
from perdure.wire.node import Isolation

#: A key may be sent by anybody; the Unix socket needs none.
KEY = "key"
_ERROR = "Error"
#: Of every route: whatever it asks of the rest may end in any error of the tree.
ANSWERS: dict[int | str, dict[str, Any]] = {"default": {"model": public.ErrorAnswer}}
_WITHOUT_ZERO = "^[^\\u0000]*$"
_CONFINEMENT, _CONFINEMENT_NAME = "Confinement", public.CONFINEMENT_HEADER.title()
_JSON, _LINES, _EVENTS = "application/json", "application/x-ndjson", "text/event-stream"


def describe(app: FastAPI) -> None:
    """Let ``app.openapi`` say how callers prove who they are, and how each error is answered, once for all routes."""
    found = app.openapi

    def described() -> dict[str, Any]:
        document = found()
        if "security" in document:  # FastAPI makes it once, and gives out the same one
            return document
        shared, scheme = document["components"], {"type": "http", "scheme": "bearer"}
        shared["securitySchemes"] = {KEY: {**scheme, "description": "An API key, pdk_…; over the Unix socket none is needed."}}
        shared["headers"] = {_CONFINEMENT: _confinement()}
        document["security"] = [{KEY: []}]
        for operation in (one for item in document["paths"].values() for one in item.values()):
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query":
                    _describe_text(parameter["schema"])
            for answer in operation["responses"].values():
                answer.setdefault("headers", {})[_CONFINEMENT_NAME] = {"$ref": f"#/components/headers/{_CONFINEMENT}"}
                _describe_stream(answer.get("content", {}))
            if (answer := operation["responses"].get("default")) is not None:
                shared["responses"] = {_ERROR: {**answer, "description": _statuses()}}
                operation["responses"]["default"] = {"$ref": f"#/components/responses/{_ERROR}"}
        return document

    app.openapi = described  # type: ignore[method-assign]


def _confinement() -> dict[str, Any]:
    grades = ", ".join(f"`{grade.value}`" for grade in Isolation)
    description = (
        f"How workspaces are kept apart from this host: their isolation grade ({grades}; `{NO_WORKSPACE}` where none can run), "
        "with a boolean parameter for each protection around their machines (RFC 8941). What a workspace itself has is in its "
        "own answer; what is missing and why, the doctor tells."
    )
    example = f"{Isolation.VM_EMULATED.value};{';'.join(f'{name}=?1' for name in PROTECTIONS)}"
    return {"description": description, "schema": {"type": "string"}, "example": example}


def _describe_text(schema: dict[str, Any]) -> None:
    """No text of a query contains NUL (``deps.admit``)."""
    if schema.get("type") == "string" and not {"pattern", "enum", "format"} & set(schema):
        schema["pattern"] = _WITHOUT_ZERO
    for part in schema.get("anyOf", ()):
        _describe_text(part)
    if "items" in schema:
        _describe_text(schema["items"])


def _describe_stream(content: dict[str, Any]) -> None:
    kinds = [kind for kind in (_LINES, _EVENTS) if content.get(kind) == {}]
    if kinds:
        schema = content.pop(_JSON)["schema"]  # where FastAPI puts a model, as if the answer were one document
        content.update({kind: {"schema": schema if kind == _LINES else _event(schema)} for kind in kinds})


def _event(schema: dict[str, Any]) -> dict[str, Any]:
    data = {"type": "string", "contentMediaType": _JSON, "contentSchema": schema}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": data},
    }


def _statuses() -> str:
    codes: dict[int, list[str]] = {}
    for code, kind in error_classes().items():
        if kind.__module__.startswith(("perdure.core.", "perdure.api.")):  # a client's own errors are no answers
            codes.setdefault(kind.status, []).append(code)
    table = "; ".join(f"{status}: {', '.join(sorted(codes[status]))}" for status in sorted(codes))
    return f"Anything else is an error. Codes by status: {table}."
