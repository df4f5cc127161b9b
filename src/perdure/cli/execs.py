"""``perdure exec``: run a command in a workspace as if it were a local one."""

from __future__ import annotations

import base64
import os
import stat
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from perdure.cli import interrupts
from perdure.cli.output import JsonFlag, Status, dump, markup, note, say, swallow_stdout, wants_json
from perdure.cli.workspaces import Name, find, pairs, tell_losses
from perdure.core.errors import Conflict, InvalidRequest, NotFound, PerdureError
from perdure.sdk import CommandHandle, CommandResult, StillRunning, Workspace
from perdure.wire import public
from perdure.wire.node import ExecEnd

#: Exit code for Perdure's own failures, since all others are the command's.
OWN_FAILURE = 125
BROKEN_PIPE = 141


def run(
    ctx: typer.Context,
    name: Name,
    command: Annotated[list[str] | None, typer.Argument(metavar="COMMAND...", help="After --, or after NAME.")] = None,
    *,
    shell: Annotated[bool, typer.Option("--shell", "-c", help="The command is one line for the shell.")] = False,
    cwd: Annotated[str | None, typer.Option(help="Directory to run it in.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="User in the workspace; default root.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE; repeatable.")] = None,
    stdin: Annotated[bool | None, typer.Option("--stdin/--no-stdin", "-i/-I", help="Pass stdin on; default if piped.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait; the command goes on afterwards.")] = None,
    run_limit: Annotated[float | None, typer.Option(help="Seconds after which the command is ended.")] = None,
    idle_limit: Annotated[float | None, typer.Option(help="Seconds without output after which it is ended.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print its id and leave it running.")] = False,
    attach: Annotated[str | None, typer.Option(metavar="EXEC_ID", help="Follow a command that runs already.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Any text. The same key in the same workspace never runs a second time.")
    ] = None,
    json: JsonFlag = False,
) -> Status:
    """Run a command in a workspace; ends with the command's exit code, or 125 if Perdure failed.

    Ctrl-C ends the command. Anything else that ends this program leaves the command running.
    """
    ctx.find_root().obj.failure_code = OWN_FAILURE
    as_json = wants_json(ctx, json)
    workspace = find(name)
    given: dict[str, Any] = {"cwd": cwd, "user": user, "run_limit_s": run_limit, "idle_limit_s": idle_limit}
    given["idempotency_key"] = idempotency_key
    options = {"envs": pairs(env, "--env"), **{key: value for key, value in given.items() if value is not None}}
    if attach is not None:
        return _follow(workspace, workspace.commands.attach(attach), timeout, as_json=as_json, ours=False)
    words = _command(command or [], shell)
    piped = idempotency_key is None and _is_piped(sys.stdin.fileno())
    feed = not detach and (piped if stdin is None else stdin)
    if detach or feed:
        handle = workspace.commands.run(words, background=True, stdin=feed, **options)
    else:
        handle = workspace.commands.stream(words, **options)
    if detach:
        dump({"exec_id": handle.exec_id, "pid": handle.pid}) if as_json else say(handle.exec_id)
        return Status(0)
    if feed:
        threading.Thread(target=_feed, args=(handle,), name="perdure-stdin", daemon=True).start()
    return _follow(workspace, handle, timeout, as_json=as_json, ours=True)


def _command(words: list[str], shell: bool) -> str | list[str]:
    if not words:
        raise InvalidRequest("There is no command to run.", hint="Write it after the name: perdure exec NAME -- COMMAND …")
    if not shell:
        return words
    if len(words) > 1:
        raise InvalidRequest("--shell takes one argument, the whole line.", hint="Put the line in quotes.")
    return words[0]


def _is_piped(descriptor: int) -> bool:
    """Whether stdin is a pipe, socket or file: something that was meant to be read."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def _feed(handle: CommandHandle) -> None:
    def typed() -> Iterator[bytes]:
        while data := os.read(sys.stdin.fileno(), 65536):
            yield data

    try:
        handle.send_stdin(typed(), eof=True)
    except (Conflict, NotFound):
        pass  # the command ended, or did not want more
    except PerdureError as error:
        note(f"[yellow]stdin was cut, so the command is ended: {markup(error.message)}[/]")
        handle.kill()


def _follow(workspace: Workspace, handle: CommandHandle, timeout: float | None, *, as_json: bool, ours: bool) -> Status:
    try:
        with interrupts.restored():
            if as_json:
                result = handle.wait(timeout)
                dump(document(result, handle))
                return Status(_code(result.exit_code))
            outcome = _copy_output(handle, timeout)
    except StillRunning as error:
        raise _waiting(workspace, error) from error
    except KeyboardInterrupt:
        return _interrupted(workspace, handle, ours=ours)
    except BrokenPipeError:  # the reader of our output left, as in `… | head`
        if ours:
            handle.kill()
        swallow_stdout()
        return Status(BROKEN_PIPE)
    tell_losses(workspace)
    if outcome.end not in {ExecEnd.EXITED, ExecEnd.SIGNALED}:
        note(f"[yellow]{_ended(outcome)}[/]")
    return Status(_code(outcome.exit_code))


def _copy_output(handle: CommandHandle, timeout: float | None) -> public.ExecOutcome:
    sinks = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    for output in handle.follow(timeout):
        if output.gap:
            note(f"[yellow]{output.gap} bytes of {output.stream} were lost because nobody read them in time[/]")
        sinks[output.stream].write(output.data)
        sinks[output.stream].flush()
    if handle.outcome is None:
        raise handle.still_running(timeout)
    return handle.outcome


def _waiting(workspace: Workspace, error: StillRunning) -> StillRunning:
    """The same error with a hint for the command line."""
    error.hint = f"Follow it with 'perdure exec {workspace.name} --attach {error.exec_id}'; Ctrl-C there leaves it running."
    return error


def _ended(outcome: public.ExecOutcome) -> str:
    sentences = {
        ExecEnd.RUN_LIMIT: "The command was ended: it ran longer than its limit.",
        ExecEnd.IDLE_LIMIT: "The command was ended: it wrote nothing for longer than its limit.",
        ExecEnd.KILLED: "The command was ended on request.",
        ExecEnd.OOM: "The command was ended: the workspace ran out of memory. Create it with more --memory-mib.",
        ExecEnd.NOT_STARTED: "The command could not be started.",
        ExecEnd.LOST: "The command was lost with the machine it ran on; whether it ended is not known.",
    }
    if outcome.detail and outcome.end in {ExecEnd.RUN_LIMIT, ExecEnd.IDLE_LIMIT}:
        return f"The command was ended: {markup(outcome.detail[:1].lower() + outcome.detail[1:])}"
    detail = f" ({markup(outcome.detail)})" if outcome.detail else ""
    return sentences.get(outcome.end, outcome.end.value) + detail


def _code(exit_code: int | None) -> int:
    return OWN_FAILURE if exit_code is None else exit_code


def _interrupted(workspace: Workspace, handle: CommandHandle, *, ours: bool) -> Status:
    if not ours:
        note(f"Interrupted. {handle.exec_id} in {markup(workspace.name)} goes on.")
    else:
        try:
            handle.kill()
            note(f"Interrupted: the command in {markup(workspace.name)} was ended.")
        except NotFound:
            note("Interrupted before the command had started.")
    return Status(130)


def document(result: CommandResult, handle: CommandHandle) -> dict[str, Any]:
    """The JSON form: text, and base64 beside it where the bytes are not UTF-8."""
    made: dict[str, Any] = {
        "exec_id": result.exec_id,
        "end": result.end,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "detail": result.detail,
        "run_s": result.run_s,
        "truncated": result.truncated,
    }
    for stream, data in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes)):
        made[stream] = data.decode("utf-8", "replace")
        if made[stream].encode() != data:
            made[f"{stream}_base64"] = base64.b64encode(data).decode()
    return made
