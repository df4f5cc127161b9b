"""AWS's durable SDK and boto3, unmodified, on the engine: each primitive, and what happens when answers and workers are lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from aws_durable_execution_sdk_python import (
    CallbackError,
    DurableContext,
    InvokeError,
    StepError,
    durable_execution,
)
from aws_durable_execution_sdk_python.config import (
    CallbackConfig,
    CompletionConfig,
    Duration,
    MapConfig,
    StepConfig,
    StepSemantics,
)
from aws_durable_execution_sdk_python.retries import RetryDecision
from aws_durable_execution_sdk_python.waits import WaitForConditionConfig, WaitForConditionDecision
from botocore.exceptions import ConnectionClosedError

from perdure.core.errors import StaleInvocation
from perdure.runs.engine import Fail, Failure, Invoke, Pause, PauseCause, Reason, Resume, Rules, Stop
from perdure.runs.protocol import ErrorObject, ExecutionStatus, OperationStatus, OperationType
from tests.fakes.executions import Executions, Function, Killed

Main = Callable[[Any, DurableContext], Any]
ONCE = StepConfig(
    step_semantics=StepSemantics.AT_MOST_ONCE_PER_RETRY,
    retry_strategy=lambda _error, attempt: RetryDecision(should_retry=attempt < 3, delay=Duration.from_seconds(5)),
)
RETRIED = StepConfig(retry_strategy=lambda _error, attempt: RetryDecision(attempt < 3, Duration.from_seconds(30)))


@pytest.fixture
def world() -> Executions:
    logging.getLogger("aws_durable_execution_sdk_python").setLevel(logging.CRITICAL)
    return Executions(datetime.now(UTC))


def durable(world: Executions, name: str, function: Main, digest: str = "v1") -> None:
    world.functions[name] = Function(durable_execution(function, boto3_client=world.client()), digest=digest)


def begun(world: Executions, function: Main, event: Any = None) -> str:
    """An execution that has gone as far as it goes without anybody outside."""
    durable(world, "main", function)
    execution_id = world.start("main", event)
    world.run(execution_id)
    return execution_id


def names(world: Executions, execution_id: str) -> list[str]:
    return [event["EventType"] for event in world.events(execution_id)]


# --------------------------------------------------------------------------------------------------------------------- primitives


def test_steps(world: Executions) -> None:
    def main(event: Any, context: DurableContext) -> Any:
        first = context.step(lambda _: event["a"] + 1, name="first")
        return context.step(lambda _: first * 2, name="second")

    execution_id = begun(world, main, {"a": 1})
    state = world.state(execution_id)
    assert (state.status, state.result, state.invocations) == (ExecutionStatus.SUCCEEDED, "4", 1)
    steps = ["StepStarted", "StepSucceeded"] * 2
    assert names(world, execution_id) == ["ExecutionStarted", *steps, "InvocationCompleted", "ExecutionSucceeded"]


def test_a_wait_of_a_year_ends_the_invocation_and_another_one_goes_on(world: Executions) -> None:
    """A wait holds no thread and no invocation (durable: rule 3, fault 7)."""
    ran = []

    def main(_: Any, context: DurableContext) -> Any:
        context.step(lambda _: ran.append(1))
        context.wait(Duration.from_days(366))
        return "rested"

    before = world.now
    state = world.state(begun(world, main))
    assert (state.status, state.result, state.invocations, ran) == (ExecutionStatus.SUCCEEDED, '"rested"', 2, [1])
    assert (world.now - before).days == 366


def test_a_failed_step_is_tried_again_after_its_delay(world: Executions) -> None:
    """The policy is the step's own, attempts are counted by the server (durable: rule 9)."""
    attempts = []

    def main(_: Any, context: DurableContext) -> Any:
        def flaky(step: Any) -> str:
            attempts.append((step.attempt, world.now))
            if step.attempt < 3:
                raise ValueError("not yet")
            return "done"

        return context.step(flaky, config=RETRIED)

    execution_id = begun(world, main)
    assert world.state(execution_id).result == '"done"'
    assert [attempt for attempt, _ in attempts] == [1, 2, 3]
    assert [(b - a).total_seconds() for (_, a), (_, b) in pairwise(attempts)] == [30, 30]
    failed = [event["StepFailedDetails"] for event in world.events(execution_id) if event["EventType"] == "StepFailed"]
    assert [details["RetryDetails"] for details in failed] == [
        {"CurrentAttempt": 1, "NextAttemptDelaySeconds": 30},
        {"CurrentAttempt": 2, "NextAttemptDelaySeconds": 30},
    ]


