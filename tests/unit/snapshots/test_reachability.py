"""What the store keeps is what is reachable, after random sequences of everything that makes and frees files.

What must be there is read from the manifests and live records on the disk and from what runs, not from the store's own counts.
After every step: nothing that is named is missing, nothing that nobody names is left, and every snapshot holds its content.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.core.errors import MachineFailed, NoSpace
from perdure.core.files import Handle
from perdure.core.ids import DiskId, SnapshotId, WorkspaceId
from perdure.machines.driver import PAGE_SIZE
from perdure.snapshots import compact as compaction
from perdure.snapshots import merge as merging
from perdure.snapshots.capture import CaptureRequest, MachineRun
from perdure.snapshots.compact import compact
from perdure.snapshots.layers import disk_file
from perdure.snapshots.manifest import MANIFEST, LiveRecord, Manifest
from perdure.snapshots.merge import merge
from perdure.snapshots.rebase import rebase
from perdure.snapshots.segments import segment_file
from perdure.snapshots.start import begin
from perdure.snapshots.weight import weigh
from tests.fakes.disk import Crash, QuickDisk, RecordingDisk
from tests.fakes.tiny_machine import TinyMachine, TinyMemory
from tests.fakes.tiny_node import NOW, PAGES, Node, capture, check_crash, files_of, snapshot_id

WORKSPACES = [WorkspaceId(f"ws_{name}") for name in ("a", "b", "c")]
CLUSTERS = 4  # of the disk, that are written


class _Failing(Handle):
    disk: FullDisk

    def write(self, *parts: Any) -> int:
        if self.disk.fails_in == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.disk.fails_in is not None:
            self.disk.fails_in -= 1
        return super().write(*parts)

    def sync(self) -> None:
        return None


class FullDisk(QuickDisk):
    """Fails the write after so many more; None: none."""

    fails_in: int | None = None

    def create(self, path: Path, mode: int) -> Handle:
        handle = _Failing(path, super().create(path, mode)._fd, 0)
        handle.disk = self
        return handle


@dataclass
class Story:
    """A node and all that was acknowledged by it."""

    home: Path
    disk: FullDisk = field(default_factory=FullDisk)
    runs: dict[WorkspaceId, tuple[MachineRun, TinyMachine]] = field(default_factory=dict)
    rams: dict[SnapshotId, np.ndarray | None] = field(default_factory=dict)  # None: of a disk alone
    contents: dict[SnapshotId, list[bytes]] = field(default_factory=dict)  # of the disk
    generation: int = 0
    node: Node = field(init=False)

    def __post_init__(self) -> None:
        self.node = Node(self.home, self.disk)
        assert self.node.store.open().debris == ()

    def pick(self, number: int) -> SnapshotId | None:
        ids = sorted(self.rams)
        return ids[number % len(ids)] if ids else None

    # --------------------------------------------------------------------------------------------------------------- steps

    async def wake(self, who: WorkspaceId, number: int) -> None:
        """From any snapshot, its own or not: the latter is a fork. Every fifth is new."""
        if who in self.runs:
            return
        source = None if number % 5 == 0 else self.pick(number)
        if source is not None and self.rams[source] is None:
            return
        self.generation += 1
        self.runs[who] = await self.node.wake(self.generation, source, who)

    async def write(self, who: WorkspaceId, number: int) -> None:
        if who not in self.runs:
            return
        _, machine = self.runs[who]
        rng = np.random.default_rng(number)
        machine.write_disk(b"%d" % number, number % CLUSTERS)
        if number % 3:  # much: so that what was written before is worth leaving behind
            count = int(rng.integers(1, PAGES))
            machine.write_memory(slice(0, count), rng.integers(0, 255, (count, PAGE_SIZE), np.uint8))

    async def checkpoint(self, who: WorkspaceId, number: int) -> None:
        if who in self.runs and number % 3:
            self.runs[who][1].write_disk(b"%d" % number, number % CLUSTERS)
        await self._capture(who, goes_on=True)

    async def hibernate(self, who: WorkspaceId, number: int) -> None:
        if await self._capture(who, goes_on=False):
            self.runs.pop(who)[0].end()

    async def _capture(self, who: WorkspaceId, *, goes_on: bool) -> bool:
        if who not in self.runs:
            return False
        run, machine = self.runs[who]
        name = snapshot_id()
        try:
            await run.ready(machine, name, goes_on=goes_on)  # type: ignore[arg-type]
            captured = await run.capture(machine, CaptureRequest(name, NOW, True, goes_on))  # type: ignore[arg-type]
            run.commit(captured, 0.012)
        except (NoSpace, MachineFailed):
            run.discard(name)
            assert name not in {facts.snapshot_id for facts in self.node.store.complete()}
            return False
        self.rams[name] = machine.memory.ram.copy()
        self.contents[name] = content_of(machine)
        return True

    async def fail(self, who: WorkspaceId, number: int) -> None:
        """A checkpoint on a disk that fills up at some write, or of a machine that does not save its devices."""
        if who not in self.runs:
            return
        run, machine = self.runs[who]
        if number % 4 == 0:
            machine.fail["save_devices"] = MachineFailed("it broke")
        else:
            self.disk.fails_in = number % 23
        try:
            await self._capture(who, goes_on=True)
        finally:
            self.disk.fails_in = None
            machine.fail.clear()
        if machine.layers and machine.layers[-1] != self.node.store.disks / disk_file(run.active_disk):
            await self.die(who, number)  # nobody would go on with such a machine

    async def delete(self, who: WorkspaceId, number: int) -> None:
        doomed = self.pick(number)
        if doomed is not None:
            own = weigh(self.node.store, [doomed])[doomed].own_bytes
            assert self.node.store.delete([doomed]) == own, "what it weighs alone is what its removal frees"
            del self.rams[doomed]

    async def squeeze(self, who: WorkspaceId, number: int) -> None:
        chosen = self.pick(number)
        if chosen is not None:
            compact(self.node.store, chosen, self.node.base_of(chosen).ram)

    async def settle(self, who: WorkspaceId, number: int) -> None:
        """A rebase: done, cut short, or on a disk that fills up at some write."""
        chosen = self.pick(number)
        if chosen is None:
            return
        enough = threading.Event()
        if number % 5 == 0:
            enough.set()
        self.disk.fails_in = number % 7 if number % 4 == 0 else None
        try:
            done = rebase(self.node.store, chosen, self.node.base_of(chosen).ram, enough)
            assert not (done and enough.is_set())
        except NoSpace:
            assert self.disk.fails_in == 0
        finally:
            self.disk.fails_in = None

    async def flatten(self, who: WorkspaceId, number: int) -> None:
        """A merge of disk layers: done, cut short, or on a disk that fills up at some write."""
        chosen = self.pick(number)
        if chosen is None:
            return
        enough = threading.Event()
        if number % 5 == 0:
            enough.set()
        before = len(self.node.store.manifest(chosen).layers)
        self.disk.fails_in = number % 11 if number % 4 == 0 else None
        try:
            fewer = merge(self.node.store, chosen, enough)
            assert fewer == (0 if enough.is_set() else max(0, before - merging.LAYERS_ASLEEP))
        except NoSpace:
            assert self.disk.fails_in == 0
        finally:
            self.disk.fails_in = None

    async def die(self, who: WorkspaceId, number: int) -> None:
        """The machine is lost; its newer disk is kept."""
        if who in self.runs:
            run, machine = self.runs.pop(who)
            run.end(keep_layers=True)
            self._salvage(who, run.spec.generation, content_of(machine))

    async def stop(self, who: WorkspaceId, number: int) -> None:
        if who in self.runs:
            self.runs.pop(who)[0].end()

    async def restart(self, who: WorkspaceId, number: int) -> None:
        """SIGKILL of everything; the next process opens the store, and finds what was alive."""
        self.node.store.close()
        lost = {who: content_of(machine) for who, (_, machine) in self.runs.items()}
        self.runs.clear()
        self.disk = FullDisk()
        self.node = Node(self.home, self.disk)
        report = self.node.store.open()
        assert report.damaged == ()
        self.check()
        for record in self.node.store.live():
            self._salvage(record.workspace_id, record.generation, lost[record.workspace_id])

    def _salvage(self, who: WorkspaceId, generation: int, content: list[bytes]) -> None:
        facts = self.node.store.salvage(who, generation, snapshot_id(), NOW)
        if facts is not None:
            self.rams[facts.snapshot_id] = None
            self.contents[facts.snapshot_id] = content
        else:
            assert content in self.contents.values() or not any(content), "what it wrote was never captured"

    # ---------------------------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        there = files_of(self.node)
        named, held = self._named(), self._held()
        assert named - there == set(), "something that a manifest names is missing"
        assert there - named - held == set(), "something is left that nobody names"
        assert self.node.store.sweep() == 0
        assert files_of(self.node) == there
        assert {facts.snapshot_id for facts in self.node.store.complete()} == set(self.rams)

    def _named(self) -> set[str]:
        names = set()
        for path in self.node.store.snapshots.iterdir():
            manifest = Manifest.from_bytes((path / MANIFEST).read_bytes(), path.name)
            files = [MANIFEST, *((manifest.memory.index.name, manifest.memory.devices.name) if manifest.memory else ())]
            names |= {f"snapshots/{path.name}/{name}" for name in files}
            names |= {f"disks/{disk_file(layer.disk_id)}" for layer in manifest.layers}
            names |= {f"segments/{segment_file(name)}" for name in (manifest.memory.segments if manifest.memory else ())}
            if manifest.memory is not None and manifest.memory.base.private is not None:
                names.add(f"bases/{manifest.memory.base.private.base_id}.ram")
        return names

    def _held(self) -> set[str]:
        """What machines that run, or ran when everything was killed, may still need."""
        names = set()
        for path in (self.node.store.root / "live").iterdir():
            record = LiveRecord.from_bytes(path.read_bytes(), path.name)
            names |= {f"live/{path.name}", *(f"disks/{disk_file(DiskId(layer))}" for layer in record.layers)}
        for run, _ in self.runs.values():
            pins = run._pinned()
            names |= {f"segments/{segment_file(name)}" for name in pins.segments}
            names |= {f"disks/{disk_file(name)}" for name in pins.disks}
            names |= {f"bases/{name}.ram" for name in pins.bases}
        return names

    async def check_content(self) -> None:
        """Every acknowledged snapshot is whole, and wakes as what it was."""
        for who in list(self.runs):
            await self.stop(who, 0)
        for name, ram in self.rams.items():
            self.node.store.verify(name, self.node.base.ram)
            who = WorkspaceId("ws_check")
            if ram is not None:
                run, machine = await self.node.wake(10**6, name, who)
                assert np.array_equal(machine.memory.ram, ram)
            else:
                run = begin(self.node.store, self.node.spec(10**6, who), name, memory=False)
                machine = TinyMachine(TinyMemory(self.node.base.ram.pages))
                await machine.attach_disk(run.chain())
            assert content_of(machine) == self.contents[name]
            run.end()
        self.check()


def content_of(machine: TinyMachine) -> list[bytes]:
    return [machine.read_disk(cluster) for cluster in range(CLUSTERS)]


STEPS: dict[str, Callable[..., Any]] = {
    name: getattr(Story, name)
    for name in (
        "wake",
        "write",
        "checkpoint",
        "hibernate",
        "fail",
        "delete",
        "squeeze",
        "settle",
        "flatten",
        "die",
        "stop",
        "restart",
    )
}
#: What makes files is drawn more often than what ends everything.
NAMES = (
    ["wake"] * 4
    + ["write"] * 5
    + ["checkpoint"] * 4
    + ["hibernate"] * 2
    + ["delete"] * 3
    + ["squeeze", "fail", "settle", "settle", "flatten", "flatten", *STEPS]
)
MOVES = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(WORKSPACES), st.integers(0, 10**6)), min_size=5, max_size=40)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("image")
    Node(home)
    return home / "image"


async def tell(moves: list[tuple[str, WorkspaceId, int]], home: Path) -> None:
    """Stories are short, so few layers are too many in them, and little garbage is much."""
    with patch.object(merging, "LAYERS_ASLEEP", 2), patch.object(compaction, "GARBAGE_BYTES_MIN", 1 << 16):
        await _tell(Story(home), moves)


async def _tell(story: Story, moves: list[tuple[str, WorkspaceId, int]]) -> None:
    for name, who, number in moves:
        await STEPS[name](story, who, number)
        story.check()
    await story.check_content()
    story.node.store.delete(list(story.rams))
    assert files_of(story.node) == set(), "with the last snapshot the last file goes"
    story.node.store.close()


@given(MOVES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_what_is_named_stays_and_nothing_else(image: Path, moves: list[tuple[str, WorkspaceId, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "image").symlink_to(image)
        asyncio.run(tell(moves, Path(folder)))


@pytest.mark.parametrize("seed", range(10))
async def test_the_same_after_long_lives(tmp_path: Path, seed: int) -> None:
    """Small stories, which an example is made of, seldom have deep disks and forks of forks."""
    rng = random.Random(seed)
    moves = [(rng.choice(NAMES), rng.choice(WORKSPACES), rng.randrange(10**6)) for _ in range(100)]
    await tell(moves, tmp_path)


@pytest.mark.parametrize("seed", range(6))
async def test_a_power_cut_after_any_step_loses_nothing_acknowledged_and_leaves_nothing(tmp_path: Path, seed: int) -> None:
    """Captures, forks and deletions on a disk that keeps of unsynced writes what it likes."""
    rng = np.random.default_rng(seed)
    home = tmp_path / "home"
    home.mkdir()
    disk = RecordingDisk(home)
    node = Node(home, disk)
    node.store.open()
    acknowledged: list[list[Any]] = []
    for generation in range(1, 4):
        source = acknowledged[int(rng.integers(len(acknowledged)))][2] if acknowledged else None
        alive = source is not None and source.snapshot_id in {facts.snapshot_id for facts in node.store.complete()}
        who = WORKSPACES[int(rng.integers(3))]
        run, machine = await node.wake(generation, source.snapshot_id if alive and source else None, who)
        for goes_on in (True, False):
            count = int(rng.integers(1, 80))
            machine.write_memory(slice(0, count), rng.integers(0, 255, (count, PAGE_SIZE), np.uint8))
            machine.write_disk(b"x")
            facts = await capture(run, machine, goes_on=goes_on)
            acknowledged.append([len(disk.operations), 10**9, facts, machine.memory.ram.copy()])
        run.end()
        doomed = acknowledged[int(rng.integers(len(acknowledged)))]
        doomed[1] = min(doomed[1], len(disk.operations))
        node.store.delete([doomed[2].snapshot_id])
    node.store.close()
    cuts = sorted(set(rng.integers(0, len(disk.states), 25).tolist()))
    for after in cuts:
        crash = list(Crash)[int(rng.integers(len(Crash)))]
        await check_crash(disk, node, [tuple(one) for one in acknowledged], (after, crash, tmp_path / f"c{after}"), seed)
    assert len(cuts) > 10


@pytest.mark.parametrize("at", range(16))
async def test_a_capture_that_fails_at_any_write_leaves_nothing(tmp_path: Path, at: int) -> None:
    story = Story(tmp_path)
    who = WORKSPACES[0]
    await story.wake(who, 0)
    await story.write(who, 1)
    story.disk.fails_in = at
    done = await story._capture(who, goes_on=True)
    left, story.disk.fails_in = story.disk.fails_in, None
    assert done or left == 0, "it fails only where the disk was full"
    story.check()
    await story.write(who, 2)
    await story.checkpoint(who, 0)
    assert story.rams
    await story.check_content()


async def test_what_a_fork_needs_no_more_of_a_snapshot_that_is_gone_goes(tmp_path: Path) -> None:
    """The fork still ran on it when it was deleted; its own capture leaves the old pages behind."""
    story = Story(tmp_path)
    parent, child = WORKSPACES[:2]
    await story.wake(parent, 0)
    _, machine = story.runs[parent]
    rng = np.random.default_rng(1)
    machine.write_memory(slice(0, PAGES), rng.integers(0, 255, (PAGES, PAGE_SIZE), np.uint8))
    await story.hibernate(parent, 0)
    await story.wake(child, 1)
    await story.delete(parent, 0)
    assert len(list(story.node.store.segments.iterdir())) == 1, "it is used"
    _, machine = story.runs[child]
    machine.write_memory(slice(0, PAGES - 1), rng.integers(0, 255, (PAGES - 1, PAGE_SIZE), np.uint8))
    await story.checkpoint(child, 0)
    story.check()
    await story.check_content()


async def test_a_store_that_was_blind_sweeps_everything_once_it_sees_again(tmp_path: Path) -> None:
    """While a manifest cannot be read nothing is swept, for nobody knows what it names. What was deleted meanwhile goes then."""
    story = Story(tmp_path)
    for who in WORKSPACES[:2]:
        await story.wake(who, 0)
        await story.write(who, 1)
        await story.hibernate(who, 0)
    damaged, other = sorted(story.rams)
    manifest = story.node.store.snapshots / damaged / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-20])
    story.node.store.close()
    node = Node(tmp_path, QuickDisk())
    assert node.store.open().damaged == (f"snapshots/{damaged}",)
    assert set(weigh(node.store, [damaged, other, SnapshotId("snp_none")])) == {other}
    node.store.delete([other])
    assert len(list(node.store.segments.iterdir())) == 2
    node.store.delete([damaged])
    assert files_of(node) == set()
    node.store.close()
