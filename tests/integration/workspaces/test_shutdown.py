"""The end of a server: nobody's memory is lost because a host is slow; who is given up is named with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure.core.errors import GuestUnresponsive, MachineDied, NoSpace, PerdureError, Unavailable
from perdure.core.stop import Left, StopReport
from perdure.wire.node import CaptureSpec, MemoryFate, SnapshotFacts
from perdure.workspaces import shutdown
from perdure.workspaces.model import WorkspaceState
from perdure.workspaces.shutdown import StopOrder
from tests.fakes.control_plane import CTX, ControlPlane

HIBERNATED, RUNNING = WorkspaceState.HIBERNATED, WorkspaceState.RUNNING
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "RETRY_S", 0.0)
    monkeypatch.setattr(shutdown, "LOOK_S", 0.01)


class Stop:
    """A shutdown under way, what it tells, and the operator's word."""

    def __init__(self, plane: ControlPlane, patience_s: float = PATIENCE_S) -> None:
        self.plane = plane
        self.now = asyncio.Event()
        self.told: list[StopReport] = []
        self._heard = asyncio.Event()
        self.task = asyncio.create_task(plane.service.shutdown(StopOrder(patience_s, self.now, self._tell)))

    def _tell(self, report: StopReport) -> None:
        self.told.append(report)
        self._heard.set()

    async def hears(self, so: Callable[[StopReport], bool]) -> None:
        async with asyncio.timeout(60):
            while not (self.told and so(self.told[-1])):
                self._heard.clear()
                await self._heard.wait()

    async def looks_twice(self) -> None:
        """Deadlines have been looked at since this call."""
        count = len(self.told) + 2
        await self.hears(lambda _report: len(self.told) >= count)

    async def report(self) -> StopReport:
        async with asyncio.timeout(60):
            return await self.task


def hold_captures(plane: ControlPlane) -> tuple[asyncio.Event, asyncio.Event]:
    """Captures stop half way: (one has begun, they may go on)."""
    begun, go_on, real = asyncio.Event(), asyncio.Event(), plane.node.capture

    async def capture(spec: CaptureSpec) -> SnapshotFacts:
        begun.set()
        await go_on.wait()
        return await real(spec)

    plane.node.capture = capture  # type: ignore[method-assign]
    return begun, go_on


async def check_kept(plane: ControlPlane, *names: str) -> None:
    """A new server wakes them with their memory, not rewound."""
    plane.node.crash()
    await plane.restart()
    for name in names:
        _, report = await plane.service.wake(CTX, name)
        assert (report.memory, report.memory_reason) == (MemoryFate.KEPT, ""), name


async def test_everything_is_put_to_sleep_and_new_work_is_refused(plane: ControlPlane) -> None:
    for name in ("one", "two", "three"):
        await plane.create(name)
    await plane.service.sleep(CTX, "three")
    report = await Stop(plane).report()
    assert (sorted(report.asleep), report.waiting, report.left) == (["one", "two"], (), ())
    assert [found.state for found in await plane.service.find(CTX)] == [HIBERNATED] * 3
    assert plane.node.machines == {}
    refused: list[Callable[[], Awaitable[Any]]] = [
        lambda: plane.service.wake(CTX, "one"),
        lambda: plane.create("four"),
        lambda: plane.service.fork(CTX, "one", 1),
        lambda: plane.service.checkpoint(CTX, "one"),
    ]
    for call in refused:
        with pytest.raises(Unavailable, match="shutting down"):
            await call()
    await check_kept(plane, "one", "two", "three")


async def test_a_hibernation_under_way_is_not_cut_short_however_long_it_takes(plane: ControlPlane) -> None:
    await plane.create()
    begun, go_on = hold_captures(plane)
    stop = Stop(plane)
    await begun.wait()
    plane.clock.advance(10 * PATIENCE_S)
    await stop.looks_twice()
    assert stop.told[-1].waiting == ("demo",)
    go_on.set()
    assert (await stop.report()).asleep == ("demo",)
    await check_kept(plane, "demo")


async def test_many_workspaces_may_take_longer_together_than_the_patience(plane: ControlPlane) -> None:
    names = [f"w{number}" for number in range(6)]
    for name in names:
        await plane.create(name)
    real = plane.node.capture

    async def slow(spec: CaptureSpec) -> SnapshotFacts:
        plane.clock.advance(PATIENCE_S - 1)
        return await real(spec)

    plane.node.capture = slow  # type: ignore[method-assign]
    assert sorted((await Stop(plane).report()).asleep) == names
    await check_kept(plane, *names)