def test_an_error_is_the_same_live_and_replayed(world: Executions) -> None:
    """Errors are data (durable: rule 8, fault 6)."""
    seen = []

    def main(_: Any, context: DurableContext) -> Any:
        def fail(_: Any) -> None:
            raise KeyError("no such order")

        try:
            context.step(fail, config=StepConfig(retry_strategy=lambda *_: RetryDecision(False, Duration.from_seconds(1))))
        except StepError as error:
            seen.append((type(error), error.error_type, str(error)))
        context.wait(Duration.from_seconds(1))
        return "caught"

    assert world.state(begun(world, main)).result == '"caught"'
    assert len(seen) == 2 and seen[0] == seen[1]


def test_a_condition_is_polled_from_the_state_of_the_poll_before(world: Executions) -> None:
    def main(_: Any, context: DurableContext) -> Any:
        def decide(state: int, _: int) -> WaitForConditionDecision:
            return WaitForConditionDecision(state < 3, Duration.from_seconds(60))

        return context.wait_for_condition(lambda state, _: state + 1, WaitForConditionConfig(decide, 0), name="poll")

    execution_id = begun(world, main)
    assert world.state(execution_id).result == "3"
    assert names(world, execution_id)[1:4] == ["StepStarted", "StepSucceeded", "InvocationCompleted"]


def test_map_and_parallel(world: Executions) -> None:
    """Ids come from the structure, so branches may run in any order (durable: rule 5, fault 3)."""

    def main(event: Any, context: DurableContext) -> Any:
        doubled = context.map(event, lambda ctx, item, _index, _all: ctx.step(lambda _: item * 2), name="double").get_results()
        branches = [lambda ctx: ctx.step(lambda _: "a"), lambda ctx: (ctx.wait(Duration.from_seconds(5)), "b")[1]]
        return [doubled, context.parallel(branches, name="both").get_results()]

    execution_id = begun(world, main, [1, 2, 3])
    assert json.loads(world.state(execution_id).result or "") == [[2, 4, 6], ["a", "b"]]
    kinds = [op.sub_type for op in world.state(execution_id).operations.values() if op.type is OperationType.CONTEXT]
    assert kinds.count("MapIteration") == 3 and kinds.count("ParallelBranch") == 2


def test_a_child_with_a_large_result_is_rebuilt_and_one_with_a_small_is_not(world: Executions) -> None:
    """A closed context's children are left out of what a replay is given, but for one that needs them to rebuild its result."""
    ran: list[str] = []

    def main(_: Any, context: DurableContext) -> Any:
        def child(size: int, label: str) -> Callable[[DurableContext], str]:
            def inner(ctx: DurableContext) -> str:
                ran.append(label)
                return ctx.step(lambda _: "x", name=label) * size

            return inner

        small = context.run_in_child_context(child(3, "small"), name="s")
        large = context.run_in_child_context(child(300_000, "large"), name="l")
        context.wait(Duration.from_seconds(1))
        return len(small) + len(large)

    execution_id = begun(world, main)
    assert world.state(execution_id).result == "300003"
    assert ran == ["small", "large", "large"]
    ops = {op.name: op for op in world.state(execution_id).operations.values()}
    assert (ops["l"].replay_children and ops["l"].payload is None) or len(ops["l"].payload or "") < 300_000
    assert not ops["s"].replay_children


