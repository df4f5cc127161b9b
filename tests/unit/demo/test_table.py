"""The page of numbers is made from a benchmark's JSON and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from perdure.demo.stats import Against, Goal, Row, rows

SCRIPT = Path(__file__).resolve().parents[3] / "bench" / "table.py"


def test_the_page_shows_every_row_its_host_and_a_missed_goal() -> None:
    spec = importlib.util.spec_from_file_location("table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    made = [
        *rows("wake", [50.0], "ms", against=Against("cold boot", [5000.0]), goal=Goal(times=1 / 25)),
        Row("hibernate", 150, "ms", goal=Goal(at_most=100), note="busy"),
        Row("processes", 0, "processes", goal=Goal(at_most=0)),
    ]
    page = table.render({"suite": "wake", "host": {"cpus": 2}, "rows": [row.public() for row in made]})
    assert "| cpus | 2 |" in page
    assert "| wake p50 | 50 ms | 1/100 | 5,000 ms: cold boot | <= 1/25 of baseline | yes |" in page
    assert "| hibernate (busy) | 150 ms |  |  | <= 100 ms | **no** |" in page
    assert "| processes | 0 processes |  |  | <= 0 processes | yes |" in page
