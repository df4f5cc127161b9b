"""When what sleeps is compacted, rebased or merged, and how a wake gets past it. The work itself is tested with the snapshots."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.core.errors import CorruptSnapshot, NoSpace
from perdure.core.ids import SnapshotId
from perdure.node import compaction
from perdure.node.compaction import Compaction
from perdure.snapshots.merge import LAYERS_ASLEEP

ONE, TWO, THREE = SnapshotId("snp_1"), SnapshotId("snp_2"), SnapshotId("snp_3")
LARGE = 400 << 8  # pages of 400 MiB


class Store:
    """Snapshots of 512 MiB of which so many pages are changed, on disks of so many layers."""

    def __init__(self, pages: int = 0, layers: int = 1) -> None:
        self.pages = pages
        self.layers = layers

    def manifest(self, snapshot_id: SnapshotId) -> Any:
        return SimpleNamespace(facts=lambda: self._facts(snapshot_id), layers=(None,) * self.layers)

    def complete(self) -> list[Any]:
        return [self._facts(ONE, "a"), self._facts(TWO, "a"), self._facts(THREE, "b")]

    def _facts(self, snapshot_id: SnapshotId, workspace: str = "a") -> Any:
        return SimpleNamespace(
            snapshot_id=snapshot_id, workspace_id=workspace, pages=self.pages, size=SimpleNamespace(memory_mib=512)
        )


class Rewriter:
    """Stands in for ``compact``; blocks until it is let go."""

    def __init__(self) -> None:
        self.seen: list[SnapshotId] = []
        self.enough: dict[SnapshotId, threading.Event] = {}
        self.begun = asyncio.Event()
        self.go = threading.Event()
        self.error: Exception | None = None
        self._loop = asyncio.get_running_loop()

    def __call__(self, _store: object, snapshot_id: SnapshotId, _base: object, enough: threading.Event) -> int:
        self.seen.append(snapshot_id)
        self.enough[snapshot_id] = enough
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.go.wait(30)
        if self.error:
            raise self.error
        return 100


@pytest.fixture
async def rewriter(monkeypatch: pytest.MonkeyPatch) -> Rewriter:
    rewriter = Rewriter()
    monkeypatch.setattr(compaction, "compact", rewriter)
    monkeypatch.setattr(compaction, "is_worn", lambda *_: True)
    monkeypatch.setattr(compaction, "merge", lambda *_: 0)
    return rewriter


def make(pages: int = 0, layers: int = 1) -> Compaction:
    async def base_of(_manifest: object) -> Any:
        return object()

    return Compaction(cast("Any", Store(pages, layers)), base_of, 512)


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
    work.out_of_the_way(ONE)
    await work.run_once()
    assert rewriter.seen == [TWO]


async def test_a_wake_ends_the_rewrite_of_its_own_snapshot_and_does_not_wait_for_it(rewriter: Rewriter) -> None:
    work = make()
    work.sleeps(ONE)
    running = asyncio.create_task(work.run_once())
    await rewriter.begun.wait()
    assert not work.out_of_the_way(TWO), "nothing was to be done for that one"
    assert not rewriter.enough[ONE].is_set()
    assert work.out_of_the_way(ONE)
    assert rewriter.enough[ONE].is_set() and not running.done()
    rewriter.go.set()
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


# ------------------------------------------------------------------------------------------------------------------- rebase


class Writer:
    """Stands in for ``rebase`` or ``merge``: writes until it is let go. ``waits_for_enough``: nor before that is told."""

    def __init__(self, *, waits_for_enough: bool) -> None:
        self.seen: list[SnapshotId] = []
        self.begun = asyncio.Event()
        self.told = threading.Event()
        self.go = threading.Event()
        self.waits_for_enough = waits_for_enough
        self.error: Exception | None = None
        self._loop = asyncio.get_running_loop()

    def __call__(self, _store: object, snapshot_id: SnapshotId, *given: Any) -> int:
        enough: threading.Event = given[-1]
        self.seen.append(snapshot_id)
        self._loop.call_soon_threadsafe(self.begun.set)
        if self.waits_for_enough:
            assert enough.wait(30)
            self.told.set()
        assert self.go.wait(30)
        if self.error:
            raise self.error
        return 0


@pytest.fixture
async def rebaser(monkeypatch: pytest.MonkeyPatch, rewriter: Rewriter) -> Writer:
    return in_place_of("rebase", Writer(waits_for_enough=True), monkeypatch, rewriter)


@pytest.fixture
async def merger(monkeypatch: pytest.MonkeyPatch, rewriter: Rewriter) -> Writer:
    return in_place_of("merge", Writer(waits_for_enough=False), monkeypatch, rewriter)


def in_place_of(name: str, writer: Writer, monkeypatch: pytest.MonkeyPatch, rewriter: Rewriter) -> Writer:
    rewriter.go.set()
    monkeypatch.setattr(compaction, name, writer)
    return writer


async def test_what_is_too_different_from_its_base_is_rebased_and_nothing_else(rebaser: Writer, rewriter: Rewriter) -> None:
    small, large = make(), make(LARGE)
    small.sleeps(ONE)
    await small.run_once()
    assert (rebaser.seen, rewriter.seen) == ([], [ONE])
    large.sleeps(TWO)
    running = asyncio.create_task(large.run_once())
    await rebaser.begun.wait()
    rebaser.go.set()
    large.out_of_the_way(TWO)
    await running
    assert (rebaser.seen, rewriter.seen) == ([TWO], [ONE])


async def test_a_wake_ends_a_rebase_and_does_not_wait_for_it(rebaser: Writer) -> None:
    work = make(LARGE)
    work.sleeps(ONE)
    running = asyncio.create_task(work.run_once())
    await rebaser.begun.wait()
    assert not work.out_of_the_way(TWO), "nothing was to be done for that one"
    assert not rebaser.told.is_set()
    assert work.out_of_the_way(ONE), "it is still at it, and the wake goes on"
    assert await asyncio.to_thread(rebaser.told.wait, 30)
    assert not running.done()
    rebaser.go.set()
    await running


async def test_what_waits_is_known_to_be_undone(rebaser: Writer) -> None:
    work = make(LARGE)
    work.sleeps(ONE)
    assert work.out_of_the_way(ONE)
    assert not work.out_of_the_way(ONE)
    assert await work.run_once() == 0
    assert rebaser.seen == []


async def test_the_end_of_the_node_ends_a_rebase(rebaser: Writer) -> None:
    work = make(LARGE)
    work.start()
    running = asyncio.create_task(work.run_once())
    await rebaser.begun.wait()
    closing = asyncio.create_task(work.close())
    assert await asyncio.to_thread(rebaser.told.wait, 30)
    done, _ = await asyncio.wait([closing], timeout=0.05)
    assert not done, "the store must not be given away while it writes"
    rebaser.go.set()
    await closing
    assert await running == 0
    assert rebaser.seen == [TWO], "the other one is left to the next start"


async def test_a_start_goes_on_with_the_newest_snapshot_of_each_workspace(rebaser: Writer, rewriter: Rewriter) -> None:
    """Whatever was to be done with them: a rebase here, a rewrite there."""
    rebaser.go.set()
    rebaser.waits_for_enough = False
    for pages, seen in ((0, rewriter.seen), (LARGE, rebaser.seen)):
        work = make(pages)
        work.start()
        await work.run_once()
        assert set(seen) == {TWO, THREE}
        await work.close()
    assert len(rebaser.seen) == len(rewriter.seen) == 2


async def test_what_is_not_worn_needs_no_look_at_its_base(rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has to be read to its last byte first."""
    asked = []

    async def base_of(manifest: object) -> Any:
        asked.append(manifest)
        return object()

    rewriter.go.set()
    work = Compaction(cast("Any", Store()), base_of, 512)
    work.sleeps(ONE)
    monkeypatch.setattr(compaction, "is_worn", lambda *_: False)
    await work.run_once()
    assert (asked, rewriter.seen) == ([], [])
    work.sleeps(ONE)
    monkeypatch.setattr(compaction, "is_worn", lambda *_: True)
    await work.run_once()
    assert (len(asked), rewriter.seen) == (1, [ONE])


