"""What may be asked of an execution, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from perdure.runs.engine.facts import CodeRule, Entry, Failure, Parent
from perdure.runs.engine.state import Op, Standing, State
from perdure.runs.protocol import ErrorObject, ExecutionStatus, InvocationOutput, OperationUpdate

# ----------------------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Start:
    """A new execution. ``secret`` is random, and its own: callback ids are made of it. ``digest``: the code it is bound to, if
    that is known already; else it is that of its first worker."""

    execution_id: str
    arn: str
    name: str
    function: str
    secret: str
    input: str | None = None
    timeout_s: int | None = None
    digest: str | None = None
    code: CodeRule = CodeRule.ANY
    parent: Parent | None = None


@dataclass(frozen=True, slots=True)
class Invoke:
    """A worker offers to take it."""

    request_id: str
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``refused``: of the functions that the batch wants to invoke those that cannot be, by the name in the update."""

    token: str
    updates: tuple[OperationUpdate, ...] = ()
    client_token: str | None = None
    refused: Mapping[str, ErrorObject] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    invocation: int
    output: InvocationOutput


@dataclass(frozen=True, slots=True)
class Fail:
    """An invocation ended without an answer."""

    invocation: int
    failure: Failure
    error: ErrorObject | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Some timer may be due."""


@dataclass(frozen=True, slots=True)
class CompleteCallback:
    """``error`` None: it succeeded."""

    callback_id: str
    result: str | None = None
    error: ErrorObject | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    callback_id: str


@dataclass(frozen=True, slots=True)
class CompleteInvoke:
    """What became of the execution that a chained invoke has started. ``timeout_s`` is its own."""

    operation_id: str
    status: ExecutionStatus
    result: str | None = None
    error: ErrorObject | None = None
    timeout_s: int | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    error: ErrorObject | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    reason: str | None = None
    timeout_paused: bool = True


@dataclass(frozen=True, slots=True)
class Resume:
    """``code``: from now on; None leaves it."""

    reason: str | None = None
    code: CodeRule | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    pass


Command = (
    Invoke | Checkpoint | Answer | Fail | Tick | CompleteCallback | Heartbeat | CompleteInvoke | Stop | Pause | Resume | Delete
)

# ------------------------------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start this function for an operation. ``key`` makes it idempotent: whoever died after the commit may start it again."""

    operation_id: str
    function: str
    key: str
    payload: str
    tenant_id: str | None = None
    trace_id: str | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """It has ended; tell its parent, if it has one, and whoever waits."""

    status: ExecutionStatus
    result: str | None
    error: ErrorObject | None
    parent: Parent | None
    timeout_s: int | None


class Notice(StrEnum):
    LIMIT_NEAR = "limit-near"
    LIMIT_PASSED = "limit-passed"
    CODE_CHANGED = "code-changed"
    GIVEN_UP = "given-up"


@dataclass(frozen=True, slots=True)
class Warn:
    """Something that a person should know, in a sentence."""

    notice: Notice
    message: str


Todo = StartChild | Finish | Warn


@dataclass(frozen=True, slots=True)
class Reply:
    """What the caller of ``Invoke`` or ``Checkpoint`` is told. ``token`` None: this invocation may record nothing more."""

    token: str | None
    operations: tuple[Op, ...] = ()
    updated_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """``entries`` are to be appended, all in one transaction; what is ``todo`` comes after it and may be repeated. ``state`` is
    ``fold(entries, onto=the state before)``."""

    state: State
    standing: Standing
    entries: tuple[Entry, ...] = ()
    todo: tuple[Todo, ...] = ()
    reply: Reply | None = None
