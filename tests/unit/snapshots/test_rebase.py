"""Rebase: the same memory on a base of its own, shared by forks, gone with the last that names it, whole after every crash."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import CorruptSnapshot, InvalidRequest, NoSpace, NotFound
from perdure.core.ids import BaseId, SnapshotId, WorkspaceId
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages
from perdure.snapshots import bases
from perdure.snapshots import rebase as rebasing
from perdure.snapshots.baseram import BaseRam, pages_with_data
from perdure.snapshots.bases import check_base, checksum
from perdure.snapshots.compact import compact
from perdure.snapshots.manifest import BaseFact, Manifest
from perdure.snapshots.rebase import is_worthwhile, rebase
from perdure.snapshots.start import begin
from perdure.snapshots.verify import Verifier
from perdure.snapshots.weight import weigh
from perdure.wire.node import MachineSize, SnapshotFacts
from tests.fakes.disk import Crash, QuickDisk, RecordingDisk
from tests.fakes.tiny_machine import TinyMachine
from tests.fakes.tiny_node import NOW, PAGES, Node, capture, check_crash, files_of, snapshot_id

NEVER = threading.Event()


async def asleep(node: Node) -> tuple[SnapshotFacts, TinyMachine]:
    """With pages of every kind: located, zero over a base that is not, back at the base's, never touched."""
    run, machine = await node.wake(1)
    rng = np.random.default_rng(1)
    machine.write_memory(slice(0, 200), rng.integers(1, 255, (200, PAGE_SIZE), np.uint8))
    older = await capture(run, machine)
    machine.write_memory(slice(40, 60), rng.integers(1, 255, (20, PAGE_SIZE), np.uint8))
    machine.write_memory([100, 101, 250, 251], 0)
    machine.write_memory(120, node.base.ram.pages[120])
    few = machine.memory.ram[260:270].copy()
    few[:, 8:16] = 3
    machine.write_memory(slice(260, 270), few)
    machine.write_disk(b"data")
    facts = await capture(run, machine, goes_on=False)
    run.end()
    node.store.delete([older.snapshot_id])
    return facts, machine


def base_of(node: Node, name: SnapshotId) -> BaseFact:
    memory = node.store.manifest(name).memory
    assert memory is not None and memory.base.private is not None
    return memory.base.private


async def test_a_workspace_wakes_on_its_own_base_as_it_was(node: Node) -> None:
    facts, machine = await asleep(node)
    assert rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    manifest = node.store.manifest(facts.snapshot_id)
    fact = base_of(node, facts.snapshot_id)
    path = node.store.bases / f"{fact.base_id}.ram"
    assert np.array_equal(np.fromfile(path, np.uint8).reshape(-1, PAGE_SIZE), machine.memory.ram)
    assert path.stat().st_mode & 0o777 == 0o444
    assert manifest.memory is not None
    assert (manifest.memory.base.golden, dict(manifest.memory.segments), manifest.facts().pages) == (None, {}, 0)
    assert manifest.facts().memory_bytes == facts.memory_bytes, "what the capture added is history"
    assert Manifest.from_bytes(manifest.to_bytes(), "x") == manifest
    assert node.store.open().debris == ()
    assert node.store.verify(facts.snapshot_id) == manifest
    run, woken = await node.wake(2, facts.snapshot_id)
    assert woken.memory.written_pages().size == 0, "nothing has to be written into the machine"
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    assert woken.devices == machine.devices
    run.end()


async def test_zero_pages_are_holes_and_the_rest_is_not_read(node: Node) -> None:
    facts, machine = await asleep(node)
    rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    fact = base_of(node, facts.snapshot_id)
    used = int(machine.memory.ram.any(axis=1).sum())
    assert fact.size == PAGES * PAGE_SIZE
    assert used * PAGE_SIZE <= fact.stored <= (used + 4) * PAGE_SIZE < fact.size, "with what the file system needs for itself"
    there = pages_with_data(node.store.bases / f"{fact.base_id}.ram", PAGES)
    assert np.array_equal(there, machine.memory.ram.any(axis=1))


async def test_what_is_captured_later_are_differences_from_the_new_base(node: Node) -> None:
    facts, _ = await asleep(node)
    rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    fact = base_of(node, facts.snapshot_id)
    run, machine = await node.wake(2, facts.snapshot_id)
    machine.write_memory([5, 6], 0)
    machine.write_memory([100, 299], 7)
    child = await capture(run, machine, goes_on=False)
    run.end()
    assert child.pages == 4
    assert base_of(node, child.snapshot_id) == fact
    assert weigh(node.store, [child.snapshot_id])[child.snapshot_id].shared_bytes >= fact.stored
    node.store.delete([facts.snapshot_id])
    assert (node.store.bases / f"{fact.base_id}.ram").exists(), "the child names it"
    own = weigh(node.store, [child.snapshot_id])[child.snapshot_id].own_bytes
    assert own >= fact.stored
    again, woken = await node.wake(3, child.snapshot_id)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    again.end()
    assert node.store.delete([child.snapshot_id]) == own
    assert files_of(node) == set()


