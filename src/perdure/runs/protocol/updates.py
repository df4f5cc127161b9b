"""What a function reports: operation updates, and the checkpoint that carries them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from perdure.runs.protocol.words import (
    LONGEST_CALLBACK_S,
    LONGEST_S,
    Action,
    EmptyIsNone,
    ErrorObject,
    OperationId,
    OperationName,
    OperationType,
    SubTypeName,
    Wire,
    size_bytes,
)


class ContextOptions(Wire):
    """``replay_children``: the result is too large to be kept, so a replay runs the context's children again to rebuild it."""

    replay_children: bool | None = None


class StepOptions(Wire):
    next_attempt_delay_seconds: Annotated[int, Field(ge=1, le=LONGEST_S)] = 1


class WaitOptions(Wire):
    wait_seconds: Annotated[int, Field(ge=1, le=LONGEST_S)] = 1


class CallbackOptions(Wire):
    """0 or absent: no timeout."""

    timeout_seconds: Annotated[int, Field(ge=0, le=LONGEST_CALLBACK_S)] = 0
    heartbeat_timeout_seconds: Annotated[int, Field(ge=0, le=LONGEST_CALLBACK_S)] = 0


#: A name, a name with a version or alias, a partial or a full ARN.
FUNCTION_NAME = (
    r"^(arn:(aws[a-zA-Z-]*)?:lambda:)?((eusc-)?[a-z]{2}((-gov)|(-iso([a-z]?)))?-[a-z]+-\d{1}:)?(\d{12}:)?(function:)?"
    r"([a-zA-Z0-9_.-]+)(:(\$LATEST(\.PUBLISHED)?|[a-zA-Z0-9_-]+))?$"
)


class ChainedInvokeOptions(Wire):
    function_name: Annotated[str, Field(min_length=1, max_length=256, pattern=FUNCTION_NAME)]
    tenant_id: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[a-zA-Z0-9._:/=+@ -]+$")] | None = None
    x_amzn_trace_id: Annotated[str, Field(max_length=8192)] | None = None


class OperationUpdate(Wire):
    """One change of one operation. Which ``action`` an operation of a type may take when is the engine's table."""

    id: OperationId
    type: OperationType
    action: Action
    parent_id: Annotated[OperationId | None, EmptyIsNone] = None
    name: Annotated[OperationName | None, EmptyIsNone] = None
    sub_type: Annotated[SubTypeName | None, EmptyIsNone] = None
    payload: str | None = None
    error: ErrorObject | None = None
    context_options: ContextOptions | None = None
    step_options: StepOptions | None = None
    wait_options: WaitOptions | None = None
    callback_options: CallbackOptions | None = None
    chained_invoke_options: ChainedInvokeOptions | None = None

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.payload) + (self.error.size_bytes if self.error else 0)


class CheckpointRequest(Wire):
    """The body of CheckpointDurableExecution; the execution's ARN is in the path. No updates: a refresh."""

    checkpoint_token: Annotated[str, Field(min_length=1, max_length=2048)]
    updates: tuple[OperationUpdate, ...] | None = None
    client_token: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\x21-\x7E]+$")] | None = None
