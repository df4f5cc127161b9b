"""Bodies of the calls that people and programs make about an execution from the outside.

The bodies of StopDurableExecution and SendDurableExecutionCallbackFailure are an ``ErrorObject`` each and may be empty; that of
SendDurableExecutionCallbackSuccess is the result, raw.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from perdure.runs.protocol.words import LONGEST_S, ErrorObject, ExecutionStatus, Instant, Wire

#: DurableExecutionName: the key under which a start is idempotent.
ExecutionName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
ExecutionTimeout = Annotated[int, Field(ge=1, le=LONGEST_S)]
_Reason = Annotated[str, Field(max_length=1024)]
_ClientToken = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\x21-\x7E]+$")]


class DurableConfig(Wire):
    execution_timeout: ExecutionTimeout | None = None
    retention_period_in_days: Annotated[int, Field(ge=1, le=90)] | None = None


class StopAnswer(Wire):
    stop_timestamp: Instant


class PauseRequest(Wire):
    """``execution_timeout_paused`` absent: yes, the execution's timeout stands still too."""

    client_token: _ClientToken | None = None
    reason: _Reason | None = None
    execution_timeout_paused: bool | None = None


class ResumeRequest(Wire):
    client_token: _ClientToken | None = None
    reason: _Reason | None = None


class DeleteAnswer(Wire):
    deletion_request_timestamp: Instant


class PauseDetails(Wire):
    pause_request_timestamp: Instant
    execution_timeout_paused: bool
    reason: str | None = None


class ExecutionInfo(Wire):
    """The answer of GetDurableExecution."""

    durable_execution_arn: str
    durable_execution_name: str
    function_arn: str
    start_timestamp: Instant
    status: ExecutionStatus
    end_timestamp: Instant | None = None
    version: str | None = None
    input_payload: str | None = None
    result: str | None = None
    error: ErrorObject | None = None
    execution_data_included: bool | None = None
    durable_config: DurableConfig | None = None
    pause_details: PauseDetails | None = None
    expected_execution_timeout_timestamp: Instant | None = None


class ExecutionSummary(Wire):
    durable_execution_arn: str
    durable_execution_name: str
    function_arn: str
    start_timestamp: Instant
    status: ExecutionStatus
    end_timestamp: Instant | None = None


class ExecutionPage(Wire):
    """The answer of ListDurableExecutionsByFunction."""

    durable_executions: tuple[ExecutionSummary, ...] = ()
    next_marker: str | None = None
