"""Backups that leave out what is damaged, and what comes back of them: every kind of file, and who stood on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from perdure.backup import restore as restoring
from perdure.core.errors import CorruptData, CorruptSnapshot
from perdure.core.ids import NodeId, SnapshotId, WorkspaceId
from perdure.db.database import Database
from perdure.journal.entries import Journal
from perdure.wire.node import MemoryFate
from perdure.workspaces.model import DiskFate, Workspace, WorkspaceState
from tests.fakes.damage import last_byte_flipped
from tests.integration.backup.conftest import Restoration, World
from tests.torture.node import DIGEST
from tests.torture.server import CTX, Server


def spoil(path: Path) -> None:
    """Of the same size, so that only who reads it notices."""
    path.chmod(0o644)
    path.write_bytes(b"x" * path.stat().st_size)


def damage(world: World, snapshot_id: SnapshotId, what: str) -> None:
    store = world.server.node.store
    manifest = store.manifest(snapshot_id)
    assert manifest.memory is not None
    match what:
        case "its devices" | "its index":
            spoil(store.snapshots / snapshot_id / ("devices.state" if what == "its devices" else "ram.index"))
        case "its pages":
            for segment_id in manifest.memory.segments:
                spoil(next(store.segments.glob(f"{segment_id}*")))
        case "its disk":
            spoil(next(store.disks.glob(f"{manifest.layers[-1].disk_id}*")))
        case "its manifest":
            (store.snapshots / snapshot_id / "manifest.json").write_bytes(b"{")
        case "all of it":
            shutil.rmtree(store.snapshots / snapshot_id)
    store.close()
    store.open()  # as the next start would read it


async def two_snapshots(world: World) -> tuple[SnapshotId, SnapshotId]:
    """Of ``asleep``: one that is named, with 7, and the last one, with 9."""
    kept = await world.server.service.checkpoint(CTX, "asleep", name="kept")
    await world.put("asleep", 9)
    _, head = await world.server.service.sleep(CTX, "asleep")
    return kept.id, head.id


async def end(server: Server) -> None:
    await server.node.crash()
    await server.database.close()


async def told(database: Database, workspace: Workspace) -> list[str]:
    """What the thread says of snapshots that were left out."""
    entries = await Journal(database).read(workspace.tenant_id, workspace.id)
    _, breaks = await Journal(database).verify()
    assert breaks == []
    return [str(entry.body["snapshot_id"]) for entry in entries if entry.kind == "left-out"]


async def test_a_whole_installation_has_nothing_to_skip(world: World) -> None:
    made = await world.back_up(skip_damaged=True)
    assert made.record.left_out == ()
    rows = await world.server.store.on_node(world.server.node.node_id)
    assert {one.name for one in made.record.snapshots} == {row.id for row in rows}


@pytest.mark.parametrize(
    "what", ["its index", *(pytest.param(what, marks=pytest.mark.long) for what in ("its devices", "its pages"))]
)
async def test_without_its_memory_the_disk_comes_back(world: World, restoration: Restoration, what: str) -> None:
    _, head = await two_snapshots(world)
    damage(world, head, what)
    with pytest.raises(CorruptSnapshot, match="so there is no backup") as caught:
        await world.back_up()
    assert "--skip-damaged" in caught.value.hint
    made = await world.back_up(skip_damaged=True)
    before = await world.get("asleep")
    one = next(one for one in made.record.left_out if one.snapshot_id == head)
    assert (one.workspace, one.has_disk, one.heads) == ("asleep", True, (before.id,)) and one.why
    assert head not in {item.name for item in made.record.snapshots}
    done = await restoration.restore()
    assert [sentence for sentence in done.lost if head in sentence and "came back without its memory" in sentence]
    server = await restoration.server()
    assert (await server.service.get(CTX, "asleep")).head_snapshot_id == head
    shown = next(one for one in await server.service.snapshots(CTX, "asleep") if one.id == head)
    assert (shown.has_memory, shown.memory_total_bytes) == (False, 0)
    _, report = await server.service.wake(CTX, "asleep")
    assert (report.memory, report.disk) == (MemoryFate.LOST, DiskFate.REWOUND)
    assert (await server.prove("asleep")).value == 9, "what was on its disk"
    assert await told(server.database, before) == [head]
    await end(server)


@pytest.mark.parametrize(
    "what", ["its disk", *(pytest.param(what, marks=pytest.mark.long) for what in ("its manifest", "all of it"))]
)
async def test_without_its_last_snapshot_it_falls_back_to_the_one_before(
    world: World, restoration: Restoration, what: str
) -> None:
    kept, head = await two_snapshots(world)
    damage(world, head, what)
    made = await world.back_up(skip_damaged=True)
    (one,) = made.record.left_out
    assert (one.snapshot_id, one.has_disk) == (head, False)
    done = await restoration.restore()
    assert [sentence for sentence in done.lost if head in sentence and "is not in the backup" in sentence]
    server = await restoration.server()
    after = await server.service.get(CTX, "asleep")
    assert (after.state, after.head_snapshot_id) == (WorkspaceState.HIBERNATED, kept)
    assert head not in {row.id for row in await server.store.on_node(server.node.node_id)}
    _, report = await server.service.wake(CTX, "asleep")
    assert (report.memory, report.disk) == (MemoryFate.KEPT, DiskFate.REWOUND)
    assert f"which does not have its last snapshot {head}: it was damaged; this is {kept}" in report.memory_reason
    assert (await server.prove("asleep")).value == 7
    assert await told(server.database, after) == [head]
    assert (await server.prove("awake")).value == 7, "the others are as ever"
    await end(server)


async def test_a_branch_falls_back_to_where_it_was_forked(world: World, restoration: Restoration) -> None:
    (child,) = await world.server.service.fork(CTX, "asleep", 1)
    assert isinstance(child, Workspace) and child.forked_from is not None
    await world.put(child.name, 11)
    _, head = await world.server.service.sleep(CTX, child.name)
    damage(world, head.id, "its disk")
    await world.back_up(skip_damaged=True)
    await restoration.restore()
    server = await restoration.server()
    assert (await server.service.get(CTX, child.name)).head_snapshot_id == child.forked_from
    assert (await server.prove(child.name)).value == 7
    await end(server)


async def test_what_has_no_other_begins_anew_and_says_so(world: World, restoration: Restoration) -> None:
    before = await world.get("asleep")
    assert before.head_snapshot_id is not None
    damage(world, before.head_snapshot_id, "all of it")
    await world.back_up(skip_damaged=True)
    await restoration.restore()
    server = await restoration.server()
    after = await server.service.get(CTX, "asleep")
    assert after.head_snapshot_id is None and "it has no other, and begins anew" in after.state_detail
    _, report = await server.service.wake(CTX, "asleep")
    assert report.memory is MemoryFate.LOST
    assert (await server.prove("asleep")).value == 0
    assert await told(server.database, before) == [before.head_snapshot_id]
    await end(server)


async def test_a_restore_that_was_killed_late_says_it_too(world: World, restoration: Restoration) -> None:
    """The new life is begun a second time, over rows that have fallen back already."""
    kept, head = await two_snapshots(world)
    damage(world, head, "its disk")
    made = await world.back_up(skip_damaged=True)
    await restoration.restore()
    await restoring._settle(NodeId("nod_restored"), made.record, restoration.url, {})
    server = await restoration.server()
    _, report = await server.service.wake(CTX, "asleep")
    assert f"does not have its last snapshot {head}" in report.memory_reason and report.snapshot_id == kept
    await end(server)


async def test_a_failed_one_whose_damage_is_left_out_sleeps_again(world: World, restoration: Restoration) -> None:
    kept, head = await two_snapshots(world)
    damage(world, head, "its disk")
    async with world.server.database._checkout() as connection:
        await connection.execute("update workspaces set state = 'failed', state_detail = 'damaged' where name = 'asleep'")
    await world.back_up(skip_damaged=True)
    await restoration.restore()
    server = await restoration.server()
    after = await server.service.get(CTX, "asleep")
    assert (after.state, after.head_snapshot_id) == (WorkspaceState.HIBERNATED, kept)
    await end(server)


async def test_a_damaged_image_leaves_out_what_lies_on_it(world: World, restoration: Restoration) -> None:
    origin = world.origin()
    spoil(origin.images.root / "blobs" / DIGEST / "root.raw")
    with pytest.raises(CorruptSnapshot, match=r"root\.raw"):
        await world.back_up(origin=origin)
    made = await world.back_up(origin=origin, skip_damaged=True)
    rows = await world.server.store.on_node(world.server.node.node_id)
    assert (made.record.snapshots, made.record.images) == ((), ())
    assert {one.snapshot_id for one in made.record.left_out} == {*(row.id for row in rows), None}
    assert [one.workspace for one in made.record.left_out if one.snapshot_id is None] == ["new"]
    done = await restoration.restore()
    assert done.workspaces == 3 and [one for one in done.lost if "its image is not in the backup" in one]
    database = Database(restoration.url, max_connections=2)
    await database.open()
    assert {row["head_snapshot_id"] for row in await database.all("backup.workspaces")} == {None}
    await database.close()


async def test_what_was_mended_is_whole_in_the_next_backup(world: World, restoration: Restoration) -> None:
    _, head = await two_snapshots(world)
    path = world.server.node.store.snapshots / head / "devices.state"
    whole = path.read_bytes()
    damage(world, head, "its devices")
    assert (await world.back_up(skip_damaged=True)).record.left_out
    path.write_bytes(whole)
    made = await world.back_up(skip_damaged=True)
    assert made.record.left_out == () and head in {one.name for one in made.record.snapshots}
    await restoration.restore()
    server = await restoration.server()
    _, report = await server.service.wake(CTX, "asleep")
    assert report.memory is MemoryFate.KEPT
    await end(server)


async def test_of_a_snapshot_in_neither_home_nothing_is_asked_for(world: World) -> None:
    """Its files are on no node, and the object store does not have it either."""
    before = await world.get("asleep")
    assert before.head_snapshot_id is not None
    world.server.node.store.delete([before.head_snapshot_id])
    made = await world.back_up(skip_damaged=True)
    (one,) = made.record.left_out
    assert (one.snapshot_id, one.has_disk, one.heads) == (before.head_snapshot_id, False, (WorkspaceId(before.id),))


# -------------------------------------------------------------------------------------------------------- damage in the place


def flip(path: Path) -> None:
    """One bit of the first chunk in a pack."""
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + bytes((whole[40] ^ 1,)) + whole[41:])


async def test_a_restore_goes_on_without_what_the_place_has_lost(world: World, restoration: Restoration) -> None:
    kept, head = await two_snapshots(world)
    made = await world.back_up()
    item = next(one for one in made.record.snapshots if one.name == head)
    manifest = world.directory / item.scope / "items" / f"{item.name}.{item.attempt}"
    manifest.write_bytes(last_byte_flipped(manifest.read_bytes()))
    with pytest.raises(CorruptData, match=head) as caught:
        await restoration.restore()
    assert "--skip-damaged" in caught.value.hint and restoration.is_untouched()
    done = await restoration.restore(skip_damaged=True)
    assert (done.skipped, done.snapshots) == ((head,), len(made.record.snapshots) - 1)
    assert [sentence for sentence in done.lost if sentence.startswith(f"Snapshot {head} of 'asleep' is not in the backup: ")]
    server = await restoration.server()
    after = await server.service.get(CTX, "asleep")
    assert after.head_snapshot_id == kept
    _, report = await server.service.wake(CTX, "asleep")
    assert f"does not have its last snapshot {head}" in report.memory_reason
    assert (await server.prove("asleep")).value == 7
    assert await told(server.database, after) == [head]
    await end(server)


async def test_a_damaged_chunk_costs_no_more_than_who_needs_it(world: World, restoration: Restoration) -> None:
    """It is met when it is read, after everything was looked at. Of whom it is the memory, the disk comes back."""
    await two_snapshots(world)
    made = await world.back_up()
    for path in sorted((world.directory / "ten_default" / "packs").iterdir())[:1]:
        flip(path)
    with pytest.raises(CorruptSnapshot, match="cannot be restored") as caught:
        await restoration.restore()
    assert "--skip-damaged" in caught.value.hint
    done = await restoration.restore(skip_damaged=True)
    assert done.skipped and len(done.skipped) < len(made.record.snapshots)
    server = await restoration.server()
    present = {facts.snapshot_id for facts in server.node.store.complete()}
    assert present == {row.id for row in await server.store.on_node(server.node.node_id)}
    for one in await server.service.find(CTX):
        assert one.head_snapshot_id is None or one.head_snapshot_id in present
        await server.service.wake(CTX, one.id)
    await end(server)


async def test_a_damaged_image_in_the_place_leaves_out_what_lies_on_it(world: World, restoration: Restoration) -> None:
    made = await world.back_up()
    for path in (world.directory / "images" / "packs").iterdir():
        path.unlink()
    with pytest.raises(CorruptData):
        await restoration.restore()
    done = await restoration.restore(skip_damaged=True)
    assert set(done.skipped) == {one.name for one in made.record.snapshots} and done.snapshots == 0
    assert all("What it lies on is damaged" in sentence for sentence in done.lost)


async def test_nothing_is_restored_without_the_database(world: World, restoration: Restoration) -> None:
    made = await world.back_up()
    item = made.record.dump
    (world.directory / item.scope / "items" / f"{item.name}.{item.attempt}").unlink()
    with pytest.raises(CorruptData, match="is damaged") as caught:
        await restoration.restore(skip_damaged=True)
    assert "nothing to restore without it" in caught.value.hint and restoration.is_untouched()
