"""Rounds in which a stored file is damaged, or a command of an earlier generation arrives late.

``flip.*`` flips one bit, ``cut.*`` cuts a file short, ``gone.*`` removes it. Damage must be named before a machine runs on it,
and everything that does not lie on the damaged file must wake as before. ``late.*`` delivers what was meant for a machine of an
earlier generation: it must be refused and change nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

from perdure.core.errors import CorruptSnapshot, PerdureError
from perdure.core.ids import SnapshotId
from perdure.wire.node import CaptureMode, CaptureSpec, FromSnapshot
from tests.fakes.disk import QuickDisk
from tests.fakes.tiny_node import NOW, snapshot_id
from tests.torture.model import Outcome, Violation, together, told_by
from tests.torture.node import TortureNode, start_spec
from tests.torture.story import Awake, Stories, Story, check, check_store, clear

STEPS = 10
_FILES = {
    "manifest": "snapshots/*/manifest.json",
    "index": "snapshots/*/*.index",
    "devices": "snapshots/*/devices.state",
    "segment": "segments/*.pages",
    "base": "bases/*.ram",
    "layer": "disks/*.qcow2",
    "live": "live/*.json",
}


class Damage(Stories):
    """One file of a store with a few workspaces in it is damaged, while nobody runs."""

    points = (
        *(f"flip.{kind}" for kind in _FILES),
        *(f"cut.{kind}" for kind in _FILES),
        *(f"gone.{kind}" for kind in ("index", "devices", "segment", "base", "layer")),
    )

    async def round(self, point: str) -> Outcome:
        """Each kind of file of one store, one after the other, is damaged in this way."""
        told_home = self._scratch / f"told{next(self._numbers)}"
        told_home.mkdir()
        how = point.partition(".")[0]
        others = [other for other in self.points if other.startswith(f"{how}.")]
        try:
            told = await self._tell(told_home)
            return together(point, [await self._one(one, told_home, told) for one in self._place.with_it(point, others)])
        except Exception as error:
            return Outcome(point, False, told_by(error), "while the story was told")
        finally:
            clear(told_home)

    async def _one(self, point: str, told_home: Path, told: dict[SnapshotId, int]) -> Outcome:
        home = self._scratch / f"damage{next(self._numbers)}"
        shutil.copytree(told_home, home)
        how, _, kind = point.partition(".")
        detail = ""
        try:
            files = sorted((home / "store").glob(_FILES[kind]))
            if not files:
                return Outcome(point, False)
            victim = self._random.choice(files)
            detail = f"{victim.relative_to(home / 'store')}, {self._damage(victim, how)}"
            await self._check(home, told, victim)
        except Exception as error:
            return Outcome(point, True, told_by(error), detail)
        finally:
            clear(home)
        return Outcome(point, True)

    async def _tell(self, home: Path) -> dict[SnapshotId, int]:
        node = TortureNode(home, self._image, disk=QuickDisk())
        await node.open()
        story = Story(node, Random(self._random.random()))
        try:
            await story.create()
            await story.live(STEPS)
            await story.rebase(await story.create())
            await story.create()
            for one in list(story.awake.values()):
                await story.checkpoint(one)
        finally:
            await node.crash()
        return {one.snapshot_id: one.value for one in story.told.values()}

    def _damage(self, victim: Path, how: str) -> str:
        data = bytearray(victim.read_bytes())
        at = self._random.randrange(len(data))
        victim.chmod(0o600)  # bases are for reading only
        if how == "gone":
            victim.unlink()
            return "removed"
        if how == "cut":
            del data[at:]
            victim.write_bytes(data)
            return f"cut to {at} bytes"
        bit = self._random.randrange(8)
        data[at] ^= 1 << bit
        victim.write_bytes(data)
        return f"bit {bit} of byte {at}"

    async def _check(self, home: Path, told: dict[SnapshotId, int], victim: Path) -> None:
        """What lies on the damaged file is refused by its name or is whole; all else wakes. Nothing is removed for the damage."""
        node = TortureNode(home, self._image, disk=QuickDisk())
        damaged = node.store.open().damaged
        name = str(victim.relative_to(node.store.root))
        try:
            if victim.name.endswith(".json"):
                self._check_record(damaged, name)
            for snapshot, value in told.items():
                await self._check_one(node, snapshot, value, victim)
        finally:
            await node.crash()

    @staticmethod
    def _check_record(damaged: tuple[str, ...], name: str) -> None:
        expected = name.removesuffix("/manifest.json")
        if damaged and damaged != (expected,):
            raise Violation(f"{expected} was damaged, and the opening told of {damaged}")

    async def _check_one(self, node: TortureNode, snapshot: SnapshotId, value: int, victim: Path) -> None:
        try:
            await node.snapshot(snapshot)
        except CorruptSnapshot as error:
            if victim.name not in f"{error.message} {error.internal}":
                raise Violation(f"{snapshot} is refused, and {victim.name} is not named: {error.message}") from error
            await self._refused_or_whole(node, snapshot, value, victim)
            return
        check(await node.prove_snapshot(snapshot), value, f"{snapshot}, which passed its verification")

    @staticmethod
    async def _refused_or_whole(node: TortureNode, snapshot: SnapshotId, value: int, victim: Path) -> None:
        """A wake reads of segments the pages that it writes, and what it lets pass must be whole. Of layers, and of bases as
        small as these, it reads every byte."""
        reads_all = victim.suffix in {".qcow2", ".ram"}
        try:
            proof = await node.prove_snapshot(snapshot)
        except PerdureError as error:
            if reads_all and victim.name not in f"{error.message} {error.internal}":
                raise Violation(f"{snapshot} does not wake, and {victim.name} is not named: {error.message}") from error
            return
        if reads_all:
            raise Violation(f"{snapshot} woke on {victim.name}, which is damaged")
        check(proof, value, f"{snapshot}, which lies on {victim.name}")


class LateCommands(Stories):
    """A workspace has slept and woken; then a command for its earlier machine arrives."""

    points = ("late.stop", "late.stop-keeping", "late.capture", "late.hibernate", "late.salvage", "late.start", "late.guest")

    async def round(self, point: str) -> Outcome:
        return together(point, [await self._one(one) for one in self._place.with_it(point, self.points)])

    async def _one(self, point: str) -> Outcome:
        home = self._scratch / f"late{next(self._numbers)}"
        home.mkdir()
        node = TortureNode(home, self._image, disk=QuickDisk())
        try:
            await node.open()
            story = Story(node, Random(self._random.random()))
            one = await story.create()
            for _ in range(self._random.randint(1, 3)):
                await story.sleep(one)
                await story.wake(one)
                await story.put(one)
            await self._deliver(node, one, point.removeprefix("late."))
            await self._untouched(story, one)
        except Exception as error:
            return Outcome(point, True, told_by(error))
        finally:
            await node.crash()
            clear(home)
        return Outcome(point, True)

    async def _deliver(self, node: TortureNode, one: Awake, what: str) -> None:
        workspace, old = one.workspace_id, self._random.randint(1, one.generation - 1)

        async def guest() -> None:
            await node.put(workspace, old, 999)

        commands: dict[str, Callable[[], Awaitable[object]]] = {
            "stop": lambda: node.stop(workspace, old),
            "stop-keeping": lambda: node.stop(workspace, old, keep_overlay=True),
            "capture": lambda: node.capture(CaptureSpec(workspace, old, snapshot_id(), CaptureMode.CHECKPOINT)),
            "hibernate": lambda: node.capture(CaptureSpec(workspace, old, snapshot_id(), CaptureMode.HIBERNATE)),
            "salvage": lambda: node.salvage(workspace, old, snapshot_id()),
            "start": lambda: node.start(start_spec(workspace, old, FromSnapshot(one.head or snapshot_id()))),
            "guest": guest,
        }
        try:
            await commands[what]()
        except PerdureError:
            return
        raise Violation(f"{what} of generation {old} was taken at generation {one.generation}")

    @staticmethod
    async def _untouched(story: Story, one: Awake) -> None:
        """The machine runs on, its record is there, and its disk is kept when it dies."""
        node = story.node
        check(await node.prove(one.workspace_id, one.generation), one.value, f"{one.workspace_id} after a late command")
        await story.checkpoint(one)
        await story.put(one)
        await node.machines[one.workspace_id].kill()
        await node.stop(one.workspace_id, one.generation, keep_overlay=True)
        late = node.store.forget(one.workspace_id, one.generation - 1)
        if late or not node.store.live():
            raise Violation(f"the record of generation {one.generation} was ended in the name of the one before")
        kept = node.store.salvage(one.workspace_id, one.generation, snapshot_id(), NOW)
        if kept is None:
            raise Violation(f"the disk of {one.workspace_id} had news and nothing was kept")
        told = {told.snapshot_id: told.value for told in story.told.values()}
        await check_store(node, told, set(told))
