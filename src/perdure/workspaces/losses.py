"""What becomes of a workspace whose machine is lost, must go, or was only half started.

The newer disk of a lost machine is never deleted: it becomes a disk-only branch ``NAME@lost-TIME`` that expires after some days.
``settle`` is repeatable, so the reconciler and the happy path share it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import NotFound, PerdureError, StaleGeneration
from perdure.core.ids import SnapshotId
from perdure.db.database import Transaction
from perdure.wire.node import Inventory, LiveMachine, Node, SnapshotFacts
from perdure.workspaces.lifecycle import WITH_MACHINE, Event
from perdure.workspaces.model import Snapshot, SnapshotReason, WorkspaceKind, WorkspaceState
from perdure.workspaces.observe import spent, unused_s
from perdure.workspaces.owner import Owner
from perdure.workspaces.rows import Record
from perdure.workspaces.store import Change, NewWorkspace
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)

DAY_S = 86400.0
#: States in which a program may have done something since the last snapshot.
HAD_BEEN_AWAKE = frozenset({WorkspaceState.RUNNING, WorkspaceState.HIBERNATING})


async def commit_capture(
    tools: Tools, at: Record, facts: SnapshotFacts, event: Event, spare: SnapshotId | None = None, by: str | None = None
) -> tuple[Record, Snapshot]:
    """A capture is done: its row is complete, it is the head, retention is applied (but to ``spare``), the state moves; all or
    nothing. ``by``: who asked for it."""
    body: dict[str, Any] = {
        **{"snapshot_id": facts.snapshot_id, "pause_s": facts.pause_s, "quiesced": facts.quiesced},
        **{"memory_bytes": facts.memory_bytes, "disk_bytes": facts.disk_bytes},
        **spent(tools, at),
    }
    async with tools.store.database.transaction() as tx:
        snapshot = await tools.store.complete(tx, facts)
        if snapshot is None:
            raise StaleGeneration(f"Snapshot {facts.snapshot_id} of {at.workspace.name!r} was given up meanwhile.")
        body |= {"reason": snapshot.reason.value, "name": snapshot.name} | ({} if by is None else {"by": by})
        record = await tools.store.move(at, event, Change(head=facts.snapshot_id, body=body), tx)
        await tools.store.retain(tx, at.id, tools.settings.keep_automatic_checkpoints, spare)
    return record, snapshot


class Losses:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._store = tools.store

    async def settle(self, owner: Owner, at: Record, event: Event, why: str, *, inventory: Inventory | None = None) -> Record:
        """The machine is lost, or must go: adopt snapshots it finished, keep its newer disk as a branch, and record where the
        workspace stands. Repeatable: a crash anywhere in here is taken up by the next call."""
        idle_s, read = unused_s(self._tools, owner), spent(self._tools, at)
        owner.live = None
        node = self._tools.node(at)
        inventory = inventory or await node.inventory()
        at = await self.adopt_finished(at, inventory)
        left = [machine for machine in inventory.machines if machine.workspace_id == at.id]
        salvages = await self._salvages(at)  # an earlier call was killed between the node's work and our commit
        disks = [facts for facts in inventory.snapshots if facts.snapshot_id in salvages]
        for machine in left:
            await node.stop(at.id, machine.generation, keep_overlay=True)
            disks += await self._salvage(at, machine.generation)
        crashpoint(CrashPoint.SALVAGE_KEPT)
        record = await self._commit_loss(at, event, Change(detail=why, unused_s=idle_s, body=read), disks)
        crashpoint(CrashPoint.SALVAGE_RECORDED)
        for machine in left:
            with suppress(StaleGeneration, NotFound):
                await node.stop(at.id, machine.generation)
        return record

    async def _salvages(self, at: Record) -> set[SnapshotId]:
        unfinished = await self._store.unfinished(at.id)
        return {snapshot_id for snapshot_id, reason in unfinished if reason is SnapshotReason.SALVAGED}

    async def _salvage(self, at: Record, generation: int) -> list[SnapshotFacts]:
        snapshot_id = self._tools.mint_snapshot()
        await self._store.intend(at, snapshot_id, SnapshotReason.SALVAGED)
        facts: SnapshotFacts | None = None
        with suppress(NotFound):  # it went while we looked
            facts = await self._tools.node(at).salvage(at.id, generation, snapshot_id)
        if facts is None:
            await self._store.forget(snapshot_id)
            return []
        return [facts]

    # ------------------------------------------------------------------------------------------ what another node goes on with

    async def left_behind(self, node: Node, machine: LiveMachine) -> bool:
        """A machine of a workspace that has moved to another node while this one was away: its newer disk, which the other never
        had, is kept as a branch here. False when there is no such workspace."""
        try:
            at = await self._store.by_id(machine.workspace_id)
        except NotFound:
            return False
        if at.state is WorkspaceState.DELETED or at.node_id == node.node_id:
            return False
        _log.info("the workspace %s has moved to node %s; what this one has of it is kept as a branch", at.id, at.node_id)
        await node.stop(at.id, machine.generation, keep_overlay=True)
        snapshot_id = self._tools.mint_snapshot()
        await self._store.intend(replace(at, node_id=node.node_id), snapshot_id, SnapshotReason.SALVAGED)
        facts = await node.salvage(at.id, machine.generation, snapshot_id)
        if facts is None:
            await self._store.forget(snapshot_id)
        else:
            await self._commit_left_behind(replace(at, node_id=node.node_id), facts)
        return True

    async def finish_left_behind(self, node: Node, inventory: Inventory) -> None:
        """The same, where a crash came between the node's work and the commit."""
        whole = {facts.snapshot_id: facts for facts in inventory.snapshots}
        for snapshot_id, workspace_id in await self._store.stranded(node.node_id):
            if snapshot_id in whole:
                at = await self._store.by_id(workspace_id)
                await self._commit_left_behind(replace(at, node_id=node.node_id), whole[snapshot_id])
            else:
                await self._store.forget(snapshot_id)

    async def _commit_left_behind(self, at: Record, facts: SnapshotFacts) -> None:
        async with self._store.database.transaction() as tx:
            branch = await self._insert_lost(at, facts, tx)
            await self._store.note(tx, at, "left-behind", {"branch": branch, "node_id": at.node_id})

    # ----------------------------------------------------------------------------------------------------------------- captures

    async def adopt_finished(self, at: Record, inventory: Inventory) -> Record:
        """Captures that are complete on the node become what they were meant to be; the others are given up. Salvaged disks
        wait for ``_commit_loss``."""
        whole = {facts.snapshot_id: facts for facts in inventory.snapshots}
        for snapshot_id, reason in await self._store.unfinished(at.id):
            if snapshot_id not in whole:
                await self._store.forget(snapshot_id)
            elif reason is SnapshotReason.SALVAGED:
                continue
            elif at.state is WorkspaceState.HIBERNATING and reason is SnapshotReason.HIBERNATE:
                at, _ = await commit_capture(self._tools, at, whole[snapshot_id], Event.CAPTURED)
            elif at.state is WorkspaceState.RUNNING:
                at, _ = await commit_capture(self._tools, at, whole[snapshot_id], Event.CHECKPOINTED)
        return at

    async def _commit_loss(self, at: Record, event: Event, change: Change, disks: list[SnapshotFacts]) -> Record:
        """One transaction: salvaged disks become branches (after a power-off the workspace's own head), and the workspace goes
        where the event takes it. One that has no machine by now stays where it is and only learns the branch's name."""
        settled = at.state not in WITH_MACHINE
        if settled and not disks:
            return at
        why = change.detail
        own = event is Event.POWERED_OFF and not settled
        head, branch = None, None
        async with self._store.database.transaction() as tx:
            for facts in disks:
                if own:
                    await self._store.complete(tx, facts)
                    head = facts.snapshot_id
                else:
                    branch = await self._insert_lost(at, facts, tx)
            change = replace(
                change,
                detail=why + (f" Its newer disk is kept as {branch!r}." if branch else ""),
                head=head,
                lost_branch=branch,
                rewound=None if own else why if branch or at.state in HAD_BEEN_AWAKE else None,
                body={**change.body, "salvaged": len(disks), "lost_branch": branch},
            )
            record = await self._store.move(at, Event.SALVAGED if settled else event, change, tx)
            if own:
                await self._store.retain(tx, at.id, self._tools.settings.keep_automatic_checkpoints)
        return record

    async def _insert_lost(self, at: Record, facts: SnapshotFacts, tx: Transaction) -> str:
        """The salvaged disk as a workspace of its own; returns its name."""
        was = at.workspace
        name = await self._lost_name(at)
        child = NewWorkspace.child(
            at, facts.snapshot_id, self._tools.mint_workspace(), name=name, hostname=f"{was.hostname[:55]}-lost"
        )
        new = replace(
            child,
            kind=WorkspaceKind.LOST,
            disk_gib=facts.disk_gib,
            expires_s=self._tools.settings.lost_branch_days * DAY_S,
            detail=f"The disk of {was.name!r} as it was when its machine (generation {facts.generation}) was lost.",
            state=WorkspaceState.HIBERNATED,
        )
        lost = await self._store.insert(new, {"snapshot_id": facts.snapshot_id, "parent_id": at.id}, tx)
        await self._store.complete(tx, facts, owner_id=lost.id)
        return name

    async def _lost_name(self, at: Record) -> str:
        base = at.workspace.name.split("@")[0]
        name = f"{base}@lost-{self._tools.clock.now():%Y%m%dt%H%M%Sz}"
        taken = await self._store.names_like(at.workspace.tenant_id, name)
        number = 2
        wanted = name
        while wanted in taken:
            wanted, number = f"{name}-{number}", number + 1
        return wanted

    # -------------------------------------------------------------------------------------------------------------------- ends

    async def free(self, owner: Owner, at: Record, event: Event, change: Change) -> Record:
        """→ deleted: the name is free, the machine goes without being kept, snapshots nobody else needs are marked."""
        parent = await self._disappointed(at, event)
        read = spent(self._tools, at)
        change = replace(change, body={**change.body, **read})
        async with self._store.database.transaction() as tx:
            if parent is not None:
                body = {"branch": at.workspace.name, "branch_id": at.id, "detail": change.detail}
                await self._store.note(tx, parent, "fork-failed", body)
            record = await self._store.move(at, event, change, tx)
            await self._store.free(tx, at.id)
        crashpoint(CrashPoint.DELETE_RECORDED)
        owner.live = None
        try:
            await self._tools.node(at).stop(at.id, at.generation)
        except (StaleGeneration, NotFound):
            pass  # it has no machine
        except PerdureError as error:
            _log.warning("the machine of deleted workspace %s is left to the reconciler: %s", at.id, error.message)
        return record

    async def _disappointed(self, at: Record, event: Event) -> Record | None:
        """Whose thread says that it was forked into this branch, which now will never be."""
        parent_id = at.workspace.parent_id
        if at.state is not WorkspaceState.CREATING or event is Event.DELETE or parent_id is None:
            return None
        return await self._store.by_id(parent_id)
