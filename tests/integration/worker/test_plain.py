"""``perdure worker`` with functions that are not durable: taking, answering, dying, draining, over a real server."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from perdure.core.ids import DEFAULT_TENANT
from perdure.runs.protocol import ExecutionStatus
from perdure.runs.service.model import Function
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY
from tests.integration.worker.conftest import Start
from tests.integration.worker.stage import DEADLINE_S, advance, begin, ended, is_gone, pids_in

CLIENT = Path(__file__).parents[2] / "unit/worker/runtime_client.py"


def eventually(holds: Callable[[], object]) -> None:
    """Processes and files tell nobody."""
    until = time.monotonic() + DEADLINE_S
    while not holds():
        select.select([], [], [], 0.02)  # leave the processor to others
        assert time.monotonic() < until


def functions(server: FakeServer) -> dict[str, Function]:
    return {one.spec.name: one for one in server.run(lambda: server.executions.functions(DEFAULT_TENANT))}


def test_it_serves_what_it_was_given(server: FakeServer, worker: Start) -> None:
    """Over the Unix socket, without a key; what a handler prints is on stderr, so that stdout is events alone."""
    run = worker("plain:double", "no=plain:refuse", "--name", "laptop", "--timeout", "77", "--limit", "5")
    run.event("registered")
    spec = functions(server)["double"].spec
    assert (spec.timeout_s, spec.is_durable, spec.concurrency, len(spec.digest)) == (77, False, 5, 64)
    good, bad = begin(server, "double", {"n": 21}), begin(server, "no")
    told = json.loads(ended(server, good).result or "")
    assert (told["doubled"], told["request"]) == (42, True) and told["arn"].endswith(":function:double:$LATEST")
    refused = ended(server, bad)
    assert refused.status is ExecutionStatus.FAILED and refused.error is not None
    assert (refused.error.error_type, refused.error.error_message) == ("ValueError", "not this one")
    run.event("ended", execution_id=bad, result="raised", error_type="ValueError")
    run.signal(signal.SIGTERM)
    assert run.exit_code() == 0 and "doubling" in run.stderr and "in refuse" in run.stderr
    assert run.seen[-1]["event"] != "defect" and functions(server)["double"].workers == 0


def test_it_ends_when_nothing_is_left(server: FakeServer, worker: Start) -> None:
    first = worker("plain:double", "--once", "--digest", "v7")
    first.event("stopped")
    assert first.exit_code() == 0 and functions(server)["double"].spec.digest == "v7"
    ids = [begin(server, "double", {"n": n}) for n in range(5)]
    second = worker("plain:double", "--once", "--concurrency", "2")
    assert second.exit_code() == 0
    assert [json.loads(ended(server, one).result or "")["doubled"] for one in ids] == [0, 2, 4, 6, 8]


def test_a_process_that_dies_is_told_and_the_worker_goes_on(server: FakeServer, worker: Start, tmp_path: Path) -> None:
    run = worker("plain:leave", "plain:double", "--concurrency", "1")
    run.event("registered")
    dead, good = begin(server, "leave"), begin(server, "double", {"n": 1})
    told = ended(server, dead)
    assert told.status is ExecutionStatus.FAILED and told.error is not None
    assert told.error.error_type == "Runtime.ExitError" and "exit code 3" in (told.error.error_message or "")
    assert ended(server, good).status is ExecutionStatus.SUCCEEDED
    assert all(is_gone(pid) for pid in pids_in(tmp_path, "left"))


def test_a_function_that_is_too_slow_is_killed(server: FakeServer, worker: Start, tmp_path: Path) -> None:
    """By its own limit, with all that runs in it (peers: row 26)."""
    run = worker("plain:hang", "--timeout", "1")
    run.event("registered")
    execution_id = begin(server, "hang")
    run.event("ended", execution_id=execution_id, result="timed-out")
    eventually(lambda: all(is_gone(pid) for pid in pids_in(tmp_path, "hung")))


def test_a_worker_that_is_killed_leaves_nothing_and_another_one_goes_on(
    server: FakeServer, worker: Start, tmp_path: Path
) -> None:
    """SIGKILL: its processes die with it, and the end of the lease gives the work to others (durable: fault 2)."""
    first = worker("plain:hang_once", "--concurrency", "1")
    first.event("registered")
    execution_id = begin(server, "hang_once")
    eventually(lambda: pids_in(tmp_path, "hung"))
    children = first.children()
    first.signal(signal.SIGKILL)
    first.exit_code()
    eventually(lambda: all(is_gone(pid) for pid in children))
    second = worker("plain:hang_once", "--concurrency", "1")
    second.event("registered")
    advance(server, 31)
    advance(server, 60)
    assert ended(server, execution_id).result == '"done"'


def test_a_drain_gives_back_what_does_not_end(server: FakeServer, worker: Start, tmp_path: Path) -> None:
    first = worker("plain:hang_once", "--concurrency", "1", "--drain-s", "0")
    first.event("registered")
    execution_id = begin(server, "hang_once")
    eventually(lambda: pids_in(tmp_path, "hung"))
    first.signal(signal.SIGTERM)
    first.event("ended", execution_id=execution_id, result="returned")
    assert first.exit_code() == 0 and all(is_gone(pid) for pid in pids_in(tmp_path, "hung"))
    assert worker("plain:hang_once", "--once").exit_code() == 0
    assert ended(server, execution_id).result == '"done"'


def test_an_execution_that_is_stopped_is_killed(server: FakeServer, worker: Start, tmp_path: Path) -> None:
    """What it still did would count for nothing (durable: fault 19). A lease of a few seconds, so that beats come soon."""
    server.executions.lease_s = 2.0
    run = worker("plain:hang")
    run.event("registered")
    execution_id = begin(server, "hang")
    eventually(lambda: pids_in(tmp_path, "hung"))
    server.run(lambda: server.executions.stop(DEFAULT_TENANT, execution_id, None))
    run.event("ended", execution_id=execution_id, result="over")
    eventually(lambda: all(is_gone(pid) for pid in pids_in(tmp_path, "hung")))


def test_a_server_that_is_away_is_waited_for(server: FakeServer, worker: Start) -> None:
    server.stop()
    run = worker("plain:double")
    run.event("server-away")
    server.start()
    run.event("registered")
    server.stop()
    run.event("server-away")
    server.start()
    run.event("server-back")
    assert json.loads(ended(server, begin(server, "double", {"n": 2})).result or "")["doubled"] == 4
    assert [one["event"] for one in run.seen].count("server-away") == 2


def test_an_answer_waits_for_a_server_that_is_away(server: FakeServer, worker: Start, tmp_path: Path) -> None:
    """What ran while the server was away counts, as long as its lease lasts."""
    os.mkfifo(tmp_path / "go")
    run = worker("plain:until_told", "--concurrency", "1")
    run.event("registered")
    execution_id = begin(server, "until_told")
    eventually(lambda: pids_in(tmp_path, "hung"))
    server.stop()
    (tmp_path / "go").write_text("told")
    run.event("server-away")
    server.start()
    run.event("ended", execution_id=execution_id, result="answered")
    assert ended(server, execution_id).result == '"told"' and len(pids_in(tmp_path, "hung")) == 1


def test_a_worker_that_was_forgotten_registers_anew(server: FakeServer, worker: Start) -> None:
    run = worker("plain:double")
    run.event("registered")
    server.reset()
    server.stop()  # its question for work ends with this
    server.start()
    run.event("registered")
    assert ended(server, begin(server, "double", {"n": 2})).status is ExecutionStatus.SUCCEEDED


def test_a_url_with_a_key_that_is_good_and_one_that_is_not(server: FakeServer, worker: Start) -> None:
    run = worker("plain:double", environment={"PERDURE_URL": server.url, "PERDURE_API_KEY": "pdk_wrong"})
    assert run.exit_code() == 1 and json.loads(run.stderr.splitlines()[-1])["error"]["code"] == "unauthenticated"
    run = worker("plain:double", "--once", environment={"PERDURE_URL": server.url, "PERDURE_API_KEY": KEY})
    assert run.exit_code() == 0


def test_a_runtime_client_of_any_language(server: FakeServer, worker: Start) -> None:
    """It speaks Lambda's Runtime API; it dies with the worker, whatever it does at that time."""
    run = worker("--exec", f"{sys.executable} {CLIENT} serve", "--function", "main", "--plain", "--concurrency", "1")
    run.event("registered")
    told = json.loads(ended(server, begin(server, "main", {"n": 1})).result or "")
    assert (told["event"], told["function"]) == ({"n": 1}, "main")
    refused = ended(server, begin(server, "main", {"do": "error"}))
    assert refused.error is not None and (refused.error.error_type, refused.error.error_message) == ("Oops", "bad")
    hanging = begin(server, "main", {"do": "hang"})
    run.event("invoked", execution_id=hanging)
    children = run.children()
    run.signal(signal.SIGKILL)
    run.exit_code()
    assert children
    eventually(lambda: all(is_gone(pid) for pid in children))


def test_what_cannot_be_served_is_said_in_a_sentence(worker: Start) -> None:
    run = worker("nosuchmodule:main")
    assert run.exit_code() == 1
    error = json.loads(run.stderr.splitlines()[-1])["error"]
    assert error["code"] == "worker_start_failed" and "No module named 'nosuchmodule'" in error["message"]
    run = worker("--exec", "true", "--function", "main")
    assert run.exit_code() == 1 and "before it asked for an invocation" in run.stderr
    assert worker("plain.double").exit_code() == 1
