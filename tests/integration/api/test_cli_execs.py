"""Commands by key, listed and ended, on the command line."""

from __future__ import annotations

import re

import pytest

from perdure.sdk import Workspace
from tests.fakes.api_server import FakeServer
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]


def test_exec_with_a_key_runs_once(perdure: Run, server: FakeServer) -> None:
    perdure("create demo")
    first = perdure("exec --json --idempotency-key k demo echo hi").json
    assert perdure("exec --json demo --idempotency-key k echo hi").json == first
    assert perdure("exec --idempotency-key k demo echo hi").out == "hi\n"
    other = perdure("exec --json --idempotency-key k demo echo ho")
    assert (other.code, other.error["code"]) == (125, "idempotency_key_reused")
    server.workspaces.world("demo").commands.clear()
    gone = perdure("exec --json --idempotency-key k demo echo hi")
    assert (gone.code, gone.error["code"], gone.error["ambiguous"]) == (125, "forgotten", True)


@pytest.mark.parametrize("limit", ["--run-limit", "--idle-limit"])
def test_each_limit_ends_a_command_and_a_wait_does_not(perdure: Run, demo: Workspace, limit: str) -> None:
    """(peers: row 26)"""
    ended = perdure(f"exec {limit} 0.05 demo hang")
    assert (ended.code, ended.err) == (143, "The command was ended: it ran into its limit of 0.05 s\n")
    waited = perdure("exec --timeout 0.05 demo hang")
    assert (waited.code, "was not stopped" in waited.err) == (125, True)
    assert [one.outcome is None for one in demo.commands.list()] == [False, True]


def test_what_runs_is_listed_signalled_and_ended(perdure: Run, demo: Workspace) -> None:
    assert perdure("ps demo").out == "No commands run in demo.\n"
    job = demo.commands.run("hang", background=True)
    shell = demo.pty.create(30, 100)
    demo.commands.run("exit 3")
    listing = [re.split(" {2,}", line) for line in perdure("ps demo").out.splitlines()]
    assert listing[0] == ["ID", "PID", "STATE", "TERMINAL", "STARTED", "COMMAND"]
    assert [(row[0], row[2], row[-1]) for row in listing[1:]] == [
        (job.exec_id, "running", "hang"),
        (shell.exec_id, "running", "(shell)"),
    ]
    assert listing[2][3] == "30x100"
    assert "exit 3" in perdure("ps demo --all").out
    assert [one["pty"] for one in perdure("ps demo --json").json["execs"]] == [None, {"rows": 30, "cols": 100}]
    assert perdure(f"kill demo {job.exec_id} --signal INT").out == f"{job.exec_id} was sent SIGINT\n"
    assert perdure(f"kill demo {job.exec_id}").out == f"{job.exec_id} is being ended\n"
    assert perdure(f"kill demo {shell.exec_id} --json -s 15").json == {"exec_id": shell.exec_id, "signal": 15}
    assert perdure("ps demo").out == "No commands run in demo.\n"
    assert perdure("kill --json demo exe_none").error["code"] == "not_found"
    for wrong in ("SIGNOPE", "0", "65", "-1"):
        assert perdure(f"kill --json demo {job.exec_id} --signal={wrong}").error["code"] == "invalid_request"
