"""When sleeping snapshots are compacted, and how a wake gets past it. The rewrite itself is tested with the snapshots."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import SnapshotId
from perdure.node import compaction
from perdure.node.compaction import Compaction

ONE, TWO = SnapshotId("snp_1"), SnapshotId("snp_2")


class Store:
    def manifest(self, snapshot_id: SnapshotId) -> SnapshotId:
        return snapshot_id


class Rewriter:
    """Stands in for ``compact``; blocks until it is let go."""

    def __init__(self) -> None:
        self.seen: list[SnapshotId] = []
        self.begun = asyncio.Event()
        self.go = threading.Event()
        self.error: Exception | None = None
        self._loop = asyncio.get_running_loop()

    def __call__(self, _store: object, snapshot_id: SnapshotId, _base: object) -> int:
        self.seen.append(snapshot_id)
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.go.wait(30)
        if self.error:
            raise self.error
        return 100


@pytest.fixture
async def rewriter(monkeypatch: pytest.MonkeyPatch) -> Rewriter:
    rewriter = Rewriter()
    monkeypatch.setattr(compaction, "compact", rewriter)
    return rewriter


def make() -> Compaction:
    async def base_of(_manifest: object) -> Any:
        return object()

    return Compaction(cast("Any", Store()), base_of)


async def test_what_fell_asleep_is_compacted_once(rewriter: Rewriter) -> None:
    rewriter.go.set()
    work = make()
    work.sleeps(ONE)
    work.sleeps(TWO)
    assert await work.run_once() == 200
    assert await work.run_once() == 0
    assert rewriter.seen == [ONE, TWO]


async def test_what_woke_before_is_left_alone(rewriter: Rewriter) -> None:
    rewriter.go.set()
    work = make()
    work.sleeps(ONE)
    work.sleeps(TWO)
    await work.out_of_the_way(ONE)
    await work.run_once()
    assert rewriter.seen == [TWO]


async def test_a_wake_waits_for_the_rewrite_of_its_own_snapshot_only(rewriter: Rewriter) -> None:
    work = make()
    work.sleeps(ONE)
    running = asyncio.create_task(work.run_once())
    await rewriter.begun.wait()
    await work.out_of_the_way(TWO)  # returns at once
    waking = asyncio.create_task(work.out_of_the_way(ONE))
    done, _ = await asyncio.wait([waking], timeout=0.05)
    assert not done
    rewriter.go.set()
    await waking
    assert await running == 100


@pytest.mark.parametrize("error", [CorruptSnapshot("damaged"), OSError(5, "Input/output error")])
async def test_a_damaged_snapshot_does_not_stop_the_others(rewriter: Rewriter, error: Exception) -> None:
    rewriter.go.set()
    rewriter.error = error
    work = make()
    work.sleeps(ONE)
    work.sleeps(TWO)
    assert await work.run_once() == 0
    assert rewriter.seen == [ONE, TWO]
