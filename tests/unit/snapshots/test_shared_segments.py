"""Compaction of segments that several snapshots use: each place is written once, and each snapshot is itself after it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from perdure.core.crashpoints import CrashPoint
from perdure.core.ids import SegmentId, SnapshotId, WorkspaceId
from perdure.node.compaction import Compaction
from perdure.snapshots import compact as compact_module
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.compact import compact, is_worn
from perdure.snapshots.manifest import MANIFEST, Manifest
from perdure.wire.node import SnapshotFacts
from tests.fakes.disk import Crash, RecordingDisk
from tests.fakes.tiny_machine import TinyMachine
from tests.fakes.tiny_node import Node, capture, check_crash
from tests.unit.snapshots.test_crashes import random_pages

CHILDREN = 3
PAGES_WRITTEN = 250


@dataclass
class Family:
    """Snapshots of which each needs another part of what was written a while ago, and all together little of it."""

    node: Node
    heads: list[tuple[SnapshotFacts, TinyMachine]]
    earlier: list[SnapshotId]

    @property
    def ids(self) -> list[SnapshotId]:
        return [facts.snapshot_id for facts, _ in self.heads]

    def segments(self, snapshot_id: SnapshotId) -> set[SegmentId]:
        memory = self.node.store.manifest(snapshot_id).memory
        assert memory is not None
        return set(memory.segments)

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.node.store.segments.iterdir())

    async def is_whole(self) -> None:
        for facts, machine in self.heads:
            self.node.store.verify(facts.snapshot_id, self.node.base.ram)
            run, woken = await self.node.wake(99, facts.snapshot_id, WorkspaceId("ws_look"))
            assert np.array_equal(woken.memory.ram, machine.memory.ram)
            run.end()


async def family(node: Node) -> Family:
    run, machine = await node.wake(1)
    earlier = []
    for seed in range(6):
        machine.write_memory(slice(0, PAGES_WRITTEN), random_pages(seed, PAGES_WRITTEN))
        earlier.append((await capture(run, machine)).snapshot_id)
    facts = await capture(run, machine, goes_on=False)
    run.end()
    heads = [(facts, machine)]
    for number in range(CHILDREN):  # each needs less of the old, and something of its own
        child, woken = await node.wake(1, facts.snapshot_id, WorkspaceId(f"ws_child{number}"))
        count = 20 * (number + 1)
        woken.write_memory(slice(0, count), random_pages(100 + number, count))
        heads.append((await capture(child, woken, goes_on=False), woken))
        child.end()
    return Family(node, heads, earlier)


async def test_what_all_need_together_is_written_once_for_all(node: Node) -> None:
    told = await family(node)
    node.store.delete(told.earlier)
    before, old = told.bytes(), set(told.segments(told.ids[0]))
    assert all(is_worn(node.store, name) for name in told.ids)
    freed = compact(node.store, told.ids[-1], node.base.ram)
    assert before - told.bytes() - 16384 <= freed <= before - told.bytes() + 16384
    assert told.bytes() < before / 2
    for name in told.ids:
        assert not told.segments(name) & old, "the old one is needed by nobody"
    assert set.intersection(*(told.segments(name) for name in told.ids)), "what they have in common is there once"
    assert node.store.open().debris == ()
    await told.is_whole()
    assert not any(is_worn(node.store, name) for name in told.ids)
    assert [compact(node.store, name, node.base.ram) for name in told.ids] == [0] * len(told.ids)


async def test_while_one_needs_most_of_it_nothing_is_copied(node: Node) -> None:
    told = await family(node)
    files = {path.name for path in node.store.segments.iterdir()}
    assert [compact(node.store, name, node.base.ram) for name in told.ids] == [0] * len(told.ids)
    assert {path.name for path in node.store.segments.iterdir()} == files
    node.store.delete([told.earlier[0], *told.earlier[2:]])
    assert compact(node.store, told.ids[0], node.base.ram) > 0
    await told.is_whole()
    run, woken = await node.wake(9, told.earlier[1])
    assert np.array_equal(woken.memory.ram[:PAGES_WRITTEN], random_pages(1, PAGES_WRITTEN))
    run.end()


async def test_what_a_machine_uses_is_left_until_it_is_gone(node: Node) -> None:
    told = await family(node)
    node.store.delete(told.earlier)
    run, machine = await node.wake(5, told.ids[1], WorkspaceId("ws_runs"))
    assert [compact(node.store, name, node.base.ram) for name in told.ids] == [0] * len(told.ids)
    assert np.array_equal(machine.memory.ram, told.heads[1][1].memory.ram)
    run.end()
    assert compact(node.store, told.ids[0], node.base.ram) > 0
    await told.is_whole()


@pytest.mark.parametrize("harm", ["damaged", "missing"])
async def test_where_nobody_knows_what_another_needs_nothing_is_touched(node: Node, harm: str) -> None:
    told = await family(node)
    node.store.delete(told.earlier)
    memory = node.store.manifest(told.ids[1]).memory
    assert memory is not None
    index = node.store.snapshots / told.ids[1] / memory.index.name
    good = index.read_bytes()
    index.unlink()
    if harm == "damaged":
        index.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert compact(node.store, told.ids[0], node.base.ram) == 0
    index.unlink(missing_ok=True)
    index.write_bytes(good)
    await told.is_whole()
    assert compact(node.store, told.ids[0], node.base.ram) > 0


@pytest.mark.parametrize("what", ["deleted", "rewritten", "enough"])
async def test_what_changes_meanwhile_keeps_what_it_has(node: Node, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    told, enough = await family(node), threading.Event()
    node.store.delete(told.earlier)
    old = told.segments(told.ids[2])

    def meanwhile(point: CrashPoint) -> None:
        if point is not CrashPoint.COMPACT_REPLACED:
            return
        monkeypatch.undo()
        match what:
            case "deleted":
                node.store.delete([told.ids[2]])
            case "rewritten":
                manifest = Manifest.from_bytes((node.store.snapshots / told.ids[2] / MANIFEST).read_bytes(), "other")
                node.store.publish(manifest)
            case "enough":
                enough.set()

    monkeypatch.setattr(compact_module, "crashpoint", meanwhile)
    compact(node.store, told.ids[0], node.base.ram, enough)
    if what == "deleted":
        del told.heads[2]
    else:
        assert told.segments(told.ids[2]) == old
    assert node.store.open().debris == ()
    await told.is_whole()
    if what != "deleted":
        assert compact(node.store, told.ids[2], node.base.ram) > 0, "and goes the next time"
        await told.is_whole()


async def test_snapshots_on_another_base_are_no_reason_to_copy(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot share a segment, as far as anybody knows; if they did, what its pages are would depend on who reads it."""
    told = await family(node)
    node.store.delete(told.earlier)
    monkeypatch.setattr(type(node.store.manifest(told.ids[1]).memory.base), "__eq__", lambda _one, _other: False)  # type: ignore[union-attr]
    assert compact(node.store, told.ids[0], node.base.ram) == 0


