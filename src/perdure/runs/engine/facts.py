"""What may stand in an execution's history. Folded in order, facts are its whole state; nothing else is.

A fact says what was decided, never what is to be decided: instants are in it, not delays, so that folding needs no clock, no
rules and no chance. They are written as JSON by their Python names (``Fact.model_dump(mode="json", exclude_none=True)``).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from perdure.runs.protocol import ErrorObject, ExecutionStatus, InvocationStatus, OperationStatus, OperationUpdate


class CodeRule(StrEnum):
    """What is done with an execution whose worker has other code than it began with."""

    ANY = "any"  # it goes on, and its history says so
    EXACT = "exact"  # it waits for a worker with the same code


class Failure(StrEnum):
    """How an invocation ended without an answer that counts."""

    RAISED = "raised"  # the handler raised, or its process ended
    TIMED_OUT = "timed-out"  # it ran longer than a function may
    LOST = "lost"  # nobody has heard of its worker for the time of a lease
    RETURNED = "returned"  # the worker gave it back: it is draining
    EMPTY = "empty"  # it answered PENDING while nothing was pending
    NOT_FOUND = "not-found"  # there is no such function
    INVALID = "invalid"  # what it answered is not an answer


class PauseCause(StrEnum):
    OPERATOR = "operator"
    LIMIT = "limit"  # its history has become larger than allowed
    CODE = "code"  # its replay does not fit the code, which has changed


class _Base(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Parent(_Base):
    """The operation of another execution that this one was started by."""

    execution_id: str
    operation_id: str


class Started(_Base):
    """``secret`` makes callback ids unguessable. ``deadline`` None: it may take for ever."""

    kind: Literal["started"] = "started"
    execution_id: str
    arn: str
    name: str
    function: str
    secret: str
    input: str | None = None
    timeout_s: int | None = None
    deadline: datetime | None = None
    digest: str | None = None
    code: CodeRule = CodeRule.ANY
    parent: Parent | None = None


class Invoked(_Base):
    """A worker took it. ``digest`` is of the code it has."""

    kind: Literal["invoked"] = "invoked"
    invocation: int
    request_id: str
    digest: str | None = None


class Recorded(_Base):
    """One update with what the server adds: when its timer is due, the callback's id, why a target cannot be invoked."""

    update: OperationUpdate
    due: datetime | None = None
    heartbeat_due: datetime | None = None
    callback_id: str | None = None
    refused: ErrorObject | None = None


class Checkpointed(_Base):
    """A whole batch, so that it is there or is not. ``number`` is that of the next token; ``withheld``: nobody was given it."""

    kind: Literal["checkpointed"] = "checkpointed"
    invocation: int
    number: int
    records: tuple[Recorded, ...] = ()
    client_token: str | None = None
    withheld: bool = False


class Firing(_Base):
    operation_id: str
    error: ErrorObject | None = None


class Fired(_Base):
    """Timers that were due. ``told``: the answer of a checkpoint carried it to the function."""

    kind: Literal["fired"] = "fired"
    firings: tuple[Firing, ...]
    told: bool = False


class Completed(_Base):
    """Somebody outside completed a callback, or a chained invoke ended."""

    kind: Literal["completed"] = "completed"
    operation_id: str
    status: OperationStatus
    result: str | None = None
    error: ErrorObject | None = None


class Beaten(_Base):
    """A callback's heartbeat."""

    kind: Literal["beaten"] = "beaten"
    operation_id: str
    heartbeat_due: datetime | None = None


class Answered(_Base):
    """``recheck_at``: when what it was told and may have overlooked is offered again."""

    kind: Literal["answered"] = "answered"
    invocation: int
    status: InvocationStatus
    error: ErrorObject | None = None
    recheck_at: datetime | None = None


class Failed(_Base):
    """``retry_at`` None: at once."""

    kind: Literal["failed"] = "failed"
    invocation: int
    failure: Failure
    error: ErrorObject | None = None
    retry_at: datetime | None = None


class Paused(_Base):
    kind: Literal["paused"] = "paused"
    cause: PauseCause
    reason: str | None = None
    timeout_paused: bool = True


class Resumed(_Base):
    kind: Literal["resumed"] = "resumed"
    reason: str | None = None
    deadline: datetime | None = None
    code: CodeRule


class Ended(_Base):
    kind: Literal["ended"] = "ended"
    status: ExecutionStatus
    result: str | None = None
    error: ErrorObject | None = None


class Deleted(_Base):
    kind: Literal["deleted"] = "deleted"


Fact = Annotated[
    Started | Invoked | Checkpointed | Fired | Completed | Beaten | Answered | Failed | Paused | Resumed | Ended | Deleted,
    Field(discriminator="kind"),
]
#: Reads a fact back from the JSON of a history's entry.
FACT: TypeAdapter[Fact] = TypeAdapter(Fact)


@dataclass(frozen=True, slots=True)
class Entry:
    """A fact in its place. ``at`` never goes back within a history, whatever the clock does."""

    seq: int
    at: datetime
    fact: Fact