def test_a_result_too_large_for_an_answer_comes_as_a_checkpoint(world: Executions) -> None:
    execution_id = begun(world, lambda _event, _context: "x" * (6 << 20))
    state = world.state(execution_id)
    assert state.status is ExecutionStatus.SUCCEEDED and len(state.result or "") == (6 << 20) + 2
    assert names(world, execution_id) == ["ExecutionStarted", "ExecutionSucceeded", "InvocationCompleted"]


# ---------------------------------------------------------------------------------------------------------------------- callbacks


def approval(config: CallbackConfig | None = None) -> Main:
    def main(_: Any, context: DurableContext) -> Any:
        callback = context.create_callback(name="approval", config=config)
        try:
            return callback.result()
        except CallbackError as error:
            return f"{type(error).__name__}: {error}"

    return main


def the_callback(world: Executions, execution_id: str) -> str:
    ops = world.state(execution_id).operations.values()
    return next(op.callback_id for op in ops if op.callback_id is not None)


def test_a_callback_is_completed_once(world: Executions) -> None:
    """Early, late, repeated and unknown callbacks are defined results (durable: rule 3)."""
    execution_id = begun(world, approval())
    assert world.standing(execution_id).reason is Reason.WORLD
    client, callback_id = world.client(), the_callback(world, execution_id)
    client.send_durable_execution_callback_success(CallbackId=callback_id, Result=b"yes")
    with pytest.raises(client.exceptions.CallbackTimeoutException):
        client.send_durable_execution_callback_success(CallbackId=callback_id, Result=b"no")
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.send_durable_execution_callback_failure(CallbackId="bm90aGluZw==", Error={})
    world.run(execution_id)
    assert world.state(execution_id).result == '"yes"'
    with pytest.raises(client.exceptions.CallbackTimeoutException):
        client.send_durable_execution_callback_heartbeat(CallbackId=callback_id)


def test_a_callback_fails_with_what_was_sent(world: Executions) -> None:
    execution_id = begun(world, approval())
    error = {"ErrorType": "Denied", "ErrorMessage": "not this quarter"}
    world.client().send_durable_execution_callback_failure(CallbackId=the_callback(world, execution_id), Error=error)
    world.run(execution_id)
    assert world.state(execution_id).result == '"CallbackExternalError: not this quarter"'
    failed = next(event for event in world.events(execution_id) if event["EventType"] == "CallbackFailed")
    assert failed["CallbackFailedDetails"] == {"Error": {"Payload": error}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CallbackConfig(timeout=Duration.from_seconds(60)), "Callback.Timeout"),
        (CallbackConfig(heartbeat_timeout=Duration.from_seconds(60)), "Callback.Heartbeat"),
    ],
)
def test_a_callback_times_out(world: Executions, config: CallbackConfig, said: str) -> None:
    before = world.now
    execution_id = begun(world, approval(config))
    assert "CallbackTimeoutError" in (world.state(execution_id).result or "")
    timed_out = next(event for event in world.events(execution_id) if event["EventType"] == "CallbackTimedOut")
    assert timed_out["CallbackTimedOutDetails"]["Error"]["Payload"]["ErrorType"] == said
    assert (world.now - before).total_seconds() == 60


def test_wait_for_callback_runs_its_submitter_once(world: Executions) -> None:
    submitted: list[str] = []
    execution_id = begun(world, lambda _, context: context.wait_for_callback(lambda cid, _: submitted.append(cid), name="ask"))
    assert len(submitted) == 1
    world.client().send_durable_execution_callback_success(CallbackId=submitted[0], Result=b"ok")
    world.run(execution_id)
    assert world.state(execution_id).result == '"ok"' and len(submitted) == 1


# ------------------------------------------------------------------------------------------------------------------------ invokes


