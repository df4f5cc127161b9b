"""What a cold wake asks for, what is noted of it, and that neither can hurt."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure.core.errors import MachineDied
from perdure.core.ids import SnapshotId
from perdure.machines.driver import PAGE_SIZE, PageNumbers
from perdure.machines.pagecache import resident
from perdure.node import warming
from perdure.node.warming import Cold, Warming
from perdure.snapshots.hints import Hint, pages_of, ranges_of
from perdure.snapshots.rebase import rebase
from tests.fakes.tiny_node import PAGES, Node, capture

#: Pages with data in the tiny image's base are those that no multiple of three names.
READ = np.array([1, 2, 4, 250, 251], np.uint32)


class Memory:
    """Of a guest that has touched these pages."""

    page_count = PAGES

    def __init__(self, touched: PageNumbers) -> None:
        self.touched = touched

    def touched_pages(self) -> PageNumbers:
        return self.touched


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    image = tmp_path / "image" / "ram.base"
    content = np.fromfile(image, np.uint8).reshape(-1, PAGE_SIZE)
    with image.open("wb") as file:  # with holes
        file.truncate(PAGES * PAGE_SIZE)
        for number in np.flatnonzero(content.any(axis=1)).tolist():
            file.seek(number * PAGE_SIZE)
            file.write(content[number].tobytes())
    node = Node(tmp_path)
    node.store.open()
    return node


@asynccontextmanager
async def warming_of(node: Node, noted_after_s: float = 0.0) -> AsyncIterator[Warming]:
    work = Warming(node.store, noted_after_s)
    try:
        yield work
    finally:
        await work.close()


async def asleep(node: Node) -> SnapshotId:
    run, machine = await node.wake(1)
    machine.write_memory(slice(100, 200), np.random.default_rng(1).integers(0, 255, (100, PAGE_SIZE), np.uint8))
    machine.write_disk(os.urandom(40 * PAGE_SIZE))
    facts = await capture(run, machine, goes_on=False)
    run.end()
    return facts.snapshot_id


@pytest.fixture
def is_cold(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of samples that are found in the page cache."""
    share = [0.0]
    monkeypatch.setattr(warming, "resident_share", lambda _path, _pages: share[0])
    return share


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """By file name, in pages."""
    seen: dict[str, list[tuple[int, int]]] = {}

    def ask_for(path: Path, ranges: Any) -> int:
        found = list(ranges)
        seen[path.name] = [(offset // PAGE_SIZE, -(-length // PAGE_SIZE)) for offset, length in found]
        return sum(length for _, length in found)

    monkeypatch.setattr(warming, "ask_for", ask_for)
    return seen


async def noted(work: Warming) -> None:
    async with asyncio.timeout(20):
        while work._tasks:
            await asyncio.wait(work._tasks)


async def test_a_warm_snapshot_costs_a_look(node: Node, is_cold: list[float], asked: dict[str, Any]) -> None:
    source = await asleep(node)
    is_cold[0] = warming.WARM_SHARE
    run, _ = await node.wake(2, source)
    async with warming_of(node) as work:
        assert await work.ask(run, source) is None
    assert asked == {}
    run.end()


async def test_a_cold_one_is_asked_for(node: Node, is_cold: list[float], asked: dict[str, Any]) -> None:
    source = await asleep(node)
    layer = node.store.manifest(source).layers[0]
    node.store.hints.write(source, Hint(ranges_of(READ), {f"{layer.disk_id}.qcow2": np.array([[2, 5]], np.uint32)}))
    run, _ = await node.wake(2, source)
    async with warming_of(node) as work:
        cold = await work.ask(run, source)
    assert cold is not None
    base = [page for first, count in asked["ram.base"] for page in range(first, first + count)]
    located = {page for page in range(100, 200) if page % 3}
    assert {*READ.tolist(), *located} <= set(base), "what the guest read, and what lies below what the restore writes"
    assert set(base) <= {*range(1, 5), *range(100, 200), 250, 251}
    (segment,) = node.store.segments.iterdir()
    assert asked[segment.name] == [(0, -(-segment.stat().st_size // PAGE_SIZE))]
    assert asked[f"{layer.disk_id}.qcow2"] == [(2, 5)]
    assert cold.asked_bytes > 0
    run.end()


async def test_what_was_touched_is_noted_beside_the_snapshot_and_goes_on_to_the_next(node: Node, is_cold: list[float]) -> None:
    source = await asleep(node)
    is_cold[0] = 1.0
    run, machine = await node.wake(2, source)
    touched = np.array(sorted({*READ.tolist(), 0, 3, 99, *range(100, 200)}), np.uint32)
    async with warming_of(node) as work:
        work.watch(run, Memory(touched), source, work.ask(run, source))  # type: ignore[arg-type]
        await noted(work)
        hint = node.store.hints.read(source)
        assert hint is not None and hint.files == {}
        assert np.array_equal(hint.ram, ranges_of(READ)), "holes and what the restore wrote are not read from the base"
        child = await capture(run, machine, goes_on=False)
        work.captured(run.spec.workspace_id, child.snapshot_id)
        work.ended(run.spec.workspace_id)
        await noted(work)
    run.end()
    passed_on = node.store.hints.read(child.snapshot_id)
    assert passed_on is not None and passed_on.to_bytes() == hint.to_bytes()


async def test_of_the_disk_is_noted_what_came_into_the_page_cache(
    node: Node, is_cold: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await asleep(node)
    name = f"{node.store.manifest(source).layers[0].disk_id}.qcow2"
    node.store.hints.write(
        source, Hint(files={name: np.array([[40, 1]], np.uint32), "gone.qcow2": np.array([[0, 1]], np.uint32)})
    )
    caches = {name: np.zeros(50, bool)}
    monkeypatch.setattr(warming, "resident", lambda path: caches.get(path.name, resident(path)).copy())
    run, _ = await node.wake(2, source)
    caches[name][3] = True  # was there before
    async with warming_of(node) as work:
        task = work.ask(run, source)
        cold = await task
        assert isinstance(cold, Cold)
        caches[name][[3, 20, 21]] = True
        work.watch(run, Memory(READ), source, task)  # type: ignore[arg-type]
        await noted(work)
    run.end()
    hint = node.store.hints.read(source)
    assert hint is not None
    assert list(hint.files) == [name]
    assert pages_of(hint.files[name]).tolist() == [20, 21, 40]


async def test_a_wake_that_ends_before_leaves_what_was_known(node: Node, is_cold: list[float]) -> None:
    source = await asleep(node)
    known = Hint(ranges_of(READ))
    node.store.hints.write(source, known)
    run, machine = await node.wake(2, source)
    is_cold[0] = 1.0
    async with warming_of(node, 3600.0) as work:
        work.watch(run, Memory(np.arange(10, dtype=np.uint32)), source, work.ask(run, source))  # type: ignore[arg-type]
        child = await capture(run, machine)
        work.captured(run.spec.workspace_id, child.snapshot_id)
        work.ended(run.spec.workspace_id)
        await noted(work)
        for name in (source, child.snapshot_id):
            hint = node.store.hints.read(name)
            assert hint is not None and hint.to_bytes() == known.to_bytes()
    run.end()


async def test_nothing_that_goes_wrong_is_heard_of(node: Node, is_cold: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    source = await asleep(node)
    run, machine = await node.wake(2, source)

    class Dead(Memory):
        def touched_pages(self) -> PageNumbers:
            raise MachineDied("It has ended.")

    async with warming_of(node) as work:
        work.watch(run, Dead(READ), source, work.ask(run, source))  # type: ignore[arg-type]
        await noted(work)
        assert node.store.hints.read(source) is None
        monkeypatch.setattr(warming, "ask_for", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert await work.ask(run, source) is None
        child = await capture(run, machine, goes_on=False)
        node.store.delete([child.snapshot_id])
        node.store.hints.write(source, Hint(ranges_of(READ)))
        work.captured(run.spec.workspace_id, child.snapshot_id)
        await noted(work)
        assert node.store.hints.read(child.snapshot_id) is None, "the snapshot went before its hint came"
    run.end()


async def test_a_rebased_workspace_is_known_by_the_same_hint(node: Node, is_cold: list[float], asked: dict[str, Any]) -> None:
    source = await asleep(node)
    node.store.hints.write(source, Hint(ranges_of(READ)))
    assert rebase(node.store, source, node.base.ram, threading.Event())
    run, _ = await node.wake(2, source)
    async with warming_of(node) as work:
        assert await work.ask(run, source) is not None
    (name,) = [path.name for path in node.store.bases.iterdir()]
    pages = {page for first, count in asked[name] for page in range(first, first + count)}
    assert set(READ.tolist()) <= pages <= {*range(1, 5), 250, 251}
    assert "ram.base" not in asked
    run.end()
