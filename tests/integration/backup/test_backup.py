"""A backup of a server that works on: what it holds, what it costs, what may go wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from perdure.backup.make import Made
from perdure.backup.place import MARK, Place, open_place, place_url
from perdure.backup.service import BackupService
from perdure.core.errors import Conflict, CorruptData, CorruptSnapshot, InvalidRequest, NoSpace, NotFound, Unavailable
from perdure.db.database import Database
from perdure.snapshots.objects.client import ClientSettings
from perdure.snapshots.objects.keys import PlainKeyring
from perdure.snapshots.objects.remote import Remote
from perdure.wire import public
from tests.fakes.objects import FakeObjects, Fault
from tests.fakes.s3 import s3_server
from tests.integration.backup.conftest import Restoration, World
from tests.torture.saving import clock_ms
from tests.torture.server import CTX


def run(*command: object) -> None:
    subprocess.run(command, check=True)


def packs(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_size for path in directory.glob("*/packs/*")}


async def references(world: World) -> list[str]:
    rows = await world.server.database.all("retention.used_of_node", node_id=world.server.node.node_id)
    return [row["snapshot_id"] for row in rows]


async def test_a_backup_holds_every_snapshot_and_the_image(world: World) -> None:
    made = await world.back_up()
    rows = await world.server.store.on_node(world.server.node.node_id)
    assert {one.name for one in made.record.snapshots} == {row.id for row in rows}
    assert made.record.workspaces == 3
    assert made.record.names == {"base": "70" * 32}
    assert set(made.awake) == {"awake", "new"}
    assert world.told[0].what == "database"
    assert world.told[-1].what == "database" and world.told[-1].sent_bytes == made.sent_bytes
    assert await world.place().find(None) == made.record
    assert await references(world) == []
    assert not list((world.server.home / "run").iterdir())


async def test_a_second_backup_sends_only_what_is_new(world: World) -> None:
    first = await world.back_up()
    before = packs(world.directory)
    await world.put("asleep", 9)
    await world.server.service.sleep(CTX, "asleep")
    second = await world.back_up()
    after = packs(world.directory)
    assert before.items() <= after.items(), "what is there is never written again"
    assert not any(name.startswith("images/") for name in after.keys() - before.keys())
    assert 0 < second.sent_bytes < first.sent_bytes / 2
    assert second.record.id != first.record.id
    assert (await world.place().listed())[0] == [first.record.id, second.record.id]


async def test_what_a_backup_needs_is_not_removed_meanwhile(world: World) -> None:
    """Neither by its owner nor with its workspace; it goes when the backup is done."""
    objects = FakeObjects()
    place = Place(objects, "memory:///", clock_ms)
    reached, go_on = asyncio.Event(), asyncio.Event()
    put = objects.put

    async def slow(name: str, data: bytes) -> None:
        if "/packs/" in name:
            reached.set()
            await go_on.wait()
        await put(name, data)

    objects.put = slow  # type: ignore[method-assign]
    backup = asyncio.create_task(world.back_up(place))
    await reached.wait()
    (good,) = [one for one in await world.server.service.snapshots(CTX, "awake") if one.name == "good"]
    await world.server.service.checkpoint(CTX, "awake")  # another head
    with pytest.raises(Conflict, match=r"'backup bak_.*' needs it"):
        await world.server.service.remove_snapshot(CTX, "awake", good.id)
    await world.server.service.delete(CTX, "asleep")
    await world.server.service.upkeep.clean()
    go_on.set()
    made = await backup
    assert good.id in {one.name for one in made.record.snapshots}
    assert made.record.workspaces == 3, "the instant was before the deletion"
    await world.server.service.remove_snapshot(CTX, "awake", good.id)
    await world.server.service.upkeep.clean()
    left = {facts.snapshot_id for facts in world.server.node.store.complete()}
    assert left == {row.id for row in await world.server.store.on_node(world.server.node.node_id)}
    assert good.id not in left


async def test_a_backup_that_was_cut_off_is_no_backup(world: World) -> None:
    objects = FakeObjects()
    place = Place(objects, "memory:///", clock_ms)
    objects.faults = lambda operation, name: Fault.REFUSED if name.endswith(".json") and "bak_" in name else None
    with pytest.raises(Unavailable):
        await world.back_up(place)
    assert await references(world) == []
    objects.faults = lambda operation, name: None
    with pytest.raises(NotFound, match=r"No backup .* is complete; 1 were begun and not finished"):
        await place.find(None)
    ((), (begun,)) = await place.listed()
    with pytest.raises(NotFound, match=f"{begun} was begun and not finished"):
        await place.find(begun)
    before = len(objects.data)
    made = await world.back_up(place)
    assert (await place.find(None)).id == made.record.id
    sent = [name for name in list(objects.data)[before:] if name.startswith("images/")]
    assert sent == [], "the next one goes on with what was sent"


async def test_a_chunk_that_is_gone_from_the_place_is_sent_again(world: World) -> None:
    await world.back_up()
    for path in world.directory.glob("*/packs/*"):
        path.unlink()
    made = await world.back_up()
    assert made.sent_bytes > 0
    again = Restoration(world.root, "unused", [])
    for one in made.record.items:
        tools = again.place().tools(PlainKeyring(), made.record.items)
        await tools.downloader.open(one.key)


async def test_a_damaged_snapshot_is_named_and_there_is_no_backup(world: World) -> None:
    sleeping = await world.get("asleep")
    path = world.server.node.store.snapshots / str(sleeping.head_snapshot_id) / "devices.state"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(CorruptSnapshot, match=f"{sleeping.head_snapshot_id}/devices.state is damaged") as caught:
        await world.back_up()
    assert caught.value.message.startswith(
        f"Snapshot {sleeping.head_snapshot_id} of 'asleep' is damaged, so there is no backup: "
    )
    assert f"'perdure snapshot rm asleep {sleeping.head_snapshot_id}'" in caught.value.hint, "the rest can be backed up"
    assert "'perdure recover asleep --how rewind'" in caught.value.hint
    assert caught.value.details["snapshot_id"] == sleeping.head_snapshot_id
    assert (await world.place().listed())[0] == []
    assert await references(world) == []


async def test_a_snapshot_without_files_is_named(world: World) -> None:
    sleeping = await world.get("asleep")
    world.server.node.store.delete([sleeping.head_snapshot_id])
    with pytest.raises(CorruptSnapshot, match=f"{sleeping.head_snapshot_id} are missing from this node") as caught:
        await world.back_up()
    assert f"'perdure snapshot rm asleep {sleeping.head_snapshot_id}'" in caught.value.hint


async def test_a_snapshot_that_only_the_object_store_has_is_brought(world: World) -> None:
    sleeping = await world.get("asleep")
    store, saved = world.server.node.store, world.root / "saved"
    shutil.copytree(store.root, saved, ignore=shutil.ignore_patterns("lock"))
    asked = []

    async def bring(snapshot_id: str, tenant_id: str) -> None:
        asked.append((snapshot_id, tenant_id))
        store.close()
        shutil.copytree(saved, store.root, dirs_exist_ok=True)
        store.open()

    store.delete([sleeping.head_snapshot_id])
    made = await world.back_up(origin=replace(world.origin(), bring=bring))
    assert asked == [(sleeping.head_snapshot_id, sleeping.tenant_id)]
    assert sleeping.head_snapshot_id in {one.name for one in made.record.snapshots}


async def test_snapshots_that_vanish_at_once_are_left_to_a_later_instant(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One goes between the instant and its hold, for the first two instants."""
    database = world.server.database
    transaction = database.transaction
    doomed = [one.id for one in await world.server.service.snapshots(CTX, "awake")]
    left = [2]

    def at_first() -> object:
        if left[0]:
            left[0] -= 1
            return _after(database, doomed, transaction)
        return transaction()

    monkeypatch.setattr(database, "transaction", at_first)
    made = await world.back_up()
    monkeypatch.undo()
    assert left == [0]
    assert not set(doomed) & {one.name for one in made.record.snapshots}


