"""What a woken guest must repair before users' code runs again: clock, randomness, identity (DESIGN D2, D8).

``System`` is the kernel's side of it; tests on a developer's machine use ``DrySystem``, which records instead.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time

from perdure.guest import linux
from perdure.guest.worker import Talk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HOST_KEYS = "/etc/ssh"


class System:
    """The real kernel."""

    def wall_ns(self) -> int:
        """Wall time in nanoseconds since 1970."""
        return time.time_ns()

    def step_clock(self, step_ns: int) -> None:
        time.clock_settime_ns(time.CLOCK_REALTIME, time.time_ns() + step_ns)

    def add_entropy(self, seed: bytes) -> None:
        linux.add_entropy(seed)

    def set_hostname(self, name: str) -> None:
        if socket.gethostname() != name:
            socket.sethostname(name)

    def power_off(self, root: str) -> None:
        """Switch off, the file system at ``root`` whole: its next boot has no journal to replay."""
        self._leave_clean(root)
        linux.power_off()

    def restart(self, root: str) -> None:
        self._leave_clean(root)
        linux.restart()

    @staticmethod
    def _leave_clean(root: str) -> None:
        os.sync()
        try:
            linux.freeze_files(root)
        except OSError as error:  # a damaged or missing disk: its journal is what there is
            sys.stderr.write(f"agent: {root} is not left clean: {error}\n")


class DrySystem(System):
    """For an agent that shares its kernel with others: the clock is an offset, entropy is counted, nothing is switched off."""

    def __init__(self, skew_ns: int) -> None:
        self._skew_ns = skew_ns

    def wall_ns(self) -> int:
        return time.time_ns() + self._skew_ns

    def step_clock(self, step_ns: int) -> None:
        self._skew_ns += step_ns

    def add_entropy(self, seed: bytes) -> None:
        """The host's own generator needs none."""

    def power_off(self, root: str) -> None:
        raise SystemExit(1)

    def restart(self, root: str) -> None:
        raise SystemExit(1)


def clock_step_ns(clock: dict[str, Any], now_ns: int) -> tuple[int, int]:
    """(step, uncertainty) in nanoseconds from what the host knows.

    ``lo_ns`` and ``hi_ns`` bound how far the host's clock is ahead, from an exchange before; ``host_ns``, the host's time when
    it sent this, is another lower bound, for a message takes time but is never early. Without an upper bound the lower one is
    the estimate.
    """
    low = int(clock["host_ns"]) - now_ns
    if clock.get("lo_ns") is not None:
        low = max(low, int(clock["lo_ns"]))
    high = low if clock.get("hi_ns") is None else max(low, int(clock["hi_ns"]))
    return (low + high) // 2, (high - low) // 2


def write_identity(talk: Talk, hostname: str, machine_id: str) -> None:
    """In a worker inside the user's root: make the files of a new identity. Does as much as it can and tells what failed."""
    failed = []
    wanted = (("/etc/hostname", hostname + "\n"), ("/etc/machine-id", machine_id + "\n"), ("/etc/hosts", _hosts(hostname)))
    for path, text in wanted:
        try:
            _replace(path, text)
        except OSError as error:
            failed.append(f"{path}: {error.strerror}")
    talk.say(ok=True, failed=failed, host_keys=_remove_host_keys(failed))


def _hosts(hostname: str) -> str:
    """The user's own hosts file with the line of the old name replaced; a fresh one when there is none."""
    fresh = f"127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    try:
        with open("/etc/hosts", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return fresh
    if not lines:
        return fresh
    kept = [line for line in lines if not line.startswith("127.0.1.1")]
    return "\n".join([*kept, f"127.0.1.1\t{hostname}"]) + "\n"


def _replace(path: str, text: str) -> None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            if file.read() == text:
                return
    except OSError:
        pass  # it will be made
    real = os.path.realpath(path)
    temporary = real + ".perdure"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), 0o444 if path.endswith("machine-id") else 0o644)
    os.rename(temporary, real)


def _remove_host_keys(failed: list[str]) -> bool:
    """Remove ssh host keys, which no two machines may share. True when there were any."""
    try:
        names = [name for name in os.listdir(_HOST_KEYS) if name.startswith("ssh_host_") and "_key" in name]
    except OSError:
        return False
    for name in names:
        path = f"{_HOST_KEYS}/{name}"
        try:
            if stat.S_ISREG(os.lstat(path).st_mode):
                os.unlink(path)
        except OSError as error:
            failed.append(f"{path}: {error.strerror}")
    return bool(names)