def test_a_function_invokes_others(world: Executions) -> None:
    """A durable one that waits, a plain one, one that fails, one that does not exist."""

    def child(event: Any, context: DurableContext) -> Any:
        context.wait(Duration.from_minutes(5))
        return event["n"] + 1

    def main(_: Any, context: DurableContext) -> Any:
        told = [context.invoke("child", {"n": 1}), context.invoke("plain", {"n": 5})]
        for name in ("failing", "unknown"):
            try:
                context.invoke(name, {})
            except InvokeError as error:
                told.append(error.error_type)
        return told

    durable(world, "child", child)
    durable(world, "failing", lambda _event, _context: 1 / 0)
    world.functions["plain"] = Function(lambda event, _: event["n"] * 2, durable=False)
    execution_id = begun(world, main)
    assert json.loads(world.state(execution_id).result or "") == [2, 10, "ZeroDivisionError", "ResourceNotFoundException"]
    kinds = names(world, execution_id)
    assert kinds.count("ChainedInvokeStarted") == 4 and kinds.count("ChainedInvokeFailed") == 2


# ----------------------------------------------------------------------------------------------------- lost answers, lost workers


def test_a_checkpoint_whose_answer_is_lost_is_recorded_once(world: Executions) -> None:
    """boto3 sends it again with the same client token; peers call that ambiguous, here it is answered again."""
    lost: list[str] = []

    def lose(verb: str, body: dict[str, Any]) -> None:
        if verb == "checkpoint" and body.get("Updates") and not lost:
            lost.append(body["ClientToken"])
            raise ConnectionClosedError(endpoint_url="here")

    world.after = lose
    ran = []
    execution_id = begun(world, lambda _, context: context.step(lambda _: ran.append(1) or "ok"))
    assert world.state(execution_id).result == '"ok"' and ran == [1]
    sent = [body["ClientToken"] for verb, body in world.requests if verb == "checkpoint"]
    assert sent.count(lost[0]) == 2
    assert world.state(execution_id).invocations == 1


@pytest.mark.parametrize("semantics", list(StepSemantics))
def test_a_worker_killed_in_a_step(world: Executions, semantics: StepSemantics) -> None:
    """At least once runs it again at once; at most once never in that attempt (durable: rule 9, fault 4)."""
    ran: list[int] = []

    def main(_: Any, context: DurableContext) -> Any:
        def effect(step: Any) -> str:
            ran.append(step.attempt)
            if len(ran) == 1:
                raise Killed
            return "ok"

        config = ONCE if semantics is StepSemantics.AT_MOST_ONCE_PER_RETRY else RETRIED
        return context.step(effect, config=config)

    execution_id = begun(world, main)
    assert world.state(execution_id).result == '"ok"'
    assert ran == ([1, 2] if semantics is StepSemantics.AT_MOST_ONCE_PER_RETRY else [1, 1])


def test_a_worker_that_was_given_up_cannot_write(world: Executions) -> None:
    """It was paused past its lease, and another one has gone on: its checkpoint is refused, and so is its answer
    (durable: rule 1, faults 4 and 19)."""
    ran: list[str] = []

    def main(_: Any, context: DurableContext) -> Any:
        def effect(_: Any) -> str:
            ran.append("step")
            if len(ran) == 1:
                world.do("exec-1", Fail(1, Failure.LOST))
                world.now = world.standing("exec-1").invoke_at or world.now
                world.do("exec-1", Invoke("request-2", "v1"))
            return f"by {len(ran)}"

        return context.step(effect)

    durable(world, "main", main)
    execution_id = world.start("main")
    with pytest.raises(StaleInvocation):
        world.invoke(execution_id)
    ops = world.state(execution_id).operations.values()
    assert not any(op.status is OperationStatus.SUCCEEDED for op in ops), "the zombie's result stands nowhere"
    world.do(execution_id, Fail(2, Failure.RETURNED))
    world.run(execution_id)
    assert world.state(execution_id).result == '"by 2"'


def test_a_handler_that_always_raises_is_given_up(world: Executions) -> None:
    """A poison execution stops with a reason."""
    world.functions["main"] = Function(lambda *_: 1 / 0)
    state = world.run(world.start("main"))
    assert state.status is ExecutionStatus.FAILED and state.invocations == 5
    assert state.error is not None and state.error.error_type == "ZeroDivisionError"


