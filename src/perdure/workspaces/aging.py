"""What is done about workspaces that have been asleep for as long as their policy says. What is to be done is in ``longsleep``.

Each is seen to in its turn, on the row as it is then, in steps that are one transaction each or can be repeated: a crash anywhere
is made good by the next pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from perdure.core.errors import PerdureError, StaleGeneration
from perdure.core.ids import WorkspaceId
from perdure.journal.entries import canonical
from perdure.wire.node import Node
from perdure.workspaces import lineage, longsleep
from perdure.workspaces.lifecycle import Event
from perdure.workspaces.longsleep import Step
from perdure.workspaces.losses import Losses
from perdure.workspaces.operations import in_utc
from perdure.workspaces.owner import Owner
from perdure.workspaces.room import Room
from perdure.workspaces.rows import Record
from perdure.workspaces.store import Change
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)

#: Sleepers that one pass sees to; the next goes on after them.
BATCH = 100


class Aging:
    def __init__(self, tools: Tools, node: Node, losses: Losses, room: Room, owner_of: Callable[[WorkspaceId], Owner]) -> None:
        self._store = tools.store
        self._database = tools.store.database
        self._node = node
        self._losses = losses
        self._room = room
        self._owner_of = owner_of
        self._after = ""

    async def sweep(self) -> int:
        """One pass over some of them; returns how many. One that is at work is left to the next time."""
        rows = await self._database.all("longsleep.candidates", node_id=self._node.node_id, after=self._after, limit=BATCH)
        self._after = rows[-1]["id"] if len(rows) == BATCH else ""
        for row in rows:
            owner = self._owner_of(WorkspaceId(row["id"]))
            if owner.is_busy:
                continue
            try:
                await owner.run(partial(self._see_to, owner), urgent=True)
            except PerdureError as error:  # the others must not wait for it, and the next pass meets it again
                _log.warning("workspace %s sleeps on as it is: %s (%s)", owner.id, error.message, error.internal)
        return len(rows)

    async def _see_to(self, owner: Owner) -> None:
        at = await self._store.by_id(owner.id)
        step = longsleep.decide(at.workspace, at.now)
        if step is Step.ARCHIVE:
            await self._archive(at)
        elif step in {Step.WARN, Step.DELETE} and not await self._is_needed(at):
            await (self._warn(at) if step is Step.WARN else self._delete(owner, at))

    async def _is_needed(self, at: Record) -> bool:
        """Whether branches stand on its snapshots, or something refers to them. No fork comes between: it takes the same turn."""
        tree = await lineage.tree_of(self._database, at.id)
        return bool(set(tree.holders) - {at.id}) or any(tree.references.values())

    async def _warn(self, at: Record) -> None:
        deletes = max(longsleep.deletes_at(at.workspace) or at.now, at.now + longsleep.WARNING)
        body = {"deletes_at": in_utc(deletes), "asleep_after_days": at.workspace.asleep_after_days}
        await self._note(at, "deletion-announced", body)
        _log.info("workspace %s is deleted after %s unless it is used", at.id, in_utc(deletes))

    async def _delete(self, owner: Owner, at: Record) -> None:
        slept = at.now - at.workspace.state_changed_at
        body = {
            "cause": f"asleep for {slept // timedelta(days=1)} days, as its policy says",
            "asleep_after_days": at.workspace.asleep_after_days,
            "by": "policy",
        }
        await self._losses.free(owner, at, Event.DELETE, Change(body=body))

    async def _archive(self, at: Record) -> None:
        """Noted once nothing of it is on the node. What is not in the store yet, or is needed by another one that is awake, is
        tried at the next pass."""
        head = at.workspace.head_snapshot_id
        if self._node.second_home is None or head is None or not await self._store.is_stored(at, head):
            return
        own = [one.id for one in await self._store.snapshots(at.id)]
        if not await self._room.clear(own):
            await self._note(at, "archived", {"snapshots": len(own), "asleep_after_days": at.workspace.asleep_after_days})

    async def _note(self, at: Record, kind: str, body: Mapping[str, Any]) -> None:
        row = await self._database.one("longsleep.note", id=at.id, generation=at.generation, kind=kind, body=canonical(body))
        if row is None:
            raise StaleGeneration(f"Workspace {at.workspace.name!r} is not asleep any more.")
