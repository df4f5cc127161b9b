"""Functions written with AWS's durable SDK, as it is."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from aws_durable_execution_sdk_python import CallbackError, DurableContext, StepError, durable_execution
from aws_durable_execution_sdk_python.config import CallbackConfig, Duration, StepConfig, StepSemantics
from aws_durable_execution_sdk_python.retries import RetryDecision
from aws_durable_execution_sdk_python.waits import WaitForConditionConfig, WaitForConditionDecision
from plain import note  # type: ignore[import-not-found]

HOUR = Duration.from_hours(1)
RETRIED = StepConfig(retry_strategy=lambda _error, attempt: RetryDecision(attempt < 3, HOUR))
ONCE = StepConfig(
    step_semantics=StepSemantics.AT_MOST_ONCE_PER_RETRY, retry_strategy=lambda *_: RetryDecision(should_retry=False, delay=HOUR)
)


@durable_execution
def everything(event: Any, context: DurableContext) -> Any:
    """Every primitive there is."""

    def flaky(step: Any) -> int:
        if step.attempt < 2:
            raise ValueError("not yet")
        return int(step.attempt)

    def poll(state: int, _: Any) -> int:
        return state + 1

    polled = WaitForConditionConfig(
        wait_strategy=lambda state, _: WaitForConditionDecision(should_continue=state < 3, delay=HOUR), initial_state=0
    )
    found = {"step": context.step(lambda _: event["n"] + 1, name="add")}
    context.wait(HOUR, name="rest")
    found["retried"] = context.step(flaky, name="flaky", config=RETRIED)
    found["polled"] = context.wait_for_condition(poll, polled)
    found["mapped"] = context.map([1, 2, 3], lambda child, item, *_: child.step(lambda _: item * 10)).get_results()
    branches = [lambda child: child.step(lambda _: "a"), lambda child: child.step(lambda _: "b")]
    found["parallel"] = context.parallel(branches).get_results()
    found["child"] = context.run_in_child_context(lambda child: child.step(lambda _: "inner"))
    found["asked"] = context.wait_for_callback(lambda callback_id, _: note("callback", callback_id), name="approve")
    try:
        context.create_callback(name="nobody", config=CallbackConfig(timeout=HOUR)).result()
    except CallbackError as error:
        found["nobody"] = type(error).__name__
    found["invoked"] = context.invoke("double", {"n": 4})["doubled"]
    return found


@durable_execution
def dies_in_a_step(event: Any, context: DurableContext) -> Any:
    """Its process is killed while a step runs, the first time."""

    def deadly(_: Any) -> str:
        note("deadly", os.getpid())
        if event["first"] == "dies":
            event["first"] = ""
            with open(os.path.join(os.environ["NOTES"], "deadly")) as told:  # noqa: PTH118, PTH123
                is_first = len(told.readlines()) == 1
            if is_first:
                os.kill(os.getpid(), signal.SIGKILL)
        return "survived"

    context.step(lambda _: note("before", "step"), name="before")
    try:
        return context.step(deadly, config=ONCE if event["once"] else None)
    except StepError as error:
        return f"interrupted: {str(error.error_type).rpartition('.')[2]}"


@durable_execution
def hangs_in_a_step(event: Any, context: DurableContext) -> Any:
    """It hangs where it runs first, and would do something after that."""

    def step(_: Any) -> str:
        note("hung", os.getpid())
        with open(os.path.join(os.environ["NOTES"], "hung")) as told:  # noqa: PTH118, PTH123
            is_first = len(told.readlines()) == 1
        if is_first:
            threading.Event().wait()
        return "done"

    return context.step(step)


@durable_execution
def poison(event: Any, context: DurableContext) -> Any:
    note("poison", os.getpid())
    os._exit(9)
