"""Merge: the same disk on fewer layers, shared ones left to their users, whole after every crash."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import CorruptSnapshot, NoSpace, NotFound
from perdure.core.ids import DiskId, SnapshotId, WorkspaceId
from perdure.snapshots import merge as merging
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.clusters import Union, Written
from perdure.snapshots.layers import LayerFacts, create_layer, disk_file
from perdure.snapshots.manifest import DiskFact, Manifest
from perdure.snapshots.merge import Link, choose, is_deep, merge
from perdure.snapshots.rebase import rebase
from perdure.snapshots.start import begin
from perdure.snapshots.store import SnapshotStore
from perdure.snapshots.verify import Verifier
from perdure.snapshots.weight import weigh
from perdure.wire.node import SnapshotFacts
from tests.fakes.deep_disk import asleep, disk_of, disks_of, layers_of, wanted
from tests.fakes.disk import QuickDisk, RecordingDisk
from tests.fakes.tiny_machine import TinyMachine
from tests.fakes.tiny_node import NOW, Node, capture, files_of, snapshot_id

NEVER = threading.Event()
OTHER = WorkspaceId("ws_other")


def snapshot_of_files(node: Node) -> dict[str, bytes]:
    return {name: (node.store.root / name).read_bytes() for name in files_of(node)}


@pytest.mark.parametrize(("count", "fewer"), [(8, 0), (9, 1), (16, 8), (40, 32)])
async def test_a_workspace_sleeps_on_eight_layers_at_most(node: Node, count: int, fewer: int) -> None:
    (facts,), machine = await asleep(node, count)
    before = node.store.manifest(facts.snapshot_id)
    assert is_deep(before) == (fewer > 0)
    assert merge(node.store, facts.snapshot_id, NEVER) == fewer
    manifest = node.store.manifest(facts.snapshot_id)
    assert len(manifest.layers) == count - fewer <= 8
    assert manifest.layers[-1] == before.layers[-1], "what the snapshot added stays known"
    assert manifest.facts().disk_bytes == facts.disk_bytes
    assert replace(manifest, layers=before.layers) == before
    assert disks_of(node) == set(manifest.disk_ids), "what nobody names is gone"
    assert merge(node.store, facts.snapshot_id, NEVER) == 0
    assert node.store.open().debris == ()
    assert node.store.verify(facts.snapshot_id, node.base.ram) == manifest
    assert await disk_of(node, facts.snapshot_id, count) == wanted(count)
    run, woken = await node.wake(2, facts.snapshot_id)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    woken.write_disk(b"later", 99)
    child = await capture(run, woken, goes_on=False)
    run.end()
    node.store.delete([facts.snapshot_id])
    again, last = await node.wake(3, child.snapshot_id)
    assert (last.read_disk(99), last.read_disk(10)) == (b"later", b"layer 0")
    again.end()
    node.store.delete([child.snapshot_id])
    assert files_of(node) == set()


async def test_shared_layers_stay_with_their_other_users(node: Node) -> None:
    kept, _ = await asleep(node, 12, keep=3)
    frozen = {path.name: path.read_bytes() for path in node.store.disks.iterdir()}
    older, newest = kept[:2], kept[2]
    before = [node.store.manifest(facts.snapshot_id) for facts in older]
    assert merge(node.store, newest.snapshot_id, NEVER) == 4
    assert [node.store.manifest(facts.snapshot_id) for facts in older] == before
    for name, data in frozen.items():
        assert (node.store.disks / name).read_bytes() == data, "a frozen layer is never written"
    for facts, count in zip(kept, (10, 11, 12), strict=True):
        assert (await disk_of(node, facts.snapshot_id, count))[0] == wanted(count)[0]
        assert node.store.verify(facts.snapshot_id, node.base.ram)
    own = weigh(node.store, [newest.snapshot_id])[newest.snapshot_id].own_bytes
    merged = node.store.manifest(newest.snapshot_id).layers[0]
    assert own >= merged.stored
    node.store.delete([facts.snapshot_id for facts in older])
    assert disks_of(node) == set(layers_of(node, newest.snapshot_id))


async def test_a_running_fork_keeps_the_layers_that_it_was_started_on(node: Node) -> None:
    (facts,), _ = await asleep(node, 9)
    run, fork = await node.wake(1, facts.snapshot_id, OTHER)
    chain = layers_of(node, facts.snapshot_id)
    assert merge(node.store, facts.snapshot_id, NEVER) == 1
    assert set(chain) < disks_of(node)
    assert fork.read_disk(10) == b"layer 0"
    fork.write_disk(b"fork", 50)
    child = await capture(run, fork, goes_on=False)
    run.end()
    assert layers_of(node, child.snapshot_id)[:9] == chain
    node.store.delete([facts.snapshot_id])
    assert (await disk_of(node, child.snapshot_id, 9))[1:] == wanted(9)[1:]
    node.store.delete([child.snapshot_id])
    assert files_of(node) == set()


async def test_a_machine_woken_during_a_merge_goes_on_where_it_was(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """And when it is lost without having written anything, there is nothing to salvage: not the layers it was started on."""
    for writes in (True, False):
        (facts,), machine = await asleep(node, 9)
        runs = []
        write = merging._write

        def late(*given: object, _write: Callable[..., Written] = write, _facts: SnapshotFacts = facts) -> Written:
            runs.append(begin(node.store, node.spec(2), _facts.snapshot_id, memory=True))  # noqa: B023 - called in this turn
            return _write(*given)

        monkeypatch.setattr(merging, "_write", late)
        assert merge(node.store, facts.snapshot_id, NEVER) == 1
        monkeypatch.setattr(merging, "_write", write)
        woken = TinyMachine(type(machine.memory)(node.base.ram.pages))
        await runs[0].restore(woken)  # type: ignore[arg-type]
        assert woken.read_disk() == b"newest 8"
        if writes:
            woken.write_disk(b"news", 3)
        runs[0].end(keep_layers=True)
        node.store.open()  # as after a crash, in a process that never saw the old manifest
        saved = node.store.salvage(facts.workspace_id, 2, snapshot_id(), NOW)
        assert (saved is not None) == writes
        if saved is not None:
            names = layers_of(node, saved.snapshot_id)
            assert len(names) == 10
            run = begin(node.store, node.spec(3), saved.snapshot_id, memory=False)
            assert len(run.chain().layers) == 12
            run.end()
            node.store.delete([saved.snapshot_id])
        assert await disk_of(node, facts.snapshot_id, 9) == wanted(9)
        node.store.delete([facts.snapshot_id])
        assert files_of(node) == set()


async def test_a_damaged_layer_of_a_lost_machine_is_told_though_no_snapshot_names_it_any_more(node: Node) -> None:
    (facts,), _ = await asleep(node, 9)
    chain = layers_of(node, facts.snapshot_id)
    run, fork = await node.wake(1, facts.snapshot_id, OTHER)
    fork.write_disk(b"news")
    merge(node.store, facts.snapshot_id, NEVER)
    run.end(keep_layers=True)
    node.store.open()
    lost = next(name for name in chain if name not in layers_of(node, facts.snapshot_id))
    os.truncate(node.store.disks / disk_file(lost), 50)
    with pytest.raises(CorruptSnapshot, match=lost):
        node.store.salvage(OTHER, 1, snapshot_id(), NOW)
    assert node.store.live(), "it can still be looked at by hand"


# ------------------------------------------------------------------------------------------------------- what is chosen


def link(stored: int, *, own: bool = True, virtual: int = 1, plain: bool = True) -> Link:
    return Link(DiskFact(DiskId("dsk_x"), stored, stored, ""), own, LayerFacts(virtual, has_data=True, is_plain=plain))


@pytest.mark.parametrize(
    ("chain", "most", "part"),
    [
        ([link(1)] * 3, 3, None),
        ([link(1)] * 4, 3, slice(0, 2)),  # the oldest of what costs the same
        ([link(1)] * 9, 3, slice(0, 7)),
        ([link(900), link(5), link(4), link(50)], 3, slice(1, 3)),  # not what is large
        ([link(5, own=False), link(5), link(5), link(5)], 3, slice(1, 3)),  # what goes, rather than what stays
        ([link(5, own=False)] * 4, 3, slice(0, 2)),
        ([link(9), link(9), link(1), link(1)], 3, slice(1, 3)),  # not the newest, which is cheap
        ([link(1), link(1, virtual=2), link(9, virtual=2), link(1, virtual=2)], 3, slice(1, 3)),  # the disk grew
        ([link(1, plain=False), link(1), link(1, plain=False), link(7), link(9), link(1)], 2, slice(3, 5)),  # fewer than wanted
        ([link(1, plain=False)] * 5, 3, None),
        ([link(1, virtual=size) for size in range(9)], 3, None),
        ([link(1)] * 3, 1, slice(0, 2)),
        ([link(1)] * 2, 1, None),
    ],
)
def test_what_costs_least_is_merged(chain: list[Link], most: int, part: slice | None) -> None:
    assert choose(chain, most) == part


async def test_a_layer_of_another_size_stays_between_what_is_merged(node: Node) -> None:
    (facts,), _ = await asleep(node, 12)
    manifest = node.store.manifest(facts.snapshot_id)
    large = node.store.disks / disk_file(manifest.disk_ids[5])
    large.unlink()
    create_layer(large, 9 << 30)
    layers = list(manifest.layers)
    node.store._frozen.pop(layers[5].disk_id)
    layers[5] = node.store.freeze_layer(layers[5].disk_id)
    node.store.publish(replace(manifest, layers=tuple(layers)))
    assert merge(node.store, facts.snapshot_id, NEVER) == 4
    after = node.store.manifest(facts.snapshot_id).disk_ids
    assert (len(after), manifest.disk_ids[5] in after) == (8, True)
    node.store.verify(facts.snapshot_id, node.base.ram)


# ------------------------------------------------------------------------------------------------------- what stops it


async def test_enough_at_any_moment_leaves_everything_as_it_was(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (facts,), _ = await asleep(node, 10)
    before = snapshot_of_files(node)
    enough, left = threading.Event(), [0]
    table, write = Union._table, Union.write

    def looked(self: Union, number: int, **named: bool) -> object:
        left[0] -= 1
        if left[0] == 0:
            enough.set()
        return table(self, number, **named)

    def written(self: Union, *given: object) -> Written:
        done = write(self, *given)  # type: ignore[arg-type]
        if left[0] > 0:
            enough.set()
        return done

    monkeypatch.setattr(Union, "_table", looked)
    monkeypatch.setattr(Union, "write", written)
    for passes in (1, 2, 100):  # while it counts, while it writes, and when it is about to be named
        left[0] = passes
        enough.clear()
        assert merge(node.store, facts.snapshot_id, enough) == 0
        assert enough.is_set()
        assert snapshot_of_files(node) == before
    assert merge(node.store, facts.snapshot_id, enough) == 0
    assert snapshot_of_files(node) == before


async def test_enough_while_layers_are_checked(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (facts,), _ = await asleep(node, 10)
    enough = threading.Event()
    checksum = merging.disk_layers.checksum

    def checking(path: Path, told: Callable[[int], None]) -> str:
        enough.set()
        return checksum(path, told)

    monkeypatch.setattr(merging.disk_layers, "checksum", checking)
    monkeypatch.setattr(merging, "Union", None)
    assert merge(node.store, facts.snapshot_id, enough) == 0


async def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path) -> None:
    disk = RecordingDisk(tmp_path)
    disk.keeps_states = False
    node = Node(tmp_path, disk)
    node.store.open()
    (facts,), _ = await asleep(node, 10)
    before = snapshot_of_files(node)
    writes = 0
    for turn in range(1, 100):
        disk.full_at, disk.met_full = (lambda _name: True, turn), None
        try:
            merge(node.store, facts.snapshot_id, NEVER)
        except NoSpace:
            assert disk.met_full
            writes += 1
        else:
            break
        finally:
            disk.make_room()
        assert snapshot_of_files(node) == before
    assert writes > 6, "each write of the layer, and that of the manifest"
    disk.full_at = None
    assert len(layers_of(node, facts.snapshot_id)) == 8


class _Unsynced(QuickDisk):
    """From some time on, a directory of a snapshot cannot be synced: its names have changed, but perhaps not for good."""

    fails = False

    def sync_dir(self, path: Path) -> None:
        if self.fails and path.parent.name == "snapshots":
            raise OSError(errno.EIO, "Input/output error")


def settle(store: SnapshotStore, name: SnapshotId, enough: threading.Event) -> bool:
    return rebase(store, name, BaseRam(store.root.parent / "image" / "ram.base"), enough)


@pytest.mark.parametrize("work", [merge, settle])
@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_manifest_that_may_not_last_costs_neither_what_it_names_nor_what_it_replaced(
    tmp_path: Path, work: Callable[..., object], is_kept: bool
) -> None:
    disk = _Unsynced()
    node = Node(tmp_path, disk)
    node.store.open()
    (facts,), machine = await asleep(node, 9)
    path = node.store.snapshots / facts.snapshot_id / "manifest.json"
    before = path.read_bytes()
    indexes = {found.name: found.read_bytes() for found in path.parent.glob("*.index")}
    replace_manifest = SnapshotStore.publish

    def publish(self: SnapshotStore, manifest: Manifest) -> None:
        disk.fails = True
        replace_manifest(self, manifest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnapshotStore, "publish", publish)
        with pytest.raises(OSError, match="Input/output"):
            work(node.store, facts.snapshot_id, NEVER)
    assert path.read_bytes() != before
    node.store.sweep()
    disk.fails = False
    node.store.close()
    if not is_kept:
        path.write_bytes(before)
    assert all((path.parent / name).read_bytes() == data for name, data in indexes.items())
    again = Node(tmp_path)
    assert again.store.open().damaged == ()
    assert await disk_of(again, facts.snapshot_id, 9) == wanted(9)
    run, woken = await again.wake(3, facts.snapshot_id)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    run.end()


async def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RecordingDisk(tmp_path)
    disk.keeps_states = False
    node = Node(tmp_path, disk)
    node.store.open()
    (facts,), _ = await asleep(node, 10)
    before, since = snapshot_of_files(node), len(disk.operations)
    monkeypatch.setattr(merging, "free_bytes", lambda _path: 30_000)
    with pytest.raises(NoSpace, match="too little room"):
        merge(node.store, facts.snapshot_id, NEVER)
    assert len(disk.operations) == since
    assert snapshot_of_files(node) == before


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "grown"])
async def test_damage_is_never_copied(node: Node, damage: str) -> None:
    (facts,), _ = await asleep(node, 9)
    path = node.store.disks / disk_file(layers_of(node, facts.snapshot_id)[1])
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[-2000] ^= 1
    path.write_bytes(data[:-1] if damage == "cut" else data + b"x" if damage == "grown" else data)
    if damage == "gone":
        path.unlink()
    before = snapshot_of_files(node)
    with pytest.raises(CorruptSnapshot, match=path.name) as caught:
        merge(node.store, facts.snapshot_id, NEVER)
    assert caught.value.file == f"disks/{path.name}"
    assert snapshot_of_files(node) == before


async def test_a_snapshot_that_is_not_there_or_went_meanwhile(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound):
        merge(node.store, SnapshotId("snp_none"), NEVER)
    (facts,), _ = await asleep(node, 9)
    write = merging._write

    def deleting(*given: object) -> Written:
        written = write(*given)  # type: ignore[arg-type]
        node.store.delete([facts.snapshot_id])
        return written

    monkeypatch.setattr(merging, "_write", deleting)
    assert merge(node.store, facts.snapshot_id, NEVER) == 0
    assert files_of(node) == set()


async def test_a_disk_without_memory_is_merged_too(node: Node) -> None:
    (facts,), _ = await asleep(node, 9)
    run, machine = await node.wake(2, facts.snapshot_id)
    machine.write_disk(b"x", 77)
    run.end(keep_layers=True)
    saved = node.store.salvage(run.spec.workspace_id, 2, snapshot_id(), NOW)
    assert saved is not None
    node.store.delete([facts.snapshot_id])
    assert merge(node.store, saved.snapshot_id, NEVER) == 2
    run = begin(node.store, node.spec(3), saved.snapshot_id, memory=False)
    assert len(run.chain().layers) == 10
    run.end()


async def test_a_layer_that_is_being_read_stays_until_it_has_been(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the verifier over a snapshot whose layers are merged meanwhile finds nothing wrong."""
    (facts,), _ = await asleep(node, 9)
    read, fewer = Verifier._layer, []

    def reading(self: Verifier, fact: DiskFact) -> object:
        if not fewer:
            fewer.append(merge(node.store, facts.snapshot_id, NEVER))
        return read(self, fact)

    monkeypatch.setattr(Verifier, "_layer", reading)
    assert Verifier(node.store, lambda _file, _count: None).snapshot(facts.snapshot_id, node.base.ram).damage == ()
    assert fewer == [1]
    assert disks_of(node) == set(layers_of(node, facts.snapshot_id))
