"""ARNs, checkpoint tokens, callback ids and page markers: names that a client only hands back.

None of them is a secret or a right: who may use one is decided by the caller's key. They only have to be of the form that AWS's
clients accept, and to name one thing.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from perdure.core.errors import InvalidRequest, NotFound, StaleCheckpoint
from perdure.runs.protocol.updates import FUNCTION_NAME

_ARN = re.compile(
    r"arn:([a-zA-Z0-9-]+):lambda:([a-zA-Z0-9-]+):(\d{12}):function:([a-zA-Z0-9_-]+):(\$LATEST(?:\.PUBLISHED)?|[0-9]+)"
    r"/durable-execution/([a-zA-Z0-9_-]+)/([a-zA-Z0-9_-]+)"
)
_FUNCTION = re.compile(FUNCTION_NAME)
#: The name itself and the qualifier, among the groups of that.
_NAME_GROUP, _QUALIFIER_GROUP = 11, 13
_SERVED = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True, slots=True)
class ExecutionArn:
    """``arn:aws:lambda:REGION:ACCOUNT:function:FUNCTION:VERSION/durable-execution/NAME/ID``."""

    region: str
    account: str
    function: str
    name: str
    id: str
    version: str = "$LATEST"
    partition: str = "aws"

    def __str__(self) -> str:
        return f"{self.function_arn}/durable-execution/{self.name}/{self.id}"

    @property
    def function_arn(self) -> str:
        return f"arn:{self.partition}:lambda:{self.region}:{self.account}:function:{self.function}:{self.version}"


def parse_arn(text: str) -> ExecutionArn:
    """Raises InvalidRequest for what is not the ARN of an execution."""
    match = _ARN.fullmatch(text) if len(text) <= 1024 else None
    if match is None:
        raise InvalidRequest("This is not the ARN of a durable execution.", hint="Take it from the answer that started it.")
    partition, region, account, function, version, name, execution = match.groups()
    return ExecutionArn(region, account, function, name, execution, version, partition)


@dataclass(frozen=True, slots=True)
class FunctionRef:
    """``qualifier``: the version or alias that was asked for."""

    name: str
    qualifier: str | None = None


def parse_function(text: str) -> FunctionRef:
    """A function by its name, its partial ARN (``ACCOUNT:function:NAME``) or its ARN, each with or without a qualifier. Raises
    InvalidRequest."""
    match = _FUNCTION.fullmatch(text) if len(text) <= 256 else None
    name = match.group(_NAME_GROUP) if match else ""
    if match is None or not _SERVED.fullmatch(name):
        raise InvalidRequest(
            f"{text[:100]!r} is not the name or the ARN of a function.",
            hint="Give the name that its worker serves it by: letters, digits, dashes and underscores, at most 64.",
        )
    return FunctionRef(name, match.group(_QUALIFIER_GROUP))


@dataclass(frozen=True, slots=True)
class CheckpointToken:
    """``number`` counts the checkpoints of an execution that have recorded something."""

    execution_id: str
    invocation: int
    number: int

    def __str__(self) -> str:
        return _encode(f"c1 {self.execution_id} {self.invocation} {self.number}")


def stale_token(why: str) -> StaleCheckpoint:
    """In AWS's words: by them the SDKs know that the invocation is to end, and not the execution."""
    return StaleCheckpoint(f"Invalid checkpoint token: {why}.")


def parse_token(text: str) -> CheckpointToken:
    """Raises StaleCheckpoint for what is not a token: nobody can tell it from one of an older release."""
    try:
        kind, execution, invocation, number = _decode(text).split(" ")
        if kind == "c1" and invocation.isdecimal() and number.isdecimal():
            return CheckpointToken(execution, int(invocation), int(number))
    except ValueError:
        pass
    raise stale_token("it is not one of ours")


@dataclass(frozen=True, slots=True)
class CallbackName:
    """``secret`` makes it unguessable: whoever runs the engine derives it from a key and the other two."""

    execution_id: str
    operation_id: str
    secret: str

    def __str__(self) -> str:
        return _encode(f"b1 {self.execution_id} {self.operation_id} {self.secret}")


def parse_callback_id(text: str) -> CallbackName:
    """Raises NotFound for what names no callback."""
    try:
        kind, execution, operation, secret = _decode(text).split(" ")
        if kind == "b1":
            return CallbackName(execution, operation, secret)
    except ValueError:
        pass
    raise NotFound("There is no such callback.", hint="Use the id that the function was given when it made the callback.")


def marker_of(position: int) -> str:
    return str(position)


def parse_marker(text: str | None) -> int:
    """The position at which a page begins. Absent or empty: at the beginning. Raises InvalidRequest."""
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise InvalidRequest("This marker is not one of ours.", hint="Take it from the answer before, unchanged.")
    return int(text)


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    """Raises ValueError."""
    if len(text) > 2048 or not _BASE64.fullmatch(text):
        raise ValueError(text)
    try:
        return base64.b64decode(text, validate=True).decode()
    except binascii.Error as error:
        raise ValueError(text) from error