async def test_forks_share_the_base_and_it_stays_while_a_machine_maps_it(node: Node) -> None:
    facts, _ = await asleep(node)
    rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    fact = base_of(node, facts.snapshot_id)
    runs = [await node.wake(1, facts.snapshot_id, WorkspaceId(f"ws_{name}")) for name in "abc"]
    assert {run.spec.base.ram.path.name for run, _ in runs} == {f"{fact.base_id}.ram"}
    node.store.delete([facts.snapshot_id])
    assert node.store.sweep() == 0
    kept = []
    for number, (run, machine) in enumerate(runs):
        machine.write_memory(number, 9)
        kept.append(await capture(run, machine))
        run.end()
    assert [path.stem for path in node.store.bases.iterdir()] == [fact.base_id]
    for (_, machine), child in zip(runs, kept, strict=True):
        run, woken = await node.wake(5, child.snapshot_id, child.workspace_id)
        assert np.array_equal(woken.memory.ram, machine.memory.ram)
        run.end()
    node.store.delete([child.snapshot_id for child in kept])
    assert list(node.store.bases.iterdir()) == []


async def test_a_run_on_a_base_that_nobody_names_any_more_takes_it_along_when_it_ends(node: Node) -> None:
    facts, _ = await asleep(node)
    rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    run, _ = await node.wake(2, facts.snapshot_id)
    node.store.delete([facts.snapshot_id])
    assert len(list(node.store.bases.iterdir())) == 1
    run.end()
    assert list(node.store.bases.iterdir()) == []


async def test_a_second_rebase_replaces_the_first_base(node: Node) -> None:
    facts, _ = await asleep(node)
    rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    first = base_of(node, facts.snapshot_id)
    run, machine = await node.wake(2, facts.snapshot_id)
    machine.write_memory(slice(0, 250), 4)
    machine.write_memory([7, 290], 0)
    child = await capture(run, machine, goes_on=False)
    run.end()
    node.store.delete([facts.snapshot_id])
    ram = node.base_of(child.snapshot_id).ram
    assert rebase(node.store, child.snapshot_id, ram, NEVER)
    second = base_of(node, child.snapshot_id)
    assert second.base_id != first.base_id
    assert [path.stem for path in node.store.bases.iterdir()] == [second.base_id]
    assert list(node.store.segments.iterdir()) == []
    again, woken = await node.wake(3, child.snapshot_id)
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    again.end()


async def test_a_disk_boot_of_it_lies_on_the_golden(node: Node) -> None:
    facts, _ = await asleep(node)
    rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    run = begin(node.store, node.spec(2), facts.snapshot_id, memory=False)
    assert run.spec.base.ram_ref.private is None
    run.end()
    with pytest.raises(InvalidRequest, match="The memory of"):
        begin(node.store, node.spec(2), facts.snapshot_id, memory=True)


