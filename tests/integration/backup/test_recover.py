"""A catalogue made of an object store alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.backup.catalogue import Defaults
from perdure.backup.recover import KEPT, Here, Into, Recovered, recover
from perdure.core import ids
from perdure.core.config import Settings
from perdure.core.errors import Conflict, CorruptData, InvalidRequest, NotFound
from perdure.core.ids import NodeId, TenantId
from perdure.db.database import Database
from perdure.fleet.objects import StoreCatalogue
from perdure.images.moving import ImageMover
from perdure.journal.entries import Journal
from perdure.saving import _keyring, _KnownKeys, here
from perdure.saving import recover as recover_home
from perdure.snapshots.manifest import MANIFEST, BaseRef
from perdure.snapshots.objects.client import open_objects
from perdure.snapshots.objects.collect import Collector
from perdure.snapshots.objects.download import Downloader
from perdure.snapshots.objects.keys import Keyring, PlainKeyring, TenantKeyring
from perdure.snapshots.objects.local import Mover
from perdure.snapshots.objects.remote import OWNER, Remote
from perdure.snapshots.objects.upload import Uploader
from perdure.wire.objects import IMAGES, ItemKey, ItemState, Scope
from perdure.workspaces.facts import facts_of
from perdure.workspaces.model import CreateWorkspace
from tests.fakes.damage import last_byte_flipped
from tests.fakes.database import fresh_database
from tests.integration.backup.conftest import World
from tests.torture.ledger import Ledger
from tests.torture.node import DIGEST
from tests.torture.saving import MASTER, clock_ms, make_images
from tests.torture.server import CTX, Server

TENANT = Scope("ten_default")


@dataclass
class Store:
    """The object store of a server, and an empty database to recover into."""

    world: World
    into: Database
    keyring: Keyring
    told: list[str]

    @property
    def directory(self) -> Path:
        return self.world.root / "store"

    def remote(self) -> Remote:
        return Remote(open_objects(self.directory.as_uri()), self.keyring, clock_ms)

    async def upload(self) -> None:
        """Every complete snapshot of the server, and the image: what its upload loop would do."""
        server, remote = self.world.server, self.remote()
        await remote.claim("ins_old")
        rows = StoreCatalogue(server.database)
        uploader, downloader = Uploader(remote, rows, pack_bytes=64 << 10), Downloader(remote, rows)
        images = ImageMover(make_images(server.home / "own-images", self.world.root / "image"), uploader, downloader)
        ref = next(one.memory.base for one in map(server.node.store.manifest, self._complete()) if one.memory is not None)
        item, _ = await images.upload(BaseRef(DIGEST, ref.golden))
        mover = Mover(server.node.store, uploader, downloader, lambda _: server.node._goldens._ram)
        for snapshot_id in self._complete():
            await mover.upload(snapshot_id, (item.key,), await facts_of(server.database, snapshot_id))

    def _complete(self) -> list[str]:
        return [facts.snapshot_id for facts in self.world.server.node.store.complete()]

    async def recover(self, here: Here | None = None) -> Recovered:
        into = Into(self.into, lambda: NodeId("nod_recovered"), Defaults(900.0, 60.0), here or Here())
        return await recover(self.remote(), StoreCatalogue(self.into), into, self.told.append)


@pytest.fixture
async def store(world: World) -> AsyncIterator[Store]:
    async with fresh_database() as database:
        yield Store(world, database, PlainKeyring(), [])


async def test_workspaces_snapshots_names_and_lineage_come_back(store: Store) -> None:
    world = store.world
    await world.server.service.checkpoint(CTX, "awake")
    told = await world.server.service.wake_at(CTX, "asleep", timedelta(days=3))
    await store.upload()
    done = await store.recover()
    assert set(done.workspaces) == {"awake", "asleep"}, "the third was never captured"
    assert (done.nameless, done.incomplete, done.damaged) == ((), (), {})
    before = {row["id"]: row for row in await world.server.database.all("backup.workspaces")}
    for row in await store.into.all("backup.workspaces"):
        assert row["state"] == "hibernated"
        assert row["head_snapshot_id"] == before[row["id"]]["head_snapshot_id"]
        assert row["generation"] > before[row["id"]]["generation"] + 1_000_000_000
    (alarm,) = await store.into.all("alarms.next", node_id="nod_recovered", has_store=False, skip=[], limit=9)
    assert alarm["id"] == told.id and 2 * 86400 < alarm["left_s"] <= 3 * 86400
    awake = await world.get("awake")
    ours = {one.id: one for one in await world.server.store.snapshots(awake.id)}
    async with store.into.transaction() as tx:
        rows = {row["id"]: row for row in await tx.all("snapshots.of_workspace", workspace_id=awake.id)}
    assert {key: (row["name"], row["parent_id"], row["reason"]) for key, row in rows.items()} == {
        key: (one.name, one.parent_id, one.reason.value) for key, one in ours.items()
    }
    checked, breaks = await Journal(store.into).verify()
    assert checked == 2 and breaks == []


async def test_the_stores_rows_come_back_and_the_store_is_ours(store: Store) -> None:
    await store.upload()
    await store.recover()
    before, after = StoreCatalogue(store.world.server.database), StoreCatalogue(store.into)
    for scope in (TENANT, IMAGES):
        items = await after.items(scope)
        assert items and all(one.state is ItemState.DURABLE for one in items)
        assert items == await before.items(scope)
        for item in items:
            assert await after.holds(item.key) == await before.holds(item.key)
    owner = json.loads(await store.remote().objects.get(OWNER))["owner"]
    row = await store.into.one("catalogue.installation")
    assert row is not None and owner == row["id"] != "ins_old"


async def test_tenants_come_back_under_a_name_made_of_their_id(store: Store) -> None:
    service, theirs = store.world.server.service, replace(CTX, tenant_id=TenantId(ids.mint("ten", now_ms=clock_ms())))
    await service.create(theirs, CreateWorkspace("awake"))
    await service.sleep(theirs, "awake")
    await store.upload()
    await store.recover()
    rows = await store.into.all("tenants.all", after_at=None, after_id=None, limit=10)
    found = {row["tenant_id"]: row["name"] for row in rows}
    assert found == {TENANT: "default", theirs.tenant_id: theirs.tenant_id.replace("_", "-")}


async def test_what_was_uploaded_without_facts_gets_a_name(store: Store) -> None:
    server, remote = store.world.server, store.remote()
    rows = StoreCatalogue(server.database)
    mover = Mover(server.node.store, Uploader(remote, rows), Downloader(remote, rows), lambda _: server.node._goldens._ram)
    sleeping = await store.world.get("asleep")
    await mover.upload(sleeping.head_snapshot_id)
    done = await store.recover()
    assert len(done.nameless) == 1 and done.nameless == done.workspaces
    assert done.nameless[0].startswith("recovered@recovered-")


async def test_what_is_incomplete_or_damaged_is_listed_and_the_rest_is_there(store: Store) -> None:
    await store.upload()
    sleeping = await store.world.get("asleep")
    item = await StoreCatalogue(store.world.server.database).item(ItemKey(TENANT, str(sleeping.head_snapshot_id)))
    manifest = store.directory / TENANT / "items" / f"{item.key.name}.{item.attempt}"
    manifest.write_bytes(last_byte_flipped(manifest.read_bytes()))
    good = next(iter(await store.world.server.store.snapshots((await store.world.get("awake")).id)))
    lost = (await StoreCatalogue(store.world.server.database).holds(ItemKey(TENANT, good.id)))[-1]
    (store.directory / TENANT / "packs" / lost.pack_id).unlink()
    done = await store.recover()
    assert f"{TENANT}/{good.id}" in done.incomplete
    assert list(done.damaged) == [f"{TENANT}/items/{item.key.name}.{item.attempt}"]
    assert "asleep" not in done.workspaces


async def _collect(store: Store, passes: int) -> None:
    """What the server does every hour."""
    catalogue = StoreCatalogue(store.into)
    row = await store.into.one("catalogue.installation")
    assert row is not None
    for _ in range(passes):
        for scope in await catalogue.scopes():
            await catalogue.release_unwanted(scope)
            await Collector(store.remote(), catalogue, row["id"]).collect(scope)


def _objects(store: Store) -> set[str]:
    return {str(path.relative_to(store.directory)) for path in store.directory.rglob("*") if path.is_file()} - {OWNER}


@pytest.mark.parametrize("what", ["a pack", "an image's pack"])
async def test_what_could_be_salvaged_is_not_collected(store: Store, what: str) -> None:
    """Somebody brings a missing pack back, from an earlier version of the bucket for instance, and recovers once more."""
    await store.upload()
    scope = TENANT if what == "a pack" else IMAGES
    item = (await StoreCatalogue(store.world.server.database).items(scope))[0]
    pack = (await StoreCatalogue(store.world.server.database).holds(item.key))[-1]
    path = store.directory / scope / "packs" / pack.pack_id
    content = path.read_bytes()
    path.unlink()
    before = _objects(store)
    done = await store.recover()
    assert str(item.key) in done.incomplete
    assert done.kept_until is not None
    now = await store.into.one("clock.now")
    assert now is not None and timedelta(days=6.9) < done.kept_until - now["now"] <= KEPT
    await _collect(store, 4)
    assert _objects(store) == before
    path.write_bytes(content)
    async with fresh_database() as again:
        store.into = again
        done = await store.recover()
        assert (set(done.workspaces), done.incomplete, done.damaged, done.kept_until) == ({"awake", "asleep"}, (), {}, None)


async def test_after_its_time_what_was_left_out_is_collected(store: Store) -> None:
    await store.upload()
    catalogue = StoreCatalogue(store.world.server.database)
    item = (await catalogue.items(TENANT))[0]
    pack = (await catalogue.holds(item.key))[-1]
    (store.directory / TENANT / "packs" / pack.pack_id).unlink()
    assert str(item.key) in (await store.recover()).incomplete
    async with store.into.transaction() as tx:
        await tx.one("clock.shift", offset="7 days 1 minute")
        due = [row["scope"] for row in await tx.all("homes.scopes", images=IMAGES)]
    assert due == [TENANT, IMAGES] and await StoreCatalogue(store.into).scopes() == []


async def test_without_a_key_nothing_is_collected_either(store: Store, tmp_path: Path) -> None:
    """The key may come back, and what a new key seals from now on makes the scope known to the collection."""
    store.keyring = TenantKeyring(store.world.root / "keys", MASTER)
    await store.upload()
    before = _objects(store)
    store.keyring = _KnownKeys(tmp_path, MASTER)
    done = await store.recover()
    assert TENANT in done.damaged and done.kept_until is not None
    catalogue = StoreCatalogue(store.into)
    await catalogue.begin(ItemKey(TENANT, "new"))
    await _collect(store, 4)
    assert _objects(store) == before


async def test_a_sealed_store_with_its_keys(store: Store) -> None:
    keys_dir = store.world.root / "keys"
    store.keyring = TenantKeyring(keys_dir, MASTER)
    await store.upload()
    assert set((await store.recover()).workspaces) == {"awake", "asleep"}


async def test_a_sealed_store_without_its_keys_says_what_is_lost(store: Store, tmp_path: Path) -> None:
    store.keyring = TenantKeyring(store.world.root / "keys", MASTER)
    await store.upload()
    settings = Settings(home=tmp_path, store_url=store.directory.as_uri(), store_encryption=True)
    with pytest.raises(InvalidRequest, match="is encrypted, and the master key"):
        _keyring(settings)
    (tmp_path / "master.key").write_bytes(MASTER)
    (tmp_path / "master.key").chmod(0o600)
    store.keyring = _keyring(settings)
    with pytest.raises(CorruptData, match="The key of tenant ten_default is not in"):
        store.keyring.of(TENANT)
    done = await store.recover()
    assert done.workspaces == () and "The key of tenant ten_default" in done.damaged[TENANT]
    assert not list((tmp_path / "keys").glob("*.key")), "a new key would hide that the old one is lost"


async def test_a_database_in_use_is_refused(store: Store) -> None:
    await store.upload()
    store.into, mine = store.world.server.database, store.into
    with pytest.raises(Conflict, match="The database is not empty"):
        await store.recover()
    store.into = mine
    await store.recover()
    with pytest.raises(Conflict, match="The database is not empty"):
        await store.recover()


async def test_snapshots_that_only_the_node_has_are_kept(store: Store) -> None:
    """The database is lost and the node whole: the newest snapshots had not been uploaded yet."""
    world = store.world
    await store.upload()
    await world.put("awake", 9)
    await world.server.service.sleep(CTX, "awake")
    newest = await world.get("awake")
    await world.server.service.wake(CTX, "new")
    await world.put("new", 3)
    await world.server.service.sleep(CTX, "new")
    await world.server.node.crash()
    done = await store.recover(here(world.server.home / "store"))
    assert (done.only_here, len(done.nameless), done.damaged, done.kept_until) == (2, 1, {}, None)
    assert set(done.workspaces) == {"awake", "asleep", *done.nameless}
    server = Server(store.into, world.server.home, world.root / "image", NodeId("nod_recovered"), Ledger(world.root / "ledger"))
    world.server = server
    await server.start()
    recovered = await world.get("awake")
    assert recovered.head_snapshot_id == newest.head_snapshot_id
    unstored = await store.into.all("homes.unstored", node_id="nod_recovered", skip=[], limit=9)
    assert {row["workspace_id"] for row in unstored} == {recovered.id, (await world.get(done.nameless[0])).id}
    assert (await world.value("awake"), await world.value("asleep"), await world.value(done.nameless[0])) == (9, 7, 3)


async def test_what_the_store_has_in_part_and_the_node_whole(store: Store) -> None:
    await store.upload()
    server = store.world.server
    head = (await store.world.get("asleep")).head_snapshot_id
    for pack in await StoreCatalogue(server.database).holds(ItemKey(TENANT, str(head))):
        (store.directory / TENANT / "packs" / pack.pack_id).unlink()
    done = await store.recover(here(server.home / "store"))
    assert set(done.workspaces) == {"awake", "asleep"}, "its manifest in the store still says what its name was"
    assert (done.incomplete, done.damaged, done.kept_until) == ((), {}, None), "the node has all, and uploads it anew"
    assert head in {row["id"] for row in await store.into.all("homes.unstored", node_id="nod_recovered", skip=[], limit=9)}


async def test_a_damaged_manifest_on_the_node_is_told(store: Store) -> None:
    await store.upload()
    directory = store.world.server.home / "store" / "snapshots"
    bad = directory / ids.mint("snp", now_ms=clock_ms())
    bad.mkdir()
    (bad / MANIFEST).write_bytes(b"{")
    (directory / ids.mint("snp", now_ms=clock_ms())).mkdir()  # begun, and no snapshot yet
    moved = directory / ids.mint("snp", now_ms=clock_ms())
    moved.mkdir()
    (moved / MANIFEST).write_bytes(next(directory.glob(f"*/{MANIFEST}")).read_bytes())
    done = await store.recover(here(store.world.server.home / "store"))
    assert set(done.damaged) == {f"snapshots/{bad.name}", f"snapshots/{moved.name}"}
    assert (done.only_here, done.kept_until) == (0, None), "the store has everything"


async def test_an_empty_store(store: Store) -> None:
    with pytest.raises(NotFound, match="holds nothing of an installation"):
        await store.recover()


async def test_no_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No object store is named"):
        await recover_home(Settings(home=tmp_path, store_url=None), lambda _: None, lambda: NodeId("nod_x"))
