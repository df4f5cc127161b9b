"""What past backups may still hold is let go by the server that lives on, and never what the one under way holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.backup import service as services
from perdure.backup.make import Origin, Progress
from perdure.backup.service import BackupService
from perdure.core.clock import SystemClock
from perdure.core.errors import InvalidRequest, NoSpace, Unavailable
from perdure.snapshots.objects.client import ClientSettings
from perdure.wire import public

DEADLINE_S = 20.0


class HeldRows:
    """The statements of a backup over a set of holders. ``away``: so many of the next calls fail."""

    def __init__(self) -> None:
        self.holders: set[str] = set()
        self.away = 0
        self.calls: list[str] = []
        self.changed = asyncio.Condition()
        self.gate: asyncio.Event | None = None  # a statement waits for it

    async def run(self, query: str, /, **given: Any) -> int:
        self.calls.append(query)
        async with self.changed:
            self.changed.notify_all()
        if self.gate is not None:
            await self.gate.wait()
        if self.away > 0:
            self.away -= 1
            raise Unavailable("The database is away.")
        match query:
            case "backup.hold":
                self.holders.add(given["holder"])
            case "backup.let_go":
                self.holders.discard(given["holder"])
            case "backup.let_go_others":
                self.holders &= {given["alive"]}
            case "backup.let_go_all":
                self.holders.clear()
        async with self.changed:
            self.changed.notify_all()
        return 0

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self.changed:
            await self.changed.wait_for(reached)


@pytest.fixture
def rows() -> HeldRows:
    return HeldRows()


@pytest.fixture
async def backups(rows: HeldRows, tmp_path: Path) -> AsyncIterator[BackupService]:
    origin = SimpleNamespace(database=rows, clock=SystemClock(), home=tmp_path / "home", master=None)
    service = BackupService(cast("Origin", origin), lambda: ClientSettings({}), reap_s=0.01)
    yield service
    await service.close()


def told(_progress: Progress) -> None:
    return None


def to(directory: Path) -> public.MakeBackup:
    return public.MakeBackup(to=str(directory / "backups"))


async def hold(origin: Any, backup_id: str) -> None:
    await origin.database.run("backup.hold", holder=backup_id)


async def test_a_backup_whose_database_was_away_at_its_end_is_let_go_when_it_is_back(
    rows: HeldRows, backups: BackupService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(origin: Any, _place: object, backup_id: str, *_: object, **__: object) -> None:
        await hold(origin, backup_id)
        rows.away = 3
        try:
            raise NoSpace("There is no room left.")
        finally:
            with pytest.raises(Unavailable):
                await rows.run("backup.let_go", holder=backup_id)

    monkeypatch.setattr(services, "make", fails)
    await backups.start()
    backups.watch()
    with pytest.raises(NoSpace):
        await backups.make_to(to(tmp_path), told)
    assert len(rows.holders) == 1
    await rows.until(lambda: not rows.holders)
    assert rows.calls.count("backup.let_go_others") >= 3, "it was tried until the database answered"


async def test_what_the_backup_under_way_holds_is_kept(
    rows: HeldRows, backups: BackupService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = asyncio.Event()

    async def lasts(origin: Any, _place: object, backup_id: str, *_: object, **__: object) -> None:
        await hold(origin, backup_id)
        await made.wait()
        raise NoSpace("There is no room left.")

    monkeypatch.setattr(services, "make", lasts)
    rows.holders.add("bak_earlier")
    task = asyncio.create_task(backups.make_to(to(tmp_path), told))
    await rows.until(lambda: len(rows.holders) == 2)
    await backups.reap()
    assert len(rows.holders) == 1
    assert "bak_earlier" not in rows.holders
    made.set()
    with pytest.raises(NoSpace):
        await task
    await backups.reap()
    assert rows.holders == set(), "it is over, whatever it has said"


async def test_a_backup_that_begins_while_the_database_takes_its_time_keeps_what_it_holds(
    rows: HeldRows, backups: BackupService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    async def quick(origin: Any, _place: object, backup_id: str, *_: object, **__: object) -> None:
        await hold(origin, backup_id)
        await reaped
        seen.append(set(rows.holders))
        raise NoSpace("There is no room left.")

    monkeypatch.setattr(services, "make", quick)
    gate = rows.gate = asyncio.Event()
    reaped = asyncio.create_task(backups.reap())
    await rows.until(lambda: rows.calls == ["backup.let_go_others"])
    rows.gate = None  # for those that come after it
    task = asyncio.create_task(backups.make_to(to(tmp_path), told))
    for _ in range(10):
        await asyncio.sleep(0)
    gate.set()
    with pytest.raises(NoSpace):
        await task
    assert len(seen) == 1
    assert len(seen[0]) == 1


async def test_a_backup_that_has_ended_is_looked_after_at_once(
    rows: HeldRows, backups: BackupService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leaves(origin: Any, _place: object, backup_id: str, *_: object, **__: object) -> None:
        await hold(origin, backup_id)
        raise NoSpace("There is no room left.")

    monkeypatch.setattr(services, "make", leaves)
    backups._reap_s = 10 * DEADLINE_S
    backups.watch()
    with pytest.raises(NoSpace):
        await backups.make_to(to(tmp_path), told)
    await rows.until(lambda: not rows.holders)


async def test_closing_ends_the_watch(rows: HeldRows, backups: BackupService) -> None:
    await backups.close()
    backups.watch()
    await rows.until(lambda: "backup.let_go_others" in rows.calls)
    await backups.close()
    before = len(rows.calls)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "backup-reaper"] == []
    assert len(rows.calls) == before


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
async def test_the_master_key_does_not_go_where_others_can_look(rows: HeldRows, tmp_path: Path, mode: int) -> None:
    origin = SimpleNamespace(database=rows, clock=SystemClock(), home=tmp_path / "home", master=bytes(32))
    service = BackupService(cast("Origin", origin), lambda: ClientSettings({}))
    directory = tmp_path / "backups"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(InvalidRequest, match="open to other users") as caught:
        await service.make_to(public.MakeBackup(to=str(directory), with_master_key=True), told)
    assert f"chmod -R go= {directory}" in (caught.value.hint or "")
    assert not list(directory.iterdir())
