"""The reconciler: compares what the database says with what the node has, and repairs. Input-free and idempotent.

It runs at start, from a timer, and for one workspace whenever an operation finds it in a state that this process did not put it
into. What it makes of each:

    creating                         deleted, its name free again: the create was never acknowledged
    running, its machine answers     adopted (only this process was restarted)
    hibernating, snapshot complete   hibernated at it
    hibernating, machine answers     running again
    running, hibernating, waking     hibernated at its last complete snapshot; the newer disk becomes a lost branch
    hibernated, head not on the node failed, with exits; one that the object store has is fetched by its wake
    machine of no workspace,
    or of another generation         stopped; its newer disk is kept if the workspace exists
    snapshot files without a row     removed
    pending row without files        removed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import NotFound, PerdureError, StaleGeneration
from perdure.core.ids import WorkspaceId
from perdure.wire.node import Inventory, LiveMachine, Node
from perdure.workspaces.lifecycle import WITH_MACHINE, Event
from perdure.workspaces.losses import Losses
from perdure.workspaces.model import SnapshotReason, WorkspaceState
from perdure.workspaces.owner import Owner
from perdure.workspaces.rows import Record
from perdure.workspaces.store import Change, Standing
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)

INTERRUPTED = "The server ended before the workspace did."

InOwner = Callable[[WorkspaceId, Callable[[Owner], Awaitable[None]]], Awaitable[None]]


class Reconciler:
    """``in_owner`` runs a job in a workspace's owner task, so that repairs never meet an operation in flight;
    ``awake_generation`` tells which generation this process holds awake."""

    def __init__(
        self, tools: Tools, losses: Losses, in_owner: InOwner, awake_generation: Callable[[WorkspaceId], int | None]
    ) -> None:
        self._tools = tools
        self._store = tools.store
        self._losses = losses
        self._in_owner = in_owner
        self._awake_generation = awake_generation
        self._has_compared = False

    async def node(self, node: Node) -> None:
        """Repair everything of one node. One workspace that cannot be repaired now does not keep the others from it."""
        inventory = await node.inventory()
        for what in inventory.debris:
            _log.info("the node removed a half-made thing: %s", what)
        known = await self._store.standing(node.node_id)
        repaired = True
        for workspace_id in [standing.id for standing in known if self._is_suspect(standing, inventory)]:
            try:
                await self._in_owner(workspace_id, self._visit)
            except PerdureError as error:
                repaired = False
                _log.warning("workspace %s cannot be repaired now: %s (%s)", workspace_id, error.message, error.internal)
        if repaired and not self._has_compared:
            await self._store.compared(node.node_id)
            self._has_compared = True
        await self._losses.finish_left_behind(node, inventory)
        await self._orphan_machines(node, inventory, {standing.id for standing in known})
        await self._snapshots(node)

    def _is_suspect(self, standing: Standing, inventory: Inventory) -> bool:
        """Whether a closer look is worth the workspace's turn; cheap, and wrong only in the harmless direction."""
        machines = [machine for machine in inventory.machines if machine.workspace_id == standing.id]
        if standing.has_unfinished:
            return True
        if standing.state in WITH_MACHINE:
            runs = [machine for machine in machines if machine.alive and machine.generation == standing.generation]
            owned = self._awake_generation(standing.id) == standing.generation
            return standing.state is not WorkspaceState.RUNNING or not owned or len(machines) != 1 or not runs
        whole = {facts.snapshot_id for facts in inventory.snapshots}
        return bool(machines) or (standing.head is not None and standing.head not in whole and not standing.is_stored)

    async def _visit(self, owner: Owner) -> None:
        at = await self._store.by_id(owner.id)
        inventory = await self._tools.node(at).inventory()
        await self.workspace(owner, at, inventory)

    async def workspace(self, owner: Owner, at: Record, inventory: Inventory | None = None) -> Record:
        """Repair one workspace, inside its owner. Returns where it stands."""
        inventory = inventory or await self._tools.node(at).inventory()
        machines = [machine for machine in inventory.machines if machine.workspace_id == at.id]
        if at.state in WITH_MACHINE and not _is_held(owner, at):
            at = await self._store.not_seen(at)
        if at.state is WorkspaceState.DELETED:
            owner.live = None
            return at
        if at.state is WorkspaceState.CREATING:
            if owner.is_newborn:
                return at  # its creator is about to take its turn
            return await self._losses.free(owner, at, Event.START_FAILED, Change(detail="Its creation was interrupted."))
        if at.state in WITH_MACHINE:
            return await self._with_machine(owner, at, machines, inventory)
        owner.live = None
        if machines:
            why = at.workspace.state_detail or "A machine was left over."
            at = await self._losses.settle(owner, at, Event.SALVAGED, why, inventory=inventory)
        elif await self._store.unfinished(at.id):
            at = await self._losses.adopt_finished(at, inventory)
        return await self._check_head(at, inventory)

    async def _with_machine(self, owner: Owner, at: Record, machines: list[LiveMachine], inventory: Inventory) -> Record:
        mine = [machine for machine in machines if machine.generation == at.generation]
        others = len(machines) > len(mine)
        goes_on = mine and mine[0].alive and not others and at.state is not WorkspaceState.WAKING
        # One that we hold awake is believed: a slow guest is not a lost one, and the node tells us when it stops answering.
        if goes_on and not await self._is_captured(at, inventory) and (_is_held(owner, at) or await self._answers(at)):
            return await self._adopt(owner, replace(at, alive_at=None), inventory)
        return await self._losses.settle(owner, at, Event.MACHINE_LOST, INTERRUPTED, inventory=inventory)

    async def _adopt(self, owner: Owner, at: Record, inventory: Inventory) -> Record:
        """The machine never stopped; only we forgot about it, or a capture's outcome."""
        if at.state is WorkspaceState.HIBERNATING:
            at = await self._store.move(at, Event.CAPTURE_FAILED, Change(body={"error": INTERRUPTED}))
        at = await self._losses.adopt_finished(at, inventory)
        if owner.live is None or owner.live.generation != at.generation:
            owner.woke(at)
        else:
            owner.live.record = at
        return at

    async def _is_captured(self, at: Record, inventory: Inventory) -> bool:
        """Whether a hibernating capture is complete, so that the machine's work is done even if it still runs."""
        if at.state is not WorkspaceState.HIBERNATING:
            return False
        whole = {facts.snapshot_id for facts in inventory.snapshots}
        unfinished = await self._store.unfinished(at.id)
        return any(reason is SnapshotReason.HIBERNATE and snapshot_id in whole for snapshot_id, reason in unfinished)

    async def _answers(self, at: Record) -> bool:
        try:
            async with asyncio.timeout(self._tools.settings.unresponsive_s):
                await self._tools.node(at).guest(at.id, at.generation).ping()
        except (PerdureError, TimeoutError):
            return False
        return True

    async def _check_head(self, at: Record, inventory: Inventory) -> Record:
        head = at.workspace.head_snapshot_id
        if at.state is not WorkspaceState.HIBERNATED or head is None:
            return at
        if any(facts.snapshot_id == head for facts in inventory.snapshots) or await self._store.is_stored(at, head):
            return at
        detail = f"Files of its last snapshot {head} are missing or cannot be read on its node."
        return await self._store.move(at, Event.FILES_MISSING, Change(detail=detail))

    async def _orphan_machines(self, node: Node, inventory: Inventory, known: set[WorkspaceId]) -> None:
        """Machines of workspaces that are deleted or that nobody has heard of. (Those of known ones were seen to.)"""
        for machine in inventory.machines:
            if machine.workspace_id not in known:
                if await self._losses.left_behind(node, machine):
                    continue
                _log.info("stopping the machine of %s, which no workspace owns", machine.workspace_id)
                with suppress(StaleGeneration, NotFound):
                    await node.stop(machine.workspace_id, machine.generation)

    async def _snapshots(self, node: Node) -> None:
        """Rows and files agree again. A pending row whose workspace has an operation in flight is left to it."""
        inventory = await node.inventory()
        here = [facts.snapshot_id for facts in inventory.snapshots]
        known = await self._store.known(here)  # after the files: a new file has a row by now
        strangers = tuple(snapshot_id for snapshot_id in here if snapshot_id not in known)
        if strangers:
            _log.info("removing %d snapshots that no row names", len(strangers))
            await node.delete_snapshots(strangers)
        await self.reap(node)

    async def reap(self, node: Node) -> int:
        """Delete what is marked: files first, then rows. Returns how many snapshots."""
        count = 0
        while doomed := await self._store.deleting(node.node_id):
            crashpoint(CrashPoint.REAP_MARKED)
            await node.delete_snapshots(doomed)
            crashpoint(CrashPoint.REAP_FREED)
            await self._store.forget(*doomed)
            count += len(doomed)
        return count


def _is_held(owner: Owner, at: Record) -> bool:
    """Whether this process has it awake, and so has seen its machine all the time."""
    return owner.live is not None and owner.live.generation == at.generation
