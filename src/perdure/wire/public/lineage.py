"""Snapshots in their tree, and what an owner may say about them and about how many are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from perdure.wire.public.common import Body, Paged, SnapshotName
from perdure.wire.public.idle import AsleepAction, Days
from perdure.wire.public.workspaces import IdleTimer, KeepSnapshots, SnapshotInfo, Timer


class SnapshotPlace(SnapshotInfo):
    """A snapshot in its tree. ``parent_id`` is the closest ancestor that is still there, in this workspace or in the one it was
    forked from. ``kept`` says why it stays; with nothing there it is about to go. Sizes in bytes, None when the node does not
    have it whole: ``own_bytes`` become free when it is removed."""

    is_head: bool
    kept: list[Literal["head", "referenced", "named", "requested", "origin", "recent"]]
    branches: list[str]
    references: list[str]
    own_bytes: int | None
    shared_bytes: int | None
    total_bytes: int | None


class SnapshotList(Paged):
    """Oldest first."""

    snapshots: list[SnapshotPlace]


class NameSnapshot(Body):
    """None takes the name away."""

    name: SnapshotName | None


class ConfigureWorkspace(Body):
    """What is left out stays as it is. ``default`` gives ``keep_snapshots`` back to the server's setting; the action ``keep``
    takes the days back."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    keep_snapshots: KeepSnapshots | Literal["default"] | None = None
    idle_timeout_s: IdleTimer | None = None
    checkpoint_interval_s: Timer | None = None
    asleep_after_days: Days | None = None
    asleep_action: AsleepAction | None = None
