"""Snapshots of a workspace in their tree, and how many it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import typer

from perdure.cli import idle, waiting
from perdure.cli.output import JsonFlag, ago, dump, duration, markup, say, size, table, wants_json
from perdure.cli.workspaces import Name, find, kept_count
from perdure.core.errors import InvalidRequest
from perdure.wire import public

Snapshot = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="The snapshot's id or name.", show_default=False)]


def configure(
    ctx: typer.Context,
    name: Name,
    *,
    keep_snapshots: Annotated[
        str | None,
        typer.Option(metavar="N|default", help="Of the snapshots nobody asked for, how many stay.", show_default=False),
    ] = None,
    idle_timeout_s: idle.IdleTimeout = None,
    checkpoint_interval_s: Annotated[float | None, typer.Option(help="Seconds between automatic checkpoints; 0: off.")] = None,
    asleep_after_days: idle.AsleepDays = None,
    asleep_action: idle.AsleepAction = None,
    json: JsonFlag = False,
) -> None:
    """Change a workspace's timers, how many snapshots it keeps, and what becomes of it after a long sleep. Does not wake it."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    workspace.configure(
        keep_snapshots=None if keep_snapshots is None else _count(keep_snapshots),
        idle_timeout_s=idle_timeout_s,
        checkpoint_interval_s=checkpoint_interval_s,
        asleep_after_days=asleep_after_days,
        asleep_action=None if asleep_action is None else asleep_action.value,
    )
    info = workspace.info
    if as_json:
        dump(info)
        return
    sleeps = f"sleeps after {duration(info.idle_timeout_s)}" if info.idle_timeout_s else "never sleeps by itself"
    often = (
        f"a checkpoint every {duration(info.checkpoint_interval_s)}" if info.checkpoint_interval_s else "no checkpoints by itself"
    )
    late = f"; {idle.long_sleep(info)}" if info.asleep_after_days else ""
    say(f"[bold]{markup(info.name)}[/] {sleeps}, {often}, keeps {kept_count(info)}{late}")


def _count(text: str) -> int | Literal["default"]:
    if text == "default":
        return "default"
    if text.isdecimal():
        return int(text)
    raise InvalidRequest(
        f"--keep-snapshots {text!r} is no number.", hint="Give 0 to 1000, or 'default' for the server's setting."
    )


def ls(ctx: typer.Context, name: Name, json: JsonFlag = False) -> None:
    """Show the tree of a workspace's snapshots, oldest first.

    DURABLE says where it is: any node can wake what the object store has. OWN becomes free when a snapshot is removed, SHARED is
    used by others too. KEPT says why it stays; the head, marked *, is what the workspace wakes from.
    """
    as_json = wants_json(ctx, json)
    workspace = find(name)
    found = workspace.snapshots()
    if as_json:
        dump({"snapshots": found})
        return
    info = workspace.info
    if not found:
        stands = f"; it stands on {info.head_snapshot_id}" if info.head_snapshot_id else ""
        say(f"[bold]{markup(info.name)}[/] has no snapshots of its own{stands}.")
        return
    rows = [_row(one, lead) for one, lead in tree(found)]
    table(
        ("SNAPSHOT", "NAME", "REASON", "DURABLE", "KEPT", "OWN", "SHARED", "TOTAL", "MADE", "BRANCHES"),
        rows,
        right=("OWN", "SHARED", "TOTAL"),
    )


def _row(one: public.SnapshotPlace, lead: str) -> Sequence[str]:
    kept = [str(why) for why in one.kept] or ["on its way out"]
    weights = [size(count) if count is not None else "-" for count in (one.own_bytes, one.shared_bytes, one.total_bytes)]
    return (
        f"[dim]{lead}[/]{one.id}{' [bold green]*[/]' if one.is_head else ''}",
        markup(one.name or ""),
        one.reason if one.has_memory else f"{one.reason}, disk only",
        _durable(one),
        ", ".join(kept),
        *weights,
        ago(one.created_at),
        markup(", ".join([*one.branches, *one.references])),
    )


