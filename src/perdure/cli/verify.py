"""``perdure snapshot verify``: every stored byte, and with ``--boot`` a start in a throwaway machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from perdure.cli.output import JsonFlag, Status, dump, duration, markup, say, size, wants_json
from perdure.cli.progress import Bar
from perdure.cli.workspaces import upload_text
from perdure.core.errors import InvalidRequest
from perdure.sdk import Client
from perdure.wire import public


def verify(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The workspace's name or id.", show_default=False)] = None,
    snapshot: Annotated[
        str | None,
        typer.Argument(metavar="SNAPSHOT", help="One snapshot, by id or name; default: all of them.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The snapshots of all workspaces.")] = False,
    boot: Annotated[bool, typer.Option("--boot", help="Also start each in a throwaway machine, of which nothing stays.")] = False,
    json: JsonFlag = False,
) -> Status:
    """Check every stored byte of snapshots and of the images below them. Wakes nothing; exits 1 when something is damaged.

    With --boot each snapshot is restored, or its disk booted, until the agent in it answers, without network, and then dropped.
    """
    as_json = wants_json(ctx, json)
    if (name is None) != everything:
        raise InvalidRequest("Either the name of a workspace or --all is needed.", hint="perdure snapshot verify NAME")
    found: list[public.VerifiedSnapshot] = []
    done = public.VerifyEvent(type="done")
    with Client() as client:
        for event in _shown(client.verify(name, snapshot=snapshot, boot=boot), quiet=as_json):
            if event.result is not None:
                found.append(event.result)
                if not as_json:
                    _tell(event.result, boot=boot)
            if event.type == "done":
                done = event
    damage = {(one.file, one.problem) for result in found for one in result.damage}
    if as_json:
        dump(
            {
                "ok": done.damaged == 0,
                "checked": {
                    "snapshots": done.count,
                    "read_bytes": done.read_bytes,
                    "booted": sum(one.trial is not None for one in found),
                },
                "damage": [{"file": file, "problem": problem} for file, problem in sorted(damage)],
                "snapshots": found,
            }
        )
    else:
        _sum_up(done)
    return Status(1 if done.damaged else 0)


def _shown(events: Iterator[public.VerifyEvent], *, quiet: bool) -> Iterator[public.VerifyEvent]:
    """All of them, with the progress on a terminal while they come."""
    read = 0
    with Bar(quiet=quiet) as bar:
        bar.show("Reading")
        for event in events:
            if event.type == "progress":
                read += event.read_bytes
                words = f"{event.done + 1} of {event.count}, {size(read)}: {markup(event.workspace)} {markup(event.file)}"
                bar.show(words, event.done, event.count)
            yield event


def _tell(result: public.VerifiedSnapshot, *, boot: bool) -> None:
    label = f" ({markup(result.name)})" if result.name else ""
    head = f"[bold]{markup(result.workspace)}[/] {result.snapshot_id}{label}"
    if result.intact:
        say(f"{head} is intact{_tried(result.trial)}{_where(result, boot=boot)}")
        return
    wrong = "is damaged" if result.damage else "does not start"
    say(f"{head} [red]{wrong}[/]{_tried(result.trial)}{_where(result, boot=boot)}")
    for one in result.damage:
        say(f"  {markup(one.file)}: {markup(one.problem)}")
    if result.damage:
        before = f"the newest intact one before it is {result.ancestor}" if result.ancestor else "none before it is intact"
        say(f"  [dim]{before}; its disk {'can' if result.disk_intact else 'cannot'} be booted without its memory[/]")


def _where(result: public.VerifiedSnapshot, *, boot: bool) -> str:
    """What was not looked at: the copy that is still to be made, or the one that is not here any more."""
    if result.read_from == "node":
        return markup(upload_text(result.upload))
    return "; read from the object store, for the node does not have it" + (", and not started" if boot else "")


def _tried(trial: public.TrialInfo | None) -> str:
    if trial is None:
        return ""
    if trial.problem:
        return f": {markup(trial.problem)}"
    how = "woke with its memory" if trial.kind == "memory" else f"booted from its disk ({markup(trial.reason)})"
    return f"; it {how} in {duration(trial.seconds)}"


def _sum_up(done: public.VerifyEvent) -> None:
    if not done.count:
        say("There are no snapshots to verify.")
        return
    what = "1 snapshot" if done.count == 1 else f"{done.count} snapshots"
    outcome = f"[red]{done.damaged} damaged[/]" if done.damaged else "all intact"
    say(f"{what} checked, {size(done.read_bytes)} read: {outcome}")
