"""Commands on a pseudo-terminal: shells that people, and programs that play people, type into.

Its output is one stream, kept and attached to like any other: what is kept is what a client that comes later sees first. Several
clients see and type into the same terminal; the last that told its size decides it. A client that does not read loses old output
and holds up nobody, for a terminal waits for the quickest of its readers only.

The terminal ends with its process: what that left behind has no terminal any more, as after a lost line.
"""

from __future__ import annotations

import errno
import os
import signal
import termios

from perdure.guest import linux
from perdure.guest.execs import Command, Stdin
from perdure.wire.guest.ops import TERMINAL_MAX, Sub

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop, Timer
    from perdure.guest.world import World

_IUTF8 = 0o40000  # a backspace deletes a character and not a byte
_END_OF_INPUT = b"\x04"
_LOOK_S = 1.0


def _checked(rows: object, cols: object) -> tuple[int, int]:
    for value in (rows, cols):
        if type(value) is not int or not 1 <= value <= TERMINAL_MAX:
            raise ValueError(f"{value!r} is not a number of rows or columns (1 to {TERMINAL_MAX}).")
    assert isinstance(rows, int) and isinstance(cols, int)
    return rows, cols


class Terminal(Command):
    """One command on a terminal of its own. Raises ValueError for a size that is none."""

    def __init__(self, loop: Loop, world: World, spec: dict[str, Any], ended: Callable[[Command], None]) -> None:
        self._size = _checked(spec.get("rows"), spec.get("cols"))
        super().__init__(loop, world, spec, ended)
        self._is_login = spec.get("argv") is None and spec.get("shell") is None
        if self._is_login:
            self.shown = "(shell)"
        self._master = -1
        self._look: Timer | None = None

    # ------------------------------------------------------------------------------------------------------ start

    def _open_pipes(self, ours: list[int], theirs: list[int]) -> None:
        """Ours: the terminal to read, status, the terminal to write."""
        near, far = os.openpty()
        ours.append(near)
        theirs.append(far)
        settings = termios.tcgetattr(far)
        settings[0] |= _IUTF8
        termios.tcsetattr(far, termios.TCSANOW, settings)
        linux.set_terminal_size(near, *self._size)
        theirs += [os.dup(far), os.dup(far)]
        status, told = os.pipe()
        ours.append(status)
        theirs.append(told)
        ours.append(os.dup(near))  # the loop knows one callback for each

    def _take(self, ours: list[int]) -> None:
        self._master, self._status, writing = ours
        self._pipes = {Sub.STDOUT: self._master}
        self._stdin = Stdin(self._loop, writing, self._taken)

    # ----------------------------------------------------------------------------------------------------- output

    def _read(self, sub: int) -> int:
        try:
            return super()._read(sub)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._loop.remove(self._pipes[sub])  # nobody has it open now; somebody may have again, of which nothing tells
            if self._look is None:
                self._look = self._loop.call_later(_LOOK_S, self._look_again)
            return 0

    def _look_again(self) -> None:
        self._look = None
        self.pump()

    def _lag(self, sub: int) -> int:
        return min((attachment.lag(self, sub) for attachment in self.attachments.values()), default=0)

    def _let_go(self, fd: int) -> None:
        os.close(fd)

    # ------------------------------------------------------------------------------------------------------ input

    def end_stdin(self) -> None:
        """What a terminal has for an end of input; a program that reads lines takes it for one at the beginning of a line."""
        self.write_stdin(0, _END_OF_INPUT)

    def resize(self, rows: object, cols: object) -> bool:
        size = _checked(rows, cols)
        if self.exited is None:
            is_new, self._size = size != self._size, size
            linux.set_terminal_size(self._master, *size)
            if not is_new:  # the kernel says nothing then, but the screen of who has just come is empty
                self.signal(signal.SIGWINCH)
        return True

    def signal(self, number: int) -> None:
        """Send a signal to what runs in the foreground."""
        if self.exited is None:
            try:
                os.killpg(self._foreground() or self.group.leader, number)
            except ProcessLookupError:
                pass  # it has just ended

    def _foreground(self) -> int:
        """The foreground process group; 0 when there is none."""
        try:
            group = os.tcgetpgrp(self._master)
        except OSError:
            return 0
        return group if group > 1 else 0

    def kill(self, why: str) -> None:
        """As a closed line does it first: a shell that somebody types into ignores SIGTERM."""
        self.group.signal(signal.SIGHUP)
        super().kill(why)

    # ----------------------------------------------------------------------------------------------------- state

    @property
    def is_at_prompt(self) -> bool:
        is_waiting = self.running and self.exited is None and not self.attachments
        return self._is_login and is_waiting and self._foreground() == self.group.leader

    def info(self) -> dict[str, Any]:
        rows, cols = self._size
        return {**super().info(), "pty": {"rows": rows, "cols": cols}}
