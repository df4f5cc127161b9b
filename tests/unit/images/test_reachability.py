"""Random lives of an image directory: what a name or a workspace needs is there, whole, with the golden snapshot that it lies on;
what nobody needs goes with the next pruning, and nothing that was begun is left. Who needs what in the database, with callers at
once and a server that is killed: ``tests/simulation/test_images.py``.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.core.errors import Conflict, NotFound
from perdure.images.model import Image
from perdure.images.progress import ProgressSink
from perdure.images.service import ImageService
from perdure.images.verify import ImageVerifier
from tests.fakes.node_images import Images, digest_of, put_golden, put_image

NAMES = ("base", "tool")
DIGESTS = tuple(digest_of(f"image {number}") for number in range(4))
GOLDENS = ("512m1c-0", "1024m2c-0")


class Life:
    def __init__(self, root: Path) -> None:
        self.store = Images(root)
        self.names: dict[str, str] = {}
        self.goldens: dict[str, set[str]] = {}  # of every image that is there
        self.needs: list[tuple[str, str]] = []  # image and golden that each workspace or snapshot lies on

    @property
    def images(self) -> ImageService:
        async def no_golden(_image: Image, _sink: ProgressSink) -> None:
            return None

        @asynccontextmanager
        async def users_of(digest: str) -> AsyncIterator[list[str]]:
            yield [f"demo{number}" for number, (image, _) in enumerate(self.needs) if image == digest]

        return ImageService(self.store, no_golden, users_of)

    async def build(self, number: int) -> None:
        digest, name = DIGESTS[number % 4], NAMES[number % 2]
        image = put_image(self.store, digest, name)
        self.names[image.name] = digest
        self.goldens.setdefault(digest, set())

    async def golden(self, number: int) -> None:
        digest, name = DIGESTS[number % 4], GOLDENS[number % 2]
        if digest in self.goldens:
            put_golden(self.store, self.store.load(digest), name)
            self.goldens[digest].add(name)

    async def use(self, number: int) -> None:
        """A workspace, or a snapshot that outlives one."""
        there = [(digest, name) for digest, names in sorted(self.goldens.items()) for name in sorted(names)]
        if there:
            self.needs.append(there[number % len(there)])

    async def leave(self, number: int) -> None:
        if self.needs:
            del self.needs[number % len(self.needs)]

    async def remove(self, number: int) -> None:
        digest = DIGESTS[number % 4]
        is_needed = digest in {image for image, _ in self.needs}
        try:
            await self.images.remove(digest if number % 3 else digest[:12])
        except Conflict:
            assert is_needed
        except NotFound:
            assert digest not in self.goldens
        else:
            assert not is_needed
            self._gone({digest})

    async def prune(self, number: int) -> None:
        pruned = await self.images.prune()
        needed = {image for image, _ in self.needs} | set(self.names.values())
        gone = {image.digest for image in pruned.removed}
        assert gone == set(self.goldens) - needed
        self._gone(gone)

    async def die(self, number: int) -> None:
        """The server is killed in the middle of a removal, at its one step or behind it; the next one sweeps."""
        digest = DIGESTS[number % 4]
        if digest in self.goldens and digest not in {image for image, _ in self.needs}:
            self.store.withdraw(self.store.load(digest))
            self._gone({digest})
        (self.store.root / "blobs" / digest_of(f"half {number}")).mkdir(parents=True, exist_ok=True)
        self.store.die()
        self.store.sweep()

    async def move(self, number: int) -> None:
        """A removal that is taken back."""
        digest = DIGESTS[number % 4]
        if digest in self.goldens:
            self.store.put_back(self.store.withdraw(self.store.load(digest)))

    def _gone(self, digests: set[str]) -> None:
        self.goldens = {digest: names for digest, names in self.goldens.items() if digest not in digests}
        self.names = {name: digest for name, digest in self.names.items() if digest not in digests}

    def check(self) -> None:
        store, verifier = self.store, ImageVerifier(self.store, lambda _name, _count: None)
        for digest, name in self.needs:
            image = store.load(digest)
            golden = store.golden(image, name)
            assert verifier.image(digest) == ()
            assert verifier.golden(digest, golden.ref) == ()
        assert store.names() == self.names
        assert {image.digest for image in store.all()} == set(self.goldens)
        for image in store.all():
            assert {golden.name for golden in store.goldens(image)} == self.goldens[image.digest]
        if (store.root / "tmp").is_dir():
            assert list((store.root / "tmp").iterdir()) == []


STEPS: dict[str, Callable[[Life, int], object]] = {
    name: getattr(Life, name) for name in ("build", "golden", "use", "leave", "remove", "prune", "die", "move")
}
MOVES = st.lists(st.tuples(st.sampled_from([*STEPS, "build", "golden", "golden", "use"]), st.integers(0, 1000)), max_size=40)


@given(MOVES)
@settings(
    max_examples=100 if os.environ.get("PERDURE_TEST_LONG") else 15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
def test_what_is_needed_stays_and_nothing_else(moves: list[tuple[str, int]]) -> None:
    async def live() -> None:
        with tempfile.TemporaryDirectory() as folder:
            life = Life(Path(folder) / "images")
            for name, number in moves:
                await getattr(life, name)(number)
                life.check()

    asyncio.run(live())
