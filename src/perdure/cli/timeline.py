"""A durable execution in words: its operations as a tree, what it waits for, and its events. Plain text, and nothing is asked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from perdure.cli.output import duration
from perdure.wire import public
from perdure.wire.public import OperationStatus, OperationType, StandingReason

Operations = Sequence[public.OperationInfo]
#: How an operation is called, by the subtype that the SDKs write, or else by its type.
_SUB_TYPES = {
    "Map": "map",
    "MapIteration": "item",
    "Parallel": "parallel",
    "ParallelBranch": "branch",
    "WaitForCallback": "wait for callback",
    "WaitForCondition": "condition",
}
_TYPES = {OperationType.CHAINED_INVOKE: "invoke", OperationType.EXECUTION: "execution"}
_OPEN = frozenset({OperationStatus.STARTED, OperationStatus.PENDING, OperationStatus.READY})
_LONGEST = 60  # characters of a value


class Row(NamedTuple):
    """``took`` of one that is open is how long it has been."""

    label: str
    status: OperationStatus
    attempts: str
    took: str
    detail: str


def value(given: Any, *, is_text: bool = False, longest: int = _LONGEST) -> str:
    """A JSON value on one line, or a text that is none."""
    text = given if is_text and isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def until(at: datetime, now: datetime) -> str:
    left_s = (at - now).total_seconds()
    return f"{moment(at)} UTC, {'in ' + duration(left_s) if left_s > 0 else 'which is due'}"


def error(told: public.FunctionFailure | None) -> str:
    if told is None:
        return ""
    return ": ".join(part for part in (told.type, told.message) if part) or "an error without a word"


def name_of(one: public.OperationInfo) -> str:
    kind = _SUB_TYPES.get(one.sub_type or "") or _TYPES.get(one.type) or one.type.value.lower()
    return f"{kind} {one.name}" if one.name else kind


# ---------------------------------------------------------------------------------------------------------------------- tree


def tree(operations: Operations, now: datetime) -> list[Row]:
    """Each operation below its context, in order of their creation; the execution itself is left out."""
    below: dict[str | None, list[public.OperationInfo]] = {}
    known = {one.id for one in operations if one.type is not OperationType.EXECUTION}
    for one in operations:
        if one.id in known:
            below.setdefault(one.parent_id if one.parent_id in known else None, []).append(one)
    rows: list[Row] = []
    waiting = [(one, 0) for one in reversed(below.get(None, []))]
    while waiting:
        one, depth = waiting.pop()
        rows.append(_row(one, depth, now))
        waiting += [(child, depth + 1) for child in reversed(below.get(one.id, []))]
    return rows


def _row(one: public.OperationInfo, depth: int, now: datetime) -> Row:
    took = ((one.ended_at or now) - one.started_at).total_seconds()
    attempts = str(one.attempts) if one.attempts else ""
    return Row("  " * depth + name_of(one), one.status, attempts, duration(max(0.0, took)), _detail(one, now))


def _detail(one: public.OperationInfo, now: datetime) -> str:
    if one.status in _OPEN:
        return "; ".join(_open_details(one, now))
    if one.error is not None:
        return error(one.error)
    return "" if one.payload is None else _short(one.payload)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _open_details(one: public.OperationInfo, now: datetime) -> Iterator[str]:
    if one.type is OperationType.STEP and one.due_at is not None:
        yield f"next attempt {until(one.due_at, now)}"
    elif one.due_at is not None:
        yield f"until {until(one.due_at, now)}"
    if one.error is not None:
        yield f"after {error(one.error)}"


# ------------------------------------------------------------------------------------------------------------------- standing


def standing(info: public.ExecutionInfo, operations: Operations, now: datetime) -> str:
    """Which of its reasons to move holds, and since when: one sentence."""
    match info.standing.reason:
        case StandingReason.ENDED:
            took = (info.ended_at - info.started_at).total_seconds() if info.ended_at else 0.0
            return f"ended after {duration(took)}"
        case StandingReason.ANSWER:
            return f"its invocation {info.invocations} is running"
        case StandingReason.OPERATOR:
            return _paused(info, now)
        case StandingReason.INVOKE:
            return _invoked(info, operations, now)
        case StandingReason.TIMER | StandingReason.WORLD:
            return f"waits for {_awaited(operations, now) or 'a timer'}"
        case _:
            return "nothing will move it: this is a defect in Perdure; stop it, and tell us"


def _paused(info: public.ExecutionInfo, now: datetime) -> str:
    pause = info.pause
    if pause is None:
        return "paused"
    by = {public.PauseReason.LIMIT: " by a limit", public.PauseReason.CODE: " because its code has changed"}
    why = f": {pause.reason}" if pause.reason else ""
    rule = "its timeout stands still" if pause.timeout_paused else "its timeout goes on"
    whose = by.get(pause.by, " by an operator") if pause.by else ""
    return f"paused{whose} since {_ago(pause.at, now)}{why} ({rule})"


def _invoked(info: public.ExecutionInfo, operations: Operations, now: datetime) -> str:
    at = info.standing.invoke_at
    failed = f" after {error(info.last_error)}" if info.last_error else ""
    if at is not None and at > now:
        return f"its next invocation begins {until(at, now)}{failed}"
    moved = max([info.started_at, *(one.ended_at or one.started_at for one in operations), *([at] if at else [])])
    return f"waits for a worker since {_ago(moved, now)}{failed}"


def _awaited(operations: Operations, now: datetime) -> str:
    """The open operations that the world has to move, the earliest first."""
    kinds = {OperationType.WAIT, OperationType.CALLBACK, OperationType.CHAINED_INVOKE, OperationType.STEP}
    open_ = sorted((one for one in operations if one.status in _OPEN and one.type in kinds), key=lambda one: one.started_at)
    if not open_:
        return ""
    first = open_[0]
    due = f", until {until(first.due_at, now)}" if first.due_at else ""
    more = f", and {len(open_) - 1} more" if len(open_) > 1 else ""
    return f"{name_of(first)} since {_ago(first.started_at, now)}{due}{more}"


def _ago(at: datetime, now: datetime) -> str:
    return duration(max(0.0, (now - at).total_seconds()))


def completions(operations: Operations) -> list[tuple[str, str]]:
    """Each open callback, and the command that completes it."""
    return [
        (name_of(one), f"perdure callback succeed {shlex.quote(one.callback_id)} '{{}}'")
        for one in operations
        if one.type is OperationType.CALLBACK and one.status in _OPEN and one.callback_id
    ]


# --------------------------------------------------------------------------------------------------------------------- events


def event(told: Mapping[str, Any]) -> tuple[str, str, str]:
    """Time, type with name, and what matters of the details of an event as AWS has it."""
    kind = str(told.get("EventType", ""))
    details = told.get(f"{kind}Details") or {}
    at = str(told.get("EventTimestamp", ""))
    name = told.get("Name")
    return at[:19].replace("T", " "), f"{kind} {name}" if name else kind, "; ".join(_told(details))


def _told(details: Mapping[str, Any]) -> Iterator[str]:
    for what in ("Input", "Result", "Reason"):
        if payload := (details.get(what) or {}).get("Payload"):
            yield _short(str(payload))
    if found := (details.get("Error") or {}).get("Payload"):
        yield ": ".join(str(found[part]) for part in ("ErrorType", "ErrorMessage") if found.get(part))
    retry = details.get("RetryDetails") or {}
    if retry.get("NextAttemptDelaySeconds"):
        yield f"attempt {retry.get('CurrentAttempt')}, next in {retry['NextAttemptDelaySeconds']} s"
    if details.get("ScheduledEndTimestamp"):
        yield f"until {str(details['ScheduledEndTimestamp'])[:19].replace('T', ' ')}"
    if details.get("FunctionName"):
        yield f"calls {details['FunctionName']}"
