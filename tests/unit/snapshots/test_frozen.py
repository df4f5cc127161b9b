"""A flipped bit inside a disk layer is found before a guest runs on it, whatever starts it, and is never copied."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.core.errors import CorruptSnapshot, MachineDied, RestoreFailed
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.snapshots import frozen
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.bases import Abandoned
from perdure.snapshots.frozen import until_enough
from perdure.snapshots.layers import disk_file
from perdure.snapshots.start import begin, take_over
from tests.fakes.tiny_machine import TinyMachine, TinyMemory
from tests.fakes.tiny_node import WS, Node, capture


async def asleep(node: Node, count: int = 3) -> SnapshotId:
    """A workspace that has slept so often, and written to its disk each time."""
    source = None
    for generation in range(1, count + 1):
        run, machine = await node.wake(generation, source)
        machine.write_disk(b"%d" % generation * 3000, generation)
        source = (await capture(run, machine, goes_on=False)).snapshot_id
        run.end()
    assert source is not None
    return source


def layer(node: Node, name: SnapshotId, number: int) -> Path:
    return node.store.disks / disk_file(node.store.manifest(name).disk_ids[number])


def flip(path: Path, at: int = -2000) -> None:
    """Behind the tables: QEMU would open it, and a guest would read it."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    disk_layers.inspect(path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers that were read to the end, each time."""
    names: list[str] = []
    real = disk_layers.checksum

    def listening(path: Path, told: Callable[[int], None] | None = None) -> str:
        digest = real(path, told)
        names.append(path.name)
        return digest

    monkeypatch.setattr(disk_layers, "checksum", listening)
    return names


# ------------------------------------------------------------------------------------------------------- whatever starts it


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_wake_is_refused_and_leaves_nothing(node: Node, number: int) -> None:
    name = await asleep(node)
    path = layer(node, name, number)
    flip(path)
    spec = node.spec(4)
    run = begin(node.store, spec, name, memory=True)
    machine = TinyMachine(TinyMemory(spec.base.ram.pages))
    with pytest.raises(CorruptSnapshot, match="its checksum does not hold") as caught:
        await run.restore(machine)  # type: ignore[arg-type]
    assert caught.value.file == f"disks/{path.name}"
    run.end()
    assert node.store.live() == ()


async def test_a_fork_is_refused_and_the_parent_before_the_damage_wakes(node: Node) -> None:
    first = await asleep(node, 1)
    run, machine = await node.wake(2, first)
    machine.write_disk(b"second")
    second = (await capture(run, machine, goes_on=False)).snapshot_id
    run.end()
    path = layer(node, second, -1)
    flip(path)
    with pytest.raises(CorruptSnapshot, match=path.name):
        await node.wake(1, second, WorkspaceId("ws_fork"))
    run, _ = await node.wake(1, first, WorkspaceId("ws_other"))
    run.end()


async def test_a_boot_of_the_disk_is_refused(node: Node) -> None:
    name = await asleep(node)
    run = begin(node.store, node.spec(4), name, memory=False)
    assert await run.checked_chain() == run.chain()
    path = layer(node, name, 1)
    flip(path)
    with pytest.raises(CorruptSnapshot) as caught:
        await run.checked_chain()
    assert caught.value.file == f"disks/{path.name}"


async def test_a_reboot_on_what_a_dead_machine_wrote_is_refused_for_the_layers_below(node: Node) -> None:
    name = await asleep(node)
    run, machine = await node.wake(4, name)
    machine.write_disk(b"news")
    run.end(keep_layers=True)
    flip(layer(node, name, 0))
    boot = take_over(node.store, node.spec(5), 4)
    with pytest.raises(CorruptSnapshot, match=layer(node, name, 0).name):
        await boot.checked_chain()
    boot.end(keep_layers=True)
    assert node.store.live_record(WS, 5).layers[-1] == run.active_disk, "nothing of it is lost"


async def restored(node: Node, name: SnapshotId, error: Exception) -> None:
    """A wake whose machine fails to take its disk."""
    spec = node.spec(4)
    run = begin(node.store, spec, name, memory=True)
    try:
        await run.restore(TinyMachine(TinyMemory(spec.base.ram.pages), fail={"attach_disk": error}))  # type: ignore[arg-type]
    finally:
        run.end()