class _after:
    """The snapshots are marked before the transaction begins."""

    def __init__(self, database: object, doomed: list[str], transaction: object) -> None:
        self._args = (database, doomed, transaction)

    async def __aenter__(self) -> object:
        database, doomed, transaction = self._args
        await database.all("retention.mark", ids=doomed)  # type: ignore[attr-defined]
        self._inner = transaction()  # type: ignore[operator]
        return await self._inner.__aenter__()

    async def __aexit__(self, *args: object) -> object:
        return await self._inner.__aexit__(*args)


# ------------------------------------------------------------------------------------------------------------------ the place


async def test_a_directory_with_something_else_is_refused(world: World) -> None:
    world.directory.mkdir()
    (world.directory / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(Conflict, match=r"holds something that is no backup of Perdure \(holiday.jpg\)"):
        await world.back_up()
    assert [path.name for path in world.directory.iterdir()] == ["holiday.jpg"]


async def test_the_object_store_of_an_installation_is_refused(world: World) -> None:
    place = world.place()
    await Remote(place._objects, PlainKeyring(), clock_ms).claim("ins_1")
    with pytest.raises(Conflict, match="is the object store of an installation"):
        await world.back_up()


async def test_a_directory_that_is_made_is_closed_to_others(world: World) -> None:
    await world.back_up(world.place(str(world.root / "new" / "backups")))
    assert stat.S_IMODE((world.root / "new" / "backups").stat().st_mode) == 0o700


async def test_a_directory_that_cannot_be_made(root: Path) -> None:
    (root / "file").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="cannot be made"):
        open_place(str(root / "file" / "backups"), clock_ms, make=True)


async def test_a_damaged_mark_is_told(world: World) -> None:
    await world.back_up()
    (world.directory / MARK).write_bytes(b"{")
    with pytest.raises(CorruptData, match=MARK):
        await world.back_up()


