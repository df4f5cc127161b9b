"""Durable executions, as operators and programs that are not AWS's clients see them.

Inputs and results are JSON values here. AWS's protocol carries them as texts, so one that is no JSON is shown as the text that
it is (``…_is_text``). Sizes are those of the texts.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, JsonValue

from perdure.wire.public.common import Answer, Body, Paged, Text
from perdure.wire.public.workers import FunctionName

#: The longest timeout of an execution, in seconds: 366 days.
LONGEST_S = 31_622_400
ExecutionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_Reason = Annotated[Text, Field(max_length=1024)]
_ErrorText = Annotated[str, Field(max_length=100_000)]


class ExecutionStatus(StrEnum):
    """``PAUSING``: asked to pause while an invocation is still in flight."""

    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED_OUT"
    STOPPED = "STOPPED"
    DELETING = "DELETING"


class CodeRule(StrEnum):
    """What is done when a worker has other code than an execution began with: go on, or wait for a worker with the same code."""

    ANY = "any"
    EXACT = "exact"


class StandingReason(StrEnum):
    """Why an execution will move again: exactly one holds."""

    ENDED = "ended"
    ANSWER = "answer"  # an invocation is in flight
    OPERATOR = "operator"  # it is paused
    INVOKE = "invoke"  # it waits for a worker
    TIMER = "timer"
    WORLD = "world"  # a callback without a timeout, or another execution
    STUCK = "stuck"  # a defect


class PauseReason(StrEnum):
    OPERATOR = "operator"
    LIMIT = "limit"
    CODE = "code"


class OperationType(StrEnum):
    EXECUTION = "EXECUTION"
    CONTEXT = "CONTEXT"
    STEP = "STEP"
    WAIT = "WAIT"
    CALLBACK = "CALLBACK"
    CHAINED_INVOKE = "CHAINED_INVOKE"


class OperationStatus(StrEnum):
    """``PENDING``: a step that waits for its next attempt. ``READY``: its next attempt may begin."""

    STARTED = "STARTED"
    PENDING = "PENDING"
    READY = "READY"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"
    STOPPED = "STOPPED"


class StartExecution(Body):
    """``name`` makes it idempotent: the same name and input are the same execution. ``timeout_s``: of the whole execution; null:
    none. ``key``: executions with the same one run one after the other. ``priority``: higher ones are invoked first."""

    function: FunctionName
    input: JsonValue = Field(default=None, description="Absent: none at all. The function sees an empty object then.")
    name: ExecutionName | None = None
    timeout_s: int | None = Field(default=None, ge=1, le=LONGEST_S)
    priority: int = Field(default=0, ge=-32_768, le=32_767)
    key: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
    code: Annotated[CodeRule, Field(strict=False)] = CodeRule.ANY


class StartedExecution(Answer):
    """``is_new`` false: it was there by its name."""

    execution_id: str
    arn: str
    is_new: bool


class FunctionFailure(Answer):
    """An error as its function has told it. All may be absent: a callback may fail without a word."""

    type: str | None = None
    message: str | None = None
    data: str | None = None
    stack_trace: list[str] | None = None


class ExecutionItem(Answer):
    execution_id: str
    arn: str
    name: str
    function: str
    status: ExecutionStatus
    started_at: datetime
    ended_at: datetime | None = None


class ExecutionList(Paged):
    executions: list[ExecutionItem]


class ExecutionPause(Answer):
    """``by``: an operator, a limit that its history has passed, or code that its history does not fit. ``timeout_paused``: its
    timeout stands still, too."""

    at: datetime
    by: PauseReason | None = None
    reason: str | None = None
    timeout_paused: bool


class ExecutionStanding(Answer):
    """Why it will move again. ``invoke_at``: not before then; null: at once. ``timer_at``: when its next timer is due."""

    reason: StandingReason
    invoke_at: datetime | None = None
    timer_at: datetime | None = None


class ExecutionInfo(ExecutionItem):
    """``invocations`` counts the one in flight too. ``last_error``: of the last invocation that failed. ``code_began`` and
    ``code_last``: digests of the code that ran it first and last."""

    input: Any = None
    input_bytes: int | None = None
    input_is_text: bool = False
    result: Any = None
    result_bytes: int | None = None
    result_is_text: bool = False
    error: FunctionFailure | None = None
    timeout_s: int | None = None
    times_out_at: datetime | None = None
    pause: ExecutionPause | None = None
    standing: ExecutionStanding
    code: CodeRule
    priority: int
    key: str | None = None
    invocations: int
    last_error: FunctionFailure | None = None
    code_began: str | None = None
    code_last: str | None = None
    operations: int
    history_bytes: int


class ExecutionOutcome(Answer):
    """``ended`` false: the wait was over first."""

    execution_id: str
    arn: str
    status: ExecutionStatus
    ended: bool
    ended_at: datetime | None = None
    result: Any = None
    result_bytes: int | None = None
    result_is_text: bool = False
    error: FunctionFailure | None = None


class ExecutionHistory(Paged):
    """``events`` are AWS's, with its names; times are ISO 8601."""

    events: list[dict[str, Any]]


