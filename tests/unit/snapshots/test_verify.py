"""Damage of every kind of file is found and named, by what a wake reads or by a full check, and nothing else is blamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import CorruptSnapshot, NotFound
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.machines.driver import PAGE_SIZE
from perdure.snapshots.store import THROWAWAY
from perdure.snapshots.verify import Found, Verifier
from perdure.wire.node import Damage
from tests.fakes.tiny_node import Node, capture, files_of

KINDS = ("manifest", "index", "devices", "segment", "lower", "layer")
#: Of a file's length; the last byte is -1.
OFFSETS = (0, 7, 0.25, 0.5, 0.75, -8, -1)


@dataclass
class Pair:
    """Two snapshots of one workspace, the second a child of the first; each has a segment and a layer of its own."""

    first: SnapshotId
    second: SnapshotId

    def path(self, node: Node, kind: str) -> Path:
        """A file of the second one; ``lower`` is the layer that both need."""
        manifest = node.store.manifest(self.second)
        assert manifest.memory is not None
        mine = node.store.snapshots / self.second
        older = node.store.manifest(self.first).memory
        assert older is not None
        (segment,) = set(manifest.memory.segments) - set(older.segments)
        return {
            "manifest": mine / "manifest.json",
            "index": mine / manifest.memory.index.name,
            "devices": mine / manifest.memory.devices.name,
            "segment": node.store.segments / f"{segment}.pages",
            "lower": node.store.disks / f"{manifest.layers[0].disk_id}.qcow2",
            "layer": node.store.disks / f"{manifest.layers[-1].disk_id}.qcow2",
        }[kind]


async def one_sleep(node: Node, generation: int, source: SnapshotId | None, workspace: str = "ws_one") -> SnapshotId:
    run, machine = await node.wake(generation, source, WorkspaceId(workspace))
    random = np.random.default_rng([generation, len(workspace)])
    machine.write_memory(slice(0, 150), random.integers(0, 255, (150, PAGE_SIZE), np.uint8))
    few = machine.memory.ram[200:260].copy()  # differ from the base in a few words
    few[:, :16] = generation
    machine.write_memory(slice(200, 260), few)
    machine.write_memory(280, 0)
    machine.devices = 100 * generation + len(workspace)
    machine.write_disk(os.urandom(50_000))
    facts = await capture(run, machine, goes_on=False)
    run.end()
    return facts.snapshot_id


@pytest.fixture
async def pair(node: Node) -> Pair:
    first = await one_sleep(node, 1, None)
    return Pair(first, await one_sleep(node, 2, first))


def check(node: Node, snapshot_id: SnapshotId) -> Found:
    return Verifier(node.store, lambda _file, _count: None).snapshot(snapshot_id, node.base.ram)


def names(found: Found) -> list[str]:
    return [damage.file for damage in found.damage]


def flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    at = int(where) if isinstance(where, int) or where < 0 else int(where * len(content))
    content[at] ^= 0x10
    path.write_bytes(content)


async def test_what_is_whole_is_whole_and_every_file_is_read(node: Node, pair: Pair) -> None:
    heard: dict[str, int] = {}

    def told(file: str, count: int) -> None:
        heard[file] = heard.get(file, 0) + count

    verifier = Verifier(node.store, told)
    for snapshot_id in (pair.first, pair.second, pair.first):
        assert verifier.snapshot(snapshot_id, node.base.ram) == Found((), disk_intact=True)
    for kind in KINDS:
        path = pair.path(node, kind)
        read = heard[str(path.relative_to(node.store.root))]
        # A segment begins with its header, which is no page; what both need is read once.
        assert read == path.stat().st_size - (64 if kind == "segment" else 0), kind


@pytest.mark.parametrize("where", OFFSETS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_flipped_bit_is_found_and_its_file_named(node: Node, pair: Pair, kind: str, where: float) -> None:
    path = pair.path(node, kind)
    flip(path, where)
    found = check(node, pair.second)
    assert names(found) == [str(path.relative_to(node.store.root))]
    assert found.damage[0].problem.endswith(".") and path.name in found.damage[0].problem
    assert found.disk_intact == (kind in {"index", "devices", "segment"})
    assert names(check(node, pair.first)) == ([f"disks/{path.name}"] if kind == "lower" else [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [0, 0.5, -1, None])
async def test_a_file_that_is_cut_or_missing_is_named(node: Node, pair: Pair, kind: str, left: float | None) -> None:
    path = pair.path(node, kind)
    if left is None:
        path.unlink()
    else:
        os.truncate(path, int(left * path.stat().st_size) if left >= 0 else path.stat().st_size - 1)
    assert names(check(node, pair.second)) == [str(path.relative_to(node.store.root))]


@pytest.mark.parametrize("kind", ["manifest", "index", "devices", "segment", "layer"])
async def test_files_of_two_snapshots_that_changed_places_are_named(node: Node, pair: Pair, kind: str) -> None:
    other = Pair(await one_sleep(node, 1, None, "ws_other"), SnapshotId(""))
    other.second = await one_sleep(node, 2, other.first, "ws_other")
    one, two = pair.path(node, kind), other.path(node, kind)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    for found, path in ((check(node, pair.second), one), (check(node, other.second), two)):
        assert names(found) == [str(path.relative_to(node.store.root))]
    assert check(node, pair.first).damage == check(node, other.first).damage == ()


async def test_all_damage_is_listed(node: Node, pair: Pair) -> None:
    damaged = [pair.path(node, kind) for kind in ("layer", "devices", "segment")]
    damaged[0].unlink()
    flip(damaged[1], 0.5)
    flip(damaged[2], -1)
    assert names(check(node, pair.second)) == [str(path.relative_to(node.store.root)) for path in damaged]


@pytest.mark.parametrize("kind", ["index", "devices", "segment"])
@pytest.mark.parametrize("break_it", [Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 1)])
async def test_a_wake_refuses_before_there_is_a_machine(
    node: Node, pair: Pair, kind: str, break_it: Callable[[Path], None]
) -> None:
    path = pair.path(node, kind)
    break_it(path)
    with pytest.raises(CorruptSnapshot) as caught:
        await node.wake(3, pair.second)
    assert caught.value.file == caught.value.public()["details"]["file"] == str(path.relative_to(node.store.root))
    assert node.store.live() == ()
    run, _ = await node.wake(3, pair.first)
    run.end()


@pytest.mark.parametrize("where", OFFSETS)
@pytest.mark.parametrize("kind", ["index", "devices", "segment", "lower", "layer"])
async def test_a_wake_finds_a_flipped_bit_of_every_kind_of_file(node: Node, pair: Pair, kind: str, where: float) -> None:
    path = pair.path(node, kind)
    flip(path, where)
    with pytest.raises(CorruptSnapshot) as caught:
        await node.wake(3, pair.second)
    assert caught.value.file == str(path.relative_to(node.store.root))


async def test_a_damaged_base_is_not_blamed_on_the_pages_that_lie_on_it(node: Node, pair: Pair) -> None:
    assert Verifier(node.store, lambda _file, _count: None).snapshot(pair.second, None).damage == ()
    flip(pair.path(node, "segment"), 0.5)
    assert len(Verifier(node.store, lambda _file, _count: None).snapshot(pair.second, None).damage) == 1


async def test_what_is_deleted_or_rewritten_meanwhile_is_not_damaged(node: Node, pair: Pair) -> None:
    """The check is told of files while it reads; here somebody else works at that moment."""
    done: list[str] = []

    def meanwhile(file: str, _count: int) -> None:
        if file.startswith("segments/") and not done:
            done.append(file)
            node.store.delete([pair.first])

    assert Verifier(node.store, meanwhile).snapshot(pair.second, node.base.ram).damage == ()
    assert done

    def rewrite(file: str, _count: int) -> None:
        """As a compaction does: another index, and the old one goes."""
        if file.endswith("devices.state") and len(done) == 1:
            done.append(file)
            before = node.store.manifest(pair.second)
            assert before.memory is not None
            old = node.store.snapshots / pair.second / before.memory.index.name
            old.rename(old.with_name("ram.other.index"))
            fact = replace(before.memory.index, name="ram.other.index")
            assert node.store.replace(before, replace(before, memory=replace(before.memory, index=fact)))

    assert Verifier(node.store, rewrite).snapshot(pair.second, node.base.ram).damage == ()
    assert len(done) == 2

    def remove(file: str, _count: int) -> None:
        if file.endswith("manifest.json"):
            node.store.delete([pair.second])

    with pytest.raises(NotFound):
        Verifier(node.store, remove).snapshot(pair.second, node.base.ram)


async def test_a_manifest_that_could_not_be_read_at_start_is_named(node: Node, pair: Pair) -> None:
    flip(node.store.snapshots / pair.second / "manifest.json", 0.5)
    node.store.open()
    found = check(node, pair.second)
    assert found == Found((Damage(f"snapshots/{pair.second}/manifest.json", found.damage[0].problem),), disk_intact=False)
    assert check(node, pair.first).damage == ()


async def test_the_record_and_the_layer_of_a_throwaway_do_not_outlive_its_process(node: Node, pair: Pair) -> None:
    before = files_of(node)
    await node.wake(3, pair.second, WorkspaceId(f"{THROWAWAY}_{'0' * 26}"))
    assert len(files_of(node) - before) == 2
    assert node.store.live() == (), "it is no workspace's"
    node.store.close()
    again = Node(node.home)
    assert len(again.store.open().debris) == 2
    assert files_of(again) == before
    assert check(again, pair.second).damage == ()
