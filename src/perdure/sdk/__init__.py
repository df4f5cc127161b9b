"""The Python SDK: ``Workspace`` for sync code, ``AsyncWorkspace`` for async code, one surface."""

from __future__ import annotations

from perdure.core.errors import PerdureError
from perdure.sdk._async.client import AsyncClient
from perdure.sdk._async.commands import AsyncCommandHandle
from perdure.sdk._async.executions import AsyncCallbacks, AsyncExecution, AsyncExecutions
from perdure.sdk._async.programs import AsyncInvocation, AsyncProgram
from perdure.sdk._async.pty import AsyncPty
from perdure.sdk._async.python import AsyncPython
from perdure.sdk._async.workspace import AsyncWorkspace
from perdure.sdk._core import CommandResult, Output
from perdure.sdk._invoke import InvokeEvent, InvokeResult
from perdure.sdk._python import PythonError, PythonOutput, PythonResult
from perdure.sdk._sync.client import Client
from perdure.sdk._sync.commands import CommandHandle
from perdure.sdk._sync.executions import Callbacks, Execution, Executions
from perdure.sdk._sync.programs import Invocation, Program
from perdure.sdk._sync.pty import Pty
from perdure.sdk._sync.python import Python
from perdure.sdk._sync.workspace import Workspace
from perdure.sdk.errors import (
    CallTimedOut,
    ConnectionLost,
    ExecutionFailed,
    ExecutionRunning,
    ExecutionStopped,
    ExecutionTimedOut,
    ForeignAnswer,
    ServerUnreachable,
    SpecConflict,
    StillRunning,
    TransferMismatch,
)
from perdure.wire.public import FileInfo, ImageInfo, ResumeReport, SnapshotInfo, WorkspaceInfo

__all__ = [
    "AsyncCallbacks",
    "AsyncClient",
    "AsyncCommandHandle",
    "AsyncExecution",
    "AsyncExecutions",
    "AsyncInvocation",
    "AsyncProgram",
    "AsyncPty",
    "AsyncPython",
    "AsyncWorkspace",
    "CallTimedOut",
    "Callbacks",
    "Client",
    "CommandHandle",
    "CommandResult",
    "ConnectionLost",
    "Execution",
    "ExecutionFailed",
    "ExecutionRunning",
    "ExecutionStopped",
    "ExecutionTimedOut",
    "Executions",
    "FileInfo",
    "ForeignAnswer",
    "ImageInfo",
    "Invocation",
    "InvokeEvent",
    "InvokeResult",
    "Output",
    "PerdureError",
    "Program",
    "Pty",
    "Python",
    "PythonError",
    "PythonOutput",
    "PythonResult",
    "ResumeReport",
    "ServerUnreachable",
    "SnapshotInfo",
    "SpecConflict",
    "StillRunning",
    "TransferMismatch",
    "Workspace",
    "WorkspaceInfo",
]
