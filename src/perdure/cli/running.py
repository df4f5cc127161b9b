"""``perdure ps`` and ``perdure kill``: the commands and terminals of a workspace, from outside."""

from __future__ import annotations

import signal as signals
from typing import Annotated

import typer

from perdure.cli.output import JsonFlag, ago, dump, markup, say, table, wants_json
from perdure.cli.workspaces import Name, find, tell_losses
from perdure.core.errors import InvalidRequest
from perdure.wire import public
from perdure.wire.node import ExecEnd

SHOWN_COMMAND = 60


def ps(
    ctx: typer.Context,
    name: Name,
    every: Annotated[bool, typer.Option("--all", "-a", help="Ended ones too, as far as they are remembered.")] = False,
    json: JsonFlag = False,
) -> None:
    """List the commands and terminals that run in a workspace. Wakes it.

    Only what was started through Perdure; the rest is in 'perdure exec NAME -- ps'.
    """
    as_json = wants_json(ctx, json)
    workspace = find(name)
    shown = [one for one in workspace.commands.list() if every or one.outcome is None]
    tell_losses(workspace)
    if as_json:
        dump({"execs": shown})
    elif not shown:
        say(f"No commands run in {markup(workspace.name)}.")
    else:
        table(("ID", "PID", "STATE", "TERMINAL", "STARTED", "COMMAND"), [_row(one) for one in shown], right=("PID",))


def _row(one: public.ExecInfo) -> tuple[str, ...]:
    line = one.command if len(one.command) <= SHOWN_COMMAND else one.command[: SHOWN_COMMAND - 1] + "…"
    terminal = f"{one.pty.rows}x{one.pty.cols}" if one.pty is not None else ""
    return (markup(one.exec_id), str(one.pid), _state(one.outcome), terminal, ago(one.started_at), markup(line))


def _state(outcome: public.ExecOutcome | None) -> str:
    if outcome is None:
        return "[green]running[/]"
    return f"exit {outcome.exit_code}" if outcome.end is ExecEnd.EXITED else outcome.end.value


def kill(
    ctx: typer.Context,
    name: Name,
    exec_id: Annotated[str, typer.Argument(metavar="ID", help="From 'perdure ps'.", show_default=False)],
    signal: Annotated[str | None, typer.Option("--signal", "-s", help="Send only this, by name or number: INT, HUP, 9.")] = None,
    json: JsonFlag = False,
) -> None:
    """End a command or terminal and everything it started; or, with --signal, only send it a signal."""
    as_json = wants_json(ctx, json)
    number = None if signal is None else parse_signal(signal)
    workspace = find(name)
    if number is None:
        workspace.commands.kill(exec_id)
    else:
        workspace.commands.send_signal(exec_id, number)
    tell_losses(workspace)
    if as_json:
        dump({"exec_id": exec_id, "signal": number})
    elif number is None:
        say(f"{markup(exec_id)} is being ended")
    else:
        say(f"{markup(exec_id)} was sent {signals.Signals(number).name}")


def parse_signal(text: str) -> int:
    """A signal by its name, with or without SIG, or its number. Raises InvalidRequest."""
    names = {one.name.removeprefix("SIG"): one for one in signals.Signals}
    wanted = text.upper().removeprefix("SIG")
    try:
        return int(signals.Signals(int(text)) if text.isdecimal() else names[wanted])
    except (ValueError, KeyError):
        raise InvalidRequest(f"{text!r} is not a signal.", hint="Write a name such as TERM, INT or HUP, or a number.") from None
