"""What an execution looks like from outside: pages of operations, its description, its events."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from perdure.core.errors import InvalidRequest
from perdure.runs.engine import (
    CompleteCallback,
    CompleteInvoke,
    Entry,
    Pause,
    Resume,
    Rules,
    Stop,
    Tick,
    description,
    events,
    fold,
    open_callbacks,
    operation,
    page,
)
from perdure.runs.protocol import Action, ExecutionStatus, InvocationStatus, event_wire
from tests.unit.runs.driving import DAY, ERROR, Driver, callback, context, invoke, step, wait


def pages(driver: Driver, rules: Rules, max_items: int | None = None) -> Iterator[list[str]]:
    marker: str | None = None
    while True:
        found = page(driver.state, marker, rules, max_items)
        yield [op.id for op in found.operations]
        marker = found.next_marker
        if marker is None:
            return


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.invoke()
    return driver


def test_pages_hold_so_many_or_so_large_operations_and_one_at_least(driver: Driver) -> None:
    driver.send(*(step(f"s{n}", Action.SUCCEED, payload="x" * 100) for n in range(6)))
    everything = ["exec-1", *(f"s{n}" for n in range(6))]
    assert list(pages(driver, Rules())) == [everything]
    assert list(pages(driver, Rules(page_items_max=3))) == [everything[:3], everything[3:6], everything[6:]]
    assert list(pages(driver, Rules(), max_items=5)) == [everything[:5], everything[5:]]
    assert list(pages(driver, Rules(page_bytes_max=250))) == [everything[:3], everything[3:5], everything[5:]]
    assert list(pages(driver, Rules(page_bytes_max=1))) == [[op] for op in everything]
    with pytest.raises(InvalidRequest):
        page(driver.state, "nonsense", Rules())
    assert page(driver.state, "999", Rules()).operations == ()


def test_below_a_closed_context_nothing_is_told_unless_it_must_be_rebuilt(driver: Driver) -> None:
    driver.send(
        context("small"),
        context("inner", parent_id="small"),
        step("a", Action.SUCCEED, parent_id="inner"),
        context("inner", Action.SUCCEED, parent_id="small", payload="1"),
        context("small", Action.SUCCEED, payload="1"),
        context("large"),
        step("b", Action.SUCCEED, parent_id="large"),
        context("large", Action.SUCCEED, payload="", context_options={"replay_children": True}),
        context("open"),
        step("c", Action.SUCCEED, parent_id="open"),
        context("failed"),
        step("d", Action.SUCCEED, parent_id="failed"),
        context("failed", Action.FAIL, error=ERROR),
    )
    assert list(pages(driver, Rules())) == [["exec-1", "small", "large", "b", "open", "c", "failed"]]


def test_operations_have_the_details_of_their_type(driver: Driver) -> None:
    driver.send(wait("w", 60), callback("c"), invoke("i"), step("s", Action.RETRY, error=ERROR), context("x", Action.SUCCEED))
    told = {op_id: operation(driver.op(op_id)).wire() for op_id in ("exec-1", "w", "c", "i", "s", "x")}
    end = (DAY + timedelta(seconds=60)).timestamp()
    assert told["exec-1"]["ExecutionDetails"] == {"InputPayload": '{"n": 1}'}
    assert told["w"]["WaitDetails"] == {"ScheduledEndTimestamp": end}
    assert told["c"]["CallbackDetails"] == {"CallbackId": driver.op("c").callback_id}
    assert told["i"]["ChainedInvokeDetails"] == {}
    assert told["s"]["StepDetails"] == {"Attempt": 1, "NextAttemptTimestamp": end - 50, "Error": ERROR.wire()}
    assert told["x"]["ContextDetails"] == {} and "EndTimestamp" in told["x"]
    assert open_callbacks(driver.state.operations.values()) == [driver.op("c")]


def test_a_description_says_what_it_is_and_hides_data_when_asked() -> None:
    driver = Driver(timeout_s=100)
    driver.do(Pause("private reason"))
    told = description(driver.state).wire()
    assert (
        told["Status"] == "PAUSED" and told["InputPayload"] == '{"n": 1}' and told["DurableConfig"] == {"ExecutionTimeout": 100}
    )
    assert told["PauseDetails"]["Reason"] == "private reason" and told["ExecutionDataIncluded"] is True
    hidden = description(driver.state, with_data=False).wire()
    assert "private" not in str(hidden) and "InputPayload" not in hidden
    driver.do(Resume())
    driver.do(Stop(ERROR))
    ended = description(driver.state).wire()
    assert (ended["Status"], ended["Error"], "PauseDetails" in ended) == ("STOPPED", ERROR.wire(), False)


def story() -> Driver:
    driver = Driver(timeout_s=1000)
    driver.invoke()
    driver.send(step("s", name="pay", sub_type="Step"), step("s", Action.RETRY, error=ERROR))
    driver.answer()
    driver.pass_time(10)
    driver.invoke()
    driver.send(step("s"), step("s", Action.SUCCEED, payload='"paid"'), callback("c", timeout_s=30), callback("d"), wait("w", 20))
    driver.send(invoke("i", payload="1"), invoke("j", "unknown"), refused={"unknown": ERROR})
    driver.answer()
    driver.do(CompleteCallback(driver.op("d").callback_id or "", error=ERROR))
    driver.do(CompleteInvoke("i", ExecutionStatus.TIMED_OUT, timeout_s=5))
    driver.pass_time(30)
    driver.do(Tick())
    driver.do(Pause("lunch"))
    driver.do(Resume())
    driver.invoke()
    driver.answer(InvocationStatus.FAILED, error=ERROR)
    return driver


def test_events_are_those_of_aws_in_their_order() -> None:
    driver = story()
    told = driver.world.events(driver.id)
    assert [event["EventId"] for event in told] == list(range(1, len(told) + 1))
    assert [event["EventType"] for event in told] == [
        "ExecutionStarted",
        "StepStarted",
        "StepFailed",
        "InvocationCompleted",
        "StepStarted",
        "StepSucceeded",
        "CallbackStarted",
        "CallbackStarted",
        "WaitStarted",
        "ChainedInvokeStarted",
        "ChainedInvokeStarted",
        "ChainedInvokeFailed",
        "InvocationCompleted",
        "CallbackFailed",
        "ChainedInvokeTimedOut",
        "WaitSucceeded",
        "CallbackTimedOut",
        "ExecutionPaused",
        "ExecutionResumed",
        "InvocationCompleted",
        "ExecutionFailed",
    ]
    by_type = {event["EventType"]: event for event in told}
    assert by_type["ExecutionStarted"]["ExecutionStartedDetails"] == {"Input": {"Payload": '{"n": 1}'}, "ExecutionTimeout": 1000}
    assert by_type["StepSucceeded"]["StepSucceededDetails"] == {
        "Result": {"Payload": '"paid"'},
        "RetryDetails": {"CurrentAttempt": 2},
    }
    assert by_type["StepFailed"]["StepFailedDetails"]["RetryDetails"] == {"CurrentAttempt": 1, "NextAttemptDelaySeconds": 10}
    assert by_type["WaitStarted"]["WaitStartedDetails"]["Duration"] == 20
    assert by_type["WaitSucceeded"]["WaitSucceededDetails"] == {"Duration": 20}
    assert by_type["InvocationCompleted"]["InvocationCompletedDetails"]["RequestId"] == "request-3"
    assert by_type["ExecutionFailed"]["ExecutionFailedDetails"] == {"Error": {"Payload": ERROR.wire()}}


def test_events_without_data_say_only_that_there_is_some() -> None:
    driver = story()
    told = [event_wire(event) for event in events(driver.world.runs[driver.id].history, with_data=False)]
    for private in ("paid", "broke", "lunch", '"n"'):
        assert private not in str(told)
    assert told[0]["ExecutionStartedDetails"]["Input"] == {"Truncated": True}


def test_a_chained_invoke_names_the_execution_that_it_started() -> None:
    driver = story()
    told = [event_wire(event) for event in events(driver.world.runs[driver.id].history, children={"i": "arn:child"})]
    started = [event["ChainedInvokeStartedDetails"] for event in told if event["EventType"] == "ChainedInvokeStarted"]
    assert started[0]["DurableExecutionArn"] == "arn:child" and started[0]["ExecutedVersion"] == "$LATEST"
    assert "DurableExecutionArn" not in started[1]


def test_a_history_folds_to_the_same_in_any_pieces() -> None:
    driver = story()
    history: list[Entry] = driver.world.runs[driver.id].history
    whole = fold(history)
    for cut in range(1, len(history)):
        assert fold(history[cut:], onto=fold(history[:cut])) == whole
    with pytest.raises(AssertionError):
        fold(history[1:])
    with pytest.raises(AssertionError):
        fold([*history[:3], *history[4:]])
