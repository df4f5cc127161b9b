"""Times to wake at of sleepers whose node is gone: met by another server of the database, where the object store has them."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from perdure.fleet.nodes import NodeRegistry
from perdure.wire.node import MemoryFate
from perdure.workspaces.model import WorkspaceState
from tests.fakes.control_plane import CTX, ControlPlane
from tests.integration.workspaces.test_second_home import NEVER, Homes, homes

__all__ = ["homes"]


async def rung(plane: ControlPlane) -> None:
    """All times that have come have been met, as far as this server meets them."""
    await plane.service.upkeep.alarms.look()
    await plane.service.upkeep.drain()


async def test_a_sleepers_time_is_met_elsewhere_when_its_node_is_gone(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    await homes.plane.write("demo", "/a", b"one")
    told = await homes.service.wake_at(CTX, "demo", timedelta(seconds=30))
    await homes.slept()
    await homes.uploaded()
    other = await homes.elsewhere()
    await homes.goes_away()
    await rung(other.plane)
    workspace = await other.service.get(CTX, "demo")
    assert (workspace.state, workspace.wake_at) == (WorkspaceState.RUNNING, None)
    assert await other.plane.read("demo", "/a") == b"one"
    report = await other.service.report(CTX, "demo")
    assert report is not None and (report.wake_at, report.memory) == (told.wake_at, MemoryFate.KEPT)
    assert [entry.kind for entry in await other.service.log(CTX, "demo")].count("moved") == 1
    other.service.upkeep.stop()


async def test_times_of_what_only_a_node_that_is_gone_can_wake_wait_for_it(homes: Homes) -> None:
    """Without a copy in the store there is nothing to wake; of what ran there only that node has what is newest."""
    await homes.plane.create("ran", **NEVER)
    stored = await homes.service.checkpoint(CTX, "ran")
    assert await homes.uploaded() == {stored.id}
    await homes.plane.create("unstored", **NEVER)
    await homes.slept("unstored")
    for name in ("unstored", "ran"):
        await homes.service.wake_at(CTX, name, timedelta(seconds=30))
    other = await homes.elsewhere()
    await homes.goes_away()
    await rung(other.plane)
    assert await other.plane.state("unstored") is WorkspaceState.HIBERNATED
    assert await other.plane.state("ran") is WorkspaceState.RUNNING
    assert other.node.machines == {}, "nothing was woken, and nothing given up"
    other.service.upkeep.stop()
    await homes.plane.restart()
    await rung(homes.plane)
    assert await homes.plane.state("unstored") is WorkspaceState.RUNNING


async def test_of_two_servers_that_meet_a_time_of_a_third_one_does(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    await homes.service.wake_at(CTX, "demo", timedelta(seconds=30))
    await homes.slept()
    await homes.uploaded()
    others = [await homes.elsewhere(node) for node in ("nod_second", "nod_third")]
    await homes.goes_away()
    for other in others:
        await NodeRegistry(homes.plane.database, lease_s=20).register(other.node.node_id)
    await asyncio.gather(*(rung(other.plane) for other in others))
    assert sum(len(other.node.machines) for other in others) == 1
    assert (await others[0].service.get(CTX, "demo")).wake_at is None
    for other in others:
        other.service.upkeep.stop()
