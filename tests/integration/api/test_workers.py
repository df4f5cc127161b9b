"""The routes of workers over real HTTP: take, beat, answer, fail; who leaves while it waits; and nonsense."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from perdure.core.ids import DEFAULT_TENANT
from perdure.runs.protocol import ExecutionStatus
from perdure.runs.service.model import LEASE_S, NewExecution
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY

BEARER = {"authorization": f"Bearer {KEY}"}
DEADLINE_S = 60


class Client:
    """A worker's requests. ``id`` is its own."""

    def __init__(self, server: FakeServer, http: httpx2.Client) -> None:
        self.server = server
        self.http = http
        self.id = ""

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        return self.http.post(f"/v1/{path}", **({"json": body} if body is not None else {}), **options)

    def register(self, *functions: dict[str, Any]) -> str:
        made = self.post("workers", {"name": "one", "functions": functions or [{"name": "main", "digest": "v1"}]})
        assert made.status_code == 201, made.text
        assert made.json()["lease_s"] == LEASE_S
        self.id = made.json()["worker_id"]
        return self.id

    def begin(self, function: str = "main", input: str | None = None) -> str:
        new = NewExecution(DEFAULT_TENANT, function, input)
        return self.server.run(lambda: self.server.executions.begin(new)).execution_id

    def take(self, wait_s: float = 0) -> Any:
        taken = self.post(f"workers/{self.id}/take", {"wait_s": wait_s})
        assert taken.status_code == 200, taken.text
        return taken.json()["work"]

    def answer(self, work: Any, body: bytes, **params: Any) -> httpx2.Response:
        path = f"executions/{work['execution_id']}/invocations/{work['invocation']}/answer"
        return self.post(path, content=body, params=params, headers={"content-type": "application/json"})

    def fail(self, work: Any, **body: Any) -> httpx2.Response:
        return self.post(f"executions/{work['execution_id']}/invocations/{work['invocation']}/fail", body)

    def status(self, execution_id: str) -> ExecutionStatus:
        return self.server.executions.run_of(execution_id).state.status

    def advance(self, seconds: float) -> None:
        self.server.run(lambda: self.server.executions.advance(seconds))


@pytest.fixture
def worker(server: FakeServer) -> Iterator[Client]:
    with httpx2.Client(base_url=server.url, headers=BEARER, timeout=DEADLINE_S) as http:
        yield Client(server, http)


def test_a_worker_takes_and_answers(worker: Client) -> None:
    worker.register()
    assert worker.take() is None
    execution_id = worker.begin(input='{"n": 1}')
    work = worker.take()
    assert (work["execution_id"], work["function"], work["invocation"]) == (execution_id, "main", 1)
    event = work["event"]
    assert set(event) >= {"DurableExecutionArn", "CheckpointToken", "InitialExecutionState"}
    (operation,) = event["InitialExecutionState"]["Operations"]
    assert operation["ExecutionDetails"] == {"InputPayload": '{"n": 1}'}
    assert isinstance(operation["StartTimestamp"], int), "an invocation's input has milliseconds"
    assert worker.answer(work, b'{"Status": "SUCCEEDED", "Result": "7"}').status_code == 200
    state = worker.server.executions.run_of(execution_id).state
    assert (state.status, state.result) == (ExecutionStatus.SUCCEEDED, "7")
    assert worker.answer(work, b'{"Status": "FAILED"}').status_code == 200, "too late, and nobody minds"
    assert worker.status(execution_id) is ExecutionStatus.SUCCEEDED


@pytest.mark.parametrize(("given", "event"), [(None, {}), ('{"n": 1}', {"n": 1}), ("null", None), ("not json", "not json")])
def test_a_function_that_is_not_durable(worker: Client, given: str | None, event: Any) -> None:
    worker.register({"name": "main", "digest": "v1", "durable": False})
    execution_id = worker.begin(input=given)
    work = worker.take()
    assert work["event"] == event
    assert worker.answer(work, b'{"sum": 2}', durable="false").status_code == 200
    assert worker.server.executions.run_of(execution_id).state.result == '{"sum": 2}'


