"""What the fake workspaces do about snapshots: make, show, name, push, remove and verify them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from perdure.core.errors import AlreadyExists, Conflict, DeadlineExceeded, NotFound
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.core.paging import WHOLE, Page, Place
from perdure.wire import node
from perdure.workspaces import checks
from perdure.workspaces.model import (
    Context,
    Kept,
    Snapshot,
    SnapshotPlace,
    SnapshotReason,
    Verified,
    Verifying,
    Workspace,
)
from tests.fakes.memory_guest import MOMENT


class FakeSnapshots:
    """The part of ``Workspaces`` that is about snapshots, over the rows of the rest."""

    def __init__(self) -> None:
        self.rows: dict[WorkspaceId, Workspace] = {}
        self.history: dict[WorkspaceId, list[Snapshot]] = {}
        self.damage: dict[SnapshotId, tuple[node.Damage, ...]] = {}  # stored snapshots that are not as they were written
        self.has_store = False
        self.only_in_store: set[SnapshotId] = set()

    def find_row(self, ref: str) -> Workspace:
        raise NotImplementedError

    def _mint(self, prefix: str) -> str:
        raise NotImplementedError

    def _put(self, row: Workspace, **changes: Any) -> Workspace:
        raise NotImplementedError

    def _note(self, row: Workspace, kind: str, **body: Any) -> None:
        raise NotImplementedError

    def _snapshot(self, row: Workspace, reason: SnapshotReason, name: str | None) -> Snapshot:
        snapshot_id = SnapshotId(self._mint("snp"))
        history = self.history.setdefault(row.id, [])
        parent = history[-1].id if history else None
        sizes = (3 << 20, 5 << 20, 1 << 20, 2 << 20)
        snapshot = Snapshot(snapshot_id, row.id, parent, name, reason, row.generation, True, True, *sizes, 0.015, MOMENT)
        history.append(snapshot)
        return snapshot

    async def checkpoint(self, ctx: Context, ref: str, *, name: str | None = None) -> Snapshot:
        if name is not None:
            checks.check_snapshot_name(name)
        row = self.find_row(ref)
        snapshot = self._snapshot(row, SnapshotReason.REQUESTED, name)
        self._put(row, head_snapshot_id=snapshot.id)
        self._note(row, "checkpoint", snapshot=snapshot.id, name=name)
        return snapshot

    async def snapshots(self, ctx: Context, ref: str) -> list[Snapshot]:
        return self.history.get(self.find_row(ref).id, [])

    async def lineage(self, ctx: Context, ref: str, page: Page = WHOLE) -> list[SnapshotPlace]:
        row = self.find_row(ref)
        found = [one for one in self.history.get(row.id, []) if page.holds(Place(one.created_at, one.id))]
        return [self._place(row, one) for one in found[: page.sought]]

    def _place(self, row: Workspace, one: Snapshot) -> SnapshotPlace:
        head = one.id == row.head_snapshot_id
        branches = tuple(sorted(other.name for other in self.rows.values() if other.forked_from == one.id))
        holds = {
            Kept.HEAD: head,
            Kept.NAMED: one.name is not None,
            Kept.REQUESTED: one.reason is SnapshotReason.REQUESTED,
            Kept.ORIGIN: bool(branches),
        }
        sizes = node.StoredSizes(one.memory_total_bytes + one.disk_total_bytes, one.memory_bytes)
        return SnapshotPlace(one, head, tuple(why for why, true in holds.items() if true), branches, (), sizes)

    def _own(self, row: Workspace, ref: str) -> Snapshot:
        for one in self.history.get(row.id, []):
            if ref in {one.id, one.name}:
                return one
        raise NotFound(f"Workspace {row.name!r} has no snapshot {ref!r}.", hint="'perdure snapshot ls' shows those it has.")

    async def name_snapshot(self, ctx: Context, ref: str, snapshot: str, name: str | None) -> Snapshot:
        row = self.find_row(ref)
        if name is not None:
            checks.check_snapshot_name(name)
        before = self._own(row, snapshot)
        if name is not None and any(one.name == name and one is not before for one in self.history[row.id]):
            raise AlreadyExists(f"Workspace {row.name!r} has a snapshot named {name!r} already.", hint="Choose another name.")
        after = replace(before, name=name)
        self.history[row.id] = [after if one is before else one for one in self.history[row.id]]
        self._note(row, "snapshot-named", snapshot_id=after.id, name=name, was=before.name)
        return after

    async def push_snapshot(self, ctx: Context, ref: str, snapshot: str | None, *, deadline_s: float | None = None) -> Snapshot:
        row = self.find_row(ref)
        wanted = snapshot or row.head_snapshot_id
        if wanted is None:
            raise Conflict(f"Workspace {row.name!r} has no snapshot yet.")
        if not self.has_store:
            raise Conflict("This server has no object store.", hint="Name one by PERDURE_STORE_URL and start the server again.")
        if deadline_s == 0:
            raise DeadlineExceeded(f"Snapshot {wanted} is not in the object store yet; the upload goes on.")
        one = self._own(row, wanted)
        stored = replace(one, stored_at=MOMENT, upload=None)
        self.history[row.id] = [stored if other.id == one.id else other for other in self.history[row.id]]
        return stored

    async def remove_snapshot(self, ctx: Context, ref: str, snapshot: str) -> Snapshot:
        row = self.find_row(ref)
        one = self._own(row, snapshot)
        place = self._place(row, one)
        if place.is_head or place.branches:
            why = f"{row.name!r} wakes from it" if place.is_head else f"{place.branches[0]!r} was forked from it"
            raise Conflict(f"Snapshot {one.id} of {row.name!r} cannot be removed: {why}.", hint="Delete these first.")
        self.history[row.id].remove(one)
        self._note(row, "snapshot-removed", snapshot_id=one.id, name=one.name)
        return one

    async def verify(
        self, ctx: Context, ref: str | None, *, snapshot: str | None = None, trial: bool = False
    ) -> AsyncGenerator[Verifying | Verified, None]:
        rows = list(self.rows.values()) if ref is None else [self.find_row(ref)]
        pairs = [(row, one) for row in rows for one in self.history.get(row.id, []) if snapshot in {None, one.id, one.name}]
        if snapshot is not None and not pairs:
            raise NotFound(f"There is no snapshot {snapshot!r}.", hint="'perdure snapshot ls' shows those there are.")
        for done, (row, one) in enumerate(pairs):
            yield Verifying(row, one, f"snapshots/{one.id}/manifest.json", 1000, done, len(pairs))
            damage = self.damage.get(one.id, ())
            is_here = one.id not in self.only_in_store
            tried = node.Trial(node.TrialKind.MEMORY, "", 1.5, "") if trial and is_here and not damage else None
            before = one.parent_id if damage else None
            yield Verified(row, one, damage, tried, before, disk_intact=True, read_from="node" if is_here else "store")
