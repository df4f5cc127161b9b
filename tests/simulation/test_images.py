"""The server is killed at every point while images are removed, built anew and pruned, and workspaces of them come and go.

Beside the invariants of ``world``: every workspace has its image and golden snapshot, and starts; an image whose removal was
acknowledged is no more; what neither a name nor a workspace needs goes with the next pruning, and no removal leaves a file.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from perdure.core.errors import PerdureError
from perdure.core.ids import NodeId
from perdure.db.database import Database
from perdure.images.model import Image
from perdure.images.progress import ProgressSink
from perdure.images.service import ImageService
from perdure.workspaces.model import CreateWorkspace
from tests.fakes.node_images import Images, NodeWithImages, digest_of, put_golden, put_image
from tests.simulation.fuse import Fuse, killed_everywhere, steps
from tests.simulation.world import Facts, Simulation, kill_in


async def no_golden(_image: Image, _sink: ProgressSink) -> None:
    return None


class WithImages(Simulation):
    def __init__(self, database: Database, label: str, fuse: Fuse, root: Path) -> None:
        super().__init__(database, label, fuse)
        self.label = label
        self.store = Images(root / label)
        self.plane.images = self.store  # type: ignore[assignment]
        self.plane.node = NodeWithImages(self.store, NodeId(f"nod_{label}"), self.plane.clock)
        self.removed: set[str] = set()  # digests whose removal was acknowledged

    @property
    def images(self) -> ImageService:
        """That of the server's process."""
        return ImageService(self.store, no_golden, self.service._store.needing_image)

    def built(self, what: str, name: str) -> None:
        """Another process has built it; names are of this life, so that no other one uses its images."""
        digest = digest_of(self.label + what)
        put_golden(self.store, put_image(self.store, digest, name))
        self.removed.discard(digest)

    async def create_of(self, name: str, image: str) -> None:
        async def work() -> None:
            workspace, _ = await self.service.create(self.ctx, CreateWorkspace(name, image=image))
            self.facts[workspace.id] = Facts(allowed={b""}, generation=1)

        await self.attempt(work())

    async def remove(self, ref: str) -> None:
        async def work() -> None:
            digest = self.store.resolve(ref).digest
            await self.images.remove(ref)
            self.removed.add(digest)

        await self.attempt(work())

    async def prune(self) -> None:
        async def work() -> None:
            self.removed |= {image.digest for image in (await self.images.prune()).removed}

        await self.attempt(work())

    async def recover(self, *, node_too: bool, fuse: Fuse | None = None) -> bool:
        self.store.die()
        self.store.sweep()  # as a node does that opens
        return await super().recover(node_too=node_too, fuse=fuse)

    async def check(self) -> None:
        await super().check()
        found = await self.service.find(self.ctx)
        for workspace in found:
            assert self.store.goldens(self.store.load(workspace.image)), f"{workspace.name} has lost its image"
        there = {image.digest for image in self.store.all()}
        assert not there & self.removed, "what was removed is there"
        await self.images.prune()
        needed = {digest for digest in there if await self._users(digest)}
        named = set(self.store.names().values())
        assert {image.digest for image in self.store.all()} == named | needed
        assert {path.name for path in self.store.root.glob("blobs/*")} == named | needed, "a removal has left files"
        assert list(self.store.root.glob("tmp/*")) == []

    async def _users(self, digest: str) -> list[str]:
        async with self.service._store.needing_image(digest) as users:
            return users

    async def end(self) -> None:
        for workspace in await self.service.find(self.ctx):
            await self.service.delete(self.ctx, workspace.id)
        await super().end()


async def scenario(simulation: WithImages) -> None:
    simulation.built("first", "base")
    await simulation.create_of("a", "base")
    await simulation.remove("base")  # refused
    simulation.built("second", "base")
    await simulation.prune()  # keeps the first
    await simulation.fork("a", 1)
    await simulation.delete("a")
    await simulation.remove(digest_of(simulation.label + "first"))  # refused: the branch is of it
    await asyncio.gather(simulation.create_of("b", "base"), simulation.remove("base"))
    await simulation.delete("a-1")
    await simulation.pass_time(10)
    await simulation.prune()
    simulation.built("third", "tool")
    await asyncio.gather(simulation.remove("tool"), simulation.create_of("c", "tool"))
    await simulation.delete("b")
    await simulation.pass_time(10)
    await simulation.remove("base")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", steps(5))
