"""AWS's durable SDK, unmodified, in ``perdure worker`` against a real server: every primitive, and what dies on the way."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.core.ids import DEFAULT_TENANT
from perdure.runs.protocol import ExecutionStatus
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY
from tests.integration.worker.conftest import Start
from tests.integration.worker.stage import RealService, Started, advance, begin, ended, is_gone, notes, pids_in
from tests.integration.worker.test_plain import eventually

HOUR_S = 3600


@pytest.fixture(params=["memory", "database"])
def real(request: pytest.FixtureRequest, server: FakeServer) -> Iterator[RealService | None]:
    """None: the service in memory; else the one over PostgreSQL."""
    if request.param == "memory":
        yield None
        return
    with RealService(server) as made:
        yield made


def waits(run: Started, execution_id: str) -> None:
    """Until an invocation of it has ended to wait."""
    run.event("ended", execution_id=execution_id, result="waits")


def test_every_primitive(server: FakeServer, real: RealService | None, worker: Start, tmp_path: Path) -> None:
    """Waits hold no process: between two invocations nothing of it runs (durable: rule 3, fault 7)."""
    run = worker("durable:everything", "plain:double", "--concurrency", "2")
    functions = run.event("registered")["functions"]
    assert [(one["name"], one["durable"]) for one in functions] == [("everything", True), ("double", False)]
    execution_id = begin(server, "everything", {"n": 1})
    for _ in range(4):  # the wait, the retry, and twice the condition
        waits(run, execution_id)
        advance(server, HOUR_S, real)
    waits(run, execution_id)
    (callback_id,) = notes(tmp_path, "callback")
    server.run(lambda: server.services.executions.complete_callback(DEFAULT_TENANT, callback_id, "yes"))
    waits(run, execution_id)
    advance(server, HOUR_S, real)  # nobody answers the other one
    found = json.loads(ended(server, execution_id).result or "null")
    assert found == {
        "asked": "yes",
        "step": 2,
        "retried": 2,
        "polled": 3,
        "mapped": [10, 20, 30],
        "parallel": ["a", "b"],
        "child": "inner",
        "nobody": "CallbackTimeoutError",
        "invoked": 8,
    }
    run.event("ended", execution_id=execution_id, result="succeeded")


@pytest.mark.parametrize(("once", "result", "times"), [(False, "survived", 2), (True, "interrupted: StepInterruptedError", 1)])
def test_a_process_that_is_killed_in_a_step(
    server: FakeServer, worker: Start, tmp_path: Path, once: bool, result: str, times: int
) -> None:
    """An at-least-once step runs again, an at-most-once step never does; what was done before stays done (peers: row 30).
    Over TCP, with a key that the handler's own client knows nothing of."""
    by_tcp = {"PERDURE_URL": server.url, "PERDURE_API_KEY": KEY}
    run = worker("durable:dies_in_a_step", "--concurrency", "1", environment=by_tcp)
    run.event("registered")
    execution_id = begin(server, "dies_in_a_step", {"once": once, "first": "dies"})
    run.event("ended", execution_id=execution_id, result="raised", error_type="Runtime.ExitError")
    advance(server, HOUR_S)
    assert json.loads(ended(server, execution_id).result or "") == result
    assert (len(notes(tmp_path, "deadly")), len(notes(tmp_path, "before"))) == (times, 1)


def test_a_zombie_is_killed_and_another_invocation_goes_on(server: FakeServer, worker: Start, tmp_path: Path) -> None:
    """Its lease ends while it hangs: the server gives the execution to others, and the worker ends what it still runs
    (durable: fault 19)."""
    server.executions.lease_s = 4.0
    run = worker("durable:hangs_in_a_step", "--concurrency", "2")
    run.event("registered")
    execution_id = begin(server, "hangs_in_a_step")
    eventually(lambda: notes(tmp_path, "hung"))
    (zombie,) = pids_in(tmp_path, "hung")
    advance(server, 5)
    run.event("ended", execution_id=execution_id, invocation=1, result="over")
    eventually(lambda: is_gone(zombie))
    advance(server, HOUR_S)
    assert json.loads(ended(server, execution_id).result or "") == "done"


def test_a_worker_that_is_killed(server: FakeServer, real: RealService | None, worker: Start, tmp_path: Path) -> None:
    """Steps that were done stay done; another worker goes on when the lease is over (durable: fault 2)."""
    first = worker("durable:hangs_in_a_step", "--concurrency", "1")
    first.event("registered")
    execution_id = begin(server, "hangs_in_a_step")
    eventually(lambda: notes(tmp_path, "hung"))
    first.signal(signal.SIGKILL)
    first.exit_code()
    eventually(lambda: all(is_gone(pid) for pid in pids_in(tmp_path, "hung")))
    second = worker("durable:hangs_in_a_step", "--concurrency", "1")
    second.event("registered")
    advance(server, 31, real)
    advance(server, HOUR_S, real)
    assert json.loads(ended(server, execution_id).result or "") == "done"


def test_a_worker_that_was_paused_past_its_lease(server: FakeServer, worker: Start, tmp_path: Path) -> None:
    """When it goes on, it learns that what it runs is over, and ends it: the other worker's result stands."""
    server.executions.lease_s = 4.0
    first = worker("durable:hangs_in_a_step", "--concurrency", "1")
    first.event("registered")
    execution_id = begin(server, "hangs_in_a_step")
    eventually(lambda: notes(tmp_path, "hung"))
    (zombie,) = pids_in(tmp_path, "hung")
    first.signal(signal.SIGSTOP)
    second = worker("durable:hangs_in_a_step", "--concurrency", "1")
    second.event("registered")
    advance(server, 5)
    advance(server, HOUR_S)
    assert json.loads(ended(server, execution_id).result or "") == "done"
    assert not is_gone(zombie)
    first.signal(signal.SIGCONT)
    first.event("ended", execution_id=execution_id, invocation=1, result="over")
    eventually(lambda: is_gone(zombie))
    assert json.loads(ended(server, execution_id).result or "") == "done"


def test_a_poison_execution_ends_and_the_worker_serves_on(server: FakeServer, worker: Start, tmp_path: Path) -> None:
    """It is tried a few times, and then ends with its last error (durable: rule 9)."""
    run = worker("durable:poison", "plain:double", "--concurrency", "1")
    run.event("registered")
    execution_id = begin(server, "poison")
    for number in range(1, 6):
        run.event("ended", execution_id=execution_id, invocation=number, result="raised")
        advance(server, HOUR_S)
    told = ended(server, execution_id)
    assert told.status is ExecutionStatus.FAILED and told.error is not None and len(notes(tmp_path, "poison")) == 5
    assert told.error.error_type == "Runtime.ExitError" and "exit code 9" in (told.error.error_message or "")
    good: dict[str, Any] = json.loads(ended(server, begin(server, "double", {"n": 3})).result or "")
    assert good["doubled"] == 6


def test_a_server_that_starts_again_in_the_middle(server: FakeServer, worker: Start, tmp_path: Path) -> None:
    """The worker waits until it is there, and loses nothing of what it was given."""
    run = worker("durable:everything", "plain:double", "--concurrency", "1")
    run.event("registered")
    execution_id = begin(server, "everything", {"n": 1})
    waits(run, execution_id)
    server.stop()
    run.event("server-away")
    server.start()
    run.event("server-back")
    for _ in range(4):
        advance(server, HOUR_S)
        waits(run, execution_id)
    assert notes(tmp_path, "callback")