class OperationInfo(Answer):
    """``payload``: an execution's input, the result of all others, as the text that it is (of a condition that is polled, the
    state of its last poll). ``attempts`` have ended. ``due_at``: the end of a wait, or a step's next attempt.
    ``replay_children``: the context's result is rebuilt by running what is below it again."""

    id: str
    type: OperationType
    status: OperationStatus
    parent_id: str | None = None
    name: str | None = None
    sub_type: str | None = None
    started_at: datetime
    ended_at: datetime | None = None
    attempts: int | None = None
    due_at: datetime | None = None
    callback_id: str | None = None
    payload: str | None = None
    error: FunctionFailure | None = None
    replay_children: bool = False


class OperationList(Paged):
    """In order of their creation; the first one is the execution itself."""

    operations: list[OperationInfo]


class StopExecution(Body):
    """What is told as its error; nothing of it has to be given."""

    error_type: Annotated[Text, Field(max_length=256)] | None = None
    error_message: _ErrorText | None = None
    error_data: _ErrorText | None = None


class StoppedExecution(Answer):
    execution_id: str
    stopped_at: datetime


class PauseExecution(Body):
    """``timeout_paused``: its timeout stands still, too."""

    reason: _Reason | None = None
    timeout_paused: bool = True


class ResumeExecution(Body):
    """``code``: the rule from now on; null: as it is."""

    reason: _Reason | None = None
    code: Annotated[CodeRule, Field(strict=False)] | None = None


class RetryExecution(Body):
    """``name``: of the new execution, where one is started; it makes the retry idempotent."""

    name: ExecutionName | None = None


class RetriedExecution(Answer):
    """``resumed``: it was parked and goes on; else ``execution_id`` is a new one with the same function and input."""

    execution_id: str
    arn: str
    resumed: bool


class CallbackInfo(Answer):
    """``due_at``: when it times out; ``heartbeat_due_at``: unless a heartbeat comes before."""

    callback_id: str
    execution_id: str
    arn: str
    function: str
    operation_id: str
    name: str | None = None
    started_at: datetime
    due_at: datetime | None = None
    heartbeat_due_at: datetime | None = None


class CallbackList(Answer):
    """Oldest first."""

    callbacks: list[CallbackInfo]


class SucceedCallback(Body):
    result: JsonValue = Field(default=None, description="Absent: none at all.")


class FailCallback(Body):
    error_type: Annotated[Text, Field(max_length=256)] | None = None
    error_message: _ErrorText | None = None
    error_data: _ErrorText | None = None
    stack_trace: list[Annotated[str, Field(max_length=10_000)]] | None = Field(default=None, max_length=200)
