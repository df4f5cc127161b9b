"""What may happen to an operation and to an execution, as tables. Pure.

    STEP            (none) ─START─► STARTED ─RETRY─► PENDING ─timer─► READY ─START─► STARTED …      SUCCEED, FAIL end it
    WAIT            (none) ─START─► STARTED ─timer─► SUCCEEDED                                       CANCEL: CANCELLED
    CALLBACK        (none) ─START─► STARTED ─from outside─► SUCCEEDED, FAILED ─timer─► TIMED_OUT
    CONTEXT         (none) ─START─► STARTED ─SUCCEED, FAIL─► SUCCEEDED, FAILED
    CHAINED_INVOKE  (none) ─START─► STARTED ─its execution ended─► SUCCEEDED, FAILED, TIMED_OUT, STOPPED

A step that has STARTED and was cut off stays STARTED: only its function knows whether it may be run again. There is no START
from there, so an attempt is begun once; one that must not run twice is reported as RETRY or FAIL instead. SDKs may leave the
START of a step or a context out and report its end alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from perdure.runs.protocol import Action, ExecutionStatus, OperationStatus, OperationType


class World(StrEnum):
    """What happens to an operation that its function did not do."""

    TIMER = "timer"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed-out"
    STOPPED = "stopped"


class Turn(StrEnum):
    """What happens to an execution as a whole."""

    PAUSE = "pause"
    SETTLE = "settle"  # the invocation that was in flight when it was paused is over
    RESUME = "resume"
    SUCCEED = "succeed"
    FAIL = "fail"
    TIME_OUT = "time-out"
    STOP = "stop"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why it cannot happen; a sentence's end."""

    reason: str


Cause = Action | World
_S = OperationStatus
_E = ExecutionStatus

#: An operation in one of these never changes again.
CLOSED = frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.TIMED_OUT, _S.STOPPED})
#: An execution in one of these never runs again.
ENDED = frozenset({_E.SUCCEEDED, _E.FAILED, _E.TIMED_OUT, _E.STOPPED, _E.DELETING})
#: In these the world has the next move, not the function.
WAITING = frozenset(
    {
        (OperationType.STEP, _S.PENDING),
        (OperationType.WAIT, _S.STARTED),
        (OperationType.CALLBACK, _S.STARTED),
        (OperationType.CHAINED_INVOKE, _S.STARTED),
    }
)

_ENDS: Mapping[Cause, OperationStatus] = {Action.SUCCEED: _S.SUCCEEDED, Action.FAIL: _S.FAILED}
_TRIES: Mapping[Cause, OperationStatus] = {**_ENDS, Action.RETRY: _S.PENDING}
_BEGINS: Mapping[Cause, OperationStatus] = {Action.START: _S.STARTED}

_OPERATIONS: Mapping[OperationType, Mapping[OperationStatus | None, Mapping[Cause, OperationStatus]]] = {
    OperationType.STEP: {
        None: {**_BEGINS, **_TRIES},
        _S.STARTED: _TRIES,
        _S.PENDING: {World.TIMER: _S.READY},
        _S.READY: {**_BEGINS, **_TRIES},
    },
    OperationType.CONTEXT: {None: {**_BEGINS, **_ENDS}, _S.STARTED: _ENDS},
    OperationType.WAIT: {None: _BEGINS, _S.STARTED: {World.TIMER: _S.SUCCEEDED, Action.CANCEL: _S.CANCELLED}},
    OperationType.CALLBACK: {
        None: _BEGINS,
        _S.STARTED: {World.SUCCEEDED: _S.SUCCEEDED, World.FAILED: _S.FAILED, World.TIMER: _S.TIMED_OUT},
    },
    OperationType.CHAINED_INVOKE: {
        None: _BEGINS,
        _S.STARTED: {
            World.SUCCEEDED: _S.SUCCEEDED,
            World.FAILED: _S.FAILED,
            World.TIMED_OUT: _S.TIMED_OUT,
            World.STOPPED: _S.STOPPED,
        },
    },
    OperationType.EXECUTION: {_S.STARTED: _ENDS},
}

#: What a function may say about an operation of a type at all.
ACTIONS: Mapping[OperationType, frozenset[Action]] = {
    kind: frozenset(cause for row in rows.values() for cause in row if isinstance(cause, Action))
    for kind, rows in _OPERATIONS.items()
}

_OVER: Mapping[Turn, ExecutionStatus] = {
    Turn.SUCCEED: _E.SUCCEEDED,
    Turn.FAIL: _E.FAILED,
    Turn.TIME_OUT: _E.TIMED_OUT,
    Turn.STOP: _E.STOPPED,
}
_EXECUTIONS: Mapping[ExecutionStatus, Mapping[Turn, ExecutionStatus]] = {
    _E.RUNNING: {**_OVER, Turn.PAUSE: _E.PAUSING},
    _E.PAUSING: {**_OVER, Turn.SETTLE: _E.PAUSED, Turn.RESUME: _E.RUNNING},
    # What was in flight when somebody asked for the pause may have finished it.
    _E.PAUSED: {**_OVER, Turn.RESUME: _E.RUNNING},
    _E.SUCCEEDED: {Turn.DELETE: _E.DELETING},
    _E.FAILED: {Turn.DELETE: _E.DELETING},
    _E.TIMED_OUT: {Turn.DELETE: _E.DELETING},
    _E.STOPPED: {Turn.DELETE: _E.DELETING},
    _E.DELETING: {},
}
_WORDS: Mapping[ExecutionStatus, str] = {
    _E.RUNNING: "it is running",
    _E.PAUSING: "it is being paused",
    _E.PAUSED: "it is paused",
    _E.SUCCEEDED: "it has succeeded",
    _E.FAILED: "it has failed",
    _E.TIMED_OUT: "it has timed out",
    _E.STOPPED: "it was stopped",
    _E.DELETING: "it is being deleted",
}


def operation_turn(kind: OperationType, status: OperationStatus | None, cause: Cause) -> OperationStatus | Refusal:
    """What the cause makes of an operation in that status; status None: there is none yet."""
    to = _OPERATIONS[kind].get(status, {}).get(cause)
    if to is not None:
        return to
    if isinstance(cause, Action) and cause not in ACTIONS[kind]:
        return Refusal(f"{cause.value} is not an action of {kind.value}")
    if status is None:
        return Refusal(f"there is no such {kind.value} to {cause.value.lower()}")
    return Refusal(f"a {kind.value} that is {status.value} cannot {cause.value.lower()}")


def execution_turn(status: ExecutionStatus, turn: Turn) -> ExecutionStatus | Refusal:
    """What the turn makes of an execution in that status."""
    return _EXECUTIONS[status].get(turn, Refusal(_WORDS[status]))


def _check_tables() -> None:
    """Invariants of the tables themselves, checked at import."""
    for kind, rows in _OPERATIONS.items():
        assert not CLOSED & rows.keys(), f"a closed {kind} changes"
        for status, row in rows.items():
            by_world = any(isinstance(cause, World) for cause in row)
            assert by_world == ((kind, status) in WAITING), f"{kind} {status}: whose move is it?"
            assert row, f"{kind} {status} has no way out"
            for to in row.values():
                assert to in CLOSED or to in rows, f"{kind} {status} leads to {to}, which has no row"
    for state in ExecutionStatus:
        turns = _EXECUTIONS[state]
        assert (state in ENDED) == (Turn.STOP not in turns), f"an execution that is {state.value} cannot be stopped"
        assert state not in ENDED or set(turns) <= {Turn.DELETE}, f"{state.value} goes on"


_check_tables()
