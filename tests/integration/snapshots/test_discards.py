"""What a guest deletes weighs nothing: its file system gives the room back to the disk before a snapshot is taken of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.core.files import stored_bytes
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.node.supervisor import NodeSupervisor
from perdure.snapshots.layers import disk_file
from perdure.wire.node import CaptureMode, FromSnapshot
from tests.contract.node.real import real_bench, shell

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(600), pytest.mark.usefixtures("base_image")]

WRITTEN = 24 << 20


async def test_a_deleted_file_is_not_in_the_snapshots_disk(home: Path) -> None:
    """Neither one that came and went, nor, of a later snapshot, one that an earlier one has."""
    async with real_bench(home, pool_size=0) as bench:
        assert isinstance(bench.node, NodeSupervisor)
        store = bench.node.snapshot_store

        async def slept(workspace: WorkspaceId, generation: int, script: str) -> tuple[SnapshotId, int]:
            await shell(bench, workspace, generation, script)
            facts = await bench.capture(workspace, generation, CaptureMode.HIBERNATE)
            layers = store.manifest(facts.snapshot_id).disk_ids
            return facts.snapshot_id, stored_bytes(store.disks / disk_file(layers[-1]))

        write = f"head -c {WRITTEN} /dev/urandom > /root/big; sync"
        workspace, _ = await bench.begin()
        first, kept = await slept(workspace, 1, write)
        assert kept > WRITTEN
        await bench.begin(workspace, generation=2, source=FromSnapshot(first))
        _, gone = await slept(workspace, 2, f"rm /root/big; sync; {write}; rm /root/big; sync")
        assert gone < WRITTEN / 8
        other, _ = await bench.begin(source=FromSnapshot(first), new_identity=True)
        assert await shell(bench, other, 1, "stat -c %s /root/big") == str(WRITTEN), "an earlier snapshot has what it had"
        await bench.node.stop(other, 1)
