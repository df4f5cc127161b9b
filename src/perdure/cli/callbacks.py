"""``perdure callback``: what durable executions wait for from outside."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure.cli.executions import parsed
from perdure.cli.output import JsonFlag, ago, dump, markup, say, table, wants_json
from perdure.cli.timeline import until
from perdure.core.clock import SystemClock
from perdure.sdk import Client
from perdure.wire import public

CallbackId = Annotated[str, typer.Argument(metavar="CALLBACK", help="As 'perdure callback ls' shows it.", show_default=False)]


def ls(
    ctx: typer.Context,
    execution: Annotated[
        str | None, typer.Argument(metavar="EXECUTION", help="Only those of this one: id, ARN or name.", show_default=False)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """List callbacks that are still open, the oldest first."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = client.callbacks.list(execution)
    if as_json:
        dump({"callbacks": found})
    elif not found:
        say("No callback is open.")
    else:
        table(("NAME", "EXECUTION", "FUNCTION", "OPEN SINCE", "UNTIL", "ID"), [_row(one) for one in found])


def _row(one: public.CallbackInfo) -> tuple[str, ...]:
    now, times = SystemClock().now(), [at for at in (one.due_at, one.heartbeat_due_at) if at is not None]
    return (
        f"[bold]{markup(one.name or '')}[/]",
        one.execution_id,
        markup(one.function),
        ago(one.started_at),
        until(min(times), now) if times else "",
        markup(one.callback_id),
    )


def succeed(
    ctx: typer.Context,
    callback: CallbackId,
    result: Annotated[
        str | None, typer.Argument(metavar="RESULT", help="JSON; - reads it from stdin; without it: none.", show_default=False)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Complete a callback with a result."""
    as_json = wants_json(ctx, json)
    value = parsed(result, "RESULT")
    with Client() as client:
        client.callbacks.succeed(callback, value)
    _told(callback, "succeeded", "It has succeeded; its execution goes on", as_json=as_json)


def fail(
    ctx: typer.Context,
    callback: CallbackId,
    message: Annotated[str | None, typer.Option("--message", "-m", help="What went wrong.", metavar="TEXT")] = None,
    error_type: Annotated[str | None, typer.Option("--type", help="The error's type.", metavar="TEXT")] = None,
    json: JsonFlag = False,
) -> None:
    """Complete a callback with an error, which its function sees."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        client.callbacks.fail(callback, message, error_type=error_type)
    _told(callback, "failed", "It has failed; its execution goes on", as_json=as_json)


def beat(ctx: typer.Context, callback: CallbackId, json: JsonFlag = False) -> None:
    """Say that somebody still works on a callback: its heartbeat's timeout begins anew."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        client.callbacks.heartbeat(callback)
    _told(callback, "beaten", "Its heartbeat's timeout begins anew", as_json=as_json)


def _told(callback: str, what: str, sentence: str, *, as_json: bool) -> None:
    if as_json:
        dump({"callback_id": callback, "done": what})
    else:
        say(sentence)
