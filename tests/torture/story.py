"""A life of a few workspaces on one node, told by a seed, that remembers what callers were told.

Used by rounds that look at files only: no database, no processes. The seed decides every step; ids and times are the host's.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from perdure.core.errors import PerdureError
from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.snapshots.merge import is_deep
from perdure.wire.node import CaptureMode, CaptureSpec, FromDisk, FromGolden, FromSnapshot
from tests.fakes.tiny_node import NOW, snapshot_id
from tests.torture.machine import Proof
from tests.torture.model import Violation
from tests.torture.node import TortureNode, start_spec
from tests.torture.registry import Place

FOREVER = 1 << 60


@dataclass
class Told:
    """A snapshot that a caller was told of: it exists from one instant to another, and this is the value in it."""

    snapshot_id: SnapshotId
    value: int
    since: int
    until: int = FOREVER


@dataclass
class Awake:
    workspace_id: WorkspaceId
    generation: int
    value: int
    head: SnapshotId | None


class Story:
    """``instant`` counts what has happened on the disk. ``told`` has snapshots with memory only."""

    def __init__(self, node: TortureNode, random: Random, instant: Callable[[], int] = lambda: 0) -> None:
        self.node = node
        self.told: dict[SnapshotId, Told] = {}
        self.awake: dict[WorkspaceId, Awake] = {}
        self.asleep: dict[WorkspaceId, Awake] = {}
        self._random = random
        self._instant = instant
        self._values = 0
        self._born = 0

    async def live(self, steps: int) -> None:
        """So many random steps. Raises what the product raises."""
        for _ in range(steps):
            await self._step()

    async def _step(self) -> None:
        random = self._random
        if not self.awake and not self.asleep:
            await self.create()
        elif not self.awake or (self.asleep and random.random() < 0.25):
            await self.wake(random.choice(list(self.asleep.values())))
        else:
            one = random.choice(list(self.awake.values()))
            weights: dict[Callable[[Awake], Awaitable[object]], int] = {
                **{self.checkpoint: 8, self.sleep: 4, self.drop: 3, self.rebase: 2},
                **{self.merge: 2, self.fork: 1, self.die: 1, self.reboot: 1, self.compact: 1},
            }
            await random.choices(list(weights), list(weights.values()))[0](one)

    # --------------------------------------------------------------------------------------------------------------- steps

    async def create(self) -> Awake:
        self._born += 1
        one = Awake(WorkspaceId(f"ws_{self._born}"), 1, 0, None)
        await self.node.start(start_spec(one.workspace_id, 1, FromGolden()))
        self.awake[one.workspace_id] = one
        await self.put(one)
        return one

    async def put(self, one: Awake) -> None:
        self._values += 1
        await self.node.put(one.workspace_id, one.generation, self._values)
        one.value = self._values

    async def checkpoint(self, one: Awake) -> Told:
        await self.put(one)
        return await self._capture(one, CaptureMode.CHECKPOINT)

    async def sleep(self, one: Awake) -> Told:
        if self._random.random() < 0.5:
            await self.put(one)
        told = await self._capture(one, CaptureMode.HIBERNATE)
        self.asleep[one.workspace_id] = self.awake.pop(one.workspace_id)
        return told

    async def _capture(self, one: Awake, mode: CaptureMode) -> Told:
        name = snapshot_id()
        await self.node.capture(CaptureSpec(one.workspace_id, one.generation, name, mode))
        one.head = name
        told = self.told[name] = Told(name, one.value, self._instant())
        return told

    async def wake(self, one: Awake) -> None:
        assert one.head is not None
        one.generation += 1
        await self.node.start(start_spec(one.workspace_id, one.generation, FromSnapshot(one.head)))
        self.awake[one.workspace_id] = self.asleep.pop(one.workspace_id)
        check(await self.node.prove(one.workspace_id, one.generation), one.value, f"{one.workspace_id} after its wake")

    async def fork(self, one: Awake) -> None:
        if one.head is None or len(self.awake) > 2 or one.head not in self.told:
            return
        self._born += 1
        child = Awake(WorkspaceId(f"ws_{self._born}"), 1, self.told[one.head].value, one.head)
        await self.node.start(start_spec(child.workspace_id, 1, FromSnapshot(one.head)))
        self.awake[child.workspace_id] = child
        check(await self.node.prove(child.workspace_id, 1), child.value, f"{child.workspace_id}, a fork")

    async def drop(self, one: Awake) -> None:
        """Retention, while it is awake: also the snapshot that it was woken from, and a sweep of what nobody needs."""
        heads = {other.head for other in (*self.awake.values(), *self.asleep.values()) if other is not one}
        names = [name for name, told in self.told.items() if told.until == FOREVER and name not in heads]
        if names:
            gone = names if self._random.random() < 0.3 else names[: len(names) // 2 + 1]
            for name in gone:
                self.told[name].until = self._instant()
            await self.node.delete_snapshots(tuple(gone))
            for name in gone:
                del self.told[name]
                self._gone(name)
        self.node.store.sweep()
        check(await self.node.prove(one.workspace_id, one.generation), one.value, f"{one.workspace_id} after a sweep")

    def _gone(self, name: SnapshotId) -> None:
        for one in self.awake.values():
            if one.head == name:
                one.head = None

    async def compact(self, _one: Awake) -> None:
        await self.node.compact()

    async def rebase(self, one: Awake) -> None:
        """Somebody who sleeps gets a base of his own."""
        if not self.asleep:
            await self.sleep(one)
        chosen = self._random.choice(list(self.asleep.values()))
        if chosen.head in self.told:
            assert chosen.head is not None
            await self.node.rebase(chosen.head)

    async def merge(self, one: Awake) -> None:
        """It sleeps and wakes until its disk lies on too many layers, and then on fewer."""
        while one.workspace_id in self.awake:
            await self.sleep(one)
            assert one.head is not None
            if is_deep(self.node.store.manifest(one.head)):
                await self.node.merge(one.head)
            else:
                await self.wake(one)

    async def die(self, one: Awake) -> None:
        """Its VMM dies: the disk that it had is kept as a snapshot, from which it boots."""
        await self.node.machines[one.workspace_id].kill()
        name = snapshot_id()
        await self.node.stop(one.workspace_id, one.generation, keep_overlay=True)
        facts = await self.node.salvage(one.workspace_id, one.generation, name)
        if facts is None:
            raise Violation(f"{one.workspace_id} wrote {one.value} to its disk and died, and nothing of it was kept")
        await self._boot(one, FromDisk(name, "requested"), None)
        await self.node.delete_snapshots((name,))

    async def reboot(self, one: Awake) -> None:
        await self.node.machines[one.workspace_id].kill()
        await self._boot(one, FromDisk(None, "guest-reboot"), one.generation)

    async def _boot(self, one: Awake, source: FromDisk, take_over: int | None) -> None:
        one.generation += 1
        await self.node.start(start_spec(one.workspace_id, one.generation, source, take_over))
        check(await self.node.prove(one.workspace_id, one.generation), one.value, f"{one.workspace_id} after a boot of its disk")


def check(proof: Proof, value: int, what: str) -> None:
    """Raises Violation unless everything that the guest keeps is of one instant and of this value."""
    if proof.wrong:
        raise Violation(f"{what}: {proof.wrong}")
    if proof.value != value:
        raise Violation(f"{what} holds {proof.value}, not {value}")


async def check_store(node: TortureNode, told: dict[SnapshotId, int], must: set[SnapshotId]) -> None:
    """All invariants of a store that was just opened by ``node``: what was acknowledged is there, everything that is there wakes
    with exactly its content, and when all of it is deleted nothing remains. Ends everything that is in it."""
    if debris := node.store.open().debris:
        raise Violation(f"a second opening still found {debris}")
    present = {facts.snapshot_id: facts for facts in node.store.complete()}
    if lost := must - set(present):
        raise Violation(f"acknowledged snapshots are gone: {sorted(lost)}")
    for name, facts in present.items():
        if not facts.has_memory:
            continue
        try:
            await node.snapshot(name)
            proof = await node.prove_snapshot(name)
        except PerdureError as error:
            raise Violation(f"snapshot {name} of value {told.get(name)} does not wake: {error.message}") from error
        if name in told:
            check(proof, told[name], f"snapshot {name}")
        elif proof.wrong:
            raise Violation(f"snapshot {name}, of which nobody was told: {proof.wrong}")
    for record in node.store.live():
        node.store.salvage(record.workspace_id, record.generation, snapshot_id(), NOW)
    node.store.delete([facts.snapshot_id for facts in node.store.complete()])
    left = files_of(node)
    if left:
        raise Violation(f"all snapshots are deleted, and these files remain: {sorted(left)}")


def files_of(node: TortureNode) -> set[str]:
    root = node.store.root
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {"lock"}


def clear(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


class Stories:
    """What rounds that tell stories start with. They have no process of their own, so there is nothing to close."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._scratch = place.scratch
        self._image = place.image
        self._random = place.random
        self._numbers = itertools.count(1)

    async def close(self) -> None:
        return None
