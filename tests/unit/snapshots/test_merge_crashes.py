"""A merge that is cut off anywhere, by SIGKILL or with the host's power, leaves the disk as it was or as it will be."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from perdure.core.crashpoints import CrashPoint
from perdure.snapshots import merge as merging
from perdure.snapshots.merge import merge
from tests.fakes.deep_disk import asleep, disk_of, disks_of, layers_of, wanted
from tests.fakes.disk import Crash, RecordingDisk
from tests.fakes.tiny_node import Node, capture, check_crash

NEVER = threading.Event()
MERGING = """
import sys, threading
from pathlib import Path
from perdure.core.crashpoints import arm
from perdure.snapshots.merge import merge
from perdure.snapshots.store import SnapshotStore
arm(Path(sys.argv[1]))
store = SnapshotStore(Path(sys.argv[2]))
store.open()
merge(store, sys.argv[3], threading.Event())
"""


@pytest.mark.parametrize(
    ("point", "after"), [(CrashPoint.MERGE_BEGUN, 9), (CrashPoint.MERGE_WRITTEN, 9), (CrashPoint.MERGE_PUBLISHED, 8)]
)
async def test_killed_at_a_named_point(tmp_path: Path, point: CrashPoint, after: int) -> None:
    node = Node(tmp_path)
    node.store.open()
    kept, _ = await asleep(node, 9, keep=2)
    newest = kept[1].snapshot_id
    node.store.close()
    order = tmp_path / "crash"
    order.write_text(f"{point.value} server 1")
    words = (sys.executable, "-c", MERGING, str(order), str(node.store.root), newest)
    process = await asyncio.create_subprocess_exec(*words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert await process.wait() == -signal.SIGKILL
    assert not order.exists(), "it was there that it died"
    left = disks_of(node)
    report = node.store.open()
    assert report.damaged == ()
    assert len(layers_of(node, newest)) == after
    named = {*layers_of(node, newest), *layers_of(node, kept[0].snapshot_id)}
    assert disks_of(node) == named
    assert set(report.debris) == {f"disks/{name}.qcow2" for name in left - named}
    assert await disk_of(node, newest, 9) == wanted(9)
    assert merge(node.store, newest, NEVER) == after - 8
    assert await disk_of(node, newest, 9) == wanted(9)
    assert await disk_of(node, kept[0].snapshot_id, 8) == wanted(8)


async def test_every_crash_of_a_merge_leaves_the_snapshot_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the capture and the deletion that follow."""
    monkeypatch.setattr(merging, "LAYERS_ASLEEP", 2)
    home = tmp_path / "home"
    home.mkdir()
    disk = RecordingDisk(home)
    node = Node(home, disk)
    node.store.open()
    kept, machine = await asleep(node, 4, keep=2)
    facts = kept[1]
    since = len(disk.operations)
    assert merge(node.store, facts.snapshot_id, NEVER) == 2
    node.store.delete([kept[0].snapshot_id])
    run, woken = await node.wake(2, facts.snapshot_id)
    woken.write_disk(b"later", 99)
    woken.write_memory(200, 5)
    child = await capture(run, woken, goes_on=False)
    run.end()
    ram = machine.memory.ram.copy()
    older = ram.copy()
    older[3] = node.base.ram.pages[3]
    acknowledged = [
        (since, 10**9, facts, ram),
        (len(disk.operations), 10**9, child, woken.memory.ram.copy()),
        (10**9, 10**9, kept[0], older),
    ]
    assert len(disk.states) - since > 25
    for after in range(since, len(disk.states)):
        for crash in Crash:
            for seed in range(2 if crash is Crash.MIXED else 1):
                target = tmp_path / f"c{after}{crash}{seed}"
                await check_crash(disk, node, acknowledged, (after, crash, target), seed)


async def test_after_every_crash_the_disk_reads_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "LAYERS_ASLEEP", 2)
    home = tmp_path / "home"
    home.mkdir()
    disk = RecordingDisk(home)
    node = Node(home, disk)
    node.store.open()
    (facts,), _ = await asleep(node, 4)
    since = len(disk.operations)
    merge(node.store, facts.snapshot_id, NEVER)
    depths = set()
    for after in range(since, len(disk.states)):
        for crash in Crash:
            target = tmp_path / f"c{after}{crash}"
            target.mkdir()
            disk.materialise(after, crash, target, seed=after)
            (target / "image").symlink_to(home / "image")
            crashed = Node(target)
            assert crashed.store.open().damaged == ()
            depths.add(len(layers_of(crashed, facts.snapshot_id)))
            assert await disk_of(crashed, facts.snapshot_id, 4) == wanted(4)
            merge(crashed.store, facts.snapshot_id, NEVER)
            assert await disk_of(crashed, facts.snapshot_id, 4) == wanted(4)
            assert disks_of(crashed) == set(layers_of(crashed, facts.snapshot_id))
            crashed.store.close()
    assert depths == {2, 4}
