"""When the agent flushes the guest's disks, and when it knows that there is nothing to flush."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from perdure.guest import flush
from perdure.guest.flush import Flusher
from perdure.guest.loop import Loop

DEADLINE_S = 10.0


@dataclass
class Bench:
    """A loop, what the marks are made of, and a sync that is counted and can be held up."""

    loop: Loop = field(default_factory=Loop)
    used_us: int = 1000
    begun: int = 0
    busy: int = 0
    syncs: int = 0
    began: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    def cpu_us(self) -> int:
        return self.used_us

    def sync(self) -> None:
        self.syncs += 1
        self.began.set()
        assert self.may_end.wait(DEADLINE_S)

    def turn_until(self, condition: Callable[[], bool]) -> None:
        late: list[None] = []
        timer = self.loop.call_later(DEADLINE_S, lambda: late.append(None))
        while not condition() and not late:
            self.loop.turn()
        timer.cancel()
        assert condition()

    def flushed(self, flusher: Flusher) -> None:
        done: list[None] = []
        flusher.flush(lambda: done.append(None))
        self.turn_until(lambda: bool(done))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    made.may_end.set()
    monkeypatch.setattr(os, "sync", made.sync)
    return made


@pytest.fixture
def flusher(bench: Bench) -> Flusher:
    return Flusher(bench.loop, cast("Any", bench), cast("Any", bench))


def test_nothing_is_flushed_twice(bench: Bench, flusher: Flusher) -> None:
    for _ in range(3):
        bench.flushed(flusher)
    assert bench.syncs == 1


def _use_processor(bench: Bench, _flusher: Flusher) -> None:
    bench.used_us += 1


def _begin_file_work(bench: Bench, _flusher: Flusher) -> None:
    bench.begun += 1


def _write_itself(_bench: Bench, flusher: Flusher) -> None:
    flusher.worked()


WRITERS = (_use_processor, _begin_file_work, _write_itself)


@pytest.mark.parametrize("write", WRITERS)
def test_whatever_may_have_written_makes_another_flush(
    bench: Bench, flusher: Flusher, write: Callable[[Bench, Flusher], None]
) -> None:
    bench.flushed(flusher)
    write(bench, flusher)
    bench.flushed(flusher)
    assert bench.syncs == 2


@pytest.mark.parametrize("write", WRITERS)
def test_what_is_written_during_a_flush_is_not_taken_for_flushed(
    bench: Bench, flusher: Flusher, write: Callable[[Bench, Flusher], None]
) -> None:
    bench.may_end.clear()
    done: list[None] = []
    flusher.flush(lambda: done.append(None))
    assert bench.began.wait(DEADLINE_S)
    write(bench, flusher)
    bench.may_end.set()
    bench.turn_until(lambda: bool(done))
    bench.flushed(flusher)
    assert bench.syncs == 2


def test_with_a_hand_at_work_every_flush_is_made(bench: Bench, flusher: Flusher) -> None:
    bench.busy = 1
    bench.flushed(flusher)
    bench.flushed(flusher)
    assert bench.syncs == 2


def test_where_nobody_counts_processor_time_every_flush_is_made(bench: Bench, flusher: Flusher) -> None:
    bench.used_us = 0
    bench.flushed(flusher)
    bench.flushed(flusher)
    assert bench.syncs == 2


def test_a_quiet_moment_after_the_last_end_is_used_once(bench: Bench, flusher: Flusher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "QUIET_S", 0.02)
    for _ in range(5):
        flusher.stir()
    bench.turn_until(lambda: bench.syncs == 1)
    bench.turn_until(lambda: flusher._clean is not None)
    bench.flushed(flusher)
    assert bench.syncs == 1, "the sleep after it finds nothing to do"
