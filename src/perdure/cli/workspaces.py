"""Workspaces: create, look at, sleep, wake, record, fork, recover, remove."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from enum import StrEnum
from itertools import takewhile
from typing import Annotated, Any

import typer

from perdure.cli import idle, thread, waiting
from perdure.cli.backup import recover_from_store
from perdure.cli.output import JsonFlag, ago, dump, duration, markup, note, say, size, table, wants_json
from perdure.cli.progress import Bar
from perdure.core.errors import InvalidRequest, NotFound, PerdureError
from perdure.sdk import Client, Workspace
from perdure.wire import public
from perdure.wire.node import MemoryFate

Name = Annotated[str, typer.Argument(metavar="NAME", help="The workspace's name or id.", show_default=False)]
_HOOK_LINES = 5  # of a hook's output that ``show`` prints
STATES = {"running": "green", "hibernated": "blue", "failed": "red"}


class How(StrEnum):
    RETRY = "retry"
    REWIND = "rewind"
    DISK_BOOT = "disk-boot"
    DAMAGED_DISK = "damaged-disk"


class Durable(StrEnum):
    LOCAL = "local"
    STORE = "store"


DurableOption = Annotated[Durable, typer.Option("--durable", help="store: wait until the object store has the snapshot.")]
_HOMES = {"local": "node", "store": "object store"}


def find(name: str) -> Workspace:
    """The workspace, without waking it."""
    return Workspace.connect(name, wake=False)


def pairs(values: list[str] | None, option: str) -> dict[str, str]:
    """KEY=VALUE options."""
    found = {}
    for text in values or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"{option} {text!r} is not KEY=VALUE.", hint=f"Write it as {option} KEY=VALUE.")
        found[key] = value
    return found


def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and dashes.", show_default=False)],
    *,
    image: Annotated[str | None, typer.Option(help="Image to start from; default: base.", show_default=False)] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory; default: the image's.")] = None,
    vcpus: Annotated[int | None, typer.Option(help="Virtual CPUs; default: the image's.")] = None,
    disk_gib: Annotated[int | None, typer.Option(help="Disk; default: the image's.")] = None,
    idle_timeout_s: idle.IdleTimeout = None,
    checkpoint_interval_s: Annotated[float | None, typer.Option(help="Seconds between automatic checkpoints; 0: off.")] = None,
    keep_snapshots: Annotated[int | None, typer.Option(help="Of the snapshots nobody asked for, how many stay.")] = None,
    asleep_after_days: idle.AsleepDays = None,
    asleep_action: idle.AsleepAction = None,
    allow: Annotated[list[str] | None, typer.Option(help="HOST:PORT it may reach; repeatable.", metavar="HOST:PORT")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE for all commands; repeatable.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="KEY=VALUE to find it by; repeatable.")] = None,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Use the workspace of this name if there is one of this image and size.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Make a workspace. It is awake when the command returns."""
    as_json = wants_json(ctx, json)
    given: dict[str, Any] = {
        "image": image,
        "memory_mib": memory_mib,
        "vcpus": vcpus,
        "disk_gib": disk_gib,
        "idle_timeout_s": idle_timeout_s,
        "checkpoint_interval_s": checkpoint_interval_s,
        "keep_snapshots": keep_snapshots,
        "asleep_after_days": asleep_after_days,
        "asleep_action": asleep_action,
    }
    options: dict[str, Any] = {
        "allow": allow or [],
        "envs": pairs(env, "--env"),
        "metadata": pairs(metadata, "--metadata"),
        **{key: value for key, value in given.items() if value is not None},
    }
    made = asyncio.run(waiting.create(name, exist_ok, options, quiet=as_json))
    if as_json:
        dump({"workspace": made.info, "report": made.report, "warnings": made.warnings})
        return
    info = made.info
    for warning in made.warnings:
        note(f"[yellow]![/] {markup(warning)}")
    say(f"[bold]{markup(info.name)}[/] is awake: {_shape(info)}, {info.isolation or 'isolation unknown'}")


