"""What people, other executions and operators do to an execution."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.core.errors import (
    CallbackClosed,
    Conflict,
    ExecutionEnded,
    InvalidRequest,
    NotDue,
    NotFound,
    PayloadTooLarge,
)
from perdure.runs.engine import (
    Answer,
    Command,
    CompleteCallback,
    CompleteInvoke,
    Delete,
    Heartbeat,
    Invoke,
    Parent,
    Pause,
    Reason,
    Resume,
    Rules,
    Stop,
    Tick,
    standing,
)
from perdure.runs.protocol import (
    ErrorObject,
    ExecutionStatus,
    InvocationOutput,
    InvocationStatus,
    OperationStatus,
)
from tests.unit.runs.driving import DAY, ERROR, Driver, callback, invoke, reason, the_callback, wait, waiting


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.invoke()
    return driver


# ---------------------------------------------------------------------------------------------------------------------- callbacks


def test_a_heartbeat_moves_only_the_heartbeat(driver: Driver) -> None:
    driver.send(callback("c", timeout_s=100, heartbeat_s=30))
    driver.answer()
    for _ in range(3):
        driver.pass_time(29)
        driver.do(Heartbeat(the_callback(driver)))
    assert standing(driver.state).timer_at == DAY + timedelta(seconds=100)
    driver.pass_time(13)
    driver.do(Tick())
    op = driver.op("c")
    assert op.status is OperationStatus.TIMED_OUT and op.error is not None and op.error.error_type == "Callback.Timeout"


def test_a_missed_heartbeat_times_out(driver: Driver) -> None:
    driver.send(callback("c", timeout_s=100, heartbeat_s=30))
    driver.pass_time(30)
    with pytest.raises(CallbackClosed):
        driver.do(Heartbeat(the_callback(driver)))
    driver.do(Tick())
    op = driver.op("c")
    assert op.error is not None and op.error.error_type == "Callback.Heartbeat"


def test_a_heartbeat_where_none_is_asked_for_means_nothing() -> None:
    driver = waiting()
    assert driver.do(Heartbeat(the_callback(driver))).entries == ()


@pytest.mark.parametrize("callback_id", ["", "bm90aGluZw==", "YjEgZXhlYy0xIGMgZ3Vlc3NlZA=="])
def test_an_unknown_callback_is_told_from_one_that_is_closed(callback_id: str) -> None:
    """(durable: rule 3)"""
    driver = waiting()
    for command in (CompleteCallback(callback_id), CompleteCallback(callback_id, error=ERROR), Heartbeat(callback_id)):
        with pytest.raises(NotFound):
            driver.do(command)
    driver.do(CompleteCallback(the_callback(driver), error=ErrorObject()))
    assert driver.op("c").status is OperationStatus.FAILED
    for command in (CompleteCallback(the_callback(driver)), Heartbeat(the_callback(driver))):
        with pytest.raises(CallbackClosed):
            driver.do(command)


def test_a_callbacks_result_has_a_limit() -> None:
    driver = waiting(rules=Rules(payload_bytes_max=10))
    with pytest.raises(PayloadTooLarge):
        driver.do(CompleteCallback(the_callback(driver), "x" * 11))
    driver.do(CompleteCallback(the_callback(driver), "ok"))


# ---------------------------------------------------------------------------------------------------------------- chained invokes


@pytest.mark.parametrize(
    ("outcome", "status", "error_type"),
    [
        (CompleteInvoke("i", ExecutionStatus.SUCCEEDED, "2"), OperationStatus.SUCCEEDED, None),
        (CompleteInvoke("i", ExecutionStatus.FAILED, error=ERROR), OperationStatus.FAILED, "Broken"),
        (CompleteInvoke("i", ExecutionStatus.STOPPED, error=ERROR), OperationStatus.STOPPED, "Broken"),
        (CompleteInvoke("i", ExecutionStatus.TIMED_OUT, timeout_s=9), OperationStatus.TIMED_OUT, "ChainedInvoke.Timeout"),
    ],
)
def test_a_chained_invoke_ends_as_its_execution_did(
    driver: Driver, outcome: CompleteInvoke, status: OperationStatus, error_type: str | None
) -> None:
    driver.send(invoke("i"))
    driver.answer()
    assert reason(driver) is Reason.WORLD
    driver.do(outcome)
    op = driver.op("i")
    assert (op.status, op.error and op.error.error_type) == (status, error_type)
    assert driver.do(outcome).entries == (), "told twice it is the same"
    assert reason(driver) is Reason.INVOKE


def test_an_execution_that_ends_tells_its_parent() -> None:
    parent = Driver()
    parent.invoke()
    parent.send(invoke("i"))
    parent.answer()
    parent.world.start("other", name="child", parent=Parent(execution_id=parent.id, operation_id="i"))
    parent.world.do("child", Invoke("request"))
    parent.world.do("child", Answer(1, InvocationOutput(status=InvocationStatus.SUCCEEDED, result="7")))
    assert parent.op("i").payload == "7"


@pytest.mark.parametrize("status", [ExecutionStatus.RUNNING, ExecutionStatus.PAUSED])
def test_what_has_not_ended_completes_nothing(driver: Driver, status: ExecutionStatus) -> None:
    driver.send(invoke("i"))
    with pytest.raises(InvalidRequest):
        driver.do(CompleteInvoke("i", status))
    with pytest.raises(NotFound):
        driver.do(CompleteInvoke("nobody", ExecutionStatus.SUCCEEDED))


# ---------------------------------------------------------------------------------------------------------- results and operators


def test_a_result_over_the_limit_fails_it() -> None:
    """(durable: fault 12: a deterministic failure is the end, not another try)"""
    driver = Driver(rules=Rules(payload_bytes_max=10))
    driver.invoke()
    driver.answer(InvocationStatus.SUCCEEDED, result="x" * 11)
    assert driver.state.status is ExecutionStatus.FAILED and driver.state.invocations == 1
    assert driver.state.error is not None and "10 are allowed" in (driver.state.error.error_message or "")


def test_while_paused_timers_and_people_go_on_and_no_invocation_begins(driver: Driver) -> None:
    driver.send(callback("c"), wait("w", 60))
    driver.answer()
    driver.do(Pause("lunch"))
    assert driver.state.status is ExecutionStatus.PAUSED
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    driver.pass_time(60)
    driver.do(Tick())
    assert reason(driver) is Reason.OPERATOR
    with pytest.raises(NotDue):
        driver.do(Invoke("early"))
    assert driver.do(Pause()).entries == (), "twice is once"
    driver.do(Resume())
    assert driver.do(Resume()).entries == ()
    decision = driver.invoke()
    assert decision.reply is not None and set(decision.reply.updated_ids) == {"c", "w"}


@pytest.mark.parametrize(("timeout_paused", "moves"), [(True, 500), (False, 0)])
def test_a_pause_may_let_the_timeout_stand_still(timeout_paused: bool, moves: int) -> None:
    driver = Driver(timeout_s=1000)
    driver.do(Pause(timeout_paused=timeout_paused))
    assert (standing(driver.state).timer_at is None) == timeout_paused
    driver.pass_time(500)
    driver.do(Resume())
    assert standing(driver.state).timer_at == DAY + timedelta(seconds=1000 + moves)


def test_a_result_that_comes_while_it_is_being_paused_counts(driver: Driver) -> None:
    driver.do(Pause())
    driver.answer(InvocationStatus.SUCCEEDED, result="1")
    assert driver.state.status is ExecutionStatus.SUCCEEDED


@pytest.mark.parametrize("pause_first", [False, True])
def test_everything_can_be_stopped(driver: Driver, pause_first: bool) -> None:
    """A stop reads no history (durable: rule 6, fault 15)."""
    driver.send(callback("c"), wait("w"))
    if pause_first:
        driver.do(Pause())
    decision = driver.do(Stop(ERROR))
    assert len(decision.entries) == 1
    assert (driver.state.status, driver.state.error) == (ExecutionStatus.STOPPED, ERROR)
    driver.do(Answer(1, InvocationOutput(status=InvocationStatus.SUCCEEDED, result="too late")))
    assert driver.state.result is None and reason(driver) is Reason.ENDED


AFTER_THE_END: tuple[Command, ...] = (Stop(), Pause(), Resume(), Invoke("late"))


@pytest.mark.parametrize("command", AFTER_THE_END, ids=lambda command: type(command).__name__)
def test_after_the_end_nothing_happens(driver: Driver, command: Command) -> None:
    driver.answer(InvocationStatus.SUCCEEDED, result="1")
    with pytest.raises(ExecutionEnded):
        driver.do(command)
    assert driver.do(Tick()).entries == ()


def test_only_what_has_ended_is_deleted(driver: Driver) -> None:
    with pytest.raises(Conflict):
        driver.do(Delete())
    driver.do(Stop())
    driver.do(Delete())
    assert driver.state.status is ExecutionStatus.DELETING
    assert driver.do(Delete()).entries == ()
