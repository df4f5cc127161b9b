"""Executions in words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.cli import timeline
from perdure.wire import public
from perdure.wire.public import ExecutionStatus, OperationStatus, OperationType, PauseReason, StandingReason

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
STARTED = NOW - timedelta(hours=3)


def op(op_id: str, kind: OperationType = OperationType.STEP, **parts: Any) -> public.OperationInfo:
    given = {"status": OperationStatus.STARTED, "started_at": STARTED, **parts}
    return public.OperationInfo(id=op_id, type=kind, **given)


def execution(reason: StandingReason, **parts: Any) -> public.ExecutionInfo:
    times = {name: parts.pop(name) for name in ("invoke_at", "timer_at") if name in parts}
    told: dict[str, Any] = {
        **{"execution_id": "exn_1", "arn": "arn", "name": "order-1", "function": "greet", "started_at": STARTED},
        **{"status": ExecutionStatus.RUNNING, "code": public.CodeRule.ANY, "priority": 0, "invocations": 3},
        **{"operations": 1, "history_bytes": 1, "standing": public.ExecutionStanding(reason=reason, **times), **parts},
    }
    return public.ExecutionInfo(**told)


APPROVAL = op("c", OperationType.CALLBACK, name="approval", callback_id="Y2I=")
DAY = op("w", OperationType.WAIT, due_at=NOW + timedelta(days=3), started_at=NOW - timedelta(minutes=5))
PAUSE = {"at": NOW - timedelta(minutes=10), "timeout_paused": True}
FAILED = public.FunctionFailure(type="ValueError", message="no")


@pytest.mark.parametrize(
    ("info", "operations", "words"),
    [
        (execution(StandingReason.ENDED, ended_at=NOW), [], "ended after 3 h"),
        (execution(StandingReason.ANSWER), [], "its invocation 3 is running"),
        (execution(StandingReason.INVOKE), [], "waits for a worker since 3 h"),
        (execution(StandingReason.INVOKE), [op("s", ended_at=NOW - timedelta(minutes=9))], "waits for a worker since 9 min"),
        (execution(StandingReason.INVOKE, last_error=FAILED), [], "waits for a worker since 3 h after ValueError: no"),
        (
            execution(StandingReason.INVOKE, invoke_at=NOW + timedelta(seconds=30)),
            [],
            "its next invocation begins 2026-03-01 12:00:30 UTC, in 30 s",
        ),
        (execution(StandingReason.WORLD), [APPROVAL], "waits for callback approval since 3 h"),
        (
            execution(StandingReason.TIMER),
            [op("d", status=OperationStatus.SUCCEEDED, ended_at=NOW), DAY],
            "waits for wait since 5 min, until 2026-03-04 12:00:00 UTC, in 3 d",
        ),
        (execution(StandingReason.TIMER), [DAY, APPROVAL], "waits for callback approval since 3 h, and 1 more"),
        (execution(StandingReason.TIMER), [], "waits for a timer"),
        (
            execution(StandingReason.OPERATOR, pause=public.ExecutionPause(**PAUSE, by=PauseReason.OPERATOR, reason="no paper")),
            [],
            "paused by an operator since 10 min: no paper (its timeout stands still)",
        ),
        (
            execution(StandingReason.OPERATOR, pause=public.ExecutionPause(**PAUSE, by=PauseReason.LIMIT)),
            [],
            "paused by a limit since 10 min (its timeout stands still)",
        ),
        (
            execution(StandingReason.OPERATOR, pause=public.ExecutionPause(at=NOW, timeout_paused=False, by=PauseReason.CODE)),
            [],
            "paused because its code has changed since 0 ms (its timeout goes on)",
        ),
        (execution(StandingReason.STUCK), [], "nothing will move it: this is a defect in Perdure; stop it, and tell us"),
    ],
)
def test_which_reason_to_move_holds(info: public.ExecutionInfo, operations: list[public.OperationInfo], words: str) -> None:
    assert timeline.standing(info, operations, NOW) == words


def test_every_reason_has_words() -> None:
    for reason in StandingReason:
        told = timeline.standing(execution(reason), [], NOW)
        assert told
        assert ("a defect" in told) is (reason is StandingReason.STUCK)


def test_the_tree_is_in_order_of_creation_and_deep() -> None:
    deep = [op(f"c{at}", OperationType.CONTEXT, parent_id=f"c{at - 1}" if at else None) for at in range(3000)]
    operations = [
        op("exn", OperationType.EXECUTION),
        op("m", OperationType.CONTEXT, sub_type="Map", name="all"),
        op("w", OperationType.WAIT),
        op("i1", OperationType.CONTEXT, sub_type="MapIteration", parent_id="m"),
        op("i2", OperationType.CONTEXT, sub_type="MapIteration", parent_id="m"),
        op("s", parent_id="i1", name="look"),
        op("x", parent_id="exn", name="of the execution"),
        op("y", parent_id="nobody", name="of nobody"),
    ]
    labels = [row.label for row in timeline.tree(operations, NOW)]
    assert labels == ["map all", "  item", "    step look", "  item", "wait", "step of the execution", "step of nobody"]
    assert len(timeline.tree(deep, NOW)) == 3000


@pytest.mark.parametrize(
    ("one", "attempts", "took", "detail"),
    [
        (op("s", status=OperationStatus.SUCCEEDED, ended_at=STARTED + timedelta(seconds=5), payload="[1]"), "", "5 s", "[1]"),
        (op("s", status=OperationStatus.SUCCEEDED, ended_at=STARTED, payload="x" * 100), "", "0 ms", "x" * 59 + "…"),
        (op("s", status=OperationStatus.FAILED, ended_at=NOW, attempts=3, error=FAILED), "3", "3 h", "ValueError: no"),
        (op("s", status=OperationStatus.FAILED, error=public.FunctionFailure()), "", "3 h", "an error without a word"),
        (
            op("s", status=OperationStatus.PENDING, attempts=1, due_at=NOW + timedelta(seconds=30), error=FAILED),
            "1",
            "3 h",
            "next attempt 2026-03-01 12:00:30 UTC, in 30 s; after ValueError: no",
        ),
        (op("w", OperationType.WAIT, due_at=NOW), "", "3 h", "until 2026-03-01 12:00:00 UTC, which is due"),
        (APPROVAL, "", "3 h", ""),
    ],
)
def test_what_a_row_says(one: public.OperationInfo, attempts: str, took: str, detail: str) -> None:
    (row,) = timeline.tree([one], NOW)
    assert (row.attempts, row.took, row.detail) == (attempts, took, detail)


def test_the_command_that_completes_a_callback_is_quoted_for_a_shell() -> None:
    odd = op("c", OperationType.CALLBACK, callback_id="a'b; rm -rf /")
    closed = op("d", OperationType.CALLBACK, callback_id="closed", status=OperationStatus.SUCCEEDED)
    assert timeline.completions([APPROVAL, odd, closed]) == [
        ("callback approval", "perdure callback succeed Y2I= '{}'"),
        ("callback", "perdure callback succeed 'a'\"'\"'b; rm -rf /' '{}'"),
    ]


def test_events_of_which_nothing_is_known_are_shown_too() -> None:
    assert timeline.event({}) == ("", "", "")
    told = {"EventType": "ChainedInvokeStarted", "Name": "ask", "ChainedInvokeStartedDetails": {"FunctionName": "other"}}
    assert timeline.event(told) == ("", "ChainedInvokeStarted ask", "calls other")
