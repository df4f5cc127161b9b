"""Rebase under load: a workspace falls asleep, its memory gets a base of its own, and it wakes on that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.workspaces.model import Workspace
from tests.torture.registry import Work
from tests.torture.server import CTX

if TYPE_CHECKING:
    from tests.torture.life import Life


async def rebase(life: Life, one: Workspace) -> None:
    """What the background does some time after it fell asleep; a fork of what was rebased shares the new base."""
    await life._put(one)
    await life._sleep(one)
    workspace = await life.server.service.get(CTX, one.id)
    if workspace.head_snapshot_id is not None:
        await life.server.node.rebase(workspace.head_snapshot_id)
    await life._put(one)


WORKS = (Work("rebase", rebase, 1, ("rebase.",)),)
