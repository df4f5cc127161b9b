"""One invocation in flight, what becomes of lost ones, timers, changed code, and the one reason why an execution moves."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.core.errors import (
    CallbackClosed,
    CodeChanged,
    NotDue,
    PerdureError,
    StaleInvocation,
)
from perdure.runs.engine import (
    Answer,
    CodeRule,
    CompleteCallback,
    Fail,
    Failure,
    Finish,
    Invoke,
    Notice,
    Pause,
    PauseCause,
    Reason,
    Resume,
    Rules,
    Standing,
    Stop,
    Tick,
    Warn,
    backoff,
    standing,
)
from perdure.runs.protocol import (
    Action,
    ErrorObject,
    ExecutionStatus,
    InvocationOutput,
    InvocationStatus,
    OperationStatus,
    size_bytes,
)
from tests.unit.runs.driving import DAY, ERROR, Driver, callback, execution, invoke, reason, step, the_callback, wait, waiting


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.invoke()
    return driver


# ------------------------------------------------------------------------------------------------------------------ one in flight


def test_one_invocation_is_in_flight(driver: Driver) -> None:
    """(durable: rule 1, fault 4)"""
    with pytest.raises(NotDue):
        driver.do(Invoke("another"))
    driver.send(callback("c"))
    driver.answer()
    with pytest.raises(NotDue):
        driver.do(Invoke("another"))
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    driver.invoke()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_only_what_is_in_flight_answers(driver: Driver, number: int) -> None:
    """(durable: fault 18: act only on what still stands)"""
    driver.do(Fail(1, Failure.RETURNED))
    driver.invoke()
    for command in (Answer(number, InvocationOutput(status=InvocationStatus.SUCCEEDED)), Fail(number, Failure.RAISED)):
        with pytest.raises(StaleInvocation):
            driver.do(command)


def test_an_invocation_is_told_what_changed_since_the_last_one(driver: Driver) -> None:
    driver.send(callback("c"), wait("w", 60), step("a"), step("a", Action.SUCCEED))
    driver.answer()
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    decision = driver.invoke()
    assert decision.reply is not None and decision.reply.updated_ids == ("c",)
    assert driver.ids(decision) == ["exec-1", "c", "w", "a"]


# -------------------------------------------------------------------------------------------------------------- nothing gets lost


def test_what_lands_while_an_invocation_runs_is_told_by_its_next_checkpoint(driver: Driver) -> None:
    driver.send(callback("c"))
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    assert driver.ids(driver.send(step("a"))) == ["c", "a"]


def test_what_lands_while_it_answers_pending_invokes_it_again(driver: Driver) -> None:
    driver.send(callback("c"))
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    driver.answer()
    assert standing(driver.state) == Standing(Reason.INVOKE)


def test_what_only_the_last_answer_carried_invokes_it_again(driver: Driver) -> None:
    """Nothing shows that the function read that answer before it decided to wait."""
    driver.send(callback("c"), callback("d"))
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    assert "c" in driver.ids(driver.send(step("a")))
    driver.answer()
    assert standing(driver.state) == Standing(Reason.INVOKE)


def test_what_it_was_told_and_may_have_overlooked_is_offered_again_in_a_while(driver: Driver) -> None:
    driver.send(callback("c"), callback("d"))
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    driver.send(step("a"))
    driver.send(step("a", Action.SUCCEED))
    driver.answer()
    assert standing(driver.state) == Standing(Reason.INVOKE, DAY + timedelta(seconds=60))
    with pytest.raises(NotDue):
        driver.do(Invoke("early"))
    driver.pass_time(60)
    driver.invoke()
    driver.answer()
    assert reason(driver) is Reason.WORLD, "once is enough"


def test_something_new_does_not_wait_for_that_while(driver: Driver) -> None:
    driver.send(callback("c"), callback("d"))
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    driver.send(step("a"))
    driver.send(step("a", Action.SUCCEED))
    driver.answer()
    driver.do(CompleteCallback(the_callback(driver, "d"), "yes"))
    assert standing(driver.state) == Standing(Reason.INVOKE)


def test_what_lands_while_an_invocation_is_being_built_is_in_it(driver: Driver) -> None:
    driver.send(wait("w", 60), callback("c"))
    driver.answer()
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    driver.pass_time(60)  # and nobody has ticked
    decision = driver.invoke()
    assert decision.reply is not None and set(decision.reply.updated_ids) == {"c", "w"}
    assert driver.op("w").status is OperationStatus.SUCCEEDED


# ------------------------------------------------------------------------------------------------------------- failed invocations


@pytest.mark.parametrize(
    ("failure", "most"),
    [(Failure.RAISED, 5), (Failure.TIMED_OUT, 5), (Failure.LOST, 20), (Failure.NOT_FOUND, 1), (Failure.INVALID, 1)],
)
def test_a_poison_execution_stops_with_a_reason(failure: Failure, most: int) -> None:
    driver = Driver()
    for count in range(1, most + 1):
        driver.world.now = standing(driver.state).invoke_at or driver.world.now
        driver.invoke()
        decision = driver.do(Fail(count, failure, ERROR))
        assert driver.state.has_ended == (count == most)
    assert (driver.state.status, driver.state.error) == (ExecutionStatus.FAILED, ERROR)
    assert [todo.notice for todo in decision.todo if isinstance(todo, Warn)] == [Notice.GIVEN_UP]


def test_pending_with_nothing_pending_is_tried_three_times() -> None:
    """An execution that waits for nothing would wait for ever (durable: rule 4, fault 17)."""
    driver = Driver()
    for _ in range(3):
        driver.world.now = standing(driver.state).invoke_at or driver.world.now
        driver.invoke()
        driver.answer()
    assert driver.state.status is ExecutionStatus.FAILED
    assert driver.state.error is not None and "no pending operations" in (driver.state.error.error_message or "")


def test_a_worker_that_gives_it_back_costs_no_attempt() -> None:
    """Restarts are not attempts (durable: rule 9)."""
    driver = Driver()
    for count in range(1, 101):
        driver.invoke()
        driver.do(Fail(count, Failure.RETURNED))
        assert standing(driver.state) == Standing(Reason.INVOKE)
    assert driver.state.status is ExecutionStatus.RUNNING


def test_progress_makes_up_for_failures() -> None:
    """(durable: rule 9)"""
    driver = Driver()
    for count in range(1, 21):
        driver.world.now = standing(driver.state).invoke_at or driver.world.now
        driver.invoke()
        driver.send(step(f"s{count}", Action.SUCCEED))
        driver.do(Fail(count, Failure.RAISED))
    assert driver.state.status is ExecutionStatus.RUNNING


def test_waiting_makes_up_for_failures_too() -> None:
    driver = waiting()
    for count in range(2, 6):
        if count == 2:
            driver.do(CompleteCallback(the_callback(driver), "yes"))
        driver.world.now = standing(driver.state).invoke_at or driver.world.now
        driver.invoke()
        driver.do(Fail(count, Failure.RAISED))
    driver.world.now = standing(driver.state).invoke_at or driver.world.now
    driver.invoke()
    driver.send(callback("d"))
    driver.answer()
    assert driver.state.failures == {}


def test_backoff_doubles_up_to_its_most_and_differs_between_executions() -> None:
    rules = Rules(backoff_s=2, backoff_max_s=100)
    for failures in range(1, 200):
        most = min(100.0, 2.0 * 2 ** min(failures - 1, 40))
        assert most / 2 <= backoff("exec-1", failures, rules).total_seconds() <= most
    assert backoff("exec-1", 3, rules) == backoff("exec-1", 3, rules)
    assert len({backoff(f"exec-{n}", 3, rules) for n in range(100)}) == 100


def test_a_failed_invocation_is_not_tried_before_its_pause(driver: Driver) -> None:
    driver.send(callback("c"))
    driver.do(Fail(1, Failure.RAISED, ERROR))
    invoke_at = standing(driver.state).invoke_at
    assert invoke_at is not None and invoke_at > DAY
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    assert standing(driver.state).invoke_at == invoke_at, "who has failed is not asked sooner for this"
    with pytest.raises(NotDue):
        driver.do(Invoke("early"))


# ------------------------------------------------------------------------------------------------------------------------- timers


def test_a_timer_fires_once_and_never_early(driver: Driver) -> None:
    """(durable: rule 10, fault 20)"""
    driver.send(wait("w", 60))
    driver.answer()
    assert standing(driver.state) == Standing(Reason.TIMER, timer_at=DAY + timedelta(seconds=60))
    driver.pass_time(59.999)
    assert driver.do(Tick()).entries == ()
    driver.pass_time(0.001)
    assert len(driver.do(Tick()).entries) == 1
    assert driver.do(Tick()).entries == ()
    assert standing(driver.state) == Standing(Reason.INVOKE)


def test_timers_follow_the_servers_clock_however_it_is_set(driver: Driver) -> None:
    """Set back an hour, a new wait of a minute still takes a minute, entries are still in order, and what has fired stays fired
    (durable: rule 10, fault 20)."""
    driver.send(wait("first", 60))
    driver.pass_time(3600)
    driver.send()
    driver.pass_time(-3600)
    driver.send(wait("second", 60))
    driver.answer()
    assert driver.op("first").status is OperationStatus.SUCCEEDED
    assert driver.op("second").due == DAY + timedelta(seconds=60)
    assert driver.op("second").started_at == DAY + timedelta(seconds=3600), "it stands after what was written before it"
    driver.pass_time(60)
    driver.do(Tick())
    driver.invoke()
    assert driver.op("second").status is OperationStatus.SUCCEEDED


def test_timers_due_together_fire_together_in_their_order(driver: Driver) -> None:
    driver.send(wait("late", 60), wait("soon", 10), callback("c", timeout_s=30), step("a", Action.RETRY, error=ERROR))
    driver.answer()
    driver.pass_time(60)
    decision = driver.do(Tick())
    (entry,) = decision.entries
    assert entry.fact.kind == "fired"
    assert [firing.operation_id for firing in entry.fact.firings] == ["soon", "a", "c", "late"]
    assert driver.op("a").status is OperationStatus.READY


def test_a_wait_may_be_366_days_and_cancelled(driver: Driver) -> None:
    driver.send(wait("w", 31_622_400), wait("x", 60))
    driver.send(wait("x", action=Action.CANCEL))
    driver.answer()
    assert driver.op("x").status is OperationStatus.CANCELLED
    assert standing(driver.state).timer_at == DAY + timedelta(days=366)


def test_an_execution_times_out() -> None:
    driver = Driver(timeout_s=100)
    driver.invoke()
    driver.send(callback("c"))
    driver.answer()
    assert standing(driver.state).timer_at == DAY + timedelta(seconds=100)
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    driver.pass_time(100)
    with pytest.raises(NotDue):
        driver.do(Invoke("late"))
    decision = driver.do(Tick())
    assert (driver.state.status, reason(driver)) == (ExecutionStatus.TIMED_OUT, Reason.ENDED)
    assert any(isinstance(todo, Finish) for todo in decision.todo)
    with pytest.raises(CallbackClosed):
        driver.do(CompleteCallback(the_callback(driver), "late"))


# --------------------------------------------------------------------------------------------------------------------------- code


def test_other_code_is_told(driver: Driver) -> None:
    driver.do(Fail(1, Failure.RETURNED))
    decision = driver.invoke("v2")
    assert [todo.notice for todo in decision.todo if isinstance(todo, Warn)] == [Notice.CODE_CHANGED]
    assert (driver.state.born, driver.state.digest) == ("v1", "v2")


def test_an_execution_may_be_bound_to_the_code_it_began_with() -> None:
    """It waits, and stays where it was, until such a worker comes or somebody lets it go (durable: rule 11, faults 8 and 9)."""
    driver = Driver(code=CodeRule.EXACT)
    driver.invoke("v1")
    driver.do(Fail(1, Failure.RETURNED))
    with pytest.raises(CodeChanged) as caught:
        driver.invoke("v2")
    assert caught.value.details == {"expected": "v1", "found": "v2"}
    with pytest.raises(CodeChanged):
        driver.invoke(None)
    assert reason(driver) is Reason.INVOKE
    driver.invoke("v1")
    driver.do(Pause())
    driver.do(Fail(2, Failure.RETURNED))
    driver.do(Resume(code=CodeRule.ANY))
    driver.invoke("v2")


def test_a_replay_that_does_not_fit_changed_code_waits_for_somebody(driver: Driver) -> None:
    """(durable: rule 5)"""
    said = ErrorObject(error_type="some.sdk.NonDeterministicExecutionError", error_message="a step where a wait was")
    driver.do(Fail(1, Failure.RETURNED))
    driver.invoke("v2")
    driver.answer(InvocationStatus.FAILED, error=said)
    state = driver.state
    assert state.status is ExecutionStatus.PAUSED and state.pause is not None and state.pause.cause is PauseCause.CODE
    driver.do(Resume())
    driver.invoke("v1")
    driver.answer(InvocationStatus.FAILED, error=said)
    assert driver.state.status is ExecutionStatus.FAILED, "with the code it began with it is a defect"


def test_a_replay_that_does_not_fit_while_it_is_being_paused_is_asked_for_again(driver: Driver) -> None:
    said = ErrorObject(error_type="NonDeterministicExecutionError")
    driver.do(Fail(1, Failure.RETURNED))
    driver.invoke("v2")
    driver.do(Pause())
    driver.answer(InvocationStatus.FAILED, error=said)
    assert driver.state.status is ExecutionStatus.PAUSED
    driver.do(Resume())
    assert reason(driver) is Reason.INVOKE


# --------------------------------------------------------------------------------------------------------------------- one reason


def test_each_state_has_exactly_one_reason_to_move() -> None:
    """(durable: rule 4)"""
    driver = Driver()
    assert reason(driver) is Reason.INVOKE
    driver.invoke()
    assert reason(driver) is Reason.ANSWER
    driver.send(callback("c"), invoke("i"))
    driver.answer()
    assert reason(driver) is Reason.WORLD
    driver.do(Pause())
    assert reason(driver) is Reason.OPERATOR
    driver.do(Resume())
    driver.do(CompleteCallback(the_callback(driver), "yes"))
    driver.invoke()
    driver.send(wait("w"))
    driver.answer()
    assert reason(driver) is Reason.TIMER
    driver.do(Stop())
    assert reason(driver) is Reason.ENDED


def test_sizes_are_of_utf8_and_of_everything_that_was_said(driver: Driver) -> None:
    before = driver.state.history_bytes
    driver.send(step("a", Action.SUCCEED, payload="é" * 10), step("b", Action.FAIL, error=ERROR))
    assert driver.state.history_bytes - before == 20 + ERROR.size_bytes
    assert size_bytes("\ud800") == 3
    with pytest.raises(PerdureError):
        driver.send(execution(Action.SUCCEED), step("c"))
