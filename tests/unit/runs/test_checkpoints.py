"""Checkpoints: the fence, whole batches, and what a function is told in return."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from perdure.core.errors import InvalidRequest, PayloadTooLarge, QuotaExceeded, StaleCheckpoint
from perdure.runs.engine import (
    Answer,
    Checkpoint,
    CompleteCallback,
    CompleteInvoke,
    Fail,
    Failure,
    Notice,
    Pause,
    PauseCause,
    Resume,
    Rules,
    StartChild,
    Stop,
    Tick,
    Warn,
    children_to_start,
    current_token,
    require_token,
)
from perdure.runs.protocol import (
    Action,
    CheckpointToken,
    ErrorObject,
    ExecutionStatus,
    InvocationOutput,
    InvocationStatus,
    OperationStatus,
    OperationType,
    OperationUpdate,
)
from tests.unit.runs.driving import ERROR, Driver, callback, context, execution, invoke, step, update, wait


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.invoke()
    return driver


# ---------------------------------------------------------------------------------------------------------------------- the fence


def test_each_recorded_checkpoint_has_a_token_of_its_own(driver: Driver) -> None:
    first = driver.token
    driver.send(step("a"))
    assert driver.token != first
    with pytest.raises(StaleCheckpoint):
        driver.do(Checkpoint(first, (step("b"),), "other"))
    driver.send(step("b"))


@pytest.mark.parametrize(
    "token",
    ["", "nonsense", "Y2xhaW1lZA==", str(CheckpointToken("another", 1, 0)), str(CheckpointToken("exec-1", 2, 0))],
)
def test_other_tokens_are_refused_in_the_words_that_sdks_know(driver: Driver, token: str) -> None:
    """Anything else would make an SDK fail the whole execution (durable: rule 1)."""
    with pytest.raises(StaleCheckpoint, match=r"^Invalid checkpoint token"):
        driver.do(Checkpoint(token, (step("a"),)))
    assert "a" not in driver.state.operations


def test_no_token_outlives_its_invocation(driver: Driver) -> None:
    """(durable: rule 1, faults 4 and 19)"""
    driver.send(wait("w"))
    driver.answer()
    with pytest.raises(StaleCheckpoint):
        driver.send(step("a"))
    driver.pass_time(60)
    zombie = driver.token
    driver.invoke()
    with pytest.raises(StaleCheckpoint):
        driver.do(Checkpoint(zombie, (step("a"),)))


def test_no_token_outlives_its_execution(driver: Driver) -> None:
    driver.do(Stop())
    with pytest.raises(StaleCheckpoint):
        driver.send(step("a"))
    with pytest.raises(StaleCheckpoint):
        require_token(driver.state, driver.token)


def test_a_lost_answer_is_given_again_and_nothing_is_recorded_twice(driver: Driver) -> None:
    request = Checkpoint(driver.token, (callback("c"), step("a")), "client")
    first = driver.do(request)
    again = driver.do(request)
    assert again.reply == first.reply and again.entries == ()
    assert first.reply is not None and driver.ids(again) == ["c", "a"]


def test_only_the_same_client_token_is_a_repetition(driver: Driver) -> None:
    request = Checkpoint(driver.token, (step("a"),), "client")
    driver.do(request)
    for other in (replace(request, client_token="new"), replace(request, client_token=None)):
        with pytest.raises(StaleCheckpoint):
            driver.do(other)


def test_a_repetition_after_the_invocation_is_over_is_stale(driver: Driver) -> None:
    request = Checkpoint(driver.token, (wait("w"),), "client")
    driver.do(request)
    driver.answer()
    with pytest.raises(StaleCheckpoint):
        driver.do(request)


def test_a_refresh_leaves_no_trace_unless_a_timer_was_due(driver: Driver) -> None:
    """A function that asks every second does not fill its history (durable: fault 14)."""
    driver.send(wait("w", 60))
    kinds, token = driver.kinds(), driver.token
    for _ in range(100):
        assert driver.ids(driver.send()) == []
    assert (driver.kinds(), driver.token) == (kinds, token)
    driver.pass_time(60)
    decision = driver.send()
    assert driver.ids(decision) == ["w"] and driver.op("w").status is OperationStatus.SUCCEEDED
    assert driver.kinds() == [*kinds, "fired"]


def test_deciding_leaves_the_state_as_it_was(driver: Driver) -> None:
    driver.send(wait("w"), step("a"))
    state = driver.state
    before = copy.deepcopy(state)
    driver.pass_time(100)
    driver.send(step("a", Action.SUCCEED), step("b"))
    assert state == before and driver.state != before


# ------------------------------------------------------------------------------------------------------------------------ batches

BAD: dict[str, tuple[OperationUpdate, ...]] = {
    "a step that is not there cannot be cancelled": (wait("x", action=Action.CANCEL),),
    "two starts": (step("x"), step("x")),
    "two ends": (step("x", Action.SUCCEED), step("x", Action.SUCCEED)),
    "an end before its start": (context("x", Action.SUCCEED), context("x")),
    "two updates of a wait": (wait("x"), wait("x", action=Action.CANCEL)),
    "the execution is not last": (execution(Action.SUCCEED), step("x")),
    "the execution twice": (execution(Action.SUCCEED), execution(Action.FAIL)),
    "the execution cannot be started": (execution(Action.START),),
    "a parent that is a step": (step("x"), step("y", parent_id="x")),
    "a parent that is not there": (step("x", parent_id="nobody"),),
    "a parent that comes later": (step("x", parent_id="y"), context("y")),
    "a failure with a payload": (step("x", Action.FAIL, payload="1"),),
    "a success with an error": (context("x", Action.SUCCEED, error=ERROR),),
    "a retry without its delay": (step("x", Action.RETRY, step_options=None),),
    "a retry with both": (step("x", Action.RETRY, payload="1", error=ERROR),),
    "an invoke of nothing": (update("x", OperationType.CHAINED_INVOKE, Action.START),),
    "an invoke that says its own end": (update("x", OperationType.CHAINED_INVOKE, Action.SUCCEED),),
    "a callback that says its own end": (update("x", OperationType.CALLBACK, Action.SUCCEED),),
    "a wait that says its own end": (update("x", OperationType.WAIT, Action.SUCCEED),),
    "a context that is tried again": (update("x", OperationType.CONTEXT, Action.RETRY),),
    "a start of what is started": (step("begun"),),
    "a start of what is done": (step("done"),),
    "another end of what is done": (step("done", Action.FAIL, error=ERROR),),
    "a wait that passes for a step": (wait("begun"),),
    "another name": (step("begun", Action.SUCCEED, name="other"),),
    "another parent": (step("begun", Action.SUCCEED, parent_id="ctx"),),
    "another subtype": (step("begun", Action.SUCCEED, sub_type="WaitForCondition"),),
    "the execution's own id": (step("exec-1", Action.SUCCEED),),
    "too large": (step("x", Action.SUCCEED, payload="x" * 2001),),
    "an error too large": (step("x", Action.FAIL, error=ErrorObject(error_message="x" * 1001)),),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
@pytest.mark.parametrize("good_first", [True, False])
def test_a_batch_with_anything_wrong_is_refused_whole(bad: tuple[OperationUpdate, ...], good_first: bool) -> None:
    """A record is used only if all that names it agrees (durable: rule 5, fault 11); sizes are known before anything is written
    (rule 7, fault 12)."""
    driver = Driver(rules=Rules(payload_bytes_max=2000, error_bytes_max=1000))
    driver.invoke()
    driver.send(context("ctx"), step("begun", name="begun"), step("done"), step("done", Action.SUCCEED))
    state, kinds = copy.deepcopy(driver.state), driver.kinds()
    batch = (step("good"), *bad) if good_first else bad
    with pytest.raises(InvalidRequest):
        driver.send(*batch)
    assert (driver.state, driver.kinds()) == (state, kinds)
    driver.send(step("good"))  # and the token is still good


def test_a_batch_may_hold_a_start_its_end_and_children_of_both(driver: Driver) -> None:
    driver.send(
        context("m"),
        step("a", parent_id="m"),
        step("a", Action.SUCCEED, parent_id="m", payload="1"),
        wait("w", parent_id="m"),
        context("m", Action.SUCCEED, payload="[1]"),
    )
    statuses = {op.id: op.status for op in driver.state.operations.values()}
    assert statuses["a"] is statuses["m"] is OperationStatus.SUCCEEDED and statuses["w"] is OperationStatus.STARTED
    assert driver.kinds().count("checkpointed") == 1


def test_sdks_may_leave_a_start_out(driver: Driver) -> None:
    driver.send(
        step("a", Action.SUCCEED, payload="1"), context("c", Action.FAIL, error=ERROR), step("b", Action.RETRY, error=ERROR)
    )
    assert (driver.op("a").attempt, driver.op("c").error, driver.op("b").status) == (1, ERROR, OperationStatus.PENDING)


def test_an_attempt_is_begun_once(driver: Driver) -> None:
    """A START without an end is never followed by another one in that attempt: whoever was cut off says RETRY or FAIL."""
    driver.send(step("a"))
    driver.do(Fail(1, Failure.LOST))
    driver.pass_time(10)
    driver.invoke()
    with pytest.raises(InvalidRequest, match="STARTED cannot start"):
        driver.send(step("a"))
    driver.send(step("a", Action.RETRY, error=ERROR))
    with pytest.raises(InvalidRequest, match="PENDING cannot start"):
        driver.send(step("a"))
    driver.pass_time(10)
    driver.send()
    driver.send(step("a"))
    assert (driver.op("a").status, driver.op("a").attempt) == (OperationStatus.STARTED, 1)


def test_a_poll_that_is_cut_off_keeps_the_state_of_the_poll_before(driver: Driver) -> None:
    driver.send(step("poll"), step("poll", Action.RETRY, payload="7"))
    driver.pass_time(10)
    driver.send()
    driver.send(step("poll"))
    assert (driver.op("poll").status, driver.op("poll").payload) == (OperationStatus.STARTED, "7")


# ------------------------------------------------------------------------------------------------------------------------ answers


def test_an_answer_has_everything_that_changed_and_was_not_told(driver: Driver) -> None:
    decision = driver.send(callback("c"), wait("w", 60))
    assert driver.ids(decision) == ["c", "w"]
    callback_id = driver.op("c").callback_id
    assert callback_id is not None
    driver.do(CompleteCallback(callback_id, "yes"))
    driver.pass_time(60)
    assert driver.ids(driver.send(step("a"))) == ["c", "w", "a"]
    assert driver.ids(driver.send(step("b"))) == ["b"]


def test_callback_ids_are_the_engines_own_and_differ(driver: Driver) -> None:
    driver.send(callback("c"), callback("d"))
    assert driver.op("c").callback_id != driver.op("d").callback_id


def test_a_chained_invoke_is_to_be_started_and_can_be_asked_for_again(driver: Driver) -> None:
    """A server that died after its commit starts it then; the key makes that once."""
    decision = driver.send(invoke("i", "other", payload='{"n": 1}'), invoke("j", "third"))
    children = [todo for todo in decision.todo if isinstance(todo, StartChild)]
    assert [(child.function, child.payload) for child in children] == [("other", '{"n": 1}'), ("third", "{}")]
    assert len({child.key for child in children}) == 2
    assert children_to_start(driver.state) == children
    driver.do(CompleteInvoke("i", ExecutionStatus.SUCCEEDED, "2"))
    assert children_to_start(driver.state) == children[1:]


def test_a_target_that_cannot_be_invoked_fails_in_the_answer(driver: Driver) -> None:
    decision = driver.send(invoke("i", "unknown", payload="private"), refused={"unknown": ERROR})
    assert decision.todo == () and driver.ids(decision) == ["i"]
    op = driver.op("i")
    assert (op.status, op.error) == (OperationStatus.FAILED, ERROR)
    assert "private" not in str(driver.world.runs[driver.id].history)


@pytest.mark.parametrize(("action", "parts", "status"), [
    (Action.SUCCEED, {"payload": "big"}, ExecutionStatus.SUCCEEDED),
    (Action.FAIL, {"error": ERROR}, ExecutionStatus.FAILED),
])  # fmt: skip
def test_an_update_of_the_execution_ends_it(
    driver: Driver, action: Action, parts: dict[str, Any], status: ExecutionStatus
) -> None:
    decision = driver.send(step("a"), execution(action, **parts))
    assert decision.reply is not None and decision.reply.token is None
    state = driver.state
    assert (state.status, state.result, state.error) == (status, parts.get("payload"), parts.get("error"))
    again = driver.do(Checkpoint(current_token_before(driver), (step("a"), execution(action, **parts)), "client-1"))
    assert again.entries == () and again.reply is not None and again.reply.token is None
    driver.do(Answer(1, InvocationOutput(status=InvocationStatus.SUCCEEDED, result="")))
    assert driver.state.result == parts.get("payload")


def current_token_before(driver: Driver) -> str:
    assert driver.state.last is not None
    return str(CheckpointToken(driver.id, driver.state.last.invocation, driver.state.last.number))


# -------------------------------------------------------------------------------------------------------------- pauses and limits


def test_a_paused_execution_keeps_what_is_reported_and_gives_no_token(driver: Driver) -> None:
    driver.do(Pause())
    assert driver.state.status is ExecutionStatus.PAUSING
    request = Checkpoint(driver.token, (step("a"), step("a", Action.SUCCEED, payload="1")), "client")
    decision = driver.do(request)
    assert decision.reply is not None and (decision.reply.token, decision.reply.operations) == (None, ())
    assert driver.op("a").status is OperationStatus.SUCCEEDED
    again = driver.do(request)
    assert again.entries == () and again.reply is not None and again.reply.token is None
    with pytest.raises(StaleCheckpoint):
        driver.do(Checkpoint(current_token(driver.state), (step("b"),), "guessed"))
    driver.answer()
    assert driver.state.status is ExecutionStatus.PAUSED
    driver.do(Resume())
    assert driver.ids(driver.invoke()) == ["exec-1", "a"]


@pytest.mark.parametrize("rules", [Rules(operations_max=3), Rules(history_bytes_max=100)], ids=["operations", "bytes"])
def test_a_limit_parks_and_loses_nothing(rules: Rules) -> None:
    """No hard kill: a warning early, then a pause with its reason; whoever raises the limit goes on (durable: rule 6, faults 14
    and 15)."""
    driver = Driver(rules=replace(rules, warn_share=0.5))
    driver.invoke()
    notices: list[Notice] = []
    for index in range(4):
        decision = driver.send(step(f"s{index}", Action.SUCCEED, payload="x" * 30))
        notices += [todo.notice for todo in decision.todo if isinstance(todo, Warn)]
    assert notices == [Notice.LIMIT_NEAR, Notice.LIMIT_PASSED]
    assert decision.reply is not None and decision.reply.token is None
    assert driver.op("s3").status is OperationStatus.SUCCEEDED, "the checkpoint that passes it is kept"
    driver.answer()
    state = driver.state
    assert state.status is ExecutionStatus.PAUSED and state.pause is not None and state.pause.cause is PauseCause.LIMIT
    with pytest.raises(QuotaExceeded):
        driver.do(Resume())
    driver.world.rules = Rules()
    driver.do(Resume())
    assert len(driver.ids(driver.invoke())) == 5
    driver.do(Stop())
    assert driver.state.status is ExecutionStatus.STOPPED


def test_an_execution_that_ends_passes_no_limit() -> None:
    driver = Driver(rules=Rules(operations_max=1))
    driver.invoke()
    driver.send(step("a"), step("b"), execution(Action.SUCCEED, payload="1"))
    assert driver.state.status is ExecutionStatus.SUCCEEDED


def test_a_limit_says_its_numbers(driver: Driver) -> None:
    driver.world.rules = Rules(payload_bytes_max=3)
    with pytest.raises(PayloadTooLarge, match=r"has 4 bytes, and 3 are allowed") as caught:
        driver.send(step("a", Action.SUCCEED, payload="éé"))
    assert caught.value.details == {"limit": "payload_bytes_max", "limit_bytes": "3", "size_bytes": "4"}
    driver.do(Tick())
