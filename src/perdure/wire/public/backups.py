"""Backups of the whole server, and what brought it back."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from perdure.wire.public.common import Answer, Body, ErrorInfo, Text


class MakeBackup(Body):
    """``to`` is a directory on the server's machine (absolute), or s3://, gs:// or az:// with a prefix; it holds nothing else, or
    earlier backups. ``with_master_key``: whoever can read the backup can then read and forge what the key protects.
    ``skip_damaged``: damaged snapshots are left out and named; without it the first one ends the backup."""

    to: Text
    with_master_key: bool = False
    skip_damaged: bool = False


class LeftOutInfo(Answer):
    """A snapshot that is damaged, and therefore not in a backup. ``has_disk``: its disk is in it, its memory is not. ``snapshot``
    null: the workspace has none, and its image is what is damaged."""

    snapshot: str | None = None
    workspace: str
    why: str
    has_disk: bool


class BackupInfo(Answer):
    """A backup that is complete. ``awake`` are the workspaces that ran: they are in it as of their last snapshot."""

    id: str
    place: str
    created_at: datetime
    workspaces: int
    snapshots: int
    images: int
    awake: list[str]
    sent_bytes: int = Field(description="What this backup added to the place, as stored.")
    content_bytes: int = Field(description="What had to be read for that. What earlier backups have is not read.")
    encrypted: bool
    has_master_key: bool
    left_out: list[LeftOutInfo] = Field(default_factory=list, description="Only where the backup was to skip what is damaged.")


class BackupEvent(Answer):
    """One line of a backup's stream: ``progress`` (``done`` of ``count`` of ``what`` are there), then ``done``, or ``error``."""

    type: Literal["progress", "done", "error", "heartbeat"]
    what: Literal["database", "images", "snapshots"] | None = None
    name: str = ""
    done: int = 0
    count: int = 0
    sent_bytes: int = 0
    backup: BackupInfo | None = None
    error: ErrorInfo | None = None


class RestoredInfo(Answer):
    """What a restore brought back. ``set_back`` were not asleep at the backup: they are at their last snapshot, and of these
    ``unsaved`` had none, so that they begin anew. ``lost``: what could not come back, or not whole, in sentences.
    ``skipped``: snapshots that are damaged in the place."""

    backup: str
    of: datetime
    workspaces: int
    snapshots: int
    set_back: list[str]
    unsaved: list[str]
    lost: list[str]
    skipped: list[str] = Field(default_factory=list)


class RecoveredInfo(Answer):
    """A catalogue made from an object store. ``only_here`` of the snapshots are on this node and not in the store.
    ``nameless`` got names of ours; ``damaged``: what could not be read and why; ``incomplete``: snapshots of which parts are
    missing. ``kept_until``: for so long nothing is collected where something was left out; None when nothing was."""

    workspaces: list[str]
    snapshots: int
    only_here: int
    nameless: list[str]
    incomplete: list[str]
    damaged: dict[str, str]
    kept_until: datetime | None
