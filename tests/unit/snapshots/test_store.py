"""Runs and the store: captures are whole or absent, forks share, deletes free, damage is named, crashes are repaired."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import Conflict, CorruptSnapshot, InvalidRequest, MachineFailed, NoSpace, NotFound, StaleGeneration
from perdure.core.files import DISK, Disk
from perdure.core.ids import SnapshotId, TenantId, WorkspaceId
from perdure.machines.driver import PAGE_SIZE, DiskChain, DiskLayer
from perdure.snapshots.capture import Base, CaptureRequest, MachineRun, RunSpec
from perdure.snapshots.compact import compact
from perdure.snapshots.manifest import BaseRef, LiveRecord, Manifest, explain_mismatch
from perdure.snapshots.pagelog import BaseRam
from perdure.snapshots.start import begin, take_over
from perdure.snapshots.store import SnapshotStore, is_alive, process_started
from perdure.wire.node import MachineSize, SnapshotFacts
from tests.fakes.disk import Crash, QuickDisk, RecordingDisk
from tests.fakes.tiny_machine import TinyMachine, TinyMemory

PAGES = 300
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
WS = WorkspaceId("ws_one")
_ids = itertools.count(1)


class Node:
    """A store with one image, and machines that run on it."""

    def __init__(self, home: Path, disk: Disk = DISK) -> None:
        self.home = home
        image = home / "image"
        if not image.exists():
            image.mkdir()
            content = np.random.default_rng(1).integers(0, 255, (PAGES, PAGE_SIZE), np.uint8)
            content[::3] = 0
            (image / "ram.base").write_bytes(content.tobytes())
            (image / "root.raw").write_bytes(b"root")
            (image / "devices.state").write_text("devices 1 ")
        self.devices = image / "devices.state"
        ref = BaseRef("image", "golden")
        disks = DiskChain((DiskLayer(image / "root.raw", "raw"),))
        self.base = Base(BaseRam(image / "ram.base"), ref, disks, ref)
        self.disk = disk
        self.store = SnapshotStore(home / "store", disk)

    def spec(self, generation: int, workspace: WorkspaceId = WS, disk_gib: int = 8) -> RunSpec:
        parts = {"qemu": "7.2.22"}
        size = MachineSize(512, 1)
        return RunSpec(workspace, TenantId("ten_a"), generation, "image", size, disk_gib, self.base, "fp", parts)

    async def wake(
        self, generation: int, source: SnapshotId | None = None, workspace: WorkspaceId = WS
    ) -> tuple[MachineRun, TinyMachine]:
        run = begin(self.store, self.spec(generation, workspace), source, memory=True, devices=self.devices)
        machine = TinyMachine(TinyMemory(self.base.ram.pages), self.disk if isinstance(self.disk, RecordingDisk) else None)
        await run.restore(machine)  # type: ignore[arg-type]
        return run, machine


def snapshot_id() -> SnapshotId:
    return SnapshotId(f"snp_{next(_ids):026d}")


async def capture(run: MachineRun, machine: TinyMachine, *, goes_on: bool = True, quiesced: bool = True) -> SnapshotFacts:
    name = snapshot_id()
    await run.ready(machine, name, goes_on=goes_on)  # type: ignore[arg-type]
    captured = await run.capture(machine, CaptureRequest(name, NOW, quiesced, goes_on))  # type: ignore[arg-type]
    return await asyncio.to_thread(run.commit, captured, 0.012)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    assert node.store.open().debris == ()
    return node


def files_of(node: Node) -> set[str]:
    return {str(p.relative_to(node.store.root)) for p in node.store.root.rglob("*") if p.is_file()} - {"lock"}


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


# ---------------------------------------------------------------------------------------------------------------- compaction


def random_pages(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, (count, PAGE_SIZE), np.uint8)


async def grown(node: Node) -> tuple[SnapshotFacts, TinyMachine]:
    """A sleeping workspace most of whose stored pages are out of date."""
    run, machine = await node.wake(1)
    earlier = []
    for seed in range(3):
        machine.write_memory(slice(0, 250), random_pages(seed, 250))
        machine.write_memory(7, 0)
        earlier.append((await capture(run, machine)).snapshot_id)
    machine.write_memory(slice(100, 102), 9)
    facts = await capture(run, machine, goes_on=False)
    run.end()
    node.store.delete(earlier)
    return facts, machine


async def test_compaction_frees_what_is_out_of_date_and_keeps_the_rest(node: Node) -> None:
    facts, machine = await grown(node)
    before = sum(path.stat().st_size for path in node.store.segments.iterdir())
    freed = compact(node.store, facts.snapshot_id, node.base.ram)
    after = sum(path.stat().st_size for path in node.store.segments.iterdir())
    assert before - after - 8192 <= freed <= before - after + 8192
    assert after < before / 2
    assert compact(node.store, facts.snapshot_id, node.base.ram) == 0
    assert {path.name for path in (node.store.snapshots / facts.snapshot_id).iterdir()} == {
        "manifest.json",
        "devices.state",
        node.store.manifest(facts.snapshot_id).memory.index.name,  # type: ignore[union-attr]
    }
    assert node.store.open().debris == ()
    node.store.verify(facts.snapshot_id, node.base.ram)
    run, woken = await node.wake(2, facts.snapshot_id)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    again = await capture(run, woken, goes_on=False)
    assert again.memory_bytes == 0


async def test_compaction_leaves_shared_segments_and_disk_only_snapshots_alone(node: Node) -> None:
    facts, _ = await grown(node)
    child, machine = await node.wake(1, facts.snapshot_id, WorkspaceId("ws_child"))
    await capture(child, machine, goes_on=False)
    before = files_of(node)
    assert compact(node.store, facts.snapshot_id, node.base.ram) == 0
    assert files_of(node) == before
    machine.write_disk(b"x")
    child.end(keep_layers=True)
    lost = node.store.salvage(WorkspaceId("ws_child"), 1, snapshot_id(), NOW)
    assert lost is None, "the hibernated layer belongs to a snapshot"
    with pytest.raises(NotFound):
        compact(node.store, SnapshotId("snp_none"), node.base.ram)


async def test_a_machine_woken_before_a_compaction_goes_on(node: Node) -> None:
    facts, machine = await grown(node)
    run = begin(node.store, node.spec(2), facts.snapshot_id, memory=True)
    compact(node.store, facts.snapshot_id, node.base.ram)
    woken = TinyMachine(TinyMemory(node.base.ram.pages))
    await run.restore(woken)  # type: ignore[arg-type]
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    run.end()
    assert {path.stem for path in node.store.segments.iterdir()} == set(
        node.store.manifest(facts.snapshot_id).memory.segments  # type: ignore[union-attr]
    )


async def test_compaction_never_copies_damage(node: Node) -> None:
    facts, _ = await grown(node)
    (segment,) = node.store.segments.iterdir()
    data = bytearray(segment.read_bytes())
    data[-3000] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptSnapshot, match=segment.name):
        compact(node.store, facts.snapshot_id, node.base.ram)
    assert list(node.store.segments.iterdir()) == [segment]


async def test_every_crash_of_a_compaction_leaves_the_snapshot_whole(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    disk = RecordingDisk(home)
    node = Node(home, disk)
    node.store.open()
    facts, machine = await grown(node)
    since = len(disk.operations)
    assert compact(node.store, facts.snapshot_id, node.base.ram) > 0
    acknowledged = [(since, len(disk.operations), facts, machine.memory.ram)]
    for after in range(since, len(disk.states)):
        for crash in Crash:
            for seed in range(4 if crash is Crash.MIXED else 1):
                await check_crash(disk, node, acknowledged, (after, crash, tmp_path / f"c{after}{crash}{seed}"), seed)


# -------------------------------------------------------------------------------------------------------- damage and crashes


async def test_verify_names_the_damaged_file(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_memory(slice(0, 20), 5)
    machine.write_disk(b"some data")
    facts = await capture(run, machine, goes_on=False)
    run.end()
    assert node.store.verify(facts.snapshot_id, node.base.ram)
    for name in sorted(files_of(node)):
        path = node.store.root / name
        good = path.read_bytes()
        for bad in (good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :], good[:-2], None):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            if bad is None and name.endswith("manifest.json"):
                continue
            with pytest.raises(CorruptSnapshot, match=path.name):
                node.store.verify(facts.snapshot_id, node.base.ram)
        path.write_bytes(good)
    with pytest.raises(NotFound):
        node.store.verify(SnapshotId("snp_none"))


async def test_a_damaged_manifest_is_reported_and_nothing_is_swept(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_memory(slice(0, 20), 5)
    facts = await capture(run, machine, goes_on=False)
    run.end()
    manifest = node.store.snapshots / facts.snapshot_id / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_bytes(good.replace(b'"generation": 1', b'"generation": 7'))
    before = files_of(node)
    report = node.store.open()
    assert (report.debris, report.damaged) == ((), (f"snapshots/{facts.snapshot_id}",))
    assert files_of(node) == before
    with pytest.raises(CorruptSnapshot, match=r"manifest\.json is damaged: its checksum does not hold"):
        node.store.manifest(facts.snapshot_id)
    manifest.write_bytes(good)
    assert node.store.open().damaged == ()
    assert node.store.verify(facts.snapshot_id, node.base.ram).facts() == facts


async def test_every_crash_leaves_acknowledged_snapshots_whole_and_no_debris(tmp_path: Path) -> None:
    """After every operation, in four kinds of crash: what was acknowledged wakes, opening cleans, and does so once."""
    home = tmp_path / "home"
    home.mkdir()
    disk = RecordingDisk(home)
    node = Node(home, disk)
    disk.root = home  # the image lies in it, unrecorded
    node.store.open()
    acknowledged: list[tuple[int, int, SnapshotFacts, np.ndarray]] = []
    run, machine = await node.wake(1)
    rams = {}
    for step in range(3):
        machine.write_memory(slice(0, 70), np.random.default_rng(step).integers(0, 255, (70, PAGE_SIZE), np.uint8))
        machine.write_disk(f"step {step}".encode())
        facts = await capture(run, machine, goes_on=step < 2)
        rams[facts.snapshot_id] = machine.memory.ram.copy()
        acknowledged.append((len(disk.operations), 10**9, facts, rams[facts.snapshot_id]))
    run.end()
    start, _, first, ram = acknowledged[0]
    acknowledged[0] = (start, len(disk.operations), first, ram)
    node.store.delete([first.snapshot_id])
    for after in range(len(disk.states)):
        for crash in Crash:
            # The instant in which a snapshot begins to exist is looked at more often.
            published = after > 0 and disk.operations[after - 1].endswith("manifest.json") and crash is Crash.MIXED
            for seed in range(20 if published else 1):
                await check_crash(disk, node, acknowledged, (after, crash, tmp_path / f"c{after}{crash}{seed}"), seed)


async def check_crash(disk: RecordingDisk, node: Node, acknowledged: list, case: tuple[int, Crash, Path], seed: int) -> None:
    after, crash, target = case
    target.mkdir()
    disk.materialise(after, crash, target, seed=after + 1000 * seed)
    (target / "image").symlink_to(node.home / "image")
    crashed = Node(target, QuickDisk())
    report = crashed.store.open()
    assert report.damaged == (), (disk.operations[:after], crash)
    assert crashed.store.open().debris == ()
    present = {facts.snapshot_id for facts in crashed.store.complete()}
    for since, until, facts, _ in acknowledged:
        if since <= after <= until:
            assert facts.snapshot_id in present, (disk.operations[:after], crash)
    rams = {facts.snapshot_id: ram for _, _, facts, ram in acknowledged}
    for name in present:
        crashed.store.verify(name, crashed.base.ram)
        run = begin(crashed.store, crashed.spec(9, WorkspaceId("ws_check")), name, memory=True)
        woken = TinyMachine(TinyMemory(crashed.base.ram.pages))
        await run.restore(woken)  # type: ignore[arg-type]
        assert np.array_equal(woken.memory.ram, rams[name])
        run.end()
    for live in crashed.store.live():
        crashed.store.salvage(live.workspace_id, live.generation, snapshot_id(), NOW)
    crashed.store.delete([facts.snapshot_id for facts in crashed.store.complete()])
    assert files_of(crashed) == set()
    crashed.store.close()


def test_one_process_owns_the_store(node: Node) -> None:
    code = (
        f"from pathlib import Path; from perdure.snapshots.store import *; SnapshotStore(Path({str(node.store.root)!r})).open()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Another Perdure process uses the store" in result.stderr
    node.store.close()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_live_record_knows_its_process(node: Node) -> None:
    run, _ = asyncio.run(node.wake(1))
    child = subprocess.Popen(["sleep", "600"])
    try:
        asyncio.run(run.started(child.pid))
        (record,) = node.store.live()
        assert record.pid == child.pid
        assert is_alive(record)
        assert LiveRecord.from_bytes(record.to_bytes(), "x") == record
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(record), "a zombie is dead"
        child.wait()
    assert not is_alive(record)
    assert process_started(child.pid) is None


async def test_a_mismatch_is_explained(node: Node) -> None:
    run, machine = await node.wake(1)
    facts = await capture(run, machine)
    manifest = node.store.manifest(facts.snapshot_id)
    assert explain_mismatch(manifest, {"qemu": "7.2.22"}) == ""
    assert explain_mismatch(manifest, {"qemu": "10.0.2", "cpu": "max"}) == "cpu: absent is now max; qemu: 7.2.22 is now 10.0.2"
    assert Manifest.from_bytes(manifest.to_bytes(), "x") == manifest


def test_a_record_of_another_release_says_so(node: Node) -> None:
    for data, why in [(b"{}", "checksum"), (b"[1]", "damaged"), (b"\xff", "damaged"), (b"", "damaged")]:
        with pytest.raises(CorruptSnapshot, match=why):
            Manifest.from_bytes(data, "snapshots/x/manifest.json")
