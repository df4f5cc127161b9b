"""Checkpoints on a host that can tell what a machine writes: they copy that, and lose nothing whatever fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perdure.core.errors import MachineFailed, NoSpace
from perdure.core.ids import SnapshotId
from perdure.machines.driver import PAGE_SIZE, PageNumbers, Pages
from perdure.snapshots import capture as capturing
from perdure.snapshots.capture import CaptureRequest, MachineRun
from perdure.snapshots.pagelog import record
from perdure.wire.node import SnapshotFacts
from tests.fakes.disk import RecordingDisk
from tests.fakes.tiny_machine import TinyMachine
from tests.fakes.tiny_node import NOW, Node, capture, snapshot_id
from tests.torture.defects import switched_on

WRITTEN = 200


class Life:
    """A machine with some memory of its own and a first checkpoint; counts the pages that are copied."""

    def __init__(self, home: Path, *, tells_writes: bool = True) -> None:
        self.disk = RecordingDisk(home)
        self.node = Node(home, self.disk, tells_writes=tells_writes)
        self.node.store.open()
        self.random = np.random.default_rng(7)
        self.copied: list[int] = []
        self.run: MachineRun
        self.machine: TinyMachine

    async def begin(self) -> None:
        self.run, self.machine = await self.node.wake(1)
        read = self.machine.memory.read_pages

        def counted(pages: PageNumbers, room: Pages | None = None) -> Pages:
            self.copied.append(len(pages))
            return read(pages, room)

        self.machine.memory.read_pages = counted  # type: ignore[method-assign]
        self.write(range(WRITTEN))
        await self.checkpoint()

    def write(self, pages: range | list[int]) -> None:
        self.machine.write_memory(list(pages), self.random.integers(0, 255, (len(pages), PAGE_SIZE), np.uint8))

    async def checkpoint(self, *, goes_on: bool = True) -> SnapshotFacts:
        self.copied.clear()
        return await capture(self.run, self.machine, goes_on=goes_on)

    async def comes_back(self, facts: SnapshotFacts) -> bool:
        """Whether a wake of it has this machine's memory."""
        self.run.end()
        again, woken = await self.node.wake(2, facts.snapshot_id)
        again.end()
        return np.array_equal(woken.memory.ram, self.machine.memory.ram)


@pytest.fixture
async def life(tmp_path: Path) -> Life:
    life = Life(tmp_path)
    await life.begin()
    return life


async def test_a_checkpoint_copies_what_was_written_since_the_last_one(life: Life) -> None:
    assert life.copied == [WRITTEN], "before it nobody could tell"
    life.write([3, 4, 250])
    life.machine.memory.give_back([7], life.node.base.ram.pages)
    await life.checkpoint()
    assert life.copied == [3]
    await life.checkpoint()
    assert life.copied == [0]
    life.write([3])
    assert await life.comes_back(await life.checkpoint())
    assert life.copied == [1]


async def test_a_hibernation_copies_everything(life: Life) -> None:
    life.write([3])
    assert await life.comes_back(await life.checkpoint(goes_on=False))
    assert life.copied == [WRITTEN]


async def test_a_host_that_cannot_tell_copies_everything(tmp_path: Path) -> None:
    life = Life(tmp_path, tells_writes=False)
    await life.begin()
    life.write([3])
    assert await life.comes_back(await life.checkpoint())
    assert life.copied == [WRITTEN]


async def test_what_is_written_during_the_copy_is_copied_next_time(life: Life) -> None:
    """A device of the VMM, say: this snapshot may have either, and the next one has it."""
    read = life.machine.memory.read_pages

    def meanwhile(pages: PageNumbers, room: Pages | None = None) -> Pages:
        content = read(pages, room)
        life.write([10])
        return content

    life.machine.memory.read_pages = meanwhile  # type: ignore[method-assign]
    await life.checkpoint()
    life.machine.memory.read_pages = read  # type: ignore[method-assign]
    assert await life.comes_back(await life.checkpoint())
    assert life.copied == [1]


async def full_disk(life: Life) -> None:
    life.disk.room = 5000
    with pytest.raises(NoSpace):
        await life.checkpoint()
    life.disk.room = None


async def failed_devices(life: Life) -> None:
    life.machine.fail["save_devices"] = MachineFailed("It cannot.")
    with pytest.raises(MachineFailed):
        await life.checkpoint()


async def failed_switch(life: Life) -> None:
    life.machine.fail["switch_overlay"] = MachineFailed("It cannot.")
    with pytest.raises(MachineFailed):
        await life.checkpoint()


async def failed_hibernation(life: Life) -> None:
    life.disk.room = 5000
    with pytest.raises(NoSpace):
        await life.checkpoint(goes_on=False)
    life.disk.room = None


async def unread_log(life: Life) -> None:
    """Something that was not copied is damaged on the disk: nothing fails, and the next capture writes it anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "record", lambda *given, **named: replace(record(*given, **named), damaged=True))
        await life.checkpoint()


@pytest.mark.parametrize("fail", [full_disk, failed_devices, failed_switch, failed_hibernation, unread_log])
async def test_after_a_failure_everything_is_copied_once(life: Life, fail: Callable[[Life], Awaitable[None]]) -> None:
    life.write([3, 4])
    await fail(life)
    life.write([5])
    await life.checkpoint()
    assert life.copied == [WRITTEN]
    life.write([6])
    assert await life.comes_back(await life.checkpoint())
    assert life.copied == [1]


async def test_a_mark_that_fails_is_not_believed(life: Life) -> None:
    """Some of the bits may be cleared, and what they told is gone."""
    life.machine.memory.tells_writes = False
    life.write([3])
    await life.checkpoint()
    assert life.copied == [1], "the mark before it held"
    life.write([4])
    await life.checkpoint()
    assert life.copied == [WRITTEN]
    life.machine.memory.tells_writes = True
    await life.checkpoint()
    assert life.copied == [WRITTEN]
    life.write([5])
    assert await life.comes_back(await life.checkpoint())
    assert life.copied == [1]


async def test_captures_that_overlap_are_not_mixed_up(life: Life) -> None:
    """One is taken before another is committed: what was written between them is told since the second."""

    async def taken() -> tuple[SnapshotId, capturing.Captured]:
        name = snapshot_id()
        await life.run.ready(life.machine, name)  # type: ignore[arg-type]
        return name, await life.run.capture(life.machine, CaptureRequest(name, NOW, True))  # type: ignore[arg-type]

    life.write([3])
    _, first = await taken()
    life.write([4])
    _, second = await taken()
    life.run.commit(first, 0.1)
    life.disk.room = 0
    with pytest.raises(NoSpace):
        life.run.commit(second, 0.1)
    life.disk.room = None
    life.write([5])
    assert await life.comes_back(await life.checkpoint())
    assert life.copied == [WRITTEN]


async def test_it_is_seen_when_a_mark_comes_before_the_look(life: Life) -> None:
    with switched_on("mark-before-the-look"):
        life.write([3])
        assert not await life.comes_back(await life.checkpoint())


async def test_it_is_seen_when_the_mark_of_a_lost_capture_counts(life: Life) -> None:
    with switched_on("mark-of-a-lost-capture"):
        life.write([3])
        await full_disk(life)
        assert not await life.comes_back(await life.checkpoint())
