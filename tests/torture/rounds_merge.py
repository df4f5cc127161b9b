"""Merges under load: a workspace sleeps until its disk lies on too many layers, these become fewer, and it wakes on that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.snapshots.merge import is_deep
from perdure.workspaces.model import Workspace
from tests.torture.registry import Work
from tests.torture.server import CTX

if TYPE_CHECKING:
    from tests.torture.life import Life

#: Each sleep leaves a layer, and what runs streams them together when there are too many.
SLEEPS_MAX = 4


async def merge(life: Life, one: Workspace) -> None:
    """What the background does some time after it fell asleep; forks of what was merged share the new layer."""
    node = life.server.node
    for _ in range(SLEEPS_MAX):
        await life._put(one)
        await life._sleep(one)
        workspace = await life.server.service.get(CTX, one.id)
        if workspace.head_snapshot_id is not None and is_deep(node.store.manifest(workspace.head_snapshot_id)):
            await node.merge(workspace.head_snapshot_id)
            break
    await life._put(one)


WORKS = (Work("merge", merge, 1, ("merge.",)),)
