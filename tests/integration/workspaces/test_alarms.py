"""Workspaces that wake by themselves: once, on the server's clock, whoever dies in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.core.errors import InvalidRequest, MachineDied, NoSpace, NotFound, PerdureError, RestoreFailed, Unavailable
from perdure.core.ids import NodeId
from perdure.wire.node import MemoryFate
from perdure.workspaces import alarms
from perdure.workspaces.hibernation import Use
from perdure.workspaces.model import Recovery, WorkspaceState
from perdure.workspaces.operations import Plan
from perdure.workspaces.rows import Record
from tests.fakes.control_plane import CTX, OTHER, ControlPlane
from tests.fakes.node import FakeNode
from tests.integration.workspaces.test_shutdown import Stop, at_once, hold_captures

__all__ = ["at_once"]

RUNNING, HIBERNATED = WorkspaceState.RUNNING, WorkspaceState.HIBERNATED
POLICY = {"idle_timeout_s": 5.0, "checkpoint_interval_s": 0.0}
HOUR = timedelta(hours=1)


async def later(plane: ControlPlane, seconds: float) -> None:
    """So much later, on every clock, all times that have come have been met."""
    plane.clock.advance(seconds)
    plane.database.shift_clock(seconds)
    await looked(plane)


async def looked(plane: ControlPlane) -> None:
    await plane.service.upkeep.alarms.look()
    await plane.service.upkeep.drain()


async def asleep(plane: ControlPlane, name: str = "demo") -> None:
    await plane.create(name, **POLICY)
    await plane.service.sleep(CTX, name)


async def entries(plane: ControlPlane, kind: str, name: str = "demo") -> list[Any]:
    return [entry for entry in await plane.service.log(CTX, name) if entry.kind == kind]


async def test_it_wakes_at_its_time_once_and_says_that_it_did(plane: ControlPlane) -> None:
    await asleep(plane)
    told = await plane.service.wake_at(CTX, "demo", HOUR)
    assert told.wake_at is not None and told.state is HIBERNATED, "it is not woken to be told"
    await later(plane, 3590)
    assert await plane.state("demo") is HIBERNATED
    await later(plane, 11)
    workspace = await plane.service.get(CTX, "demo")
    assert (workspace.state, workspace.wake_at) == (RUNNING, None)
    report = await plane.service.report(CTX, "demo")
    assert report is not None
    assert (report.memory, report.wake_at) == (MemoryFate.KEPT, told.wake_at)
    assert 0 <= report.late_s < 60
    (waking,) = await entries(plane, "waking")
    assert waking.body["by"] == "wake-at"
    assert datetime.fromisoformat(waking.body["wake_at"]) == told.wake_at
    (asked,) = await entries(plane, "wake-at")
    assert (datetime.fromisoformat(asked.body["at"]), asked.body["by"]) == (told.wake_at, "test")
    await plane.service.sleep(CTX, "demo")
    await later(plane, 86400)
    assert await plane.state("demo") is HIBERNATED, "once"
    _, report = await plane.service.wake(CTX, "demo")
    assert (report.wake_at, report.late_s) == (None, 0.0)


async def test_programs_inside_can_read_what_they_were_woken_for(plane: ControlPlane) -> None:
    await asleep(plane)
    told = await plane.service.wake_at(CTX, "demo", HOUR)
    await later(plane, 3700)
    resume = (await plane.read("demo", "/run/perdure/resume.json")).decode()
    assert told.wake_at is not None
    assert told.wake_at.astimezone(UTC).isoformat().replace("+00:00", "Z") in resume


async def test_a_time_of_any_zone_is_that_instant(plane: ControlPlane) -> None:
    await asleep(plane)
    at = datetime.fromisoformat("2100-01-01T00:30:00+14:00")
    with pytest.raises(InvalidRequest, match="too far"):
        await plane.service.wake_at(CTX, "demo", at)
    at = datetime.fromisoformat("2030-01-01T00:30:00+14:00")
    assert (await plane.service.wake_at(CTX, "demo", at)).wake_at == datetime(2029, 12, 31, 10, 30, tzinfo=UTC)
    with pytest.raises(InvalidRequest, match="any hour"):
        await plane.service.wake_at(CTX, "demo", at.replace(tzinfo=None))


async def test_a_time_that_cannot_be_written_in_utc_has_passed(plane: ControlPlane) -> None:
    """The year 1 began in Asia before it began in UTC."""
    await asleep(plane)
    told = await plane.service.wake_at(CTX, "demo", datetime.fromisoformat("0001-01-01T00:00:00+14:00"))
    assert told.wake_at is not None and told.wake_at < datetime.now(UTC)
    await looked(plane)
    assert await plane.state("demo") is RUNNING


async def test_another_time_takes_its_place_and_none_takes_it_back(plane: ControlPlane) -> None:
    await asleep(plane)
    await plane.service.wake_at(CTX, "demo", HOUR)
    await plane.service.wake_at(CTX, "demo", 3 * HOUR)
    await later(plane, 2 * 3600)
    assert await plane.state("demo") is HIBERNATED
    await plane.service.wake_at(CTX, "demo", None)
    await later(plane, 2 * 3600)
    assert await plane.state("demo") is HIBERNATED
    assert [entry.body["at"] is None for entry in await entries(plane, "wake-at")] == [False, False, True]


async def test_one_that_is_awake_in_time_stays_so_as_if_somebody_had_used_it(plane: ControlPlane) -> None:
    await plane.create(**POLICY)
    await plane.service.wake_at(CTX, "demo", timedelta(seconds=4))
    await later(plane, 4.5)
    workspace = await plane.service.get(CTX, "demo")
    assert (workspace.state, workspace.wake_at, workspace.generation) == (RUNNING, None, 1)
    (met,) = await entries(plane, "wake-at-met")
    assert met.body["by"] == "wake-at"
    plane.clock.advance(4)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    assert await plane.state("demo") is RUNNING
    plane.clock.advance(1)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    assert await plane.state("demo") is HIBERNATED


async def test_sleeps_and_wakes_before_its_time_leave_it_as_it_is(plane: ControlPlane) -> None:
    """Only whoever says so changes it (peers: row 6)."""
    await asleep(plane)
    told = await plane.service.wake_at(CTX, "demo", HOUR)
    for _ in range(2):
        await plane.service.wake(CTX, "demo")
        await plane.service.sleep(CTX, "demo")
    await plane.service.checkpoint(CTX, "demo", name="here")
    await plane.service.rewind(CTX, "demo", "here")
    await plane.service.sleep(CTX, "demo")
    assert (await plane.service.get(CTX, "demo")).wake_at == told.wake_at
    (child,) = await plane.service.fork(CTX, "demo", 1)
    assert not isinstance(child, PerdureError) and child.wake_at is None, "a branch has its own times"
    await later(plane, 3700)
    assert await plane.state("demo") is RUNNING


async def test_whoever_wakes_it_after_its_time_has_met_it(plane: ControlPlane) -> None:
    """A request that overtakes the timer causes the one wake there is."""
    await asleep(plane)
    told = await plane.service.wake_at(CTX, "demo", HOUR)
    plane.database.shift_clock(3700)
    _, report = await plane.service.wake(CTX, "demo")
    assert report.wake_at == told.wake_at
    await plane.service.sleep(CTX, "demo")
    await looked(plane)
    assert await plane.state("demo") is HIBERNATED
    assert len(await entries(plane, "waking")) == 1


async def test_a_request_at_that_moment_and_the_timer_cause_one_wake(plane: ControlPlane) -> None:
    """Both are served by it (peers: rows 15, 16)."""
    await asleep(plane)
    await plane.service.wake_at(CTX, "demo", HOUR)
    plane.database.shift_clock(3700)
    plane.node.calls.clear()
    await plane.service.upkeep.alarms.look()
    results = await asyncio.gather(*(plane.service.wake(CTX, "demo") for _ in range(50)))
    await plane.service.upkeep.drain()
    assert {report.generation for _, report in results} == {2}
    assert plane.node.calls.count("start") == 1


async def test_its_time_comes_while_it_falls_asleep(plane: ControlPlane) -> None:
    await plane.create(**POLICY)
    await plane.service.wake_at(CTX, "demo", HOUR)
    plane.database.shift_clock(3700)
    begun, go_on = hold_captures(plane)
    sleeping = asyncio.create_task(plane.service.sleep(CTX, "demo"))
    await begun.wait()
    await plane.service.upkeep.alarms.look()
    go_on.set()
    await sleeping
    await plane.service.upkeep.drain()
    workspace = await plane.service.get(CTX, "demo")
    assert (workspace.state, workspace.wake_at, workspace.generation) == (RUNNING, None, 2)
    assert len(await entries(plane, "waking")) == 1


# ------------------------------------------------------------------------------------------------- restarts, and more servers


async def test_one_that_passed_while_no_server_ran_is_met_at_the_start_and_told_as_late(plane: ControlPlane) -> None:
    await asleep(plane)
    await plane.service.wake_at(CTX, "demo", HOUR)
    await plane.crash()
    plane.database.shift_clock(4 * 3600)
    await plane.restart()
    await looked(plane)
    assert await plane.state("demo") is RUNNING
    report = await plane.service.report(CTX, "demo")
    assert report is not None and 3 * 3600 <= report.late_s < 3 * 3600 + 60
    (waking,) = await entries(plane, "waking")
    assert 3 * 3600 <= waking.body["late_s"] < 3 * 3600 + 60


async def test_a_server_with_its_timers_looks_at_its_start(plane: ControlPlane) -> None:
    """Nobody has to do anything for it."""
    await asleep(plane)
    await plane.service.wake_at(CTX, "demo", HOUR)
    await plane.crash()
    plane.database.shift_clock(3700)
    plane.build()
    await plane.service.upkeep.start()
    await plane.until("demo", lambda workspace: workspace.state is RUNNING)


async def test_the_timer_waits_for_the_earliest_and_for_whatever_becomes_it(plane: ControlPlane) -> None:
    """By the event loop's own timer: no look of the test is needed."""
    await plane.crash()
    plane.build()
    await plane.service.upkeep.start()
    for name, delay_s in (("late", 3600.0), ("soon", 0.2)):
        await asleep(plane, name)
        await plane.service.wake_at(CTX, name, timedelta(seconds=delay_s))
    await plane.until("soon", lambda workspace: workspace.wake_at is None)
    assert await plane.state("late") is HIBERNATED


