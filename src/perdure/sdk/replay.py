"""Run changed code against the history of an execution, here, and see whether it still fits. Nothing is recorded anywhere.

The handler is AWS's durable SDK as it is, in this process. It is told the operations that its function was told, and whatever it
then wants to record is noted and refused, before any code of a step runs. So only what stands outside steps is executed: what a
replay executes anyway.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from perdure.core.errors import HostUnfit, InvalidRequest
from perdure.wire import public
from perdure.wire.public import OperationInfo, OperationStatus, OperationType

Handler = Callable[[Any, Any], Any]
_SDK = "aws_durable_execution_sdk_python"
_CLOSED = frozenset(OperationStatus) - {OperationStatus.STARTED, OperationStatus.PENDING, OperationStatus.READY}
_DIFFERENCE = re.compile(r"(\w+) checkpoint=('[^']*'|None) current=('[^']*'|None)")
_MEMBERS = {
    OperationType.CONTEXT: "ContextDetails",
    OperationType.STEP: "StepDetails",
    OperationType.CALLBACK: "CallbackDetails",
    OperationType.CHAINED_INVOKE: "ChainedInvokeDetails",
}


class Verdict(StrEnum):
    SAME = "same"  # it stands or ends where the history does
    GOES_ON = "goes-on"  # it fits, and would do something next
    DIFFERS = "differs"  # it would end otherwise than the history, or leaves out what that has
    NONDETERMINISTIC = "nondeterministic"  # AWS's SDK refuses it


@dataclass(frozen=True, slots=True)
class Move:
    """What the handler would record next. ``is_new``: of an operation that the history does not have."""

    operation_id: str
    type: str
    name: str | None
    action: str
    is_new: bool


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where the code does not fit. ``differences``: what, as the history has it, and as the code has it."""

    operation_id: str | None
    type: str | None
    name: str | None
    differences: tuple[tuple[str, str, str], ...]
    message: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """``status``: what the handler answered. ``left_out``: operations of the history that it ended without coming to."""

    verdict: Verdict
    status: str
    moves: tuple[Move, ...] = ()
    mismatch: Mismatch | None = None
    left_out: tuple[OperationInfo, ...] = ()
    result: Any = None
    error_type: str | None = None
    error_message: str | None = None


def load(place: str) -> Handler:
    """``module:handler`` as a worker takes it; modules in the current directory are found too. Raises InvalidRequest."""
    module_name, colon, name = place.partition(":")
    if not colon or not module_name or not name:
        raise InvalidRequest(f"{place!r} does not name a handler.", hint="Write it as module:handler, such as orders:main.")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        message = f"The module {module_name!r} cannot be imported: {error}."
        raise InvalidRequest(message, hint="Run this in the directory where it lies.") from error
    handler = getattr(module, name, None)
    if not callable(handler) or not _is_durable(handler):
        raise InvalidRequest(
            f"{place!r} is not a handler of AWS's durable SDK.", hint="Name a function that is decorated with @durable_execution."
        )
    found: Handler = handler
    return found


def _is_durable(handler: Any) -> bool:
    """Whether the SDK's decorator is somewhere in it: any other function would simply do what it does."""
    while handler is not None:
        if getattr(handler, "__globals__", {}).get("__name__") == f"{_SDK}.execution":
            return True
        handler = getattr(handler, "__wrapped__", None)
    return False


def replay(info: public.ExecutionInfo, operations: Sequence[OperationInfo], handler: Handler) -> Replayed:
    """What a handler makes of an execution's history. Raises HostUnfit where AWS's SDK is not installed."""
    shown = visible(operations)
    watch = _Watch({one.id: one for one in shown})
    with _watched(watch), contextlib.redirect_stdout(sys.stderr):
        answer = _called(handler, _event(info, shown, watch))
    return _judged(info, watch, answer if isinstance(answer, dict) else {})


def _called(handler: Handler, event: Any) -> Any:
    """What it raises as a whole ends an invocation and is no answer: nothing can be said of the history then."""
    try:
        return handler(event, _CONTEXT)
    except (_import("exceptions").DurableExecutionsError, ValueError) as error:
        message = f"The handler did not answer: {type(error).__name__}: {error}."
        raise InvalidRequest(message, hint="Call it as a worker does, and see where it raises.") from error


