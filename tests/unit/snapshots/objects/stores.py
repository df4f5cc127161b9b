"""What the tests of the store share: one installation on a fake store and a fake catalogue, and small contents."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from perdure.core.errors import CorruptSnapshot
from perdure.snapshots.objects.chunks import BLOCK, Chunk, Kind, Source
from perdure.snapshots.objects.client import Objects
from perdure.snapshots.objects.collect import Collected, Collector
from perdure.snapshots.objects.download import Downloader
from perdure.snapshots.objects.keys import Keyring, PlainKeyring
from perdure.snapshots.objects.remote import OWNER, Remote
from perdure.snapshots.objects.upload import Contents, Moved, Uploader
from perdure.wire.objects import Catalogue, Item, ItemKey, Scope
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.objects import FakeObjects

TENANT = Scope("ten_a")
OTHER = Scope("ten_b")


def block(seed: int, size: int = 300) -> bytes:
    """Content that compresses little and is the same for the same seed."""
    return b"".join(((seed * 2654435761 + at * 40503) % (1 << 32)).to_bytes(4, "little") for at in range(size // 4))


def source(name: str, seeds: dict[int, int]) -> Source:
    """A file whose block N has the content of a seed. Blocks shorter than 64 KiB keep the tests small; only files mind."""
    chunks: list[Chunk] = [(number, block(seed)) for number, seed in sorted(seeds.items())]
    return Source(name, Kind.REGIONS, (max(seeds, default=0) + 1) * BLOCK, iter(chunks))


def marked(owner: str = "here") -> FakeObjects:
    """A store that an installation has claimed, as it does before anything is uploaded."""
    objects = FakeObjects()
    objects.data[OWNER] = json.dumps({"owner": owner}).encode()
    return objects


@dataclass
class Home:
    """One process of an installation. Several may share objects and catalogue."""

    objects: Objects = field(default_factory=marked)
    catalogue: Catalogue = field(default_factory=FakeCatalogue)
    keyring: Keyring = field(default_factory=PlainKeyring)
    pack_bytes: int = 1500
    owner: str = "here"
    clock: Any = field(default_factory=lambda: itertools.count(1).__next__)

    def __post_init__(self) -> None:
        self.remote = Remote(self.objects, self.keyring, self.clock)
        self.uploader = Uploader(self.remote, self.catalogue, pack_bytes=self.pack_bytes)
        self.downloader = Downloader(self.remote, self.catalogue)
        self.collector = Collector(self.remote, self.catalogue, self.owner, pack_bytes=self.pack_bytes)

    async def upload(self, name: str, seeds: dict[int, int], scope: Scope = TENANT, **more: Any) -> tuple[Item, Moved]:
        return await self.uploader.upload(Contents(ItemKey(scope, name), [source("ram", seeds)], **more))

    async def read(self, name: str, scope: Scope = TENANT) -> dict[int, bytes]:
        item = await self.downloader.open(ItemKey(scope, name))
        found: dict[int, bytes] = {}
        async for window in self.downloader.chunks(item, item.manifest.file("ram")):
            found |= dict(window)
        return found

    async def has(self, name: str, seeds: dict[int, int], scope: Scope = TENANT) -> bool:
        """Whether an item reads back as what was uploaded; what is wrong must be told as CorruptSnapshot."""
        try:
            assert await self.read(name, scope) == {number: block(seed) for number, seed in seeds.items()}
        except CorruptSnapshot:
            return False
        return True

    async def collect(self, scope: Scope = TENANT, passes: int = 1) -> list[Collected]:
        done = [await self.collector.collect(scope) for _ in range(passes)]
        return [one for one in done if one is not None]
