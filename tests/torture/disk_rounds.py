"""Rounds that look at files: what a power cut leaves at any instant, a disk that is full at any write.

A story is told on a recording disk. Then the machine is switched off after any of its operations, in four ways, and a node opens
what is left (``disk.*``); or the story is told on a disk that is full at its n-th write (``full.*``).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from perdure.core.errors import NoSpace
from tests.fakes.disk import Crash, QuickDisk, RecordingDisk
from tests.torture.model import Outcome, Violation, together, told_by
from tests.torture.node import TortureNode
from tests.torture.registry import Place
from tests.torture.story import Stories, Story, Told, check, check_store, clear

STEPS = 14
#: The files that a full disk may meet, by the end of their name. A temporary file has the name of what it becomes in it.
FULL = {
    ".pages": "full.segment",
    ".ram": "full.base",
    ".index": "full.index",
    "manifest.json": "full.manifest",
    ".json": "full.live",
    ".qcow2": "full.layer",
}


class PowerCuts(Stories):
    """After every operation of a story, in a random order, in each of the four ways."""

    points = tuple(f"disk.{crash.value}" for crash in Crash)

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._disk: RecordingDisk | None = None
        self._told: list[Told] = []
        self._wrong: str | None = None
        self._left: dict[str, Iterator[int]] = {}

    async def round(self, point: str) -> Outcome:
        return together(point, [await self._cut(one) for one in self._place.with_it(point, self.points)])

    async def _cut(self, point: str) -> Outcome:
        crash = Crash(point.removeprefix("disk."))
        after = next(self._left[point], None) if self._disk is not None else None
        if after is None:
            await self._tell()
            if self._wrong is not None:
                wrong, self._wrong, self._disk = self._wrong, None, None
                return Outcome(point, False, (wrong,), "while the story was told")
            after = next(self._left[point])
        assert self._disk is not None
        operation = self._disk.operations[after - 1] if after else "nothing"
        try:
            await self._switch_off(after, crash)
        except Exception as error:
            return Outcome(point, True, told_by(error), f"after operation {after}, {operation}")
        return Outcome(point, True)

    @property
    def story_length(self) -> int:
        """Operations of the story that is told now; one round of each point for each of them is all there is."""
        return 0 if self._disk is None else len(self._disk.operations)

    async def _tell(self) -> None:
        home = self._scratch / f"story{next(self._numbers)}"
        home.mkdir()
        disk = RecordingDisk(home)
        node = TortureNode(home, self._image, disk=disk)
        await node.open()
        story = Story(node, Random(self._random.random()), lambda: len(disk.operations))
        everything: list[Told] = []
        try:
            for _ in range(STEPS):
                await story.live(1)
                everything += [told for told in story.told.values() if told not in everything]
        except Exception as error:
            self._wrong = told_by(error)[0]
        finally:
            await node.crash()
            clear(home)
        self._disk, self._told = disk, everything
        for point in self.points:
            order = list(range(len(disk.states)))
            self._random.shuffle(order)
            self._left[point] = iter(order)

    async def _switch_off(self, after: int, crash: Crash) -> None:
        assert self._disk is not None
        home = self._scratch / f"cut{next(self._numbers)}"
        home.mkdir()
        try:
            self._disk.materialise(after, crash, home, seed=self._random.randrange(1 << 30))
            node = TortureNode(home, self._image, disk=QuickDisk())
            report = node.store.open()
            if report.damaged:
                raise Violation(f"a power cut damaged what was durable: {report.damaged}")
            must = {told.snapshot_id for told in self._told if told.since <= after <= told.until}
            try:
                await check_store(node, {told.snapshot_id: told.value for told in self._told}, must)
            finally:
                await node.crash()
        finally:
            clear(home)


class FullDisks(Stories):
    """The n-th write of a story meets a full disk; then there is room again, and it goes on."""

    points = tuple(FULL.values())

    async def round(self, point: str) -> Outcome:
        return together(point, [await self._fill(one) for one in self._place.with_it(point, self.points)])

    async def _fill(self, point: str) -> Outcome:
        home = self._scratch / f"full{next(self._numbers)}"
        home.mkdir()
        disk = RecordingDisk(home)
        disk.keeps_states = False
        node = TortureNode(home, self._image, disk=disk)
        detail = ""
        try:
            await node.open()
            story = Story(node, Random(self._random.random()), lambda: 0)
            await story.live(self._random.randint(1, 6))
            disk.full_at = (lambda name: _kind(name) == point, self._random.randint(1, 3))
            refused = await self._until_full(story, disk)
            detail = f"refused: {refused}"
            if disk.met_full is None:
                return Outcome(point, False)
            disk.make_room()
            await goes_on(story)
            await node.crash()
            after = TortureNode(home, self._image, disk=QuickDisk())
            try:
                if damaged := after.store.open().damaged:
                    raise Violation(f"a full disk damaged {damaged}")
                told = {one.snapshot_id: one.value for one in story.told.values()}
                await check_store(after, told, set(told))
            finally:
                await after.crash()
        except Exception as error:
            return Outcome(point, disk.met_full is not None, told_by(error), detail)
        finally:
            await node.crash()
            clear(home)
        return Outcome(point, True)

    @staticmethod
    async def _until_full(story: Story, disk: RecordingDisk) -> str:
        """Live until a write was refused; what was refused must say that it is for want of room."""
        for _ in range(40):
            if disk.met_full is not None:
                return ""
            try:
                await story.live(1)
            except NoSpace as error:
                return error.message
        return ""


async def goes_on(story: Story) -> None:
    """There is room again: whoever was awake is as it was and can be captured, whoever sleeps wakes."""
    node = story.node
    for one in list(story.awake.values()):
        if one.workspace_id not in node.machines:
            story.awake.pop(one.workspace_id)  # its start was refused: what it is made of is what counts
            continue
        check(await node.prove(one.workspace_id, one.generation), one.value, f"{one.workspace_id} when there was room again")
        await story.checkpoint(one)
        await story.sleep(one)
    for one in list(story.asleep.values()):
        if one.head in story.told:
            one.generation += 1  # a start that was refused may have used the next one
            await story.wake(one)


def _kind(name: str) -> str:
    name = name.rsplit("-", 2)[0].removeprefix(".tmp-") if name.startswith(".tmp-") else name
    return next((kind for end, kind in FULL.items() if name.endswith(end)), "")