@pytest.mark.parametrize(
    ("body", "durable"),
    [
        (b"nonsense", "true"),
        (b"", "true"),
        (b'"text"', "true"),
        (b'{"Status": "DONE"}', "true"),
        (b'{"Status": "FAILED", "Result": "1"}', "true"),
        (b"nonsense", "false"),
        (b"\xff", "false"),
    ],
)
def test_what_is_no_answer_ends_the_execution(worker: Client, body: bytes, durable: str) -> None:
    worker.register({"name": "main", "digest": "v1", "durable": durable == "true"})
    execution_id = worker.begin()
    assert worker.answer(worker.take(), body, durable=durable).status_code == 200
    state = worker.server.executions.run_of(execution_id).state
    assert state.status is ExecutionStatus.FAILED and state.error is not None
    assert state.error.error_type == "InvalidParameterValueException"


def test_an_answer_may_be_larger_than_other_bodies(worker: Client) -> None:
    worker.register()
    execution_id = worker.begin()
    result = "x" * (6 << 20)
    assert worker.answer(worker.take(), json.dumps({"Status": "SUCCEEDED", "Result": result}).encode()).status_code == 200
    assert worker.server.executions.run_of(execution_id).state.result == result
    declared = http.client.HTTPConnection("127.0.0.1", int(worker.server.url.rpartition(":")[2]), timeout=DEADLINE_S)
    declared.putrequest("POST", "/v1/executions/exn_none/invocations/1/answer")
    for name, value in (*BEARER.items(), ("content-length", str(33 << 20))):
        declared.putheader(name, value)
    declared.endheaders()
    refused = declared.getresponse()
    assert (refused.status, json.load(refused)["error"]["code"]) == (413, "body_too_large")
    declared.close()


def test_a_function_that_raises_is_invoked_again_with_what_it_said(worker: Client) -> None:
    worker.register()
    execution_id = worker.begin()
    told = {"error_type": "ValueError", "error_message": "no", "stack_trace": ["a", "b"]}
    assert worker.fail(worker.take(), failure="raised", **told).status_code == 200
    error = worker.server.executions.run_of(execution_id).state.last_error
    assert error is not None
    assert (error.error_type, error.error_message, error.stack_trace) == ("ValueError", "no", ("a", "b"))
    worker.advance(10)
    assert worker.take()["invocation"] == 2


def test_what_a_worker_gives_back_is_offered_at_once(worker: Client) -> None:
    worker.register()
    worker.begin()
    assert worker.fail(worker.take(), failure="returned").status_code == 200
    assert worker.take()["invocation"] == 2


def test_beats_keep_a_lease_and_tell_what_is_over(worker: Client) -> None:
    worker.register()
    worker.begin()
    work = worker.take()
    flight = {"execution_id": work["execution_id"], "invocation": 1}
    other = {"execution_id": "exn_none", "invocation": 3}
    for _ in range(3):
        worker.advance(LEASE_S * 0.8)
        assert worker.post(f"workers/{worker.id}/beat", {"flights": [flight, other]}).json() == {"over": [other]}
    worker.advance(LEASE_S + 1)
    assert worker.post(f"workers/{worker.id}/beat", {"flights": [flight]}).json() == {"over": [flight]}


def test_who_waits_has_it_as_soon_as_it_is_there(worker: Client) -> None:
    worker.register()
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(worker.take(wait_s=DEADLINE_S)))
    waiting.start()
    execution_id = worker.begin()
    waiting.join(DEADLINE_S)
    assert [one["execution_id"] for one in found] == [execution_id]


def take_request(worker_id: str) -> bytes:
    body = b'{"wait_s": 60}'
    head = f"POST /v1/workers/{worker_id}/take HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_who_hangs_up_takes_nothing(worker: Client, server: FakeServer) -> None:
    """What comes later is for whoever still asks."""
    worker.register()
    waiters = len(server.executions._changed._waiters)  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=DEADLINE_S) as caller:
        caller.sendall(take_request(worker.id))
        server.wait_for(lambda: len(server.executions._changed._waiters) > waiters)  # type: ignore[attr-defined]
    server.wait_for(lambda: len(server.executions._changed._waiters) == waiters)  # type: ignore[attr-defined]
    execution_id = worker.begin()
    assert worker.take()["execution_id"] == execution_id


