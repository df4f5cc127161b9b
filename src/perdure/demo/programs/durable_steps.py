"""Durable steps with AWS's SDK as it is, over HTTP, for ``perdure bench runs``. Prints one JSON document.

    durable_steps.py URL KEY ACCESS_KEY_ID SECRET_ACCESS_KEY STEPS HISTORY

It is the smallest worker there can be. The last figure: an execution of HISTORY steps fails once behind them; what is measured is
from asking for its next invocation to the step after them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import boto3  # type: ignore[import-untyped]
import httpx2
from aws_durable_execution_sdk_python import durable_execution

RESULT = "x" * 200
MARK: dict[str, float] = {}
CONTEXT = SimpleNamespace(
    aws_request_id="request",
    function_name="bench",
    function_version="$LATEST",
    invoked_function_arn="arn:aws:lambda:us-east-1:000000000000:function:bench",
    memory_limit_in_mb="128",
    log_group_name="bench",
    log_stream_name="bench",
    client_context=None,
    identity=None,
    tenant_id=None,
    get_remaining_time_in_millis=lambda: 600_000,
)


class Died(BaseException):
    """As if the process had ended: the SDK takes an exception for the function's own answer."""


def some(event: Any, context: Any) -> float:
    begun = time.perf_counter()
    for number in range(event["steps"]):
        context.step(lambda _: RESULT, name=f"s{number}")
    return time.perf_counter() - begun


def long(event: Any, context: Any) -> str:
    for number in range(event["steps"]):
        context.step(lambda _: RESULT, name=f"s{number}")
    if not MARK:
        MARK["died"] = 1.0
        raise Died

    def last(_: object) -> str:
        MARK["replayed"] = time.perf_counter()
        return RESULT

    return str(context.step(last, name="last"))


class Worker:
    def __init__(self, url: str, key: str) -> None:
        self.http = httpx2.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120)
        functions = [{"name": "some", "digest": "1"}, {"name": "long", "digest": "1"}]
        self.id = self._post("/v1/workers", {"functions": functions})["worker_id"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def begin(self, function: str, steps: int) -> None:
        self._post("/v1/executions", {"function": function, "input": {"steps": steps}})

    def invoke(self, handler: Callable[[Any, Any], Any]) -> Any:
        """The next invocation, to its end; what the handler returned, None where it raised."""
        work = self._post(f"/v1/workers/{self.id}/take", {"wait_s": 60})["work"]
        path = f"/v1/executions/{work['execution_id']}/invocations/{work['invocation']}"
        try:
            output = handler(work["event"], CONTEXT)
        except Died:
            self._post(f"{path}/fail", {"failure": "returned"})
            return None
        self.http.post(f"{path}/answer", content=json.dumps(output)).raise_for_status()
        return output


def main(words: list[str]) -> None:
    url, key, access_key_id, secret = words[:4]
    steps, history = map(int, words[4:])
    logging.getLogger("aws_durable_execution_sdk_python").setLevel(logging.CRITICAL)
    pair = {"aws_access_key_id": access_key_id, "aws_secret_access_key": secret}
    client = boto3.client("lambda", endpoint_url=url, region_name="us-east-1", **pair)
    steadily, again = (durable_execution(function, boto3_client=client) for function in (some, long))
    worker = Worker(url, key)
    worker.begin("some", 5)  # the first request of all is slow
    worker.invoke(steadily)
    worker.begin("some", steps)
    alone_s = float(worker.invoke(steadily)["Result"])
    worker.begin("long", history)
    worker.invoke(again)
    begun = time.perf_counter()
    worker.invoke(again)
    found = {"alone_ms": alone_s * 1000 / steps, "replay_ms": (MARK["replayed"] - begun) * 1000}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
