"""A real server is told to stop in every way there is, also while it is slow: memory is lost only when the operator insists."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from perdure.api.server import answers
from perdure.core.config import Settings
from perdure.core.stop import StopReport
from perdure.db.embedded import EmbeddedPostgres
from perdure.sdk import Workspace
from perdure.wire.node import MemoryFate
from tests.e2e.live import DEADLINE_S, Answer, Live, machine_of, serving, shell, until

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /run/count; sleep 0.1; done"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(PERDURE_CHECKPOINT_INTERVAL_S="0") as live:
        yield live


@pytest.fixture
def workspace(live: Live) -> Iterator[Workspace]:
    """With a program that has something to lose."""
    made = live.workspace("counter")
    made.commands.run(COUNTER, background=True)
    shell(made, "until [ -s /run/count ]; do sleep 0.1; done; echo here > /dev/shm/kept")
    yield made
    live.ok("rm", "--yes", made.id)


def settings(live: Live) -> Settings:
    return Settings(home=live.home, url=None, api_key=None)


def ended(process: subprocess.Popen[bytes]) -> Answer:
    out, err = process.communicate(timeout=DEADLINE_S)
    return Answer(process.returncode, out, err)


def check_kept(live: Live, workspace: Workspace) -> None:
    live.ok("up", "--detach")
    woken = Workspace.connect(workspace.id, client=live.client)
    assert woken.report is not None
    assert (woken.report.memory.value, woken.report.memory_reason) == (MemoryFate.KEPT.value, "")
    assert shell(woken, "cat /dev/shm/kept") == "here"
    before = int(shell(woken, "cat /run/count"))
    shell(woken, f"until [ $(cat /run/count) -gt {before} ]; do sleep 0.1; done")


def waits(live: Live, pid: int) -> bool:
    told = StopReport.read(settings(live).stop_file, pid)
    return told is not None and told.waiting == ("counter",)


def test_ctrl_c_in_the_terminal_does_not_reach_the_machines(live: Live, workspace: Workspace) -> None:
    live.ok("down")
    server = live.start("up")
    until(lambda: answers(settings(live).api_socket))
    assert shell(workspace, "cat /dev/shm/kept") == "here"
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGHUP):  # impatience, and a terminal that is closed
        os.killpg(server.pid, number)
    assert ended(server).code == 0
    check_kept(live, workspace)


@pytest.mark.long
def test_a_slow_machine_is_waited_for_and_down_can_be_asked_again(live: Live, workspace: Workspace) -> None:
    pid, machine = live.pid(), machine_of(live, workspace)
    os.kill(machine, signal.SIGSTOP)
    first = live.start("down", "--json")
    until(lambda: waits(live, pid))
    assert not answers(settings(live).api_socket)
    second = live.start("down")
    until(lambda: "still putting workspaces to sleep" in live.server_log)
    os.kill(machine, signal.SIGCONT)
    assert ended(first).json == {"pid": pid, "hibernated": 1, "left": []}
    answer = ended(second)
    assert (answer.code, answer.text) == (0, "Stopped; 1 workspace was hibernated."), answer
    check_kept(live, workspace)


@pytest.mark.long
def test_a_database_that_is_killed_during_the_stop_costs_nothing(live: Live, workspace: Workspace) -> None:
    pid, machine = live.pid(), machine_of(live, workspace)
    os.kill(machine, signal.SIGSTOP)
    down = live.start("down", "--json")
    until(lambda: waits(live, pid))
    postmaster = EmbeddedPostgres(live.home).pid()
    assert postmaster is not None
    os.kill(postmaster, signal.SIGKILL)
    os.kill(machine, signal.SIGCONT)
    assert ended(down).json == {"pid": pid, "hibernated": 1, "left": []}
    check_kept(live, workspace)


def test_who_insists_is_told_what_it_cost(live: Live, workspace: Workspace) -> None:
    pid, machine = live.pid(), machine_of(live, workspace)
    os.kill(machine, signal.SIGSTOP)
    waiting = live.start("down")
    until(lambda: waits(live, pid))
    insisting = live.run("down", "--now", "--json")
    assert insisting.code == 1
    (left,) = insisting.json["left"]
    assert (left["name"], left["workspace_id"], left["lost"]) == ("counter", workspace.id, True)
    assert left["why"] == "The server was told not to wait for it."
    answer = ended(waiting)
    assert answer.code == 1
    assert "counter was not put to sleep, what its memory held since its last snapshot is lost" in answer.text
    assert "workspace counter " in live.server_log and "was not put to sleep" in live.server_log
    live.ok("up", "--detach")
    woken = Workspace.connect(workspace.id, client=live.client)
    assert woken.report is not None and woken.report.memory.value == MemoryFate.LOST.value
