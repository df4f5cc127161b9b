"""A backup brought back: what comes with it, in which life, and what is refused before anything is written."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest

from perdure.backup import restore as restoring
from perdure.backup.make import Made
from perdure.backup.place import Place
from perdure.backup.record import _digest
from perdure.core import keys
from perdure.core.errors import Conflict, CorruptData, CorruptSnapshot, HostUnfit, InvalidRequest, NotFound
from perdure.db import migrations
from perdure.images.registry import _sealed
from perdure.journal.entries import Journal
from perdure.workspaces.model import MemoryFate, SnapshotReason, WorkspaceState
from tests.fakes.damage import last_byte_flipped
from tests.integration.backup.conftest import Restoration, World
from tests.torture.saving import MASTER, clock_ms, make_images
from tests.torture.server import CTX, Server


async def end(server: Server) -> None:
    await server.node.crash()
    await server.database.close()


def edit_record(directory: Path, made: Made, **changes: object) -> None:
    """The backup's manifest says something else, and says so well."""
    plain = json.loads(made.record.to_bytes()) | changes
    del plain["checksum"]
    (directory / "backups" / f"{made.record.id}.json").write_text(json.dumps({"checksum": _digest(plain), **plain}))


async def test_everything_comes_back_asleep_in_a_new_life(world: World, restoration: Restoration) -> None:
    before = {one.name: one for one in await world.server.service.find(CTX)}
    made = await world.back_up()
    done = await restoration.restore()
    assert (done.workspaces, set(done.set_back), done.unsaved, done.lost) == (3, {"awake", "new"}, ("new",), ())
    assert restoration.told[-1].what == "database" and restoration.told[-1].done == 1
    server = await restoration.server()
    after = {one.name: one for one in await server.service.find(CTX)}
    assert after.keys() == before.keys()
    for name, one in after.items():
        assert one.state is WorkspaceState.HIBERNATED
        assert one.generation > before[name].generation + 1_000_000_000
        assert (one.id, one.head_snapshot_id) == (before[name].id, before[name].head_snapshot_id)
        assert made.record.id in one.state_detail
    assert [(await server.prove(name)).value for name in ("awake", "asleep", "new")] == [7, 7, 0]
    named = [one.name for one in await server.service.snapshots(CTX, "awake")]
    assert "good" in named
    await end(server)


async def test_a_wake_says_that_it_was_restored(world: World, restoration: Restoration) -> None:
    made = await world.back_up()
    await restoration.restore()
    server = await restoration.server()
    _, report = await server.service.wake(CTX, "asleep")
    assert report.memory is MemoryFate.KEPT
    assert report.memory_reason.startswith(f"rewound: restored from the backup {made.record.id} of ")
    checked, breaks = await Journal(server.database).verify()
    assert breaks == [] and checked
    entries = [entry.kind for entry in await server.service.log(CTX, "asleep")]
    assert "restored" in entries
    await end(server)


async def test_what_was_begun_at_the_backup_is_not_restored(world: World, restoration: Restoration) -> None:
    """A pending snapshot, a deletion under way, a create nobody was told of, a reference of the backup itself, another store."""
    database = world.server.database
    awake = await world.get("awake")
    record = await world.server.store.by_id(awake.id)
    await world.server.store.intend(record, world.server.tools.mint_snapshot(), SnapshotReason.REQUESTED)
    async with database._checkout() as connection:
        await connection.execute("update workspaces set state = 'creating' where name = 'new'")
    await world.back_up()
    await restoration.restore()
    server = await restoration.server()
    assert {one.name for one in await server.service.find(CTX)} == {"awake", "asleep"}
    assert {row.state.value for row in await server.store.on_node(server.node.node_id)} == {"complete"}
    assert await server.database.all("retention.used_of_node", node_id=server.node.node_id) == []
    first = await database.one("catalogue.installation")
    second = await server.database.one("catalogue.installation")
    assert first is not None and second is not None and first["id"] != second["id"]
    await end(server)


