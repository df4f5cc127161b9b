"""``perdure execution``: durable executions, from their start to their end."""

from __future__ import annotations

import json as jsons
import sys
from itertools import islice
from typing import Annotated, Any

import typer

from perdure.cli import timeline
from perdure.cli.keys import seconds
from perdure.cli.output import JsonFlag, ago, dump, duration, markup, note, say, size, table, wants_json
from perdure.core.clock import SystemClock
from perdure.core.errors import InvalidRequest
from perdure.sdk import Client, Execution
from perdure.sdk._runs import ExecutionFilters, StartOptions
from perdure.wire import public
from perdure.wire.public import ExecutionStatus, OperationStatus

Ref = Annotated[str, typer.Argument(metavar="EXECUTION", help="Its id, ARN or name.", show_default=False)]
Reason = Annotated[str | None, typer.Option(help="Why, for the history.", metavar="TEXT")]
Code = Annotated[
    public.CodeRule | None,
    typer.Option(help="any, or exact: only a worker with the code it began with.", show_default=False),
]
SHOWN = 50
STATUSES = {
    ExecutionStatus.RUNNING: "green",
    ExecutionStatus.SUCCEEDED: "blue",
    ExecutionStatus.PAUSING: "yellow",
    ExecutionStatus.PAUSED: "yellow",
}
OPERATIONS = {OperationStatus.SUCCEEDED: "blue", OperationStatus.FAILED: "red", OperationStatus.TIMED_OUT: "red"}


def status_text(status: ExecutionStatus) -> str:
    return f"[{STATUSES.get(status, 'red')}]{status.value}[/]"


def ls(
    ctx: typer.Context,
    *,
    function: Annotated[str | None, typer.Option(help="Only of this function.", metavar="FUNCTION")] = None,
    status: Annotated[list[ExecutionStatus] | None, typer.Option(help="Only in this status; repeatable.")] = None,
    name: Annotated[str | None, typer.Option(help="Only of this name.", metavar="TEXT")] = None,
    limit: Annotated[int, typer.Option(help="At most so many, the newest first.", min=1)] = SHOWN,
    json: JsonFlag = False,
) -> None:
    """List executions, the newest first."""
    as_json = wants_json(ctx, json)
    filters: ExecutionFilters = {"status": [one.value for one in status or []]}
    if function is not None:
        filters["function"] = function
    if name is not None:
        filters["name"] = name
    with Client() as client:
        found = [*islice(client.executions.list(**filters), limit + 1)]
    shown = found[:limit]
    if as_json:
        dump({"executions": shown, "more": len(found) > limit})
    elif not shown:
        say("No executions. Start one with 'perdure execution start FUNCTION INPUT'.")
    else:
        table(("NAME", "ID", "FUNCTION", "STATUS", "STARTED", "TOOK"), [_row(one) for one in shown])
        if len(found) > limit:
            note(f"[dim]Only the newest {limit}; more with --limit.[/]")


def _row(one: public.ExecutionItem) -> tuple[str, ...]:
    took = duration((one.ended_at - one.started_at).total_seconds()) if one.ended_at else ""
    name = "" if one.name == one.execution_id else f"[bold]{markup(one.name)}[/]"
    return (name, one.execution_id, markup(one.function), status_text(one.status), ago(one.started_at), took)


