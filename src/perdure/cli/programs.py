"""``perdure program``, ``logs`` and ``invoke``: what a workspace keeps running, what it wrote, and calls of it."""

from __future__ import annotations

import base64
import json as jsons
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.output import JsonFlag, Status, ago, dump, duration, markup, note, say, swallow_stdout, wants_json
from perdure.cli.workspaces import Name, find, pairs, tell_losses
from perdure.core.errors import InvalidRequest
from perdure.sdk import InvokeResult, Output, Workspace
from perdure.wire import public
from perdure.wire.node import PROGRAM_PORT, PROGRAM_STOP_GRACE_S, ProgramState, Restart

#: The program answered with an error of its own.
PROGRAM_ERROR = 2
_COLOURS = {ProgramState.RUNNING: "green", ProgramState.BACKING_OFF: "red", ProgramState.ENDED: "yellow"}


# --------------------------------------------------------------------------------------------------------------- program


def show(ctx: typer.Context, name: Name, json: JsonFlag = False) -> None:
    """Show a workspace's program and how it does. Wakes the workspace."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    _tell(workspace, workspace.program.show(), as_json)


def set_it(
    ctx: typer.Context,
    name: Name,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="After --.", show_default=False)],
    *,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE; repeatable.")] = None,
    cwd: Annotated[str | None, typer.Option(help="Directory to run it in; default: the user's home.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="User in the workspace; default root.")] = None,
    port: Annotated[int, typer.Option(help="Where it answers invocations; also in its variable PORT.")] = PROGRAM_PORT,
    restart: Annotated[Restart, typer.Option(help="What happens when it ends by itself.")] = Restart.ALWAYS,
    stop_grace: Annotated[float, typer.Option(help="Seconds from SIGTERM to SIGKILL.")] = PROGRAM_STOP_GRACE_S,
    json: JsonFlag = False,
) -> None:
    """Name the program that a workspace keeps running, and start it. Sleeps, forks and boots from disk keep it."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    info = workspace.program.set(
        command, envs=pairs(env, "--env"), cwd=cwd, user=user, port=port, restart=restart, stop_grace_s=stop_grace
    )
    _tell(workspace, info, as_json)


def unset(ctx: typer.Context, name: Name, json: JsonFlag = False) -> None:
    """End a workspace's program and forget it."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    _tell(workspace, workspace.program.unset(), as_json)


def start(ctx: typer.Context, name: Name, json: JsonFlag = False) -> None:
    """Start a workspace's program, now if it backs off."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    _tell(workspace, workspace.program.start(), as_json)


def stop(ctx: typer.Context, name: Name, json: JsonFlag = False) -> None:
    """Stop a workspace's program until it is started again or its machine boots from disk."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    _tell(workspace, workspace.program.stop(), as_json)


def restart(ctx: typer.Context, name: Name, json: JsonFlag = False) -> None:
    """End a workspace's program and start it anew, as the file that names it is now."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    _tell(workspace, workspace.program.restart(), as_json)


def _tell(workspace: Workspace, info: public.ProgramInfo, as_json: bool) -> None:
    if as_json:
        dump(info)
        return
    tell_losses(workspace)
    for line in _lines(workspace.name, info):
        say(line)


def _lines(name: str, info: public.ProgramInfo) -> list[str]:
    spec = info.program
    if spec is None:
        why = f": {markup(info.problem)}" if info.problem else ". Name one: perdure program set NAME -- COMMAND …"
        return [f"[bold]{markup(name)}[/] has no program{why}"]
    state = f"[{_COLOURS[info.state]}]{info.state}[/]" if info.state in _COLOURS else str(info.state)
    facts = [state] if info.ping is None else [f"{state}, {info.ping}"]
    if info.pid and info.started_at:
        facts.append(f"pid {info.pid}, started {ago(info.started_at)}")
    if info.failures:
        facts.append("failed once" if info.failures == 1 else f"failed {info.failures} times in a row")
    if info.retry_in_s is not None:
        facts.append(f"next try in {duration(info.retry_in_s)}")
    lines = [f"[bold]{markup(name)}[/] {', '.join(facts)}", f"  runs      {markup(shlex.join(spec.argv))}"]
    lines.append(f"  port      {spec.port}, restart {spec.restart}")
    if info.last is not None:
        code = "an unknown exit code" if info.last.exit_code is None else f"exit code {info.last.exit_code}"
        detail = f": {markup(info.last.detail)}" if info.last.detail else ""
        lines.append(f"  ended     with {code} after {duration(info.last.run_s)}{detail}")
    return lines


# ------------------------------------------------------------------------------------------------------------------ logs


