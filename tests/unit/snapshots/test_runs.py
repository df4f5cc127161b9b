"""Runs: captures are whole or absent, forks share, deletes free, a lost machine's disk is salvaged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import (
    Conflict,
    CorruptSnapshot,
    InvalidRequest,
    MachineDied,
    MachineFailed,
    NoSpace,
    NotFound,
    StaleGeneration,
)
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.machines.driver import PAGE_SIZE
from perdure.snapshots.capture import Base, CaptureRequest
from perdure.snapshots.manifest import BaseRef
from perdure.snapshots.start import begin, take_over
from tests.fakes.disk import RecordingDisk
from tests.fakes.tiny_machine import TinyMachine, TinyMemory
from tests.fakes.tiny_node import NOW, WS, Node, capture, files_of, snapshot_id


async def test_a_workspace_sleeps_and_wakes_with_memory_disk_and_devices(node: Node) -> None:
    run, machine = await node.wake(1)
    assert machine.devices == 1
    machine.write_memory(slice(0, 100), 7)
    machine.write_memory(5, 0)
    machine.write_disk(b"hello")
    machine.devices = 42
    facts = await capture(run, machine, goes_on=False)
    assert (facts.has_memory, facts.quiesced, facts.parent_id, facts.pause_s, facts.disk_gib) == (True, True, None, 0.012, 8)
    assert (facts.pages, facts.device_bytes, facts.fingerprint, facts.generation) == (100, 5000, "fp", 1)
    assert 0 < facts.memory_bytes == facts.memory_total_bytes < 100 * PAGE_SIZE
    assert 0 < facts.disk_bytes == facts.disk_total_bytes
    run.end()
    assert node.store.live() == ()
    again, woken = await node.wake(2, facts.snapshot_id)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    assert woken.devices == 42
    assert woken.layers[:-1] == machine.layers
    assert woken.layers[-1].exists()
    assert woken.calls.index("attach_disk") < woken.calls.index("load_devices")
    child = await capture(again, woken, goes_on=False)
    assert child.parent_id == facts.snapshot_id
    assert (child.memory_bytes, child.pages) == (0, 100)
    assert child.disk_total_bytes == facts.disk_bytes + child.disk_bytes


async def test_pages_the_waiting_machine_had_touched_become_the_bases(node: Node) -> None:
    run, machine = await node.wake(1)
    facts = await capture(run, machine, goes_on=False)
    run.end()
    again = begin(node.store, node.spec(2), facts.snapshot_id, memory=True)
    other = TinyMachine(TinyMemory(node.base.ram.pages))
    other.write_memory([3, 9], 0xEE)
    await again.restore(other)  # type: ignore[arg-type]
    assert np.array_equal(other.memory.ram, node.base.ram.pages)


async def test_checkpoints_append_only_changes_and_each_one_wakes(node: Node) -> None:
    run, machine = await node.wake(1)
    states = []
    for step in range(1, 6):
        machine.write_memory(slice(0, 64), np.random.default_rng(step).integers(0, 255, (64, PAGE_SIZE), np.uint8))
        machine.write_memory(64 + step, step)
        machine.devices = step
        facts = await capture(run, machine)
        states.append((facts, machine.memory.ram.copy(), list(machine.layers[:-1])))
    assert run.layer_count == 6
    run.end()
    parents = [facts.parent_id for facts, _, _ in states]
    assert parents == [None, *(facts.snapshot_id for facts, _, _ in states[:-1])]
    for number, (facts, ram, layers) in enumerate(states):
        again, woken = await node.wake(10 + number, facts.snapshot_id, WorkspaceId(f"ws_{number}"))
        assert np.array_equal(woken.memory.ram, ram)
        assert woken.layers[:-1] == layers
        assert woken.devices == number + 1
        again.end()


async def test_a_checkpoint_that_changed_little_stores_little(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_memory(slice(0, 200), np.random.default_rng(3).integers(0, 255, (200, PAGE_SIZE), np.uint8))
    first = await capture(run, machine)
    machine.write_memory(7, 1)
    second = await capture(run, machine)
    assert first.memory_bytes > 200 * PAGE_SIZE
    assert second.memory_bytes < 2 * PAGE_SIZE
    assert second.memory_total_bytes > 200 * PAGE_SIZE


async def test_forks_share_files_and_go_their_own_ways(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_memory(slice(0, 50), np.random.default_rng(3).integers(0, 255, (50, PAGE_SIZE), np.uint8))
    parent = await capture(run, machine)
    before = files_of(node)
    children = [await node.wake(1, parent.snapshot_id, WorkspaceId(f"ws_child{n}")) for n in range(3)]
    assert len(files_of(node) - before) == 2 * 3, "each child has its own layer and live record, no more"
    facts = []
    for number, (child, fork) in enumerate(children):
        fork.write_memory(number, number + 1)
        facts.append(await capture(child, fork, goes_on=False))
        child.end()
    run.end()
    node.store.delete([parent.snapshot_id])
    for number, child_facts in enumerate(facts):
        assert child_facts.parent_id == parent.snapshot_id
        _, woken = await node.wake(2, child_facts.snapshot_id, WorkspaceId(f"ws_child{number}"))
        assert np.array_equal(woken.memory.ram, children[number][1].memory.ram)


async def test_deleting_frees_everything_and_only_what_nobody_else_uses(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_memory(slice(0, 200), np.random.default_rng(3).integers(0, 255, (200, PAGE_SIZE), np.uint8))
    machine.write_disk(b"x" * 100_000)
    first = await capture(run, machine)
    machine.write_memory(3, 9)
    second = await capture(run, machine, goes_on=False)
    run.end()
    assert node.store.delete([first.snapshot_id]) < 100_000, "the second needs the pages and the layer of the first"
    assert node.store.verify(second.snapshot_id, node.base.ram).snapshot_id == second.snapshot_id
    assert node.store.delete([second.snapshot_id, second.snapshot_id, SnapshotId("snp_none"), SnapshotId("../..")]) > 900_000
    assert files_of(node) == set()
    with pytest.raises(NotFound, match="There is no snapshot"):
        node.store.manifest(second.snapshot_id)


async def test_a_running_machine_keeps_what_it_uses(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_memory(slice(0, 50), 3)
    first = await capture(run, machine, goes_on=False)
    run.end()
    again, woken = await node.wake(2, first.snapshot_id)
    node.store.delete([first.snapshot_id])
    node.store.sweep()
    second = await capture(again, woken)
    node.store.verify(second.snapshot_id, node.base.ram)
    assert second.memory_bytes == 0, "the pages of the deleted parent were kept for this run"


async def test_collapsing_drops_layers_that_no_snapshot_names(node: Node) -> None:
    run, machine = await node.wake(1)
    facts = [await capture(run, machine) for _ in range(5)]
    node.store.delete([f.snapshot_id for f in facts[:4]])
    await run.collapse(machine, 1)  # type: ignore[arg-type]
    assert run.layer_count == 2
    assert [layer.path for layer in run.chain().layers] == machine.layers
    kept = {path.name for path in machine.layers[1:]} | {f"{d}.qcow2" for d in node.store.manifest(facts[4].snapshot_id).disk_ids}
    assert {path.name for path in node.store.disks.iterdir()} == kept
    node.store.delete([facts[4].snapshot_id])
    assert {path for path in node.store.disks.iterdir()} == set(machine.layers[1:])
    await run.collapse(machine, 1)  # type: ignore[arg-type]
    assert machine.calls.count("collapse_disk") == 1, "nothing to do the second time"


async def test_a_layer_opened_before_a_collapse_is_used_after_it(node: Node) -> None:
    run, machine = await node.wake(1)
    for _ in range(3):
        await capture(run, machine)
    await run.ready(machine, name := snapshot_id())  # type: ignore[arg-type]
    await run.collapse(machine, 0)  # type: ignore[arg-type]
    captured = await run.capture(machine, CaptureRequest(name, NOW, True))  # type: ignore[arg-type]
    run.commit(captured, 0.0)
    assert [layer.path for layer in run.chain().layers] == machine.layers
    assert len(node.store.manifest(name).layers) == 1


# ------------------------------------------------------------------------------------------------------------------ failures


async def test_a_full_disk_fails_the_snapshot_and_loses_nothing(tmp_path: Path) -> None:
    tmp_path = tmp_path.resolve()
    disk = RecordingDisk(tmp_path)
    node = Node(tmp_path, disk)
    node.store.open()
    run, machine = await node.wake(1)
    machine.write_memory(slice(0, 200), np.random.default_rng(3).integers(0, 255, (200, PAGE_SIZE), np.uint8))
    for room in (0, 500, 100_000, 821_900):
        name = snapshot_id()
        await run.ready(machine, name)  # type: ignore[arg-type]
        captured = await run.capture(machine, CaptureRequest(name, NOW, True))  # type: ignore[arg-type]
        disk.room = room
        with pytest.raises(NoSpace, match="no room left"):
            run.commit(captured, 0.0)
        disk.room = 100
        with pytest.raises(NoSpace, match="no room left"):
            await run.ready(machine, snapshot_id())  # type: ignore[arg-type]
        disk.room = None
    assert node.store.complete() == ()
    facts = await capture(run, machine, goes_on=False)
    run.end()
    _, woken = await node.wake(2, facts.snapshot_id)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    assert woken.layers[:-1] == machine.layers


@pytest.mark.parametrize("call", ["save_devices", "switch_overlay"])
async def test_a_capture_that_the_machine_refuses_leaves_no_snapshot(node: Node, call: str) -> None:
    run, machine = await node.wake(1)
    machine.fail[call] = MachineFailed("it broke")
    with pytest.raises(MachineFailed):
        await capture(run, machine)
    assert list(node.store.snapshots.iterdir()) == []
    facts = await capture(run, machine)
    assert node.store.verify(facts.snapshot_id, node.base.ram)


async def test_a_cancelled_capture_waits_for_the_machine(node: Node) -> None:
    run, machine = await node.wake(1)
    gate = asyncio.Event()
    original = machine.switch_overlay

    async def slow() -> None:
        await gate.wait()
        await original()

    machine.switch_overlay = slow  # type: ignore[method-assign]
    await run.ready(machine, name := snapshot_id())  # type: ignore[arg-type]
    task = asyncio.create_task(run.capture(machine, CaptureRequest(name, NOW, True)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [layer.path for layer in run.chain().layers] == machine.layers


async def test_calls_out_of_order_are_refused(node: Node) -> None:
    run, machine = await node.wake(1)
    with pytest.raises(Conflict, match="opened before the pause"):
        await run.capture(machine, CaptureRequest(snapshot_id(), NOW, True))  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="earlier start on record"):
        begin(node.store, node.spec(2), None, memory=True, devices=node.devices)
    facts = await capture(run, machine)
    with pytest.raises(Conflict, match="exists already and is complete"):
        await run.ready(machine, facts.snapshot_id)  # type: ignore[arg-type]
    run.end()
    run.end()
    with pytest.raises(Conflict, match="no memory to restore"):
        await begin(node.store, node.spec(2), facts.snapshot_id, memory=False).restore(machine)  # type: ignore[arg-type]


async def test_a_start_that_does_not_fit_its_base_is_refused_and_leaves_nothing(node: Node) -> None:
    run, machine = await node.wake(1)
    facts = await capture(run, machine, goes_on=False)
    run.end()
    before = files_of(node)
    with pytest.raises(InvalidRequest, match="smaller than the snapshot's 8 GiB"):
        begin(node.store, node.spec(2, disk_gib=4), facts.snapshot_id, memory=True)
    node.base = Base(node.base.ram, BaseRef("image", "other"), node.base.disks, node.base.disk_ref)
    with pytest.raises(InvalidRequest, match="The memory of"):
        begin(node.store, node.spec(2), facts.snapshot_id, memory=True)
    node.base = Base(node.base.ram, node.base.ram_ref, node.base.disks, BaseRef("image", None))
    with pytest.raises(InvalidRequest, match="lies on"):
        begin(node.store, node.spec(2), facts.snapshot_id, memory=False)
    with pytest.raises(NotFound):
        begin(node.store, node.spec(2), SnapshotId("snp_none"), memory=True)
    assert files_of(node) == before


# ------------------------------------------------------------------------------------------------------------------- salvage


async def test_a_lost_machines_disk_is_salvaged(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_disk(b"early")
    facts = await capture(run, machine)
    machine.write_disk(b"late")
    run.end(keep_layers=True)
    lost = snapshot_id()
    with pytest.raises(StaleGeneration):
        node.store.salvage(WS, 2, lost, NOW)
    salvaged = node.store.salvage(WS, 1, lost, NOW)
    assert salvaged is not None
    assert (salvaged.has_memory, salvaged.quiesced, salvaged.parent_id) == (False, False, None)
    assert node.store.salvage(WS, 1, lost, NOW) == salvaged
    assert node.store.live() == ()
    manifest = node.store.verify(lost)
    assert [node.store.disks / f"{d}.qcow2" for d in manifest.disk_ids] == machine.layers[1:]
    node.store.delete([facts.snapshot_id])
    boot = begin(node.store, node.spec(2, WorkspaceId("ws_lost")), lost, memory=False)
    assert [layer.path for layer in boot.chain().layers][:-1] == machine.layers
    with pytest.raises(NotFound, match="a disk only"):
        node.store.index(manifest)
    with pytest.raises(NotFound, match="a disk only"):
        node.store.devices(manifest)


async def test_a_lost_machine_that_wrote_nothing_new_leaves_nothing(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_disk(b"early")
    facts = await capture(run, machine)
    await run.ready(machine, snapshot_id())  # type: ignore[arg-type]
    run.end(keep_layers=True)
    assert node.store.salvage(WS, 1, snapshot_id(), NOW) is None
    node.store.sweep()
    assert {p.stem for p in node.store.disks.iterdir()} == set(node.store.manifest(facts.snapshot_id).disk_ids)
    with pytest.raises(NotFound, match="has no machine"):
        node.store.salvage(WS, 1, snapshot_id(), NOW)


async def test_a_reboot_takes_over_the_active_layer(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_disk(b"data")
    run.end(keep_layers=True)
    boot = take_over(node.store, node.spec(2), 1)
    assert [layer.path for layer in boot.chain().layers] == machine.layers
    with pytest.raises(StaleGeneration):
        take_over(node.store, node.spec(3), 1)
    boot.end(keep_layers=True)
    larger = take_over(node.store, node.spec(3, disk_gib=20), 2)
    assert [layer.path for layer in larger.chain().layers][:-1] == machine.layers
    larger.end(keep_layers=True)
    assert node.store.live_record(WS, 3).disk_gib == 20


async def test_a_failed_take_over_keeps_the_record(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    node = Node(tmp_path, disk)
    node.store.open()
    run, machine = await node.wake(1)
    machine.write_disk(b"data")
    await capture(run, machine, goes_on=False)
    run.end(keep_layers=True)
    before = files_of(node)
    for room in (10, len(node.store.live_record(WS, 1).to_bytes())):
        disk.room = room
        with pytest.raises(NoSpace):
            take_over(node.store, node.spec(2, disk_gib=20), 1)
    disk.room = None
    assert files_of(node) == before
    assert node.store.live_record(WS, 1).generation == 1
    assert all(path.exists() for path in machine.layers)


async def test_a_layer_that_names_a_file_is_refused(node: Node) -> None:
    """A VMM that was taken over could write a backing file into its layer's header."""
    run, machine = await node.wake(1)
    facts = await capture(run, machine)
    frozen = machine.layers[-2]
    good = frozen.read_bytes()
    name = b"/etc/shadow"
    frozen.write_bytes(good[:8] + (512).to_bytes(8) + len(name).to_bytes(4) + good[20:512] + name + good[512 + len(name) :])
    run.end(keep_layers=True)
    with pytest.raises(CorruptSnapshot, match=r"dsk_\w+\.qcow2 is damaged: its header asks for a backing file"):
        begin(node.store, node.spec(2, WorkspaceId("ws_two")), facts.snapshot_id, memory=True)
    with pytest.raises(CorruptSnapshot, match="its header asks for a backing file"):
        node.store.salvage(WS, 1, snapshot_id(), NOW)


