"""What an owner may say about snapshots: see them in their tree, name them, remove them, and how many are kept by themselves.

Each change takes the workspace's turn, so that none comes between a fork or a rewind and the snapshot it has chosen.
"""

from __future__ import annotations

from dataclasses import replace

from perdure.core.errors import AlreadyExists, Conflict, InvalidRequest, NotFound, PerdureError
from perdure.core.ids import SnapshotId
from perdure.core.paging import Page, Place
from perdure.db.database import Transaction
from perdure.journal.entries import canonical
from perdure.wire.node import StoredSizes
from perdure.workspaces import checks, lineage, longsleep, retention, rows
from perdure.workspaces.model import AsleepAction, Configuration, Context, Kept, Snapshot, SnapshotPlace, Workspace
from perdure.workspaces.retention import Tree
from perdure.workspaces.rows import Record
from perdure.workspaces.tools import Tools
from perdure.workspaces.upkeep import Upkeep


class Keeping:
    def __init__(self, tools: Tools, upkeep: Upkeep) -> None:
        self._tools = tools
        self._store = tools.store
        self._upkeep = upkeep

    # ------------------------------------------------------------------------------------------------------------------- tree

    async def lineage(self, at: Record, page: Page) -> list[SnapshotPlace]:
        """See ``model.Workspaces.lineage``. What keeps one depends on all, so all are read; the node is asked of a page's."""
        tree = await lineage.tree_of(self._store.database, at.id)
        standing = [one for one in await self._store.snapshots(at.id) if one.id in tree.entries]
        found = [one for one in standing if page.holds(Place(one.created_at, one.id))][: page.sought]
        sizes = await self._sizes(at, [one.id for one in found])
        reasons = retention.why_kept(tree, self._tools.settings.keep_automatic_checkpoints)
        return [
            SnapshotPlace(
                snapshot=replace(one, parent_id=retention.nearest(tree, one.id)),
                is_head=one.id == at.workspace.head_snapshot_id,
                kept=tuple(kept for kept in Kept if kept in reasons.get(one.id, ())),
                branches=_branches(tree, at, one.id),
                references=tree.references.get(one.id, ()),
                sizes=sizes.get(one.id),
            )
            for one in found
        ]

    async def _sizes(self, at: Record, snapshot_ids: list[SnapshotId]) -> dict[SnapshotId, StoredSizes]:
        """What the node says; nothing while it cannot be asked, for the tree is worth seeing without."""
        try:
            return dict(await self._tools.node(at).stored_sizes(tuple(snapshot_ids)))
        except PerdureError:
            return {}

    # ---------------------------------------------------------------------------------------------------------------- changes

    async def configure(self, ctx: Context, record: Record, change: Configuration) -> Workspace:
        """See ``model.Workspaces.configure``."""
        checks.check_configuration(change)
        if change.asleep_action is AsleepAction.ARCHIVE:
            self._upkeep.uploads.home()
        owner = self._upkeep.owner(record.id)
        given = {name: value for name, value in change.given().items() if value is not None}
        to_default = change.keep_snapshots == "default"
        values = {
            "default": to_default,
            "keep_snapshots": None if to_default else change.keep_snapshots,
            "idle_timeout_s": change.idle_timeout_s,
            "checkpoint_interval_s": change.checkpoint_interval_s,
        }

        async def job() -> Record:
            at = await self._upkeep.current(owner)
            days, action = longsleep.wish(at.workspace, change)
            checks.check_long_sleep(days, action)
            async with self._store.database.transaction() as tx:
                body = canonical({**given, "by": ctx.principal})
                wish = {"asleep_after_days": days, "asleep_action": action.value}
                if await tx.one("retention.configure", id=at.id, body=body, **values, **wish) is None:
                    raise checks.is_deleted(at.workspace)
                await lineage.retain(tx, at.id, self._tools.settings.keep_automatic_checkpoints)
            configured = await self._store.by_id(at.id)
            if owner.live is not None:
                owner.live.record = configured
            return configured

        configured = await owner.run(job)
        self._upkeep.clean_soon()
        return self._upkeep.shown(configured)

    async def name_snapshot(self, ctx: Context, record: Record, ref: str, name: str | None) -> Snapshot:
        """See ``model.Workspaces.name_snapshot``."""
        if name is not None:
            checks.check_snapshot_name(name)
        owner = self._upkeep.owner(record.id)

        async def job() -> Snapshot:
            at = await self._upkeep.current(owner)
            before = await self._own(at, ref)
            try:
                async with self._store.database.transaction() as tx:
                    body = {"snapshot_id": before.id, "name": name, "was": before.name, "by": ctx.principal}
                    await self._store.note(tx, at, "snapshot-named", body)
                    row = await tx.one("retention.rename", id=before.id, workspace_id=at.id, name=name)
            except AlreadyExists as error:
                raise AlreadyExists(
                    f"Workspace {at.workspace.name!r} has a snapshot named {name!r} already.",
                    hint="Choose another name, or take it from that one first (perdure snapshot name NAME SNAPSHOT --clear).",
                ) from error
            if row is None:
                raise NotFound(f"Snapshot {before.id} has been removed meanwhile.")
            return rows.snapshot(row)

        named = await owner.run(job)
        self._upkeep.clean_soon()  # one that has lost its name may have lost what kept it
        return named

    async def remove_snapshot(self, ctx: Context, record: Record, ref: str) -> Snapshot:
        """See ``model.Workspaces.remove_snapshot``."""
        owner = self._upkeep.owner(record.id)

        async def job() -> Snapshot:
            at = await self._upkeep.current(owner)
            snapshot = await self._own(at, ref)
            async with self._store.database.transaction() as tx:
                body = {"snapshot_id": snapshot.id, "name": snapshot.name, "by": ctx.principal}
                await self._store.note(tx, at, "snapshot-removed", body)
                await self._mark_or_refuse(tx, at, snapshot)
            return snapshot

        removed = await owner.run(job)
        self._upkeep.clean_soon()
        return removed

    async def _mark_or_refuse(self, tx: Transaction, at: Record, snapshot: Snapshot) -> None:
        await tx.all("retention.lock", workspace_id=at.id)
        tree = await lineage.tree_of(tx, at.id)
        why = retention.irremovable(tree, snapshot.id)
        if why is not None:
            shown = f"{snapshot.name!r} ({snapshot.id})" if snapshot.name else snapshot.id
            raise Conflict(
                f"Snapshot {shown} of {at.workspace.name!r} cannot be removed: {why}.", hint=_way_out(tree, at, snapshot)
            )
        if not await lineage.mark(tx, [snapshot.id]):
            raise NotFound(f"Snapshot {snapshot.id} has been removed meanwhile.")

    async def _own(self, at: Record, ref: str) -> Snapshot:
        snapshot = await self._store.snapshot(at, ref)
        if snapshot.workspace_id != at.id:
            raise InvalidRequest(
                f"Snapshot {snapshot.id} is not one of {at.workspace.name!r}, which only started from it.",
                hint="Name the workspace that took it; 'perdure tree' shows it.",
            )
        return snapshot


def _branches(tree: Tree, at: Record, snapshot_id: SnapshotId) -> tuple[str, ...]:
    """Names of other workspaces that were forked from it or still wake from it."""
    return tuple(
        sorted(one.name for one in tree.holders.values() if one.id != at.id and snapshot_id in {one.head, one.forked_from})
    )


def _way_out(tree: Tree, at: Record, snapshot: Snapshot) -> str:
    if at.workspace.head_snapshot_id == snapshot.id:
        return "Its next checkpoint or sleep makes another one the head; this one can be removed then."
    if _branches(tree, at, snapshot.id):
        return "Delete these first."
    return "It can be removed when that has ended."