def logs(
    ctx: typer.Context,
    name: Name,
    *,
    tail: Annotated[int | None, typer.Option("--tail", "-n", help="Only the last so many lines.", min=0)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And what it writes from now on, until Ctrl-C.")] = False,
    offset: Annotated[int | None, typer.Option(help="From this byte on, since its machine booted.", min=0)] = None,
    json: JsonFlag = False,
) -> Status:
    """Print what a workspace's program wrote, stdout and stderr in their order. With --json: one line per piece.

    About the last mebibyte is kept. Wakes the workspace; following keeps it awake.
    """
    as_json = wants_json(ctx, json)
    if tail is not None and offset is not None:
        raise InvalidRequest("--tail and --offset cannot be used together.", hint="Give one of the two.")
    try:
        for chunk in find(name).program.logs(tail=tail, follow=follow, offset=offset):
            if as_json:
                dump(_piece(chunk))
                continue
            if chunk.gap:
                note(f"[yellow]{chunk.gap} bytes are not kept any more[/]")
            sys.stdout.buffer.write(chunk.data)
            sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        return Status(130)
    except BrokenPipeError:  # the reader of our output left, as in `… | head`
        swallow_stdout()
        return Status(141)
    return Status(0)


def _piece(chunk: Output) -> dict[str, Any]:
    """The JSON form: text, and base64 beside it where the bytes are not UTF-8, as where a piece ends within a character."""
    made = {"offset": chunk.offset, "gap": chunk.gap, "data": chunk.text}
    return made if chunk.text.encode() == chunk.data else {**made, "data_base64": base64.b64encode(chunk.data).decode()}


# ---------------------------------------------------------------------------------------------------------------- invoke


def invoke(
    ctx: typer.Context,
    name: Name,
    *,
    payload: Annotated[str, typer.Option("--payload", "-p", help="JSON, @FILE, or - for stdin; sent as it is.")] = "{}",
    stream: Annotated[bool, typer.Option("--stream", help="Print each event as it comes.")] = False,
    content_type: Annotated[str, typer.Option(help="What the payload is.")] = "application/json",
    session_id: Annotated[str | None, typer.Option(help="Session that the program is told; default: the workspace.")] = None,
    header: Annotated[list[str] | None, typer.Option("--header", "-H", help="NAME=VALUE under the custom prefix.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds without anything from it before giving up.")] = None,
    json: JsonFlag = False,
) -> Status:
    """Call a workspace's program and print its answer; wakes the workspace. Ends with 2 if the program answers with an error.

    With --json: one document with status, content type and body; with --stream one line per event. A connection that is lost is
    not tried again: whether the program did its work is then unknown.
    """
    as_json = wants_json(ctx, json)
    options: dict[str, Any] = {"content_type": content_type, "headers": pairs(header, "--header"), "timeout_s": timeout}
    if session_id is not None:
        options["session_id"] = session_id
    content = _payload(payload, is_json=content_type == "application/json")
    workspace = find(name)
    if not stream:
        result = workspace.invoke(content, **options)
        tell_losses(workspace)
        _print(result, as_json)
        return Status(0 if result.ok else PROGRAM_ERROR)
    call = workspace.invoke(content, stream=True, **options)
    try:
        for event in call:
            dump({"event": event.event, "id": event.id, "data": event.data}) if as_json else _write(event.data + "\n")
    except BrokenPipeError:
        swallow_stdout()
        return Status(141)
    tell_losses(workspace)
    return Status(0 if (call.status or 0) < 400 else PROGRAM_ERROR)


def _payload(text: str, *, is_json: bool) -> bytes:
    """The bytes to send; what is said to be JSON is looked at before anything is woken for it."""
    if text == "-":
        content = sys.stdin.buffer.read()
    elif text.startswith("@"):
        try:
            content = Path(text[1:]).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"The payload file {text[1:]!r} cannot be read: {error.strerror}.", hint="Check it.") from error
    else:
        content = text.encode("utf-8", "surrogateescape")
    if is_json:
        try:
            jsons.loads(content)
        except ValueError as error:
            raise InvalidRequest(
                f"The payload is not JSON: {error}.", hint="Put it in quotes, or name another --content-type."
            ) from error
    return content


def _print(result: InvokeResult, as_json: bool) -> None:
    if not as_json:
        if not result.ok:
            note(f"[yellow]The program answered with HTTP status {result.status}.[/]")
        _write(result.text if result.text.endswith("\n") or not result.content else result.text + "\n")
        return
    body: Any = result.text
    if result.content_type.partition(";")[0].strip() == "application/json":
        with suppress(ValueError):  # it says so and is not: then as text
            body = jsons.loads(result.content)
    dump({"status": result.status, "content_type": result.content_type, "body": body})


def _write(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()
