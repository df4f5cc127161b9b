"""A small server with a real database, and a second home to restore into."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.backup import restore as restoring
from perdure.backup.make import Made, Origin, Progress, make
from perdure.backup.place import Place, open_place
from perdure.core import ids
from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.core.ids import NodeId
from perdure.db.database import Database
from perdure.images.registry import ImageStore
from perdure.workspaces.model import CreateWorkspace, Workspace
from tests.fakes.database import empty_url, fresh_database
from tests.torture.ledger import Ledger
from tests.torture.node import PATH, make_image, small_thresholds, text
from tests.torture.saving import MASTER, clock_ms, make_images
from tests.torture.server import CTX, Server


@dataclass
class World:
    """``awake`` runs and has a checkpoint, ``asleep`` sleeps, ``new`` has never been captured."""

    root: Path
    server: Server
    told: list[Progress]
    seal: bool = False

    @property
    def directory(self) -> Path:
        return self.root / "backups"

    def origin(self) -> Origin:
        server = self.server
        return Origin(
            release="9.8.7",
            database=server.database,
            store=server.node.store,
            images=make_images(server.home / "own-images", self.root / "image"),
            clock=SystemClock(),
            home=server.home,
            scratch=server.home / "run",
            master=MASTER,
            keys_dir=server.home / "keys",
            sealed=self.seal,
        )

    def place(self, given: str | None = None) -> Place:
        return open_place(given or str(self.directory), clock_ms, make=True)

    async def back_up(
        self,
        place: Place | None = None,
        *,
        with_master_key: bool = True,
        origin: Origin | None = None,
        skip_damaged: bool = False,
    ) -> Made:
        backup_id = ids.mint("bak", now_ms=clock_ms())
        options = {"with_master_key": with_master_key, "skip_damaged": skip_damaged}
        return await make(origin or self.origin(), place or self.place(), backup_id, self.told.append, **options)

    async def value(self, name: str) -> int:
        return (await self.server.prove(name)).value

    async def put(self, name: str, value: int) -> None:
        async with self.server.service.awake(CTX, name) as awake:
            await awake.guest.write_file(PATH, text(value))

    async def get(self, name: str) -> Workspace:
        return await self.server.service.get(CTX, name)


@dataclass
class Restoration:
    """An empty home and an empty database."""

    root: Path
    url: str
    told: list[Progress]

    @property
    def home(self) -> Path:
        return self.root / "restored"

    def to(self) -> restoring.Destination:
        settings = Settings(home=self.home, image_dir=self.home / "images", database_url=self.url, crash_file=None)
        return restoring.Destination(settings, ImageStore(settings.images), lambda: NodeId("nod_restored"))

    def place(self, given: str | None = None) -> Place:
        return open_place(given or str(self.root / "backups"), clock_ms, make=False)

    async def restore(
        self, place: Place | None = None, backup_id: str | None = None, *, skip_damaged: bool = False
    ) -> restoring.Restored:
        place = place or self.place()
        ready = await restoring.prepare(self.to(), place, backup_id, skip_damaged=skip_damaged)
        return await restoring.restore(self.to(), place, ready, self.url, self.told.append)

    async def server(self) -> Server:
        """Over what was restored; the caller crashes it."""
        database = Database(self.url, max_connections=4)
        await database.open()
        server = Server(database, self.home, self.root / "image", NodeId("nod_restored"), Ledger(self.home / "ledger"))
        await server.start()
        return server

    def is_untouched(self) -> bool:
        """But for a key, which is asked for before anything else."""
        return {path.name for path in self.home.iterdir()} <= {"master.key", "keys"} if self.home.exists() else True


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="perdure-backup-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@asynccontextmanager
async def small_world(root: Path) -> AsyncIterator[World]:
    make_image(root / "image")
    (root / "home").mkdir()
    with small_thresholds():
        async with fresh_database() as database:
            server = Server(database, root / "home", root / "image", NodeId("nod_first"), Ledger(root / "home/ledger"))
            await server.start()
            world = World(root, server, [])
            for name in ("awake", "asleep"):
                await server.service.create(CTX, CreateWorkspace(name))
                await world.put(name, 7)
            await server.service.checkpoint(CTX, "awake", name="good")
            await world.put("awake", 8)
            await server.service.sleep(CTX, "asleep")
            await server.service.create(CTX, CreateWorkspace("new"))
            try:
                yield world
            finally:
                await server.node.crash()


@pytest.fixture
async def world(root: Path) -> AsyncIterator[World]:
    async with small_world(root) as world:
        yield world


@pytest.fixture
async def restoration(root: Path) -> AsyncIterator[Restoration]:
    async with empty_url() as url:
        yield Restoration(root, url, [])
