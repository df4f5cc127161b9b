"""Agent programs in real machines: named, invoked while asleep, killed, forked, booted from disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.core.errors import ProgramFailing, ProgramMissing
from perdure.sdk import Workspace
from tests.e2e.live import Live, serving, shell, until

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(1800)]

#: The container contract in thirty lines: counts its calls in memory, streams on request, says that it is busy on request.
AGENT = """
import http.server, json, os, time
state = {"calls": 0, "status": "Healthy", "since": int(time.time())}
class Agent(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(json.dumps({"status": state["status"], "time_of_last_update": state["since"]}).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        state["calls"] += 1
        print("call", state["calls"])
        if "status" in asked:
            state.update(status=asked["status"], since=int(time.time()))
        if asked.get("stream"):
            self.answer(b"".join(b"data: %d\\n\\n" % n for n in range(3)), "text/event-stream")
        else:
            self.answer(json.dumps({"calls": state["calls"], "pid": os.getpid(), "mode": os.environ.get("MODE")}).encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("0.0.0.0", int(os.environ["PORT"])), Agent).serve_forever()
"""


@pytest.fixture(scope="module")
def live(base_image: Path) -> Iterator[Live]:
    with serving(PERDURE_WAKE_DEADLINE_S="600", PERDURE_PROGRAM_DEADLINE_S="240") as server:
        yield server


@pytest.fixture(scope="module")
def workspace(live: Live) -> Workspace:
    made = live.workspace("agent", checkpoint_interval_s=0)
    made.files.write("/srv/agent.py", AGENT)
    made.program.set(["python3", "/srv/agent.py"], envs={"MODE": "test"}, stop_grace_s=5)
    return made


def test_a_workspace_without_a_program_says_so(live: Live) -> None:
    plain = live.workspace("plain")
    with pytest.raises(ProgramMissing):
        plain.invoke({})
    plain.delete()


def test_it_answers_while_its_workspace_was_asleep_with_its_memory_kept(live: Live, workspace: Workspace) -> None:
    first = workspace.invoke({}).json()
    assert first["mode"] == "test"
    workspace.sleep()
    second = workspace.invoke({}).json()
    assert (second["calls"], second["pid"]) == (first["calls"] + 1, first["pid"]), "the same process went on"
    workspace.sleep()
    events = [event.json() for event in workspace.invoke({"stream": True}, stream=True)]
    assert events == [0, 1, 2]
    workspace.sleep()
    by_hand = live.ok("invoke", "agent", "--json", "--payload", "{}").json
    assert by_hand["body"]["calls"] == second["calls"] + 2


def test_its_log_is_read_from_outside_and_survives_sleep(live: Live, workspace: Workspace) -> None:
    calls = workspace.invoke({}).json()["calls"]
    workspace.sleep()
    log = live.ok("logs", "agent").text
    assert log.splitlines()[-1] == f"call {calls}"
    assert "Traceback" not in log, "a connection that was kept would have been reset by the sleep"


def test_killed_it_is_started_again_and_says_how_it_ended(workspace: Workspace) -> None:
    before = workspace.program.show()
    shell(workspace, f"kill -9 {before.pid}")
    answer = workspace.invoke({}).json()
    after = workspace.program.show()
    assert answer["calls"] == 1 and after.pid != before.pid
    assert after.last is not None and (after.last.exit_code, after.last.signal) == (137, 9)
    assert after.restarts == before.restarts + 1


def test_it_says_that_it_is_busy(workspace: Workspace) -> None:
    workspace.invoke({"status": "HealthyBusy"})
    assert workspace.program.show().ping == "HealthyBusy"
    workspace.invoke({"status": "Healthy"})
    assert workspace.program.show().ping == "Healthy"


def test_a_fork_goes_on_with_a_copy_of_its_memory(workspace: Workspace) -> None:
    before = workspace.invoke({}).json()
    (child,) = workspace.fork(1)
    assert isinstance(child, Workspace)
    assert child.invoke({}).json()["calls"] == before["calls"] + 1
    assert workspace.invoke({}).json()["calls"] == before["calls"] + 1
    child.delete()


@pytest.mark.long
def test_a_boot_from_disk_starts_it_again(workspace: Workspace) -> None:
    workspace.invoke({})
    generation = workspace.refresh().generation
    workspace.commands.run("sync; echo b >/proc/sysrq-trigger", background=True)
    until(lambda: workspace.refresh().generation == generation + 1 and workspace.info.state == "running")
    answer = workspace.invoke({}).json()
    assert (answer["calls"], answer["mode"]) == (1, "test")
    assert "call 1" in "".join(chunk.text for chunk in workspace.program.logs()), "a new boot, a new log"


@pytest.mark.long
def test_what_crashes_at_its_start_is_told_with_its_last_words(workspace: Workspace) -> None:
    workspace.program.set(["python3", "-c", "print('loading'); import no_such_module"])
    with pytest.raises(ProgramFailing) as caught:
        workspace.invoke({})
    assert caught.value.details["reason"] == "crashed"
    assert "loading" in caught.value.details["log"] and "no_such_module" in caught.value.details["log"]
    info = workspace.program.show()
    assert info.state == "backing-off" and info.failures >= 3
    workspace.program.unset()