async def test_a_machine_that_cannot_take_a_damaged_disk_is_not_what_is_told(node: Node) -> None:
    name = await asleep(node)
    path = layer(node, name, 1)
    flip(path)

    with pytest.raises(CorruptSnapshot) as caught:
        await restored(node, name, RestoreFailed("Its image is corrupt."))
    assert caught.value.file == f"disks/{path.name}"
    flip(path)  # back
    with pytest.raises(MachineDied):
        await restored(node, name, MachineDied("It died."))


# ------------------------------------------------------------------------------------------------------------ never copied


async def test_a_damaged_layer_is_not_streamed_into_the_active_one(node: Node) -> None:
    run, machine = await node.wake(1)
    facts = None
    for number in range(4):
        machine.write_disk(b"%d" % number * 3000, number)
        facts = await capture(run, machine)
    assert facts is not None
    path, active = layer(node, facts.snapshot_id, 2), machine.layers[-1].read_bytes()
    flip(path)
    with pytest.raises(CorruptSnapshot, match=path.name):
        await run.collapse(machine, 1)  # type: ignore[arg-type]
    assert "collapse_disk" not in machine.calls
    assert machine.layers[-1].read_bytes() == active
    slept = await capture(run, machine, goes_on=False)
    run.end()
    with pytest.raises(CorruptSnapshot, match=path.name):  # it was recorded before, and that counts
        await node.wake(2, slept.snapshot_id)


# -------------------------------------------------------------------------------------------------------- what is read when


async def test_small_layers_are_read_at_every_start(node: Node, reads: list[str]) -> None:
    name = await asleep(node)
    names = {layer(node, name, number).name for number in range(3)}
    for generation in (4, 5):
        del reads[:]
        run, _ = await node.wake(generation, name)
        run.end()
        assert set(reads) == names


async def test_large_ones_are_read_once_by_each_process_and_when_they_have_changed(
    node: Node, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await asleep(node)
    monkeypatch.setattr(frozen, "REREAD_BYTES", layer(node, name, 0).stat().st_size)
    facts = sorted(node.store.manifest(name).layers, key=lambda fact: fact.size)
    del reads[:]
    node.store.layers.check(facts)
    assert reads == [disk_file(facts[0].disk_id)], "this process has written them"
    node.store.close()
    again = Node(node.home)
    again.store.open()
    for expected in (facts, facts[:1]):
        del reads[:]
        again.store.layers.check(facts)
        assert reads == [disk_file(fact.disk_id) for fact in expected]
    path = again.store.disks / disk_file(facts[-1].disk_id)
    content = path.read_bytes()
    flip(path)
    for _ in range(2):
        with pytest.raises(CorruptSnapshot, match=path.name):
            again.store.layers.check(facts)
    path.write_bytes(content)
    again.store.layers.check(facts)
    del reads[:]
    again.store.layers.check(facts)
    assert reads == [disk_file(facts[0].disk_id)]


async def test_what_is_deleted_is_forgotten(node: Node) -> None:
    await asleep(node)
    assert node.store.layers._whole
    node.store.delete([facts.snapshot_id for facts in node.store.complete()])
    assert node.store.layers._whole == {}


async def test_a_start_that_is_given_up_stops_reading_and_waits_for_the_end_of_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await asleep(node)
    begun, ended = threading.Event(), threading.Event()

    def reading(_facts: object, enough: threading.Event) -> None:
        begun.set()
        assert enough.wait(30)
        ended.set()
        raise Abandoned

    monkeypatch.setattr(node.store.layers, "check", reading)
    run = begin(node.store, node.spec(4), name, memory=False)
    task = asyncio.create_task(run.checked_chain())
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    run.end()


async def test_reading_ends_when_it_is_enough(node: Node) -> None:
    name = await asleep(node)
    enough = threading.Event()
    enough.set()
    with pytest.raises(Abandoned):
        node.store.layers.check(node.store.manifest(name).layers, enough)


async def test_a_thread_that_fails_tells(node: Node) -> None:
    def work(_enough: threading.Event) -> None:
        raise CorruptSnapshot("It is damaged.")

    with pytest.raises(CorruptSnapshot, match="It is damaged"):
        await until_enough(work)
