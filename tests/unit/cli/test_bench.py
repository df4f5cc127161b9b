"""What ``perdure bench`` says in the terminal: every row with its goal, and why one was not measured."""

from __future__ import annotations

import pytest
from rich.console import Console

from perdure.cli import bench
from perdure.demo.host import host
from perdure.demo.stats import Baseline, Goal, Row


def shown(*rows: Row) -> str:
    console = Console(width=200, record=True, file=None, quiet=True)
    with console.capture() as text:
        console.quiet = False
        console.print(bench._table("snapshots", [*rows]))
    return text.get()


def test_each_row_has_its_value_ratio_and_goal() -> None:
    text = shown(Row("fork", 13, "ms", Baseline("bare", 10), Goal(times=1.2)), Row("files", 1, "files"))
    assert "13 ms" in text and "1.30" in text and "✗ <= 1.2 x baseline" in text and "10: bare" in text
    assert "1 files" in text


def test_a_row_that_was_not_measured_says_why() -> None:
    text = shown(Row("cold wake", None, "ms", goal=Goal(times=3), note="it takes root"))
    assert "not measured" in text and "cold wake: it takes root" in text
    assert "✓" not in text and "✗" not in text


def test_every_suite_can_be_loaded_and_has_its_samples() -> None:
    for suite in bench.SUITES:
        module = bench.suite_module(suite)
        assert module.SAMPLES >= 10
        assert callable(module.run)


@pytest.mark.parametrize("works", [False, True])
def test_the_host_says_whether_its_kernel_tells_writes(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.machines.softdirty.works", lambda: works)
    assert host()["soft_dirty"] == works
