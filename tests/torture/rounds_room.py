"""Rounds on a real file system of a few megabytes that is full to its last block, for the node and for the guest's own disk.

As root it is an ext4 in a file, mounted by a loop device. (Not a tmpfs: there a hole takes room when it is only read by a
mapping, and who does so on a full one dies of SIGBUS; a home on a tmpfs is none that lasts.) Where that cannot be mounted, the
recording disk runs full at any write, which the guest's disk does not notice.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from random import Random

from perdure.core.errors import NoSpace
from perdure.core.files import Disk
from perdure.machines.driver import MachineState
from tests.fakes.disk import QuickDisk, RecordingDisk
from tests.torture.disk_rounds import goes_on
from tests.torture.model import Outcome, Violation, told_by
from tests.torture.node import TortureNode
from tests.torture.registry import Kind
from tests.torture.story import Stories, Story, check_store, clear

SIZE_MIB = 32
ROOM_MAX_BYTES = 96 << 10  # left when it begins to be tight: a capture takes about 100 KiB
STEPS_MAX = 40
RUNS_AGAIN_S = 20.0


class _Room:
    """A directory with little room in it, while it is ``tight``."""

    disk: Disk

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def tighten(self, keep: int) -> None:
        raise NotImplementedError

    def widen(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        clear(self.directory)


class _Mounted(_Room):
    """Raises OSError or CalledProcessError where this process may not mount."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.disk = Disk()
        self._file = directory.with_suffix(".ext4")
        with self._file.open("wb") as file:
            file.truncate(SIZE_MIB << 20)
        try:
            _run("mkfs.ext4", "-q", "-F", "-m", "0", self._file)
            _run("mount", "-o", "loop", self._file, directory)
        except (OSError, subprocess.CalledProcessError):
            self._file.unlink()
            raise
        directory.chmod(0o711)

    def tighten(self, keep: int) -> None:
        free = os.statvfs(self.directory)
        with (self.directory / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - keep))

    def widen(self) -> None:
        (self.directory / "ballast").unlink()

    def close(self) -> None:
        _run("umount", "--lazy", self.directory)
        self._file.unlink()
        super().close()


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, capture_output=True)


class _Recorded(_Room):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._recording = RecordingDisk(directory)
        self._recording.keeps_states = False
        self.disk = self._recording

    def tighten(self, keep: int) -> None:
        self._recording.room = keep

    def widen(self) -> None:
        self._recording.make_room()


class FullFileSystems(Stories):
    """A story meets a file system without room, and goes on when there is some."""

    points = ("full.filesystem",)

    async def round(self, point: str) -> Outcome:
        home = self._scratch / f"room{next(self._numbers)}"
        home.mkdir(mode=0o711)
        room = self._room(home)
        keep = self._random.randrange(ROOM_MAX_BYTES)
        fired = False
        try:
            node = TortureNode(home, self._image, disk=room.disk)
            try:
                fired = await self._tell(node, room, keep)
            finally:
                await node.crash()
        except Exception as error:
            return Outcome(point, True, told_by(error), f"{keep} bytes were left")
        finally:
            room.close()
        return Outcome(point, fired)

    def _room(self, home: Path) -> _Room:
        if os.geteuid() == 0:
            with suppress(OSError, subprocess.CalledProcessError):
                return _Mounted(home)
        return _Recorded(home)

    async def _tell(self, node: TortureNode, room: _Room, keep: int) -> bool:
        await node.open()
        story = Story(node, Random(self._random.random()))
        await story.create()
        await story.live(self._random.randint(1, 6))
        room.tighten(keep)
        fired = await self._until_full(story)
        room.widen()
        for machine in node.machines.values():
            await self._runs_again(machine.name, machine.running)
        await goes_on(story)
        await node.crash()
        after = TortureNode(room.directory, self._image, disk=QuickDisk())
        try:
            if damaged := after.store.open().damaged:
                raise Violation(f"a full disk damaged {damaged}")
            told = {one.snapshot_id: one.value for one in story.told.values()}
            await check_store(after, told, set(told))
        finally:
            await after.crash()
        return fired

    @staticmethod
    async def _until_full(story: Story) -> bool:
        """Until a write was refused, saying that it is for want of room, or a guest stands still for want of it."""
        for _ in range(STEPS_MAX):
            try:
                await story.live(1)
            except NoSpace:
                return True
            if any(machine.state is MachineState.NO_SPACE for machine in story.node.machines.values()):
                return True
        return False

    @staticmethod
    async def _runs_again(name: str, running: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(running.wait(), RUNS_AGAIN_S)
        except TimeoutError:
            raise Violation(f"{name} stands still although there is room again") from None


KINDS = (Kind("room", FullFileSystems),)