async def test_killed_between_the_wake_and_its_machine_it_is_tried_again(plane: ControlPlane) -> None:
    """What was not met is still to be done."""
    await asleep(plane)
    told = await plane.service.wake_at(CTX, "demo", HOUR)
    plane.database.shift_clock(3700)
    plane.node.gate = asyncio.Event()
    plane.node.entered.clear()
    await plane.service.upkeep.alarms.look()
    await plane.node.entered.wait()
    assert await plane.state("demo") is WorkspaceState.WAKING
    await plane.crash()
    plane.node.gate = None
    await plane.restart()
    assert (await plane.service.get(CTX, "demo")).wake_at == told.wake_at
    await looked(plane)
    assert await plane.state("demo") is RUNNING


def _after(barrier: asyncio.Barrier, plan: Callable[[Record], Awaitable[Plan]]) -> Callable[..., Awaitable[Plan]]:
    async def waits(at: Record) -> Plan:
        await barrier.wait()
        return await plan(at)

    return waits


async def test_two_servers_that_take_it_for_theirs_wake_it_once(plane: ControlPlane) -> None:
    """Every write names the generation it was decided on, so one of them changes no row."""
    await asleep(plane)
    await plane.service.wake_at(CTX, "demo", HOUR)
    other = ControlPlane(plane.database, clock=plane.clock, settings=plane.settings, images=plane.images)
    other.node = plane.node
    other.build()
    plane.database.shift_clock(3700)
    together = asyncio.Barrier(2)  # both have seen that it sleeps before either wakes it
    for service in (plane.service, other.service):
        operations = service.upkeep.operations
        operations.plan_wake = _after(together, operations.plan_wake)  # type: ignore[method-assign]
    await asyncio.gather(plane.service.upkeep.alarms.look(), other.service.upkeep.alarms.look())
    await asyncio.gather(plane.service.upkeep.drain(), other.service.upkeep.drain())
    assert len(await entries(plane, "waking")) == 1
    assert plane.node.machines.keys() == {(await plane.service.get(CTX, "demo")).id}
    other.service.upkeep.stop()


