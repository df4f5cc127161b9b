"""What a resident tells about its machine, with a machine and a link that only do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from perdure.core.clock import Clock, SystemClock
from perdure.core.errors import GuestUnresponsive, MachineDied, NoSpace
from perdure.core.ids import DEFAULT_TENANT, SnapshotId, WorkspaceId
from perdure.machines.driver import EventKind, MachineEvent, MachineState
from perdure.node import resident as module
from perdure.node.resident import Parts, Resident
from perdure.snapshots.capture import CaptureRequest
from perdure.wire.node import CaptureMode, CaptureSpec, Identity, NodeEvent, NodeEventKind
from tests.fakes.clock import FakeClock


class StubMachine:
    pid = 1

    def __init__(self) -> None:
        self.state = MachineState.RUNNING
        self.queue: asyncio.Queue[MachineEvent] = asyncio.Queue()
        self.refusals = 0
        self.killed = False

    async def events(self) -> AsyncIterator[MachineEvent]:
        while True:
            event = await self.queue.get()
            yield event
            if event.kind is EventKind.EXITED:
                return

    async def resume(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise NoSpace("Still full.")
        self.state = MachineState.RUNNING

    async def pause(self) -> None:
        self.state = MachineState.PAUSED

    async def kill(self) -> None:
        self.killed, self.state = True, MachineState.DEAD


class StubLink:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.asked = asyncio.Event()
        self.retired = False
        self.slimmed: list[int | None] = []
        self.thaws: asyncio.Queue[None] = asyncio.Queue()

    async def thaw(self) -> float:
        self.thaws.put_nowait(None)
        return 0.0

    async def sync(self, *, drop_caches_over: int | None = None) -> int:
        self.slimmed.append(drop_caches_over)
        if self.error:
            raise self.error
        return 0

    async def stand_still(self) -> bool:
        return True

    def release(self) -> None:
        pass

    async def cpu_s(self) -> float:
        self.asked.set()
        if self.error:
            raise self.error
        return 1.0

    async def retire(self) -> None:
        self.retired = True


class StubRun:
    layer_count = 1
    ended: bool | None = None

    async def ready(self, _machine: object, _snapshot_id: SnapshotId, *, goes_on: bool) -> None:
        pass

    async def capture(self, _machine: object, request: CaptureRequest) -> CaptureRequest:
        return request

    def commit(self, captured: CaptureRequest, _pause_s: float) -> SnapshotId:
        return captured.snapshot_id

    def discard(self, _snapshot_id: SnapshotId) -> None:
        raise AssertionError("nothing failed")

    def end(self, *, keep_layers: bool) -> int:
        self.ended = keep_layers
        return 0


class World:
    def __init__(self, unresponsive_s: float = 1000.0, clock: Clock | None = None, cache_max_bytes: int | None = None) -> None:
        self.machine, self.link, self.run = StubMachine(), StubLink(), StubRun()
        self.told: asyncio.Queue[NodeEvent] = asyncio.Queue()
        identity = Identity(WorkspaceId("ws_1"), DEFAULT_TENANT, 3, "demo", "0" * 32)
        parts = Parts(identity, cast("Any", self.machine), cast("Any", self.link), cast("Any", self.run))
        self.resident = Resident(parts, clock or SystemClock(), unresponsive_s, self.told.put_nowait, cache_max_bytes)
        self.resident.watch()

    async def tell(self, *events: MachineEvent) -> None:
        for event in events:
            self.machine.queue.put_nowait(event)

    async def next(self) -> tuple[NodeEventKind, int, str]:
        async with asyncio.timeout(10):
            event = await self.told.get()
        return event.kind, event.generation, event.detail


@pytest.mark.parametrize(
    ("machine", "node"),
    [
        (EventKind.RESET, NodeEventKind.GUEST_REBOOT),
        (EventKind.PANIC, NodeEventKind.GUEST_PANIC),
        (EventKind.POWEROFF, NodeEventKind.GUEST_POWEROFF),
    ],
)
async def test_an_end_is_told_once_with_its_cause(machine: EventKind, node: NodeEventKind) -> None:
    world = World()
    await world.tell(MachineEvent(machine), MachineEvent(EventKind.EXITED, "bye"))
    assert await world.next() == (node, 3, "bye")
    await world.resident.end(keep_layers=True)
    assert world.told.empty()


async def test_a_vmm_that_just_ends_has_died() -> None:
    world = World()
    await world.tell(MachineEvent(EventKind.EXITED, "signal 9"))
    assert await world.next() == (NodeEventKind.DIED, 3, "signal 9")
    await world.resident.end(keep_layers=True)


async def test_a_full_disk_is_told_and_tried_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM_CHECK_S", 0.01)
    world = World()
    world.machine.state, world.machine.refusals = MachineState.NO_SPACE, 3
    await world.tell(MachineEvent(EventKind.NO_SPACE, "full"))
    assert await world.next() == (NodeEventKind.NO_SPACE, 3, "full")
    assert await world.next() == (NodeEventKind.ROOM_AGAIN, 3, "")
    assert world.machine.state is MachineState.RUNNING
    await world.resident.end(keep_layers=False)


async def test_a_machine_whose_disk_failed_has_an_exit() -> None:
    world = World()
    world.machine.state = MachineState.PAUSED
    await world.tell(MachineEvent(EventKind.IO_ERROR, "EIO"))
    assert (await world.next())[0] is NodeEventKind.UNRESPONSIVE
    await world.resident.end(keep_layers=True)


@pytest.mark.parametrize("error", [GuestUnresponsive("no answer"), MachineDied("the channel broke")])
async def test_a_guest_that_stays_silent_is_unresponsive(error: Exception) -> None:
    world = World(unresponsive_s=0.2)
    world.link.error = error
    assert (await world.next())[0] is NodeEventKind.UNRESPONSIVE
    await world.resident.end(keep_layers=True)


async def test_a_host_that_stood_still_does_not_fail_its_guests() -> None:
    """Deadlines pass while this process is not run at all; asked once more, the guest answers."""
    clock = FakeClock()
    world = World(unresponsive_s=0.2, clock=clock)
    silences = 0

    async def cpu_s() -> float:
        nonlocal silences
        world.link.asked.set()
        if silences == 0:
            silences += 1
            clock.advance(1000.0)
            raise GuestUnresponsive("The deadline passed.")
        return 1.0

    world.link.cpu_s = cpu_s  # type: ignore[method-assign]
    for _ in range(4):
        world.link.asked.clear()
        async with asyncio.timeout(10):
            await world.link.asked.wait()
    assert silences == 1
    assert world.told.empty()
    await world.resident.end(keep_layers=True)


async def test_silence_means_nothing_while_the_machine_stands_still() -> None:
    world = World(unresponsive_s=0.1)
    world.link.error = GuestUnresponsive("frozen")
    world.resident.freeze()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await world.told.get()
    world.link.error = None
    world.resident.thaw()
    world.link.asked.clear()
    async with asyncio.timeout(10):
        await world.link.asked.wait()
    assert world.told.empty()
    await world.resident.end(keep_layers=True)


async def test_stopping_ends_everything_once() -> None:
    world = World()
    await world.resident.stop(keep_layers=True)
    await world.resident.stop(keep_layers=False)
    assert world.machine.killed
    assert world.link.retired
    assert world.run.ended is True
    assert world.resident.is_ended


async def test_a_thaw_that_went_unanswered_is_asked_for_again() -> None:
    world = World(unresponsive_s=0.1)
    world.resident._owes_thaw = True
    async with asyncio.timeout(10):
        await world.link.thaws.get()
        world.link.asked.clear()
        await world.link.asked.wait()
    assert world.link.thaws.empty(), "once is enough"
    assert world.told.empty()
    await world.resident.end(keep_layers=True)


async def test_a_guest_too_slow_to_flush_its_disk_sleeps_all_the_same() -> None:
    """What it did not flush is in its memory, which is captured; kept awake it would lose that when the server stops."""
    world = World()
    world.link.error = GuestUnresponsive("It is slow.")
    spec = CaptureSpec(WorkspaceId("ws_1"), 3, SnapshotId("snp_1"), CaptureMode.HIBERNATE)
    assert cast("Any", await world.resident.capture(spec)) == "snp_1"
    assert world.resident.is_ended and world.machine.killed


async def test_a_guest_that_broke_while_it_flushed_is_an_error() -> None:
    world = World()
    world.link.error = MachineDied("Gone.")
    world.run.discard = lambda _snapshot_id: None  # type: ignore[method-assign]
    spec = CaptureSpec(WorkspaceId("ws_1"), 3, SnapshotId("snp_1"), CaptureMode.HIBERNATE)
    with pytest.raises(MachineDied):
        await world.resident.capture(spec)
    await world.resident.end(keep_layers=True)


@pytest.mark.parametrize("limit", [None, 1 << 27])
async def test_a_sleep_drops_what_is_cached_beyond_its_limit(limit: int | None) -> None:
    world = World(cache_max_bytes=limit)
    await world.resident.capture(CaptureSpec(WorkspaceId("ws_1"), 3, SnapshotId("snp_1"), CaptureMode.HIBERNATE))
    assert world.link.slimmed == [limit]


async def test_the_run_ends_after_a_merge_that_was_cut_off() -> None:
    """It may be writing the live record, which would be left over if it came later."""
    world = World()
    order: list[str] = []

    async def merge() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("merged")

    def end(*, keep_layers: bool) -> int:
        order.append("ended")
        return 0

    world.run.end = end  # type: ignore[method-assign]
    world.resident._collapse = asyncio.create_task(merge())
    await asyncio.sleep(0)
    await world.resident.end(keep_layers=False)
    assert order == ["merged", "ended"]
