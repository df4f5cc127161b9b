"""Events of GetDurableExecutionHistory: the 26 types that AWS has, each with its details under a member of its own name."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from perdure.runs.protocol.words import ErrorObject, Instant, Unit, Wire


class EventType(StrEnum):
    EXECUTION_STARTED = "ExecutionStarted"
    EXECUTION_SUCCEEDED = "ExecutionSucceeded"
    EXECUTION_FAILED = "ExecutionFailed"
    EXECUTION_TIMED_OUT = "ExecutionTimedOut"
    EXECUTION_STOPPED = "ExecutionStopped"
    EXECUTION_PAUSED = "ExecutionPaused"
    EXECUTION_RESUMED = "ExecutionResumed"
    CONTEXT_STARTED = "ContextStarted"
    CONTEXT_SUCCEEDED = "ContextSucceeded"
    CONTEXT_FAILED = "ContextFailed"
    WAIT_STARTED = "WaitStarted"
    WAIT_SUCCEEDED = "WaitSucceeded"
    WAIT_CANCELLED = "WaitCancelled"
    STEP_STARTED = "StepStarted"
    STEP_SUCCEEDED = "StepSucceeded"
    STEP_FAILED = "StepFailed"
    CHAINED_INVOKE_STARTED = "ChainedInvokeStarted"
    CHAINED_INVOKE_SUCCEEDED = "ChainedInvokeSucceeded"
    CHAINED_INVOKE_FAILED = "ChainedInvokeFailed"
    CHAINED_INVOKE_TIMED_OUT = "ChainedInvokeTimedOut"
    CHAINED_INVOKE_STOPPED = "ChainedInvokeStopped"
    CALLBACK_STARTED = "CallbackStarted"
    CALLBACK_SUCCEEDED = "CallbackSucceeded"
    CALLBACK_FAILED = "CallbackFailed"
    CALLBACK_TIMED_OUT = "CallbackTimedOut"
    INVOCATION_COMPLETED = "InvocationCompleted"


class EventText(Wire):
    """A payload or reason; without data (``IncludeExecutionData`` false) ``truncated`` says that there is one."""

    payload: str | None = None
    truncated: bool | None = None


class EventError(Wire):
    payload: ErrorObject | None = None
    truncated: bool | None = None


class RetryDetails(Wire):
    """``current_attempt`` counts from 1."""

    current_attempt: int
    next_attempt_delay_seconds: int | None = None


class Details(Wire):
    """Those of any event: each type uses some of the members."""

    input: EventText | None = None
    result: EventText | None = None
    error: EventError | None = None
    reason: EventText | None = None
    execution_timeout: int | None = None
    retry_details: RetryDetails | None = None
    duration: int | None = None
    scheduled_end_timestamp: Instant | None = None
    callback_id: str | None = None
    timeout: int | None = None
    heartbeat_timeout: int | None = None
    function_name: str | None = None
    tenant_id: str | None = None
    executed_version: str | None = None
    durable_execution_arn: str | None = None
    start_timestamp: Instant | None = None
    end_timestamp: Instant | None = None
    request_id: str | None = None
    pause_request_timestamp: Instant | None = None
    resume_request_timestamp: Instant | None = None
    execution_timeout_paused: bool | None = None


class Event(Wire):
    """``details`` travel as the member that is named after the type, like ``StepStartedDetails``."""

    event_type: EventType
    event_id: int
    event_timestamp: Instant
    details: Details
    id: str | None = None
    parent_id: str | None = None
    name: str | None = None
    sub_type: str | None = None


def event_wire(event: Event, unit: Unit = Unit.SECONDS) -> dict[str, Any]:
    """One event as JSON values."""
    told = event.wire(unit)
    told[f"{event.event_type}Details"] = told.pop("Details")
    return told


class HistoryPage(Wire):
    """The answer of GetDurableExecutionHistory, before ``event_wire``."""

    events: tuple[Event, ...] = ()
    next_marker: str | None = None
