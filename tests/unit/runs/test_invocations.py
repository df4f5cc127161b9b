"""One invocation in flight, what becomes of lost ones, and what moves an execution: timers, people, executions, operators."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.core.errors import (
    CallbackClosed,
    CodeChanged,
    Conflict,
    ExecutionEnded,
    InvalidRequest,
    NotDue,
    NotFound,
    PayloadTooLarge,
    PerdureError,
    StaleInvocation,
)
from perdure.runs.engine import (
    Answer,
    CodeRule,
    Command,
    CompleteCallback,
    CompleteInvoke,
    Delete,
    Fail,
    Failure,
    Finish,
    Heartbeat,
    Invoke,
    Notice,
    Parent,
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
from tests.unit.runs.driving import DAY, ERROR, Driver, callback, execution, invoke, step, wait


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.invoke()
    return driver


def reason(driver: Driver) -> Reason:
    return standing(driver.state).reason


def the_callback(driver: Driver, op_id: str = "c") -> str:
    callback_id = driver.op(op_id).callback_id
    assert callback_id is not None
    return callback_id


def waiting(*, rules: Rules | None = None) -> Driver:
    """It waits for a callback, and nothing is in flight."""
    driver = Driver(rules=rules)
    driver.invoke()
    driver.send(callback("c"))
    driver.answer()
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
    driver.pass_time(100)
    decision = driver.do(Tick())
    assert (driver.state.status, reason(driver)) == (ExecutionStatus.TIMED_OUT, Reason.ENDED)
    assert any(isinstance(todo, Finish) for todo in decision.todo)
    with pytest.raises(CallbackClosed):
        driver.do(CompleteCallback(the_callback(driver), "late"))


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
