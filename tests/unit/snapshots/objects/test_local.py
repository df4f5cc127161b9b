"""Snapshots of tiny machines go to the store and come back on another node, page by page."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import Conflict, CorruptSnapshot, NotFound, Shredded, Unavailable
from perdure.core.ids import BaseId, DiskId, SnapshotId, WorkspaceId
from perdure.machines.driver import PAGE_SIZE
from perdure.snapshots.layers import digest_of, disk_file
from perdure.snapshots.manifest import DEVICES, BaseFact, BaseRef, FileFact
from perdure.snapshots.merge import merge
from perdure.snapshots.objects.chunks import bytes_source, file_source
from perdure.snapshots.objects.keys import Keyring, PlainKeyring, TenantKeyring
from perdure.snapshots.objects.local import FACT, Mover, image_key, snapshot_key, snapshot_of
from perdure.snapshots.objects.upload import Contents
from perdure.snapshots.rebase import rebase
from perdure.wire.node import SnapshotFacts
from perdure.wire.objects import ItemKey, ItemState
from tests.fakes import deep_disk
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.disk import Crash, QuickDisk, RecordingDisk
from tests.fakes.objects import FakeObjects, Fault
from tests.fakes.tiny_machine import TinyMachine
from tests.fakes.tiny_node import NOW, Node, capture, check_crash, files_of
from tests.unit.snapshots.objects.stores import TENANT, Home

REF = BaseRef("image", "golden")


class Place:
    """A node with a way to the store."""

    def __init__(self, node: Node, objects: FakeObjects, catalogue: FakeCatalogue, keyring: Keyring | None = None) -> None:
        self.node = node
        clock = itertools.count(id(self)).__next__
        self.home = Home(objects, catalogue, keyring or PlainKeyring(), pack_bytes=200_000, clock=clock)
        self.mover = Mover(node.store, self.home.uploader, self.home.downloader, lambda ref: node.base.ram)


@pytest.fixture
def here(node: Node) -> Place:
    return Place(node, FakeObjects(), FakeCatalogue())


@pytest.fixture
def elsewhere(here: Place, tmp_path: Path) -> Callable[[], Place]:
    numbers = itertools.count()

    def make() -> Place:
        path = tmp_path / f"elsewhere{next(numbers)}"
        path.mkdir()
        other = Node(path)
        other.store.open()
        return Place(other, here.home.objects, here.home.catalogue, here.home.keyring)  # type: ignore[arg-type]

    return make


async def asleep(node: Node, generation: int = 1, source: SnapshotId | None = None) -> tuple[SnapshotFacts, TinyMachine]:
    run, machine = await node.wake(generation, source)
    machine.write_memory(slice(10, 90), generation)
    machine.write_memory(np.array([1, 2, 130, 131, 299]), 0)
    machine.write_memory(200, (np.arange(PAGE_SIZE) % 251).astype(np.uint8))
    machine.write_disk(b"hello" * generation)
    machine.devices = 40 + generation
    facts = await capture(run, machine, goes_on=False)
    run.end()
    return facts, machine


async def wakes_as(node: Node, facts: SnapshotFacts, machine: TinyMachine) -> None:
    node.store.verify(facts.snapshot_id, node.base.ram)
    again, woken = await node.wake(9, facts.snapshot_id, WorkspaceId("ws_check"))
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    assert woken.devices == machine.devices
    assert [path.name for path in woken.layers[:-1]] == [path.name for path in machine.layers]
    assert [path.read_bytes() for path in woken.layers[:-1]] == [path.read_bytes() for path in machine.layers]
    again.end()


async def test_a_snapshot_wakes_on_a_node_that_never_saw_it(here: Place, elsewhere: Callable[[], Place]) -> None:
    facts, machine = await asleep(here.node)
    item, moved = await here.mover.upload(facts.snapshot_id)
    assert item.state is ItemState.DURABLE
    assert 0 < moved.sent_bytes < 60 * PAGE_SIZE
    there = elsewhere()
    fetched = await there.mover.fetch(item.key)
    assert (fetched.snapshot_id, fetched.pages, fetched.generation, fetched.fingerprint) == (
        facts.snapshot_id,
        facts.pages,
        1,
        "fp",
    )
    await wakes_as(there.node, fetched, machine)
    assert await there.mover.fetch(item.key) == fetched, "a second time costs nothing"
    there.node.store.delete([facts.snapshot_id])
    assert files_of(there.node) == set()


async def test_a_child_costs_what_changed_and_shares_its_layers(here: Place, elsewhere: Callable[[], Place]) -> None:
    first, one = await asleep(here.node)
    _, whole = await here.mover.upload(first.snapshot_id)
    run, two = await here.node.wake(2, first.snapshot_id)
    two.write_memory(200, 5)
    second = await capture(run, two, goes_on=False)
    run.end()
    _, part = await here.mover.upload(second.snapshot_id)
    assert part.sent_bytes < whole.sent_bytes / 2
    assert part.reused > part.chunks / 2
    there = elsewhere()
    await there.mover.fetch(ItemKey(TENANT, second.snapshot_id))
    await there.mover.fetch(ItemKey(TENANT, first.snapshot_id))
    await wakes_as(there.node, second, two)
    await wakes_as(there.node, first, one)


async def test_a_snapshot_of_a_disk_only(here: Place, elsewhere: Callable[[], Place]) -> None:
    run, machine = await here.node.wake(1)
    machine.write_disk(b"only this")
    run.end(keep_layers=True)
    saved = here.node.store.salvage(run.spec.workspace_id, 1, SnapshotId(f"snp_{'9' * 26}"), NOW)
    assert saved is not None
    item, _ = await here.mover.upload(saved.snapshot_id)
    there = elsewhere()
    fetched = await there.mover.fetch(item.key)
    assert (fetched.has_memory, fetched.disk_total_bytes > 0) == (False, True)
    there.node.store.verify(fetched.snapshot_id)


async def test_layers_merged_while_they_are_uploaded(here: Place, elsewhere: Callable[[], Place]) -> None:
    """What is there is the disk before its merge; what is captured on it after that is another disk, and both are whole."""
    node = here.node
    (facts,), _ = await deep_disk.asleep(node, 9)
    before = deep_disk.layers_of(node, facts.snapshot_id)
    put, fewer = here.home.objects.put, list[int]()  # type: ignore[attr-defined]

    async def slow(name: str, data: bytes) -> None:
        if not fewer:
            fewer.append(merge(node.store, facts.snapshot_id, threading.Event()))
            assert set(before) < deep_disk.disks_of(node), "they are being read"
        await put(name, data)

    here.home.objects.put = slow  # type: ignore[method-assign]
    item, _ = await here.mover.upload(facts.snapshot_id)
    assert fewer == [1]
    assert deep_disk.disks_of(node) == set(deep_disk.layers_of(node, facts.snapshot_id))
    run, machine = await node.wake(2, facts.snapshot_id)
    machine.write_disk(b"later", 99)
    child = await capture(run, machine, goes_on=False)
    run.end()
    later, _ = await here.mover.upload(child.snapshot_id)
    for keys in ((item.key, later.key), (later.key, item.key)):
        there = elsewhere()
        for key in keys:
            await there.mover.fetch(key)
        assert deep_disk.layers_of(there.node, facts.snapshot_id) == before
        assert len(deep_disk.layers_of(there.node, child.snapshot_id)) == 9
        for name in (facts.snapshot_id, child.snapshot_id):
            there.node.store.verify(name, there.node.base.ram)
            assert await deep_disk.disk_of(there.node, name, 9) == deep_disk.wanted(9)


async def test_a_damaged_snapshot_is_not_uploaded(here: Place) -> None:
    facts, _ = await asleep(here.node)
    (segment,) = here.node.store.segments.iterdir()
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptSnapshot, match=segment.name):
        await here.mover.upload(facts.snapshot_id)
    with pytest.raises(NotFound):
        await here.mover.fetch(ItemKey(TENANT, facts.snapshot_id))
    with pytest.raises(NotFound):
        await here.mover.upload(SnapshotId("snp_none"))


async def test_a_snapshot_may_be_deleted_while_it_is_uploaded(here: Place, elsewhere: Callable[[], Place]) -> None:
    facts, machine = await asleep(here.node)
    layers = {path.name: path.read_bytes() for path in machine.layers[1:]}
    put, deleted = here.home.objects.put, list[int]()  # type: ignore[attr-defined]

    async def slow(name: str, data: bytes) -> None:
        if not deleted:
            deleted.append(here.node.store.delete([facts.snapshot_id]))
        await put(name, data)

    here.home.objects.put = slow  # type: ignore[method-assign]
    item, _ = await here.mover.upload(facts.snapshot_id)
    assert files_of(here.node) == set(), "and then nothing of it is left here"
    there = elsewhere()
    fetched = await there.mover.fetch(item.key)
    assert {path.name: path.read_bytes() for path in there.node.store.disks.iterdir()} == layers
    there.node.store.verify(fetched.snapshot_id, there.node.base.ram)


async def test_a_fetch_that_fails_leaves_nothing(here: Place, elsewhere: Callable[[], Place]) -> None:
    facts, _ = await asleep(here.node)
    item, _ = await here.mover.upload(facts.snapshot_id)
    for name in [name for name in here.home.objects.data if "/packs/" in name]:  # type: ignore[attr-defined]
        there, whole = elsewhere(), here.home.objects.data[name]  # type: ignore[attr-defined]
        here.home.objects.data[name] = whole[:200] + bytes((whole[200] ^ 1,)) + whole[201:]  # type: ignore[attr-defined]
        with pytest.raises(CorruptSnapshot):
            await there.mover.fetch(item.key)
        assert files_of(there.node) == set()
        here.home.objects.data[name] = whole  # type: ignore[attr-defined]
        await there.mover.fetch(item.key)


@pytest.mark.parametrize("what", ["devices", "layer", "base"])
async def test_a_forged_snapshot_touches_nothing_outside_of_the_store(
    here: Place, elsewhere: Callable[[], Place], tmp_path: Path, what: str
) -> None:
    """Whoever can write into the store writes manifests whose checksums hold."""
    facts, _ = await asleep(here.node)
    there = elsewhere()
    outside = {name: there.node.store.root.parent / name for name in ("devices", "layer.qcow2", "base.ram")}
    for path in outside.values():
        path.write_bytes(b"somebody's")
    told = here.node.store.manifest(facts.snapshot_id)
    assert told.memory is not None
    alone = replace(told, layers=(), memory=replace(told.memory, devices=FileFact(DEVICES, 100, digest_of(b"x" * 100))))
    assert alone.memory is not None
    if what == "devices":
        forged = replace(alone, memory=replace(alone.memory, devices=replace(alone.memory.devices, name="../../../new")))
    elif what == "layer":
        forged = replace(told, layers=(replace(told.layers[0], disk_id=DiskId("../../layer")),))
    else:
        own = BaseFact(BaseId("../../base"), PAGE_SIZE, PAGE_SIZE, "0")
        forged = replace(alone, memory=replace(alone.memory, base=replace(alone.memory.base, private=own)))
    sources = [bytes_source(name, b"x" * 100) for name in (DEVICES, "layer.qcow2", "base.ram")]
    contents = Contents(snapshot_key(told), sources, (), {FACT: json.loads(forged.to_bytes())})
    item, _ = await here.home.uploader.upload(contents)
    with pytest.raises(CorruptSnapshot) as caught:
        await there.mover.fetch(item.key)
    assert {path.read_bytes() for path in outside.values()} == {b"somebody's"}
    assert not (there.node.store.root.parent / "new").exists()
    assert files_of(there.node) == set() and "is no name of" in caught.value.message


async def test_another_base_is_refused(here: Place, elsewhere: Callable[[], Place]) -> None:
    facts, _ = await asleep(here.node)
    item, _ = await here.mover.upload(facts.snapshot_id)
    there = elsewhere()
    path = there.node.home / "small.base"
    path.write_bytes(bytes(20 * PAGE_SIZE))
    small = Mover(there.node.store, there.mover.uploader, there.mover.downloader, lambda ref: type(there.node.base.ram)(path))
    with pytest.raises(CorruptSnapshot, match="memory"):
        await small.fetch(item.key)
    assert files_of(there.node) == set()


async def test_a_crash_at_any_write_of_a_fetch_leaves_nothing_or_all(here: Place, tmp_path: Path) -> None:
    facts, machine = await asleep(here.node)
    item, _ = await here.mover.upload(facts.snapshot_id)
    assert await fetch_with_crashes(here, item.key, machine, tmp_path) > 8


async def fetch_with_crashes(here: Place, key: ItemKey, machine: TinyMachine, tmp_path: Path, *, afresh: bool = False) -> int:
    """Fetch into an empty node, or ``afresh`` over what is there, and look at what every crash on the way would have left;
    returns how many writes there were."""
    home = tmp_path / "recorded"
    home.mkdir()
    disk = RecordingDisk(home)
    other = Node(home, disk)
    other.store.open()
    there = Place(other, here.home.objects, here.home.catalogue)  # type: ignore[arg-type]
    since = len(disk.operations)
    fetched = await there.mover.fetch(key)
    acknowledged = [(len(disk.operations), len(disk.operations), fetched, machine.memory.ram)]
    if afresh:
        since = len(disk.operations)
        await there.mover.adopt(await there.mover.downloader.open(key), afresh=True)
    for after in range(since, len(disk.states)):
        for crash in Crash:
            await check_crash(disk, other, acknowledged, (after, crash, tmp_path / f"c{after}{crash}"), after)
    return len(disk.states) - since


async def rebased(node: Node) -> tuple[SnapshotFacts, TinyMachine]:
    """On a base of its own, with pages that differ from that."""
    facts, _ = await asleep(node)
    assert rebase(node.store, facts.snapshot_id, node.base.ram, threading.Event())
    run, machine = await node.wake(2, facts.snapshot_id)
    machine.write_memory([5, 250], 8)
    machine.write_memory([40, 200], 0)
    machine.devices = 77
    child = await capture(run, machine, goes_on=False)
    run.end()
    return child, machine


async def test_a_private_base_goes_with_its_snapshots_and_is_sent_and_kept_once(
    here: Place, elsewhere: Callable[[], Place]
) -> None:
    facts, machine = await rebased(here.node)
    parent = here.node.store.manifest(facts.snapshot_id).parent_id
    assert parent is not None
    _, whole = await here.mover.upload(parent)
    item, part = await here.mover.upload(facts.snapshot_id)
    assert part.sent_bytes < whole.sent_bytes / 3
    there = elsewhere()
    fetched = await there.mover.fetch(item.key)
    await wakes_as(there.node, fetched, machine)
    (base,) = there.node.store.bases.iterdir()
    assert base.stat().st_mode & 0o777 == 0o444
    (origin,) = here.node.store.bases.iterdir()
    assert (base.name, base.read_bytes()) == (origin.name, origin.read_bytes())
    inode = base.stat().st_ino
    await there.mover.fetch(ItemKey(TENANT, parent))
    assert base.stat().st_ino == inode, "the second snapshot uses what the first has brought"
    there.node.store.verify(parent)
    there.node.store.delete([facts.snapshot_id])
    assert base.exists()
    there.node.store.delete([parent])
    assert files_of(there.node) == set()


async def test_a_damaged_private_base_is_neither_sent_nor_taken(here: Place, elsewhere: Callable[[], Place]) -> None:
    facts, _ = await rebased(here.node)
    item, _ = await here.mover.upload(facts.snapshot_id)
    (base,) = here.node.store.bases.iterdir()
    good = base.read_bytes()
    base.chmod(0o644)
    base.write_bytes(good[:9000] + bytes([good[9000] ^ 1]) + good[9001:])
    with pytest.raises(CorruptSnapshot, match=base.name):
        await here.mover.upload(facts.snapshot_id)
    there = elsewhere()
    debris = there.node.store.bases / base.name
    debris.write_bytes(b"half of it")
    await there.mover.fetch(item.key)
    assert debris.read_bytes() == good


async def test_a_damaged_private_base_is_mended_by_a_fetch(here: Place) -> None:
    """Also for the other snapshot on it, which was not fetched."""
    facts, machine = await rebased(here.node)
    item, _ = await here.mover.upload(facts.snapshot_id)
    (base,) = here.node.store.bases.iterdir()
    base.chmod(0o644)
    data = bytearray(base.read_bytes())
    data[9000] ^= 1
    base.write_bytes(data)
    here.node.store.delete([facts.snapshot_id])
    fetched = await here.mover.fetch(item.key)
    await wakes_as(here.node, fetched, machine)
    for one in here.node.store.complete():
        here.node.store.verify(one.snapshot_id)


async def test_a_damaged_layer_is_mended_by_a_fetch_also_for_others_on_it(here: Place) -> None:
    first, one = await asleep(here.node)
    second, two = await asleep(here.node, 2, first.snapshot_id)
    item, _ = await here.mover.upload(second.snapshot_id)
    layer = here.node.store.disks / disk_file(here.node.store.manifest(first.snapshot_id).disk_ids[0])
    data = bytearray(layer.read_bytes())
    data[-2000] ^= 1
    layer.write_bytes(data)
    here.node.store.delete([second.snapshot_id])
    fetched = await here.mover.fetch(item.key)
    await wakes_as(here.node, fetched, two)
    await wakes_as(here.node, first, one)


async def test_a_crash_at_any_write_of_a_fetch_of_a_private_base_leaves_nothing_or_all(here: Place, tmp_path: Path) -> None:
    facts, machine = await rebased(here.node)
    item, _ = await here.mover.upload(facts.snapshot_id)
    await fetch_with_crashes(here, item.key, machine, tmp_path)


async def test_a_fetch_afresh_that_fails_leaves_what_is_here(here: Place) -> None:
    facts, machine = await asleep(here.node)
    item, _ = await here.mover.upload(facts.snapshot_id)
    stored = await here.mover.downloader.open(item.key)
    before = files_of(here.node)
    objects = here.home.objects.data  # type: ignore[attr-defined]
    for name in [name for name in objects if "/packs/" in name]:
        whole = objects[name]
        for at in range(100, len(whole), len(whole) // 12):
            objects[name] = whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :]
            with suppress(CorruptSnapshot):
                await here.mover.adopt(stored, afresh=True)
                before = files_of(here.node)  # what it did not read was damaged
            assert files_of(here.node) == before
        objects[name] = whole
    await wakes_as(here.node, facts, machine)
    await here.mover.adopt(stored, afresh=True)
    await wakes_as(here.node, facts, machine)
    here.node.store.delete([facts.snapshot_id])
    assert files_of(here.node) == set()


@pytest.mark.parametrize("own_base", [False, True])
async def test_a_crash_at_any_write_of_a_fetch_afresh_leaves_one_whole_copy(here: Place, tmp_path: Path, own_base: bool) -> None:
    facts, machine = await (rebased if own_base else asleep)(here.node)
    item, _ = await here.mover.upload(facts.snapshot_id)
    assert await fetch_with_crashes(here, item.key, machine, tmp_path, afresh=True) > 8


@pytest.mark.parametrize("kind", ["disks", "bases"])
async def test_a_damaged_file_keeps_its_place_until_another_is_whole(here: Place, kind: str) -> None:
    facts, machine = await rebased(here.node)
    item, _ = await here.mover.upload(facts.snapshot_id)
    stored = await here.mover.downloader.open(item.key)
    path = sorted((here.node.store.root / kind).iterdir())[0]
    data = bytearray(path.read_bytes())
    data[9000 if kind == "bases" else -2000] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    objects = here.home.objects
    objects.faults = lambda operation, _: Fault.SHORT if operation == "read" else None  # type: ignore[attr-defined]
    with pytest.raises((CorruptSnapshot, Unavailable)):
        await here.mover.adopt(stored, afresh=True)
    assert path.read_bytes() == data, "somebody may want to look at it"
    objects.faults = lambda *_: None  # type: ignore[attr-defined]
    await here.mover.adopt(stored, afresh=True)
    await wakes_as(here.node, facts, machine)


async def test_an_image_and_its_snapshots(here: Place) -> None:
    facts, _ = await asleep(here.node)
    key, image = image_key(REF), here.node.home / "image"
    with pytest.raises(Conflict, match=key.name):
        await here.mover.upload(facts.snapshot_id, [key])
    files = [file_source(path.name, path) for path in sorted(image.iterdir())]
    await here.home.uploader.upload(Contents(key, files))
    item, _ = await here.mover.upload(facts.snapshot_id, [key])
    assert item.needs == (key,)
    back = here.node.home / "back"
    await here.home.downloader.fetch_file(await here.home.downloader.open(key), "ram.base", back)
    assert back.read_bytes() == (image / "ram.base").read_bytes()
    assert image_key(BaseRef("image", None)) != key


async def test_without_any_database_everything_is_found_again(here: Place, elsewhere: Callable[[], Place]) -> None:
    facts, machine = await asleep(here.node)
    await here.mover.upload(facts.snapshot_id)
    there = elsewhere()
    there.home = Home(here.home.objects, FakeCatalogue())
    blind = Mover(there.node.store, there.home.uploader, there.home.downloader, lambda ref: there.node.base.ram)
    (found,) = (await there.home.downloader.survey(TENANT)).items
    told = snapshot_of(found)
    assert (told.workspace_id, told.tenant_id, told.generation, told.parent_id) == ("ws_one", "ten_a", 1, None)
    assert snapshot_key(told) == found.manifest.key
    await wakes_as(there.node, await blind.adopt(found), machine)


async def test_encrypted_snapshots_come_back_and_shredded_ones_do_not(here: Place, node: Node, tmp_path: Path) -> None:
    ring = TenantKeyring(tmp_path / "keys", b"k" * 32)
    sealed = Place(node, here.home.objects, here.home.catalogue, ring)  # type: ignore[arg-type]
    facts, machine = await asleep(node)
    item, _ = await sealed.mover.upload(facts.snapshot_id)
    (tmp_path / "there").mkdir()
    other = Node(tmp_path / "there", QuickDisk())
    other.store.open()
    there = Place(other, here.home.objects, here.home.catalogue, TenantKeyring(tmp_path / "keys", b"k" * 32))  # type: ignore[arg-type]
    await wakes_as(other, await there.mover.fetch(item.key), machine)
    await asyncio.to_thread(other.store.delete, [facts.snapshot_id])
    ring.shred(TENANT)
    there = Place(other, here.home.objects, here.home.catalogue, TenantKeyring(tmp_path / "keys", b"k" * 32))  # type: ignore[arg-type]
    with pytest.raises(Shredded):
        await there.mover.fetch(item.key)
