"""A workspace on a base of its own, with the real node and QEMU: it wakes, is captured, forks and is tried like any other."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from perdure.core.ids import WorkspaceId
from perdure.node.supervisor import NodeSupervisor
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import CaptureMode, FromSnapshot, MemoryFate, Verdict
from tests.contract.node.benches import Bench
from tests.contract.node.real import real_bench, shell

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(600), pytest.mark.usefixtures("base_image")]

LIVE_MIB = 48
FILL = f"head -c {LIVE_MIB}M /dev/urandom > /dev/shm/live; sha256sum < /dev/shm/live"
ASK = "sha256sum < /dev/shm/live"


def supervisor(bench: Bench) -> NodeSupervisor:
    assert isinstance(bench.node, NodeSupervisor)
    return bench.node


def store_of(bench: Bench) -> SnapshotStore:
    return supervisor(bench).snapshot_store


def bases(bench: Bench) -> list[str]:
    return sorted(path.name for path in store_of(bench).bases.iterdir())


async def test_it_wakes_forks_and_sleeps_on_its_own_base(home: Path) -> None:
    async with real_bench(home, rebase_mib=LIVE_MIB - 8, pool_size=0) as bench:
        workspace, _ = await bench.begin()
        content = await shell(bench, workspace, 1, FILL)
        facts = await bench.capture(workspace, 1, CaptureMode.HIBERNATE)
        await supervisor(bench)._compaction.run_once()
        assert len(bases(bench)) == 1
        assert store_of(bench).manifest(facts.snapshot_id).private_base is not None
        assert list(store_of(bench).segments.iterdir()) == []

        _, report = await bench.begin(workspace, generation=2, source=FromSnapshot(facts.snapshot_id))
        assert (report.memory, report.pooled) == (MemoryFate.KEPT, False)
        assert await shell(bench, workspace, 2, ASK) == content
        await shell(bench, workspace, 2, "echo later > /dev/shm/more")
        child = await bench.capture(workspace, 2, CaptureMode.CHECKPOINT)
        assert child.memory_bytes < LIVE_MIB << 19, "it is a difference from the new base"

        forks = [await bench.begin(source=FromSnapshot(child.snapshot_id), new_identity=True) for _ in range(2)]
        for fork, forked in forks:
            assert forked.memory is MemoryFate.KEPT
            assert await shell(bench, fork, 1, f"{ASK}; cat /dev/shm/more") == f"{content}\nlater"
            used = await bench.node.usage(fork, 1)
            assert used.private_bytes < used.rss_bytes - (LIVE_MIB << 19), "what it has read of its base is shared"
        assert len(bases(bench)) == 1

        async with aclosing(bench.node.verify((child.snapshot_id,), trial=True)) as events:
            (verdict,) = [event async for event in events if isinstance(event, Verdict)]
        assert verdict.intact and verdict.trial is not None and verdict.trial.problem == ""
        for fork, _ in forks:
            await bench.node.stop(fork, 1)
        last = await bench.capture(workspace, 2, CaptureMode.HIBERNATE)
        _, report = await bench.begin(workspace, generation=3, source=FromSnapshot(last.snapshot_id))
        assert await shell(bench, workspace, 3, f"{ASK}; cat /dev/shm/more") == f"{content}\nlater"
        await bench.node.stop(workspace, 3)
        await bench.node.delete_snapshots((facts.snapshot_id, child.snapshot_id, last.snapshot_id))
        assert bases(bench) == []


@pytest.mark.slow
@pytest.mark.long
async def test_a_crash_of_the_node_keeps_it_and_a_disk_boot_needs_it_not(home: Path) -> None:
    async with real_bench(home, rebase_mib=LIVE_MIB - 8, pool_size=0) as bench:
        workspace, _ = await bench.begin()
        content = await shell(bench, workspace, 1, FILL)
        facts = await bench.capture(workspace, 1, CaptureMode.HIBERNATE)
        await supervisor(bench)._compaction.run_once()
        await bench.begin(workspace, generation=2, source=FromSnapshot(facts.snapshot_id))
        await shell(bench, workspace, 2, "echo news > /root/news; sync")
        await bench.world.crash()
        saved = await bench.node.salvage(WorkspaceId(workspace), 2, bench.snapshot_id())
        assert saved is not None and not saved.has_memory
        _, report = await bench.begin(workspace, generation=3, source=FromSnapshot(facts.snapshot_id))
        assert report.memory is MemoryFate.KEPT
        assert await shell(bench, workspace, 3, ASK) == content
        other, report = await bench.begin(source=FromSnapshot(saved.snapshot_id), new_identity=True)
        assert report.memory is MemoryFate.LOST
        assert await shell(bench, other, 1, "cat /root/news") == "news"


@pytest.mark.slow
@pytest.mark.long
async def test_a_wake_that_comes_during_a_rebase_does_not_wait_for_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with real_bench(home, rebase_mib=LIVE_MIB - 8, pool_size=0) as bench:
        workspace, _ = await bench.begin()
        content = await shell(bench, workspace, 1, FILL)
        facts = await bench.capture(workspace, 1, CaptureMode.HIBERNATE)
        begun, go = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        create = store_of(bench).disk.create

        def slow(path: Path, mode: int):  # type: ignore[no-untyped-def]
            if path.suffix == ".ram":
                loop.call_soon_threadsafe(begun.set)
                asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
            return create(path, mode)

        monkeypatch.setattr(store_of(bench).disk, "create", slow)
        working = asyncio.create_task(supervisor(bench)._compaction.run_once())
        await begun.wait()
        await bench.begin(workspace, generation=2, source=FromSnapshot(facts.snapshot_id))
        assert await shell(bench, workspace, 2, ASK) == content
        go.set()
        await working
        assert bases(bench) == []
        assert store_of(bench).manifest(facts.snapshot_id).private_base is None