def visible(operations: Sequence[OperationInfo]) -> list[OperationInfo]:
    """Without what lies below a closed context whose result stands for it, as the server tells a function."""
    hidden: set[str] = set()
    known = {one.id: one for one in operations}
    for one in operations:  # a parent is always older than its children
        parent = known.get(one.parent_id) if one.parent_id else None
        if parent is not None and (parent.id in hidden or (parent.status in _CLOSED and not parent.replay_children)):
            hidden.add(one.id)
    return [one for one in operations if one.id not in hidden]


# ---------------------------------------------------------------------------------------------------------------------- told


def told(one: OperationInfo) -> dict[str, Any]:
    """An operation as the protocol tells a function of it, with milliseconds since 1970."""
    made: dict[str, Any] = {
        "Id": one.id,
        "Type": one.type.value,
        "Status": one.status.value,
        "StartTimestamp": _ms(one.started_at),
        "EndTimestamp": _ms(one.ended_at),
        "ParentId": one.parent_id,
        "Name": one.name,
        "SubType": one.sub_type,
    }
    if one.type is OperationType.EXECUTION:
        made["ExecutionDetails"] = {"InputPayload": one.payload}
    elif one.type is OperationType.WAIT:
        made["WaitDetails"] = _filled({"ScheduledEndTimestamp": _ms(one.due_at)})
    else:
        made[_MEMBERS[one.type]] = _details(one)
    return _filled(made)


def _details(one: OperationInfo) -> dict[str, Any]:
    details: dict[str, Any] = {"Result": one.payload, "Error": _error(one.error)}
    if one.type is OperationType.STEP:
        details |= {"Attempt": one.attempts or 0, "NextAttemptTimestamp": _ms(one.due_at)}
    elif one.type is OperationType.CALLBACK:
        details["CallbackId"] = one.callback_id
    elif one.type is OperationType.CONTEXT:
        details["ReplayChildren"] = one.replay_children or None
    return _filled(details)


