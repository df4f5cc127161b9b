"""``perdure function``: what workers serve, and what waits for one."""

from __future__ import annotations

import typer

from perdure.cli.output import JsonFlag, ago, dump, markup, note, say, table, wants_json
from perdure.sdk import Client
from perdure.wire import public


def ls(ctx: typer.Context, json: JsonFlag = False) -> None:
    """List functions, who serves them, and which of them have executions but no worker."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = client.executions.functions()
    unserved = [one for one in found if one.executions and not one.workers]
    if as_json:
        dump({"functions": found, "unserved": [one.name for one in unserved]})
        return
    if not found:
        say("No functions. A worker registers those it serves: 'perdure worker module:handler'.")
        return
    headers = ("NAME", "CODE", "WORKERS", "TIMEOUT", "AT A TIME", "EXECUTIONS", "WAITING", "REGISTERED")
    table(headers, [_row(one) for one in found], right=("WORKERS", "TIMEOUT", "AT A TIME", "EXECUTIONS", "WAITING"))
    for one in unserved:
        note(_alarm(one))


def _row(one: public.FunctionInfo) -> tuple[str, ...]:
    return (
        f"[bold]{markup(one.name)}[/]" + ("" if one.durable else " [dim](not durable)[/]"),
        markup(one.digest[:12]),
        str(one.workers) if one.workers else "[red]0[/]",
        f"{one.timeout_s} s",
        "" if one.concurrency is None else str(one.concurrency),
        str(one.executions),
        str(one.waiting),
        ago(one.registered_at),
    )


def _alarm(one: public.FunctionInfo) -> str:
    since = f", the first since {ago(one.waiting_since)}" if one.waiting_since else ""
    return f"[red]![/] No worker serves {markup(one.name)}: {one.executions} open, {one.waiting} waiting for a worker{since}."
