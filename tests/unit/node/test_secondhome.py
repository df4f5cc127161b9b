"""The node's half of the object store over real snapshots: what is fetched, what is fetched afresh, and who gives way to whom."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.core.errors import Conflict, CorruptSnapshot, NotFound, Unavailable
from perdure.core.ids import SnapshotId, TenantId
from perdure.node import secondhome
from perdure.node.secondhome import NodeSecondHome, ObjectParts, Starts
from perdure.snapshots.manifest import BaseRef
from perdure.snapshots.objects.client import Objects
from perdure.snapshots.objects.download import StoredItem
from perdure.snapshots.objects.keys import PlainKeyring
from perdure.snapshots.objects.local import image_key
from perdure.snapshots.objects.remote import Remote
from perdure.snapshots.objects.upload import Contents, Moved, Uploader
from perdure.wire.node import Fetching, Sent
from perdure.wire.objects import IMAGES, Catalogue, Item, ItemKey, ItemState, Scope
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.objects import FakeObjects, Fault
from tests.fakes.tiny_machine import TinyMachine
from tests.fakes.tiny_node import Node
from tests.unit.snapshots.objects.stores import source
from tests.unit.snapshots.objects.test_local import asleep, wakes_as

TENANT = TenantId("ten_a")
REF = BaseRef("image", "golden")
FILE = "images/blobs/image/root.raw"


class Images:
    """One image, which a node has or has not; in the store it is a small file."""

    def __init__(self, here: set[BaseRef], begun: Callable[[BaseRef], None], uploader: Uploader) -> None:
        self._here = here
        self._begun = begun
        self._uploader = uploader
        self.renewed: list[str] = []

    async def upload(self, base: BaseRef) -> tuple[Item, Moved]:
        self._begun(base)
        return await self._uploader.upload(Contents(image_key(base), [source("root", {1: 1})]))

    async def adopt(self, item: StoredItem) -> BaseRef:
        assert item.manifest.key == image_key(REF)
        item.heard(item.stored_bytes())
        self._here.add(REF)
        return REF

    def has(self, base: BaseRef) -> bool:
        return base in self._here

    def holds(self, base: BaseRef, file: str) -> bool:
        return base in self._here and file == FILE

    async def renew(self, item: StoredItem, file: str) -> None:
        assert (item.manifest.key, file) == (image_key(REF), FILE)
        self.renewed.append(file)


class Place:
    """A node, and its way to a store that others have too."""

    def __init__(self, directory: Path, objects: Objects, catalogue: Catalogue, owner: str = "here") -> None:
        directory.mkdir()
        self.node = Node(directory)
        self.node.store.open()
        self.images: set[BaseRef] = set()
        self.images_sent: list[BaseRef] = []
        self.image_begun = asyncio.Event()
        self.starts = Starts()
        clock = itertools.count(id(self)).__next__
        parts = ObjectParts(Remote(objects, PlainKeyring(), clock), catalogue, owner, 100_000)
        node = self.node

        def images(uploader: Uploader, _: object) -> Images:
            return Images(self.images, self._begun, uploader)

        self.told: list[str] = []

        async def renewed(digest: str) -> None:
            self.told.append(digest)

        self.home = NodeSecondHome(parts, node.store, images, lambda _: node.base.ram, self.starts, renewed)

    def _begun(self, ref: BaseRef) -> None:
        self.images_sent.append(ref)
        self.image_begun.set()

    async def slept(self) -> tuple[SnapshotId, TinyMachine]:
        facts, machine = await asleep(self.node)
        return facts.snapshot_id, machine

    async def upload(self, snapshot_id: SnapshotId) -> list[Sent]:
        told: list[Sent] = []
        sent = await self.home.upload(snapshot_id, {"known": 1}, told.append)
        assert told[-1] == sent
        return told

    async def is_whole(self, snapshot_id: SnapshotId, machine: TinyMachine) -> None:
        await wakes_as(self.node, self.node.store.manifest(snapshot_id).facts(), machine)


@pytest.fixture
def objects() -> FakeObjects:
    return FakeObjects()


@pytest.fixture
def catalogue() -> FakeCatalogue:
    return FakeCatalogue()


@pytest.fixture
def here(tmp_path: Path, objects: FakeObjects, catalogue: FakeCatalogue) -> Place:
    place = Place(tmp_path / "here", objects, catalogue)
    place.images.add(REF)
    return place


@pytest.fixture
def there(tmp_path: Path, objects: FakeObjects, catalogue: FakeCatalogue) -> Place:
    return Place(tmp_path / "there", objects, catalogue)


async def test_a_snapshot_and_its_image_go_and_come(here: Place, there: Place, catalogue: FakeCatalogue) -> None:
    snapshot_id, machine = await here.slept()
    told = await here.upload(snapshot_id)
    assert [one.read_bytes for one in told] == sorted(one.read_bytes for one in told), "it only grows"
    assert told[-1].read_bytes > told[0].read_bytes > 0, "the image counts too"
    item = await catalogue.item(ItemKey(Scope(TENANT), snapshot_id))
    assert item.needs == (image_key(REF),)
    assert not there.home.has(snapshot_id)
    fetched = await there.home.fetch(snapshot_id, TENANT)
    assert (fetched.is_fetched, fetched.with_image, fetched.snapshot_bytes > 0) == (True, True, True)
    assert there.home.has(snapshot_id)
    await there.is_whole(snapshot_id, machine)
    assert not (await there.home.fetch(snapshot_id, TENANT)).is_fetched
    with pytest.raises(NotFound):
        await there.home.fetch(SnapshotId("snp_none"), TENANT)
    with pytest.raises(NotFound):
        await there.upload(SnapshotId("snp_none"))


async def test_how_far_a_fetch_is(here: Place, there: Place, objects: FakeObjects) -> None:
    snapshot_id, _ = await here.slept()
    await here.upload(snapshot_id)
    seen: list[Fetching] = []

    def look(operation: str, _name: str) -> None:
        if operation == "read" and (coming := there.home.fetching(snapshot_id)) is not None:
            seen.append(coming)

    objects.faults = look
    assert there.home.fetching(snapshot_id) is None
    await there.home.fetch(snapshot_id, TENANT)
    assert there.home.fetching(snapshot_id) is None, "it is over"
    read = [one.read_bytes for one in seen]
    assert read == sorted(read) and 0 < read[0] < read[-1] < seen[-1].total_bytes, "the image has come first"
    assert len({one.total_bytes for one in seen}) == 1


async def test_a_fetch_that_fails_is_not_under_way_any_more(here: Place, there: Place, objects: FakeObjects) -> None:
    snapshot_id, _ = await here.slept()
    await here.upload(snapshot_id)
    objects.faults = lambda operation, _: Fault.SHORT if operation == "read" and there.home.fetching(snapshot_id) else None
    with pytest.raises(Unavailable):
        await there.home.fetch(snapshot_id, TENANT)
    assert there.home.fetching(snapshot_id) is None


async def test_an_image_that_is_there_is_not_looked_at_again(here: Place, catalogue: FakeCatalogue) -> None:
    one, _ = await here.slept()
    await here.upload(one)
    (before,) = await catalogue.items(IMAGES)
    run, machine = await here.node.wake(2, one)
    machine.write_memory(5, 5)
    run.end()
    await here.upload(one)
    assert await catalogue.items(IMAGES) == [before]


async def test_snapshots_that_go_at_once_send_their_image_once(here: Place, catalogue: FakeCatalogue) -> None:
    one, _ = await here.slept()
    two = (await asleep(here.node, 2, one))[0].snapshot_id
    await asyncio.gather(here.upload(one), here.upload(two))
    assert here.images_sent == [REF], "the second has waited for the first"
    for snapshot_id in (one, two):
        assert (await catalogue.item(ItemKey(Scope(TENANT), snapshot_id))).state is ItemState.DURABLE


async def test_who_waits_for_an_image_sends_it_when_the_first_has_failed(here: Place) -> None:
    one, _ = await here.slept()
    two = (await asleep(here.node, 2, one))[0].snapshot_id
    first, second = (asyncio.create_task(here.upload(snapshot_id)) for snapshot_id in (one, two))
    await here.image_begun.wait()
    first.cancel()
    await second
    assert here.images_sent == [REF, REF] and first.cancelled()


async def test_a_missing_image_alone_is_fetched(here: Place) -> None:
    snapshot_id, machine = await here.slept()
    await here.upload(snapshot_id)
    here.images.clear()
    assert not here.home.has(snapshot_id), "nobody has looked at its image yet"
    fetched = await here.home.fetch(snapshot_id, TENANT)
    assert fetched.with_image and here.home.has(snapshot_id)
    await here.is_whole(snapshot_id, machine)


@pytest.mark.parametrize("lost", ["everything", "the directory", "the manifest", "a layer", "the index", "a segment"])
async def test_what_is_damaged_here_is_fetched_afresh(here: Place, lost: str) -> None:
    snapshot_id, machine = await here.slept()
    await here.upload(snapshot_id)
    store = here.node.store
    directory = store.snapshots / snapshot_id
    match lost:
        case "everything":
            for path in (*store.disks.iterdir(), *store.segments.iterdir()):
                path.unlink()
            shutil.rmtree(directory)
        case "the directory":
            shutil.rmtree(directory)
        case "the manifest":
            (directory / "manifest.json").write_bytes(b"{")
            store.open()
            with pytest.raises(CorruptSnapshot):
                store.manifest(snapshot_id)
        case "a layer":
            next(store.disks.iterdir()).unlink()
        case "the index":
            (directory / "ram.index").write_bytes(b"no")
        case "a segment":
            next(store.segments.iterdir()).write_bytes(b"no")
    assert (await here.home.fetch(snapshot_id, TENANT, afresh=True)).is_fetched
    await here.is_whole(snapshot_id, machine)
    assert store.open().damaged == ()
    await here.is_whole(snapshot_id, machine)


@pytest.mark.parametrize("what", ["a flipped bit", "no answer"])
async def test_an_intact_snapshot_stays_when_the_stored_one_cannot_be_read(here: Place, objects: FakeObjects, what: str) -> None:
    """Whoever asks may be wrong about it: a start also fails for what lies below."""
    snapshot_id, machine = await here.slept()
    await here.upload(snapshot_id)
    (pack,) = [name for name in objects.data if name.startswith("ten_a/packs/")]
    whole = objects.data[pack]
    if what == "a flipped bit":
        objects.data[pack] = whole[:200] + bytes((whole[200] ^ 1,)) + whole[201:]
    else:
        objects.faults = lambda operation, _: Fault.SHORT if operation == "read" else None
    with pytest.raises((CorruptSnapshot, Unavailable)):
        await here.home.fetch(snapshot_id, TENANT, afresh=True)
    await here.is_whole(snapshot_id, machine)
    assert here.node.store.open().damaged == ()
    await here.is_whole(snapshot_id, machine)


async def test_a_damaged_manifest_stays_until_the_stored_one_is_here(here: Place, objects: FakeObjects) -> None:
    snapshot_id, machine = await here.slept()
    await here.upload(snapshot_id)
    store = here.node.store
    manifest = store.snapshots / snapshot_id / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_bytes(b"{" + good[1:-1])
    store.open()
    objects.faults = lambda operation, _: Fault.SHORT if operation == "read" else None
    before = sorted(path.name for path in manifest.parent.iterdir())
    with pytest.raises((CorruptSnapshot, Unavailable)):
        await here.home.fetch(snapshot_id, TENANT, afresh=True)
    assert sorted(path.name for path in manifest.parent.iterdir()) == before
    objects.faults = lambda *_: None
    await here.home.fetch(snapshot_id, TENANT)
    await here.is_whole(snapshot_id, machine)
    assert len(list(manifest.parent.iterdir())) == 3 and len(list(store.segments.iterdir())) == 1, "nothing old is left"


async def test_an_image_that_went_missing_unseen_is_fetched_without_its_snapshot(here: Place) -> None:
    snapshot_id, machine = await here.slept()
    await here.upload(snapshot_id)
    await here.home.fetch(snapshot_id, TENANT)
    assert here.home.has(snapshot_id)
    inode = next(here.node.store.segments.iterdir()).stat().st_ino
    here.images.clear()
    assert (await here.home.fetch(snapshot_id, TENANT)).with_image
    assert next(here.node.store.segments.iterdir()).stat().st_ino == inode
    await here.is_whole(snapshot_id, machine)


async def test_a_damaged_file_of_the_image_is_fetched_alone(here: Place, there: Place) -> None:
    snapshot_id, _ = await here.slept()
    with pytest.raises(NotFound):  # the store has nothing yet
        await here.home.mend_image(snapshot_id, TENANT, FILE)
    await here.upload(snapshot_id)
    assert (await here.home.mend_image(snapshot_id, TENANT, FILE)).is_fetched
    assert here.told == [REF.image], "what is made of it looks again"
    assert not (await here.home.mend_image(snapshot_id, TENANT, "images/blobs/other/root.raw")).is_fetched
    assert not (await there.home.mend_image(snapshot_id, TENANT, FILE)).is_fetched, "there is no such image"
    with pytest.raises(NotFound):
        await there.home.mend_image(SnapshotId("snp_none"), TENANT, FILE)
    assert here.told == [REF.image]


async def test_siblings_that_find_the_same_damage_fetch_it_once(here: Place, objects: FakeObjects) -> None:
    snapshot_id, machine = await here.slept()
    await here.upload(snapshot_id)
    next(here.node.store.segments.iterdir()).unlink()
    reads: list[str] = []
    objects.faults = lambda operation, name: reads.append(name) if operation == "get" else None
    both = await asyncio.gather(*(here.home.fetch(snapshot_id, TENANT, afresh=True) for _ in range(2)))
    assert both[0] == both[1] and both[0].is_fetched
    assert len(reads) == 1, "one manifest was read, for both"
    await here.is_whole(snapshot_id, machine)
    impatient = asyncio.create_task(here.home.fetch(snapshot_id, TENANT, afresh=True))
    await asyncio.sleep(0)
    impatient.cancel()
    await here.home.fetch(snapshot_id, TENANT, afresh=True)  # what it began went on
    await here.is_whole(snapshot_id, machine)
    await here.home.close()


async def test_what_the_store_has_is_read_to_its_last_byte(here: Place, objects: FakeObjects) -> None:
    snapshot_id, _ = await here.slept()
    await here.upload(snapshot_id)
    assert await here.home.verify(snapshot_id, TENANT) == ()
    (pack,) = [name for name in objects.data if name.startswith("ten_a/packs/")]
    data = bytearray(objects.data[pack])
    data[200] ^= 1
    objects.data[pack] = bytes(data)
    (damage, *_) = await here.home.verify(snapshot_id, TENANT)
    assert damage.file.startswith(f"store/ten_a/{snapshot_id}/") and "cannot be read" in damage.problem
    for name in [name for name in objects.data if "/items/" in name]:
        del objects.data[name]
    (damage,) = await here.home.verify(snapshot_id, TENANT)
    assert "manifest" in damage.problem


async def test_an_upload_stands_still_while_something_starts(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_id, _ = await here.slept()
    told: list[Sent] = []
    begun = asyncio.Event()

    def tell(sent: Sent) -> None:
        told.append(sent)
        begun.set()

    with here.starts.one(None):
        upload = asyncio.create_task(here.home.upload(snapshot_id, {}, tell))
        await begun.wait()
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(told) == 1 and not upload.done()
    await upload
    assert len(told) > 1
    monkeypatch.setattr(secondhome, "STANDSTILL_S", 0.0)
    with here.starts.one(None):
        await here.starts.over()  # a row of starts does not keep it from ever ending


async def test_a_snapshot_that_a_start_reads_is_not_evicted(here: Place) -> None:
    snapshot_id, machine = await here.slept()
    await here.upload(snapshot_id)
    with here.starts.one(snapshot_id):
        assert await here.home.evict(snapshot_id) == 0
    await here.is_whole(snapshot_id, machine)
    assert await here.home.evict(snapshot_id) > 0
    assert not here.home.has(snapshot_id)
    evicting = asyncio.create_task(here.home.evict(snapshot_id))
    assert (await here.home.fetch(snapshot_id, TENANT)).is_fetched
    await evicting
    await here.home.fetch(snapshot_id, TENANT)
    await here.is_whole(snapshot_id, machine)


async def test_nothing_goes_into_the_store_of_another(here: Place, tmp_path: Path, objects: FakeObjects) -> None:
    await here.home.claim()
    stranger = Place(tmp_path / "stranger", objects, FakeCatalogue(), owner="another")
    stranger.images.add(REF)
    snapshot_id, _ = await stranger.slept()
    before = set(objects.data)
    for work in (stranger.home.claim(), stranger.upload(snapshot_id), stranger.home.collect(TENANT)):
        with pytest.raises(Conflict, match="another installation"):
            await work
    assert set(objects.data) == before


async def test_that_the_store_was_taken_over_is_noticed_at_the_next_step(here: Place, objects: FakeObjects) -> None:
    """By a recovery elsewhere, while this server lives: what it sends would be strays there, and nothing is durable any more."""
    snapshot_id, machine = await here.slept()
    await here.upload(snapshot_id)
    newer = (await asleep(here.node, 2, snapshot_id))[0].snapshot_id
    mark = objects.data["perdure.json"]
    await Remote(objects, PlainKeyring(), lambda: 1).claim("another", take=True)
    before = dict(objects.data)
    for work in (here.home.claim(), here.upload(newer), here.home.collect(TENANT), here.upload(newer)):
        with pytest.raises(Conflict, match="another installation"):
            await work
    assert objects.data == before
    await here.is_whole(snapshot_id, machine)
    objects.data["perdure.json"] = mark
    await here.upload(newer)


async def test_an_empty_store_that_should_hold_something_is_not_taken_for_ours(
    here: Place, tmp_path: Path, objects: FakeObjects, catalogue: FakeCatalogue
) -> None:
    """Its URL was mistyped, or somebody has emptied it: what the rows call durable is not there."""
    snapshot_id, _ = await here.slept()
    await here.upload(snapshot_id)
    kept = dict(objects.data)
    objects.data.clear()
    started = Place(tmp_path / "started", objects, catalogue)
    for work in (started.home.claim(), started.home.upload(snapshot_id, {}, lambda _: None)):
        with pytest.raises(Conflict, match="is empty, and this installation has uploaded") as caught:
            await work
        assert "Check PERDURE_STORE_URL" in caught.value.hint
    assert not objects.data, "nothing was written into it"
    objects.data.update(kept)
    del objects.data["perdure.json"]
    await started.home.claim()  # it is our store: only the mark was lost
    assert "perdure.json" in objects.data


async def test_a_store_of_others_that_has_lost_its_mark_is_not_taken(here: Place, tmp_path: Path, objects: FakeObjects) -> None:
    await here.upload((await here.slept())[0])
    del objects.data["perdure.json"]
    before = dict(objects.data)
    stranger = Place(tmp_path / "stranger", objects, FakeCatalogue(), owner="another")
    stranger.images.add(REF)
    snapshot_id, _ = await stranger.slept()
    for work in (stranger.home.claim(), stranger.upload(snapshot_id), stranger.home.collect(TENANT)):
        with pytest.raises(Conflict, match="is not empty"):
            await work
    assert objects.data == before


async def test_what_is_released_goes(here: Place, objects: FakeObjects, catalogue: FakeCatalogue) -> None:
    snapshot_id, _ = await here.slept()
    await here.upload(snapshot_id)
    await catalogue.release(ItemKey(Scope(TENANT), snapshot_id))
    await catalogue.release(image_key(REF))
    reclaimed = [await here.home.collect(scope) for _ in range(3) for scope in (TENANT, IMAGES)]
    assert sum(one.packs_deleted for one in reclaimed) >= 2
    assert set(objects.data) == {"perdure.json"}