@pytest.mark.parametrize("given", ["", "  ", "ftp://host/x", "memory:///", "s3:///nothing"])
async def test_what_cannot_hold_a_backup_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequest):
        open_place(given, clock_ms, make=True) if given.strip() else place_url(given)


async def test_a_file_in_the_place_of_the_directory(world: World) -> None:
    world.directory.write_bytes(b"")
    with pytest.raises(InvalidRequest, match="cannot hold a store"):
        await world.back_up()


async def test_a_full_place_is_said_to_be_full(world: World) -> None:
    objects = FakeObjects()

    async def full(name: str, data: bytes) -> None:
        if "/packs/" in name:
            raise NoSpace("There is no room left in the object store to write it.")
        objects.data[name] = data

    objects.put = full  # type: ignore[method-assign]
    with pytest.raises(NoSpace, match=r"There is no room left in s3://full; no backup was made\.") as caught:
        await world.back_up(Place(objects, "s3://full", clock_ms))
    assert "not sent again" in caught.value.hint
    assert await references(world) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system that is too small")
async def test_a_directory_on_a_full_disk(world: World) -> None:
    world.directory.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=256k", "backups", world.directory)
    try:
        with pytest.raises(NoSpace, match=f"There is no room left in {world.directory.as_uri()}; no backup was made"):
            await world.back_up()
        assert (await world.place().listed())[0] == []
        run("mount", "-o", "remount,size=16m", world.directory)
        made = await world.back_up()
        assert (await world.place().listed())[0] == [made.record.id]
    finally:
        run("umount", world.directory)
    assert await references(world) == []


async def test_a_backup_into_s3_and_back(world: World, restoration: Restoration) -> None:
    with s3_server() as server:
        objects = server.objects("/backups")
        made = await world.back_up(Place(objects, "s3://bucket/backups", clock_ms))
        done = await restoration.restore(Place(objects, "s3://bucket/backups", clock_ms))
    assert done.record == made.record
    server = await restoration.server()
    assert (await server.prove("asleep")).value == 7
    await server.node.crash()
    await server.database.close()


# ---------------------------------------------------------------------------------------------------------------- the service


def service(world: World) -> BackupService:
    return BackupService(world.origin(), lambda: ClientSettings({}))


async def test_the_service_tells_how_it_goes_and_ends_with_the_backup(world: World) -> None:
    events = [event async for event in service(world).make(public.MakeBackup(to=str(world.directory)))]
    assert {event.type for event in events[:-1]} == {"progress"}
    assert {event.what for event in events[:-1]} == {"database", "images", "snapshots"}
    backup = events[-1].backup
    assert backup is not None and backup.workspaces == 3 and backup.has_master_key is False
    record = await world.place().find(backup.id)
    assert record.master_key is None
    assert "master" not in json.dumps(record.keys)


async def test_one_backup_at_a_time_and_a_caller_that_leaves_ends_it(world: World) -> None:
    backups = service(world)
    events = backups.make(public.MakeBackup(to=str(world.directory)))
    await anext(events)
    with pytest.raises(Conflict, match="under way"):
        await backups.make_to(public.MakeBackup(to=str(world.directory)), world.told.append)
    await events.aclose()
    assert await references(world) == []
    assert (await world.place().listed())[0] == []
    made: public.BackupInfo = await backups.make_to(public.MakeBackup(to=str(world.directory)), world.told.append)
    assert (await world.place().listed())[0] == [made.id]


async def test_a_place_inside_of_the_home_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match="is what is backed up"):
        await service(world).make_to(public.MakeBackup(to=str(world.server.home / "backups")), world.told.append)


async def test_what_a_killed_backup_held_is_let_go_at_the_next_start(world: World) -> None:
    ids = [one.id for one in await world.server.service.snapshots(CTX, "awake")]
    await world.server.database.run("backup.hold", ids=ids, holder="bak_killed")
    assert sorted(await references(world)) == sorted(ids)
    await service(world).start()
    assert await references(world) == []


class AwayAtTheEnd:
    """A database that is away when a backup lets go."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    async def run(self, query: str, /, **given: Any) -> int:
        if query == "backup.let_go":
            raise Unavailable("The database is away.")
        return await self._database.run(query, **given)


async def test_what_a_backup_held_whose_database_was_away_is_let_go_by_the_server_that_lives_on(world: World) -> None:
    origin = replace(world.origin(), database=cast("Database", AwayAtTheEnd(world.server.database)))
    backups = BackupService(origin, lambda: ClientSettings({}))
    await backups.make_to(public.MakeBackup(to=str(world.directory)), world.told.append)
    held = await references(world)
    assert held
    await world.server.database.run("backup.hold", ids=held[:1], holder="bak_alive")
    backups._alive = "bak_alive"
    await backups.reap()
    assert await references(world) == held[:1], "the one under way keeps what it holds"
    backups._alive = None
    await backups.reap()
    assert await references(world) == []


def test_made_is_what_a_caller_needs() -> None:
    assert {"record", "sent_bytes", "awake"} <= set(Made.__slots__)
