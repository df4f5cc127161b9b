"""An image in both of its homes: what is damaged here and whole in the store is put back, file by file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from perdure.core.errors import CorruptSnapshot, NotFound
from perdure.images.moving import GOLDEN, OF_GOLDEN, OF_IMAGE, ImageMover
from perdure.images.registry import ImageStore, file_name
from perdure.images.verify import ImageVerifier
from perdure.snapshots.manifest import BaseRef
from perdure.snapshots.objects.download import StoredItem
from perdure.snapshots.objects.local import image_key
from tests.fakes.node_images import digest_of, put_golden, put_image
from tests.fakes.objects import FakeObjects
from tests.unit.snapshots.objects.stores import Home, marked

DIGEST = digest_of("image")
FILES = [*OF_IMAGE, *(GOLDEN + name for name in OF_GOLDEN)]


class Both:
    def __init__(self, root: Path, objects: FakeObjects) -> None:
        self.store = ImageStore(root / "images")
        self.home = Home(objects)
        self.mover = ImageMover(self.store, self.home.uploader, self.home.downloader)
        self.image = put_image(self.store, DIGEST)
        self.golden = put_golden(self.store, self.image)
        self.ref = BaseRef(DIGEST, self.golden.ref)

    def path(self, name: str) -> Path:
        return self.golden.directory / name.removeprefix(GOLDEN) if name.startswith(GOLDEN) else self.image.directory / name

    async def item(self) -> StoredItem:
        return await self.home.downloader.open(image_key(self.ref))

    def is_whole(self) -> bool:
        verifier = ImageVerifier(self.store, lambda _name, _count: None)
        return not (verifier.image(DIGEST) or verifier.golden(DIGEST, self.ref.golden or ""))


@pytest.fixture
def objects() -> FakeObjects:
    return marked()


@pytest.fixture
async def both(tmp_path: Path, objects: FakeObjects) -> Both:
    both = Both(tmp_path, objects)
    await both.mover.upload(both.ref)
    assert both.is_whole()
    return both


def harm(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
        return
    path.chmod(0o644)
    path.write_bytes(content[:-3] if how == "short" else bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.parametrize("how", ["flipped", "short", "missing"])
@pytest.mark.parametrize("name", FILES)
async def test_each_file_is_put_back(both: Both, name: str, how: str) -> None:
    path = both.path(name)
    good, file = path.read_bytes(), file_name(path)
    with path.open("rb") as held:  # as a machine has it
        harm(path, how)
        harmed = os.fstat(held.fileno()).st_ino
        assert not both.is_whole()
        assert both.mover.holds(both.ref, file)
        await both.mover.renew(await both.item(), file)
        assert path.read_bytes() == good
        assert path.stat().st_ino != harmed, "nobody who has it open sees another content"
    assert both.is_whole()
    assert list((both.store.root / "tmp").iterdir()) == []


async def test_what_is_whole_is_left_alone(both: Both) -> None:
    before = both.image.root.path.stat().st_ino
    await both.mover.renew(await both.item(), file_name(both.image.root.path))
    assert both.image.root.path.stat().st_ino == before


async def test_two_who_meet_the_same_damage_mend_it_once(both: Both) -> None:
    path = both.golden.ram
    harm(path, "flipped")
    item = await both.item()
    first = asyncio.create_task(both.mover.renew(item, file_name(path)))
    await asyncio.gather(first, both.mover.renew(item, file_name(path)))
    assert both.is_whole()


async def test_a_copy_that_is_damaged_too_changes_nothing(both: Both, objects: FakeObjects) -> None:
    item, path = await both.item(), both.golden.ram
    harm(path, "flipped")
    bad = path.read_bytes()
    for name in [name for name in objects.data if "/packs/" in name]:
        content = objects.data[name]
        middle = len(content) // 2
        objects.data[name] = bytes(byte ^ 255 if at > 40 else byte for at, byte in enumerate(content[:middle])) + content[middle:]
    both.home.remote.forget([])
    with pytest.raises(CorruptSnapshot):
        await both.mover.renew(item, file_name(path))
    assert path.read_bytes() == bad
    assert list((both.store.root / "tmp").iterdir()) == []


async def test_what_is_no_part_of_it_is_refused(both: Both) -> None:
    for file in ("images/blobs/other/root.raw", f"images/blobs/{DIGEST}/other", "segments/seg_1.pages", ""):
        assert not both.mover.holds(both.ref, file)
        with pytest.raises(NotFound):
            await both.mover.renew(await both.item(), file)
    for path in both.golden.directory.iterdir():
        path.unlink()
    both.golden.directory.rmdir()
    assert not both.mover.holds(both.ref, file_name(both.golden.ram)), "all of it is missing: it comes as a whole"
