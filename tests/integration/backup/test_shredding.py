"""A tenant that is shredded: nothing of it is read again from the store, by whatever way, and what must stay stays."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.backup.catalogue import Defaults
from perdure.backup.make import Origin
from perdure.backup.recover import Into, recover
from perdure.core.errors import Conflict, CorruptSnapshot, NotFound, Shredded
from perdure.core.ids import DEFAULT_TENANT, NodeId, SnapshotId, TenantId
from perdure.db import dump as database_dump
from perdure.db.database import Database
from perdure.fleet.objects import StoreCatalogue
from perdure.journal.entries import Journal
from perdure.node.secondhome import NodeSecondHome
from perdure.snapshots.objects.client import open_objects
from perdure.snapshots.objects.download import Downloader
from perdure.snapshots.objects.keys import PlainKeyring, TenantKeyring
from perdure.snapshots.objects.remote import Remote
from perdure.wire.objects import IMAGES, ItemKey, ItemState, Scope
from perdure.workspaces.model import CreateWorkspace
from tests.fakes.database import empty_url, fresh_database
from tests.integration.backup.conftest import Restoration, World
from tests.torture.saving import MASTER, clock_ms
from tests.torture.server import CTX

TENANT = Scope(DEFAULT_TENANT)
OTHER = replace(CTX, tenant_id=TenantId("ten_other"))


def store_of(world: World) -> Path:
    return world.server.home / "objects"


def home_of(world: World) -> NodeSecondHome:
    home = world.server.node.second_home
    assert isinstance(home, NodeSecondHome)
    return home


def remote_at(directory: Path, keys: Path) -> Remote:
    return Remote(open_objects(directory.as_uri()), TenantKeyring(keys, MASTER), clock_ms)


async def uploaded(world: World) -> list[ItemKey]:
    """Everything that sleeps, in the store; returns what the tenant has there."""
    uploads = world.server.service.upkeep.uploads
    for _ in range(6):
        await uploads.begin()
        await uploads.drain()
    items = await StoreCatalogue(world.server.database).items(TENANT)
    assert items and all(item.state is ItemState.DURABLE for item in items)
    return [item.key for item in items]


async def collect(world: World) -> None:
    for _ in range(4):
        await world.server.service.upkeep.room.collect()


@asynccontextmanager
async def dumped(database: Database, scratch: Path) -> AsyncIterator[Database]:
    """A copy of the database as it is now, for later."""
    async with database_dump.frozen(database.url) as frozen:
        await database_dump.dump(frozen, scratch / "old.dump")
    async with empty_url() as url:
        await database_dump.load(url, scratch / "old.dump")
        copy = Database(url, max_connections=4)
        await copy.open()
        try:
            yield copy
        finally:
            await copy.close()


async def test_nothing_of_it_is_read_again(world: World) -> None:
    keys = await uploaded(world)
    provider = world.root / "copy"  # whoever runs the store keeps what was ever in it
    shutil.copytree(store_of(world), provider)
    async with dumped(world.server.database, world.root) as old:
        before = Downloader(remote_at(provider, world.server.home / "keys"), StoreCatalogue(old))
        for key in keys:
            await before.open(key)
        done = await world.server.service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
        assert (set(done.deleted), done.left) == ({"awake", "asleep", "new"}, ())
        after = Downloader(remote_at(provider, world.server.home / "keys"), StoreCatalogue(old))
        for key in keys:  # the rows of an old backup of the database, and all the objects
            with pytest.raises(Shredded, match="was shredded"):
                await after.open(key)
        forged = Downloader(remote_at(provider, world.root / "new-keys"), StoreCatalogue(old))
        for key in keys:  # the master key makes no key again
            with pytest.raises(CorruptSnapshot):
                await forged.open(key)
    async with fresh_database() as empty:
        into = Into(empty, lambda: NodeId("nod_recovered"), Defaults(900.0, 60.0))
        remote = remote_at(provider, world.server.home / "keys")
        recovered = await recover(remote, StoreCatalogue(empty), into, lambda _: None)
        assert recovered.workspaces == () and "was shredded" in recovered.damaged[TENANT]


async def test_it_goes_from_the_store_and_the_rest_stays(world: World) -> None:
    server = world.server
    await server.service.create(OTHER, CreateWorkspace("theirs"))
    _, theirs = await server.service.sleep(OTHER, "theirs")
    await uploaded(world)
    await server.service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    rows = StoreCatalogue(server.database)
    assert not [item for item in await rows.items(TENANT) if item.state is ItemState.DURABLE], "nothing counts as durable"
    await collect(world)
    assert not [path for path in (store_of(world) / TENANT).rglob("*") if path.is_file()]
    assert await rows.items(TENANT) == []
    assert await home_of(world).verify(theirs.id, OTHER.tenant_id) == (), "another tenant has a key of its own"
    assert (await rows.items(IMAGES))[0].state is ItemState.DURABLE
    thread = await server.service.log(CTX, DEFAULT_TENANT)
    assert [entry.kind for entry in thread] == ["shredding", "shredded"]
    assert (thread[0].body["by"], thread[0].body["workspaces"]) == (CTX.principal, 3)
    assert await server.service.log(OTHER, OTHER.tenant_id) == [], "nothing was done to that one"
    with pytest.raises(NotFound):
        await server.service.log(OTHER, DEFAULT_TENANT)
    checked, breaks = await Journal(server.database).verify()
    assert checked and breaks == []


async def test_workspaces_are_not_deleted_unasked(world: World) -> None:
    keys = await uploaded(world)
    with pytest.raises(Conflict, match=r"has 3 workspaces that are not deleted: asleep, awake, new\.") as caught:
        await world.server.service.shred_tenant(CTX, DEFAULT_TENANT)
    assert "--delete-workspaces" in caught.value.hint
    assert await uploaded(world) == keys, "nothing has happened"
    assert await home_of(world).verify(SnapshotId(keys[0].name), DEFAULT_TENANT) == ()
    for name in ("asleep", "awake", "new"):
        await world.server.service.delete(CTX, name)
    done = await world.server.service.shred_tenant(CTX, DEFAULT_TENANT)
    assert done.deleted == ()


async def test_again_it_changes_nothing_and_what_is_made_since_stays_on_its_node(world: World) -> None:
    service = world.server.service
    await uploaded(world)
    first = await service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    again = await service.shred_tenant(CTX, DEFAULT_TENANT)
    assert (again.asked_at, again.deleted) == (first.asked_at, ())
    await service.create(CTX, CreateWorkspace("later"))
    _, slept = await service.sleep(CTX, "later")
    with pytest.raises(Shredded, match="nothing of it goes into the object store any more"):
        await service.push_snapshot(CTX, "later", None, deadline_s=20)
    assert await service.shred_tenant(CTX, DEFAULT_TENANT) == again, "what it has since is no reason to refuse, nor goes"
    assert (await world.get("later")).head_snapshot_id == slept.id
    await service.wake(CTX, "later")
    last = await service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    assert last.deleted == ("later",) and last.asked_at > first.asked_at


async def test_every_node_throws_its_copy_away(world: World) -> None:
    """One that was away when it was asked for has its own directory of keys."""
    await uploaded(world)
    copy = world.root / "keys-of-another"
    shutil.copytree(world.server.home / "keys", copy)
    await world.server.service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    home_of(world)._parts.remote.keyring = TenantKeyring(copy, MASTER)
    world.server.service.upkeep.shredding._keyless.clear()  # a process that has just started
    assert TenantKeyring(copy, MASTER).of(TENANT).sealing is not None
    await world.server.service.upkeep.shredding.go_on()
    with pytest.raises(Shredded):
        TenantKeyring(copy, MASTER).of(TENANT)


async def test_an_upload_under_way_does_not_outlive_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    home, rows = home_of(world), StoreCatalogue(world.server.database)
    reached, go_on = asyncio.Event(), asyncio.Event()
    put = home._parts.remote.objects.put

    async def slow(name: str, data: bytes) -> None:
        if name.startswith(f"{TENANT}/"):
            reached.set()
            await go_on.wait()
        await put(name, data)

    monkeypatch.setattr(home._parts.remote.objects, "put", slow)
    uploads = world.server.service.upkeep.uploads
    await uploads.begin()
    await reached.wait()
    await world.server.service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    go_on.set()
    await uploads.drain()
    assert not [item for item in await rows.items(TENANT) if item.state is ItemState.DURABLE]
    await collect(world)
    assert not [path for path in (store_of(world) / TENANT).rglob("*") if path.is_file()]


async def test_what_cannot_be_shredded_is_told(world: World) -> None:
    service, home = world.server.service, home_of(world)
    for nobody in ("ten_nobody", "images", "nonsense"):
        with pytest.raises(NotFound, match=f"There is no tenant '{nobody}'") as caught:
            await service.shred_tenant(CTX, TenantId(nobody))
        assert DEFAULT_TENANT in caught.value.hint
    home._parts.remote.keyring = PlainKeyring()
    with pytest.raises(Conflict, match="The object store is not encrypted") as caught:
        await service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    assert "perdure rm" in caught.value.hint and "PERDURE_STORE_COLLECT_S" in caught.value.hint
    world.server.node.second_home = None
    with pytest.raises(Conflict, match="has no object store"):
        await service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    assert len(await service.find(CTX)) == 3


# ------------------------------------------------------------------------------------------------------------------- backups


def sealed(world: World) -> Origin:
    return replace(world.origin(), sealed=True)


async def test_a_backup_of_before_is_not_restored_over_it(world: World, restoration: Restoration) -> None:
    """Whoever wants to, and has the master key, can read such a backup elsewhere: it holds the key."""
    await uploaded(world)
    made = await world.back_up(origin=sealed(world))
    assert "ten_default.key" in made.record.keys
    await world.server.service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    restoration.home.mkdir()
    shutil.copytree(world.server.home / "keys", restoration.home / "keys")
    with pytest.raises(Shredded, match="holds the key of a tenant that was shredded here"):
        await restoration.restore()
    assert restoration.is_untouched()


async def test_a_home_restored_from_a_backup_of_after_it_stores_again(world: World, restoration: Restoration) -> None:
    await uploaded(world)
    old = TenantKeyring(world.server.home / "keys", MASTER).of(TENANT)
    await world.server.service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    await world.server.service.create(CTX, CreateWorkspace("later"))
    await world.server.service.sleep(CTX, "later")
    await world.back_up()
    await restoration.restore()
    server = await restoration.server()
    pushed = await server.service.push_snapshot(CTX, "later", None, deadline_s=60)
    assert pushed.stored_at is not None
    assert TenantKeyring(server.home / "keys", MASTER).of(TENANT) != old
    await server.node.crash()
    await server.database.close()


async def test_what_was_only_asked_for_is_shredded_in_the_restored_home_too(world: World, restoration: Restoration) -> None:
    await world.back_up()
    async with world.server.database.transaction() as tx:
        await tx.one("shreds.ask", tenant_id=DEFAULT_TENANT, body="{}")
    await world.back_up()
    await restoration.restore()
    server = await restoration.server()
    await server.service.upkeep.shredding.go_on()
    row = await server.database.one("shreds.of", tenant_id=DEFAULT_TENANT)
    assert row is not None and row["state"] == "done"
    await server.node.crash()
    await server.database.close()


async def test_no_backup_is_sealed_with_a_key_that_is_gone(world: World) -> None:
    await uploaded(world)
    await world.server.service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    with pytest.raises(Shredded, match="no backup can be sealed with its key") as caught:
        await world.back_up(origin=sealed(world))
    assert "PERDURE_STORE_ENCRYPTION" in caught.value.hint
    made = await world.back_up()
    assert made.record.workspaces == 0


async def test_a_backup_under_way_does_not_come_to_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    place = world.place()
    reached, go_on = asyncio.Event(), asyncio.Event()
    put = place._objects.put

    async def slow(name: str, data: bytes) -> None:
        if name.startswith(f"{TENANT}/"):
            reached.set()
            await go_on.wait()
        await put(name, data)

    monkeypatch.setattr(place._objects, "put", slow)
    await uploaded(world)
    backup = asyncio.create_task(world.back_up(place, origin=sealed(world)))
    await reached.wait()
    await world.server.service.shred_tenant(CTX, DEFAULT_TENANT, with_workspaces=True)
    go_on.set()
    with pytest.raises(Shredded):
        await backup
    assert (await world.place().listed())[0] == []
