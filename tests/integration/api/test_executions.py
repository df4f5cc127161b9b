"""Durable executions over real HTTP and through the SDK: the routes for operators, and what they do with bad input."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest

from perdure.core.errors import (
    AlreadyExists,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
)
from perdure.runs import engine
from perdure.runs import protocol as runs
from perdure.sdk import (
    AsyncClient,
    Client,
    ExecutionFailed,
    ExecutionRunning,
    ExecutionStopped,
    ExecutionTimedOut,
)
from perdure.wire import public
from tests.fakes.api_server import FakeServer
from tests.fakes.lived_executions import Lives
from tests.fakes.workspaces import KEY
from tests.integration.api.played import Played, error_of, http, worker

__all__ = ["http", "worker"]  # the fixtures


def test_words_are_those_of_the_engine() -> None:
    """Clients do not import the engine, so its enums are written twice."""
    pairs: list[tuple[Any, Any]] = [
        (public.ExecutionStatus, runs.ExecutionStatus),
        (public.OperationStatus, runs.OperationStatus),
        (public.OperationType, runs.OperationType),
        (public.CodeRule, engine.CodeRule),
        (public.PauseReason, engine.PauseCause),
        (public.StandingReason, engine.Reason),
    ]
    for ours, theirs in pairs:
        assert {one.value for one in ours} == {one.value for one in theirs}, ours
    assert public.executions.LONGEST_S == runs.LONGEST_S


# ---------------------------------------------------------------------------------------------------------------------- start


@pytest.mark.usefixtures("worker")
def test_a_name_makes_a_start_idempotent(client: Client) -> None:
    """(peers: idempotent create by name)"""
    first = client.executions.start("greet", {"name": "Ada"}, name="order-7")
    again = client.executions.start("greet", {"name": "Ada"}, name="order-7")
    assert (first.is_new, again.is_new, again.id, again.arn) == (True, False, first.id, first.arn)
    with pytest.raises(AlreadyExists):
        client.executions.start("greet", {"name": "Grace"}, name="order-7")
    assert client.executions.start("greet").id != client.executions.start("greet").id


def test_what_a_function_gets_is_the_json_that_was_given(client: Client, worker: Played) -> None:
    given = {"ä": [1, 2.5, None, True, "\u0000\n😀", 2**70]}
    client.executions.start("greet", given)
    event = worker.do(lambda lives: lives.take()).event
    payload = event.initial_execution_state.operations[0].execution_details.input_payload
    assert json.loads(payload) == given
    assert "ä" in payload, "not blown up by escapes"
    nothing = client.executions.start("greet")
    event = worker.do(lambda lives: lives.take()).event
    assert event.initial_execution_state.operations[0].execution_details.input_payload is None
    info = nothing.refresh()
    assert (info.input, info.input_bytes) == (None, None)


def test_what_a_lone_surrogate_is_in_json_stays_json(http: httpx2.Client, worker: Played) -> None:
    content = b'{"function": "greet", "input": "\\ud800"}'
    made = http.post("/executions", content=content, headers={"content-type": "application/json"})
    assert made.status_code == 201, made.text
    shown = http.get(f"/executions/{made.json()['execution_id']}").json()
    assert (shown["input"], shown["input_is_text"]) == ('"\\ud800"', True), "what no answer can carry is shown as its text"
    event = worker.do(lambda lives: lives.take()).event
    assert event.initial_execution_state.operations[0].execution_details.input_payload == '"\\ud800"'


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"{}", "function"),
        (b'{"function": "with space"}', "function"),
        (b'{"function": "greet", "name": "with space"}', "name"),
        (b'{"function": "greet", "name": ""}', "name"),
        (b'{"function": "greet", "timeout_s": 0}', "timeout_s"),
        (b'{"function": "greet", "timeout_s": 31622401}', "timeout_s"),
        (b'{"function": "greet", "priority": "high"}', "priority"),
        (b'{"function": "greet", "key": ""}', "key"),
        (b'{"function": "greet", "key": "a\\u0000b"}', "key"),
        (b'{"function": "greet", "code": "newest"}', "code"),
        (b'{"function": "greet", "colour": "red"}', "colour"),
        (b'{"function": "greet", "input": NaN}', "NaN"),
        (b'{"function": "greet", "input": [1e999]}', "infinite"),
        (b"[]", "valid"),
    ],
)
def test_a_start_that_is_wrong_starts_nothing(http: httpx2.Client, body: bytes, complaint: str) -> None:
    refused = http.post("/executions", content=body, headers={"content-type": "application/json"})
    assert error_of(refused) == (422, "invalid_request")
    assert complaint in refused.json()["error"]["message"]
    assert http.get("/executions").json() == {"executions": [], "next_cursor": None}


@pytest.mark.usefixtures("worker")
def test_what_is_larger_than_other_bodies_fits_up_to_its_own_limit(client: Client) -> None:
    """(peers: row 27)"""
    large = client.executions.start("greet", "x" * (5 << 20))
    assert large.refresh().input_bytes == (5 << 20) + 2
    with pytest.raises(PayloadTooLarge):
        client.executions.start("greet", "x" * (17 << 20))
    assert len([*client.executions.list()]) == 1


@pytest.mark.usefixtures("worker")
def test_nesting_without_an_end_is_no_defect(http: httpx2.Client) -> None:
    for depth in (200, 100_000):
        body = b'{"function": "greet", "input": ' + b"[" * depth + b"]" * depth + b"}"
        answer = http.post("/executions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in {201, 422}, answer.text
        if answer.status_code == 201:
            assert http.get(f"/executions/{answer.json()['execution_id']}").status_code == 200


def test_a_function_that_nobody_serves(client: Client) -> None:
    with pytest.raises(NotFound):
        client.executions.start("nobody")


@pytest.mark.parametrize("given", [float("nan"), {1, 2}, object(), "\ud800", datetime(2026, 1, 1, tzinfo=UTC)])
def test_what_is_no_json_is_told_before_anything_is_sent(client: Client, given: Any) -> None:
    with pytest.raises(InvalidRequest, match="The input is not JSON"):
        client.executions.start("greet", given)
    with pytest.raises(InvalidRequest, match="The result is not JSON"):
        client.callbacks.succeed("id", given)


# ------------------------------------------------------------------------------------------------------------------------ look


def test_it_is_found_by_id_arn_and_its_newest_name(client: Client, worker: Played) -> None:
    first = worker.do(lambda lives: lives.succeed("order-1"))
    other = Lives(worker._lives.executions, function="other")
    worker.do(lambda _: other.serve())
    newest = worker.do(lambda _: other.begin("order-1"))
    assert client.executions.get(first).id == first
    assert client.executions.get("order-1").id == newest
    assert client.executions.get(client.executions.get(first).arn).id == first


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    "ref", ["absent", "exn_0", "a%2Fb", "a b", "%2e%2e", "ä", "x" * 65, "arn:aws:lambda:us-east-1:000000000000:function:f"]
)
@pytest.mark.parametrize("rest", ["", "/result", "/history", "/operations"])
def test_a_reference_to_nothing(http: httpx2.Client, ref: str, rest: str) -> None:
    found = http.get(f"/executions/{ref}{rest}")
    assert found.status_code in {404, 422}, found.text
    assert found.json()["error"]["message"].endswith(".")


def test_the_sdk_asks_for_no_other_path(client: Client) -> None:
    for ref in ("", ".", "..", "a/b", "../keys", "a b"):
        with pytest.raises(InvalidRequest, match="is not an execution's id"):
            client.executions.get(ref)
    for callback_id in ("", ".", ".."):
        with pytest.raises(InvalidRequest, match="is not a callback's id"):
            client.callbacks.succeed(callback_id)


def test_what_became_of_it(client: Client, worker: Played) -> None:
    info = client.executions.get(worker.do(lambda lives: lives.succeed("order-1"))).info
    assert (info.name, info.function, info.status.value, info.result) == ("order-1", "greet", "SUCCEEDED", {"hello": "Ada"})
    assert (info.input, info.input_bytes, info.result_bytes) == ({"name": "Ada"}, 15, 16)
    assert (info.standing.reason.value, info.invocations, info.code_began) == ("ended", 1, "v1")
    assert info.ended_at is not None and info.ended_at >= info.started_at
    assert info.times_out_at is None


@pytest.mark.parametrize("text", ["{not json", "NaN", "[1e999]", '"\\ud800"', ""])
def test_a_result_that_is_no_json_is_shown_as_text(client: Client, worker: Played, text: str) -> None:
    info = client.executions.get(worker.do(lambda lives: lives.succeed(result=text))).info
    assert (info.result, info.result_is_text, info.result_bytes) == (text, True, len(text))


def test_an_error_is_as_its_function_told_it(client: Client, worker: Played) -> None:
    failed = client.executions.get(worker.do(lambda lives: lives.fail()))
    with pytest.raises(ExecutionFailed, match="failed: ValueError: no such person") as caught:
        failed.result()
    error = caught.value
    assert (error.error_type, error.error_message, error.execution_id) == ("ValueError", "no such person", failed.id)
    assert error.stack_trace == ["main.py, line 7"]
    assert (error.code, error.retryable, error.ambiguous) == ("execution_failed", False, False)


def test_lists_in_pages_and_by_what_they_are(client: Client, http: httpx2.Client, worker: Played) -> None:
    ids = [worker.do(lambda lives, at=at: lives.succeed(f"order-{at}")) for at in range(5)]
    waits = worker.do(lambda lives: lives.ask("review-1"))
    assert [one.execution_id for one in client.executions.list()] == [waits, *ids[::-1]]
    assert [one.execution_id for one in client.executions.list(oldest_first=True)] == [*ids, waits]
    assert [one.name for one in client.executions.list(status="RUNNING")] == ["review-1"]
    assert len([*client.executions.list(status=["RUNNING", "SUCCEEDED"])]) == 6
    assert [one.execution_id for one in client.executions.list(name="order-3")] == [ids[3]]
    assert [*client.executions.list(function="other")] == []
    now = datetime.now(UTC)
    assert [*client.executions.list(started_after=now + timedelta(hours=1))] == []
    assert len([*client.executions.list(started_before=now + timedelta(hours=1))]) == 6
    seen, query = [], {"limit": "2"}
    while True:
        page = http.get("/executions", params=query).json()
        seen += [one["execution_id"] for one in page["executions"]]
        assert len(page["executions"]) <= 2
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert seen == [waits, *ids[::-1]]


@pytest.mark.parametrize(
    "query",
    [
        *({"limit": limit} for limit in ("0", "1001", "x")),
        {"cursor": "nonsense"},
        {"status": "ASLEEP"},
        {"started_after": "yesterday"},
        {"started_before": "2026-01-01T00:00:00"},
        {"oldest_first": "perhaps"},
        {"name": "x" * 257},
    ],
)
def test_a_question_that_is_wrong(http: httpx2.Client, query: dict[str, str]) -> None:
    assert error_of(http.get("/executions", params=query)) == (422, "invalid_request")


def test_a_time_without_its_offset_is_told(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="without its offset"):
        [*client.executions.list(started_after=datetime(2026, 1, 1))]  # noqa: DTZ001 - the mistake itself


def test_history_is_awss_with_times_for_people(client: Client, http: httpx2.Client, worker: Played) -> None:
    execution = client.executions.get(worker.do(lambda lives: lives.ask("review-1")))
    events = [*execution.history()]
    assert [one["EventType"] for one in events] == ["ExecutionStarted", "CallbackStarted", "InvocationCompleted"]
    assert [one["EventId"] for one in events] == [1, 2, 3]
    started = datetime.fromisoformat(events[0]["EventTimestamp"])
    assert started.tzinfo is not None and started == execution.info.started_at
    assert events[0]["ExecutionStartedDetails"]["Input"] == {"Payload": '{"name": "Ada"}'}
    assert events[1]["CallbackStartedDetails"]["CallbackId"]
    bare = [*execution.history(newest_first=True, data=False)]
    assert [one["EventId"] for one in bare] == [3, 2, 1]
    assert bare[-1]["ExecutionStartedDetails"]["Input"] == {"Truncated": True}
    first = http.get("/executions/review-1/history", params={"limit": 2}).json()
    rest = http.get("/executions/review-1/history", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert ([*first["events"], *rest["events"]], rest["next_cursor"]) == (events, None)
    assert error_of(http.get("/executions/review-1/history", params={"cursor": "x"})) == (422, "invalid_request")


def test_operations_are_all_there_are_and_in_pages(client: Client, http: httpx2.Client, worker: Played) -> None:
    execution = client.executions.get(worker.do(lambda lives: lives.retry_within("order-1")))
    itself, people, look, write = execution.operations()
    assert (itself.type.value, itself.payload) == ("EXECUTION", '{"name": "Ada"}')
    assert (people.sub_type, people.status.value, people.replay_children) == ("Map", "STARTED", False)
    assert (look.parent_id, look.status.value, look.payload, look.attempts) == (people.id, "SUCCEEDED", '["Ada"]', 1)
    assert (write.status.value, write.attempts) == ("PENDING", 1)
    assert write.error is not None and (write.error.type, write.error.message) == ("OSError", "no paper")
    assert write.due_at is not None and write.due_at > write.started_at
    page = http.get("/executions/order-1/operations", params={"limit": 3}).json()
    last = http.get("/executions/order-1/operations", params={"limit": 3, "cursor": page["next_cursor"]}).json()
    assert [one["id"] for one in (*page["operations"], *last["operations"])] == [itself.id, "m", "m-1", "m-2"]
    assert last["next_cursor"] is None
    standing = execution.refresh().standing
    assert (standing.reason.value, standing.timer_at) == ("timer", write.due_at)


# ------------------------------------------------------------------------------------------------------------------------ wait


def test_an_end_wakes_who_waits_for_it(server: FakeServer, worker: Played) -> None:
    import asyncio

    execution_id = worker.do(lambda lives: lives.begin("order-1"))

    async def both() -> Any:
        async with AsyncClient(settings=server.settings) as client:
            waiting = asyncio.ensure_future((await client.executions.get(execution_id)).result(30))
            done = asyncio.to_thread(worker.do, self_succeed)
            return (await asyncio.gather(waiting, done))[0]

    async def self_succeed(lives: Lives) -> None:
        output = runs.InvocationOutput(status=runs.InvocationStatus.SUCCEEDED, result='{"hello": "Ada"}')
        await lives.answer(await lives.take(), output)

    assert asyncio.run(both()) == {"hello": "Ada"}


def test_a_wait_that_is_over_first_says_so_and_ends_nothing(client: Client, worker: Played) -> None:
    """A wait's limit is not the execution's (peers: row 26)."""
    execution = client.executions.get(worker.do(lambda lives: lives.ask("review-1")))
    with pytest.raises(ExecutionRunning, match=r"is RUNNING after 0.01 s; it goes on\.") as caught:
        execution.wait(0.01)
    assert (caught.value.execution_id, caught.value.retryable) == (execution.id, False)
    assert execution.refresh().status.value == "RUNNING"


def test_other_ends_have_errors_of_their_own(client: Client, worker: Played) -> None:
    stopped = client.executions.start("greet")
    stopped.stop("nobody wants it", error_type="Cancelled")
    with pytest.raises(ExecutionStopped, match="was stopped: Cancelled: nobody wants it") as caught:
        stopped.result()
    assert isinstance(caught.value, ExecutionFailed)
    late = client.executions.start("greet", timeout_s=60)
    assert late.refresh().times_out_at is not None
    worker.advance(61)
    with pytest.raises(ExecutionTimedOut):
        late.result()


@pytest.mark.usefixtures("worker")
def test_how_long_may_be_waited(http: httpx2.Client, client: Client) -> None:
    client.executions.start("greet", name="order-1")
    for wait_s in ("-1", "61", "x", "nan"):
        assert error_of(http.get("/executions/order-1/result", params={"wait_s": wait_s})) == (422, "invalid_request")
    answer = http.get("/executions/order-1/result").json()
    assert (answer["ended"], answer["status"], answer["result"]) == (False, "RUNNING", None)


@pytest.mark.usefixtures("worker")
def test_a_server_that_stops_keeps_nobody_waiting(server: FakeServer, client: Client) -> None:
    import asyncio

    client.executions.start("greet", name="order-1")

    async def waiting() -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
            asked = asyncio.ensure_future(http.get("/v1/executions/order-1/result", params={"wait_s": 60}))
            await asyncio.to_thread(server.wait_for, lambda: bool(server.executions._changed._waiters))  # type: ignore[attr-defined]
            await asyncio.to_thread(server.stop)
            return await asked

    try:
        answer = asyncio.run(waiting())
    finally:
        server.start()
    assert error_of(answer) == (503, "unavailable")