def show(ctx: typer.Context, execution: Ref, json: JsonFlag = False) -> None:
    """Show an execution: what it waits for and since when, and its operations as a tree."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = client.executions.get(execution)
        operations = found.operations()
        is_served = found.info.standing.reason is not public.StandingReason.INVOKE or _is_served(client, found.info.function)
    if as_json:
        dump({"execution": found.info, "operations": operations})
        return
    _show(found.info, operations)
    if not is_served:
        note(f"[red]![/] No worker serves {markup(found.info.function)} now: start one with 'perdure worker'.")


def _is_served(client: Client, function: str) -> bool:
    return any(one.workers > 0 for one in client.executions.functions() if one.name == function)


def _show(info: public.ExecutionInfo, operations: list[public.OperationInfo]) -> None:
    now = SystemClock().now()
    invoked = "1 invocation" if info.invocations == 1 else f"{info.invocations} invocations"
    say(f"[bold]{markup(info.name)}[/]  {info.execution_id}  {markup(info.function)}  {status_text(info.status)}")
    say(f"started   {timeline.moment(info.started_at)} UTC, {ago(info.started_at)}; {invoked}")
    if info.times_out_at is not None:
        say(f"timeout   {timeline.until(info.times_out_at, now)}")
    say(f"standing  {markup(timeline.standing(info, operations, now))}")
    if info.code_began and info.code_began != info.code_last:
        say(f"code      began with {markup(info.code_began)}, ran last with {markup(info.code_last)}")
    if info.input_bytes is not None:
        say(f"input     {markup(timeline.value(info.input, is_text=info.input_is_text))}  [dim]{size(info.input_bytes)}[/]")
    if info.result_bytes is not None:
        say(f"result    {markup(timeline.value(info.result, is_text=info.result_is_text))}  [dim]{size(info.result_bytes)}[/]")
    if info.error is not None:
        say(f"error     [red]{markup(timeline.error(info.error))}[/]")
    rows = timeline.tree(operations, now)
    if rows:
        say("")
        headers = ("OPERATION", "STATUS", "ATTEMPTS", "TOOK", "DETAIL")
        table(headers, [_operation(one) for one in rows], right=("ATTEMPTS", "TOOK"))
    for name, command in timeline.completions(operations):
        say(f"\n{markup(name)} is open; complete it with\n  {markup(command)}")


def _operation(row: timeline.Row) -> tuple[str, ...]:
    colour = OPERATIONS.get(row.status, "green")
    return (markup(row.label), f"[{colour}]{row.status.value}[/]", row.attempts, row.took, markup(row.detail))


def start(
    ctx: typer.Context,
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="As a worker serves it.", show_default=False)],
    given: Annotated[
        str | None, typer.Argument(metavar="INPUT", help="JSON; - reads it from stdin; without it: none.", show_default=False)
    ] = None,
    *,
    name: Annotated[str | None, typer.Option(help="The same name and input are the same execution.", metavar="TEXT")] = None,
    timeout: Annotated[str | None, typer.Option(help="Of the whole execution, such as 12h or 30d.", metavar="TIME")] = None,
    priority: Annotated[int, typer.Option(help="Higher ones are invoked first.")] = 0,
    key: Annotated[str | None, typer.Option(help="Executions with the same key run one after the other.", metavar="TEXT")] = None,
    code: Code = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end, and print its result.")] = False,
    json: JsonFlag = False,
) -> None:
    """Start an execution. It goes on without this command."""
    as_json = wants_json(ctx, json)
    options: StartOptions = {"priority": priority}
    if name is not None:
        options["name"] = name
    if timeout is not None:
        options["timeout_s"] = max(1, round(seconds(timeout)))
    if key is not None:
        options["key"] = key
    if code is not None:
        options["code"] = code.value
    with Client() as client:
        started = client.executions.start(function, parsed(given, "INPUT"), **options)
        if wait:
            _tell_end(started, None, as_json=as_json)
            return
    if as_json:
        dump({"execution_id": started.id, "arn": started.arn, "is_new": started.is_new})
    else:
        say(f"[bold]{started.id}[/] {'is started' if started.is_new else 'was there already'}")


def parsed(text: str | None, what: str) -> Any:
    """JSON of the command line. Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return jsons.loads(sys.stdin.buffer.read() if text == "-" else text)
    except (ValueError, RecursionError) as error:
        hint = 'Quote it for the shell: \'{"name": "Ada"}\', or \'"a text"\'.'
        raise InvalidRequest(f"{what} is not JSON: {error}.", hint=hint) from None


def wait(
    ctx: typer.Context,
    execution: Ref,
    timeout: Annotated[str | None, typer.Option(help="Give up after this, such as 30s or 2h.", metavar="TIME")] = None,
    json: JsonFlag = False,
) -> None:
    """Wait for an execution's end and print its result. Fails with its error where it ends without one."""
    as_json = wants_json(ctx, json)
    timeout_s = None if timeout is None else seconds(timeout)
    with Client() as client:
        _tell_end(client.executions.get(execution), timeout_s, as_json=as_json)