def test_what_was_taken_for_one_who_has_hung_up_is_given_back(
    worker: Client, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is offered again at once, and not when a lease ends of which nobody knows."""
    worker.register()
    execution_id = worker.begin()
    waits, has_taken = threading.Event(), threading.Event()
    take = server.executions.take

    async def late(*given: Any) -> Any:
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # in the moment in which there is something
            return await take(*given)
        finally:
            has_taken.set()

    monkeypatch.setattr(server.executions, "take", late)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=DEADLINE_S) as caller:
        caller.sendall(take_request(worker.id))
        assert waits.wait(DEADLINE_S)
    assert has_taken.wait(DEADLINE_S)
    monkeypatch.undo()
    server.wait_for(lambda: server.executions.run_of(execution_id).state.invocation is None)
    work = worker.take()
    assert (work["execution_id"], work["invocation"]) == (execution_id, 2)


def test_a_server_that_stops_lets_nobody_wait(worker: Client, server: FakeServer) -> None:
    worker.register()
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(worker.take(wait_s=DEADLINE_S)))
    waiting.start()
    server.wait_for(lambda: bool(server.executions._changed._waiters))  # type: ignore[attr-defined]
    server.stop()
    waiting.join(DEADLINE_S)
    server.start()
    assert found == [None]


def test_functions_are_listed(worker: Client) -> None:
    worker.register(
        {"name": "b", "digest": "v1"}, {"name": "a", "digest": "v2", "timeout_s": 5, "durable": False, "concurrency": 2}
    )
    found = worker.http.get("/v1/functions").json()["functions"]
    assert [(one["name"], one["workers"], one["durable"], one["concurrency"]) for one in found] == [
        ("a", 1, False, 2),
        ("b", 1, True, None),
    ]
    assert worker.http.delete(f"/v1/workers/{worker.id}").status_code == 200
    assert [one["workers"] for one in worker.http.get("/v1/functions").json()["functions"]] == [0, 0]
    left = worker.post(f"workers/{worker.id}/take", {"wait_s": 0})
    assert (left.status_code, left.json()["error"]["code"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("workers", {"functions": []}),
        ("workers", {"functions": [{"name": "with space", "digest": "v1"}]}),
        ("workers", {"functions": [{"name": "f", "digest": ""}]}),
        ("workers", {"functions": [{"name": "f", "digest": "v1", "timeout_s": 0}]}),
        ("workers", {"functions": [{"name": "f", "digest": "v1", "concurrency": 0}]}),
        ("workers", {"functions": [{"name": "f", "digest": "v1"}, {"name": "f", "digest": "v2"}]}),
        ("workers", {"functions": [{"name": "f", "digest": "v1", "colour": "red"}]}),
        ("workers/wrk_1/take", {"wait_s": -1}),
        ("workers/wrk_1/take", {"wait_s": 61}),
        ("workers/wrk_1/beat", {"flights": [{"execution_id": "", "invocation": 1}]}),
        ("workers/wrk_1/beat", {"flights": [{"execution_id": "e", "invocation": 0}]}),
        ("executions/e/invocations/0/fail", {"failure": "raised"}),
        ("executions/e/invocations/1/fail", {"failure": "lost"}),
        ("executions/e/invocations/one/fail", {"failure": "raised"}),
    ],
)
def test_nonsense_is_refused(worker: Client, path: str, body: Any) -> None:
    refused = worker.post(path, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_request"), refused.text


def test_what_is_not_there(worker: Client) -> None:
    for path, body in (
        ("workers/wrk_none/take", {"wait_s": 0}),
        ("workers/wrk_none/beat", {}),
        ("executions/exn_none/invocations/1/answer", {"Status": "PENDING"}),
        ("executions/exn_none/invocations/1/fail", {"failure": "raised"}),
    ):
        refused = worker.post(path, body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found"), refused.text
