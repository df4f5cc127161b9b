"""What a damaged snapshot means for its workspace: what else is whole, and what its owner can do.

A start that meets damage fails before a guest runs. Its error then names, beside the file, the newest intact ancestor: the
parents are walked and each is checked to its last byte on the node, so that what is offered also wakes. ``recover --how rewind``
goes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from perdure.core.errors import Conflict, CorruptData, CorruptSnapshot, NotFound, PerdureError
from perdure.core.ids import SnapshotId
from perdure.wire.node import Checking, Damage, Node, Verdict
from perdure.workspaces.homes import Homes
from perdure.workspaces.model import Snapshot, Verified, Verifying, WorkspaceState
from perdure.workspaces.rows import Point, Record
from perdure.workspaces.tools import Tools

#: How long a failed start looks for something that is whole before it answers without an offer.
OFFER_LIMIT_S = 60.0
#: Failures that are remembered, so that callers of a failed workspace do not have its snapshots read again and again.
REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The newest intact one, None when there is none; and how many between are damaged."""

    point: Point | None
    damaged: int


class Integrity:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._store = tools.store
        self._homes = Homes(tools)
        self._failures: dict[tuple[str, int, SnapshotId], PerdureError] = {}

    # ------------------------------------------------------------------------------------------------------ what is whole

    async def newest_intact(self, at: Record, snapshot_id: SnapshotId) -> Ancestor:
        """The closest ancestor of a snapshot of which every byte is as it was written."""
        return (await self._look(at, snapshot_id, itself=False))[1]

    async def _look(self, at: Record, snapshot_id: SnapshotId, *, itself: bool) -> tuple[Verdict | None, Ancestor]:
        """One pass over the snapshot (``itself``) and its ancestors, up to the first intact one: what they share is read once."""
        points = {point.id: point for point in await self._store.ancestors(at, snapshot_id)}
        own, damaged = None, 0
        ids = (*((snapshot_id,) if itself else ()), *points)
        async with aclosing(self._tools.node(at).verify(ids)) as events:
            async for event in events:
                if isinstance(event, Checking):
                    continue
                verdict = await self._with_store(at, event)
                if verdict.snapshot_id == snapshot_id:
                    own = verdict
                elif verdict.intact:
                    return own, Ancestor(points[verdict.snapshot_id], damaged)
                else:
                    damaged += 1
        return own, Ancestor(None, damaged)

    async def _with_store(self, at: Record, verdict: Verdict) -> Verdict:
        """Of a snapshot that its node does not have, and the object store has, what that has is read instead."""
        home = self._tools.node(at).second_home
        if not verdict.missing or home is None or not await self._store.is_stored(at, verdict.snapshot_id):
            return verdict
        damage = await home.verify(verdict.snapshot_id, at.workspace.tenant_id)
        return Verdict(verdict.snapshot_id, damage, disk_intact=not damage)

    async def check(self, at: Record, snapshot_id: SnapshotId) -> None:
        """Have a snapshot on the node of which every byte is as it was written, from the object store if it must be. Raises
        CorruptSnapshot with what to do."""
        try:
            await self._tools.node(at).snapshot(snapshot_id)
        except (CorruptData, NotFound) as error:
            try:
                await self._homes.mend(at, snapshot_id, error)
            except (CorruptData, NotFound) as damage:
                raise await self.offer(at, snapshot_id, damage) from error

    # ----------------------------------------------------------------------------------------------------------- to do

    async def offer(self, at: Record, snapshot_id: SnapshotId | None, error: PerdureError) -> PerdureError:
        """The error with what can be done about it, if it is about damage of this snapshot; else as it is."""
        if snapshot_id is None or not isinstance(error, CorruptData | NotFound):
            return error
        try:
            async with asyncio.timeout(OFFER_LIMIT_S):
                verdict, found = await self._look(at, snapshot_id, itself=True)
        except TimeoutError:
            return error
        if verdict is None or (isinstance(error, NotFound) and not verdict.missing):
            return error  # the node is closing, or something else was not found
        if isinstance(error, NotFound):
            error = _gone(snapshot_id)
        details = {**error.details, "snapshot_id": snapshot_id, "disk": "intact" if verdict.disk_intact else "damaged"}
        if found.point is not None:
            details["ancestor"] = found.point.id
        error.details = details
        error.hint = self._hint(at, snapshot_id, found, disk=verdict.disk_intact)
        return error

    @staticmethod
    def _hint(at: Record, snapshot_id: SnapshotId, found: Ancestor, *, disk: bool) -> str:
        name, point = at.workspace.name, found.point
        if at.state is WorkspaceState.CREATING:
            if point is None:
                return "No snapshot before it is intact; fork without naming a snapshot, or fork another workspace."
            return f"The newest intact snapshot before it is {point.id}: fork that one (perdure fork NAME --snapshot {point.id})."
        if snapshot_id != at.workspace.head_snapshot_id:
            if point is None:
                return "No snapshot before it is intact; choose another one."
            return f"The newest intact snapshot before it is {point.id}: 'perdure rewind {name} {point.id}' goes there."
        ways = []
        if disk:  # first: nothing that was saved is given up for it
            ways.append(f"Its disk is intact: 'perdure recover {name} --how disk-boot' boots it without its memory.")
        if point is not None:
            ways.append(
                f"The newest intact snapshot before it is {point.id}: 'perdure recover {name} --how rewind' goes there, and "
                "keeps what it was as a branch."
            )
        else:
            ways.append("No snapshot before it is intact.")
        if point is None and not disk:
            ways.append(
                f"'perdure snapshot verify {name}' lists the damaged files: put them back, then wake it again. If there is no "
                f"copy, 'perdure recover {name} --how damaged-disk' boots the disk as it is, to save files from it."
            )
        return " ".join(ways)

    async def failure(self, at: Record) -> PerdureError:
        """Why a failed workspace does not wake, and the ways out. Looks at its head once per generation."""
        head = at.workspace.head_snapshot_id
        error: PerdureError = Conflict(
            f"Workspace {at.workspace.name!r} has failed: {at.workspace.state_detail}",
            hint="Run 'perdure recover NAME --how retry', disk-boot (without memory) or rewind (to the newest intact snapshot "
            "before; what it was is kept as a branch); or delete it.",
        )
        if head is None:
            return error
        key = (at.id, at.generation, head)
        if key not in self._failures:
            try:
                async with asyncio.timeout(OFFER_LIMIT_S):
                    verdict = await _verdict(self._tools.node(at), head)
            except TimeoutError:
                return error
            if verdict.missing or verdict.damage:
                first = verdict.damage[0] if verdict.damage else _manifest(head)
                what = f"Workspace {at.workspace.name!r} has failed: {first.problem}"
                error = await self.offer(at, head, CorruptSnapshot(what, file=first.file))
            while len(self._failures) >= REMEMBERED:
                del self._failures[next(iter(self._failures))]
            self._failures[key] = error
        return self._failures[key].twin()

    # ----------------------------------------------------------------------------------------------------------- verify

    async def verify(
        self, records: Sequence[Record], ref: str | None, *, trial: bool
    ) -> AsyncGenerator[Verifying | Verified, None]:
        """Check the snapshots of these workspaces, or the one of the only workspace that ``ref`` names. Raises NotFound."""
        chosen: list[tuple[Record, Snapshot]] = []
        for at in records:
            mine = [await self._store.snapshot(at, ref)] if ref is not None else await self._store.snapshots(at.id)
            chosen += [(at, snapshot) for snapshot in mine]
        by_node: dict[str, list[tuple[Record, Snapshot]]] = {}
        for at, snapshot in chosen:
            by_node.setdefault(at.node_id, []).append((at, snapshot))
        done = 0
        for group in by_node.values():
            subjects = {snapshot.id: (at, snapshot) for at, snapshot in group}
            events = self._tools.node(group[0][0]).verify(tuple(subjects), trial=trial)
            async with aclosing(events):
                async for event in events:
                    at, snapshot = subjects[event.snapshot_id]
                    if isinstance(event, Checking):
                        yield Verifying(at.workspace, snapshot, event.file, event.read_bytes, done, len(chosen))
                        continue
                    done += 1
                    verdict = await self._with_store(at, event)
                    verified = await self._judged(at, snapshot, verdict)
                    if verified is not None:
                        yield verified if verdict is event else replace(verified, read_from="store")

    async def _judged(self, at: Record, snapshot: Snapshot, verdict: Verdict) -> Verified | None:
        """None for one that was removed meanwhile."""
        damage = verdict.damage
        if verdict.missing:
            try:
                await self._store.snapshot(at, snapshot.id)
            except NotFound:
                return None
            damage = (_manifest(snapshot.id),)
        ancestor = None
        if damage:
            found = await self.newest_intact(at, snapshot.id)
            ancestor = found.point.id if found.point is not None else None
        return Verified(at.workspace, snapshot, damage, verdict.trial, ancestor, disk_intact=verdict.disk_intact)


async def _verdict(node: Node, snapshot_id: SnapshotId) -> Verdict:
    async with aclosing(node.verify((snapshot_id,))) as events:
        async for event in events:
            if isinstance(event, Verdict):
                return event
    raise NotFound(f"The node was closed while it looked at snapshot {snapshot_id}.", hint="Try again.")


def _manifest(snapshot_id: SnapshotId) -> Damage:
    file = f"snapshots/{snapshot_id}/manifest.json"
    return Damage(file, f"The record {file} is missing.")


def _gone(snapshot_id: SnapshotId) -> CorruptSnapshot:
    missing = _manifest(snapshot_id)
    return CorruptSnapshot(missing.problem, file=missing.file)
