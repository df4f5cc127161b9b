"""How large a guest's page cache is, and when a sleep drops it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from perdure.guest import caches
from perdure.guest.flush import Flusher
from perdure.guest.loop import Loop

MEMINFO = "MemTotal: 500000 kB\nActive(file):  1000 kB\nInactive(file):  500 kB\nMapped:  300 kB\nActive(anon): 77 kB\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (MEMINFO, 1200 * 1024),
        (MEMINFO.replace("300", "3000"), 0),
        ("", 0),
        ("Active(file):\nInactive(file): x kB\nMapped: 1 kB\n", 0),
    ],
    ids=["usual", "all mapped", "no meminfo", "odd"],
)
def test_what_can_be_dropped_is_cache_that_nobody_maps(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setattr(caches, "read_file", lambda path: text if path == "/proc/meminfo" else "")
    assert caches.droppable_bytes() == size


def slimmed(monkeypatch: pytest.MonkeyPatch, limit: int, error: OSError | None = None) -> tuple[int, list[str]]:
    wrote: list[str] = []

    def write(path: str, text: str) -> None:
        wrote.append(f"{path} {text}")
        if error is not None:
            raise error

    monkeypatch.setattr(caches, "read_file", lambda _path: MEMINFO)
    monkeypatch.setattr(caches, "write_file", write)
    loop, told = Loop(), list[int]()
    Flusher(loop, cast("Any", None), cast("Any", None)).slim(limit, told.append)
    timer = loop.call_later(10.0, lambda: told.append(-1))
    while not told:
        loop.turn()
    timer.cancel()
    return told[0], wrote


def test_a_cache_over_the_limit_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slimmed(monkeypatch, 1200 * 1024 - 1) == (1200 * 1024, ["/proc/sys/vm/drop_caches 1"])


def test_a_cache_within_the_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slimmed(monkeypatch, 1200 * 1024) == (0, [])


def test_a_kernel_that_drops_nothing_does_not_stop_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slimmed(monkeypatch, 0, PermissionError(13, "no"))[0] == 0
