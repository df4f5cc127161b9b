"""Images between their two homes: from this node's directory into an object store, and back onto a node that has never seen them.

What a snapshot lies on is an image and one golden snapshot of it (``BaseRef``). In the store that pair is one item, shared by all
tenants: the image's files, the golden's, and image.json and golden.json, which say what every file must be. Two goldens of one
image are two items, whose common chunks are stored once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure.core import files
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import AlreadyExists, CorruptData, CorruptSnapshot, NotFound
from perdure.images.registry import IMAGE_FILES, ImageStore
from perdure.images.verify import ImageVerifier
from perdure.snapshots.manifest import BaseRef, check_base_names
from perdure.snapshots.objects.chunks import Source, file_source
from perdure.snapshots.objects.download import Downloader, StoredItem
from perdure.snapshots.objects.local import image_key
from perdure.snapshots.objects.upload import Contents, Moved, Uploader
from perdure.wire.node import Damage
from perdure.wire.objects import Item

#: The record of each directory comes last, as it does on the disk.
OF_IMAGE = (*IMAGE_FILES, "image.json")
OF_GOLDEN = ("ram.base", "devices.state", "disk.qcow2", "golden.json")
GOLDEN = "golden/"
FACT = "base"


@dataclass(frozen=True, slots=True)
class ImageMover:
    """Both homes. Several may fetch at once."""

    store: ImageStore
    uploader: Uploader
    downloader: Downloader
    _fetching: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def upload(self, base: BaseRef) -> tuple[Item, Moved]:
        """Make an image, and the golden that ``base`` names, durable in the store. Every byte is checked before it is sent.

        Raises NotFound, CorruptSnapshot naming the file, or what ``Uploader.upload`` raises. Repeat it after any failure.
        """
        sources = await asyncio.to_thread(self._sources, base)
        facts = {FACT: {"image": base.image, "golden": base.golden}}
        return await self.uploader.upload(Contents(image_key(base), sources, facts=facts))

    def _sources(self, base: BaseRef) -> list[Source]:
        image = self.store.load(base.image)  # NotFound before anything is read
        _check(self.store, base)
        sources = [file_source(name, image.directory / name) for name in OF_IMAGE]
        if base.golden is not None:
            directory = _golden_directory(self.store, base)
            sources += [file_source(GOLDEN + name, directory / name) for name in OF_GOLDEN]
        return sources

    async def adopt(self, item: StoredItem) -> BaseRef:
        """Bring an image and its golden onto this node; what is here is left as it is. A crash leaves nothing that counts.

        The image gets no name. Raises NotFound, CorruptSnapshot naming what is damaged, NoSpace, Shredded or Unavailable.
        """
        base = base_of(item)
        async with self._fetching:
            if not await asyncio.to_thread(self._has_image, base.image):
                await self._bring(item, "", OF_IMAGE, self.store.root / "blobs" / base.image)
            if base.golden is not None and not await asyncio.to_thread(self._has_golden, base):
                await self._bring(item, GOLDEN, OF_GOLDEN, _golden_directory(self.store, base))
        return base

    def _has_image(self, digest: str) -> bool:
        try:
            self.store.load(digest)
        except NotFound:
            return False
        return True

    def _has_golden(self, base: BaseRef) -> bool:
        return (_golden_directory(self.store, base) / "golden.json").is_file()

    def has(self, base: BaseRef) -> bool:
        """Whether a wake finds it here, as far as a look at sizes can tell. Reads descriptions: call it in a thread."""
        try:
            image = self.store.load(base.image)
            return base.golden is None or any(golden.ref == base.golden for golden in self.store.goldens(image))
        except (NotFound, CorruptData):
            return False

    async def _bring(self, item: StoredItem, prefix: str, names: Sequence[str], final: Path) -> None:
        """Fetch a directory's files, see that they are what its record says, and give it its place."""
        if not (final / names[-1]).is_file():
            await asyncio.to_thread(files.remove_tree, final)  # what a removal that was interrupted left
        with self.store.scratch("fetch", final.parent if prefix else None) as scratch:
            output = scratch / "files"
            output.mkdir()
            for name in names:
                await self.downloader.fetch_file(item, prefix + name, output / name)
                (output / name).chmod(0o444 if prefix or name in ("root.raw", "agent.raw") else 0o644)
            files.make_dir(final.parent)
            crashpoint(CrashPoint.FETCH_IMAGE_WRITTEN)
            with contextlib.suppress(AlreadyExists):  # somebody else has made it meanwhile
                await asyncio.to_thread(files.publish_dir, output, final)
        crashpoint(CrashPoint.FETCH_IMAGE_PUBLISHED)
        damage = await asyncio.to_thread(_damage, self.store, base_of(item), golden=bool(prefix))
        if damage:
            await asyncio.to_thread(files.remove_tree, final)
            raise CorruptSnapshot(f"What the store has as {item.manifest.key} is not what it says: {damage[0].problem}")


def base_of(item: StoredItem) -> BaseRef:
    """The image and golden that an item is. Raises CorruptSnapshot when it is none."""
    key = item.manifest.key
    try:
        told = item.manifest.facts[FACT]
        base = check_base_names(BaseRef(str(told["image"]), None if told["golden"] is None else str(told["golden"])))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptSnapshot(f"The stored item {key} does not say which image it is.") from error
    if image_key(base) != key:
        raise CorruptSnapshot(f"The stored item {key} says that it is {image_key(base)}.")
    return base


def _golden_directory(store: ImageStore, base: BaseRef) -> Path:
    assert base.golden is not None, "the caller has looked"
    name = base.golden.rpartition(".")[0]
    if not name or "/" in name or name.startswith("."):
        raise CorruptSnapshot(f"{base.golden!r} is not the name of a golden snapshot.")
    return store.golden_place(base.image, base.golden)


def _check(store: ImageStore, base: BaseRef) -> None:
    """Raises CorruptSnapshot naming the first file that is damaged."""
    damage = _damage(store, base, golden=False)
    if not damage and base.golden is not None:
        damage = _damage(store, base, golden=True)
    if damage:
        raise CorruptSnapshot(damage[0].problem, file=damage[0].file)


def _damage(store: ImageStore, base: BaseRef, *, golden: bool) -> tuple[Damage, ...]:
    verifier = ImageVerifier(store, lambda _name, _count: None)
    if golden and base.golden is not None:
        return verifier.golden(base.image, base.golden)
    return verifier.image(base.image)
