"""Backups of a torture server, and restores of them beside it: what rounds do, and what must hold after each."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from perdure.backup import restore as restoring
from perdure.backup.catalogue import Defaults
from perdure.backup.ledger import PlaceLedger
from perdure.backup.make import Made, Origin, Progress, make
from perdure.backup.place import Place, open_place
from perdure.backup.recover import Into, recover
from perdure.backup.service import BackupService
from perdure.core import ids
from perdure.core.clock import SystemClock, epoch_ms
from perdure.core.config import Settings
from perdure.core.errors import NotFound, PerdureError
from perdure.core.ids import NodeId
from perdure.db.database import Database
from perdure.db.migrations import migrate
from perdure.fleet.objects import StoreCatalogue
from perdure.images.model import Golden, Image
from perdure.images.registry import IMAGE_FILES, ImageStore, golden_to_json, image_to_json
from perdure.images.sparse import file_facts
from perdure.snapshots.objects.client import ClientSettings, Objects, open_objects
from perdure.snapshots.objects.download import Downloader
from perdure.snapshots.objects.keys import PlainKeyring
from perdure.snapshots.objects.local import Mover
from perdure.snapshots.objects.remote import OWNER, Remote
from perdure.snapshots.objects.upload import Uploader
from perdure.workspaces.facts import facts_of
from perdure.workspaces.model import WorkspaceState
from tests.torture.ledger import Ledger
from tests.torture.model import Violation
from tests.torture.node import DIGEST, DISK_GIB, SIZE
from tests.torture.server import CTX, Server
from tests.torture.story import clear

GOLDEN_FILES = ("ram.base", "devices.state", "disk.qcow2")
MASTER = bytes(range(32))
BACKUPS_MAX = 4


def clock_ms() -> int:
    return epoch_ms(SystemClock())


def nobody_asks(_progress: Progress) -> None:
    return None


def make_images(root: Path, image: Path) -> ImageStore:
    """The one torture image as a node has its images: with descriptions and checksums."""
    directory = root / "blobs" / DIGEST
    golden = directory / "golden" / image.name
    if not (golden / "golden.json").is_file():
        shutil.rmtree(directory, ignore_errors=True)
        golden.mkdir(parents=True)
        for name in IMAGE_FILES:
            (directory / name).write_bytes((image / "root.raw").read_bytes() if name == "root.raw" else name.encode())
        for name in GOLDEN_FILES:
            shutil.copyfile(image / name, golden / name)
        when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        about = {"kernel_digest": "", "agent_release": "", "recipe_digest": "", "root_digest": "", "packages": {}}
        made = Image(DIGEST, "base", when, directory, SIZE, DISK_GIB, "6", 1, {}, (), (), **about)
        described = image_to_json(made, {name: file_facts(directory / name) for name in IMAGE_FILES})
        (directory / "image.json").write_bytes(described)
        warm = Golden(DIGEST, SIZE, golden, "fp", "ab" * 32, 1.0, when, 0, 0)
        (golden / "golden.json").write_bytes(golden_to_json(warm, {name: file_facts(golden / name) for name in GOLDEN_FILES}))
        (root / "names").mkdir(exist_ok=True)
        (root / "names" / "base").write_text(DIGEST)
    return ImageStore(root)


@dataclass(frozen=True)
class Saving:
    """Where a server's backups go, and where they are restored."""

    server: Server

    @property
    def directory(self) -> Path:
        return self.server.home.with_name(f"{self.server.home.name}-backups")

    @property
    def home(self) -> Path:
        """Of the restored one."""
        return self.server.home.with_name(f"{self.server.home.name}-restored")

    @property
    def url(self) -> str:
        return _beside(self.server.database.url, "restored")

    @property
    def _image(self) -> Path:
        """Of ``make_image``."""
        directory: Path = cast(Any, self.server.node)._goldens._image.directory
        return directory

    @property
    def _images(self) -> Path:
        return self.server.home / "own-images"

    @property
    def place(self) -> Place:
        return open_place(str(self.directory), clock_ms, make=True)

    def _origin(self, images: ImageStore) -> Origin:
        server = self.server
        return Origin(
            release="torture",
            database=server.database,
            store=server.node.store,
            images=images,
            clock=SystemClock(),
            home=server.home,
            scratch=server.home / "run",
            master=MASTER,
            keys_dir=server.home / "keys",
        )

    @property
    def service(self) -> BackupService:
        """As the server has it while no backup is under way."""
        return BackupService(self._origin(ImageStore(self._images)), lambda: ClientSettings({}))

    async def back_up(self) -> Made:
        origin = self._origin(make_images(self._images, self._image))
        return await make(origin, self.place, ids.mint("bak", now_ms=clock_ms()), nobody_asks, with_master_key=True)

    # ---------------------------------------------------------------------------------------------------------------- restoring

    @property
    def _expected(self) -> Path:
        return self.home.with_suffix(".json")

    async def restore(self) -> None:
        """Into an empty home and an empty database."""
        _recreate(self.server.database.url, self.url)
        clear(self.home)
        facts = self.server.ledger.facts
        values = {name: [sorted(one.allowed | one.captured), one.generation] for name, one in facts.items() if one.is_known}
        self._expected.write_text(json.dumps(values))
        await self._go_on()

    async def _go_on(self) -> None:
        settings = Settings(home=self.home, image_dir=self.home / "images", database_url=self.url, crash_file=None)
        to = restoring.Destination(settings, ImageStore(settings.images), lambda: NodeId("nod_restored"))
        ready = await restoring.prepare(to, self.place, None)
        await restoring.restore(to, self.place, ready, self.url, nobody_asks)

    async def check(self) -> None:
        """What a backup or a restore that was cut off anywhere has left. Raises Violation."""
        if held := await self.server.database.all("retention.used_of_node", node_id=self.server.node.node_id):
            raise Violation(f"a backup that is over holds {held[0]}")
        whole, _ = await self.place.listed() if self.directory.exists() else ([], [])
        if self.directory.exists():
            await check_directory(open_objects(self.directory.as_uri()), self.directory)
        if whole:
            await self._check_whole()
        if len(whole) > BACKUPS_MAX and not self._expected.exists():
            clear(self.directory)  # each round looks through all of it
        if self._expected.exists():
            if (self.home / restoring.MARK).exists():
                await self._go_on()
            if (self.home / "store").exists():
                await self._check_restored()
            self._expected.unlink()
            clear(self.home)

    async def _check_whole(self) -> None:
        """Every chunk of the newest backup is there; the rest of this is looked at by a restore."""
        settings = Settings(home=self.home.with_name("nobody"), image_dir=self.home / "images", crash_file=None)
        to = restoring.Destination(settings, ImageStore(settings.images), lambda: NodeId("nod_restored"))
        try:
            await restoring.prepare(to, self.place, None)
        except PerdureError as error:
            raise Violation(f"the newest backup is complete, and cannot be restored: {error.message}") from error
        finally:
            clear(settings.home)

    async def _check_restored(self) -> None:
        """Whatever was acknowledged before the backup wakes there, in a generation that the server never had."""
        expected: dict[str, tuple[list[int], int]] = json.loads(self._expected.read_text())
        async with _open(self.url) as database:
            restored = Server(database, self.home, self._image, NodeId("nod_restored"), Ledger(self.home / "ledger"))
            try:
                await restored.start()
                await self._check_values(restored, expected)
            finally:
                await restored.node.crash()

    async def _check_values(self, restored: Server, expected: dict[str, tuple[list[int], int]]) -> None:
        found = {one.id: one for one in await restored.service.find(CTX)}
        for workspace, (values, generation) in expected.items():
            one = found.get(workspace)
            if one is None:
                continue  # deleted, though nobody was told
            if one.state not in (WorkspaceState.HIBERNATED, WorkspaceState.FAILED):
                raise Violation(f"{one.name} was restored as {one.state.value}")
            if one.state is WorkspaceState.FAILED:
                continue
            proof = await restored.prove(one.id)
            if proof.wrong or proof.value not in values:
                raise Violation(f"{one.name} was restored with {proof.value}, of {values}: {proof.wrong}")
            if (now := await restored.service.get(CTX, one.id)).generation <= generation + 1:
                raise Violation(f"{one.name} was restored in generation {now.generation}, after {generation}")


