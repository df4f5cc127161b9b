"""What a function is told: operations and pages of them, an invocation's input, and what a handler answers."""

from __future__ import annotations

from pydantic import model_validator

from perdure.runs.protocol.words import (
    ErrorObject,
    Instant,
    InvocationStatus,
    OperationStatus,
    OperationType,
    Wire,
)


class ExecutionDetails(Wire):
    input_payload: str | None = None


class ContextDetails(Wire):
    replay_children: bool | None = None
    result: str | None = None
    error: ErrorObject | None = None


class StepDetails(Wire):
    """``attempt`` counts attempts that have ended. ``result`` of a condition that is polled is the state of its last poll."""

    attempt: int = 0
    next_attempt_timestamp: Instant | None = None
    result: str | None = None
    error: ErrorObject | None = None


class WaitDetails(Wire):
    scheduled_end_timestamp: Instant | None = None


class CallbackDetails(Wire):
    callback_id: str | None = None
    result: str | None = None
    error: ErrorObject | None = None


class ChainedInvokeDetails(Wire):
    result: str | None = None
    error: ErrorObject | None = None


class Operation(Wire):
    id: str
    type: OperationType
    status: OperationStatus
    start_timestamp: Instant
    end_timestamp: Instant | None = None
    parent_id: str | None = None
    name: str | None = None
    sub_type: str | None = None
    execution_details: ExecutionDetails | None = None
    context_details: ContextDetails | None = None
    step_details: StepDetails | None = None
    wait_details: WaitDetails | None = None
    callback_details: CallbackDetails | None = None
    chained_invoke_details: ChainedInvokeDetails | None = None


class OperationPage(Wire):
    """The answer of GetDurableExecutionState, and the part of other bodies that holds operations."""

    operations: tuple[Operation, ...] = ()
    next_marker: str | None = None


class CheckpointAnswer(Wire):
    """Without ``checkpoint_token`` this invocation may record nothing more: after the execution's end, or because it is to stop
    and answer PENDING (a pause, or a limit)."""

    checkpoint_token: str | None = None
    new_execution_state: OperationPage = OperationPage()


class InvocationInput(Wire):
    """The event a handler is called with; written with ``Unit.MILLISECONDS``. The first operation is the execution itself."""

    durable_execution_arn: str
    checkpoint_token: str
    initial_execution_state: OperationPage
    updated_operation_ids: tuple[str, ...] = ()


class InvocationOutput(Wire):
    """What a handler returns. A result that was recorded by a checkpoint of the execution itself comes as ""."""

    status: InvocationStatus
    result: str | None = None
    error: ErrorObject | None = None

    @model_validator(mode="after")
    def _one_outcome(self) -> InvocationOutput:
        if self.status is InvocationStatus.FAILED and self.result is not None:
            raise ValueError("Cannot provide a Result for FAILED status.")
        if self.status is InvocationStatus.SUCCEEDED and self.error is not None:
            raise ValueError("Cannot provide an Error for SUCCEEDED status.")
        return self
