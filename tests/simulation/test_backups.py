"""A backup, and a restore, killed at every statement, at every object that is put and every file that is written.

After a killed backup: the next life holds nothing for it, what is complete in the place can be restored, and the next backup is
complete. After a killed restore: run again, it goes on, and everything that was acknowledged before the backup wakes.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from perdure.backup import make as making
from perdure.backup import restore as restoring
from perdure.backup.place import Place
from perdure.backup.service import BackupService
from perdure.core.errors import NotFound
from perdure.db import dump as database_dump
from perdure.db.database import Database
from perdure.journal.entries import Journal
from perdure.snapshots.objects.client import ClientSettings
from perdure.workspaces.model import WorkspaceState
from tests.fakes.database import empty_url
from tests.integration.backup.conftest import Restoration, World, small_world
from tests.simulation.fuse import Fuse, FusedCalls, FusedDatabase, FusedTransaction, killed_everywhere, steps
from tests.torture.server import CTX

VALUES = {"awake": 7, "asleep": 7, "new": 0}
WRITES = ("make_dir", "write_file", "remove")


class FusedCluster(FusedDatabase):
    """With what a backup and a restore ask of a database beside statements."""

    @property
    def url(self) -> str:
        return self._inner.url

    async def close(self) -> None:
        await self._inner.close()


@dataclass
class Saved:
    """Backups and restores of one small world under a fuse, which stands in the modules' own doors."""

    world: World
    monkeypatch: pytest.MonkeyPatch
    fuse: Fuse = field(default_factory=Fuse)
    number: int = 0

    def __post_init__(self) -> None:
        def calls(name: str, inner: object, changing: tuple[str, ...]) -> Any:
            return FusedCalls(lambda: self.fuse, name, inner, changing)

        self.monkeypatch.setattr(making, "database_dump", calls("dump", _Dump(lambda: self.fuse), ("dump",)))
        self.monkeypatch.setattr(restoring, "database_dump", calls("dump", database_dump, ("load", "is_empty")))
        self.monkeypatch.setattr(restoring, "files", calls("files", restoring.files, WRITES))
        self.monkeypatch.setattr(restoring, "connect_migrated", self._connect_migrated(restoring.connect_migrated))
        self._open = calls

    def _connect_migrated(self, real: Callable[[str], Any]) -> Callable[[str], Any]:
        async def connect(url: str) -> FusedCluster:
            return FusedCluster(self.fuse, await real(url))

        return connect

    def place(self, directory: Path) -> Place:
        place = self.world.place(str(directory))
        place._objects = self._open("place", place._objects, ("put",))
        return place

    async def attempt(self, fuse: Fuse, work: Any) -> None:
        """Killed where the fuse blows; nothing of it gets anywhere after that, and later ones have no fuse."""
        self.fuse = fuse
        try:
            await work
        except BaseException:  # SIGKILL, or what a group of tasks made of it
            if fuse.blew_at is None:
                raise
        finally:
            self.fuse = Fuse()
        assert (fuse.blew_at is not None) == (fuse.at is not None and fuse.at <= fuse.count), "the fuse did what it was told"

    # --------------------------------------------------------------------------------------------------------------- backup

    async def kill_backup(self, at: int | None) -> Fuse:
        fuse, world = Fuse(at), self.world
        self.number += 1
        directory = world.root / f"place{self.number}"
        database = cast(Database, FusedCluster(fuse, world.server.database))
        place, origin = self.place(directory), replace(world.origin(), database=database)
        await self.attempt(fuse, world.back_up(place, origin=origin))
        await self._check_backup(place, complete=fuse.blew_at is None)
        shutil.rmtree(directory)
        return fuse

    async def _check_backup(self, place: Place, *, complete: bool) -> None:
        server = self.world.server
        await BackupService(self.world.origin(), lambda: ClientSettings({})).start()
        held = await server.database.all("retention.used_of_node", node_id=server.node.node_id)
        assert held == [], "the next life of the server holds nothing for it"
        try:
            await self._look(place)
        except NotFound:
            assert not complete, "it was acknowledged"
        made = await self.world.back_up(place)
        assert (await self._look(place)).record.id == made.record.id

    async def _look(self, place: Place) -> restoring.Prepared:
        """At the newest complete one; raises when it could not be restored."""
        return await restoring.prepare(Restoration(self.world.root / "nobody", "", []).to(), place, None)

    # -------------------------------------------------------------------------------------------------------------- restore

    async def kill_restore(self, at: int | None) -> Fuse:
        """Of the one backup in ``backups``."""
        fuse = Fuse(at)
        self.number += 1
        root = self.world.root / f"again{self.number}"
        root.mkdir()
        (root / "image").symlink_to(self.world.root / "image")
        place = self.world.place()
        async with empty_url() as url:
            restoration = Restoration(root, url, [])
            await self.attempt(fuse, restoration.restore(place))
            if not self._is_over(restoration):
                await restoration.restore(place)
            await self._check_restored(restoration)
        shutil.rmtree(root)
        return fuse

    def _is_over(self, restoration: Restoration) -> bool:
        """Not begun is not over either: a home that nothing is in."""
        home = restoration.home
        return (home / "store").exists() and not (home / restoring.MARK).exists()

    async def _check_restored(self, restoration: Restoration) -> None:
        server = await restoration.server()
        try:
            found = await server.service.find(CTX)
            assert {one.name: one.state for one in found} == dict.fromkeys(VALUES, WorkspaceState.HIBERNATED)
            for name, value in VALUES.items():
                proof = await server.prove(name)
                assert (proof.value, proof.wrong) == (value, "")
            checked, breaks = await Journal(server.database).verify()
            assert checked and breaks == []
        finally:
            await server.node.crash()
            await server.database.close()


class _Dump:
    """``db.dump`` whose frozen rows are read under the fuse."""

    def __init__(self, fuse: Callable[[], Fuse]) -> None:
        self._fuse = fuse

    @asynccontextmanager
    async def frozen(self, url: str) -> AsyncIterator[database_dump.Frozen]:
        async with database_dump.frozen(url) as frozen:
            yield replace(frozen, rows=cast(Any, FusedTransaction(self._fuse(), frozen.rows)))

    async def dump(self, instant: database_dump.Frozen, path: Path) -> None:
        await database_dump.dump(instant, path)


@pytest.fixture
async def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Saved]:
    async with small_world(tmp_path) as world:
        yield Saved(world, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", steps(7))
async def test_killed_at_every_point_of_a_backup(saved: Saved, step: int) -> None:
    whole, fired = await killed_everywhere(saved.kill_backup, step)
    assert {"in transaction, before backup.hold", "before backup.let_go", "after dump.dump", "after place.put"} <= set(
        whole.passed
    )
    assert fired.total() * step > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", steps(12))
async def test_killed_at_every_point_of_a_restore(saved: Saved, step: int) -> None:
    await saved.world.back_up()
    whole, fired = await killed_everywhere(saved.kill_restore, step)
    wanted = {"after dump.load", "in transaction, before backup.asleep", "before a commit", "after files.remove"}
    assert wanted <= set(whole.passed)
    assert fired.total() * step > 20
