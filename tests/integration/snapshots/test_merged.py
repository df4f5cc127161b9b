"""A disk that a real guest wrote and trimmed, on merged layers: the guest finds it as it was, and so do QEMU's own tools."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from perdure.node.supervisor import NodeSupervisor
from perdure.snapshots import merge as merging
from perdure.snapshots.layers import disk_file
from perdure.wire.node import CaptureMode, FromSnapshot, MemoryFate
from tests.contract.node.real import real_bench, shell

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(600), pytest.mark.usefixtures("base_image")]

#: Each turn writes a file, changes pieces of an older one, and gives the room of another back to the disk.
TURN = (
    "head -c 3M /dev/urandom > /root/new$N; cp /root/new$N /root/gone$N; exec 2>/dev/null;"
    " dd if=/dev/urandom of=/root/first bs=4k seek=$((N * 7)) count=3 conv=notrunc;"
    " dd if=/dev/zero of=/root/first bs=4k seek=$((N * 31)) count=5 conv=notrunc; sync; rm /root/gone$N; sync; fstrim /"
)
ASK = "sync; echo 3 > /proc/sys/vm/drop_caches; cat /root/first /root/new* | sha256sum; du -s /root | cut -f1"


@pytest.mark.long
async def test_a_guest_finds_its_files_on_merged_layers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "LAYERS_ASLEEP", 3)
    async with real_bench(home, pool_size=0) as bench:
        assert isinstance(bench.node, NodeSupervisor)
        store = bench.node.snapshot_store
        workspace, _ = await bench.begin()
        await shell(bench, workspace, 1, "head -c 2M /dev/urandom > /root/first; sync")
        taken = []
        for turn in range(1, 6):
            await shell(bench, workspace, 1, f"N={turn}; {TURN}")
            taken.append(await bench.capture(workspace, 1, CaptureMode.CHECKPOINT))
        content = await shell(bench, workspace, 1, ASK)
        facts = await bench.capture(workspace, 1, CaptureMode.HIBERNATE)
        before = store.manifest(facts.snapshot_id)
        assert len(before.layers) == 6
        await bench.node.delete_snapshots(tuple(one.snapshot_id for one in taken[:-1]))
        await bench.node._compaction.run_once()

        manifest = store.manifest(facts.snapshot_id)
        assert len(manifest.layers) == 3
        assert store.manifest(taken[-1].snapshot_id).layers == before.layers[:5], "an older snapshot keeps its own"
        (merged,) = set(manifest.disk_ids) - set(before.disk_ids)
        check = ("qemu-img", "check", "-f", "qcow2", store.disks / disk_file(merged))
        found = await asyncio.to_thread(subprocess.run, check, capture_output=True, text=True, check=True)
        assert "No errors" in found.stdout

        _, report = await bench.begin(workspace, generation=2, source=FromSnapshot(facts.snapshot_id))
        assert report.memory is MemoryFate.KEPT
        assert await shell(bench, workspace, 2, ASK) == content
        await bench.node.stop(workspace, 2)
        other, _ = await bench.begin(source=FromSnapshot(taken[-1].snapshot_id), new_identity=True)
        assert await shell(bench, other, 1, ASK) == content
        await bench.node.stop(other, 1)
        await bench.node.delete_snapshots((facts.snapshot_id, taken[-1].snapshot_id))
        assert list(store.disks.iterdir()) == []
