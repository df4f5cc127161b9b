"""Workers of durable functions: what they serve, and what they are given to run."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from perdure.wire.public.common import Answer, Body, Text

_FUNCTION = r"^[a-zA-Z0-9_-]{1,64}$"
FunctionName = Annotated[str, Field(pattern=_FUNCTION)]


class WorkerFunction(Body):
    """``digest``: of its code. ``timeout_s``: of one invocation. ``durable``: it is a handler of AWS's durable SDK; else it takes
    its payload and returns a value. ``concurrency``: how many of its invocations are in flight at a time, over all workers."""

    name: FunctionName
    digest: Annotated[Text, Field(min_length=1, max_length=128)]
    timeout_s: int = Field(default=900, ge=1, le=86_400)
    durable: bool = True
    concurrency: int | None = Field(default=None, ge=1, le=100_000)


class RegisterWorker(Body):
    """``name``: for people; each registration is a worker of its own."""

    name: Annotated[Text, Field(max_length=100)] = ""
    functions: list[WorkerFunction] = Field(min_length=1, max_length=200)


class RegisteredWorker(Answer):
    """It sends its invocations in flight (``beat``) several times within ``lease_s``, or they are given to others."""

    worker_id: str
    lease_s: float


class TakeWork(Body):
    wait_s: float = Field(default=20.0, ge=0, le=60)


class Work(Answer):
    """One invocation. ``event`` is what the handler is called with. ``arn`` names the execution."""

    execution_id: str
    arn: str
    function: str
    invocation: int
    request_id: str
    deadline_at: datetime
    event: Any = None


class TakenWork(Answer):
    """``work`` null: there was none."""

    work: Work | None = None


class FlightRef(Body):
    execution_id: Annotated[Text, Field(min_length=1, max_length=64)]
    invocation: int = Field(ge=1, le=(1 << 63) - 1)


class WorkerBeat(Body):
    flights: list[FlightRef] = Field(default_factory=list, max_length=10_000)


class OverFlight(Answer):
    execution_id: str
    invocation: int


class BeatAnswer(Answer):
    """``over``: those that are not this worker's any more; whatever they still do counts for nothing."""

    over: list[OverFlight] = Field(default_factory=list)


class FailureKind(StrEnum):
    """How an invocation ended without an answer. ``returned``: the worker drains and gives it back, which never counts."""

    RAISED = "raised"
    TIMED_OUT = "timed-out"
    RETURNED = "returned"
    INVALID = "invalid"


class FailWork(Body):
    """``error_type`` and ``error_message``: of what was raised."""

    failure: Annotated[FailureKind, Field(strict=False)]
    error_type: Annotated[Text, Field(max_length=256)] | None = None
    error_message: Annotated[Text, Field(max_length=100_000)] | None = None
    stack_trace: list[Annotated[Text, Field(max_length=10_000)]] = Field(default_factory=list, max_length=200)


class FunctionInfo(Answer):
    """``workers``: how many serve it now. ``executions`` of it have not ended; ``waiting`` of these want an invocation that
    nobody has taken, the first of them since ``waiting_since``."""

    name: str
    digest: str
    timeout_s: int
    durable: bool
    concurrency: int | None
    registered_at: datetime
    workers: int
    executions: int = 0
    waiting: int = 0
    waiting_since: datetime | None = None


class FunctionList(Answer):
    functions: list[FunctionInfo]
