"""Rows to values and back: the edge where what PostgreSQL returns becomes typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb
from pydantic import TypeAdapter

from perdure.core.ids import NodeId, SnapshotId, TenantId, WorkspaceId
from perdure.wire.node import Confinement, MachineSize, SnapshotFacts
from perdure.workspaces.model import (
    AsleepAction,
    ResumeReport,
    Snapshot,
    SnapshotReason,
    TreeNode,
    Workspace,
    WorkspaceKind,
    WorkspaceState,
)

_REPORT = TypeAdapter(ResumeReport)
_CONFINEMENT = TypeAdapter(Confinement)


@dataclass(frozen=True, slots=True)
class Point:
    """As much of a snapshot as a start needs. ``origin_id`` is the workspace that ran when it was taken: what lies in it carries
    that one's identity, whoever starts from it now."""

    id: SnapshotId
    has_memory: bool
    disk_gib: int
    origin_id: WorkspaceId
    quiesced: bool


@dataclass(frozen=True, slots=True)
class Record:
    """A workspace with what only the control plane needs. ``now`` is the database's time of reading. ``alive_at`` is set where
    this process did not see the machine end: when it was last known to run."""

    workspace: Workspace
    node_id: NodeId
    head_has_memory: bool | None  # None: there is no head yet
    head_disk_gib: int | None
    head_origin_id: WorkspaceId | None
    head_quiesced: bool | None
    lost_branch: str | None
    kept_branch: str | None
    rewound: str
    report: ResumeReport | None
    now: datetime
    alive_at: datetime | None = None

    @property
    def head(self) -> Point | None:
        """Where a wake starts from."""
        snapshot_id = self.workspace.head_snapshot_id
        if snapshot_id is None:
            return None
        disk_gib = self.head_disk_gib or self.workspace.disk_gib
        return Point(snapshot_id, bool(self.head_has_memory), disk_gib, self.head_origin_id or self.id, bool(self.head_quiesced))

    @property
    def alarm(self) -> datetime | None:
        """The time to wake at by itself, if that has come."""
        wake_at = self.workspace.wake_at
        return wake_at if wake_at is not None and wake_at <= self.now else None

    @property
    def id(self) -> WorkspaceId:
        return self.workspace.id

    @property
    def generation(self) -> int:
        return self.workspace.generation

    @property
    def state(self) -> WorkspaceState:
        return self.workspace.state


def point(row: Mapping[str, Any]) -> Point:
    """Of a complete snapshot's row."""
    return Point(SnapshotId(row["id"]), row["has_memory"], row["disk_gib"], WorkspaceId(row["origin_id"]), row["quiesced"])


def record(row: Mapping[str, Any]) -> Record:
    return Record(
        workspace=_workspace(row),
        node_id=NodeId(row["node_id"]),
        head_has_memory=row["head_has_memory"],
        head_disk_gib=row["head_disk_gib"],
        head_origin_id=WorkspaceId(row["head_origin_id"]) if row["head_origin_id"] else None,
        head_quiesced=row["head_quiesced"],
        lost_branch=row["lost_branch"],
        kept_branch=row["kept_branch"],
        rewound=row["rewound"],
        report=_REPORT.validate_python(row["last_report"]) if row["last_report"] is not None else None,
        now=row["now"],
    )


def _workspace(row: Mapping[str, Any]) -> Workspace:
    return Workspace(
        id=WorkspaceId(row["id"]),
        tenant_id=TenantId(row["tenant_id"]),
        name=row["name"],
        kind=WorkspaceKind(row["kind"]),
        state=WorkspaceState(row["state"]),
        state_detail=row["state_detail"],
        generation=row["generation"],
        image=row["image"],
        image_name=row["image_name"],
        size=MachineSize(row["memory_mib"], row["vcpus"]),
        disk_gib=row["disk_gib"],
        head_snapshot_id=_snapshot_id(row["head_snapshot_id"]),
        parent_id=WorkspaceId(row["parent_id"]) if row["parent_id"] else None,
        forked_from=_snapshot_id(row["forked_from"]),
        hostname=row["hostname"],
        machine_id=row["machine_id"],
        idle_timeout_s=row["idle_timeout_s"],
        checkpoint_interval_s=row["checkpoint_interval_s"],
        egress_allow=tuple(row["egress_allow"]),
        environment=row["environment"],
        metadata=row["metadata"],
        confinement=_CONFINEMENT.validate_python(row["confinement"]) if row["confinement"] is not None else None,
        keep_awake_until=row["keep_awake_until"],
        created_at=row["created_at"],
        state_changed_at=row["state_changed_at"],
        last_active_at=row["last_active_at"],
        expires_at=row["expires_at"],
        keep_snapshots=row["keep_snapshots"],
        wake_at=row["wake_at"],
        asleep_after_days=row["asleep_after_days"],
        asleep_action=AsleepAction(row["asleep_action"]),
        asleep_noted=row["asleep_noted"],
        asleep_noted_at=row["asleep_noted_at"],
    )


def snapshot(row: Mapping[str, Any]) -> Snapshot:
    return Snapshot(
        id=SnapshotId(row["id"]),
        workspace_id=WorkspaceId(row["workspace_id"]),
        parent_id=_snapshot_id(row["parent_id"]),
        name=row["name"],
        reason=SnapshotReason(row["reason"]),
        generation=row["generation"],
        has_memory=row["has_memory"],
        quiesced=row["quiesced"],
        memory_bytes=row["memory_bytes"],
        memory_total_bytes=row["memory_total_bytes"],
        disk_bytes=row["disk_bytes"],
        disk_total_bytes=row["disk_total_bytes"],
        pause_s=row["pause_s"],
        created_at=row["created_at"],
        disk_gib=row["disk_gib"],
        stored_at=row.get("stored_at"),
    )


def tree_node(row: Mapping[str, Any]) -> TreeNode:
    return TreeNode(
        workspace=_workspace(row),
        depth=row["depth"],
        forked_name=row["forked_name"],
        forked_at=row["forked_at"],
        own_bytes=row["own_bytes"],
        total_bytes=row["total_bytes"],
    )


def facts_parameters(facts: SnapshotFacts) -> dict[str, Any]:
    """What ``snapshots.complete`` stores of a manifest."""
    names = (
        *("has_memory", "quiesced", "pages", "memory_bytes", "memory_total_bytes", "disk_bytes", "disk_total_bytes"),
        *("device_bytes", "pause_s", "fingerprint", "parent_id", "image", "disk_gib"),
    )
    values = {name: getattr(facts, name) for name in names}
    return values | {"id": facts.snapshot_id, "memory_mib": facts.size.memory_mib, "vcpus": facts.size.vcpus}


def report_json(report: ResumeReport) -> Jsonb:
    return Jsonb(report_body(report))


def report_body(report: ResumeReport) -> dict[str, Any]:
    """Plain JSON values of a report, for the row and for the journal."""
    body: dict[str, Any] = _REPORT.dump_python(report, mode="json")
    return body


def confinement_json(confinement: Confinement) -> Jsonb:
    return Jsonb(_CONFINEMENT.dump_python(confinement, mode="json"))


def _snapshot_id(value: str | None) -> SnapshotId | None:
    return SnapshotId(value) if value else None
