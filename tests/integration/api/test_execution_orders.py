"""Orders to durable executions, and their callbacks, over real HTTP and through the SDK."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from perdure.core.errors import (
    CallbackClosed,
    Conflict,
    ExecutionEnded,
    NotFound,
)
from perdure.runs import protocol as runs
from perdure.sdk import (
    Client,
)
from perdure.wire import public
from tests.integration.api.played import Played, error_of, http, worker

__all__ = ["http", "worker"]  # the fixtures


# ----------------------------------------------------------------------------------------------------------------------- steer


def test_pause_and_resume(client: Client, worker: Played) -> None:
    execution = client.executions.get(worker.do(lambda lives: lives.begin("order-1")))
    info = execution.pause("the printer is broken", timeout_paused=False)
    assert info.pause is not None
    assert (info.status.value, info.standing.reason.value) == ("PAUSED", "operator")
    assert (info.pause.reason, info.pause.timeout_paused) == ("the printer is broken", False)
    assert info.pause.by is public.PauseReason.OPERATOR
    resumed = execution.resume("it is mended", code="exact")
    assert (resumed.status.value, resumed.pause, resumed.code.value) == ("RUNNING", None, "exact")
    assert execution.resume().status.value == "RUNNING", "what runs goes on"


def test_what_has_ended_takes_no_orders(client: Client, worker: Played) -> None:
    ended = client.executions.get(worker.do(lambda lives: lives.succeed()))
    for order in (ended.stop, ended.pause, ended.resume):
        with pytest.raises(ExecutionEnded):
            order()


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("stop", {"error_type": "x" * 257}),
        ("stop", {"error": "x"}),
        ("pause", {"reason": "x" * 1025}),
        ("pause", {"timeout_paused": "yes"}),
        ("resume", {"code": "newest"}),
        ("retry", {"name": "with space"}),
        ("retry", []),
    ],
)
def test_an_order_that_is_wrong_does_nothing(http: httpx2.Client, client: Client, verb: str, body: Any) -> None:
    client.executions.start("greet", name="order-1")
    assert error_of(http.post(f"/executions/order-1/{verb}", json=body)) == (422, "invalid_request")
    assert client.executions.get("order-1").info.status.value == "RUNNING"


def test_a_retry_resumes_what_is_parked_and_starts_again_what_has_ended(client: Client, worker: Played) -> None:
    parked = client.executions.get(worker.do(lambda lives: lives.begin("order-1")))
    with pytest.raises(Conflict, match="is RUNNING"):
        parked.retry()
    parked.pause()
    again = parked.retry()
    assert (again.id, again.is_new, again.refresh().status.value) == (parked.id, False, "RUNNING")
    started = client.executions.start("greet", {"b": 1, "a": [2]}, timeout_s=60, priority=3, key="printer", code="exact")
    started.stop()
    fresh = started.retry(name="order-2")
    info = fresh.refresh()
    assert fresh.id != started.id and fresh.is_new and info.name == "order-2"
    assert (info.input, info.timeout_s, info.priority, info.key, info.code.value) == (
        {"b": 1, "a": [2]},
        60,
        3,
        "printer",
        "exact",
    )
    assert started.retry(name="order-2").id == fresh.id, "its name makes it idempotent"


def test_deleting(client: Client, worker: Played) -> None:
    running = client.executions.get(worker.do(lambda lives: lives.begin("order-1")))
    with pytest.raises(Conflict):
        running.delete()
    running.stop()
    running.delete()
    with pytest.raises(NotFound):
        client.executions.get(running.id)


# ------------------------------------------------------------------------------------------------------------------- callbacks


def test_callbacks_are_listed_and_completed(client: Client, worker: Played) -> None:
    one = worker.do(lambda lives: lives.ask("review-1", timeout_s=600, heartbeat_s=60))
    worker.do(lambda lives: lives.ask("review-2"))
    listed = client.callbacks.list()
    assert [(found.name, found.function) for found in listed] == [("approval", "greet")] * 2
    (mine,) = client.callbacks.list("review-1")
    assert mine.execution_id == one
    assert mine.due_at is not None and mine.heartbeat_due_at is not None and mine.heartbeat_due_at < mine.due_at
    worker.advance(50)
    client.callbacks.heartbeat(mine.callback_id)
    (beaten,) = client.callbacks.list("review-1")
    assert beaten.heartbeat_due_at is not None and beaten.heartbeat_due_at > mine.heartbeat_due_at
    client.callbacks.succeed(mine.callback_id, {"approved": True})
    assert client.callbacks.list("review-1") == []
    (done,) = [found for found in client.executions.get(one).operations() if found.callback_id]
    assert (done.status.value, json.loads(done.payload or "")) == ("SUCCEEDED", {"approved": True})
    with pytest.raises(CallbackClosed):
        client.callbacks.succeed(mine.callback_id, {"approved": False})
    with pytest.raises(CallbackClosed):
        client.callbacks.heartbeat(mine.callback_id)


def test_a_callback_fails_with_a_word_and_without(client: Client, worker: Played) -> None:
    told, untold = (worker.do(lambda lives, name=name: lives.ask(name)) for name in ("review-1", "review-2"))
    (first,), (second,) = client.callbacks.list(told), client.callbacks.list(untold)
    client.callbacks.fail(first.callback_id, "refused", error_type="Refused")
    client.callbacks.fail(second.callback_id)
    for execution_id, error in ((told, ("Refused", "refused")), (untold, (None, None))):
        (done,) = [one for one in client.executions.get(execution_id).operations() if one.callback_id]
        assert done.status.value == "FAILED"
        assert done.error is not None
        assert (done.error.type, done.error.message) == error


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("callback_id", ["nonsense", "YjEgYSBiIGM=", "b1", "%2F%2F", "AAAA", "YjEgAGEgYiBj"])
@pytest.mark.parametrize("verb", ["succeed", "fail", "heartbeat"])
def test_a_callback_that_is_none(http: httpx2.Client, callback_id: str, verb: str) -> None:
    assert error_of(http.post(f"/callbacks/{callback_id}/{verb}", json={})) == (404, "not_found")


def test_a_guessed_secret_completes_nothing(client: Client, worker: Played) -> None:
    execution_id = worker.do(lambda lives: lives.ask("review-1"))
    with pytest.raises(NotFound):
        client.callbacks.succeed(str(runs.CallbackName(execution_id, "c-1", "guess")))
    assert len(client.callbacks.list("review-1")) == 1


def test_a_callback_with_a_result_that_is_wrong_stays_open(http: httpx2.Client, client: Client, worker: Played) -> None:
    worker.do(lambda lives: lives.ask("review-1"))
    (found,) = client.callbacks.list()
    path = "/callbacks/" + found.callback_id.replace("/", "%2F").replace("+", "%2B")
    headers = {"content-type": "application/json"}
    for verb, body in (("succeed", b'{"result": NaN}'), ("succeed", b'{"results": 1}'), ("fail", b'{"error_message": 1}')):
        assert error_of(http.post(f"{path}/{verb}", content=body, headers=headers)) == (422, "invalid_request")
    assert len(client.callbacks.list()) == 1
    assert http.post(f"{path}/succeed").status_code == 200, "without a body: without a result"
