"""The page of numbers is made from a benchmark's JSON and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from perdure.demo.stats import Against, Goal, Row, rows

SCRIPT = Path(__file__).resolve().parents[3] / "bench" / "table.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return table


def made(suite: str, *found: Row) -> dict[str, Any]:
    return {"suite": suite, "host": {"cpus": 2}, "rows": [row.public() for row in found]}


def test_a_section_shows_every_row_its_host_and_a_missed_goal() -> None:
    page = script().render(
        made(
            "wake",
            *rows("wake", [50.0], "ms", against=Against("cold boot", [5000.0]), goal=Goal(times=1 / 25)),
            Row("hibernate", 150, "ms", goal=Goal(at_most=100), note="busy"),
            Row("processes", 0, "processes", goal=Goal(at_most=0)),
            Row("cold", None, "ms", goal=Goal(at_most=0), note="it takes root"),
        )
    )
    assert "| cpus | 2 |" in page
    assert "| wake p50 | 50 ms | 1/100 | 5,000 ms: cold boot | <= 1/25 of baseline | yes |" in page
    assert "| hibernate (busy) | 150 ms |  |  | <= 100 ms | **no** |" in page
    assert "| processes | 0 processes |  |  | <= 0 processes | yes |" in page
    assert "| cold (it takes root) | not measured |  |  | <= 0 ms |  |" in page


def test_a_suite_replaces_its_own_section_only() -> None:
    table = script()
    page = SCRIPT.parents[1].joinpath("docs", "benchmarks.md").read_text()
    wake = page[page.index("\n## wake") :].split("\n## snapshots")[0]
    for value in (1, 2):
        page = table.replace(page, "snapshots", table.render(made("snapshots", Row("fork", value, "ms"))))
    assert page.count("## snapshots") == page.count("## wake") == 1
    assert "| fork | 2 ms |" in page and "| fork | 1 ms |" not in page
    assert wake in page
    assert page.startswith("# Benchmarks\n")
