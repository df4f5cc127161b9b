"""``perdure demo``: tells the story of ``perdure.demo`` on the terminal, or as one JSON document."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perdure.cli.output import complain
from perdure.core.errors import PerdureError

if TYPE_CHECKING:
    from perdure.demo.steps import Figure, Step


class Teller:
    """Says each step as it happens. On a terminal the running step has a spinner."""

    def __init__(self, console: Console, *, silent: bool) -> None:
        self._console = console
        self._silent = silent
        self._status = console.status("")

    def begun(self, step: Step) -> None:
        if not self._silent and self._console.is_terminal:
            self._status.update(escape(step.name))
            self._status.start()

    def ended(self, step: Step) -> None:
        if self._silent:
            return
        self._status.stop()
        sign = "[green]✓[/]" if step.ok else "[red]✗[/]"
        self._console.print(f"{sign} [bold]{escape(step.name)}[/] [dim]{step.seconds:.1f} s[/]")
        if step.detail:
            self._console.print(f"  {escape(step.detail)}")


def run(*, as_json: bool) -> int:
    """Exit code 0 when every step held, 1 when one did not, 130 after Ctrl-C. Steps go to stdout, an error to stderr."""
    from perdure.demo import story
    from perdure.demo.steps import Steps

    console = Console(highlight=False)
    teller = Teller(console, silent=as_json)
    steps = Steps(teller.begun, teller.ended)
    figures: list[Figure] = []
    problem: PerdureError | None = None
    try:
        figures = asyncio.run(story.run(steps))
    except PerdureError as error:
        problem = error
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; everything the demo started has been put away.\n")
        return 130
    if as_json:
        document = {
            "ok": problem is None,
            "steps": [step.public() for step in steps.done],
            "figures": [figure.public() for figure in figures],
        }
        sys.stdout.write(json.dumps(document) + "\n")
    elif problem is None:
        console.print(_table(figures))
    if problem is not None:
        complain(problem, as_json=as_json)
    return 0 if problem is None else 1


def _table(figures: list[Figure]) -> Table:
    table = Table(title="This host, just now", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("of a cold boot", justify="right")
    for figure in figures:
        value = f"{figure.value / 2**20:,.1f} MiB" if figure.unit == "bytes" else f"{figure.value:,.0f} {figure.unit}"
        share = "" if figure.cold_boots is None else "1" if figure.cold_boots == 1 else f"1/{1 / figure.cold_boots:.0f}"
        table.add_row(figure.name, value, share)
    return table
