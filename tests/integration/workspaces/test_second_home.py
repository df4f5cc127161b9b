"""Uploads, fetches, room in both homes and moves between nodes, over fake nodes with one bucket and a real database."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.core.config import Settings
from perdure.core.errors import (
    Conflict,
    CorruptData,
    CorruptSnapshot,
    DeadlineExceeded,
    HostUnfit,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from perdure.core.ids import DEFAULT_TENANT, NodeId, SnapshotId
from perdure.fleet.nodes import NodeRegistry
from perdure.fleet.objects import StoreCatalogue
from perdure.snapshots.objects.chunks import bytes_source
from perdure.snapshots.objects.download import Downloader
from perdure.snapshots.objects.upload import Contents, Uploader
from perdure.wire.node import Damage, Fetching, MemoryFate
from perdure.wire.objects import ItemKey, Scope
from perdure.wiring import _objects
from perdure.workspaces.model import DiskFate, Recovery, UploadState, Verified, Workspace, WorkspaceKind, WorkspaceState
from perdure.workspaces.service import WorkspaceService
from tests.fakes.control_plane import CTX, ControlPlane, control_plane
from tests.fakes.node import FakeNode
from tests.fakes.second_home import FakeBucket, FakeSecondHome

NEVER = {"idle_timeout_s": 0.0, "checkpoint_interval_s": 0.0}
LOST = Damage("segments/seg_1.pages", "The stored file segments/seg_1.pages is missing.")


@dataclass
class Homes:
    plane: ControlPlane
    bucket: FakeBucket
    home: FakeSecondHome

    @property
    def node(self) -> FakeNode:
        return self.plane.node

    @property
    def service(self) -> WorkspaceService:
        return self.plane.service

    async def uploaded(self) -> set[str]:
        """After everything that can be uploaded was."""
        for _ in range(5):
            await self.service.upkeep.uploads.begin()
            await self.service.upkeep.uploads.drain()
        return set(self.bucket.content)

    async def slept(self, name: str = "demo") -> SnapshotId:
        _, snapshot = await self.service.sleep(CTX, name)
        return snapshot.id

    async def elsewhere(self, node_id: str = "nod_other") -> Homes:
        """A server on another node with nothing, over the same database and bucket."""
        other = ControlPlane(self.plane.database, clock=self.plane.clock, settings=self.plane.settings, images=self.plane.images)
        other.node = FakeNode(NodeId(node_id), clock=self.plane.clock)
        home = attach(other, self.bucket)
        await other.begin()
        return Homes(other, self.bucket, home)

    async def goes_away(self) -> None:
        """SIGKILL of server and node, and so much time that the lease is over."""
        await self.plane.crash()
        self.plane.database.shift_clock(60)


def attach(plane: ControlPlane, bucket: FakeBucket) -> FakeSecondHome:
    return FakeSecondHome(plane.node, bucket, StoreCatalogue(plane.database, of_snapshots=True))


@pytest.fixture
async def homes() -> AsyncIterator[Homes]:
    async with control_plane() as plane:
        bucket = FakeBucket()
        yield Homes(plane, bucket, attach(plane, bucket))


# ------------------------------------------------------------------------------------------------------------------- uploads


async def test_what_is_captured_is_uploaded_and_every_snapshot_says_where_it_is(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    one = await homes.service.checkpoint(CTX, "demo", name="one")
    (shown,) = await homes.service.snapshots(CTX, "demo")
    assert shown.stored_at is None
    assert shown.upload is not None and shown.upload.state is UploadState.WAITING
    assert await homes.uploaded() == {one.id}
    (shown,) = await homes.service.snapshots(CTX, "demo")
    assert shown.stored_at is not None and shown.upload is None
    (placed,) = await homes.service.lineage(CTX, "demo")
    assert placed.snapshot.stored_at == shown.stored_at
    catalogue = homes.bucket.content[one.id][1]["catalogue"]
    assert "demo" in str(catalogue), "what only rows know goes along"


async def test_as_many_at_once_as_the_setting_says_heads_of_sleepers_first(homes: Homes) -> None:
    await homes.plane.create("awake", **NEVER)
    for number in range(3):
        await homes.service.checkpoint(CTX, "awake", name=f"s{number}")
    await homes.plane.create("asleep", **NEVER)
    head = await homes.slept("asleep")
    homes.home.gate = asyncio.Event()
    uploads = homes.service.upkeep.uploads
    await uploads.begin()
    await homes.home.begun.wait()
    await uploads.begin()
    shown = [one for name in ("awake", "asleep") for one in await homes.service.snapshots(CTX, name)]
    going = [one.id for one in shown if one.upload is not None and one.upload.state is UploadState.UPLOADING]
    assert len(going) == homes.plane.settings.store_uploads == 2
    assert head in going
    homes.home.gate.set()
    assert len(await homes.uploaded()) == 4


async def test_a_failed_upload_is_told_waits_longer_each_time_and_comes_through(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    head = await homes.slept()
    homes.home.fail("upload", Unavailable("The object store did not take it."), Unavailable("The object store did not take it."))
    assert await homes.uploaded() == set()
    (shown,) = await homes.service.snapshots(CTX, "demo")
    upload = shown.upload
    assert upload is not None and upload.state is UploadState.FAILED
    assert (upload.error, upload.retry_s) == ("The object store did not take it.", 5.0)
    assert homes.home.calls.count("upload") == 1, "it is not tried again at once"
    homes.plane.clock.advance(5.1)
    assert await homes.uploaded() == set()
    (shown,) = await homes.service.snapshots(CTX, "demo")
    assert shown.upload is not None and shown.upload.retry_s == 10.0
    homes.plane.clock.advance(10.1)
    assert await homes.uploaded() == {head}


async def test_a_verification_says_how_far_the_other_copy_is(homes: Homes) -> None:
    async def uploads() -> list[UploadState | None]:
        found = [event for event in [event async for event in homes.service.verify(CTX, "demo")] if isinstance(event, Verified)]
        assert [(one.intact, one.read_from) for one in found] == [(True, "node")]
        return [one.snapshot.upload.state if one.snapshot.upload else None for one in found]

    await homes.plane.create(**NEVER)
    await homes.slept()
    assert await uploads() == [UploadState.WAITING]
    homes.home.gate = asyncio.Event()
    await homes.service.upkeep.uploads.begin()
    await homes.home.begun.wait()
    assert await uploads() == [UploadState.UPLOADING]
    homes.home.gate.set()
    await homes.uploaded()
    assert await uploads() == [None]


async def test_a_wake_and_a_capture_do_not_wait_for_an_upload(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    await homes.slept()
    homes.home.gate = asyncio.Event()
    await homes.service.upkeep.uploads.begin()
    await homes.home.begun.wait()
    await homes.service.wake(CTX, "demo")
    await homes.service.checkpoint(CTX, "demo")
    await homes.slept()
    homes.home.gate.set()


async def test_waiting_for_an_upload(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    with pytest.raises(Conflict, match="has no snapshot yet"):
        await homes.service.push_snapshot(CTX, "demo", None)
    head = await homes.slept()
    homes.home.fail("upload", Unavailable("The object store did not take it.", hint="Look whether it can be reached."))
    with pytest.raises(Unavailable, match="did not take it") as caught:
        await homes.service.push_snapshot(CTX, "demo", None)
    assert caught.value.hint == "Look whether it can be reached."
    homes.home.fail("upload", CorruptData("A file is damaged.", file="disks/dsk_1.qcow2", internal="checksum"))
    with pytest.raises(CorruptData) as damaged:
        await homes.service.push_snapshot(CTX, "demo", None)
    assert damaged.value.details == {"file": "disks/dsk_1.qcow2"} and damaged.value.internal == "checksum"
    homes.home.gate = asyncio.Event()
    with pytest.raises(DeadlineExceeded, match="goes on"):
        await homes.service.push_snapshot(CTX, "demo", head, deadline_s=0)
    homes.home.gate.set()
    pushed = await homes.service.push_snapshot(CTX, "demo", head)
    assert pushed.id == head and pushed.stored_at is not None
    assert (await homes.service.push_snapshot(CTX, "demo", None)).id == head, "what is there is there"
    with pytest.raises(NotFound):
        await homes.service.push_snapshot(CTX, "demo", "snp_none")


async def test_without_a_store_there_is_nothing_to_wait_for(plane: ControlPlane) -> None:
    await plane.create(**NEVER)
    await plane.service.sleep(CTX, "demo")
    with pytest.raises(Conflict, match="has no object store"):
        await plane.service.push_snapshot(CTX, "demo", None)
    (shown,) = await plane.service.snapshots(CTX, "demo")
    assert shown.stored_at is None and shown.upload is None


async def test_one_that_is_removed_while_it_is_uploaded_is_forgotten(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    one = await homes.service.checkpoint(CTX, "demo", name="one")
    await homes.service.checkpoint(CTX, "demo")
    homes.home.gate = asyncio.Event()
    pushing = asyncio.create_task(homes.service.push_snapshot(CTX, "demo", "one"))
    await homes.home.begun.wait()
    await homes.service.remove_snapshot(CTX, "demo", "one")
    await homes.service.upkeep.clean()
    await homes.service.upkeep.room.collect()
    homes.home.gate.set()
    with pytest.raises((NotFound, Conflict)):
        await pushing
    await homes.uploaded()
    await homes.service.upkeep.room.collect()
    assert one.id not in homes.bucket.content
    with pytest.raises(NotFound, match="has been removed"):
        await StoreCatalogue(homes.plane.database, of_snapshots=True).begin(ItemKey(Scope("ten_default"), one.id))


async def test_after_a_crash_the_rows_say_what_is_left_to_upload(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    head = await homes.slept()
    homes.home.gate = asyncio.Event()
    await homes.service.upkeep.uploads.begin()
    await homes.home.begun.wait()
    await homes.service.upkeep.uploads.close()
    await homes.plane.crash()
    homes.home.gate = None
    await homes.plane.restart()
    assert await homes.uploaded() == {head}


async def test_a_store_is_not_used_with_the_other_encryption(homes: Homes, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, store_url=f"file://{tmp_path}/objects")
    sealed = settings.model_copy(update={"store_encryption": True})
    database, clock = homes.plane.database, homes.plane.clock
    assert await _objects(Settings(home=tmp_path), clock, database) is None
    assert await _objects(sealed, clock, database) is not None, "nothing is in it yet"
    await homes.plane.create(**NEVER)
    await homes.slept()
    await homes.uploaded()
    with pytest.raises(InvalidRequest, match="is true, but the object store has snapshots that are not encrypted"):
        await _objects(sealed, clock, database)
    parts = await _objects(settings, clock, database)
    assert parts is not None and parts.owner.startswith("ins_")
    (tmp_path / "keys" / "ten_default.key").write_bytes(b"a key")
    with pytest.raises(InvalidRequest, match="is false, but the object store is encrypted") as caught:
        await _objects(settings, clock, database)
    assert str(tmp_path / "keys") in caught.value.hint


async def test_a_second_node_does_not_seal_with_a_key_of_its_own(homes: Homes, tmp_path: Path) -> None:
    """Both have started before anything was stored, so each had reason to make a key."""
    clock, database = homes.plane.clock, homes.plane.database
    store = (tmp_path / "objects").as_uri()
    first, second = (
        Settings(home=tmp_path / name, store_url=store, store_encryption=True, crash_file=None) for name in ("one", "two")
    )
    one, two = await _objects(first, clock, database), await _objects(second, clock, database)
    assert one is not None and two is not None
    keys = [ItemKey(Scope(DEFAULT_TENANT), name) for name in ("item-1", "item-2")]
    contents = [Contents(key, [bytes_source("file", key.name.encode() * 100)]) for key in keys]
    await Uploader(one.remote, one.catalogue).upload(contents[0])
    for refused in (Uploader(two.remote, two.catalogue).upload(contents[1]), Downloader(two.remote, two.catalogue).open(keys[0])):
        with pytest.raises(HostUnfit, match="another key of tenant ten_default") as caught:
            await refused
        assert (first.home / "node.id").read_text() in caught.value.hint and "master.key" in caught.value.hint
    shutil.copy(first.master_key_file, second.master_key_file)
    shutil.copytree(first.store_keys_dir, second.store_keys_dir, dirs_exist_ok=True)
    again = await _objects(second, clock, database)
    assert again is not None
    await Uploader(again.remote, again.catalogue).upload(contents[1])
    for parts in (one, again):
        for key in keys:
            await Downloader(parts.remote, parts.catalogue).open(key)


# ---------------------------------------------------------------------------------------------------------------------- room


async def test_what_retention_removes_leaves_the_store_with_the_next_collection(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    one = await homes.service.checkpoint(CTX, "demo", name="one")
    head = await homes.slept()
    assert await homes.uploaded() == {one.id, head}
    await homes.service.remove_snapshot(CTX, "demo", "one")
    await homes.service.upkeep.room.collect()
    assert set(homes.bucket.content) == {head}
    await homes.service.delete(CTX, "demo")
    await homes.service.upkeep.room.collect()
    assert homes.bucket.content == {}
    homes.bucket.owner = "somebody else"
    with pytest.raises(Conflict, match="another installation"):
        await homes.service.upkeep.room.collect()


async def test_local_copies_go_only_while_nobody_needs_them_and_come_back_with_a_wake() -> None:
    async with control_plane() as plane:
        plane.settings = plane.settings.model_copy(update={"store_local_copies": "drop"})
        bucket = FakeBucket()
        homes = Homes(plane, bucket, attach(plane, bucket))
        await plane.restart()
        await plane.create(**NEVER)
        await plane.write("demo", "/a", b"one")
        await homes.service.checkpoint(CTX, "demo", name="one")
        await homes.uploaded()
        await homes.service.upkeep.clean()
        assert len(plane.node.stored) == 1, "it is awake"
        head = await homes.slept()
        await homes.service.upkeep.clean()
        assert head in plane.node.stored, "the store does not have it yet"
        await homes.uploaded()
        bucket.owner = "somebody else"
        with pytest.raises(Conflict, match="another installation"):
            await homes.service.upkeep.clean()
        assert head in plane.node.stored, "the store was taken over, so what this node has may be the only copy"
        bucket.owner = "here"
        await homes.service.upkeep.clean()
        await homes.service.upkeep.reconcile()
        assert plane.node.stored == {}
        assert await plane.state("demo") is WorkspaceState.HIBERNATED
        found = [event async for event in homes.service.verify(CTX, "demo") if isinstance(event, Verified)]
        assert [(one.intact, one.read_from) for one in found] == [(True, "store")] * 2, "what the store has is whole"
        bucket.damage[head] = (Damage(f"store/ten_default/{head}/memory", "Chunk 1 of it cannot be read."),)
        found = [event async for event in homes.service.verify(CTX, "demo", snapshot=head) if isinstance(event, Verified)]
        assert [one.intact for one in found] == [False]
        workspace, report = await homes.service.wake(CTX, "demo")
        assert (report.restored_from, report.fetched_bytes, report.memory) == ("store", 100, MemoryFate.KEPT)
        assert await plane.read("demo", "/a") == b"one"
        assert workspace.state_detail == ""
        await homes.service.rewind(CTX, "demo", "one")


# ------------------------------------------------------------------------------------------------------------------- fetching


async def test_a_wake_that_fetches_shows_how_far_it_is(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    head = await homes.slept()
    await homes.uploaded()
    del homes.node.stored[head]
    homes.home.gate = asyncio.Event()
    homes.home.begun.clear()
    waking = asyncio.create_task(homes.service.wake(CTX, "demo"))
    await homes.home.begun.wait()
    shown = await homes.service.get(CTX, "demo")
    assert (shown.state, shown.fetching) == (WorkspaceState.WAKING, Fetching(50, 100))
    assert [one.fetching for one in await homes.service.find(CTX)] == [Fetching(50, 100)]
    homes.home.gate.set()
    await waking
    assert (await homes.service.get(CTX, "demo")).fetching is None


async def test_a_wake_fetches_what_its_node_has_lost_or_damaged(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    head = await homes.slept()
    await homes.uploaded()
    del homes.node.stored[head]
    await homes.service.upkeep.reconcile()
    assert await homes.plane.state("demo") is WorkspaceState.HIBERNATED, "the store has it"
    _, report = await homes.service.wake(CTX, "demo")
    assert report.restored_from == "store"
    assert (await homes.service.report(CTX, "demo")) == report
    head = await homes.slept()
    await homes.uploaded()
    homes.node.damage[head] = (LOST,)
    _, report = await homes.service.wake(CTX, "demo")
    assert (report.restored_from, report.snapshot_id) == ("store", head)
    head = await homes.slept()
    _, report = await homes.service.wake(CTX, "demo")
    assert report.restored_from == "node"


async def test_a_damaged_image_costs_no_snapshot(homes: Homes) -> None:
    """It is no part of the snapshot, which another copy of that cannot mend."""
    await homes.plane.create(**NEVER)
    head = await homes.slept()
    await homes.uploaded()
    stored = homes.node.stored[head]
    file = "images/blobs/base/root.raw"
    homes.node.fail("start", CorruptSnapshot(f"The file {file} is damaged: its checksum does not hold.", file=file))
    with pytest.raises(CorruptSnapshot, match=file):
        await homes.service.wake(CTX, "demo")
    assert homes.node.stored[head] is stored, "it was not fetched over"
    _, report = await homes.service.recover(CTX, "demo", Recovery.RETRY)
    assert (report.restored_from, report.memory) == ("node", MemoryFate.KEPT)


async def test_what_neither_home_has_is_told_with_the_ways_out(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    await homes.service.checkpoint(CTX, "demo", name="one")
    await homes.uploaded()
    head = await homes.slept()
    homes.node.damage[head] = (LOST,)
    with pytest.raises(CorruptSnapshot, match="The object store does not have snapshot snp_") as caught:
        await homes.service.wake(CTX, "demo")
    assert caught.value.details["ancestor"] and caught.value.details["file"] == LOST.file
    assert await homes.plane.state("demo") is WorkspaceState.FAILED
    _, report = await homes.service.recover(CTX, "demo", Recovery.REWIND)
    assert report.disk is DiskFate.REWOUND


async def test_a_store_that_does_not_answer_leaves_the_workspace_asleep(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    head = await homes.slept()
    await homes.uploaded()
    del homes.node.stored[head]
    homes.home.fail("fetch", Unavailable("The object store did not give it."))
    with pytest.raises(Unavailable, match="did not give it"):
        await homes.service.wake(CTX, "demo")
    assert await homes.plane.state("demo") is WorkspaceState.HIBERNATED
    _, report = await homes.service.wake(CTX, "demo")
    assert report.restored_from == "store"


# --------------------------------------------------------------------------------------------------------------------- moving


async def test_a_sleeper_moves_to_who_is_asked_when_its_node_is_gone(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    await homes.plane.write("demo", "/a", b"one")
    one = await homes.service.checkpoint(CTX, "demo", name="one")
    head = await homes.slept()
    await homes.uploaded()
    other = await homes.elsewhere()
    with pytest.raises(Unavailable, match="holds a lease"):
        await other.service.wake(CTX, "demo")
    await homes.goes_away()
    _, report = await other.service.wake(CTX, "demo")
    assert (report.restored_from, report.snapshot_id, report.memory) == ("store", head, MemoryFate.KEPT)
    assert await other.plane.read("demo", "/a") == b"one"
    assert [one.id for one in await other.service.snapshots(CTX, "demo")] == [one.id, head]
    assert "moved" in [entry.kind for entry in await other.service.log(CTX, "demo")]
    await other.service.upkeep.reconcile()
    assert head in other.node.stored
    other.service.upkeep.stop()
    # The first comes back: it does not touch what is the other's now.
    await homes.plane.restart()
    await NodeRegistry(homes.plane.database, lease_s=20).register(other.node.node_id)
    with pytest.raises(Unavailable, match="holds a lease"):
        await homes.service.wake(CTX, "demo")
    assert {one.id, head} <= set(homes.node.stored), "its copies are known by the rows of the other"


async def test_what_the_store_does_not_have_is_not_moved(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    await homes.slept()
    await homes.plane.create("fresh", **NEVER)
    other = await homes.elsewhere()
    await homes.goes_away()
    with pytest.raises(Unavailable, match="the object store does not have its last snapshot"):
        await other.service.wake(CTX, "demo")
    with pytest.raises(Unavailable, match="it has no snapshot yet"):
        await other.service.wake(CTX, "fresh")
    assert await other.plane.state("demo") is WorkspaceState.HIBERNATED
    other.service.upkeep.stop()
    await homes.plane.restart()
    assert (await homes.service.wake(CTX, "demo"))[1].restored_from == "node"


async def test_one_that_ran_goes_on_from_its_last_snapshot_and_what_its_node_had_is_kept(homes: Homes) -> None:
    await homes.plane.create(**NEVER)
    await homes.plane.write("demo", "/a", b"one")
    one = await homes.service.checkpoint(CTX, "demo", name="one")
    await homes.uploaded()
    await homes.plane.write("demo", "/a", b"two")
    other = await homes.elsewhere()
    await homes.goes_away()
    _, report = await other.service.wake(CTX, "demo")
    assert (report.snapshot_id, report.disk) == (one.id, DiskFate.REWOUND)
    assert "is gone" in report.memory_reason
    assert await other.plane.read("demo", "/a") == b"one"
    other.service.upkeep.stop()
    await homes.plane.restart()
    (lost,) = [found for found in await homes.service.find(CTX) if found.kind is WorkspaceKind.LOST]
    assert lost.parent_id == (await homes.service.get(CTX, "demo")).id
    assert await homes.plane.read(lost.name, "/a") == b"two", "the disk that only the first node had"
    assert not homes.node.machines.keys() - {lost.id}
    assert _state(await homes.service.get(CTX, "demo")) == "running", "the other's is not touched"


def _state(workspace: Workspace) -> str:
    return workspace.state.value
