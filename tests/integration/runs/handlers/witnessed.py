"""Functions written with AWS's durable SDK, as it is, that tell a witness what they do: a file that others read."""

from __future__ import annotations

import os
from typing import Any

from aws_durable_execution_sdk_python import DurableContext, StepError, durable_execution
from aws_durable_execution_sdk_python.config import Duration, StepConfig, StepSemantics
from aws_durable_execution_sdk_python.retries import RetryDecision

SECOND = Duration.from_seconds(1)
ONCE = StepConfig(
    step_semantics=StepSemantics.AT_MOST_ONCE_PER_RETRY, retry_strategy=lambda *_: RetryDecision(should_retry=False, delay=SECOND)
)


def tell(*words: object) -> None:
    """One line in one write: a process that is killed has told it whole or not at all."""
    witness = os.open(os.environ["WITNESS"], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(witness, (" ".join(map(str, words)) + "\n").encode())
    finally:
        os.close(witness)


@durable_execution
def story(event: Any, context: DurableContext) -> Any:
    """Every fourth one asks another function."""
    number, invocation = event["n"], context.lambda_context.aws_request_id  # type: ignore[union-attr]

    def step(name: str) -> str:
        tell(number, name, invocation)
        return name

    found = {"first": context.step(lambda _: step("first"), name="first")}
    try:
        found["once"] = context.step(lambda _: step("once"), name="once", config=ONCE)
    except StepError:
        found["once"] = "interrupted"
    context.wait(SECOND, name="rest")
    found["asked"] = context.wait_for_callback(
        lambda callback_id, _: tell(number, "ask", invocation, callback_id), name="approve"
    )
    if number % 4 == 0:
        found["doubled"] = context.invoke("double", {"n": number})["doubled"]
    found["last"] = context.step(lambda _: step("last"), name="last")
    return found


def double(event: Any, _: Any) -> Any:
    return {"doubled": event["n"] * 2}