def _error(error: public.FunctionFailure | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return _filled(
        {"ErrorType": error.type, "ErrorMessage": error.message, "ErrorData": error.data, "StackTrace": error.stack_trace}
    )


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _ms(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp() * 1000)


def _event(info: public.ExecutionInfo, operations: Sequence[OperationInfo], watch: _Watch) -> Any:
    sdk = _import("execution")
    given = {
        "DurableExecutionArn": info.arn,
        "CheckpointToken": "replay",
        "InitialExecutionState": {"Operations": [told(one) for one in operations], "NextMarker": ""},
    }
    return sdk.DurableExecutionInvocationInputWithClient.from_durable_execution_invocation_input(
        sdk.DurableExecutionInvocationInput.from_json_dict(given), watch
    )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(f"{_SDK}.{name}")
    except ImportError as error:
        raise HostUnfit(
            "AWS's durable SDK is not installed here, and a replay runs it.", hint="pip install 'perdure[durable]'"
        ) from error


#: What the SDK reads of Lambda's context.
_CONTEXT = SimpleNamespace(
    aws_request_id="replay",
    function_name="replay",
    function_version="$LATEST",
    invoked_function_arn="arn:aws:lambda:us-east-1:000000000000:function:replay",
    memory_limit_in_mb="128",
    log_group_name="replay",
    log_stream_name="replay",
    client_context=None,
    identity=None,
    tenant_id=None,
    get_remaining_time_in_millis=lambda: int(timedelta(minutes=15).total_seconds() * 1000),
)


# ------------------------------------------------------------------------------------------------------------------- watched


@dataclass(slots=True)
class _Watch:
    """What the handler asks for and would do, noted by the thread in which it does; and the client that its SDK talks to."""

    known: Mapping[str, OperationInfo]
    seen: set[str] = field(default_factory=set)
    moves: dict[tuple[str, str], Move] = field(default_factory=dict)
    refused: list[tuple[str | None, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def would(self, operation_id: str, type_: Any, name: str | None, action: str) -> None:
        move = Move(operation_id, getattr(type_, "value", str(type_)), name, action, operation_id not in self.known)
        with self.lock:
            self.moves.setdefault((operation_id, action), move)

    def checkpoint(self, *_: Any, **__: Any) -> Any:
        """Nobody may record anything more: this invocation is to end."""
        service = _import("lambda_service")
        return service.CheckpointOutput(None, service.CheckpointUpdatedExecutionState())

    def get_execution_state(self, *_: Any, **__: Any) -> Any:
        return _import("lambda_service").StateOutput()


@contextlib.contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """AWS's SDK with its seams in our hands: what it records, the code that it runs in steps, and what it refuses."""
    state, errors = _import("state").ExecutionState, _import("exceptions")
    wrap, look, refuse = state.wrap_user_function, state.get_checkpoint_result, errors.NonDeterministicExecutionError.__init__

    def record(_self: Any, operation_update: Any = None, *_: Any, **__: Any) -> None:
        if operation_update is not None:
            one = operation_update
            watch.would(one.operation_id, one.operation_type, one.name, one.action.value)
        raise errors.SuspendExecution("A replay records nothing.")

    def wrapped(self: Any, function: Any, identifier: Any, *rest: Any, **more: Any) -> Any:
        if getattr(identifier.type, "value", "") == OperationType.STEP.value:  # it was cut off, and runs again
            watch.would(identifier.operation_id, identifier.type, identifier.name, "RUN")
            raise errors.SuspendExecution("A replay runs no steps.")
        return wrap(self, function, identifier, *rest, **more)

    def looked(self: Any, checkpoint_id: str, *rest: Any, **more: Any) -> Any:
        if more.get("claim_end_hook", True):  # else it looks ahead
            with watch.lock:
                watch.seen.add(checkpoint_id)
        return look(self, checkpoint_id, *rest, **more)

    def refused(self: Any, message: str, step_id: str | None = None) -> None:
        with watch.lock:
            watch.refused.append((step_id, message))
        refuse(self, message, step_id)

    with (
        mock.patch.object(state, "create_checkpoint", record),
        mock.patch.object(state, "wrap_user_function", wrapped),
        mock.patch.object(state, "get_checkpoint_result", looked),
        mock.patch.object(errors.NonDeterministicExecutionError, "__init__", refused),
        _silent(),
    ):
        yield


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The SDK tells each end of an invocation to its log; here the verdict does."""
    log = logging.getLogger(_SDK)
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


# -------------------------------------------------------------------------------------------------------------------- judged


def _judged(info: public.ExecutionInfo, watch: _Watch, answer: Mapping[str, Any]) -> Replayed:
    status, error = str(answer.get("Status", "")), answer.get("Error") or {}
    facts: dict[str, Any] = {
        "status": status,
        "moves": tuple(watch.moves.values()),
        "error_type": error.get("ErrorType"),
        "error_message": error.get("ErrorMessage"),
    }
    if watch.refused:
        return Replayed(Verdict.NONDETERMINISTIC, **facts, mismatch=_mismatch(watch))
    if status == "PENDING":
        verdict = Verdict.GOES_ON if watch.moves else _of_waiting(info)
        return Replayed(verdict, **facts)
    facts["result"] = _value(answer.get("Result"))
    left_out = tuple(one for one in watch.known.values() if one.type is not OperationType.EXECUTION and one.id not in watch.seen)
    if left_out:
        return Replayed(Verdict.DIFFERS, **facts, left_out=left_out)
    return Replayed(_of_end(info, facts), **facts)


def _of_waiting(info: public.ExecutionInfo) -> Verdict:
    """It waits for something that the history has: so does the execution, unless it ended by itself."""
    is_by_itself = info.status in {public.ExecutionStatus.SUCCEEDED, public.ExecutionStatus.FAILED}
    return Verdict.DIFFERS if is_by_itself else Verdict.SAME


def _of_end(info: public.ExecutionInfo, facts: Mapping[str, Any]) -> Verdict:
    if info.status is public.ExecutionStatus.SUCCEEDED:
        is_same = facts["status"] == "SUCCEEDED" and facts["result"] == info.result
    elif info.status is public.ExecutionStatus.FAILED and info.error is not None:
        is_same = (facts["error_type"], facts["error_message"]) == (info.error.type, info.error.message)
    else:  # it has not ended by itself, so this is its next move
        return Verdict.GOES_ON
    return Verdict.SAME if is_same else Verdict.DIFFERS


def _value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _mismatch(watch: _Watch) -> Mismatch:
    operation_id, message = watch.refused[0]
    one = watch.known.get(operation_id or "")
    differences = tuple((what, had.strip("'"), has.strip("'")) for what, had, has in _DIFFERENCE.findall(message))
    return Mismatch(operation_id, one.type.value if one else None, one.name if one else None, differences, message)