async def test_killed_at_every_point_of_images_that_go(database: Database, tmp_path: Path, step: int) -> None:
    async def kill(at: int | None) -> Fuse:
        return await kill_in(WithImages(database, f"i{at or 0}", Fuse(at), tmp_path), scenario, node_too=True)

    whole, fired = await killed_everywhere(kill, step)
    assert {"in transaction, before workspaces.lock_image", "in transaction, before workspaces.names_using_image"} <= set(
        whole.passed
    )
    assert fired.total() * step > 60


async def random_life(simulation: WithImages, random: Random, steps: int) -> None:
    """Of several callers at once."""
    for step in range(steps):
        if simulation.fuse.blew_at is not None:
            return
        if random.random() < 0.3:
            simulation.built(f"image{step}", random.choice(["base", "tool"]))
        await asyncio.gather(*(_move(simulation, random, f"w{step}-{number}", step) for number in range(4)))


async def _move(simulation: WithImages, random: Random, new: str, step: int) -> None:
    image, some = random.choice(["base", "tool"]), f"w{random.randrange(step + 1)}-{random.randrange(4)}"
    match random.choice(["create", "create", "remove", "prune", "fork", "delete", "delete", "sleep", "time"]):
        case "create":
            await simulation.create_of(new, image)
        case "remove":
            await simulation.remove(image)
        case "prune":
            await simulation.prune()
        case "fork":
            await simulation.fork(some, 1)
        case "delete":
            await simulation.delete(some)
        case "sleep":
            await simulation.sleep(some)
        case "time":
            await simulation.pass_time(10)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_random_lives_of_images_and_workspaces(database: Database, tmp_path: Path) -> None:
    """Nothing that is needed is ever removed, whatever is asked for at once and wherever the server is killed."""
    for seed in range(12):
        random = Random(seed)
        simulation = WithImages(database, f"r{seed}", Fuse(random.randint(20, 400)), tmp_path)
        try:
            await simulation.begin()
            for _ in range(2):  # lives of the server
                await random_life(simulation, random, 12)
                assert await simulation.recover(node_too=random.random() < 0.7)
                await simulation.check()
                simulation.fuse.at = simulation.fuse.count + random.randint(20, 400)
            simulation.fuse.at = None
            await simulation.end()
        except BaseException as error:
            error.add_note(f"seed {seed}, killed at: {simulation.fuse.blew_at}")
            raise


async def test_a_create_and_a_removal_at_once_on_two_servers(database: Database, tmp_path: Path) -> None:
    """Of one database and one image directory: the one or the other, never a workspace without its image."""
    first = WithImages(database, "one", Fuse(), tmp_path)
    other = WithImages(database, "two", Fuse(), tmp_path)
    await first.begin()
    await other.begin()
    other.store = first.store
    other.plane.images = first.store  # type: ignore[assignment]
    seen = set()
    for number in range(12):
        first.built("shared", "base")
        moves = [first.create_of(f"x{number}", "base"), other.images.remove("base")]
        if number % 2:
            moves.reverse()
        outcomes = await asyncio.gather(*moves, return_exceptions=True)
        assert not [one for one in outcomes if isinstance(one, BaseException) and not isinstance(one, PerdureError)]
        made = [one for one in await first.service.find(first.ctx) if one.name == f"x{number}"]
        is_there = digest_of("oneshared") in {image.digest for image in first.store.all()}
        assert is_there or not made, "a workspace was left without its image"
        assert bool(made) != (not is_there), "nothing happened at all"
        seen.add(bool(made))
        if made:
            await first.service.delete(first.ctx, made[0].id)
    assert len(seen) == 2, "each was first at least once"
    await first.end()
    await other.end()
