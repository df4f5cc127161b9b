"""Limits of a tenant hold at the instant they matter, whoever else is at it, and nothing is lost for their sake."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from perdure.access.limits import Quota
from perdure.access.model import OPERATOR
from perdure.core.errors import PerdureError, QuotaExceeded, RestoreFailed
from perdure.core.ids import DEFAULT_TENANT
from perdure.journal.entries import Journal
from perdure.wire.node import Activity
from perdure.workspaces.lifecycle import WITH_MACHINE
from perdure.workspaces.model import Context, CreateWorkspace, Recovery, WorkspaceKind, WorkspaceState
from tests.fakes.control_plane import CTX, OTHER, ControlPlane

MIB = 256
STATES_WITH_MACHINE = {state.value for state in WITH_MACHINE}


async def limit(plane: ControlPlane, **limits: float | None) -> None:
    changes = {Quota(name): value for name, value in limits.items()}
    await plane.service._store.quotas.set(OPERATOR, DEFAULT_TENANT, changes)


async def used(plane: ControlPlane) -> Any:
    return await plane.service._store.quotas.use(DEFAULT_TENANT)


async def refused(quota: Quota, call: Any) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        await call
    assert caught.value.details["quota"] == quota
    return caught.value


def create(plane: ControlPlane, name: str, ctx: Context = CTX) -> Any:
    return plane.service.create(ctx, CreateWorkspace(name, memory_mib=MIB))


# ------------------------------------------------------------------------------------------------------------- workspaces


async def test_of_many_at_once_only_as_many_are_made_as_there_is_room_for(plane: ControlPlane) -> None:
    """(peers: "asks that recur": typed quota errors)"""
    await limit(plane, workspaces=5)
    outcomes = await asyncio.gather(*(create(plane, f"w{number}") for number in range(20)), return_exceptions=True)
    failures = [one for one in outcomes if isinstance(one, BaseException)]
    assert (len(outcomes) - len(failures), {type(one) for one in failures}) == (5, {QuotaExceeded})
    assert len(await plane.service.find(CTX)) == 5
    assert len(plane.node.machines) == 5, "nothing was started for those that were refused"
    await refused(Quota.WORKSPACES, create(plane, "another"))
    await create(plane, "another", OTHER)


async def test_a_fork_is_made_whole_or_not_at_all_and_before_anything_is_paused(plane: ControlPlane) -> None:
    await limit(plane, workspaces=3)
    await create(plane, "demo")
    plane.node.calls.clear()
    error = await refused(Quota.WORKSPACES, plane.service.fork(CTX, "demo", 3))
    assert (error.details["used"], error.details["asked"], error.details["limit"]) == ("1", "3", "3")
    assert plane.node.calls == []
    forks = await plane.service.fork(CTX, "demo", 2)
    assert not [one for one in forks if isinstance(one, PerdureError)]
    await refused(Quota.WORKSPACES, plane.service.fork(CTX, "demo", 1))
    await plane.service.discard(CTX, "demo-1")
    await plane.service.fork(CTX, "demo", 1)


async def test_two_forks_at_once_do_not_pass_the_limit_together(plane: ControlPlane) -> None:
    await limit(plane, workspaces=4)
    await create(plane, "a")
    await create(plane, "b")
    forks = (plane.service.fork(CTX, name, 2) for name in ("a", "b"))
    outcomes = await asyncio.gather(*forks, return_exceptions=True)
    assert sum(isinstance(one, QuotaExceeded) for one in outcomes) == 1
    assert len(await plane.service.find(CTX)) == 4


async def test_a_rewind_needs_a_place_for_what_it_keeps(plane: ControlPlane) -> None:
    await limit(plane, workspaces=1)
    await create(plane, "demo")
    await plane.service.checkpoint(CTX, "demo", name="early")
    await plane.write("demo", "/file", b"late")
    await refused(Quota.WORKSPACES, plane.service.rewind(CTX, "demo", "early"))
    assert await plane.state("demo") is WorkspaceState.RUNNING, "it was not put to sleep for that"
    await limit(plane, workspaces=2)
    _, report = await plane.service.rewind(CTX, "demo", "early")
    assert report.kept_branch is not None
    assert (await used(plane)).workspaces == 2
    await plane.service.promote(CTX, report.kept_branch)
    assert (await used(plane)).workspaces == 2, "the branch ended, and what the workspace was is one"


async def test_what_failed_takes_nobodys_place_and_its_way_back_asks_for_one(plane: ControlPlane) -> None:
    """(peers: row 23)"""
    await limit(plane, workspaces=1)
    await create(plane, "demo")
    await plane.service.sleep(CTX, "demo")
    plane.node.fail("start", RestoreFailed("It does not come up."))
    with pytest.raises(RestoreFailed):
        await plane.service.wake(CTX, "demo")
    assert await plane.state("demo") is WorkspaceState.FAILED
    assert (await used(plane)).workspaces == 0
    await create(plane, "other")
    await refused(Quota.WORKSPACES, plane.service.recover(CTX, "demo", Recovery.RETRY))
    assert await plane.state("demo") is WorkspaceState.FAILED
    await plane.service.delete(CTX, "other")
    await plane.service.recover(CTX, "demo", Recovery.RETRY)
    await plane.service.delete(CTX, "demo")
    assert (await used(plane)).workspaces == 0


async def test_a_failed_one_can_be_deleted_whatever_is_used(plane: ControlPlane) -> None:
    """(peers: row 23)"""
    await create(plane, "demo")
    await plane.service.sleep(CTX, "demo")
    plane.node.fail("start", RestoreFailed("It does not come up."))
    with pytest.raises(RestoreFailed):
        await plane.service.wake(CTX, "demo")
    await limit(plane, workspaces=0, memory_awake_mib=0, storage_gib=0, execs=0)
    await plane.service.delete(CTX, "demo")
    assert await plane.service.find(CTX) == []


async def test_a_create_that_fails_gives_its_place_back(plane: ControlPlane) -> None:
    """(peers: row 23)"""
    await limit(plane, workspaces=1, memory_awake_mib=MIB)
    plane.node.fail("start", RestoreFailed("It does not come up."))
    with pytest.raises(RestoreFailed):
        await create(plane, "demo")
    assert ((await used(plane)).workspaces, (await used(plane)).memory_awake_mib) == (0, 0)
    await create(plane, "demo")


async def test_the_disk_of_a_lost_machine_is_kept_above_every_limit_and_counts_as_nobody(plane: ControlPlane) -> None:
    workspace, _ = await create(plane, "demo")
    await plane.write("demo", "/file", b"new")
    await limit(plane, workspaces=1, storage_gib=0)
    plane.node.die(workspace.id)
    await plane.until("demo", lambda one: one.state is WorkspaceState.HIBERNATED)
    (lost,) = [one for one in await plane.service.find(CTX) if one.kind is WorkspaceKind.LOST]
    assert lost.name.startswith("demo@lost-")
    assert (await used(plane)).workspaces == 1


# ----------------------------------------------------------------------------------------------------------------- memory


async def test_a_wake_without_room_is_refused_and_puts_nobody_to_sleep(plane: ControlPlane) -> None:
    """(peers: "asks that recur": no hidden eviction at quota)"""
    for name in ("a", "b", "c"):
        await create(plane, name)
        await plane.service.sleep(CTX, name)
    await limit(plane, memory_awake_mib=2 * MIB)
    await plane.service.wake(CTX, "a")
    await plane.service.wake(CTX, "b")
    error = await refused(Quota.MEMORY_AWAKE, plane.service.wake(CTX, "c"))
    assert error.retryable
    assert (error.details["used"], error.details["asked"], error.details["awake"]) == (str(2 * MIB), str(MIB), "a, b")
    assert [(await plane.state(name)).value for name in ("a", "b", "c")] == ["running", "running", "hibernated"]
    assert (await plane.service.get(CTX, "c")).state_detail == ""
    async with plane.service.awake(CTX, "a"):
        pass  # what is awake asks for nothing
    await plane.service.sleep(CTX, "b")
    _, report = await plane.service.wake(CTX, "c")
    assert report.memory == "kept"


async def test_of_many_wakes_at_once_no_more_get_in_than_there_is_memory(plane: ControlPlane) -> None:
    names = [f"w{number}" for number in range(8)]
    for name in names:
        await create(plane, name)
        await plane.service.sleep(CTX, name)
    await limit(plane, memory_awake_mib=3 * MIB + 100)
    outcomes = await asyncio.gather(*(plane.service.wake(CTX, name) for name in names * 2), return_exceptions=True)
    assert (await used(plane)).memory_awake_mib == 3 * MIB
    assert {type(one) for one in outcomes if isinstance(one, BaseException)} == {QuotaExceeded}


async def test_a_machine_that_reboots_itself_keeps_its_memory_above_a_lowered_limit(plane: ControlPlane) -> None:
    workspace, _ = await create(plane, "demo")
    await limit(plane, memory_awake_mib=0, workspaces=0, storage_gib=0)
    plane.node.reboot(workspace.id)
    again = await plane.until("demo", lambda one: one.generation == 2 and one.state is WorkspaceState.RUNNING)
    assert again.size.memory_mib == MIB
    _, snapshot = await plane.service.sleep(CTX, "demo")
    assert snapshot.has_memory


async def test_a_rewind_of_an_awake_one_needs_no_memory_beside_its_own(plane: ControlPlane) -> None:
    await limit(plane, memory_awake_mib=MIB)
    await create(plane, "demo")
    await plane.service.checkpoint(CTX, "demo", name="early")
    await plane.service.rewind(CTX, "demo", "early")
    assert await plane.state("demo") is WorkspaceState.RUNNING
    never = await refused(Quota.MEMORY_AWAKE, plane.service.fork(CTX, "demo", 2))
    assert not never.retryable, "two would never fit"


# ---------------------------------------------------------------------------------------------------------------- storage


async def test_above_storage_work_is_kept_and_nothing_new_begins(plane: ControlPlane) -> None:
    workspace, _ = await create(plane, "demo")
    await create(plane, "other")
    await plane.service.sleep(CTX, "other")
    await plane.write("demo", "/work", b"w" * 1000)
    await limit(plane, storage_gib=0)
    await refused(Quota.STORAGE, plane.service.checkpoint(CTX, "demo"))
    for call in (
        create(plane, "new"),
        plane.service.fork(CTX, "demo", 1),
        plane.service.wake(CTX, "other"),
        plane.service.recover(CTX, "other", Recovery.DISK_BOOT),
    ):
        await refused(Quota.STORAGE, call)
    assert await plane.read("demo", "/work") == b"w" * 1000, "what is awake goes on"
    _, snapshot = await plane.service.sleep(CTX, "demo")
    assert snapshot.has_memory, "a hibernation never loses work for a quota's sake"
    await refused(Quota.STORAGE, plane.service.wake(CTX, "demo"))
    await limit(plane, storage_gib=None)
    _, report = await plane.service.wake(CTX, "demo")
    assert (report.memory, await plane.read("demo", "/work")) == ("kept", b"w" * 1000)
    assert workspace.id == report.workspace_id


async def test_automatic_checkpoints_and_idle_sleep_go_on_above_storage(plane: ControlPlane) -> None:
    await plane.service.create(CTX, CreateWorkspace("demo", checkpoint_interval_s=10, idle_timeout_s=100))
    await limit(plane, storage_gib=0)
    await plane.write("demo", "/work", b"w")
    plane.clock.advance(11)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    assert [one.reason.value for one in await plane.service.snapshots(CTX, "demo")] == ["automatic"]
    plane.clock.advance(101)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    assert await plane.state("demo") is WorkspaceState.HIBERNATED


async def test_a_snapshot_counts_once_and_no_longer_when_it_is_gone(plane: ControlPlane) -> None:
    await create(plane, "demo")
    first = await plane.service.checkpoint(CTX, "demo", name="first")
    assert (await used(plane)).storage_bytes >= first.memory_bytes + first.disk_bytes > 0
    await plane.service.delete(CTX, "demo")
    await plane.service.upkeep.clean()
    assert (await used(plane)).storage_bytes == 0


# --------------------------------------------------------------------------------------------------------------- commands


async def test_commands_are_counted_where_they_run(plane: ControlPlane) -> None:
    demo, _ = await create(plane, "demo")
    theirs, _ = await create(plane, "theirs", OTHER)
    asleep, _ = await create(plane, "asleep")
    for workspace, count in ((demo, 3), (theirs, 5), (asleep, 7)):
        plane.node.busy[workspace.id] = Activity(count, 0, 0, 0.0, True)
    await plane.service.sleep(CTX, "asleep")
    assert plane.service.running_execs(DEFAULT_TENANT) == 3
    assert plane.service.running_execs(OTHER.tenant_id) == 5
    plane.node.crash()
    assert plane.service.running_execs(OTHER.tenant_id) in {0, 5}, "a machine that has just gone is no error"


# ------------------------------------------------------------------------------------------------------------- simulation


@pytest.mark.parametrize(("seed", "workspaces", "machines"), [(0, 3, None), (1, None, 2), (2, 4, 2), (3, 4, 3)])
async def test_whatever_is_done_at_once_no_instant_is_above_a_limit(
    plane: ControlPlane, seed: int, workspaces: int | None, machines: int | None
) -> None:
    """Creates, forks, wakes, sleeps, rewinds and deletions of many callers. The threads say afterwards what there was at which
    instant: their entries are written by the statements that change the state."""
    await limit(plane, workspaces=workspaces, memory_awake_mib=None if machines is None else machines * MIB)
    chance = random.Random(seed)
    names = [f"w{number}" for number in range(8)]

    async def act() -> None:
        name = chance.choice([*names, *(f"{one}-1" for one in names)])
        match chance.choice(["create", "create", "fork", "wake", "wake", "sleep", "sleep", "delete", "rewind", "checkpoint"]):
            case "create":
                await create(plane, name.split("-")[0])
            case "fork":
                await plane.service.fork(CTX, name, chance.randint(1, 2))
            case "rewind":
                snapshots = await plane.service.snapshots(CTX, name)
                await plane.service.rewind(CTX, name, chance.choice(snapshots).id if snapshots else "none")
            case "checkpoint":
                await plane.service.checkpoint(CTX, name, name=f"s{chance.randint(0, 99)}")
            case what:
                await getattr(plane.service, what)(CTX, name)

    outcomes: list[object] = []
    for _ in range(8):
        outcomes += await asyncio.gather(*(act() for _ in range(12)), return_exceptions=True)
    assert not [one for one in outcomes if isinstance(one, BaseException) and not isinstance(one, PerdureError)]
    assert [one for one in outcomes if isinstance(one, QuotaExceeded)], "the limits were met"
    most_workspaces, most_machines = await heights(plane)
    assert workspaces is None or most_workspaces <= workspaces
    assert machines is None or most_machines <= machines
    assert workspaces == most_workspaces or machines == most_machines, "reached, and never passed"


async def heights(plane: ControlPlane) -> tuple[int, int]:
    """The most workspaces, and machines, that there were at any instant."""
    rows = await plane.database.all("journal.workspaces")
    journal = Journal(plane.database)
    changes: dict[Any, list[tuple[str, str]]] = defaultdict(list)
    for row in rows:
        for entry in await journal.read(DEFAULT_TENANT, row["workspace_id"]):
            if "to" in entry.body:
                changes[entry.at].append((row["workspace_id"], entry.body["to"]))
    states: dict[str, str] = {}
    most_workspaces = most_machines = 0
    for at in sorted(changes):
        for workspace_id, state in sorted(changes[at], key=lambda one: one[1] != "deleted"):
            states[workspace_id] = state
        standing = [state for state in states.values() if state not in {"deleted", "failed"}]
        most_workspaces = max(most_workspaces, len(standing))
        most_machines = max(most_machines, sum(state in STATES_WITH_MACHINE for state in standing))
    return most_workspaces, most_machines
