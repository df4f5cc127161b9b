"""Errors as AWS's clients read them: Lambda's by a header, Step Functions' by ``__type`` in the body."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from perdure.api.aws.paths import task_target
from perdure.core import logs
from perdure.core.errors import (
    CallbackClosed,
    Forbidden,
    InvalidRequest,
    NotFound,
    PerdureError,
    QuotaExceeded,
    RateLimited,
    SignatureRefused,
    Unauthenticated,
)
from perdure.runs.protocol import ERROR_TYPE_HEADER, fault_body, fault_of

JSON = "application/json"
TASK_JSON = "application/x-amz-json-1.0"


class BadToken(InvalidRequest):
    """What was given as a task token names no callback."""


class BadOutput(InvalidRequest):
    """A task's output that is not JSON."""


class UnknownOperation(InvalidRequest):
    """An operation of Step Functions that is not served here."""


@dataclass(frozen=True, slots=True)
class _TaskFault:
    name: str
    status: int = 400


#: The first that fits counts.
_TASK_FAULTS: tuple[tuple[type[PerdureError], _TaskFault], ...] = (
    (CallbackClosed, _TaskFault("TaskTimedOut")),
    (BadToken, _TaskFault("InvalidToken")),
    (BadOutput, _TaskFault("InvalidOutput")),
    (UnknownOperation, _TaskFault("UnknownOperationException")),
    (NotFound, _TaskFault("TaskDoesNotExist")),
    (RateLimited, _TaskFault("ThrottlingException")),
    (QuotaExceeded, _TaskFault("ThrottlingException")),
    (InvalidRequest, _TaskFault("ValidationException")),
    (SignatureRefused, _TaskFault("InvalidSignatureException")),
    (Unauthenticated, _TaskFault("AccessDeniedException")),
    (Forbidden, _TaskFault("AccessDeniedException")),
)
_TASK_SERVICE = _TaskFault("InternalFailure", 500)


def answer(error: PerdureError, scope: Scope) -> Response:
    """The answer to a request of AWS's that an error ends."""
    return _of_task(error) if task_target(scope) is not None else _of_lambda(error)


def _of_lambda(error: PerdureError) -> Response:
    fault = fault_of(error)
    return respond(fault_body(error), fault.status, {ERROR_TYPE_HEADER: fault.name, **_pause(error)})


def _of_task(error: PerdureError) -> Response:
    passes = error.retryable and not isinstance(error, RateLimited | QuotaExceeded)
    found = (fault for kind, fault in _TASK_FAULTS if isinstance(error, kind))
    fault = _TASK_SERVICE if passes else next(found, _TASK_SERVICE)
    body = {"__type": fault.name, "message": f"{error.message} {error.hint}".strip()}
    return respond(body, fault.status, _pause(error), TASK_JSON)


def _pause(error: PerdureError) -> dict[str, str]:
    if not isinstance(error, RateLimited):
        return {}
    return {"retry-after": str(math.ceil(float(error.details.get("retry_after_s", "1"))))}


def respond(body: Any, status: int = 200, headers: dict[str, str] | None = None, media_type: str = JSON) -> Response:
    """``body`` as JSON, with the request's id where AWS's clients look for it."""
    told = {"x-amzn-requestid": logs.request_id(), **(headers or {})}
    return Response(json.dumps(body), status, {name: value for name, value in told.items() if value}, media_type)
