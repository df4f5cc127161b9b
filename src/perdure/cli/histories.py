"""``perdure verify``: every recorded history, hash by hash."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from perdure.cli.output import JsonFlag, Status, dump, markup, say, wants_json
from perdure.cli.progress import Bar
from perdure.sdk import Client
from perdure.wire import public

#: What ``perdure verify`` ends with where there is no history at all.
NOTHING = 2


def verify(ctx: typer.Context, json: JsonFlag = False) -> Status:
    """Check every recorded history, hash by hash: threads of workspaces, and executions. Exits 1 when one was changed.

    The first entry that is wrong is named for each. Exits 2 when there was nothing to check.
    """
    as_json = wants_json(ctx, json)
    found: list[public.HistoryViolation] = []
    done = public.HistoriesEvent(type="done")
    with Client() as client:
        for event in _shown(client.verify_histories(), quiet=as_json):
            if event.violation is not None:
                found.append(event.violation)
                if not as_json:
                    _tell(event.violation)
            done = event
    if as_json:
        checked = {"workspaces": done.workspaces, "executions": done.executions, "entries": done.entries}
        dump({"ok": not found, "checked": checked, "violations": found})
    else:
        _sum_up(done)
    if found:
        return Status(1)
    return Status(0 if done.workspaces + done.executions else NOTHING)


def _shown(events: Iterator[public.HistoriesEvent], *, quiet: bool) -> Iterator[public.HistoriesEvent]:
    """All of them, with the progress on a terminal while they come."""
    with Bar(quiet=quiet) as bar:
        bar.show("Reading")
        for event in events:
            bar.show(f"{event.workspaces} threads and {event.executions} executions, {event.entries} entries")
            yield event


def _tell(violation: public.HistoryViolation) -> None:
    place = f"entry {violation.entry}" if violation.entry else "the row beside it"
    if violation.of == "heads":
        place = "what was signed of all histories"
    say(f"[red]![/] {violation.of} [bold]{markup(violation.id)}[/], {place}: {markup(violation.reason)}")


def _sum_up(done: public.HistoriesEvent) -> None:
    if not done.workspaces + done.executions:
        say("There are no histories to verify.")
        return
    threads = "1 thread" if done.workspaces == 1 else f"{done.workspaces} threads"
    runs = "1 execution" if done.executions == 1 else f"{done.executions} executions"
    outcome = f"[red]{done.violations} changed[/]" if done.violations else "all hold"
    say(f"{threads} and {runs} checked, {done.entries} entries: {outcome}")
