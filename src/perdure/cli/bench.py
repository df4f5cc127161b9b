"""``perdure bench SUITE``: runs a suite of ``perdure.demo`` and prints its rows (DESIGN section 7)."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perdure.cli.output import complain
from perdure.core.errors import InvalidRequest, PerdureError

if TYPE_CHECKING:
    from perdure.demo.stats import Row

SUITES = ("wake", "snapshots", "serve", "runs")


def run(suite: str, *, as_json: bool, samples: int | None = None) -> int:
    """Exit code 0 when the suite ran (goals that were missed are in the rows), 1 when it could not, 130 after Ctrl-C."""
    console = Console(stderr=True, highlight=False)
    try:
        if suite not in SUITES:
            raise InvalidRequest(f"There is no benchmark suite {suite!r}.", hint=f"The suites are: {', '.join(SUITES)}.")
        measure = suite_module(suite)

        with console.status("") as status:

            def say(what: str) -> None:
                status.update(escape(what))

            rows = asyncio.run(measure.run(say, samples or measure.SAMPLES))
    except PerdureError as error:
        complain(error, as_json=as_json)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; everything the benchmark started has been put away.\n")
        return 130
    document = {"suite": suite, "host": import_module("perdure.demo.host").host(), "rows": [row.public() for row in rows]}
    if as_json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        Console(highlight=False).print(_table(suite, rows))
    return 0


def suite_module(suite: str) -> ModuleType:
    """The module of a suite, with ``SAMPLES`` and ``run``."""
    return import_module(f"perdure.demo.{suite}")


def _table(suite: str, rows: list[Row]) -> Table:
    table = Table(title=f"bench {suite}", title_justify="left")
    for name, justify in (("what", "left"), ("value", "right"), ("ratio", "right"), ("baseline", "left"), ("goal", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        sign = {True: "[green]✓[/] ", False: "[red]✗[/] ", None: ""}[row.met]
        baseline = f"{row.baseline.value:,.4g}: {row.baseline.what}" if row.baseline else ""
        ratio = (
            ""
            if row.ratio is None
            else f"{row.ratio:.2f}"
            if row.ratio >= 0.1
            else f"1/{1 / row.ratio:.0f}"
            if row.ratio
            else "0"
        )
        table.add_row(
            escape(row.name) if row.value is not None else escape(f"{row.name}: {row.note}"),
            "not measured" if row.value is None else f"{row.value:,.4g} {row.unit}",
            ratio,
            escape(baseline),
            sign + (row.goal.text(row.unit) if row.goal else ""),
        )
    return table