def _durable(one: public.SnapshotInfo) -> str:
    if one.upload is None:
        return one.durable
    is_failed = one.upload.state is public.UploadState.FAILED
    return "local, [red]upload failed[/]" if is_failed else f"local, {one.upload.state.value}"


def tree(found: Sequence[public.SnapshotPlace]) -> Iterator[tuple[public.SnapshotPlace, str]]:
    """Parents before what descends from them, with what to draw before each. The line to the head stays at the left; what leaves
    a line is one column further in, and comes before that line goes on::

        a
        ├─b      from a, beside the head's line
        │ c      from b
        d *      from a
    """
    known = {one.id for one in found}
    below: dict[str | None, list[public.SnapshotPlace]] = {}
    main = _line_of_head(found)
    for one in sorted(found, key=lambda one: one.id in main):  # stable: by age, but the head's line last
        below.setdefault(one.parent_id if one.parent_id in known else None, []).append(one)
    # An explicit stack: a line of a thousand checkpoints is deeper than Python's own.
    stack = [(one, 0, False) for one in reversed(below.get(None, []))]
    while stack:
        one, depth, is_first = stack.pop()
        yield one, "│ " * (depth - is_first) + ("├─" if is_first else "")
        children = below.get(one.id, [])
        stack += [(onward, depth, False) for onward in children[-1:]]
        stack += [(aside, depth + 1, True) for aside in reversed(children[:-1])]


def _line_of_head(found: Sequence[public.SnapshotPlace]) -> frozenset[str]:
    parents = {one.id: one.parent_id for one in found}
    at = next((one.id for one in found if one.is_head), None)
    line = set[str]()
    while at is not None and at in parents and at not in line:
        line.add(at)
        at = parents[at]
    return frozenset(line)


def name_it(
    ctx: typer.Context,
    name: Name,
    snapshot: Snapshot,
    label: Annotated[str | None, typer.Argument(metavar="[LABEL]", help="The name to give.", show_default=False)] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take its name away.")] = False,
    json: JsonFlag = False,
) -> None:
    """Give a snapshot a name: it is kept for as long as it has one."""
    as_json = wants_json(ctx, json)
    if (label is None) != clear:
        raise InvalidRequest(
            "Either a name or --clear is needed, and not both.", hint="perdure snapshot name NAME SNAPSHOT LABEL"
        )
    named = find(name).name_snapshot(snapshot, label)
    if as_json:
        dump(named)
    else:
        say(f"{named.id} is named {markup(named.name)}" if named.name else f"{named.id} has no name; retention may remove it")


def push(
    ctx: typer.Context,
    name: Name,
    snapshot: Annotated[
        str | None, typer.Argument(metavar="[SNAPSHOT]", help="Id or name; default: what it wakes from.", show_default=False)
    ] = None,
    deadline_s: Annotated[float | None, typer.Option("--deadline", help="Seconds to wait; default: no limit.", min=0)] = None,
    json: JsonFlag = False,
) -> None:
    """Wait until the object store has a snapshot. It is uploaded at once; all are uploaded by themselves sooner or later."""
    as_json = wants_json(ctx, json)
    pushed = asyncio.run(waiting.push(name, snapshot, deadline_s, quiet=as_json))
    if as_json:
        dump(pushed)
    else:
        say(f"{pushed.id} is in the object store")


def rm(
    ctx: typer.Context,
    name: Name,
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Ids or names.", show_default=False)],
    json: JsonFlag = False,
) -> None:
    """Remove snapshots. One that a workspace wakes from or was forked from is refused. This cannot be undone."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    removed = []
    for ref in snapshots:
        one = workspace.remove_snapshot(ref)
        removed.append(one.id)
        if not as_json:
            say(f"{one.id}{markup(f' ({one.name})') if one.name else ''} is removed")
    if as_json:
        dump({"removed": removed})
