"""Workspaces and their lifecycle."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from perdure.api import render
from perdure.api.deps import Call, Cursor, Paging
from perdure.core.errors import InvalidRequest
from perdure.core.paging import Place, cut, seq_cursor, seq_of
from perdure.wire import public
from perdure.workspaces import model

router = APIRouter(prefix="/workspaces", tags=["workspaces"])
#: Checked here, for a sentence of our own.
MetadataFilter = Annotated[str, Field(json_schema_extra={"pattern": "^[^=\\u0000]+=[^\\u0000]*$"})]


@router.post("", status_code=201)
async def create_workspace(body: public.CreateWorkspace, call: Call) -> public.CreatedAnswer:
    """Make a workspace; answers when it is awake. A name in use is 409 and makes nothing, but for a request that has made it and
    is repeated with its key. Allowed addresses that the operator does not allow too are a warning."""
    spec = model.CreateWorkspace(
        name=body.name,
        image=body.image,
        memory_mib=body.memory_mib,
        vcpus=body.vcpus,
        disk_gib=body.disk_gib,
        idle_timeout_s=body.idle_timeout_s,
        checkpoint_interval_s=body.checkpoint_interval_s,
        keep_snapshots=body.keep_snapshots,
        asleep_after_days=body.asleep_after_days,
        asleep_action=model.AsleepAction(body.asleep_action),
        egress_allow=tuple(body.egress_allow),
        environment=body.environment,
        metadata=body.metadata,
        request_key=body.request_key,
    )
    workspace, report = await call.workspaces.create(call.ctx, spec)
    call.about(workspace.id)
    warnings = await call.services.foresee_egress(workspace.egress_allow)
    return public.CreatedAnswer(workspace=render.workspace(workspace), report=render.resume_report(report), warnings=warnings)


@router.get("")
async def list_workspaces(
    call: Call,
    page: Paging,
    state: Annotated[list[public.WorkspaceState] | None, Query(description="In any of these states.")] = None,
    metadata: Annotated[list[MetadataFilter] | None, Query(description="KEY=VALUE, all of them.")] = None,
    image: Annotated[str | None, Query(description="Made of the image of this name or digest.")] = None,
    name_prefix: Annotated[str | None, Query(description="With a name that begins so.")] = None,
) -> public.WorkspaceList:
    """All that are not deleted, newest last, in pages: each one that is there all the time is in exactly one of them, whatever
    is made and deleted meanwhile."""
    states = tuple(model.WorkspaceState(one.value) for one in state or [])
    wanted = model.Wanted(states, dict(_pair(text) for text in metadata or []), image, name_prefix)
    found = await call.workspaces.find(call.ctx, wanted, page)
    shown = cut(found, page, lambda one: Place(one.created_at, one.id))
    return public.WorkspaceList(workspaces=[render.workspace(one) for one in shown.items], next_cursor=shown.next_cursor)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidRequest(f"The metadata filter {text!r} is not KEY=VALUE.", hint="Write it as KEY=VALUE.")
    return key, value


@router.get("/{ref}")
async def get_workspace(ref: str, call: Call) -> public.WorkspaceInfo:
    """By id or name. Never wakes it."""
    return render.workspace(await call.workspaces.get(call.ctx, ref))


@router.delete("/{ref}")
async def delete_workspace(ref: str, call: Call) -> public.Done:
    """Free everything it holds, its snapshots included. Deleting a deleted one succeeds."""
    await call.workspaces.delete(call.ctx, ref)
    return public.Done()


@router.post("/{ref}/wake")
async def wake_workspace(ref: str, call: Call, body: public.WakeWorkspace | None = None) -> public.AwakeAnswer:
    """Many callers cause one wake; each gets its report."""
    deadline_s = body.deadline_s if body else None
    workspace, report = await call.workspaces.wake(call.ctx, ref, deadline_s=deadline_s)
    call.about(workspace.id)
    return public.AwakeAnswer(workspace=render.workspace(workspace), report=render.resume_report(report))


@router.post("/{ref}/sleep")
async def sleep_workspace(ref: str, call: Call) -> public.AsleepAnswer:
    """Hibernate now; answers when nothing of it runs and its snapshot is durable."""
    workspace, snapshot = await call.workspaces.sleep(call.ctx, ref)
    return public.AsleepAnswer(workspace=render.workspace(workspace), snapshot=render.snapshot(snapshot))


@router.post("/{ref}/checkpoint")
async def checkpoint_workspace(ref: str, call: Call, body: public.CheckpointWorkspace | None = None) -> public.SnapshotInfo:
    """Record a running workspace; it pauses for some milliseconds and goes on."""
    return render.snapshot(await call.workspaces.checkpoint(call.ctx, ref, name=body.name if body else None))


@router.post("/{ref}/fork", status_code=201)
async def fork_workspace(ref: str, body: public.ForkWorkspace, call: Call) -> public.ForkAnswer:
    """New workspaces from one snapshot, each awake with its own identity. One that fails does not fail the others."""
    made = await call.workspaces.fork(call.ctx, ref, body.count, snapshot=body.snapshot, names=tuple(body.names))
    return public.ForkAnswer(results=[render.fork_result(one) for one in made])


@router.post("/{ref}/rewind")
async def rewind_workspace(ref: str, body: public.RewindWorkspace, call: Call) -> public.AwakeAnswer:
    """Go on from an earlier snapshot. What it was until now is kept as a sleeping branch that the report names."""
    workspace, report = await call.workspaces.rewind(call.ctx, ref, body.snapshot)
    return public.AwakeAnswer(workspace=render.workspace(workspace), report=render.resume_report(report))


@router.post("/{ref}/promote")
async def promote_branch(ref: str, call: Call) -> public.AwakeAnswer:
    """The branch's state becomes that of the workspace it was forked from, which is answered, awake; the branch ends. What the
    workspace was is kept as a sleeping branch that the report names."""
    workspace, report = await call.workspaces.promote(call.ctx, ref)
    return public.AwakeAnswer(workspace=render.workspace(workspace), report=render.resume_report(report))


@router.post("/{ref}/discard")
async def discard_branch(ref: str, call: Call) -> public.Done:
    """Free a branch; what is not one is refused. Discarding a discarded one, by its id, succeeds."""
    await call.workspaces.discard(call.ctx, ref)
    return public.Done()


@router.get("/{ref}/tree")
async def workspace_tree(ref: str, call: Call) -> public.WorkspaceTree:
    """The whole tree that a workspace belongs to: what was forked from what, and when."""
    return render.tree(await call.workspaces.tree(call.ctx, ref))


@router.post("/{ref}/resize")
async def resize_workspace(ref: str, body: public.ResizeWorkspace, call: Call) -> public.WorkspaceInfo:
    """Grow the disk; takes effect at its next disk boot."""
    return render.workspace(await call.workspaces.resize(call.ctx, ref, body.disk_gib))


@router.post("/{ref}/recover")
async def recover_workspace(ref: str, body: public.RecoverWorkspace, call: Call) -> public.AwakeAnswer:
    """The exits from ``failed``."""
    workspace, report = await call.workspaces.recover(call.ctx, ref, model.Recovery(body.how))
    return public.AwakeAnswer(workspace=render.workspace(workspace), report=render.resume_report(report))


@router.post("/{ref}/keep-awake")
async def keep_awake(ref: str, body: public.KeepAwake, call: Call) -> public.WorkspaceInfo:
    """Do not hibernate it for idleness for so many seconds; 0 ends an earlier wish."""
    workspace = await call.workspaces.keep_awake(call.ctx, ref, body.seconds)
    call.about(workspace.id)
    return render.workspace(workspace)


@router.post("/{ref}/wake-at")
async def wake_at(ref: str, body: public.WakeAt, call: Call) -> public.WorkspaceInfo:
    """Let it wake by itself, once, at a time or so many seconds from now; null: not any more. Another time takes the place of the
    one before. A time that has passed is met at once. Does not wake it before."""
    when = timedelta(seconds=body.in_s) if body.in_s is not None else body.at
    return render.workspace(await call.workspaces.wake_at(call.ctx, ref, when))


@router.get("/{ref}/report")
async def resume_report(ref: str, call: Call) -> public.ReportAnswer:
    """What the last wake kept."""
    report = await call.workspaces.report(call.ctx, ref)
    return public.ReportAnswer(report=render.resume_report(report) if report else None)


@router.get("/{ref}/log")
async def workspace_log(
    ref: str,
    call: Call,
    after_seq: Annotated[int, Query(ge=0, lt=1 << 63, description="Only entries after this one; a cursor comes before it.")] = 0,
    limit: Annotated[int, Query(ge=1, le=10000, description="At most so many.")] = 1000,
    cursor: Cursor = None,
) -> public.Log:
    """The thread: what happened to this workspace, in order, hash-chained."""
    begin = after_seq if cursor is None else seq_of(cursor)
    entries = await call.workspaces.log(call.ctx, ref, after_seq=begin, limit=limit + 1)
    shown = entries[:limit]
    following = seq_cursor(shown[-1].seq) if len(entries) > limit else None
    return public.Log(entries=[render.log_entry(one) for one in shown], next_cursor=following)