async def test_the_server_of_another_node_leaves_it_alone(plane: ControlPlane) -> None:
    await asleep(plane)
    await plane.service.wake_at(CTX, "demo", HOUR)
    other = ControlPlane(plane.database, clock=plane.clock, settings=plane.settings, images=plane.images)
    other.node = FakeNode(NodeId("nod_other"), clock=plane.clock)
    await other.begin()
    plane.database.shift_clock(3700)
    await looked(other)
    assert await plane.state("demo") is HIBERNATED
    await looked(plane)
    assert await plane.state("demo") is RUNNING
    other.service.upkeep.stop()


async def test_one_of_another_server_can_be_set_there_and_is_met_here(plane: ControlPlane) -> None:
    await asleep(plane)
    other = ControlPlane(plane.database, clock=plane.clock, settings=plane.settings, images=plane.images)
    other.node = FakeNode(NodeId("nod_other"), clock=plane.clock)
    await other.begin()
    await other.service.wake_at(CTX, "demo", HOUR)
    await later(plane, 3700)
    assert await plane.state("demo") is RUNNING
    other.service.upkeep.stop()


async def test_a_server_that_stops_wakes_nobody(plane: ControlPlane) -> None:
    await asleep(plane)
    await plane.service.wake_at(CTX, "demo", HOUR)
    plane.database.shift_clock(3700)
    begun, go_on = hold_captures(plane)
    await plane.create("busy", **POLICY)
    stop = Stop(plane)
    await begun.wait()
    await plane.service.upkeep.alarms.look()
    go_on.set()
    assert (await stop.report()).left == ()
    assert await plane.state("demo") is HIBERNATED
    plane.node.crash()
    await plane.restart()
    await looked(plane)
    assert await plane.state("demo") is RUNNING


