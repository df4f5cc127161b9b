"""What stands for the guest's agent in a torture machine: a process, and an init that starts another when it has ended.

Nothing that the guest keeps is lost with it. The host's link sees its end as soon as the event loop looks, and has the next one
then; a call that was sent before it saw that fails, as one whose connection breaks.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess

from perdure.core.errors import MachineDied

DEATH_DEADLINE_S = 30.0


class TortureAgent:
    """Ends with the process that made it, whatever becomes of that: its input ends."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._start()

    def _start(self) -> None:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen([self._token], executable="/bin/cat", stdin=pipe, stdout=nothing)
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self.reconnect)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, and it is dead when this returns."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._ends_within(DEATH_DEADLINE_S)

    @property
    def _is_dead(self) -> bool:
        return self._ends_within(0)

    def _ends_within(self, seconds: float) -> bool:
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def reconnect(self) -> None:
        """Init has started another, if this one is dead, and the link speaks to that."""
        if self._is_dead:
            self._reap()
            self._start()

    def ask(self) -> None:
        """A call. Raises MachineDied when nobody reads it and the link has not seen that yet."""
        if self._is_dead:
            self.reconnect()
            raise MachineDied("The connection to the workspace is gone: its agent was killed.")

    def end(self) -> None:
        """With its machine."""
        self._process.kill()
        self._reap()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
