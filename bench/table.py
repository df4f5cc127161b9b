"""Writes a suite's section of docs/benchmarks.md from its JSON:  perdure bench wake --json | python bench/table.py

Sections of other suites stay as they are. Each says which host its numbers belong to; nothing in it is typed by hand but the
words around the table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

Each figure stands beside what was measured with it in the same run: read ratios rather than absolutes. p50 and p95 are
nearest-rank percentiles; goals are judged on the median. `make bench` shows them in the terminal.
"""

SECTION = """
## {suite}

Made by `perdure bench {suite} --json | python bench/table.py`.

| host | |
|---|---|
{host}

| what | value | ratio | baseline | goal | met |
|---|---:|---:|---|---|---|
{rows}
"""

TAILS = {
    "wake": """
*Bare* is the same sequence of QEMU, snapshot and channel steps without control plane, database and HTTP
(`src/perdure/demo/floor.py`); its samples alternate with the product's. The *light script* is 20 execs of `git status`, 5 MB
changed in a live process, and a 1 MB file.
""",
    "snapshots": """
*Bare* and the *light script* are those of `wake`. A branch's delta is the pages of its memory that differ from the image's golden
snapshot.
""",
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    shown = "" if ratio is None else f"{ratio:.2f}" if ratio >= 0.1 or not ratio else f"1/{1 / ratio:.0f}"
    baseline = "" if row["baseline"] is None else f"{_number(row['baseline_value'])} {row['unit']}: {row['baseline']}"
    met = {True: "yes", False: "**no**", None: ""}[row["met"]]
    note = f" ({row['note']})" if row["note"] else ""
    value = "not measured" if row["value"] is None else f"{_number(row['value'])} {row['unit']}"
    return f"| {row['name']}{note} | {value} | {shown} | {baseline} | {row['goal'] or ''} | {met} |"


def render(document: dict[str, Any]) -> str:
    """A suite's section."""
    suite = document["suite"]
    host = "\n".join(f"| {name} | {value} |" for name, value in document["host"].items())
    rows = "\n".join(_row(row) for row in document["rows"])
    return SECTION.format(suite=suite, host=host, rows=rows) + _busy(document["host"]) + TAILS.get(suite, "")


def replace(page: str, suite: str, section: str) -> str:
    """The page with this section in the place of the suite's earlier one, or at its end."""
    found = {part.split("\n", 1)[0]: f"\n## {part}" for part in page.split("\n## ")[1:]}
    return HEAD + "".join({**found, suite: section}.values())


def _busy(host: dict[str, Any]) -> str:
    """A run beside other work is worth less, and the page says so."""
    load, cpus = host.get("load_1min", 0), host["cpus"]
    if load <= 2 * cpus:
        return ""
    return f"\n**The host was busy with other work** (load {load} on {cpus} CPUs): figures are too high, tails most of all.\n"


if __name__ == "__main__":
    told = json.load(sys.stdin)
    DOCUMENT.write_text(replace(DOCUMENT.read_text(), told["suite"], render(told)))
