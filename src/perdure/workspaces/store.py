"""Everything the workspace service reads and writes in the database.

Every write names the generation and the state it was decided on; when either has changed no row does, and ``StaleGeneration`` is
raised. A transition and its journal entry are one statement.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from psycopg.types.json import Jsonb

from perdure.access.quotas import Quotas
from perdure.core.errors import AlreadyExists, Conflict, NotFound, StaleGeneration
from perdure.core.ids import NodeId, SnapshotId, TenantId, WorkspaceId
from perdure.core.paging import WHOLE, Page
from perdure.db.database import Database, Transaction
from perdure.journal.entries import canonical
from perdure.wire.node import SnapshotFacts
from perdure.workspaces import lineage, rows
from perdure.workspaces.lifecycle import WITH_MACHINE, Event, Refusal, Transition, decide
from perdure.workspaces.model import (
    ANY,
    AsleepAction,
    ResumeReport,
    Snapshot,
    SnapshotReason,
    TreeNode,
    Wanted,
    WorkspaceKind,
    WorkspaceState,
)
from perdure.workspaces.rows import Point, Record


@dataclass(frozen=True, slots=True)
class NewWorkspace:
    """A row to insert, state ``creating`` unless it holds what another workspace was (``hibernated`` from the start)."""

    id: WorkspaceId
    tenant_id: TenantId
    name: str
    kind: WorkspaceKind
    node_id: NodeId
    image: str
    image_name: str
    memory_mib: int
    vcpus: int
    disk_gib: int
    hostname: str
    machine_id: str
    idle_timeout_s: float
    checkpoint_interval_s: float
    keep_snapshots: int | None = None
    asleep_after_days: float | None = None
    asleep_action: AsleepAction = AsleepAction.KEEP
    egress_allow: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    request_key: str | None = None
    head_snapshot_id: SnapshotId | None = None
    parent_id: WorkspaceId | None = None
    forked_from: SnapshotId | None = None
    expires_s: float | None = None
    detail: str = ""
    state: WorkspaceState = WorkspaceState.CREATING

    @classmethod
    def child(cls, at: Record, snapshot_id: SnapshotId, new_id: WorkspaceId, *, name: str, hostname: str) -> NewWorkspace:
        """A branch of a workspace at a snapshot, like it in everything but its identity and what becomes of it after a long
        sleep: nothing is deleted of which nobody said so."""
        parent = at.workspace
        return cls(
            id=new_id,
            tenant_id=parent.tenant_id,
            name=name,
            kind=WorkspaceKind.BRANCH,
            node_id=at.node_id,
            image=parent.image,
            image_name=parent.image_name,
            memory_mib=parent.size.memory_mib,
            vcpus=parent.size.vcpus,
            disk_gib=parent.disk_gib,
            hostname=hostname,
            machine_id=secrets.token_hex(16),
            idle_timeout_s=parent.idle_timeout_s,
            checkpoint_interval_s=parent.checkpoint_interval_s,
            keep_snapshots=parent.keep_snapshots,
            egress_allow=parent.egress_allow,
            environment=parent.environment,
            metadata=parent.metadata,
            head_snapshot_id=snapshot_id,
            parent_id=at.id,
            forked_from=snapshot_id,
        )


@dataclass(frozen=True, slots=True)
class Change:
    """What a transition changes besides the state; None keeps a column."""

    detail: str = ""
    head: SnapshotId | None = None
    lost_branch: str | None = None  # "" forgets it
    kept_branch: str | None = None  # added to those that the next report names
    rewound: str | None = None
    unused_s: float | None = None  # how long ago it was last used
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a workspace stands, in brief."""

    id: WorkspaceId
    state: WorkspaceState
    generation: int
    head: SnapshotId | None
    has_unfinished: bool  # a snapshot of it is pending
    is_stored: bool  # the object store has its head