async def test_a_long_wake_does_not_grow_the_log(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.snapshots.capture.SEGMENT_BYTES_MAX", 1 << 20)
    monkeypatch.setattr("perdure.snapshots.capture.GARBAGE_BYTES_MIN", 64 << 10)
    run, machine = await node.wake(1)
    random = np.random.default_rng(5)
    head: SnapshotId | None = None
    for number in range(60):
        # A few pages are written once and stay: one of them alone would keep a whole segment.
        hot = random.integers(0, 255, (100, PAGE_SIZE), np.uint8)
        machine.write_memory(slice(0, 100), hot)
        machine.write_memory(100 + number, random.integers(0, 255, PAGE_SIZE, np.uint8))
        facts = await capture(run, machine)
        if head is not None:
            node.store.delete([head])
        head = facts.snapshot_id
    stored = sum(path.stat().st_size for path in node.store.segments.iterdir())
    live_bytes = 160 * PAGE_SIZE
    assert stored < 2 * live_bytes + 3 * (1 << 20), f"{stored} bytes for {live_bytes} that are needed, of 24 MB written"
    assert head is not None
    node.store.verify(head, node.base.ram)
    run.end()
    _, woken = await node.wake(2, head)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)


async def test_a_hibernation_copies_nothing_ahead(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands still is read while it is recorded; the machine must live until then, and loses nothing if the disk is full."""
    run, machine = await node.wake(1)
    machine.write_memory(slice(0, 200), np.random.default_rng(4).integers(0, 255, (200, PAGE_SIZE), np.uint8))
    reads = []
    read = machine.memory.read_pages
    monkeypatch.setattr(machine.memory, "read_pages", lambda pages, room=None: reads.append(len(pages)) or read(pages, room))
    name = snapshot_id()
    await run.ready(machine, name, goes_on=False)  # type: ignore[arg-type]
    captured = await run.capture(machine, CaptureRequest(name, NOW, True, goes_on=False))  # type: ignore[arg-type]
    assert reads == []
    facts = run.commit(captured, 0.1)
    assert sum(reads) == 200
    run.end()
    again, woken = await node.wake(2, facts.snapshot_id)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    assert (await capture(again, woken, goes_on=False)).memory_bytes == 0


async def test_a_machine_that_dies_during_a_hibernation_leaves_no_snapshot(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    run, machine = await node.wake(1)
    first = await capture(run, machine)
    machine.write_memory(slice(0, 200), 3)
    name = snapshot_id()
    await run.ready(machine, name, goes_on=False)  # type: ignore[arg-type]
    captured = await run.capture(machine, CaptureRequest(name, NOW, True, goes_on=False))  # type: ignore[arg-type]

    def dead(*_: object) -> None:
        raise MachineDied("It has ended.")

    monkeypatch.setattr(machine.memory, "read_pages", dead)
    with pytest.raises(MachineDied):
        run.commit(captured, 0.1)
    assert [facts.snapshot_id for facts in node.store.complete()] == [first.snapshot_id]
    assert not (node.store.snapshots / name).exists()
    run.end()
