"""Compaction, damage and crashes: what was acknowledged wakes, damage is named, opening cleans."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from perdure.core.crashpoints import CrashPoint
from perdure.core.errors import CorruptSnapshot, NotFound
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.machines.driver import PAGE_SIZE
from perdure.snapshots import compact as compact_module
from perdure.snapshots.alive import is_alive, process_started
from perdure.snapshots.compact import compact
from perdure.snapshots.manifest import LiveRecord, Manifest, explain_mismatch
from perdure.snapshots.start import begin
from perdure.wire.node import SnapshotFacts
from tests.fakes.disk import Crash, RecordingDisk
from tests.fakes.tiny_machine import TinyMachine, TinyMemory
from tests.fakes.tiny_node import NOW, Node, capture, check_crash, files_of, snapshot_id

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


async def test_compaction_leaves_what_a_machine_shares_and_disk_only_snapshots_alone(node: Node) -> None:
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


@pytest.mark.parametrize("when", ["at once", "when it is written"])
async def test_a_compaction_that_is_enough_leaves_everything_as_it_was(
    node: Node, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    facts, machine = await grown(node)
    before, enough = files_of(node), threading.Event()
    if when == "at once":
        enough.set()
    else:
        monkeypatch.setattr(compact_module, "crashpoint", lambda _point: enough.set())
    assert compact(node.store, facts.snapshot_id, node.base.ram, enough) == 0
    assert files_of(node) == before
    run, woken = await node.wake(2, facts.snapshot_id)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    run.end()
    enough.clear()
    monkeypatch.undo()
    assert compact(node.store, facts.snapshot_id, node.base.ram, enough) > 0


async def test_one_that_changes_meanwhile_is_left_to_whoever_changed_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, _ = await grown(node)
    theirs: list[Manifest] = []

    def changed(point: CrashPoint) -> None:
        if point is CrashPoint.COMPACT_WRITTEN:
            monkeypatch.undo()
            compact(node.store, facts.snapshot_id, node.base.ram)
            theirs.append(node.store.manifest(facts.snapshot_id))

    before = node.store.manifest(facts.snapshot_id)
    monkeypatch.setattr(compact_module, "crashpoint", changed)
    assert compact(node.store, facts.snapshot_id, node.base.ram) == 0
    assert [node.store.manifest(facts.snapshot_id)] == theirs != [before]
    assert node.store.open().debris == ()
    node.store.verify(facts.snapshot_id, node.base.ram)


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


@pytest.mark.parametrize("tells_writes", [False, True])
async def test_every_crash_leaves_acknowledged_snapshots_whole_and_no_debris(tmp_path: Path, tells_writes: bool) -> None:
    """After every operation, in four kinds of crash: what was acknowledged wakes, opening cleans, and does so once."""
    home = tmp_path / "home"
    home.mkdir()
    disk = RecordingDisk(home)
    node = Node(home, disk, tells_writes=tells_writes)
    disk.root = home  # the image lies in it, unrecorded
    node.store.open()
    acknowledged: list[tuple[int, int, SnapshotFacts, np.ndarray]] = []
    run, machine = await node.wake(1)
    rams = {}
    for step in range(3):
        count = 70 - 20 * step  # the other pages stay where an earlier snapshot has written them
        machine.write_memory(slice(0, count), np.random.default_rng(step).integers(0, 255, (count, PAGE_SIZE), np.uint8))
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