class SnapshotState(StrEnum):
    """pending ─(the node made it)→ complete ─(superseded, freed)→ deleting ─(the node deleted it)→ no row."""

    PENDING = "pending"
    COMPLETE = "complete"
    DELETING = "deleting"


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A row of ``snapshots`` as the reconciler sees it."""

    id: SnapshotId
    workspace_id: WorkspaceId
    state: SnapshotState
    reason: SnapshotReason


#: Journal kinds where the state's name does not say it.
_KINDS = {Event.CHECKPOINTED: "checkpoint", Event.SALVAGED: "salvaged"}


def transition_or_refuse(name: str, state: WorkspaceState, event: Event) -> Transition:
    """The table's answer, or Conflict with its reason."""
    answer = decide(state, event)
    if isinstance(answer, Refusal):
        hint = None
        if state is WorkspaceState.FAILED:
            hint = f"Bring it back first: 'perdure recover {name}'; 'perdure show {name}' says what is wrong."
        raise Conflict(f"Workspace {name!r} cannot do that now: {answer.reason}.", hint=hint, internal=f"{state} {event}")
    return answer


class WorkspaceStore:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.quotas = Quotas(database)

    # ------------------------------------------------------------------------------------------------------------ workspaces

    async def insert(self, new: NewWorkspace, body: Mapping[str, Any], tx: Transaction | None = None) -> Record:
        """Raises AlreadyExists when the name is in use."""
        parameters = {name: getattr(new, name) for name in NewWorkspace.__slots__}
        parameters |= {"environment": Jsonb(dict(new.environment)), "metadata": Jsonb(dict(new.metadata))}
        parameters |= {"egress_allow": list(new.egress_allow), "entry_kind": new.state.value}
        entry = {"from": None, "to": new.state.value, "name": new.name, "kind": new.kind.value, **body}
        try:
            row = await (tx or self.database).one("workspaces.insert", **parameters, body=canonical(entry))
        except AlreadyExists as error:
            raise AlreadyExists(
                f"A workspace named {new.name!r} exists already.", hint="Choose another name, or delete that one first."
            ) from error
        assert row is not None, "an insert returns its row or raises"
        return rows.record(row)

    async def by_id(self, workspace_id: WorkspaceId) -> Record:
        """Deleted ones included. Raises NotFound."""
        row = await self.database.one("workspaces.by_id", id=workspace_id)
        if row is None:
            raise NotFound(f"There is no workspace {workspace_id!r}.")
        return rows.record(row)

    async def by_ref(self, tenant_id: TenantId, ref: str) -> Record:
        """By id or name within a tenant; a deleted one is found by its id only. Raises NotFound."""
        row = await self.database.one("workspaces.by_ref", tenant_id=tenant_id, ref=ref)
        if row is None:
            raise NotFound(f"There is no workspace {ref!r}.", hint="'perdure ls' shows those there are.")
        return rows.record(row)

    async def by_request(self, tenant_id: TenantId, request_key: str) -> Record | None:
        """The one that a request of this key has made, unless it is deleted."""
        row = await self.database.one("workspaces.by_request", tenant_id=tenant_id, request_key=request_key)
        return rows.record(row) if row else None

    async def find(self, tenant_id: TenantId, wanted: Wanted = ANY, page: Page = WHOLE) -> list[Record]:
        found = await self.database.all(
            "workspaces.find",
            **{"tenant_id": tenant_id, "states": [state.value for state in wanted.states]},
            **{"metadata": Jsonb(dict(wanted.metadata)), "image": wanted.image, "name_prefix": wanted.name_prefix},
            **{"after_at": page.after_at, "after_id": page.after_id, "limit": page.sought},
        )
        return [rows.record(row) for row in found]

    async def names_like(self, tenant_id: TenantId, prefix: str) -> set[str]:
        return {row["name"] for row in await self.database.all("workspaces.names_like", tenant_id=tenant_id, prefix=prefix)}

    @asynccontextmanager
    async def needing_image(self, digest: str) -> AsyncIterator[list[str]]:
        """Names of what needs an image. Until this ends nobody else begins to: an insert waits."""
        async with self.database.transaction() as tx:
            await tx.run("workspaces.lock_image", image=digest)
            yield [row["name"] for row in await tx.all("workspaces.names_using_image", image=digest)]

    async def move(self, at: Record, event: Event, change: Change | None = None, tx: Transaction | None = None) -> Record:
        """Make the transition that ``event`` means. Raises Conflict (the table refuses) or StaleGeneration (the row moved on)."""
        change = change or Change()
        answer = transition_or_refuse(at.workspace.name, at.state, event)
        body = {"from": at.state.value, "to": answer.to.value, "event": event.value, **change.body}
        if change.detail:
            body["detail"] = change.detail
        if at.alive_at is not None and answer.to not in WITH_MACHINE and "spent" not in body:  # its meters answer: it runs
            body["alive_until"] = at.alive_at.isoformat()
        row = await (tx or self.database).one(
            "workspaces.move",
            **{"id": at.id, "generation": at.generation, "from": at.state.value, "to": answer.to.value},
            **{"grow": int(answer.new_generation), "detail": change.detail, "head": change.head},
            **{"lost_branch": change.lost_branch, "kept_branch": change.kept_branch},
            **{"rewound": change.rewound, "unused_s": change.unused_s},
            **{"kind": _KINDS.get(event, answer.to.value), "body": canonical(body)},
        )
        moved = rows.record(self._unless_stale(at, row))
        return replace(moved, alive_at=at.alive_at) if answer.to in WITH_MACHINE else moved

    async def started(self, at: Record, report: ResumeReport) -> Record:
        """creating or waking → running, with its report. A time to wake at that the report tells has been met."""
        transition_or_refuse(at.workspace.name, at.state, Event.STARTED)
        body = {"from": at.state.value, "to": "running", "event": "started", "report": rows.report_body(report)}
        row = await self.database.one(
            "workspaces.started",
            **{"id": at.id, "generation": at.generation, "from": at.state.value, "body": canonical(body)},
            **{"confinement": rows.confinement_json(report.confinement), "report": rows.report_json(report)},
            alarm=report.wake_at,
        )
        return rows.record(self._unless_stale(at, row))

    async def set_detail(self, at: Record, detail: str, *, paused: bool | None = None) -> None:
        """Say something about the state, and whether its machine stands still from now on; silently nothing when the workspace
        has moved on."""
        body = {"state": at.state.value, "detail": detail} | ({} if paused is None else {"paused": paused})
        await self.database.one(
            "workspaces.set_detail",
            **{"id": at.id, "generation": at.generation, "state": at.state.value},
            **{"detail": detail, "body": canonical(body)},
        )

    async def not_seen(self, at: Record) -> Record:
        """One whose machine this process has not seen since it began: with when that was last known to run."""
        row = await self.database.one("nodes.last_sign", id=at.id)
        return replace(at, alive_at=row["alive_at"] if row else None)

    async def compared(self, node_id: NodeId) -> None:
        """Rows and machines of a node agree, and go on doing so while this process lives: what ends is told."""
        await self.database.run("nodes.compared", id=node_id)

    async def asleep_since(self, at: Record) -> datetime:
        """When it stopped being awake, whatever has been tried since."""
        row = await self.database.one("workspaces.asleep_since", id=at.id)
        since: datetime = at.workspace.state_changed_at if row is None else row["at"]
        return since

    async def resize(self, at: Record, disk_gib: int, by: str, tx: Transaction | None = None) -> Record | None:
        """None when that would shrink the disk."""
        body = canonical({"disk_gib": disk_gib, "was": at.workspace.disk_gib, "by": by})
        row = await (tx or self.database).one("workspaces.resize", id=at.id, disk_gib=disk_gib, body=body)
        return rows.record(row) if row else None

    async def keep_awake(self, at: Record, seconds: float, by: str) -> Record:
        body = canonical({"seconds": seconds, "by": by})
        row = await self.database.one("workspaces.keep_awake", id=at.id, seconds=seconds, body=body)
        return rows.record(self._unless_stale(at, row))

    async def standing(self, node_id: NodeId) -> list[Standing]:
        """Every workspace of a node that is not deleted, as briefly as a reconciler needs it."""
        found = await self.database.all("workspaces.standing", node_id=node_id)
        return [
            Standing(
                WorkspaceId(row["id"]),
                WorkspaceState(row["state"]),
                row["generation"],
                SnapshotId(row["head_snapshot_id"]) if row["head_snapshot_id"] else None,
                row["has_unfinished"],
                row["is_stored"],
            )
            for row in found
        ]

    async def expired(self, node_id: NodeId) -> list[WorkspaceId]:
        return [WorkspaceId(row["id"]) for row in await self.database.all("workspaces.expired", node_id=node_id)]

    @staticmethod
    def _unless_stale(at: Record, row: dict[str, Any] | None) -> dict[str, Any]:
        if row is None:
            raise StaleGeneration(
                f"Workspace {at.workspace.name!r} has moved on from generation {at.generation} ({at.state.value})."
            )
        return row

    # ------------------------------------------------------------------------------------------------------------- snapshots

    async def intend(self, at: Record, snapshot_id: SnapshotId, reason: SnapshotReason, name: str | None = None) -> None:
        """Record that a snapshot is about to be made. Raises StaleGeneration, or AlreadyExists for its name."""
        await self.intend_in(self.database, at, snapshot_id, reason, name)

    async def intend_in(
        self, tx: Transaction | Database, at: Record, snapshot_id: SnapshotId, reason: SnapshotReason, name: str | None
    ) -> None:
        try:
            row = await tx.one(
                "snapshots.insert_pending",
                **{"id": snapshot_id, "workspace_id": at.id, "generation": at.generation},
                **{"reason": reason.value, "name": name, "node_id": at.node_id},
            )
        except AlreadyExists as error:
            raise AlreadyExists(f"Workspace {at.workspace.name!r} has a snapshot named {name!r} already.") from error
        self._unless_stale(at, row)

    async def complete(self, tx: Transaction, facts: SnapshotFacts, owner_id: WorkspaceId | None = None) -> Snapshot | None:
        """Pending → complete; None when no such row is pending."""
        row = await tx.one("snapshots.complete", **rows.facts_parameters(facts), owner_id=owner_id)
        return rows.snapshot(row) if row else None

    async def forget(self, *snapshot_ids: SnapshotId) -> None:
        """Drop rows that are not complete: the node has no such snapshot."""
        if snapshot_ids:
            await self.database.run("retention.drop", ids=list(snapshot_ids))

    async def snapshots(self, workspace_id: WorkspaceId) -> list[Snapshot]:
        return [rows.snapshot(row) for row in await self.database.all("snapshots.of_workspace", workspace_id=workspace_id)]

    async def snapshot(self, at: Record, ref: str) -> Snapshot:
        """One of the workspace's own, by id or name. Raises NotFound."""
        row = await self.database.one("snapshots.by_ref", tenant_id=at.workspace.tenant_id, workspace_id=at.id, ref=ref)
        if row is None:
            raise NotFound(
                f"Workspace {at.workspace.name!r} has no snapshot {ref!r}.", hint="'perdure snapshot ls' shows those it has."
            )
        return rows.snapshot(row)

    async def point(self, at: Record, ref: str) -> Point:
        """One that the workspace may start from, by id or name. Raises NotFound."""
        row = await self.database.one("snapshots.by_ref", tenant_id=at.workspace.tenant_id, workspace_id=at.id, ref=ref)
        if row is None:
            raise NotFound(
                f"Workspace {at.workspace.name!r} has no snapshot {ref!r}.", hint="'perdure snapshot ls' shows those it has."
            )
        return rows.point(row)

    async def ancestors(self, at: Record, snapshot_id: SnapshotId) -> list[Point]:
        """What a snapshot descends from and is still there, closest first."""
        found = await self.database.all("snapshots.ancestors", tenant_id=at.workspace.tenant_id, id=snapshot_id)
        return [rows.point(row) for row in found]

    async def hold(self, tx: Transaction, snapshot_id: SnapshotId) -> None:
        """Until the transaction ends nobody marks it. Raises NotFound when somebody has."""
        if await tx.one("snapshots.hold", id=snapshot_id) is None:
            raise NotFound(
                f"Snapshot {snapshot_id} has been removed meanwhile.", hint="'perdure snapshot ls' shows those there are."
            )

    async def hand_over(self, tx: Transaction, branch: WorkspaceId, to: WorkspaceId) -> int:
        """A promoted branch's snapshots and branches become its parent's; returns how many snapshots."""
        adopted = await tx.all("snapshots.adopt", workspace_id=branch, to=to)
        await tx.run("workspaces.reparent", parent=branch, to=to)
        return len(adopted)

    async def tree(self, at: Record) -> list[TreeNode]:
        """The tree that a workspace belongs to, deleted ones included, parents first."""
        found = await self.database.all("workspaces.tree", id=at.id, tenant_id=at.workspace.tenant_id)
        return [rows.tree_node(row) for row in found]

    async def note(self, tx: Transaction, at: Record, kind: str, body: Mapping[str, Any]) -> None:
        """A journal entry that changes no state. Takes the workspace's row lock."""
        parameters = {"workspace_id": at.id, "kind": kind, "generation": at.generation, "body": canonical(body)}
        await tx.one("journal.append", **parameters)

    async def unfinished(self, workspace_id: WorkspaceId) -> list[tuple[SnapshotId, SnapshotReason]]:
        found = await self.database.all("snapshots.unfinished", workspace_id=workspace_id)
        return [(SnapshotId(row["id"]), SnapshotReason(row["reason"])) for row in found]

    async def stranded(self, node_id: NodeId) -> list[tuple[SnapshotId, WorkspaceId]]:
        """Pending ones on a node whose workspace is on another."""
        found = await self.database.all("homes.stranded", node_id=node_id)
        return [(SnapshotId(row["id"]), WorkspaceId(row["workspace_id"])) for row in found]

    async def on_node(self, node_id: NodeId) -> list[SnapshotRow]:
        found = await self.database.all("snapshots.on_node", node_id=node_id)
        return [
            SnapshotRow(
                SnapshotId(row["id"]),
                WorkspaceId(row["workspace_id"]),
                SnapshotState(row["state"]),
                SnapshotReason(row["reason"]),
            )
            for row in found
        ]

    async def known(self, snapshot_ids: list[SnapshotId]) -> set[SnapshotId]:
        """Those of which there is a row, of whatever node: what a node has fetched may be on record as another's."""
        return {SnapshotId(row["id"]) for row in await self.database.all("homes.known", ids=snapshot_ids)}

    async def is_stored(self, at: Record, snapshot_id: SnapshotId) -> bool:
        """Whether the object store has a snapshot of this tenant."""
        scope = at.workspace.tenant_id
        return await self.database.one("homes.is_stored", scope=scope, name=snapshot_id) is not None

    async def retain(self, tx: Transaction, workspace_id: WorkspaceId, default: int, spare: SnapshotId | None = None) -> int:
        """Mark what retention no longer keeps, except ``spare``, which is about to become the head; returns how many."""
        return await lineage.retain(tx, workspace_id, default, spare)

    async def free(self, tx: Transaction, workspace_id: WorkspaceId) -> int:
        """Mark everything of a workspace that is deleted, but for what another one stands on; returns how many."""
        begun = await tx.all("retention.give_up", workspace_id=workspace_id)
        return len(begun) + await lineage.retain(tx, workspace_id, 0)

    async def crowded(self, node_id: NodeId, default: int) -> list[WorkspaceId]:
        """Workspaces, deleted ones included, of which retention would mark something."""
        return await lineage.crowded(self.database, node_id, default)

    async def deleting(self, node_id: NodeId) -> tuple[SnapshotId, ...]:
        return tuple(SnapshotId(row["id"]) for row in await self.database.all("snapshots.deleting", node_id=node_id))
