"""Durable executions as public models, and JSON values as the texts that their protocol carries. Pure."""

from __future__ import annotations

import json
from typing import Any

from perdure.core.errors import InvalidRequest
from perdure.runs.protocol import (
    ErrorObject,
    Event,
    ExecutionInfo,
    ExecutionSummary,
    Operation,
    OperationType,
    parse_arn,
    size_bytes,
)
from perdure.runs.service import model
from perdure.wire import public


def payload(value: Any) -> str:
    """A JSON value as text. Raises InvalidRequest for what JSON has no word for."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        raise InvalidRequest(
            "This value cannot be written as JSON: it has NaN or an infinite number, or is nested too deeply.",
            hint="Send plain JSON; nothing was recorded.",
        ) from None
    # A lone surrogate is JSON, but no UTF-8.
    return text if _is_unicode(text) else json.dumps(value, separators=(",", ":"))


def value(text: str | None) -> tuple[Any, bool]:
    """The value that a text of the protocol stands for, and whether it is no JSON and therefore shown as it is."""
    if text is None:
        return None, False
    try:
        found = json.loads(text, parse_constant=_no_json)
        if _is_unicode(json.dumps(found, ensure_ascii=False, allow_nan=False)):  # else no answer could carry it
            return found, False
    except (ValueError, RecursionError):
        pass
    return plain(text), True


def plain(text: str) -> str:
    """Without lone surrogates, which no answer can carry."""
    return text.encode("utf-8", "replace").decode()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_json(word: str) -> Any:
    raise ValueError(word)


def failure(error: ErrorObject | None) -> public.FunctionFailure | None:
    if error is None:
        return None
    trace = None if error.stack_trace is None else [plain(line) for line in error.stack_trace]
    return public.FunctionFailure(
        type=_plain(error.error_type), message=_plain(error.error_message), data=_plain(error.error_data), stack_trace=trace
    )


def _plain(text: str | None) -> str | None:
    return None if text is None else plain(text)


def item(found: ExecutionSummary) -> public.ExecutionItem:
    arn = parse_arn(found.durable_execution_arn)
    return public.ExecutionItem(
        execution_id=arn.id,
        arn=found.durable_execution_arn,
        name=found.durable_execution_name,
        function=arn.function,
        status=public.ExecutionStatus(found.status.value),
        started_at=found.start_timestamp,
        ended_at=found.end_timestamp,
    )


def execution(info: ExecutionInfo, told: model.Insight) -> public.ExecutionInfo:
    arn = parse_arn(info.durable_execution_arn)
    given, given_is_text = value(info.input_payload)
    result, result_is_text = value(info.result)
    return public.ExecutionInfo(
        execution_id=arn.id,
        arn=info.durable_execution_arn,
        name=info.durable_execution_name,
        function=arn.function,
        status=public.ExecutionStatus(info.status.value),
        started_at=info.start_timestamp,
        ended_at=info.end_timestamp,
        input=given,
        input_bytes=_size(info.input_payload),
        input_is_text=given_is_text,
        result=result,
        result_bytes=_size(info.result),
        result_is_text=result_is_text,
        error=failure(info.error),
        timeout_s=info.durable_config.execution_timeout if info.durable_config else None,
        times_out_at=None if info.end_timestamp else info.expected_execution_timeout_timestamp,
        pause=_pause(info, told),
        standing=public.ExecutionStanding(
            reason=public.StandingReason(told.standing.reason.value),
            invoke_at=told.standing.invoke_at,
            timer_at=told.standing.timer_at,
        ),
        code=public.CodeRule(told.code.value),
        priority=told.priority,
        key=told.key,
        invocations=told.invocations,
        last_error=failure(told.last_error),
        code_began=told.born,
        code_last=told.digest,
        operations=told.operations,
        history_bytes=told.history_bytes,
    )


def _pause(info: ExecutionInfo, told: model.Insight) -> public.ExecutionPause | None:
    pause = info.pause_details
    if pause is None:
        return None
    return public.ExecutionPause(
        at=pause.pause_request_timestamp,
        by=None if told.pause is None else public.PauseReason(told.pause.value),
        reason=_plain(pause.reason),
        timeout_paused=pause.execution_timeout_paused,
    )


def _size(text: str | None) -> int | None:
    return None if text is None else size_bytes(text)


def outcome(info: ExecutionInfo, *, has_ended: bool) -> public.ExecutionOutcome:
    result, is_text = value(info.result)
    return public.ExecutionOutcome(
        execution_id=parse_arn(info.durable_execution_arn).id,
        arn=info.durable_execution_arn,
        status=public.ExecutionStatus(info.status.value),
        ended=has_ended,
        ended_at=info.end_timestamp,
        result=result,
        result_bytes=_size(info.result),
        result_is_text=is_text,
        error=failure(info.error),
    )


def event(found: Event) -> dict[str, Any]:
    """With AWS's names, and times that people can read."""
    told = found.model_dump(mode="json", by_alias=True, exclude_none=True)
    told[f"{found.event_type}Details"] = told.pop("Details")
    cleaned: dict[str, Any] = _clean(told)
    return cleaned


def _clean(told: Any) -> Any:
    if isinstance(told, str):
        return plain(told)
    if isinstance(told, dict):
        return {name: _clean(part) for name, part in told.items()}
    return [_clean(part) for part in told] if isinstance(told, list) else told


def operation(found: Operation) -> public.OperationInfo:
    made = public.OperationInfo(
        id=found.id,
        type=public.OperationType(found.type.value),
        status=public.OperationStatus(found.status.value),
        parent_id=found.parent_id,
        name=_plain(found.name),
        sub_type=found.sub_type,
        started_at=found.start_timestamp,
        ended_at=found.end_timestamp,
    )
    return made.model_copy(update=_details(found))


def _details(found: Operation) -> dict[str, Any]:
    match found.type:
        case OperationType.EXECUTION if found.execution_details:
            return {"payload": _plain(found.execution_details.input_payload)}
        case OperationType.STEP if step := found.step_details:
            return {**_outcome(step), "attempts": step.attempt, "due_at": step.next_attempt_timestamp}
        case OperationType.WAIT if found.wait_details:
            return {"due_at": found.wait_details.scheduled_end_timestamp}
        case OperationType.CALLBACK if callback := found.callback_details:
            return {**_outcome(callback), "callback_id": callback.callback_id}
        case OperationType.CONTEXT if context := found.context_details:
            return {**_outcome(context), "replay_children": bool(context.replay_children)}
        case OperationType.CHAINED_INVOKE if invoke := found.chained_invoke_details:
            return _outcome(invoke)
        case _:
            return {}


def _outcome(details: Any) -> dict[str, Any]:
    return {"payload": _plain(details.result), "error": failure(details.error)}


def callback(found: model.OpenCallback) -> public.CallbackInfo:
    return public.CallbackInfo(
        callback_id=found.callback_id,
        execution_id=found.execution_id,
        arn=found.arn,
        function=found.function,
        operation_id=found.operation_id,
        name=_plain(found.name),
        started_at=found.started_at,
        due_at=found.due,
        heartbeat_due_at=found.heartbeat_due,
    )
