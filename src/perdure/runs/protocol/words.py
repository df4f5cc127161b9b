"""The protocol's own words, and what all of its bodies share.

Source: the model of API version 2025-12-01 in botocore, and AWS's Python SDK 3.0.0. Names on the wire are AWS's, in Python ours.
What a client sends may hold fields that nobody here knows: they are ignored, since a newer SDK must go on working. A value that
nobody here knows (an operation's type, an action) is refused, since ignoring it would lose work.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, SerializationInfo
from pydantic.alias_generators import to_pascal

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The longest wait, retry delay and execution, in seconds: 366 days.
LONGEST_S = 31_622_400
#: The longest timeout of a callback, in seconds. 0 there means none.
LONGEST_CALLBACK_S = 99_999_999


class OperationType(StrEnum):
    EXECUTION = "EXECUTION"
    CONTEXT = "CONTEXT"
    STEP = "STEP"
    WAIT = "WAIT"
    CALLBACK = "CALLBACK"
    CHAINED_INVOKE = "CHAINED_INVOKE"


class Action(StrEnum):
    """What a function says about one of its operations."""

    START = "START"
    SUCCEED = "SUCCEED"
    FAIL = "FAIL"
    RETRY = "RETRY"
    CANCEL = "CANCEL"


class OperationStatus(StrEnum):
    STARTED = "STARTED"
    PENDING = "PENDING"  # a step that waits for its next attempt
    READY = "READY"  # a step whose next attempt may begin
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    STOPPED = "STOPPED"


class ExecutionStatus(StrEnum):
    RUNNING = "RUNNING"
    PAUSING = "PAUSING"  # asked to pause; an invocation is still in flight
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED_OUT"
    STOPPED = "STOPPED"
    DELETING = "DELETING"


class InvocationStatus(StrEnum):
    """What a handler answers."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    PENDING = "PENDING"


class SubType(StrEnum):
    """Those the SDKs write by themselves. An author may use any other, so a subtype is a plain ``str`` everywhere."""

    STEP = "Step"
    WAIT = "Wait"
    CALLBACK = "Callback"
    RUN_IN_CHILD_CONTEXT = "RunInChildContext"
    MAP = "Map"
    MAP_ITERATION = "MapIteration"
    PARALLEL = "Parallel"
    PARALLEL_BRANCH = "ParallelBranch"
    WAIT_FOR_CALLBACK = "WaitForCallback"
    WAIT_FOR_CONDITION = "WaitForCondition"
    CHAINED_INVOKE = "ChainedInvoke"


class Unit(StrEnum):
    """How an instant is written: an invocation's input has milliseconds since 1970, an API answer seconds with a fraction."""

    SECONDS = "s"
    MILLISECONDS = "ms"


def _write_instant(at: datetime, info: SerializationInfo) -> int | float | str:
    unit = (info.context or {}).get("unit")
    if unit is Unit.MILLISECONDS:
        return (at - _EPOCH) // timedelta(milliseconds=1)
    if unit is Unit.SECONDS:
        return (at - _EPOCH) / timedelta(seconds=1)
    return at.isoformat()


#: An aware instant. Without a unit (in an execution's history) it is written as ISO 8601 with microseconds.
Instant = Annotated[datetime, PlainSerializer(_write_instant)]
OperationId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
OperationName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x20-\x7E]+$")]
SubTypeName = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[a-zA-Z0-9_-]+$")]
#: SDKs write an absent subtype or parent as null, as "" or not at all.
EmptyIsNone = BeforeValidator(lambda value: None if value == "" else value)


class Wire(BaseModel):
    """Base of every body: AWS's names on the wire, both accepted in Python."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=to_pascal,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,
    )

    def wire(self, unit: Unit = Unit.SECONDS) -> dict[str, Any]:
        """As JSON values with AWS's names; what is not set is left out, as AWS does."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, context={"unit": unit})


class ErrorObject(Wire):
    """An error as data. All four may be absent: a callback may fail without a word."""

    error_message: str | None = None
    error_type: str | None = None
    error_data: str | None = None
    stack_trace: tuple[str, ...] | None = None

    @property
    def size_bytes(self) -> int:
        texts = (self.error_message, self.error_type, self.error_data, *(self.stack_trace or ()))
        return sum(size_bytes(text) for text in texts)


def size_bytes(text: str | None) -> int:
    """As the service measures: bytes of UTF-8. A lone surrogate, which JSON can carry, counts three."""
    return 0 if text is None else len(text.encode("utf-8", "surrogatepass"))
