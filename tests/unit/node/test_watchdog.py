"""The freeze watchdog against real processes and a clock that the test moves."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from perdure.node.watchdog import FreezeWatchdog


class MovableClock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.seconds, UTC)

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as running:
        yield running
        running.kill()


def await_stopped(pid: int) -> None:
    """The kernel says that the process has stopped; a signal is not taken the moment it is sent."""
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def await_continued(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WCONTINUED)


class Changes:
    """What the watchdog reported, with an event a test can wait for."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        self._arrived = threading.Condition()

    def __call__(self, frozen: bool) -> None:
        with self._arrived:
            self.seen.append(frozen)
            self._arrived.notify_all()

    def wait_for(self, expected: list[bool]) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.seen == expected, timeout=10), self.seen


def test_freezes_when_the_lease_was_not_renewed_and_thaws_when_it_is(process: subprocess.Popen[bytes]) -> None:
    clock, changes = MovableClock(), Changes()
    watchdog = FreezeWatchdog(clock, 15.0, lambda: [process.pid], changes)
    watchdog.start(asked_at=clock.seconds)
    try:
        assert changes.seen == []
        clock.seconds += 15.0
        watchdog.renewed(asked_at=clock.seconds - 15.0)  # a late answer to an old request proves nothing new
        changes.wait_for([True])
        assert watchdog.frozen
        await_stopped(process.pid)
        watchdog.renewed(asked_at=clock.seconds)
        changes.wait_for([True, False])
        await_continued(process.pid)
    finally:
        watchdog.close()


def test_time_counts_from_before_the_request(process: subprocess.Popen[bytes]) -> None:
    clock, changes = MovableClock(), Changes()
    watchdog = FreezeWatchdog(clock, 15.0, lambda: [process.pid], changes)
    watchdog.start(asked_at=clock.seconds)
    try:
        asked_at = clock.seconds
        clock.seconds += 14.0
        watchdog.renewed(asked_at=asked_at)
        assert changes.seen == []
        clock.seconds += 1.0
        watchdog.renewed(asked_at=asked_at)
        changes.wait_for([True])
        await_stopped(process.pid)
    finally:
        watchdog.close()
    await_continued(process.pid)  # closing continues what was frozen


def test_a_process_that_is_gone_is_no_error() -> None:
    clock, changes = MovableClock(), Changes()
    with subprocess.Popen(["true"]) as gone:
        pass
    watchdog = FreezeWatchdog(clock, 15.0, lambda: [gone.pid], changes)
    watchdog.start(asked_at=clock.seconds - 15.0)
    changes.wait_for([True])
    watchdog.close()
    assert changes.seen == [True, False]
