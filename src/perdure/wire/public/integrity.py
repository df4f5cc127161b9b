"""Verification of stored snapshots."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from perdure.wire.public.common import Answer, Body, ErrorInfo, Text
from perdure.wire.public.workspaces import UploadInfo


class VerifySnapshots(Body):
    """Without ``workspace``: the snapshots of all workspaces. ``snapshot`` is one of the workspace's, by id or name. ``boot``:
    start each that is whole in a throwaway machine, too."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"snapshot": {"type": "null"}}},
                {"properties": {"workspace": {"type": "string"}}, "required": ["workspace"]},
            ]
        }
    )

    workspace: Text | None = None
    snapshot: Text | None = None
    boot: bool = False

    @model_validator(mode="after")
    def _of_a_workspace(self) -> VerifySnapshots:
        if self.snapshot is not None and self.workspace is None:
            raise ValueError("a snapshot needs the workspace it is of")
        return self


class DamageInfo(Answer):
    """A stored file that is missing or not as it was written, by its name below the node's store or (``images/…``) its images."""

    file: str
    problem: str


class TrialInfo(Answer):
    """A snapshot was started in a throwaway machine, up to the agent's answer. ``problem`` is empty when it came up; ``reason``
    says why its disk was booted without its memory, as a resume report would."""

    kind: Literal["memory", "disk"]
    reason: str
    seconds: float
    problem: str


class VerifiedSnapshot(Answer):
    """``ancestor``: of a damaged one, the newest intact one before it. ``disk_intact``: whether its disk boots by itself.
    ``read_from``: the object store when the node does not have it; such a one is not started. ``durable`` and ``upload`` as of a
    snapshot: what the node has is all that was read, however far its upload is."""

    workspace: str
    workspace_id: str
    snapshot_id: str
    name: str | None = None
    intact: bool
    damage: list[DamageInfo]
    disk_intact: bool
    ancestor: str | None = None
    trial: TrialInfo | None = None
    read_from: Literal["node", "store"] = "node"
    durable: Literal["local", "store"] = "local"
    upload: UploadInfo | None = None


class VerifyEvent(Answer):
    """One line of a verification's stream: ``progress`` (bytes of a file that were read since the last one), ``snapshot`` (what
    was found of one), and at the end ``done`` with the sums, or ``error``."""

    type: Literal["progress", "snapshot", "done", "error", "heartbeat"]
    workspace: str = ""
    snapshot_id: str = ""
    file: str = ""
    read_bytes: int = Field(default=0, description="In progress since the last line; in done of all files together.")
    done: int = Field(default=0, description="Snapshots that are done with.")
    count: int = Field(default=0, description="Snapshots in all.")
    damaged: int = 0
    result: VerifiedSnapshot | None = None
    error: ErrorInfo | None = None
