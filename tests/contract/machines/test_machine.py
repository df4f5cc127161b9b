"""What every machine must do, fake or real."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import (
    AlreadyExists,
    Conflict,
    InvalidRequest,
    MachineDied,
    NotFound,
    RestoreFailed,
)
from perdure.machines.driver import (
    PAGE_SIZE,
    Accelerator,
    ChannelName,
    DiskChain,
    DiskLayer,
    EventKind,
    Machine,
    MachineEvent,
    MachineState,
    Ram,
)
from perdure.machines.pageroom import make_room
from tests.contract.machines.world import DEADLINE_S, World, all_memory, ask, base_memory, capture, restore

Call = Callable[[World, Machine], Awaitable[object]]

CALLS: dict[str, Call] = {
    "attach_disk": lambda world, machine: machine.attach_disk(world.fresh_disk()),
    "load_devices": lambda world, machine: machine.load_devices(golden_state(world)),
    "pause": lambda world, machine: machine.pause(),
    "resume": lambda world, machine: machine.resume(),
    "save_devices": lambda world, machine: machine.save_devices(world.state_file()),
    "open_overlay": lambda world, machine: machine.open_overlay(world.layer()),
    "switch_overlay": lambda world, machine: machine.switch_overlay(),
    "collapse_disk": lambda world, machine: machine.collapse_disk(1),
    "connect": lambda world, machine: machine.connect(ChannelName.DATA),
}


def golden_state(world: World) -> Path:
    assert world.golden is not None
    return world.golden.devices


async def collect(machine: Machine) -> list[MachineEvent]:
    """All events until the end."""
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in machine.events()]


async def refused(world: World, machine: Machine, *names: str) -> None:
    for name in names:
        with pytest.raises(Conflict, match=machine.state.value):
            await CALLS[name](world, machine)


# --------------------------------------------------------------------------------------------------------------------- states


async def test_a_woken_machine_runs_and_both_channels_answer(machine: Machine) -> None:
    assert machine.state is MachineState.RUNNING
    assert await ask(machine, "echo one") == "one"
    assert await ask(machine, "echo two", ChannelName.DATA) == "two"


async def test_what_a_running_machine_refuses(world: World, machine: Machine) -> None:
    await refused(world, machine, "attach_disk", "load_devices", "save_devices")
    assert await ask(machine, "echo still here") == "still here"


async def test_what_a_paused_machine_refuses(world: World, machine: Machine) -> None:
    await machine.pause()
    await refused(world, machine, "attach_disk", "load_devices", "collapse_disk")
    assert machine.state is MachineState.PAUSED
    await machine.resume()
    assert await ask(machine, "echo on") == "on"


async def test_what_a_prepared_machine_refuses(world: World) -> None:
    machine = await world.make_driver().prepare(world.spec())
    try:
        assert machine.state is MachineState.PREPARED
        await refused(
            world, machine, "pause", "resume", "save_devices", "open_overlay", "switch_overlay", "collapse_disk", "connect"
        )
        with pytest.raises(Conflict, match="no disk yet"):
            await machine.load_devices(golden_state(world))
    finally:
        await machine.kill()


async def test_a_second_disk_is_refused(world: World) -> None:
    machine = await world.make_driver().prepare(world.spec())
    try:
        await machine.attach_disk(world.fresh_disk())
        with pytest.raises(Conflict, match="disk already"):
            await machine.attach_disk(world.fresh_disk())
    finally:
        await machine.kill()


async def test_a_paused_guest_does_not_compute(machine: Machine) -> None:
    await machine.pause()
    with pytest.raises(TimeoutError):
        await ask(machine, "remember while paused", deadline_s=0.5)
    await machine.resume()
    await machine.pause()  # pausing and resuming what is so already is fine
    await machine.pause()
    await machine.resume()
    await machine.resume()
    assert machine.state is MachineState.RUNNING


async def test_kill_is_safe_in_every_state_and_twice(world: World, machine: Machine) -> None:
    prepared = await world.make_driver().prepare(world.spec())
    await prepared.kill()
    await machine.pause()
    await machine.kill()
    await machine.kill()
    assert machine.state is MachineState.DEAD
    assert not any((world.directory / "run" / name).exists() for name in (prepared.name, machine.name))
    assert not Path(f"/proc/{machine.pid}").exists()


async def test_a_dead_machine_says_so(world: World, machine: Machine) -> None:
    await machine.kill()
    for name, call in CALLS.items():
        with pytest.raises(MachineDied, match=machine.name):
            await call(world, machine)
            pytest.fail(f"{name} worked on a dead machine")
    with pytest.raises(MachineDied):
        await machine.usage()
    with pytest.raises(MachineDied):
        machine.cpu_s()
    with pytest.raises(MachineDied):
        machine.memory.written_pages()


async def test_usage(machine: Machine) -> None:
    assert await ask(machine, "remember something") == ""
    usage = await machine.usage()
    assert machine.cpu_s() >= usage.cpu_s > 0
    assert usage.rss_bytes >= usage.private_bytes > 0


# ------------------------------------------------------------------------------------------------------------------- contents


async def test_memory_and_disk_come_back_from_a_capture(world: World, machine: Machine) -> None:
    base = hashlib.sha256(world.ram.read_bytes()).hexdigest()
    await ask(machine, "remember the answer is 42")
    await ask(machine, "store kept on disk")
    captured = await capture(world, machine)
    await machine.kill()
    woken = await restore(world, captured)
    try:
        assert await ask(woken, "recall") == "the answer is 42"
        assert await ask(woken, "load") == "kept on disk"
    finally:
        await woken.kill()
    assert hashlib.sha256(world.ram.read_bytes()).hexdigest() == base, "a machine wrote to the base that all share"


@pytest.mark.parametrize("ahead", ["what it lies on", "something else", "all of it"])
async def test_layers_opened_ahead_change_nothing(world: World, machine: Machine, ahead: str) -> None:
    await ask(machine, "store kept on disk")
    captured = await capture(world, machine)
    await machine.kill()
    layers = captured.disk.layers
    below = {"what it lies on": layers[:2], "something else": (layers[0], world.layer()), "all of it": layers}[ahead]
    woken = await restore(world, captured, disk_below=DiskChain(below))
    try:
        assert await ask(woken, "load") == "kept on disk"
        await woken.open_overlay(world.layer())
        await woken.switch_overlay()
        await woken.collapse_disk(1)
        assert await ask(woken, "load") == "kept on disk"
    finally:
        await woken.kill()


async def test_restored_memory_is_equal_page_by_page(world: World, machine: Machine) -> None:
    await ask(machine, "remember page by page")
    captured = await capture(world, machine)
    before = all_memory(machine)
    assert len(captured.pages) > 0
    assert np.array_equal(captured.content, before[captured.pages])
    untouched = np.setdiff1d(np.arange(machine.memory.page_count, dtype=np.uint32), captured.pages)
    assert np.array_equal(before[untouched], base_memory(world)[untouched]), "a page that is not private differs from the base"
    await machine.kill()
    woken = await restore(world, captured, resume=False)
    try:
        assert woken.state is MachineState.PAUSED
        differing = np.flatnonzero(np.any(all_memory(woken) != before, axis=1))
        # Loading device state may write a few pages of its own (rings, the new generation id), never guest data.
        assert len(differing) <= 4, f"{len(differing)} pages differ after a restore"
    finally:
        await woken.kill()


async def test_a_prepared_machine_is_the_base(world: World) -> None:
    machine = await world.make_driver().prepare(world.spec())
    try:
        assert len(machine.memory.written_pages()) == 0
        assert np.array_equal(all_memory(machine), base_memory(world))
    finally:
        await machine.kill()


async def test_pages_and_zeros_are_written_where_they_belong(world: World) -> None:
    machine = await world.make_driver().prepare(world.spec())
    memory = machine.memory
    try:
        last = memory.page_count - 1
        pages = np.array([0, 1, 5, 6, 7, 300, last], dtype=np.uint32)
        content = np.random.default_rng(1).integers(0, 256, (len(pages), PAGE_SIZE), dtype=np.uint8)
        memory.write_pages(pages, content)
        memory.write_zeros(np.array([6, 7, 8, 400], dtype=np.uint32))
        expected = base_memory(world)
        expected[pages] = content
        expected[[6, 7, 8, 400]] = 0
        assert np.array_equal(all_memory(machine), expected)
        assert memory.written_pages().tolist() == [0, 1, 5, 6, 7, 8, 300, 400, last]
        assert set(memory.written_pages().tolist()) <= set(memory.touched_pages().tolist())
        assert np.array_equal(memory.read_pages(pages), expected[pages])
        for ahead, size in ((True, len(pages) + 3), (False, len(pages)), (True, len(pages) - 1)):
            room = make_room(size, ahead=ahead)
            content = memory.read_pages(pages, room)
            assert np.array_equal(content, expected[pages])
            assert np.shares_memory(content, room) == (size >= len(pages))
        empty = np.empty(0, dtype=np.uint32)
        assert memory.read_pages(empty).shape == (0, PAGE_SIZE)
        memory.write_pages(empty, np.empty((0, PAGE_SIZE), dtype=np.uint8))
        memory.write_zeros(empty)
    finally:
        await machine.kill()


async def test_what_is_written_after_a_mark_is_told_or_nothing_is(world: World) -> None:
    machine = await world.make_driver().prepare(world.spec())
    memory = machine.memory

    def write(*pages: int) -> None:
        memory.write_pages(np.array(pages, np.uint32), np.full((len(pages), PAGE_SIZE), len(pages), np.uint8))

    try:
        assert memory.scan().lately is None, "nobody has set a mark yet"
        write(1, 5, 300)
        told = memory.mark()
        first = memory.scan()
        write(5, 7)
        second = memory.scan()
        memory.read_pages(np.array([1, 300], np.uint32))
        third = memory.scan()
        assert memory.mark() == told
        fourth = memory.scan()
        assert first.pages.tolist() == [1, 5, 300]
        assert second.pages.tolist() == third.pages.tolist() == fourth.pages.tolist() == [1, 5, 7, 300]
        found = [None if one.lately is None else one.lately.tolist() for one in (first, second, third, fourth)]
        assert found == ([[], [5, 7], [5, 7], []] if told else [None] * 4)
        assert told == world.tells_writes
    finally:
        await machine.kill()


async def test_page_numbers_that_cannot_be(world: World) -> None:
    machine = await world.make_driver().prepare(world.spec())
    memory = machine.memory
    try:
        outside = np.array([memory.page_count], dtype=np.uint32)
        for call in (memory.read_pages, memory.write_zeros):
            with pytest.raises(InvalidRequest, match="outside"):
                call(outside)
            with pytest.raises(InvalidRequest, match="ascending"):
                call(np.array([3, 3], dtype=np.uint32))
        with pytest.raises(InvalidRequest, match="does not belong"):
            memory.write_pages(np.array([1, 2], dtype=np.uint32), np.zeros((1, PAGE_SIZE), dtype=np.uint8))
        assert len(memory.written_pages()) == 0
    finally:
        await machine.kill()


async def test_two_machines_of_one_base_are_apart(world: World, machine: Machine) -> None:
    assert world.golden is not None
    other = await restore(world, world.golden)
    try:
        await ask(machine, "remember first")
        await ask(other, "remember second")
        assert await ask(machine, "recall") == "first"
        assert await ask(other, "recall") == "second"
    finally:
        await other.kill()


# ----------------------------------------------------------------------------------------------------------------------- disk


async def test_a_frozen_layer_does_not_change(world: World, machine: Machine) -> None:
    await ask(machine, "store before")
    await machine.open_overlay(world.layer())
    await machine.pause()
    frozen: DiskLayer = machine.disk.layers[-1]  # type: ignore[attr-defined]
    await machine.switch_overlay()
    await machine.resume()
    content = frozen.path.read_bytes()
    await ask(machine, "store after")
    assert await ask(machine, "load") == "after"
    assert frozen.path.read_bytes() == content


async def test_switching_needs_an_open_layer(world: World, machine: Machine) -> None:
    with pytest.raises(Conflict, match="No next disk layer"):
        await machine.switch_overlay()
    await machine.open_overlay(world.layer())
    second = world.layer()
    await machine.open_overlay(second)  # the first is let go
    await machine.switch_overlay()
    assert machine.disk.layers[-1] == second  # type: ignore[attr-defined]
    with pytest.raises(Conflict, match="No next disk layer"):
        await machine.switch_overlay()


async def test_layers_that_cannot_be(world: World, machine: Machine) -> None:
    with pytest.raises(NotFound, match=r"missing\.qcow2"):
        await machine.open_overlay(DiskLayer(world.directory / "missing.qcow2", "qcow2"))
    with pytest.raises(InvalidRequest, match="qcow2"):
        await machine.open_overlay(DiskLayer(world.layer().path, "raw"))
    prepared = await world.make_driver().prepare(world.spec())
    try:
        with pytest.raises(InvalidRequest, match="at least one layer"):
            await prepared.attach_disk(DiskChain(()))
    finally:
        await prepared.kill()


async def test_collapsing_keeps_content_and_the_frozen_files(world: World, machine: Machine) -> None:
    for word in ("one", "two", "three"):
        await ask(machine, f"store {word}")
        await machine.open_overlay(world.layer())
        await machine.switch_overlay()
    chain: DiskChain = machine.disk  # type: ignore[attr-defined]
    kept = {layer.path: layer.path.read_bytes() for layer in chain.layers[2:-1]}
    await machine.collapse_disk(2)
    assert machine.disk.layers == (*chain.layers[:2], chain.layers[-1])  # type: ignore[attr-defined]
    assert await ask(machine, "load") == "three"
    assert {path: path.read_bytes() for path in kept} == kept
    await machine.collapse_disk(2)  # nothing left to do
    await ask(machine, "store four")
    captured = await capture(world, machine)
    await machine.kill()
    woken = await restore(world, captured)
    try:
        assert await ask(woken, "load") == "four"
    finally:
        await woken.kill()


async def test_collapsing_needs_a_layer_to_keep(machine: Machine) -> None:
    with pytest.raises(InvalidRequest, match="At least one"):
        await machine.collapse_disk(0)


# --------------------------------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize(
    ("command", "kind"), [("restart", EventKind.RESET), ("crash", EventKind.PANIC), ("shut", EventKind.POWEROFF)]
)
async def test_a_guest_that_ends_itself(machine: Machine, command: str, kind: EventKind) -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        await ask(machine, command)
    assert [event.kind for event in await collect(machine)] == [kind, EventKind.EXITED]
    assert machine.state is MachineState.DEAD


async def test_killing_is_told_once(machine: Machine) -> None:
    await machine.kill()
    assert [event.kind for event in await collect(machine)] == [EventKind.EXITED]


async def test_a_new_connection_closes_the_previous_one(machine: Machine) -> None:
    reader, _ = await machine.connect(ChannelName.DATA)
    assert await ask(machine, "echo again", ChannelName.DATA) == "again"
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1), DEADLINE_S)


async def test_connections_end_with_the_machine(machine: Machine) -> None:
    reader, _ = await machine.connect(ChannelName.CONTROL)
    await machine.kill()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(1), DEADLINE_S)


# ------------------------------------------------------------------------------------------------------------------ bad input


async def test_a_damaged_device_state_is_refused(world: World) -> None:
    state = world.state_file()
    state.write_bytes(golden_state(world).read_bytes()[:1000] + b"damage" * 50)
    if world.name == "fake":
        state.write_bytes(b"damage")
    machine = await world.make_driver().prepare(world.spec())
    try:
        await machine.attach_disk(world.fresh_disk())
        with pytest.raises(RestoreFailed, match="could not be loaded"):
            await machine.load_devices(state)
    finally:
        await machine.kill()


async def test_device_state_never_overwrites(world: World, machine: Machine) -> None:
    taken = world.state_file()
    taken.write_bytes(b"precious")
    await machine.pause()
    with pytest.raises(AlreadyExists, match=taken.name):
        await machine.save_devices(taken)
    assert taken.read_bytes() == b"precious"


async def test_a_memory_file_of_another_size(world: World) -> None:
    spec = world.spec()
    with pytest.raises(InvalidRequest, match="bytes"):
        await world.make_driver().prepare(replace(spec, shape=replace(spec.shape, memory_mib=spec.shape.memory_mib + 1)))
    assert not spec.run_dir.exists()


async def test_files_that_are_missing(world: World) -> None:
    spec = world.spec()
    gone = world.directory / "gone"
    for wrong in (
        replace(spec, ram=Ram(gone)),
        replace(spec, shape=replace(spec.shape, kernel=gone)),
        replace(spec, shape=replace(spec.shape, agent_disk=gone)),
    ):
        with pytest.raises(NotFound, match="gone"):
            await world.make_driver().prepare(wrong)
        assert not spec.run_dir.exists()
    with pytest.raises(NotFound, match="gone"):
        await world.make_driver().boot(spec, DiskChain((DiskLayer(gone, "qcow2"),)))
    assert not spec.run_dir.exists()


async def test_a_prepared_machine_never_shares_memory(world: World) -> None:
    with pytest.raises(InvalidRequest, match="privately"):
        await world.make_driver().prepare(world.spec(shared=True))


async def test_identity_is_stable(world: World) -> None:
    driver = world.make_driver()
    assert await driver.identity(Accelerator.TCG) == await driver.identity(Accelerator.TCG)