def _tell_end(execution: Execution, timeout_s: float | None, *, as_json: bool) -> None:
    result = execution.result(timeout_s)
    if as_json:
        dump({"execution_id": execution.id, "arn": execution.arn, "result": result})
    else:
        say(markup(timeline.value(result, longest=1 << 30)))


def history(
    ctx: typer.Context,
    execution: Ref,
    *,
    newest_first: Annotated[bool, typer.Option("--newest-first", help="Backwards.")] = False,
    limit: Annotated[int | None, typer.Option(help="At most so many.", min=1)] = None,
    json: JsonFlag = False,
) -> None:
    """Print an execution's events as AWS has them."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = islice(client.executions.get(execution).history(newest_first=newest_first), limit)
        if as_json:
            dump({"events": [*found]})
            return
        for one in found:
            at, what, detail = timeline.event(one)
            say(f"{one.get('EventId', ''):>5}  [dim]{markup(at)}[/]  [bold]{markup(what)}[/]  {markup(detail)}".rstrip())


def stop(
    ctx: typer.Context,
    execution: Ref,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Told as its error.", metavar="TEXT")] = None,
    error_type: Annotated[str | None, typer.Option("--type", help="The error's type.", metavar="TEXT")] = None,
    json: JsonFlag = False,
) -> None:
    """End an execution now. What an invocation of it still does counts for nothing."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        stopped = client.executions.get(execution).stop(message, error_type=error_type)
    if as_json:
        dump(stopped)
    else:
        say(f"[bold]{markup(execution)}[/] is stopped")


def pause(
    ctx: typer.Context,
    execution: Ref,
    reason: Reason = None,
    timeout_goes_on: Annotated[bool, typer.Option("--timeout-goes-on", help="Its own timeout does not stand still.")] = False,
    json: JsonFlag = False,
) -> None:
    """Have an execution invoked no more until it is resumed. Its timers and callbacks go on."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        info = client.executions.get(execution).pause(reason, timeout_paused=not timeout_goes_on)
    _tell_status(execution, info, as_json=as_json)


def resume(ctx: typer.Context, execution: Ref, reason: Reason = None, code: Code = None, json: JsonFlag = False) -> None:
    """Let a paused execution go on."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        info = client.executions.get(execution).resume(reason, code=None if code is None else code.value)
    _tell_status(execution, info, as_json=as_json)


def _tell_status(ref: str, info: public.ExecutionInfo, *, as_json: bool) -> None:
    if as_json:
        dump(info)
    else:
        say(f"[bold]{markup(ref)}[/] is {status_text(info.status)}")


def retry(
    ctx: typer.Context,
    execution: Ref,
    name: Annotated[str | None, typer.Option(help="Of the new execution, if one is started.", metavar="TEXT")] = None,
    json: JsonFlag = False,
) -> None:
    """Resume a paused execution; of one that has ended, start another with the same function and input. Says which."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        again = client.executions.get(execution).retry(name=name)
    if as_json:
        dump({"execution_id": again.id, "arn": again.arn, "resumed": not again.is_new})
    elif again.is_new:
        say(f"[bold]{markup(execution)}[/] has ended; [bold]{again.id}[/] is started with the same function and input")
    else:
        say(f"[bold]{markup(execution)}[/] is resumed")


def rm(
    ctx: typer.Context,
    executions: Annotated[list[str], typer.Argument(metavar="EXECUTION...", help="Ids, ARNs or names.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonFlag = False,
) -> None:
    """Delete executions that have ended, with their histories. This cannot be undone."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = [client.executions.get(ref) for ref in executions]  # all must exist before any is deleted
        if not yes:
            _confirm(", ".join(markup(ref) for ref in executions))
        for one in found:
            one.delete()
    if as_json:
        dump({"deleted": [one.id for one in found]})
    else:
        for one in found:
            say(f"[bold]{one.id}[/] is deleted")


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidRequest(f"Deleting {what} needs a confirmation and there is no terminal to ask on.", hint="Add --yes.")
    note(f"Delete {what} with all that is recorded? This cannot be undone. [dim]\\[y/N][/]")
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise InvalidRequest("Nothing was deleted.", hint="Answer y to delete.")