async def check_directory(objects: Objects, directory: Path) -> None:
    """Nothing takes room in a store's directory that its listing does not show and a sweep does not remove. Raises Violation.

    Nobody may be writing to it.
    """
    await objects.sweep(clock_ms())
    shown = {name async for name, _ in objects.list("")}
    there = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    if hidden := there - shown:
        raise Violation(f"files that are no objects, and that nobody removes: {sorted(hidden)}")


@dataclass(frozen=True)
class Recovering:
    """A copy of a server's snapshots in an object store, and a catalogue made of that alone."""

    server: Server

    @property
    def directory(self) -> Path:
        return self.server.home.with_name(f"{self.server.home.name}-copies")

    @property
    def url(self) -> str:
        return _beside(self.server.database.url, "recovered")

    @property
    def _expected(self) -> Path:
        return self.directory.with_suffix(".json")

    def _remote(self) -> Remote:
        return Remote(open_objects(self.directory.as_uri()), PlainKeyring(), clock_ms)

    async def copy(self) -> None:
        """Everything that is complete, with what the database knows of it."""
        server, remote = self.server, self._remote()
        ledger = PlaceLedger(remote, clock_ms)
        ram = cast(Any, server.node)._goldens._ram
        mover = Mover(server.node.store, Uploader(remote, ledger), Downloader(remote, ledger), lambda _: ram)
        for one in server.node.store.complete():
            await mover.upload(one.snapshot_id, (), await facts_of(server.database, one.snapshot_id))

    async def recover(self) -> None:
        """All that is here now, and nothing of earlier times: a copy that a crash cuts off is expected to hold nothing."""
        self._expected.unlink(missing_ok=True)
        clear(self.directory)
        await self.copy()
        _recreate(self.server.database.url, self.url)
        await asyncio.to_thread(migrate, self.url)
        names = {row["id"]: row["name"] for row in await self.server.database.all("backup.workspaces")}
        # A branch that stands on another's snapshot and has none of its own is in no store yet.
        own = {row["workspace_id"] for row in await self.server.database.all("backup.snapshots")}
        self._expected.write_text(json.dumps({key: name for key, name in names.items() if key in own}))
        await self._go_on()

    async def _go_on(self) -> bool:
        """Whether the store holds anything. It must if something is expected: a store of what has captured nothing is refused."""
        async with _open(self.url) as database:
            into = Into(database, lambda: NodeId("nod_recovered"), Defaults(900, 60))
            try:
                await recover(self._remote(), StoreCatalogue(database), into, lambda _: None)
            except NotFound as error:
                if expected := json.loads(self._expected.read_text()):
                    raise Violation(f"{sorted(expected.values())} were copied into a store that holds nothing") from error
                return False
        return True

    async def check(self) -> None:
        """A catalogue is there as a whole, or not at all and can be made again. Raises Violation."""
        if not self._expected.exists():
            return
        async with _open(self.url) as database:
            row = await database.one("catalogue.is_empty")
        if row is not None and row["is_empty"] and not await self._go_on():
            self._expected.unlink()
            return
        expected = json.loads(self._expected.read_text())
        async with _open(self.url) as database:
            rows = {row["id"]: row for row in await database.all("backup.workspaces")}
            snapshots = {row["id"] for row in await database.all("backup.snapshots")}
            installation = await database.one("catalogue.installation")
        if gone := {name for key, name in expected.items() if key not in rows}:
            raise Violation(f"{sorted(gone)} are in the store and in no catalogue")
        if wrong := [row["name"] for row in rows.values() if row["head_snapshot_id"] not in snapshots]:
            raise Violation(f"{wrong} were recovered without a head")
        owner = json.loads(await self._remote().objects.get(OWNER))["owner"]
        if installation is None or owner != installation["id"]:
            raise Violation(f"the store is {owner}'s, and its catalogue another's")
        self._expected.unlink()


@asynccontextmanager
async def _open(url: str) -> AsyncIterator[Database]:
    database = Database(url, max_connections=4)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


def _beside(url: str, what: str) -> str:
    parts = conninfo_to_dict(url)
    return make_conninfo("", **{**parts, "dbname": f"{parts['dbname']}_{what}"})


def _recreate(url: str, beside: str) -> None:
    name = str(conninfo_to_dict(beside)["dbname"])
    assert name.replace("_", "").isalnum()
    with psycopg.connect(make_conninfo("", **{**conninfo_to_dict(url), "dbname": "postgres"}), autocommit=True) as connection:
        connection.execute(f"drop database if exists {name} with (force)".encode())
        connection.execute(f"create database {name} template template0".encode())
