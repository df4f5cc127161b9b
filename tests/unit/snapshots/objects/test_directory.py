"""A store in a local directory: what is acknowledged is durable, whatever fails or dies, and only then."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from pathlib import Path

import pytest

from perdure.core.errors import NotFound, Unavailable
from perdure.snapshots.objects.client import DirectoryObjects, open_objects
from perdure.snapshots.objects.remote import Remote
from perdure.snapshots.objects.upload import put
from perdure.wire.objects import ItemKey, ItemState
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.disk import Crash, RecordingDisk
from tests.fakes.objects import Killed, UnsyncedObjects
from tests.unit.snapshots.objects.stores import TENANT, Home

NAME = f"{TENANT}/packs/one"
DATA = os.urandom(50_000)
SEEDS = {number: number for number in range(20)}


class FailingDisk(RecordingDisk):
    """The n-th sync from now on, of a file or a directory, fails with EIO; so does every later one if ``stays``."""

    left = 0
    stays = False

    def step(self, operation: str) -> None:
        if operation.startswith("sync") and self.left > 0:
            self.left -= 1 if self.left > 1 or not self.stays else 0
            if self.left == 0 or (self.left == 1 and self.stays):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().step(operation)


class Dying(UnsyncedObjects):
    """An earlier process: killed when its first object had its name."""

    async def put(self, name: str, data: bytes) -> None:
        await super().put(name, data)
        raise Killed


@pytest.fixture
def disk(tmp_path: Path) -> FailingDisk:
    (tmp_path / "disk").mkdir()
    return FailingDisk(tmp_path / "disk")


def store(disk: RecordingDisk) -> DirectoryObjects:
    return DirectoryObjects(disk.root / "store", f"file://{disk.root}/store", disk)


def after_power_cut(disk: RecordingDisk, target: Path) -> DirectoryObjects:
    """All that was not synced is gone."""
    target.mkdir()
    disk.materialise(len(disk.operations), Crash.DROPPED, target)
    return DirectoryObjects(target / "store", f"file://{target}/store")


def real_files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


async def test_an_object_is_durable_when_put_returns_and_whole_or_absent_before(disk: FailingDisk, tmp_path: Path) -> None:
    await store(disk).put(NAME, DATA)
    assert await after_power_cut(disk, tmp_path / "end").get(NAME) == DATA
    for after, crash in itertools.product(range(len(disk.operations)), Crash):
        target = tmp_path / f"{after}-{crash}"
        target.mkdir()
        disk.materialise(after, crash, target)
        if (target / "store").is_dir():
            found = DirectoryObjects(target / "store", "file:///")
            assert [one async for one in found.list("")] in ([], [(NAME, len(DATA))]), disk.operations[:after]
            assert await found.size(NAME) is None or await found.get(NAME) == DATA, disk.operations[:after]


@pytest.mark.parametrize("stays", [False, True])
async def test_a_sync_that_fails_stores_nothing(disk: FailingDisk, stays: bool) -> None:
    """What has the right size and may not be on the platter must not be taken for stored."""
    objects, home = store(disk), Home()
    before = len(disk.operations)
    await objects.put(f"{TENANT}/packs/other", DATA)
    syncs = sum(operation.startswith("sync") for operation in disk.operations[before:])
    disk.stays = stays
    for failing in range(1, syncs - 1):  # one less: the directories are there now
        disk.left = failing
        with pytest.raises(Unavailable) as caught:
            await put(Remote(objects, home.keyring, home.clock), NAME, DATA)
        assert not caught.value.ambiguous
        assert await objects.size(NAME) is None
        assert real_files(disk.root) == [f"store/{TENANT}/packs/other"]
    disk.left = 0
    await put(Remote(objects, home.keyring, home.clock), NAME, DATA)


@pytest.mark.parametrize("failing", range(1, 30))
async def test_an_upload_is_durable_only_if_it_survives_a_power_cut(disk: FailingDisk, tmp_path: Path, failing: int) -> None:
    catalogue, objects = FakeCatalogue(), store(disk)
    disk.left = failing
    for attempt in range(3):
        home = Home(objects, catalogue, clock=itertools.count(1000 * attempt + 1).__next__)
        try:
            await home.upload("snp_1", SEEDS)
            break
        except Unavailable:
            assert (await catalogue.item(ItemKey(TENANT, "snp_1"))).state is ItemState.UPLOADING
    assert await Home(after_power_cut(disk, tmp_path / "after"), catalogue).has("snp_1", SEEDS)


async def test_what_a_killed_process_has_put_is_made_durable_before_it_is_believed(disk: FailingDisk, tmp_path: Path) -> None:
    catalogue, objects = FakeCatalogue(), store(disk)
    with pytest.raises(Killed):
        await Home(Dying(disk.root / "store", objects.url, disk), catalogue).upload("snp_1", SEEDS)
    (arrived,) = await catalogue.holds(ItemKey(TENANT, "snp_1"))
    await Home(objects, catalogue, clock=itertools.count(5000).__next__).upload("snp_1", SEEDS)
    after = after_power_cut(disk, tmp_path / "after")
    assert await after.size(f"{TENANT}/packs/{arrived.pack_id}") == arrived.size, "it was believed, not sent again"
    assert await Home(after, catalogue).has("snp_1", SEEDS)


async def test_what_cannot_be_settled_is_sent_again(disk: FailingDisk, tmp_path: Path) -> None:
    catalogue, objects = FakeCatalogue(), store(disk)
    with pytest.raises(Killed):
        await Home(Dying(disk.root / "store", objects.url, disk), catalogue).upload("snp_1", SEEDS)
    disk.left = 1
    await Home(objects, catalogue, clock=itertools.count(5000).__next__).upload("snp_1", SEEDS)
    assert await Home(after_power_cut(disk, tmp_path / "after"), catalogue).has("snp_1", SEEDS)
    with pytest.raises(NotFound):
        await objects.settle(f"{TENANT}/packs/none")


# --------------------------------------------------------------------------------------------------------------- whose it is


@pytest.mark.parametrize("was_there", [False, True])
async def test_nobody_else_can_read_what_is_made(tmp_path: Path, was_there: bool) -> None:
    """Guests' memory lies in a store."""
    directory = tmp_path / "above" / "store"
    if was_there:
        directory.mkdir(parents=True, mode=0o755)
    earlier = os.umask(0)
    try:
        await open_objects(directory.as_uri()).put(NAME, DATA)
    finally:
        os.umask(earlier)
    made = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    if was_there:
        assert made.pop(directory) == 0o755, "a directory of somebody's is left as it is"
        made.pop(directory.parent)
    assert made.pop(directory / NAME) == 0o600
    assert set(made.values()) == {0o700}


