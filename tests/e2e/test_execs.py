"""Commands and terminals in a real machine: they outlive clients, sleep and wake, and are never run twice for one key."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from perdure.core.errors import Forgotten, KeyReused
from perdure.sdk import CommandResult, Pty, Workspace
from tests.e2e.live import DEADLINE_S, Live, serving, shell, until

pytestmark = [pytest.mark.qemu, pytest.mark.slow]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def shared(live: Live) -> Workspace:
    return live.workspace("execs")


def shows(pty: Pty, pattern: bytes) -> bytes:
    seen = b""
    for data in pty:
        seen += data
        if re.search(pattern, seen):
            return seen
    raise AssertionError((pattern, seen))


def test_what_ran_before_a_sleep_runs_after_it_and_no_byte_of_it_is_lost(shared: Workspace) -> None:
    """(peers: row 13) And a client that was cut off goes on where it was."""
    handle = shared.commands.run("n=0; while [ ! -e /tmp/stop ]; do n=$((n+1)); echo $n; done; exit 5", background=True)
    seen = b""
    for output in handle.follow(None):
        seen += output.data
        if len(seen) > 1000:
            break
    shared.sleep()
    report = shared.wake()
    assert handle.exec_id in report.execs_running
    shell(shared, "touch /tmp/stop")
    result = shared.commands.attach(handle.exec_id).wait()
    assert result.exit_code == 5
    numbers = result.stdout.split()
    if not result.truncated:  # it may have written more than is kept while nobody read
        assert numbers[0] == "1"
    whole = [int(number) for number in numbers[1:]]
    assert whole == list(range(whole[0], whole[0] + len(whole)))


def test_a_key_runs_once_across_sleep_and_is_forgotten_by_a_rewind_not_repeated(shared: Workspace) -> None:
    shared.checkpoint("before")
    line = "echo ran >> /root/runs; wc -l < /root/runs"

    def run() -> CommandResult:
        return shared.commands.run(line, idempotency_key="pay")

    first = run()
    assert (first.stdout, first.exit_code) == ("1\n", 0)
    shared.sleep()
    assert run() == first
    with pytest.raises(KeyReused):
        shared.commands.run("true", idempotency_key="pay")
    shared.rewind("before")
    with pytest.raises(Forgotten, match="not known any more") as caught:
        run()
    assert caught.value.ambiguous
    assert shell(shared, "cat /root/runs 2>/dev/null || echo none") == "none"


def test_a_terminal_survives_sleep_with_what_it_has_shown_and_whoever_is_in_it(shared: Workspace) -> None:
    with shared.pty.create(30, 100) as pty:
        pty.send("cd /tmp; NAME=kept; echo be''fore\r")
        shows(pty, rb"before\r\n")
    shared.sleep()
    with shared.pty.connect(pty.exec_id) as again:
        shows(again, rb"before\r\n")
        again.resize(40, 120)
        again.send("echo $PWD $NAME; stty size\r")
        shows(again, rb"/tmp kept\r\n40 120\r\n")
        again.send("exit 6\r")
        assert again.wait().exit_code == 6


@pytest.mark.long
def test_a_shell_that_nobody_is_at_does_not_keep_its_workspace_awake(live: Live) -> None:
    workspace = live.workspace("idler", idle_timeout_s=5)
    with workspace.pty.create() as pty:
        pty.send("echo rea''dy\r")
        shows(pty, rb"ready\r\n")
    until(lambda: workspace.refresh().state == "hibernated", DEADLINE_S)
    with workspace.pty.connect(pty.exec_id) as again:
        shows(again, rb"ready\r\n")
        assert workspace.report is not None and workspace.report.memory == "kept"
        again.kill()
        assert again.wait().end == "killed"
    workspace.delete()
