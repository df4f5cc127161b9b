"""The wire of AWS's durable executions: bodies as models, names, and errors as AWS calls them. Pure.

    words        the protocol's enums, instants, ``ErrorObject``
    updates      what a function reports: ``OperationUpdate``, ``CheckpointRequest``
    operations   what a function is told: ``Operation``, pages, an invocation's input and output
    calls        bodies of the calls from outside: stop, pause, resume, describe, list
    history      the events of GetDurableExecutionHistory
    names        ARNs, checkpoint tokens, callback ids, page markers
    faults       errors as AWS names them, and ``parse`` for bodies off the wire

Sources: API version 2025-12-01 as botocore models it, AWS's Python SDK 3.0.0, and its testing package 1.4.0 where the model says
nothing.
"""

from __future__ import annotations

from perdure.runs.protocol.calls import (
    DeleteAnswer,
    DurableConfig,
    ExecutionInfo,
    ExecutionName,
    ExecutionPage,
    ExecutionSummary,
    ExecutionTimeout,
    PauseDetails,
    PauseRequest,
    ResumeRequest,
    StopAnswer,
)
from perdure.runs.protocol.faults import ERROR_TYPE_HEADER, Fault, fault_body, fault_of, parse
from perdure.runs.protocol.history import (
    Details,
    Event,
    EventError,
    EventText,
    EventType,
    HistoryPage,
    RetryDetails,
    event_wire,
)
from perdure.runs.protocol.names import (
    CallbackName,
    CheckpointToken,
    ExecutionArn,
    FunctionRef,
    marker_of,
    parse_arn,
    parse_callback_id,
    parse_function,
    parse_marker,
    parse_token,
    stale_token,
)
from perdure.runs.protocol.operations import (
    CallbackDetails,
    ChainedInvokeDetails,
    CheckpointAnswer,
    ContextDetails,
    ExecutionDetails,
    InvocationInput,
    InvocationOutput,
    Operation,
    OperationPage,
    StepDetails,
    WaitDetails,
)
from perdure.runs.protocol.updates import (
    CallbackOptions,
    ChainedInvokeOptions,
    CheckpointRequest,
    ContextOptions,
    OperationUpdate,
    StepOptions,
    WaitOptions,
)
from perdure.runs.protocol.words import (
    LONGEST_CALLBACK_S,
    LONGEST_S,
    Action,
    ErrorObject,
    ExecutionStatus,
    Instant,
    InvocationStatus,
    OperationStatus,
    OperationType,
    SubType,
    Unit,
    Wire,
    size_bytes,
)

__all__ = [
    "ERROR_TYPE_HEADER",
    "LONGEST_CALLBACK_S",
    "LONGEST_S",
    "Action",
    "CallbackDetails",
    "CallbackName",
    "CallbackOptions",
    "ChainedInvokeDetails",
    "ChainedInvokeOptions",
    "CheckpointAnswer",
    "CheckpointRequest",
    "CheckpointToken",
    "ContextDetails",
    "ContextOptions",
    "DeleteAnswer",
    "Details",
    "DurableConfig",
    "ErrorObject",
    "Event",
    "EventError",
    "EventText",
    "EventType",
    "ExecutionArn",
    "ExecutionDetails",
    "ExecutionInfo",
    "ExecutionName",
    "ExecutionPage",
    "ExecutionStatus",
    "ExecutionSummary",
    "ExecutionTimeout",
    "Fault",
    "FunctionRef",
    "HistoryPage",
    "Instant",
    "InvocationInput",
    "InvocationOutput",
    "InvocationStatus",
    "Operation",
    "OperationPage",
    "OperationStatus",
    "OperationType",
    "OperationUpdate",
    "PauseDetails",
    "PauseRequest",
    "ResumeRequest",
    "RetryDetails",
    "StepDetails",
    "StepOptions",
    "StopAnswer",
    "SubType",
    "Unit",
    "WaitDetails",
    "WaitOptions",
    "Wire",
    "event_wire",
    "fault_body",
    "fault_of",
    "marker_of",
    "parse",
    "parse_arn",
    "parse_callback_id",
    "parse_function",
    "parse_marker",
    "parse_token",
    "size_bytes",
    "stale_token",
]