# --------------------------------------------------------------------------------------------------- what a killed PUT leaves

HOUR_S = 3600
LEFT = (
    f"{TENANT}/packs/pck_{'0' * 26}#1",
    f"{TENANT}/packs/.tmp-pck_{'0' * 26}-17-ab",
    f"{TENANT}/items/snp_1.1#12",
    "perdure.json#2",
)


def leave(directory: Path, *, age_s: float) -> None:
    for name in LEFT:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DATA)
        when = time.time() - age_s
        os.utime(path, (when, when))


async def test_what_a_killed_put_has_left_is_no_object_and_goes_with_a_collection(tmp_path: Path) -> None:
    objects = open_objects((tmp_path / "store").as_uri())
    home = Home(objects, clock=lambda: int(time.time() * 1000))
    await home.remote.claim("here")
    await home.upload("snp_1", SEEDS)
    before = real_files(tmp_path / "store")
    leave(tmp_path / "store", age_s=HOUR_S / 2)
    await home.collect(passes=3)
    assert set(real_files(tmp_path / "store")) == {*before, *LEFT}, "somebody may be writing it"
    assert sorted([name async for name, _ in objects.list("")]) == before
    leave(tmp_path / "store", age_s=HOUR_S * 2)
    await home.collect()
    assert real_files(tmp_path / "store") == before
    assert await home.has("snp_1", SEEDS)


async def test_a_put_that_is_swept_all_the_same_is_tried_again(tmp_path: Path, disk: FailingDisk) -> None:
    objects = store(disk)
    await objects.put(NAME, DATA)
    step = disk.step

    def swept(operation: str) -> None:
        step(operation)
        if operation.startswith("sync .tmp-"):
            assert objects._sweep(2**60) == 1

    disk.step = swept  # type: ignore[method-assign]
    with pytest.raises(Unavailable) as caught:
        await objects.put(NAME, b"other")
    assert not caught.value.ambiguous
    assert await objects.get(NAME) == DATA