@pytest.mark.parametrize(
    "error", [GuestUnresponsive("Too slow."), Unavailable("The database is away."), PerdureError("A defect.")]
)
async def test_a_hibernation_that_fails_is_tried_again(plane: ControlPlane, error: PerdureError) -> None:
    await plane.create()
    plane.node.fail("capture", error, error, error)
    assert await Stop(plane).report() == StopReport(asleep=("demo",))
    await check_kept(plane, "demo")


async def test_a_database_that_was_away_for_a_moment_costs_nothing(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ambiguous: nobody knows whether the intent was recorded, and the guest is too slow to be asked."""
    workspace, _ = await plane.create()
    store, left = plane.service.upkeep.operations._store, 3
    real = store.intend_in

    async def away(*arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise Unavailable("The database does not answer.", ambiguous=True)
        await real(*arguments)

    async def silent() -> float:
        raise GuestUnresponsive("No answer.")

    monkeypatch.setattr(store, "intend_in", away)
    monkeypatch.setattr(plane.node.machines[workspace.id].guest, "ping", silent)
    assert (await Stop(plane).report()).asleep == ("demo",)
    await check_kept(plane, "demo")


async def test_a_commit_that_fails_after_the_capture_is_made_up_for(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    await plane.create()
    store, failures = plane.service.upkeep.operations._store, 1
    real = store.complete

    async def once(*arguments: Any, **named: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise Unavailable("The database does not answer.", ambiguous=True)
        return await real(*arguments, **named)

    monkeypatch.setattr(store, "complete", once)
    assert (await Stop(plane).report()).asleep == ("demo",)
    await check_kept(plane, "demo")


async def test_what_an_earlier_failure_left_awake_is_found(plane: ControlPlane) -> None:
    """A hibernation failed so that its owner does not know any more that it is awake."""
    workspace, _ = await plane.create()
    plane.service.upkeep.owner(workspace.id).live = None
    assert (await Stop(plane).report()).asleep == ("demo",)
    await check_kept(plane, "demo")


async def test_one_that_keeps_failing_is_given_up_with_its_reason(plane: ControlPlane) -> None:
    for name in ("good", "bad"):
        await plane.create(name)
    bad = await plane.service.get(CTX, "bad")
    real = plane.node.capture

    async def capture(spec: CaptureSpec) -> SnapshotFacts:
        if spec.workspace_id == bad.id:
            plane.clock.advance(PATIENCE_S / 4)
            raise GuestUnresponsive("It did not answer.")
        return await real(spec)

    plane.node.capture = capture  # type: ignore[method-assign]
    report = await Stop(plane).report()
    assert report.asleep == ("good",)
    assert report.left == (Left(bad.id, "bad", "It did not answer.", lost=True),)
    await check_kept(plane, "good")


async def test_what_may_come_back_is_waited_for_beyond_the_patience(plane: ControlPlane) -> None:
    """A full disk: the operator is told while room can still be made."""
    await plane.create()
    full = True
    real = plane.node.capture

    async def capture(spec: CaptureSpec) -> SnapshotFacts:
        if full:
            raise NoSpace("The disk is full.")
        return await real(spec)

    plane.node.capture = capture  # type: ignore[method-assign]
    stop = Stop(plane)
    await stop.hears(lambda report: report.troubles == ("demo: The disk is full.",))
    plane.clock.advance(2 * PATIENCE_S)
    await stop.looks_twice()
    assert not stop.task.done()
    full = False
    assert (await stop.report()) == StopReport(asleep=("demo",))
    await check_kept(plane, "demo")


async def test_a_disk_that_stays_full_is_the_reason_in_the_end(plane: ControlPlane) -> None:
    await plane.create()

    async def capture(_spec: CaptureSpec) -> SnapshotFacts:
        plane.clock.advance(PATIENCE_S)
        raise NoSpace("The disk is full.")

    plane.node.capture = capture  # type: ignore[method-assign]
    (left,) = (await Stop(plane).report()).left
    assert (left.name, left.why, left.lost) == ("demo", "The disk is full.", True)


async def test_a_create_that_does_not_end_is_dropped_and_its_name_is_free(plane: ControlPlane) -> None:
    plane.node.gate = asyncio.Event()
    creating = asyncio.create_task(plane.create())
    await plane.node.entered.wait()
    stop = Stop(plane)
    await stop.looks_twice()
    plane.clock.advance(PATIENCE_S)
    (left,) = (await stop.report()).left
    assert (left.name, left.lost) == ("demo", False)
    await asyncio.wait({creating})
    plane.node.gate = None
    plane.node.crash()
    await plane.restart()
    assert await plane.service.find(CTX) == []
    await plane.create()


async def test_a_machine_that_dies_meanwhile_is_told_as_lost(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()

    async def dies(_spec: CaptureSpec) -> SnapshotFacts:
        plane.node.machines[workspace.id].end()
        raise MachineDied("Killed.")

    plane.node.capture = dies  # type: ignore[method-assign]
    (left,) = (await Stop(plane).report()).left
    assert (left.name, left.lost) == ("demo", True)
    assert "Killed." in left.why


async def test_a_wake_under_way_is_waited_for_and_put_to_sleep(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    plane.node.gate, plane.node.entered = asyncio.Event(), asyncio.Event()
    waking = asyncio.create_task(plane.service.wake(CTX, "demo"))
    await plane.node.entered.wait()
    stop = Stop(plane)
    await stop.looks_twice()
    plane.node.gate.set()
    assert (await stop.report()).asleep == ("demo",)
    await waking
    assert plane.node.machines == {}
    plane.node.gate = None
    await check_kept(plane, "demo")


async def test_a_wake_that_does_not_end_is_dropped_and_loses_nothing(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    plane.node.gate, plane.node.entered = asyncio.Event(), asyncio.Event()
    waking = asyncio.create_task(plane.service.wake(CTX, "demo"))
    await plane.node.entered.wait()
    stop = Stop(plane)
    await stop.looks_twice()
    assert not stop.task.done()
    plane.clock.advance(PATIENCE_S)
    (left,) = (await stop.report()).left
    assert (left.name, left.lost, left.why) == ("demo", False, shutdown.NOT_STARTED)
    await asyncio.wait({waking})
    assert waking.cancelled()
    plane.node.gate = None
    await check_kept(plane, "demo")


async def test_a_fork_under_way_ends_asleep(plane: ControlPlane) -> None:
    """Its children appear after the shutdown has begun."""
    await plane.create()
    begun, go_on = hold_captures(plane)
    fork = asyncio.create_task(plane.service.fork(CTX, "demo", 2))
    await begun.wait()
    stop = Stop(plane)
    await stop.hears(lambda report: bool(report.waiting))
    go_on.set()
    assert sorted((await stop.report()).asleep) == ["demo", "demo-1", "demo-2"]
    await fork
    assert plane.node.machines == {}
    await check_kept(plane, "demo", "demo-1", "demo-2")


async def test_a_checkpoint_under_way_ends_first(plane: ControlPlane) -> None:
    await plane.create()
    begun, go_on = hold_captures(plane)
    checkpoint = asyncio.create_task(plane.service.checkpoint(CTX, "demo"))
    await begun.wait()
    stop = Stop(plane)
    await stop.hears(lambda report: bool(report.waiting))
    go_on.set()
    assert (await stop.report()).asleep == ("demo",)
    await checkpoint
    await check_kept(plane, "demo")


async def test_commands_and_calls_under_way_do_not_keep_a_workspace_awake(plane: ControlPlane) -> None:
    await plane.create()
    async with plane.service.awake(CTX, "demo"):
        assert (await Stop(plane).report()).asleep == ("demo",)
    await check_kept(plane, "demo")


async def test_a_silent_guest_is_not_failed_while_it_is_put_to_sleep(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "RETRY_S", 0.2)  # between two attempts the event has its turn
    workspace, _ = await plane.create()
    real, is_slow = plane.node.capture, True

    async def capture(spec: CaptureSpec) -> SnapshotFacts:
        nonlocal is_slow
        if is_slow:
            is_slow = False
            plane.node.hang(workspace.id)
            raise GuestUnresponsive("It is slow.")
        return await real(spec)

    plane.node.capture = capture  # type: ignore[method-assign]
    assert (await Stop(plane).report()).asleep == ("demo",)
    await check_kept(plane, "demo")


async def test_an_operator_who_insists_is_obeyed(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    begun, _ = hold_captures(plane)
    stop = Stop(plane)
    await begun.wait()
    stop.now.set()
    assert (await stop.report()).left == (Left(workspace.id, "demo", shutdown.INSISTED, lost=True),)
    plane.node.crash()
    await plane.restart()
    assert await plane.state("demo") is HIBERNATED


async def test_a_hibernation_that_hangs_for_ever_does_not_keep_the_server(plane: ControlPlane) -> None:
    await plane.create()
    begun, _ = hold_captures(plane)
    stop = Stop(plane)
    await begun.wait()
    plane.clock.advance(shutdown.STUCK_S)
    (left,) = (await stop.report()).left
    assert (left.name, left.lost) == ("demo", True)
    assert "15 minutes" in left.why
