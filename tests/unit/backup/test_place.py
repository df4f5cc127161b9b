"""A place of backups in a directory: a backup relies on nothing of an earlier one that a power cut could still take."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from perdure.backup.ledger import PlaceLedger
from perdure.backup.place import MARK, Place, open_place
from perdure.snapshots.objects.chunks import bytes_source
from perdure.snapshots.objects.client import DirectoryObjects
from perdure.snapshots.objects.keys import PlainKeyring
from perdure.snapshots.objects.remote import Remote
from perdure.snapshots.objects.upload import Contents, Uploader
from perdure.wire.objects import ItemKey, ItemState, Scope
from tests.fakes.disk import Crash, RecordingDisk
from tests.fakes.objects import UnsyncedObjects

KEY = ItemKey(Scope("ten_a"), "snp_1")
DATA = os.urandom(300_000)


@pytest.mark.parametrize("had_manifest", [False, True])
async def test_what_a_killed_backup_has_put_is_made_durable_before_it_is_relied_on(tmp_path: Path, had_manifest: bool) -> None:
    (tmp_path / "disk").mkdir()
    disk, clock = RecordingDisk(tmp_path / "disk"), itertools.count(1).__next__
    url = (disk.root / "place").as_uri()

    async def back_up(objects: DirectoryObjects) -> int:
        place = Place(objects, url, clock)
        await place.prepare()
        tools = place.tools(PlainKeyring())
        _, moved = await Uploader(tools.remote, tools.ledger).upload(Contents(KEY, [bytes_source("disk", DATA)]))
        return moved.packs

    assert await back_up(UnsyncedObjects(disk.root / "place", url, disk)) == 1
    if not had_manifest:
        for path in (disk.root / "place").glob("ten_a/items/*"):
            disk.unlink(path)
    assert await back_up(DirectoryObjects(disk.root / "place", url, disk)) == 0, "nothing is sent twice"
    (tmp_path / "after").mkdir()
    disk.materialise(len(disk.operations), Crash.DROPPED, tmp_path / "after")
    after = DirectoryObjects(tmp_path / "after" / "place", url)
    remote = Remote(after, PlainKeyring(), clock)
    assert (await PlaceLedger(remote, clock).item(KEY)).state is ItemState.DURABLE
    await Place(after, url, clock).prepare()  # it is still known for a place of backups


async def test_what_a_killed_backup_was_writing_goes_with_the_next_one(tmp_path: Path) -> None:
    place = open_place(str(tmp_path / "place"), lambda: int(time.time() * 1000), make=True)
    await place.prepare()
    left = [tmp_path / "place" / name for name in ("backups/bak_1.json#1", "ten_a/packs/.tmp-pck_1-1-ab")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DATA)
    await place.prepare()
    assert all(path.exists() for path in left), "another backup may be writing it"
    for path in left:
        os.utime(path, (1, 1))
    await place.prepare()
    assert [path.name for path in (tmp_path / "place").rglob("*") if path.is_file()] == [MARK]