async def test_a_second_life_of_one_backup_is_beyond_the_first(world: World, restoration: Restoration) -> None:
    """What the first restored one was handed out in its generations is worth nothing in the second."""
    await world.back_up()
    await restoration.restore()
    server = await restoration.server()
    server.database.shift_clock(60)
    async with server.database.transaction() as tx:
        rows = await tx.all("backup.asleep", node_id=server.node.node_id, detail="", body="{}", rewound="again")
    first = {one.id: one.generation for one in await server.service.find(CTX)}
    assert all(row["generation"] >= first[row["id"]] for row in rows)
    assert any(row["generation"] > 1_000_000_000 for row in rows)
    await end(server)


async def test_memory_on_a_base_of_its_own_comes_back(world: World, restoration: Restoration) -> None:
    head = (await world.get("asleep")).head_snapshot_id
    assert head is not None and await world.server.node.rebase(head)
    assert world.server.node.store.manifest(head).private_base is not None
    await world.back_up()
    await restoration.restore()
    server = await restoration.server()
    assert (await server.prove("asleep")).value == 7
    await end(server)


async def test_an_older_backup_can_be_named(world: World, restoration: Restoration) -> None:
    first = await world.back_up()
    await world.put("asleep", 9)
    await world.server.service.sleep(CTX, "asleep")
    await world.back_up()
    done = await restoration.restore(backup_id=first.record.id)
    assert done.record.id == first.record.id
    server = await restoration.server()
    assert (await server.prove("asleep")).value == 7
    await end(server)


# ------------------------------------------------------------------------------------------------------------------ refusals


async def test_a_home_in_use_is_refused(world: World, restoration: Restoration) -> None:
    await world.back_up()
    (restoration.home / "store" / "snapshots").mkdir(parents=True)
    with pytest.raises(Conflict, match="is in use already: it has store") as caught:
        await restoration.restore()
    assert "PERDURE_HOME" in caught.value.hint


async def test_a_database_in_use_is_refused(world: World, restoration: Restoration) -> None:
    await world.back_up()
    restoration.url = world.server.database.url
    with pytest.raises(Conflict, match="is not empty"):
        await restoration.restore()
    assert restoration.is_untouched()


async def test_a_place_without_backups(restoration: Restoration) -> None:
    with pytest.raises(NotFound, match="There is no directory"):
        restoration.place()
    (restoration.root / "backups").mkdir()
    with pytest.raises(NotFound, match="There are no backups of Perdure"):
        await restoration.restore()


async def test_a_backup_that_is_not_there(world: World, restoration: Restoration) -> None:
    made = await world.back_up()
    with pytest.raises(NotFound, match="bak_none does not exist") as caught:
        await restoration.restore(backup_id="bak_none")
    assert made.record.id in caught.value.hint


async def test_a_missing_part_is_told_before_anything_is_written(world: World, restoration: Restoration) -> None:
    await world.back_up()
    (some,) = list((world.directory / "ten_default" / "packs").iterdir())[:1]
    some.unlink()
    with pytest.raises(CorruptData, match=r"parts of .* are missing") as caught:
        await restoration.restore()
    assert "--backup" in caught.value.hint
    assert restoration.is_untouched()


async def test_a_damaged_item_manifest_is_told_before_anything_is_written(world: World, restoration: Restoration) -> None:
    made = await world.back_up()
    one = made.record.snapshots[0]
    path = world.directory / one.scope / "items" / f"{one.name}.{one.attempt}"
    path.write_bytes(last_byte_flipped(path.read_bytes()))
    with pytest.raises(CorruptData, match=one.name):
        await restoration.restore()
    assert restoration.is_untouched()