# ---------------------------------------------------------------------------------------------------------------------- operators


def test_a_pause_in_the_middle_of_an_invocation(world: Executions) -> None:
    """The checkpoint is kept, the token withheld, and the SDK answers PENDING; after the resume nothing runs twice."""
    ran: list[str] = []

    def main(_: Any, context: DurableContext) -> Any:
        def first(_: Any) -> None:
            ran.append("first")
            world.do("exec-1", Pause("lunch"))

        context.step(first, name="first")
        context.step(lambda _: ran.append("second"), name="second")
        return "ok"

    execution_id = begun(world, main)
    state = world.state(execution_id)
    assert (state.status, ran) == (ExecutionStatus.PAUSED, ["first"])
    assert world.standing(execution_id).reason is Reason.OPERATOR
    world.do(execution_id, Resume())
    world.run(execution_id)
    assert (world.state(execution_id).result, ran) == ('"ok"', ["first", "second"])


def test_a_stop_beats_whatever_is_in_flight(world: Executions) -> None:
    def main(_: Any, context: DurableContext) -> Any:
        context.step(lambda _: world.do("exec-1", Stop(ErrorObject(error_type="Enough"))) and None)
        return "too late"

    execution_id = begun(world, main)
    state = world.state(execution_id)
    assert (state.status, state.result) == (ExecutionStatus.STOPPED, None)
    assert names(world, execution_id)[-2:] == ["ExecutionStopped", "InvocationCompleted"]


def test_a_long_history_comes_in_pages(world: Executions) -> None:
    world.rules = Rules(page_items_max=3)

    def main(_: Any, context: DurableContext) -> Any:
        total = sum(context.step(lambda _, n=n: n, name=f"s{n}") for n in range(10))
        context.wait(Duration.from_seconds(1))
        return total

    execution_id = begun(world, main)
    assert world.state(execution_id).result == "45"
    assert [verb for verb, _ in world.requests].count("state") == 3


def test_changed_code_parks_what_it_does_not_fit(world: Executions) -> None:
    """The mismatch is told with what it is, takes no attempts, and goes on under the code that fits (durable: rules 5 and 11,
    faults 8 and 11)."""

    def version(name: str) -> Main:
        def main(_: Any, context: DurableContext) -> Any:
            context.step(lambda _: None, name=name)
            context.wait(Duration.from_seconds(1))
            return name

        return main

    durable(world, "main", version("one"), digest="v1")
    execution_id = world.start("main")
    world.step(execution_id)
    durable(world, "main", version("two"), digest="v2")
    state = world.run(execution_id)
    assert state.status is ExecutionStatus.PAUSED and state.pause is not None and state.pause.cause is PauseCause.CODE
    assert not state.failures
    durable(world, "main", version("one"), digest="v1")
    world.do(execution_id, Resume())
    assert world.run(execution_id).result == '"one"'


def test_a_function_that_is_not_deterministic_fails(world: Executions) -> None:
    """With the same code nothing else can be expected of another try."""
    calls: list[int] = []

    def main(_: Any, context: DurableContext) -> Any:
        calls.append(1)
        context.step(lambda _: None, name=f"step {len(calls)}")
        context.wait(Duration.from_seconds(1))

    state = world.state(begun(world, main))
    assert state.status is ExecutionStatus.FAILED
    assert state.error is not None and "NonDeterministic" in (state.error.error_type or "")


def test_a_batch_that_is_too_early(world: Executions) -> None:
    """In a map that goes on after its first success, what is still open does not hold the execution."""

    def main(_: Any, context: DurableContext) -> Any:
        def item(ctx: DurableContext, n: int, _index: int, _all: Any) -> int:
            if n:
                ctx.wait(Duration.from_days(30))
            return n

        config = MapConfig(completion_config=CompletionConfig(min_successful=1))
        return context.map([0, 1], item, config=config).get_results()

    before = world.now
    state = world.state(begun(world, main))
    assert state.result == "[0]" and (world.now - before).days == 0