def _shape(info: public.WorkspaceInfo) -> str:
    cpus = "1 CPU" if info.vcpus == 1 else f"{info.vcpus} CPUs"
    return f"{markup(info.image_name)}, {info.memory_mib} MiB, {cpus}, {info.disk_gib} GiB disk"


def state_text(info: public.WorkspaceInfo) -> str:
    color = STATES.get(info.state.value, "yellow")
    return f"[{color}]{info.state.value}[/]"


def ls(
    ctx: typer.Context,
    state: Annotated[list[public.WorkspaceState] | None, typer.Option(help="Only these states; repeatable.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="Only with KEY=VALUE; repeatable.")] = None,
    image: Annotated[str | None, typer.Option(help="Only of this image, by name or digest.", metavar="IMAGE")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only with a name that begins so.", metavar="TEXT")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many, the oldest.", min=1, show_default=False)] = None,
    json: JsonFlag = False,
) -> None:
    """List workspaces."""
    as_json = wants_json(ctx, json)
    filters: dict[str, Any] = {"state": [one.value for one in state or []], "metadata": pairs(metadata, "--metadata")}
    filters |= {name: value for name, value in (("image", image), ("name_prefix", prefix)) if value is not None}
    found = list(Workspace.iterate(limit=limit, **filters))
    if as_json:
        dump({"workspaces": [one.info for one in found]})
        return
    if not found:
        is_filtered = any(filters.values())
        say("No workspace is like that." if is_filtered else "No workspaces. Make one with 'perdure create NAME'.")
        return
    rows = [
        (
            f"[bold]{markup(one.name)}[/]",
            state_text(one.info),
            one.info.kind.value,
            markup(one.info.image_name),
            f"{one.info.memory_mib} MiB",
            ago(one.info.last_active_at),
        )
        for one in found
    ]
    table(("NAME", "STATE", "KIND", "IMAGE", "MEMORY", "ACTIVE"), rows, right=("MEMORY",))


def show(ctx: typer.Context, name: Name, json: JsonFlag = False) -> None:
    """Show one workspace and what its last wake kept."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    report, found = workspace.resume_report(), workspace.snapshots()
    info = workspace.info
    if as_json:
        dump({"workspace": info, "report": report, "snapshots": found})
        return
    lines: list[tuple[str, str | list[str]]] = [
        ("id", info.id),
        ("state", f"{state_text(info)} {markup(info.state_detail)}".strip()),
        ("fetching", waiting.fetched(info.fetching) if info.fetching else "-"),
        ("generation", str(info.generation)),
        ("image", _shape(info)),
        ("isolation", _isolation(info)),
        ("stored", _stored(info, found)),
        ("snapshot", _head(info, found)),
        ("in use", idle.in_use(info.idle)),
        ("sleeps after", duration(info.idle_timeout_s) if info.idle_timeout_s else "never"),
        ("by itself", idle.wakes(info.wake_at) if info.wake_at else "-"),
        ("long asleep", idle.long_sleep(info) if info.asleep_after_days else "-"),
        ("checkpoints", f"every {duration(info.checkpoint_interval_s)}" if info.checkpoint_interval_s else "on request"),
        ("keeps", kept_count(info) if info.keep_snapshots is not None else "-"),
        ("may reach", markup(", ".join(info.egress_allow)) or "nothing"),
        ("environment", markup(", ".join(info.environment)) or "-"),
        ("metadata", markup(", ".join(f"{key}={value}" for key, value in info.metadata.items())) or "-"),
        ("forked from", f"{info.parent_id} at {info.forked_from}" if info.parent_id else "-"),
        ("created", info.created_at.isoformat(timespec="seconds")),
        ("last wake", woke(report) if report else "-"),
        ("hooks", _hooks(report)),
    ]
    say(f"[bold]{markup(info.name)}[/]")
    for label, value in lines:
        first, *more = [value] if isinstance(value, str) else value
        if first != "-":
            say(f"  [dim]{label:<13}[/]{first}")
        for text in more:
            say(f"  {'':<13}{text}")


def _isolation(info: public.WorkspaceInfo) -> list[str]:
    """The grade with what holds, then one line for each thing that does not."""
    held = info.confinement
    if held is None:
        return ["not started yet"]
    names = ("jail", "seccomp", "own_user", "readonly_base", "memory_limit", "cpu_limit", "pids_limit")
    holds = ", ".join(name.replace("_", " ") for name in names if getattr(held, name))
    lacks = [f"no {name.replace('_', ' ')}: {held.missing.get(name, 'unknown why')}" for name in names if not getattr(held, name)]
    return [f"{held.isolation.value}: {holds or 'nothing more'}", *map(markup, lacks)]


def _stored(info: public.WorkspaceInfo, found: list[public.SnapshotPlace]) -> str:
    """What the snapshot that it wakes from needs besides the image, which all workspaces share."""
    head = next((one for one in found if one.id == info.head_snapshot_id), None)
    if head is None:
        return "nothing yet"
    total = size(head.memory_total_bytes + head.disk_total_bytes)
    kept = "1 snapshot" if len(found) == 1 else f"{len(found)} snapshots"
    return f"{total} besides the image: {size(head.memory_total_bytes)} memory, {size(head.disk_total_bytes)} disk; {kept}"


def _head(info: public.WorkspaceInfo, found: list[public.SnapshotPlace]) -> list[str]:
    head = next((one for one in found if one.id == info.head_snapshot_id), None)
    if head is None:
        return [info.head_snapshot_id or "-"]
    lines = [f"{head.id}, {head.reason}{markup(f' ({head.name})') if head.name else ''}, {ago(head.created_at)}"]
    lines.append(f"durable in the {_HOMES[head.durable]}{markup(upload_text(head.upload))}")
    if head.disk_gib is not None and head.disk_gib < info.disk_gib:
        lines.append(f"its disk has {head.disk_gib} GiB; a disk boot grows it to {info.disk_gib} GiB")
    return lines


def upload_text(upload: public.UploadInfo | None) -> str:
    """What follows where a snapshot is durable: how far its upload is, or why it failed."""
    if upload is None:
        return ""
    if upload.state is public.UploadState.UPLOADING:
        return f"; uploading, {size(upload.read_bytes)} of about {size(upload.total_bytes)} done, {size(upload.sent_bytes)} sent"
    if upload.state is public.UploadState.FAILED:
        return f"; not uploaded: {upload.error} Tried again in {duration(upload.retry_s or 0)}."
    return "; waits to be uploaded"


def _hooks(report: public.ResumeReport | None) -> str | list[str]:
    """What the last wake ran of the workspace's own, each with the end of its output."""
    told = [
        (thread.hook(run.model_dump(mode="json")), run.output.strip().splitlines()) for run in (report.hooks if report else ())
    ]
    return [markup(line) for first, output in told for line in (first, *(f"  {said}" for said in output[-_HOOK_LINES:]))] or "-"


def woke(report: public.ResumeReport) -> str:
    return markup(thread.woke(report.model_dump(mode="json")))


def tell_losses(workspace: Workspace) -> None:
    """On stderr, when the call just made woke the workspace and not everything was kept."""
    report = workspace.report
    failed_hooks = [hook for hook in report.hooks if hook.outcome != "ok"] if report is not None else []
    if report is not None and (
        report.memory is MemoryFate.LOST or report.disk == "rewound" or report.execs_lost or report.problems or failed_hooks
    ):
        note(f"[yellow]{markup(workspace.name)} woke: {woke(report)}[/]")


def sleep(ctx: typer.Context, name: Name, durable: DurableOption = Durable.LOCAL, json: JsonFlag = False) -> None:
    """Hibernate a workspace now."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    snapshot = _durable(workspace, workspace.sleep(), durable, quiet=as_json)
    if as_json:
        dump({"workspace": workspace.info, "snapshot": snapshot})
    else:
        written = size(snapshot.memory_bytes + snapshot.disk_bytes)
        where = ", and in the object store" if durable is Durable.STORE else ""
        say(f"[bold]{markup(workspace.name)}[/] sleeps: {written} written{where}")


def _durable(workspace: Workspace, snapshot: public.SnapshotInfo, durable: Durable, *, quiet: bool) -> public.SnapshotInfo:
    if durable is Durable.LOCAL:
        return snapshot
    return asyncio.run(waiting.push(workspace.id, snapshot.id, quiet=quiet))


def wake(
    ctx: typer.Context,
    name: Name,
    deadline_s: Annotated[float | None, typer.Option("--deadline", help="Seconds to wait for it.")] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Not now but then, once: 2026-12-24T18:00Z, +2h, or never.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Wake a workspace and say what was kept; or, with --at, have it wake by itself."""
    as_json = wants_json(ctx, json)
    if at is not None:
        when = idle.moment(at, deadline_s)
        idle.wake_at(find(name), when, as_json=as_json)
        return
    workspace, report = asyncio.run(waiting.wake(name, deadline_s, quiet=as_json))
    if as_json:
        dump({"workspace": workspace, "report": report})
    else:
        say(f"[bold]{markup(workspace.name)}[/] is awake: {woke(report)}")


def checkpoint(
    ctx: typer.Context,
    name: Name,
    label: Annotated[str | None, typer.Option("--name", help="A name for the snapshot.")] = None,
    durable: DurableOption = Durable.LOCAL,
    json: JsonFlag = False,
) -> None:
    """Record a workspace while it runs."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    snapshot = _durable(workspace, workspace.checkpoint(label), durable, quiet=as_json)
    if as_json:
        dump(snapshot)
    else:
        written = size(snapshot.memory_bytes + snapshot.disk_bytes)
        say(f"{snapshot.id}: paused {duration(snapshot.pause_s)}, {written} written")


def fork(
    ctx: typer.Context,
    name: Name,
    count: Annotated[int, typer.Option("--count", "-n", help="How many.", min=1)] = 1,
    snapshot: Annotated[str | None, typer.Option(help="Fork this snapshot instead of the present.")] = None,
    names: Annotated[list[str] | None, typer.Option("--name", help="Names of the branches; repeatable.")] = None,
    json: JsonFlag = False,
) -> None:
    """Make new workspaces that continue where this one is."""
    as_json = wants_json(ctx, json)
    count = max(count, len(names)) if names and count == 1 else count
    workspace = find(name)
    with Bar(quiet=as_json) as bar:
        bar.show(f"Making {count} of {markup(name)}")
        made = workspace.fork(count, snapshot=snapshot, names=names or [])
    errors = [one for one in made if isinstance(one, PerdureError)]
    if as_json:
        results = [{"error": one.public()} if isinstance(one, PerdureError) else {"workspace": one.info} for one in made]
        dump({"results": results})
    else:
        for one in made:
            if isinstance(one, Workspace):
                say(f"[bold]{markup(one.name)}[/] is awake")
    if errors:
        raise errors[0]


def log(
    ctx: typer.Context,
    name: Name,
    after: Annotated[int, typer.Option(help="Only entries after this number.", min=0)] = 0,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1, max=10000)] = 1000,
    json: JsonFlag = False,
) -> None:
    """Show a workspace's thread: what happened to it, in order."""
    as_json = wants_json(ctx, json)
    try:
        with Client() as client:
            entries = client.log(name, after_seq=after, limit=limit)
    except NotFound as error:
        if not name.startswith("ws_"):
            error.hint += " The thread of a deleted one is read by its id, which 'perdure rm' printed: perdure log ws_…"
        raise
    if as_json:
        dump({"entries": entries})
        return
    rows = []
    for one in entries:
        what, detail = thread.line(one)
        rows.append((str(one.seq), f"[dim]{_moment(one.at)}[/]", f"[bold]{markup(what)}[/]", markup(detail)))
    table(("SEQ", "TIME (UTC)", "WHAT", "DETAIL"), rows, right=("SEQ",))


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def kept_count(info: public.WorkspaceInfo) -> str:
    """Retention in words, of the snapshots that nobody asked for."""
    if info.keep_snapshots is None:
        return "its last snapshot, and while awake as many before it as the server's setting says"
    return f"its newest {info.keep_snapshots} snapshots" if info.keep_snapshots > 1 else "only its last snapshot"


def resize(
    ctx: typer.Context,
    name: Name,
    disk_gib: Annotated[int, typer.Option(help="New size; a disk can only grow.", min=1)],
    json: JsonFlag = False,
) -> None:
    """Grow a workspace's disk; takes effect at its next disk boot."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    workspace.resize(disk_gib)
    if as_json:
        dump(workspace.info)
    else:
        say(f"[bold]{markup(workspace.name)}[/] has {workspace.info.disk_gib} GiB from its next disk boot on")


def recover(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The workspace's name or id.", show_default=False)] = None,
    how: Annotated[How, typer.Option(help="Again, one snapshot back, or its disk: if whole, or as it is.")] = How.RETRY,
    from_store: Annotated[
        bool, typer.Option("--from-store", help="No workspace, but the whole catalogue, when the database is lost.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Bring a failed workspace back; or, with --from-store, make the catalogue of a home that has lost its database.

    With --from-store no server may run: workspaces, snapshots and names are taken from what the object store (PERDURE_STORE_URL)
    holds. Whatever was never uploaded is not among it.
    """
    as_json = wants_json(ctx, json)
    if (name is None) != from_store:
        raise InvalidRequest(
            "Either the name of a workspace or --from-store is needed, and not both.",
            hint="perdure recover NAME, or perdure recover --from-store",
        )
    if name is None:
        recover_from_store(as_json=as_json)
        return
    workspace = find(name)
    with Bar(quiet=as_json) as bar:
        bar.show(f"Recovering {markup(name)}")
        report = workspace.recover(how.value)
    if as_json:
        dump({"workspace": workspace.info, "report": report})
    else:
        say(f"[bold]{markup(workspace.name)}[/] is awake: {woke(report)}")


def keep_awake(
    ctx: typer.Context,
    name: Name,
    seconds: Annotated[float, typer.Argument(help="0 ends an earlier wish.", min=0, show_default=False)],
    json: JsonFlag = False,
) -> None:
    """Do not let a workspace sleep for idleness for a while."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    workspace.keep_awake(seconds)
    if as_json:
        dump(workspace.info)
    else:
        say(f"[bold]{markup(workspace.name)}[/] stays awake for {duration(seconds)}" if seconds else "It may sleep again")


def rm(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names or ids.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonFlag = False,
) -> None:
    """Delete workspaces with all their snapshots; their branches stay. This cannot be undone."""
    as_json = wants_json(ctx, json)
    found = [find(name) for name in names]  # all must exist before any is deleted
    going = {one.id for one in found}
    staying = {one.id: [branch for branch in _branches(one) if branch.id not in going] for one in found}
    every = {branch.id: branch for branches in staying.values() for branch in branches}
    if not yes:
        _confirm(", ".join(markup(one.name) for one in found), _stay([*every.values()]))
    for one in found:
        one.delete()
        if not as_json:
            stay = "; its " + text if (text := _stay(staying[one.id])) else ""
            say(f"{markup(one.name)} is deleted{stay}; its thread stays: perdure log {one.info.id}")
    if as_json:
        kept = [{"id": branch.id, "name": branch.name} for branch in every.values()]
        dump({"deleted": [one.info.id for one in found], "branches": kept})


def _branches(workspace: Workspace) -> list[public.WorkspaceInfo]:
    """What was forked from it, and from that, and is still there."""
    nodes = workspace.tree()
    at = next(index for index, node in enumerate(nodes) if node.workspace.id == workspace.id)
    below = takewhile(lambda node: node.depth > nodes[at].depth, nodes[at + 1 :])
    return [node.workspace for node in below if node.workspace.state is not public.WorkspaceState.DELETED]


def _stay(branches: list[public.WorkspaceInfo]) -> str:
    names = ", ".join(markup(branch.name) for branch in branches)
    return f"branch {names} stays" if len(branches) == 1 else f"branches {names} stay" if names else ""


def _confirm(what: str, stay: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidRequest(f"Deleting {what} needs a confirmation and there is no terminal to ask on.", hint="Add --yes.")
    but = f" The {stay}." if stay else ""
    note(f"Delete {what} with memory, disk and all snapshots?{but} This cannot be undone. [dim]\\[y/N][/]")
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise InvalidRequest("Nothing was deleted.", hint="Answer y to delete.")
