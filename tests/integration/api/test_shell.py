"""``perdure shell`` at a real terminal of this host, against a real server over a fake guest."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from perdure.sdk import Workspace
from tests.fakes.api_server import FakeServer

PROGRAM = [sys.executable, "-m", "perdure.cli.main"]
DEADLINE_S = 60


class Desk:
    """A terminal, and a program that runs at it in the foreground."""

    def __init__(self, server: FakeServer, *words: str, size: tuple[int, int] = (30, 100)) -> None:
        self.master, far = pty.openpty()
        self.far = far  # kept open, so that its settings can be looked at afterwards
        self.resize(*size)
        self.before = termios.tcgetattr(far)
        self.shown = b""
        environment = {**os.environ, "PERDURE_HOME": str(server.settings.home), "TERM": "xterm-256color", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *PROGRAM, "shell", *words], stdin=far, stdout=far, stderr=far, env=environment
        )

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", rows, cols, 0, 0))

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def until(self, pattern: bytes) -> bytes:
        """Read until it shows that; leaves what comes after it."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert select.select([self.master], [], [], deadline - time.monotonic())[0], self.shown
            self.shown += os.read(self.master, 65536)
        seen, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return seen

    def end(self) -> int:
        """Its exit code. What it still says is read, for a full terminal would hold it up."""
        deadline = time.monotonic() + DEADLINE_S
        ended = os.pidfd_open(self.process.pid)
        try:
            while True:
                ready, _, _ = select.select([self.master, ended], [], [], deadline - time.monotonic())
                assert ready, self.shown
                if self.master in ready:
                    self.shown += os.read(self.master, 65536)
                else:
                    return self.process.wait()
        finally:
            os.close(ended)

    @property
    def is_restored(self) -> bool:
        return termios.tcgetattr(self.far) == self.before


@pytest.fixture
def at_desk(server: FakeServer, demo: Workspace) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def sit(*words: str, **fields: tuple[int, int]) -> Desk:
        desks.append(Desk(server, *words, **fields))
        return desks[-1]

    yield sit
    for desk in desks:
        desk.process.kill()
        desk.process.wait()
        os.close(desk.master)
        os.close(desk.far)


def test_a_shell_with_its_size_its_kind_and_its_code(at_desk: Callable[..., Desk]) -> None:
    desk = at_desk("demo", "-e", "A=1", size=(33, 111))
    assert b"Leave it running with ctrl-p ctrl-q." in desk.until(rb"\$ ")
    desk.type(b"size\r")
    desk.until(rb"size\r\n33 111\r\n\$ ")
    desk.resize(40, 120)
    shown = b""
    while b"40 120" not in shown:  # the new size is on its way
        desk.type(b"size\r")
        shown = desk.until(rb"size\r\n\d+ \d+\r\n\$ ")
    desk.type(b"env TERM\renv A\r")
    desk.until(rb"xterm-256color\r\n.*\r\n1\r\n")
    desk.type(b"exit 9\r")
    assert desk.end() == 9
    assert desk.is_restored


def test_ctrl_c_goes_into_the_workspace(at_desk: Callable[..., Desk]) -> None:
    desk = at_desk("demo")
    desk.until(rb"\$ ")
    desk.type(b"hang\r")
    desk.until(rb"hang\r\n")
    desk.type(b"\x03")
    desk.until(rb"\^C\r\n\$ ")
    desk.type(b"\x04")
    assert desk.end() == 0


def test_leaving_and_coming_back(at_desk: Callable[..., Desk], demo: Workspace) -> None:
    desk = at_desk("demo")
    desk.until(rb"\$ ")
    desk.type(b"echo early\r")
    desk.until(rb"\r\nearly\r\n")
    desk.type(b"\x10\x11")
    assert desk.end() == 0
    assert desk.is_restored
    (left,) = demo.pty.list()
    assert left.outcome is None
    assert f"It goes on: 'perdure shell demo --attach {left.exec_id}'.".encode() in desk.shown
    again = at_desk("demo", "--attach", left.exec_id, "--detach-keys", "none", size=(50, 150))
    again.until(rb"\r\nearly\r\n\$ ")
    again.type(b"\x10\x11size\r")
    again.until(rb"\r\n")
    again.type(b"exit 3\r")
    assert again.end() == 3
    (ended,) = demo.pty.list()
    assert ended.pty is not None and (ended.pty.rows, ended.pty.cols) == (50, 150), "(peers: row 28) its size is that of who came"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_program_that_is_ended_leaves_the_shell_running_and_the_terminal_as_it_was(
    at_desk: Callable[..., Desk], demo: Workspace, number: int, code: int
) -> None:
    desk = at_desk("demo")
    desk.until(rb"\$ ")
    desk.process.send_signal(number)
    assert desk.end() == code
    assert desk.is_restored
    (left,) = demo.pty.list()
    assert left.outcome is None


def test_a_screen_that_was_left_in_the_middle_is_put_away(at_desk: Callable[..., Desk]) -> None:
    desk = at_desk("demo")
    desk.until(rb"\$ ")
    other = b"\x1b[?1049h".hex()
    desk.type(f"bytes {other}\r".encode())
    desk.until(rb"\x1b\[\?1049h")
    desk.type(b"\x10\x11")
    assert desk.end() == 0
    assert b"\x1b[?1049l" in desk.shown and b"\x1b[?25h" in desk.shown


def test_a_server_that_is_started_again_is_survived(at_desk: Callable[..., Desk], server: FakeServer) -> None:
    desk = at_desk("demo")
    desk.until(rb"\$ ")
    server.stop()
    server.start()
    (command,) = server.workspaces.world("demo").commands.values()
    server.wait_for(lambda: command.watchers == 1)
    desk.type(b"echo back\r")
    desk.until(rb"\r\nback\r\n")
    desk.type(b"exit\r")
    assert desk.end() == 0


def test_a_workspace_that_is_put_to_sleep_ends_the_sitting(at_desk: Callable[..., Desk], demo: Workspace) -> None:
    desk = at_desk("demo")
    desk.until(rb"\$ ")
    demo.sleep()
    assert desk.end() == 125
    assert b"Error: " in desk.shown and desk.is_restored
    (left,) = demo.pty.list()
    assert left.outcome is None, "the shell sleeps with it, and has woken to be listed"


def test_json_at_the_end(at_desk: Callable[..., Desk]) -> None:
    desk = at_desk("demo", "--json")
    desk.until(rb"\$ ")
    desk.type(b"exit 5\r")
    assert desk.end() == 5
    assert b'"detached": false' in desk.shown and b'"exit_code": 5' in desk.shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], b"There is no workspace"),
        (["demo", "--attach", "exe_none"], b"no command"),
        (["demo", "--detach-keys", "f1"], b"not a key"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_the_terminal_alone(
    at_desk: Callable[..., Desk], words: list[str], said: bytes
) -> None:
    desk = at_desk(*words)
    assert desk.end() == 125
    assert said in desk.shown and desk.is_restored


def test_without_a_terminal_it_says_what_to_use(server: FakeServer, demo: Workspace) -> None:
    environment = {**os.environ, "PERDURE_HOME": str(server.settings.home)}
    done = subprocess.run(
        [*PROGRAM, "shell", "demo"], stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=60, check=False
    )
    assert (done.returncode, b"perdure exec NAME" in done.stderr) == (125, True)
