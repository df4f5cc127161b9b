"""The tree of snapshots as the database has it, and retention applied to it. What stays is decided by ``retention``.

Marking and making a head exclude each other: here the snapshots' rows are locked before it is read who needs them, and whoever
makes one of them a head holds its row (``WorkspaceStore.hold``) in the same transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from perdure.core.ids import NodeId, SnapshotId, WorkspaceId
from perdure.db.database import Database, Transaction
from perdure.workspaces import retention
from perdure.workspaces.model import SnapshotReason
from perdure.workspaces.retention import Entry, Holder, Tree

Row = Mapping[str, Any]


async def tree_of(tx: Transaction | Database, workspace_id: WorkspaceId) -> Tree:
    """A workspace's snapshots, what its head descends from, and who stands on them."""
    return _tree(
        await tx.all("retention.entries", workspace_id=workspace_id),
        await tx.all("retention.holders", workspace_id=workspace_id),
        await tx.all("retention.used_by", workspace_id=workspace_id),
    )


async def retain(tx: Transaction, workspace_id: WorkspaceId, default: int, spare: SnapshotId | None = None) -> int:
    """Mark what the workspace no longer keeps, but ``spare``, which is about to become a head. Returns how many.

    Of a deleted workspace all goes that nobody else stands on.
    """
    await tx.all("retention.lock", workspace_id=workspace_id)
    tree = await tree_of(tx, workspace_id)
    going = retention.expendable(tree, default) - {spare}
    return await mark(tx, (one for one in going if tree.entries[one].workspace_id == workspace_id))


async def mark(tx: Transaction, snapshot_ids: Iterable[SnapshotId]) -> int:
    """These go; returns how many of them were still there. The caller has locked them and looked who needs them."""
    doomed = sorted(snapshot_ids)
    return len(await tx.all("retention.mark", ids=doomed)) if doomed else 0


async def crowded(database: Database, node_id: NodeId, default: int) -> list[WorkspaceId]:
    """Workspaces, deleted ones included, that have snapshots which should go. Nothing is locked: ``retain`` looks again."""
    tree = _tree(
        await database.all("retention.entries_of_node", node_id=node_id),
        await database.all("retention.holders_of_node", node_id=node_id),
        await database.all("retention.used_of_node", node_id=node_id),
    )
    return sorted({tree.entries[one].workspace_id for one in retention.expendable(tree, default)})


def _tree(entries: Iterable[Row], holders: Iterable[Row], references: Iterable[Row]) -> Tree:
    used: dict[SnapshotId, tuple[str, ...]] = defaultdict(tuple)
    for row in references:
        used[SnapshotId(row["snapshot_id"])] += (f"{row['kind']} {row['holder']}",)
    return Tree(
        {one.id: one for one in map(_entry, entries)},
        {one.id: one for one in map(_holder, holders)},
        dict(used),
    )


def _entry(row: Row) -> Entry:
    return Entry(
        SnapshotId(row["id"]),
        WorkspaceId(row["workspace_id"]),
        SnapshotId(row["parent_id"]) if row["parent_id"] else None,
        SnapshotReason(row["reason"]),
        row["is_named"],
        row["is_going"],
    )


def _holder(row: Row) -> Holder:
    head, origin = row["head_snapshot_id"], row["forked_from"]
    return Holder(
        WorkspaceId(row["id"]),
        row["name"],
        SnapshotId(head) if head else None,
        SnapshotId(origin) if origin else None,
        row["keep_snapshots"],
    )
