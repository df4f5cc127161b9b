"""``perdure top``: one picture, one document, and the live view in a real terminal that is left as it was found."""

from __future__ import annotations

import re
import signal
import termios
from datetime import timedelta
from typing import Any

import pytest
from rich.console import Console

from perdure.cli import top
from perdure.sdk import Client, Workspace
from perdure.wire import public
from perdure.wire.node import Reading
from perdure.workspaces.model import WorkspaceState
from tests.fakes.api_server import FakeServer
from tests.fakes.memory_guest import MOMENT
from tests.integration.api.terminal import terminal
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]  # the fixture
ALTERNATE, NORMAL = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def busy(client: Client, server: FakeServer) -> None:
    """Three awake, one of which works, one that may not sleep; one asleep, one failed."""
    for number in range(5):
        Workspace.create(f"agent-{number}", client=client)
    Workspace.connect("agent-1", client=client).keep_awake(600)
    Workspace.connect("agent-2", client=client).configure(idle_timeout_s=0)
    Workspace.connect("agent-3", client=client).sleep()
    row = server.workspaces.find_row("agent-4")
    server.workspaces._put(row, state=WorkspaceState.FAILED, state_detail="\x1b[31m[red]The machine died.[/]")
    del server.workspaces.guests[row.id]
    server.workspaces.readings["agent-1"] = Reading(40.0, 10_000, 3_000_000, "c")


def picture(sample: top.Sample, before: top.Sample | None, width: int = 100, height: int | None = 30) -> list[str]:
    out = Console(width=width, force_terminal=False, highlight=False)
    with out.capture() as captured:
        out.print(top.frame(sample, before, height=height))
    return [line.rstrip() for line in captured.get().splitlines()]


def sample_at(client: Client, seconds: float) -> top.Sample:
    taken = top.take(client)
    return top.Sample(MOMENT + timedelta(seconds=seconds), taken.workspaces, taken.meters)


@pytest.mark.usefixtures("busy")
def test_a_picture_says_what_is_awake_and_why(client: Client, server: FakeServer) -> None:
    """(peers: row 13, the reason is shown)"""
    first = sample_at(client, 100)
    server.workspaces.readings["agent-1"] = Reading(43.0, 12_000, 3_400_000, "c")
    lines = picture(sample_at(client, 102), first)
    assert lines[0].endswith("3 running, 1 hibernated, 1 failed")
    assert lines[1] == "awake 1536 MiB  CPU 150 %  out 1.0 kB/s  in 200 kB/s"
    assert lines[3:] == [
        "NAME     STATE        MEMORY    CPU   IDLE      OUT      IN  AWAKE BECAUSE",
        "agent-1  running     512 MiB  150 %  102 s  12.0 kB  3.4 MB  keep-awake, 8 min left",
        "agent-0  running     512 MiB  0.0 %  102 s      0 B     0 B",
        "agent-2  running     512 MiB  0.0 %  102 s      0 B     0 B  it never sleeps",
        "agent-3  hibernated        -      -  102 s        -       -",
        "agent-4  failed            -      -  102 s        -       -  \\x1b[31m[red]The machine died.[/]",
        "q quits",
    ]


@pytest.mark.usefixtures("busy")
def test_a_first_picture_has_the_average_since_the_wake(client: Client) -> None:
    (first, *_) = top.rows(sample_at(client, 80), None)
    assert (first.info.name, first.cpu_percent) == ("agent-1", 50.0)


@pytest.mark.usefixtures("busy")
def test_meters_of_another_generation_make_no_rate(client: Client, server: FakeServer) -> None:
    before = sample_at(client, 100)
    ws = Workspace.connect("agent-1", client=client)
    ws.sleep()
    ws.wake()
    server.workspaces.readings["agent-1"] = Reading(1.0, 10_000, 3_000_000, "c")
    rows = {row.info.name: row for row in top.rows(sample_at(client, 110), before)}
    assert rows["agent-1"].cpu_percent is not None and 0 <= rows["agent-1"].cpu_percent < 10


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(("width", "height"), [(100, 9), (40, 8), (20, 7), (10, 3), (1, 1)])
def test_a_picture_fits_into_its_terminal(client: Client, width: int, height: int) -> None:
    lines = picture(sample_at(client, 10), None, width, height)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(height, top.FRAME_LINES + 1)
    if height == 9:
        assert "and 2 more" in lines


@pytest.mark.usefixtures("busy")
def test_one_document(perdure: Run) -> None:
    told = perdure("top --json").json
    assert told["states"] == {"running": 3, "hibernated": 1, "failed": 1}
    assert told["awake_memory_mib"] == 3 * 512
    (works,) = [one for one in told["workspaces"] if one["name"] == "agent-1"]
    assert (works["cpu_s"], works["sent_bytes"], works["received_bytes"]) == (40.0, 10_000, 3_000_000)
    (asleep,) = [one for one in told["workspaces"] if one["name"] == "agent-3"]
    assert (asleep["memory_mib"], asleep["cpu_s"], asleep["awake_because"]) == (0, None, [])


def test_one_picture_for_a_pipe(perdure: Run) -> None:
    assert re.fullmatch(r"perdure ..:..:..  no workspaces\nawake 0 MiB .*\n\nNAME .*\n", perdure("top --once").out)
    perdure("create demo")
    assert perdure("top").out.splitlines()[4].startswith("demo  running  512 MiB ")
    assert perdure("top --interval 0").code == 2


def test_without_a_server_it_is_one_sentence(perdure: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_URL", "http://127.0.0.1:9")
    for line in ("top", "top --once"):
        answer = perdure(line)
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.startswith("Error: No Perdure server answers at")


# ------------------------------------------------------------------------------------------------------------ in a terminal


def modes(slave: int) -> list[Any]:
    return termios.tcgetattr(slave)


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    ("how", "code"), [("q", 0), ("Q", 0), ("SIGINT", 0), ("SIGTERM", 143)], ids=["q", "Q", "Ctrl-C", "SIGTERM"]
)
def test_however_it_ends_the_terminal_is_as_it_was(server: FakeServer, how: str, code: int) -> None:
    with terminal(server, "top", "--interval", "3600") as screen:
        before = modes(screen.slave)
        screen.until(ALTERNATE, b"agent-1", b"q quits")
        assert modes(screen.slave) != before, "keys are not shown"
        if how.startswith("SIG"):
            screen.process.send_signal(getattr(signal, how))
        else:
            screen.press(how.encode())
        assert screen.end() == code
        assert screen.shown.rstrip().endswith((NORMAL, b"\x1b[?25h")), "the screen of before, with its cursor"
        assert NORMAL in screen.shown and b"\x1b[?25h" in screen.shown
        assert b"Traceback" not in screen.shown
        assert modes(screen.slave) == before


def test_it_lives(server: FakeServer, client: Client) -> None:
    Workspace.create("one", client=client)
    with terminal(server, "top", "--interval", "3600") as screen:
        screen.until(b"one", b"q quits")
        Workspace.create("two", client=client)
        screen.press(b" ")  # any other key: now
        screen.until(b"two")
        server.stop()
        try:
            screen.press(b" ")
            screen.until(b"No Perdure server answers", b"two")
        finally:
            server.start()
        Workspace.create("three", client=client)
        screen.press(b" ")
        screen.until(b"three")
        screen.press(b"q")
        assert screen.end() == 0
    assert public.WorkspaceState.RUNNING in {one.info.state for one in Workspace.list(client=client)}