# -------------------------------------------------------------------------------------------------------------------- merge


async def test_the_disk_comes_before_the_memory(merger: Writer, rewriter: Rewriter) -> None:
    work = make()
    work.sleeps(ONE)
    running = asyncio.create_task(work.run_once())
    await merger.begun.wait()
    assert rewriter.seen == []
    merger.go.set()
    assert await running == 100
    assert (merger.seen, rewriter.seen) == ([ONE], [ONE])


async def test_a_wake_ends_a_merge_does_not_wait_for_it_and_nothing_follows(merger: Writer, rewriter: Rewriter) -> None:
    merger.waits_for_enough = True
    for pages in (0, LARGE):
        merger.go.clear()
        merger.begun.clear()
        work = make(pages)
        work.sleeps(ONE)
        running = asyncio.create_task(work.run_once())
        await merger.begun.wait()
        assert work.out_of_the_way(ONE), "it is still at it, and the wake goes on"
        assert not running.done()
        merger.go.set()
        assert await running == 0
        assert rewriter.seen == [], "the machine reads these segments now"


@pytest.mark.parametrize("error", [CorruptSnapshot("damaged"), NoSpace("full"), OSError(5, "Input/output error")])
async def test_a_merge_that_fails_stops_nothing_else(merger: Writer, rewriter: Rewriter, error: Exception) -> None:
    merger.go.set()
    merger.error = error
    work = make()
    work.sleeps(ONE)
    work.sleeps(TWO)
    assert await work.run_once() == 200
    assert (merger.seen, rewriter.seen) == ([ONE, TWO], [ONE, TWO])


async def test_a_disk_without_known_memory_is_merged(merger: Writer, rewriter: Rewriter) -> None:
    async def no_base(_manifest: object) -> Any:
        return None

    merger.go.set()
    work = Compaction(cast("Any", Store()), no_base, 512)
    work.sleeps(ONE)
    await work.run_once()
    assert (merger.seen, rewriter.seen) == ([ONE], [])


async def test_the_end_of_the_node_ends_a_merge(merger: Writer, rewriter: Rewriter) -> None:
    merger.waits_for_enough = True
    work = make(layers=LAYERS_ASLEEP + 1)
    work.start()
    running = asyncio.create_task(work.run_once())
    await merger.begun.wait()
    closing = asyncio.create_task(work.close())
    done, _ = await asyncio.wait([closing], timeout=0.05)
    assert not done, "the store must not be given away while it writes"
    merger.go.set()
    await closing
    assert await running == 0
    assert (merger.seen, rewriter.seen) == ([TWO], []), "the other one is left to the next start"


async def test_a_start_goes_on_with_disks_on_too_many_layers(merger: Writer) -> None:
    merger.go.set()
    work = make(layers=LAYERS_ASLEEP + 1)
    work.start()
    await work.run_once()
    assert set(merger.seen) == {TWO, THREE}
    await work.close()
