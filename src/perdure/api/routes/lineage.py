"""Snapshots of a workspace in their tree, and how many it keeps."""

from __future__ import annotations

from fastapi import APIRouter

from perdure.api import render
from perdure.api.deps import Call, Paging
from perdure.core.paging import Place, cut
from perdure.wire import public
from perdure.workspaces import model

router = APIRouter(prefix="/workspaces", tags=["snapshots"])


@router.patch("/{ref}")
async def configure_workspace(ref: str, body: public.ConfigureWorkspace, call: Call) -> public.WorkspaceInfo:
    """Change its timers, how many snapshots it keeps and what becomes of it after a long sleep. Never wakes it."""
    change = model.Configuration(
        keep_snapshots=body.keep_snapshots,
        idle_timeout_s=body.idle_timeout_s,
        checkpoint_interval_s=body.checkpoint_interval_s,
        asleep_after_days=body.asleep_after_days,
        asleep_action=None if body.asleep_action is None else model.AsleepAction(body.asleep_action),
    )
    return render.workspace(await call.workspaces.configure(call.ctx, ref, change))


@router.get("/{ref}/snapshots")
async def list_snapshots(ref: str, call: Call, page: Paging) -> public.SnapshotList:
    """The tree, oldest first, in pages: what each descends from, what keeps it, what hangs on it, what it weighs."""
    found = await call.workspaces.lineage(call.ctx, ref, page)
    shown = cut(found, page, lambda one: Place(one.snapshot.created_at, one.snapshot.id))
    return public.SnapshotList(snapshots=[render.place(one) for one in shown.items], next_cursor=shown.next_cursor)


@router.patch("/{ref}/snapshots/{snapshot}")
async def name_snapshot(ref: str, snapshot: str, body: public.NameSnapshot, call: Call) -> public.SnapshotInfo:
    """Give a snapshot a name, which keeps it, or take its name away. A name in use is 409."""
    return render.snapshot(await call.workspaces.name_snapshot(call.ctx, ref, snapshot, body.name))


@router.post("/{ref}/snapshots/{snapshot}/push")
async def push_snapshot(ref: str, snapshot: str, call: Call, body: public.PushSnapshot | None = None) -> public.SnapshotInfo:
    """Upload a snapshot now and answer when the object store has it. 504 after the deadline, while the upload goes on; another
    error says why it failed, and it is tried again by itself. 409 on a server without an object store."""
    deadline_s = body.deadline_s if body else None
    return render.snapshot(await call.workspaces.push_snapshot(call.ctx, ref, snapshot, deadline_s=deadline_s))


@router.delete("/{ref}/snapshots/{snapshot}")
async def remove_snapshot(ref: str, snapshot: str, call: Call) -> public.SnapshotInfo:
    """Remove a snapshot. 409 with the reason when a workspace wakes from it or was forked from it, or something needs it."""
    return render.snapshot(await call.workspaces.remove_snapshot(call.ctx, ref, snapshot))
