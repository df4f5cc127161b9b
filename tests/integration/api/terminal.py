"""The command line in a pseudo-terminal, as somebody at a keyboard has it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fakes.api_server import FakeServer
from tests.integration.api.test_cli import PROGRAM, environment

DEADLINE_S = 60


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int) -> None:
        self.process, self._master, self.slave = process, master, slave
        self.shown = b""

    def until(self, *texts: bytes) -> None:
        """Read until all of these were shown, each behind what was shown when this was called."""
        begin = len(self.shown)
        while not all(text in self.shown[begin:] for text in texts):
            assert self._more(), f"it ended, and had shown {self.shown[begin:]!r}"

    def _more(self) -> bool:
        readable, _, _ = select.select([self._master], [], [], DEADLINE_S)
        assert readable, f"nothing more came after {self.shown!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # EIO: nobody has the other end any more
            return False
        self.shown += data
        return bool(data)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        while select.select([self._master], [], [], 0)[0] and self._more():
            pass
        return code


@contextmanager
def terminal(server: FakeServer, *words: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (20, 100))
    names = {**environment(server), "TERM": "xterm"}
    process = subprocess.Popen([*PROGRAM, *words], stdin=slave, stdout=slave, stderr=slave, env=names, start_new_session=True)
    try:
        yield Terminal(process, master, slave)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
