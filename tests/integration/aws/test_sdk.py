"""Handlers written with AWS's durable SDK, unmodified, whose own boto3 client finds this server by AWS_ENDPOINT_URL_LAMBDA; a
worker that speaks the worker routes calls them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import httpx2
import pytest
from aws_durable_execution_sdk_python import DurableContext, InvokeError, durable_execution
from aws_durable_execution_sdk_python.config import Duration
from aws_durable_execution_sdk_python.lambda_service import LambdaClient

from perdure.access.service import OPERATOR_KEY_ID
from perdure.runs.protocol import ExecutionStatus
from tests.fakes.executions import LAMBDA_CONTEXT
from tests.fakes.workspaces import KEY
from tests.integration.aws.conftest import World

Handler = Callable[[Any, Any], Any]


class Worker:
    """The smallest one there could be."""

    def __init__(self, world: World, functions: dict[str, tuple[Handler, bool]]) -> None:
        self.world = world
        self.functions = functions
        self.http = httpx2.Client(base_url=world.server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        specs = [{"name": name, "digest": "v1", "durable": durable} for name, (_, durable) in functions.items()]
        self.id = self.http.post("/v1/workers", json={"functions": specs}).json()["worker_id"]

    def take(self) -> Any:
        self.world.settle()
        return self.http.post(f"/v1/workers/{self.id}/take", json={"wait_s": 0}).json()["work"]

    def run(self) -> None:
        """Until nothing is left to do."""
        while (work := self.take()) is not None:
            handler, durable = self.functions[work["function"]]
            path = f"/v1/executions/{work['execution_id']}/invocations/{work['invocation']}"
            try:
                result = json.dumps(handler(work["event"], LAMBDA_CONTEXT))
            except Exception as error:
                told = {"failure": "raised", "error_type": type(error).__name__, "error_message": str(error)}
                assert self.http.post(f"{path}/fail", json=told).status_code == 200
                continue
            params = {"durable": str(durable).lower()}
            sent = self.http.post(f"{path}/answer", params=params, content=result, headers={"content-type": "application/json"})
            assert sent.status_code == 200, sent.text


Serve = Callable[..., Worker]


@pytest.fixture
def serve(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    logging.getLogger("aws_durable_execution_sdk_python").setLevel(logging.CRITICAL)
    for name, value in {
        "AWS_ENDPOINT_URL_LAMBDA": world.server.url,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": OPERATOR_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": world.secret,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(LambdaClient, "_cached_boto_client", None)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the pair that it has found first
    made: list[Worker] = []

    def serve(plain: dict[str, Handler] | None = None, **durable: Handler) -> Worker:
        handlers = {name: (durable_execution(handler), True) for name, handler in durable.items()}
        made.append(Worker(world, {**handlers, **{name: (handler, False) for name, handler in (plain or {}).items()}}))
        return made[-1]

    yield serve
    for worker in made:
        worker.http.close()


def test_steps_waits_and_a_map(world: World, serve: Serve) -> None:
    def main(event: Any, context: DurableContext) -> Any:
        first = context.step(lambda _: event["a"] + 1, name="first")
        context.wait(Duration.from_hours(5))
        results = context.map([1, 2, 3], lambda child, item, *_: child.step(lambda _: item * first)).get_results()
        return sum(results)

    worker = serve(main=main)
    arn = world.begin(input='{"a": 1}')
    worker.run()
    assert world.state(arn).status is ExecutionStatus.RUNNING
    world.advance(5 * 3600)
    worker.run()
    state = world.state(arn)
    assert (state.status, state.result, state.invocations) == (ExecutionStatus.SUCCEEDED, "12", 2)


def test_a_callback_by_boto3(world: World, serve: Serve, client: Any) -> None:
    worker = serve(main=lambda _, context: context.create_callback(name="approval").result())
    arn = world.begin()
    worker.run()
    (callback_id,) = [op.callback_id for op in world.state(arn).operations.values() if op.callback_id]
    client.send_durable_execution_callback_success(CallbackId=callback_id, Result=b"yes")
    worker.run()
    assert world.state(arn).result == '"yes"'


def test_functions_invoke_others(world: World, serve: Serve) -> None:
    def main(_: Any, context: DurableContext) -> Any:
        told = [context.invoke("child", {"n": 1}), context.invoke("plain", {"n": 5})]
        for name in ("failing", "unknown"):
            try:
                context.invoke(name, {})
            except InvokeError as error:
                told.append(error.error_type)
        return told

    def failing(*_: Any) -> Any:
        raise ValueError("no")

    plain: dict[str, Handler] = {"plain": lambda event, _: event["n"] * 2, "failing": failing}
    worker = serve(plain, main=main, child=lambda event, context: context.step(lambda _: event["n"] + 1))
    arn = world.begin()
    worker.run()
    assert json.loads(world.state(arn).result or "") == [2, 10, "ValueError", "ResourceNotFoundException"]


def test_a_history_of_many_pages_is_fetched(world: World, serve: Serve) -> None:
    """What does not fit into an invocation's input comes by GetDurableExecutionState."""

    def main(_: Any, context: DurableContext) -> Any:
        sizes = [len(context.step(lambda _: "x" * 300_000, name=f"s{number}")) for number in range(20)]
        context.wait(Duration.from_seconds(1))
        return sum(sizes)

    worker = serve(main=main)
    arn = world.begin()
    worker.run()
    world.advance(2)
    worker.run()
    assert world.state(arn).result == "6000000"


def test_a_result_too_large_for_an_answer_comes_as_a_checkpoint(world: World, serve: Serve) -> None:
    worker = serve(main=lambda *_: "x" * (6 << 20))
    arn = world.begin()
    worker.run()
    state = world.state(arn)
    assert state.status is ExecutionStatus.SUCCEEDED and len(state.result or "") == (6 << 20) + 2


def test_an_invocation_that_is_over_ends_and_its_execution_does_not(world: World, serve: Serve) -> None:
    """A zombie's checkpoint is refused in words by which the SDK ends the invocation only."""
    ran: list[int] = []

    def main(_: Any, context: DurableContext) -> Any:
        ran.append(1)
        if len(ran) == 1:
            world.advance(60)  # nobody has heard of its worker for the time of a lease
        return context.step(lambda _: "done")

    worker = serve(main=main)
    arn = world.begin()
    worker.run()
    world.advance(60)
    worker.run()
    state = world.state(arn)
    assert (state.status, state.result, len(ran)) == (ExecutionStatus.SUCCEEDED, '"done"', 2)
