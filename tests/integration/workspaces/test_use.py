"""Using a workspace: when it was used last, and callers who meet it on its way to sleep."""

from __future__ import annotations

import pytest

from perdure.core.errors import DeadlineExceeded, NotFound
from perdure.core.ids import WorkspaceId
from perdure.workspaces.model import WorkspaceState
from tests.fakes.control_plane import CTX, ControlPlane
from tests.fakes.memory_guest import MemoryGuest


async def test_last_active_is_when_it_was_last_used_and_survives_sleep(plane: ControlPlane) -> None:
    created, _ = await plane.create(idle_timeout_s=0.0, checkpoint_interval_s=0.0)

    async def passes(seconds: float) -> None:
        plane.clock.advance(seconds)
        plane.database.shift_clock(seconds)

    async def idle_for() -> float:
        (listed,) = await plane.service.find(CTX)
        got = await plane.service.get(CTX, "demo")
        assert abs((listed.last_active_at - got.last_active_at).total_seconds()) < 30
        return (got.last_active_at - created.last_active_at).total_seconds()

    await passes(1000)
    assert 0 <= await idle_for() < 100, "nobody used it"
    async with plane.service.awake(CTX, "demo"):
        await passes(1000)
        assert 1900 < await idle_for() < 2100, "somebody does"
    plane.node.machines[created.id].touched_at = plane.clock.monotonic()
    await passes(1000)
    assert 1900 < await idle_for() < 2100
    await plane.service.sleep(CTX, "demo")
    await passes(1000)
    assert 1900 < await idle_for() < 2100, "going to sleep is no use"
    await plane.crash(node_too=False)
    await plane.restart()
    assert 1900 < await idle_for() < 2100
    await plane.service.wake(CTX, "demo")
    assert 3900 < await idle_for() < 4100
    await passes(500)
    await plane.service.wake(CTX, "demo")
    async with plane.service.awake(CTX, "demo"):
        pass
    await passes(500)
    plane.node.die(created.id)
    await plane.until("demo", lambda workspace: workspace.state is WorkspaceState.HIBERNATED)
    assert 4400 < await idle_for() < 4600, "a loss is no use either"


async def test_what_went_to_sleep_between_its_wake_and_the_callers_turn_is_woken_again(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.write("demo", "/file", b"kept")
    await plane.service.sleep(CTX, "demo")
    real, stolen = plane.node.guest, []

    def guest(workspace_id: WorkspaceId, generation: int) -> MemoryGuest:
        if not stolen:  # an explicit sleep was in between
            stolen.append(plane.node.machines.pop(workspace_id))
        return real(workspace_id, generation)

    plane.node.guest = guest  # type: ignore[method-assign]
    async with plane.service.awake(CTX, "demo") as awake:
        assert awake.workspace.generation == 3
        assert awake.report is not None
        assert awake.report.generation == 3
        assert b"".join([chunk async for chunk in awake.guest.read_file("/file")]) == b"kept"
    assert stolen[0].generation == 2
    assert plane.node.machines[workspace.id].generation == 3


async def test_a_caller_of_what_cannot_be_reached_waits_no_longer_than_its_deadline(plane: ControlPlane) -> None:
    await plane.create()

    def guest(workspace_id: WorkspaceId, generation: int) -> MemoryGuest:
        raise NotFound(f"{workspace_id} of generation {generation} does not run on this node.")

    plane.node.guest = guest  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="was not awake after"):
        async with plane.service.awake(CTX, "demo", deadline_s=0.3):
            pass