# ------------------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("error", [NoSpace("The disk is full."), Unavailable("Not now."), MachineDied("It died.")])
async def test_a_wake_that_is_refused_is_tried_again_and_not_at_once(plane: ControlPlane, error: PerdureError) -> None:
    await asleep(plane)
    await plane.service.wake_at(CTX, "demo", HOUR)
    plane.node.fail("start", error, error)
    await later(plane, 3700)
    await looked(plane)
    assert await plane.state("demo") is HIBERNATED
    assert len(await entries(plane, "waking")) == 1
    await later(plane, alarms.BACKOFF_S + 1)
    assert len(await entries(plane, "waking")) == 2
    await later(plane, alarms.BACKOFF_S + 1)
    assert len(await entries(plane, "waking")) == 2, "it waits longer each time"
    await later(plane, 2 * alarms.BACKOFF_S)
    assert await plane.state("demo") is RUNNING
    report = await plane.service.report(CTX, "demo")
    assert report is not None and report.late_s > 100


async def test_one_that_has_failed_waits_until_somebody_recovers_it(plane: ControlPlane) -> None:
    await asleep(plane)
    told = await plane.service.wake_at(CTX, "demo", HOUR)
    plane.node.fail("start", RestoreFailed("It would not load."))
    await later(plane, 3700)
    assert await plane.state("demo") is WorkspaceState.FAILED
    await later(plane, 3700)
    assert len(await entries(plane, "waking")) == 1
    _, report = await plane.service.recover(CTX, "demo", Recovery.RETRY)
    assert (report.wake_at, (await plane.service.get(CTX, "demo")).wake_at) == (told.wake_at, None)


async def test_a_deletion_takes_it_along(plane: ControlPlane) -> None:
    await asleep(plane)
    workspace = await plane.service.wake_at(CTX, "demo", HOUR)
    await plane.service.delete(CTX, "demo")
    await later(plane, 3700)
    assert plane.node.machines == {}
    row = await plane.database.one("workspaces.by_id", id=workspace.id)
    assert row is not None and row["wake_at"] is None
    with pytest.raises(NotFound):
        await plane.service.wake_at(CTX, "demo", HOUR)


async def test_the_databases_clock_decides_and_may_be_set(plane: ControlPlane) -> None:
    """The server's own clock has no say, forward or back."""
    await asleep(plane)
    await plane.service.wake_at(CTX, "demo", HOUR)
    plane.clock.advance(86400)
    await looked(plane)
    assert await plane.state("demo") is HIBERNATED
    plane.database.shift_clock(3500)
    await looked(plane)
    plane.database.shift_clock(-3500)
    await looked(plane)
    assert await plane.state("demo") is HIBERNATED
    plane.database.shift_clock(3700)
    await looked(plane)
    assert await plane.state("demo") is RUNNING


async def test_a_hundred_and_more_are_all_met(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one look takes: the next follows."""
    monkeypatch.setattr(alarms, "ROWS", 2)
    names = [f"w{number}" for number in range(7)]
    for name in names:
        await asleep(plane, name)
        await plane.service.wake_at(CTX, name, HOUR)
    plane.database.shift_clock(3700)
    looks = 0
    while plane.service.upkeep.alarms.due.is_set() or not looks:
        await looked(plane)
        looks += 1
    assert [await plane.state(name) for name in names] == [RUNNING] * 7
    assert plane.node.most_starting <= plane.settings.parallel_starts


@pytest.mark.parametrize("when", [datetime(2026, 3, 1, 12), timedelta(days=5000), timedelta(seconds=-1)])  # noqa: DTZ001
async def test_bad_times_are_refused_and_change_nothing(plane: ControlPlane, when: datetime | timedelta) -> None:
    await asleep(plane)
    told = await plane.service.wake_at(CTX, "demo", HOUR)
    with pytest.raises(InvalidRequest) as caught:
        await plane.service.wake_at(CTX, "demo", when)
    assert caught.value.hint
    assert (await plane.service.get(CTX, "demo")).wake_at == told.wake_at
    for ctx, ref in ((CTX, "nobody"), (OTHER, "demo"), (OTHER, told.id)):
        with pytest.raises(NotFound):
            await plane.service.wake_at(ctx, ref, HOUR)


async def test_it_is_no_reason_to_stay_awake_before(plane: ControlPlane) -> None:
    await plane.create(**POLICY)
    workspace = await plane.service.wake_at(CTX, "demo", HOUR)
    assert workspace.idleness is not None
    assert Use.KEEP_AWAKE not in [reason.use for reason in workspace.idleness.reasons]
    plane.clock.advance(5)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    assert await plane.state("demo") is HIBERNATED