@pytest.mark.parametrize("step", [pytest.param(6, id="at 1 of 6"), pytest.param(1, id="at each", marks=pytest.mark.long)])
async def test_every_crash_leaves_all_of_them_whole(tmp_path: Path, step: int) -> None:
    home = tmp_path / "home"
    home.mkdir()
    disk = RecordingDisk(home)
    node = Node(home, disk)
    node.store.open()
    told = await family(node)
    node.store.delete(told.earlier)
    since = len(disk.operations)
    assert compact(node.store, told.ids[0], node.base.ram) > 0
    until = len(disk.operations)
    acknowledged = [(since, until, facts, machine.memory.ram) for facts, machine in told.heads]
    for after in range(since, len(disk.states), step):
        crash = list(Crash)[after % len(Crash)]
        await check_crash(disk, node, acknowledged, (after, crash, tmp_path / f"c{after}"), after)


async def test_what_was_left_by_a_process_that_ended_is_found_by_the_next(node: Node) -> None:
    """Nothing but the files is left of the first."""
    told = await family(node)
    node.store.delete(told.earlier)
    before = told.bytes()
    node.store.close()
    again = Node(node.home)
    again.store.open()

    async def base_of(_manifest: Manifest) -> BaseRam:
        return again.base.ram

    work = Compaction(again.store, base_of)
    work.start()
    try:
        assert await work.run_once() > 0
    finally:
        await work.close()
    assert told.bytes() < before / 2
    again.store.close()
    node.store.open()
    await told.is_whole()