async def test_a_damaged_chunk_is_named_and_the_restore_goes_on_when_it_is_mended(world: World, restoration: Restoration) -> None:
    await world.back_up()
    packs = sorted((world.directory / "ten_default" / "packs").iterdir())
    whole = packs[0].read_bytes()
    packs[0].write_bytes(whole[:40] + bytes((whole[40] ^ 1,)) + whole[41:])
    with pytest.raises(CorruptSnapshot, match=rf"Snapshot snp_\w+ of the backup bak_\w+ cannot be restored: .*{packs[0].name}"):
        await restoration.restore()
    with pytest.raises(Conflict, match="has not been finished") as caught:
        restoring.check_finished(restoration.home)
    assert "perdure restore" in caught.value.hint
    packs[0].write_bytes(whole)
    await restoration.restore()
    restoring.check_finished(restoration.home)
    server = await restoration.server()
    assert (await server.prove("awake")).value == 7
    await end(server)


async def test_another_backup_into_a_home_that_one_was_begun_in(world: World, restoration: Restoration) -> None:
    first, second = await world.back_up(), await world.back_up()
    restoration.home.mkdir()
    mark = {"backup": first.record.id, "place": restoration.place().url}
    (restoration.home / restoring.MARK).write_text(json.dumps(mark))
    with pytest.raises(Conflict, match=f"A restore of the backup {first.record.id}"):
        await restoration.restore(backup_id=second.record.id)
    done = await restoration.restore()
    assert done.record.id == first.record.id, "without a wish, what was begun goes on"


async def test_a_damaged_manifest(world: World, restoration: Restoration) -> None:
    made = await world.back_up()
    path = world.directory / "backups" / f"{made.record.id}.json"
    path.write_text(path.read_text().replace('"workspaces": 3', '"workspaces": 4'))
    with pytest.raises(CorruptData, match="its checksum does not hold"):
        await restoration.restore()


async def test_a_forged_manifest_writes_nothing_outside_of_the_home(world: World, restoration: Restoration) -> None:
    """Whoever can write into the place writes manifests whose checksums hold."""
    made = await world.back_up()
    outside = world.root / "passwd"
    outside.write_text("somebody's")
    for changes in (
        {"names": {"../../../passwd": "70" * 32}},
        {"names": {"base": "../../../x"}},
        {"keys": {"../passwd": "AAAA"}},
    ):
        edit_record(world.directory, made, **changes)
        with pytest.raises(CorruptData, match=r"The manifest of the backup .* is damaged"):
            await restoration.restore()
    assert outside.read_text() == "somebody's"
    assert restoration.is_untouched()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 3}, r"has format 3, made by Perdure 9\.8\.7; this release reads formats up to 2"),
        ({"schema": "9999"}, r"made by Perdure 9\.8\.7, whose database schema \(9999\) is newer"),
        ({"postgres": 99}, "holds a dump of PostgreSQL 99"),
    ],
)
async def test_a_backup_of_a_newer_release(
    world: World, restoration: Restoration, changes: dict[str, object], words: str
) -> None:
    made = await world.back_up()
    edit_record(world.directory, made, **changes)
    with pytest.raises(HostUnfit, match=words) as caught:
        await restoration.restore()
    assert "9.8.7" in caught.value.hint or "PostgreSQL" in caught.value.hint
    assert restoration.is_untouched()


async def test_a_backup_of_an_older_release_is_brought_to_this_schema(world: World, restoration: Restoration) -> None:
    """Its dump is of the schema before the last migration that a restore needs nothing of."""
    made = await world.back_up()
    assert made.record.schema == migrations.head()
    edit_record(world.directory, made, schema="0001")
    await restoration.restore()
    assert migrations.current(restoration.url) == migrations.head()


async def test_a_golden_made_again_here_stays_beside_the_right_one(world: World, restoration: Restoration) -> None:
    made = await world.back_up()
    images = make_images(restoration.home / "images", world.root / "image")
    (golden,) = images.root.glob("blobs/*/golden/*/golden.json")
    described = json.loads(golden.read_text())
    del described["checksum"]
    golden.write_bytes(_sealed({**described, "base_id": "cd" * 32}))
    await restoration.restore()
    refs = {one.ref for one in images.goldens(images.all()[0])}
    assert len(refs) == 2
    assert made.record.images[-1].key.name.startswith(f"img-{images.all()[0].digest}")


