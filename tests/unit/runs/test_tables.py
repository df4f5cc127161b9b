"""The tables of operations and executions, whole."""

from __future__ import annotations

import pytest

from perdure.runs.engine.tables import (
    ACTIONS,
    CLOSED,
    ENDED,
    WAITING,
    Cause,
    Refusal,
    Turn,
    World,
    execution_turn,
    operation_turn,
)
from perdure.runs.protocol import Action, ExecutionStatus, OperationStatus, OperationType

S, E = OperationStatus, ExecutionStatus
STATUSES: tuple[OperationStatus | None, ...] = (None, *OperationStatus)
CAUSES: tuple[Cause, ...] = (*Action, *World)

#: Everything that may happen to an operation, written out again by hand: the type, its way, its cause.
ALLOWED = """
STEP none START STARTED           STEP none SUCCEED SUCCEEDED        STEP none FAIL FAILED             STEP none RETRY PENDING
STEP STARTED SUCCEED SUCCEEDED    STEP STARTED FAIL FAILED           STEP STARTED RETRY PENDING
STEP PENDING timer READY
STEP READY START STARTED          STEP READY SUCCEED SUCCEEDED       STEP READY FAIL FAILED            STEP READY RETRY PENDING
CONTEXT none START STARTED        CONTEXT none SUCCEED SUCCEEDED     CONTEXT none FAIL FAILED
CONTEXT STARTED SUCCEED SUCCEEDED CONTEXT STARTED FAIL FAILED
WAIT none START STARTED           WAIT STARTED timer SUCCEEDED       WAIT STARTED CANCEL CANCELLED
CALLBACK none START STARTED       CALLBACK STARTED timer TIMED_OUT
CALLBACK STARTED succeeded SUCCEEDED  CALLBACK STARTED failed FAILED
CHAINED_INVOKE none START STARTED CHAINED_INVOKE STARTED succeeded SUCCEEDED  CHAINED_INVOKE STARTED failed FAILED
CHAINED_INVOKE STARTED timed-out TIMED_OUT  CHAINED_INVOKE STARTED stopped STOPPED
EXECUTION STARTED SUCCEED SUCCEEDED EXECUTION STARTED FAIL FAILED
"""


def test_what_may_happen_to_an_operation_is_this_and_nothing_else() -> None:
    words = ALLOWED.split()
    expected = {tuple(words[index : index + 4]) for index in range(0, len(words), 4)}
    found = {
        (kind.value, status.value if status else "none", cause.value, to.value)
        for kind in OperationType
        for status in STATUSES
        for cause in CAUSES
        if not isinstance(to := operation_turn(kind, status, cause), Refusal)
    }
    assert found == expected


@pytest.mark.parametrize("kind", OperationType)
def test_a_refusal_says_why(kind: OperationType) -> None:
    for status in STATUSES:
        for cause in CAUSES:
            to = operation_turn(kind, status, cause)
            assert not isinstance(to, Refusal) or kind.value in to.reason
    assert all(isinstance(operation_turn(kind, status, cause), Refusal) for status in CLOSED for cause in CAUSES)


def test_an_attempt_that_has_begun_cannot_begin() -> None:
    assert isinstance(operation_turn(OperationType.STEP, S.STARTED, Action.START), Refusal)


def test_functions_never_end_what_the_world_ends() -> None:
    for kind in (OperationType.WAIT, OperationType.CALLBACK, OperationType.CHAINED_INVOKE):
        assert not ACTIONS[kind] & {Action.SUCCEED, Action.FAIL, Action.RETRY}
        assert (kind, S.STARTED) in WAITING


def test_an_execution_ends_once() -> None:
    for status in ENDED:
        for turn in Turn:
            to = execution_turn(status, turn)
            assert isinstance(to, Refusal) == (turn is not Turn.DELETE or status is E.DELETING)


@pytest.mark.parametrize("status", [E.RUNNING, E.PAUSING, E.PAUSED])
@pytest.mark.parametrize("turn", [Turn.STOP, Turn.TIME_OUT, Turn.SUCCEED, Turn.FAIL])
def test_whatever_runs_can_end(status: ExecutionStatus, turn: Turn) -> None:
    assert execution_turn(status, turn) in ENDED