async def test_a_machine_woken_during_a_rebase_goes_on_where_it_was(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, machine = await asleep(node)
    put = rebasing.put_index
    runs = []

    def late(*given: object) -> bool:
        runs.append(begin(node.store, node.spec(2), facts.snapshot_id, memory=True))
        return put(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(rebasing, "put_index", late)
    assert rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    woken = TinyMachine(type(machine.memory)(node.base.ram.pages))
    await runs[0].restore(woken)  # type: ignore[arg-type]
    assert np.array_equal(woken.memory.ram, machine.memory.ram)
    woken.write_memory(3, 3)
    child = await capture(runs[0], woken, goes_on=False)
    runs[0].end()
    assert node.store.manifest(child.snapshot_id).private_base is None
    node.store.delete([facts.snapshot_id])
    again, last = await node.wake(3, child.snapshot_id)
    assert np.array_equal(last.memory.ram, woken.memory.ram)
    again.end()
    assert list(node.store.bases.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ what stops it


def snapshot_of_files(node: Node) -> dict[str, bytes]:
    return {name: (node.store.root / name).read_bytes() for name in files_of(node)}


async def test_enough_at_any_moment_leaves_everything_as_it_was(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, _ = await asleep(node)
    before = snapshot_of_files(node)
    monkeypatch.setattr(bases, "PART_PAGES", 256)
    write, seen, enough, last = bases._write, list[int](), threading.Event(), [0]

    def counted(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        seen.append(len(seen))
        if len(seen) == last[0]:
            enough.set()

    monkeypatch.setattr(bases, "_write", counted)
    for passes in (2, 1, 0):  # two parts are written
        seen.clear()
        enough.clear()
        last[0] = passes
        if passes == 0:
            enough.set()
        assert not rebase(node.store, facts.snapshot_id, node.base.ram, enough)
        assert len(seen) == passes
        assert snapshot_of_files(node) == before


async def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RecordingDisk(tmp_path)
    node = Node(tmp_path, disk)
    node.store.open()
    facts, _ = await asleep(node)
    before = snapshot_of_files(node)
    for room in (0, 5000, 200 * PAGE_SIZE, 265 * PAGE_SIZE):
        disk.room = room
        with pytest.raises(NoSpace):
            rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
        disk.make_room()
        assert snapshot_of_files(node) == before
    monkeypatch.setattr(rebasing, "free_bytes", lambda _path: 400 * PAGE_SIZE)
    since = len(disk.operations)
    with pytest.raises(NoSpace, match="too little room"):
        rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    assert len(disk.operations) == since, "nothing was begun"
    assert snapshot_of_files(node) == before


async def test_damage_is_never_copied(node: Node) -> None:
    facts, _ = await asleep(node)
    segment = next(iter(node.store.segments.iterdir()))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptSnapshot, match=segment.name):
        rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    assert list(node.store.bases.iterdir()) == []
    with pytest.raises(NotFound):
        rebase(node.store, SnapshotId("snp_none"), node.base.ram, NEVER)


async def test_damage_of_a_private_base_is_never_copied_into_the_next(node: Node) -> None:
    facts, _ = await asleep(node)
    assert rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    path = node.store.bases / f"{base_of(node, facts.snapshot_id).base_id}.ram"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptSnapshot) as caught:
        rebase(node.store, facts.snapshot_id, BaseRam(path), NEVER)
    assert caught.value.file == f"bases/{path.name}"
    assert list(node.store.bases.iterdir()) == [path]


async def test_a_disk_only_snapshot_has_nothing_to_rebase(node: Node) -> None:
    run, machine = await node.wake(1)
    machine.write_disk(b"x")
    run.end(keep_layers=True)
    saved = node.store.salvage(run.spec.workspace_id, 1, snapshot_id(), NOW)
    assert saved is not None
    assert not rebase(node.store, saved.snapshot_id, node.base.ram, NEVER)
    assert compact(node.store, saved.snapshot_id, node.base.ram) == 0


async def test_a_snapshot_deleted_meanwhile_stays_deleted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, _ = await asleep(node)
    write = rebasing.write_base

    def deleting(*given: object) -> BaseFact:
        fact = write(*given)  # type: ignore[arg-type]
        node.store.delete([facts.snapshot_id])
        return fact

    monkeypatch.setattr(rebasing, "write_base", deleting)
    with pytest.raises(FileNotFoundError):
        rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    assert files_of(node) == set()


async def test_every_crash_of_a_rebase_leaves_the_snapshot_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the capture and the deletion that follow."""
    monkeypatch.setattr(bases, "PART_PAGES", 128)
    monkeypatch.setattr(bases, "WINDOW_BYTES", 64 * PAGE_SIZE)
    home = tmp_path / "home"
    home.mkdir()
    disk = RecordingDisk(home)
    node = Node(home, disk)
    node.store.open()
    facts, machine = await asleep(node)
    since = len(disk.operations)
    assert rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    acknowledged = [(since, 10**9, facts, machine.memory.ram.copy())]
    run, woken = await node.wake(2, facts.snapshot_id)
    woken.write_memory([1, 299], 5)
    child = await capture(run, woken, goes_on=False)
    run.end()
    acknowledged.append((len(disk.operations), 10**9, child, woken.memory.ram.copy()))
    acknowledged[0] = (since, len(disk.operations), facts, machine.memory.ram.copy())
    node.store.delete([facts.snapshot_id])
    assert len(disk.states) - since > 25
    for after in range(since, len(disk.states)):
        for crash in Crash:
            for seed in range(2 if crash is Crash.MIXED else 1):
                await check_crash(disk, node, acknowledged, (after, crash, tmp_path / f"c{after}{crash}{seed}"), seed)


# ---------------------------------------------------------------------------------------------------------------- integrity


@pytest.mark.parametrize("where", [0, 0.3, 0.999])
async def test_a_flipped_bit_of_a_base_is_found_and_named(node: Node, where: float) -> None:
    facts, _ = await asleep(node)
    rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    run, machine = await node.wake(2, facts.snapshot_id)
    few = machine.memory.ram[10:14].copy()
    few[:, :8] ^= 1
    machine.write_memory(slice(10, 14), few)
    child = await capture(run, machine, goes_on=False)
    run.end()
    path = node.store.bases / f"{base_of(node, facts.snapshot_id).base_id}.ram"
    heard: dict[str, int] = {}
    clean = Verifier(node.store, lambda file, count: heard.__setitem__(file, heard.get(file, 0) + count))
    for name in (facts.snapshot_id, child.snapshot_id):
        assert clean.snapshot(name, None).damage == ()
    assert 0 < heard[f"bases/{path.name}"] <= PAGES * PAGE_SIZE, "it is read once"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 4
    path.write_bytes(data)
    for name in (facts.snapshot_id, child.snapshot_id):
        found = Verifier(node.store, lambda _file, _count: None).snapshot(name, None)
        assert [damage.file for damage in found.damage] == [f"bases/{path.name}"]
        assert found.disk_intact
        with pytest.raises(CorruptSnapshot, match=path.name):
            node.store.verify(name)


@pytest.mark.parametrize("size", [None, 0, PAGES * PAGE_SIZE - PAGE_SIZE])
async def test_a_wake_on_a_base_that_is_cut_or_gone_is_refused_before_a_machine(node: Node, size: int | None) -> None:
    facts, _ = await asleep(node)
    rebase(node.store, facts.snapshot_id, node.base.ram, NEVER)
    path = node.store.bases / f"{base_of(node, facts.snapshot_id).base_id}.ram"
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)
    with pytest.raises(CorruptSnapshot) as caught:
        await node.wake(2, facts.snapshot_id)
    assert caught.value.file == f"bases/{path.name}"
    assert node.store.live() == ()
    found = Verifier(node.store, lambda _file, _count: None).snapshot(facts.snapshot_id, None)
    assert [damage.file for damage in found.damage] == [f"bases/{path.name}"]


def test_the_checksum_does_not_mind_holes_but_everything_else(tmp_path: Path) -> None:
    size = 3 * bases.WINDOW_BYTES + 5 * PAGE_SIZE
    rng = np.random.default_rng(1)
    content = np.zeros(size // PAGE_SIZE * PAGE_SIZE, np.uint8)
    content[2 * bases.WINDOW_BYTES : 2 * bases.WINDOW_BYTES + 100] = rng.integers(1, 255, 100, np.uint8)
    content[-5:] = 1
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    dense.write_bytes(content.tobytes())
    with sparse.open("wb") as file:
        file.truncate(size)
        file.seek(2 * bases.WINDOW_BYTES)
        file.write(content[2 * bases.WINDOW_BYTES : 2 * bases.WINDOW_BYTES + 100].tobytes())
        file.seek(size - 5)
        file.write(b"\1" * 5)
    read: list[int] = []
    assert checksum(dense) == checksum(sparse, read.append)
    assert sum(read) < size, "holes are not read"
    seen = {checksum(sparse)}
    for change in (lambda: os.truncate(sparse, size + PAGE_SIZE), lambda: os.truncate(sparse, size - PAGE_SIZE)):
        change()
        seen.add(checksum(sparse))
    moved = np.roll(content, bases.WINDOW_BYTES)
    dense.write_bytes(moved.tobytes())
    seen.add(checksum(dense))
    assert len(seen) == 4
    with pytest.raises(CorruptSnapshot, match="missing"):
        checksum(tmp_path / "nothing")


def test_a_base_is_written_from_parts_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1000
    rng = np.random.default_rng(2)
    below = rng.integers(0, 255, (count, PAGE_SIZE), np.uint8)
    below[rng.random(count) < 0.5] = 0
    (tmp_path / "below").write_bytes(below.tobytes())

    def over(pages: PageNumbers, content: Pages) -> None:
        content[pages % 7 == 0] = 0
        content[pages % 5 == 0] = pages[pages % 5 == 0].astype(np.uint8)[:, None]

    wanted = below.copy()
    over(np.arange(count, dtype=np.uint32), wanted)
    facts = []
    for part in (256, 512, 8192):
        monkeypatch.setattr(bases, "PART_PAGES", part)
        ram = BaseRam(tmp_path / "below")
        fact = bases.write_base(tmp_path, BaseId(f"bas_{part}"), ram, over, NEVER, QuickDisk())
        path = check_base(tmp_path, fact, content=True)
        assert np.array_equal(np.fromfile(path, np.uint8).reshape(-1, PAGE_SIZE), wanted)
        facts.append(replace(fact, base_id=BaseId("bas_x")))
    assert len(set(facts)) == 1


async def test_when_it_pays(node: Node) -> None:
    run, machine = await node.wake(1)
    facts = await capture(run, machine, goes_on=False)
    run.end()
    mib = 1 << 20
    for ram, changed, worth in (
        (2048, 512 * mib, False),
        (2048, 513 * mib, True),
        (512, 300 * mib, False),
        (512, 308 * mib, True),
        (2048, 0, False),
    ):
        asked = replace(facts, size=MachineSize(ram, 1), pages=changed // PAGE_SIZE)
        assert is_worthwhile(asked, 512) is worth
        assert not is_worthwhile(asked, 0)