async def test_a_damaged_golden_here_is_told(world: World, restoration: Restoration) -> None:
    await world.back_up()
    images = make_images(restoration.home / "images", world.root / "image")
    (golden,) = images.root.glob("blobs/*/golden/*/golden.json")
    golden.write_bytes(b"{}")
    with pytest.raises(CorruptData, match="is damaged: its golden snapshot") as caught:
        await restoration.restore()
    assert "PERDURE_IMAGE_DIR" in caught.value.hint


# ---------------------------------------------------------------------------------------------------------------------- keys


async def test_the_master_key_comes_with_it_when_asked_for(world: World, restoration: Restoration) -> None:
    await world.back_up(with_master_key=True)
    done = await restoration.restore()
    path = restoration.home / "master.key"
    assert path.read_bytes() == MASTER and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert done.lost == ()


async def test_without_the_master_key_it_is_said_what_is_lost(world: World, restoration: Restoration) -> None:
    await world.back_up(with_master_key=False)
    assert base64.b64encode(MASTER).decode() not in "".join(
        path.read_text() for path in (world.directory / "backups").glob("*.json")
    )
    done = await restoration.restore()
    assert len(done.lost) == 1 and "a new one is made" in done.lost[0] and "handles" in done.lost[0]


async def test_the_master_key_may_lie_in_the_home_already(world: World, restoration: Restoration) -> None:
    await world.back_up(with_master_key=False)
    restoration.home.mkdir()
    (restoration.home / "master.key").write_bytes(MASTER)
    (restoration.home / "master.key").chmod(0o600)
    assert (await restoration.restore()).lost == ()


async def test_another_master_key_is_refused(world: World, restoration: Restoration) -> None:
    await world.back_up()
    keys.master_key(restoration.home / "master.key")
    with pytest.raises(InvalidRequest, match="is not the one that the backup"):
        await restoration.restore()


async def test_a_sealed_backup_needs_the_key_and_nothing_else(world: World, restoration: Restoration) -> None:
    world.seal = True
    made = await world.back_up(with_master_key=False)
    assert list(made.record.keys) == ["ten_default.key"]
    with pytest.raises(InvalidRequest, match="is encrypted, and the master key that opens it is not here"):
        await restoration.restore()
    assert restoration.is_untouched()
    restoration.home.mkdir(exist_ok=True)
    (restoration.home / "master.key").write_bytes(MASTER)
    (restoration.home / "master.key").chmod(0o600)
    await restoration.restore()
    assert (restoration.home / "keys" / "ten_default.key").is_file()
    server = await restoration.server()
    assert (await server.prove("asleep")).value == 7
    await end(server)


async def test_a_sealed_backup_that_was_damaged_is_restored_when_it_is_mended(world: World, restoration: Restoration) -> None:
    """The keys that it brings do not make the home one that is in use; other keys are somebody's."""
    world.seal = True
    await world.back_up()
    (some,) = list((world.directory / "ten_default" / "packs").iterdir())[:1]
    aside = some.rename(world.root / "aside")
    with pytest.raises(CorruptData, match="are missing"):
        await restoration.restore()
    aside.rename(some)
    key = restoration.home / "keys" / "ten_default.key"
    wrapped = key.read_bytes()
    key.write_bytes(b"another")
    with pytest.raises(Conflict, match=r"ten_default\.key is not the key that the backup has"):
        await restoration.restore()
    key.write_bytes(wrapped)
    await restoration.restore()


async def test_a_sealed_backup_after_a_plain_one_in_one_place(world: World, restoration: Restoration) -> None:
    """Neither can use the other's chunks, and both are whole."""
    plain = await world.back_up()
    world.seal = True
    sealed = await world.back_up()
    assert sealed.sent_bytes > 0
    for one in (plain, sealed):
        ready = await restoring.prepare(restoration.to(), restoration.place(), one.record.id)
        assert len(ready.images) + len(ready.snapshots) == len(one.record.items) - 1
    assert (await Place(restoration.place()._objects, "x", clock_ms).listed())[0] == [plain.record.id, sealed.record.id]
