"""Errors as AWS names them, and bodies as bytes.

An SDK takes any 4xx but 429 and "Invalid checkpoint token" as the end of the whole execution. So whatever may pass by itself must
be 429 or 5xx here; the table's test walks the tree of errors for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from perdure.core.errors import (
    AlreadyExists,
    CallbackClosed,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    PerdureError,
    QuotaExceeded,
    RateLimited,
    SignatureRefused,
    StaleCheckpoint,
    Unauthenticated,
)
from perdure.runs.protocol.words import Wire

ERROR_TYPE_HEADER = "x-amzn-ErrorType"
W = TypeVar("W", bound=Wire)


@dataclass(frozen=True, slots=True)
class Fault:
    """One answer that boto3 turns into the exception of that name. ``message_key`` is as its model spells it."""

    name: str
    status: int
    message_key: str = "Message"


INVALID_PARAMETER = Fault("InvalidParameterValueException", 400, "message")
TOO_MANY_REQUESTS = Fault("TooManyRequestsException", 429, "message")
SERVICE = Fault("ServiceException", 500)

#: The first that fits counts.
TABLE: tuple[tuple[type[PerdureError], Fault], ...] = (
    (StaleCheckpoint, INVALID_PARAMETER),
    (CallbackClosed, Fault("CallbackTimeoutException", 400)),
    (AlreadyExists, Fault("DurableExecutionAlreadyStartedException", 409)),
    (NotFound, Fault("ResourceNotFoundException", 404)),
    (RateLimited, TOO_MANY_REQUESTS),
    (QuotaExceeded, TOO_MANY_REQUESTS),
    (Conflict, Fault("ResourceConflictException", 409, "message")),
    (InvalidRequest, INVALID_PARAMETER),
    (SignatureRefused, Fault("InvalidSignatureException", 403)),
    (Unauthenticated, Fault("AccessDeniedException", 403)),
    (Forbidden, Fault("AccessDeniedException", 403)),
)


def fault_of(error: PerdureError) -> Fault:
    """How AWS would call it. ServiceException, which clients repeat, for all that is not the caller's doing."""
    if error.retryable and not isinstance(error, RateLimited | QuotaExceeded):
        return SERVICE
    return next((fault for kind, fault in TABLE if isinstance(error, kind)), SERVICE)


def fault_body(error: PerdureError) -> dict[str, Any]:
    """The answer's JSON; its status and the header ``x-amzn-ErrorType`` are those of ``fault_of``."""
    fault = fault_of(error)
    message = f"{error.message} {error.hint}".strip()
    return {"Type": "User" if fault.status < 500 else "Service", fault.message_key: message}


def parse(model: type[W], body: bytes) -> W:
    """A body off the wire. No bytes are an empty object. Raises InvalidRequest, which names the first field that is wrong."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the body"
        message = f"{place}: {first['msg']}"
        raise InvalidRequest(message if message.endswith(".") else f"{message}.", hint="Nothing was recorded.") from None
