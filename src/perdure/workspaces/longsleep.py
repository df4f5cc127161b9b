"""What becomes of a workspace that has been asleep for long. Pure.

Nothing, unless somebody said so for that very workspace: no setting and no parent does. A wake begins its sleep anew, and so does
whatever else changes its state. A deletion is announced in the thread and comes a day after that at the earliest, however late
the announcement is, so a server that was away for a month deletes nothing unannounced.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from perdure.workspaces.model import AsleepAction, Configuration, Workspace, WorkspaceState

WARNING = timedelta(days=1)


class Step(StrEnum):
    NOTHING = "nothing"
    WARN = "warn"
    ARCHIVE = "archive"
    DELETE = "delete"


def wish(workspace: Workspace, change: Configuration) -> tuple[float | None, AsleepAction]:
    """Days and action by what a workspace has and what is to change. To keep it needs no days."""
    action = change.asleep_action or workspace.asleep_action
    if change.asleep_action is AsleepAction.KEEP:
        return change.asleep_after_days, action
    return workspace.asleep_after_days if change.asleep_after_days is None else change.asleep_after_days, action


def noted_at(workspace: Workspace) -> datetime | None:
    """When this sleep was announced to end in a deletion, or archived."""
    return workspace.asleep_noted_at if workspace.asleep_noted == workspace.generation else None


def due_at(workspace: Workspace) -> datetime | None:
    """When it will have been asleep for as long as its policy says; None for one that is not asleep, or has none."""
    days = workspace.asleep_after_days
    if workspace.state is not WorkspaceState.HIBERNATED or workspace.asleep_action is AsleepAction.KEEP or days is None:
        return None
    return workspace.state_changed_at + timedelta(days=days)


def archived_at(workspace: Workspace) -> datetime | None:
    """Since when only the object store has it."""
    is_due = due_at(workspace) is not None and workspace.asleep_action is AsleepAction.ARCHIVE
    return noted_at(workspace) if is_due else None


def deletes_at(workspace: Workspace) -> datetime | None:
    """When it is deleted if nobody uses it until then, at the earliest. One that is to wake by itself before is not."""
    due = due_at(workspace)
    if due is None or workspace.asleep_action is not AsleepAction.DELETE or workspace.wake_at is not None:
        return None
    warned = noted_at(workspace)
    return due if warned is None else max(due, warned + WARNING)


def decide(workspace: Workspace, now: datetime) -> Step:
    """What is to be done about it now."""
    due, deletes, noted = due_at(workspace), deletes_at(workspace), noted_at(workspace)
    if deletes is not None:
        if noted is None:
            return Step.WARN if now >= deletes - WARNING else Step.NOTHING
        return Step.DELETE if now >= deletes else Step.NOTHING
    is_archivable = due is not None and workspace.asleep_action is AsleepAction.ARCHIVE and noted is None
    return Step.ARCHIVE if is_archivable and due is not None and now >= due else Step.NOTHING
