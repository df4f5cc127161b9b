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
from perdure.images.registry import IMAGE_FILES, ImageStore, described_files, file_name
from perdure.images.verify import ImageVerifier, problem_of
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

    def holds(self, base: BaseRef, file: str) -> bool:
        """Whether that is the name, in errors, of a file of an image or golden which is here. Call it in a thread."""
        return self._place(base, file) is not None

    def _place(self, base: BaseRef, file: str) -> tuple[Path, str, Path] | None:
        """Where the file is, what its name in the store begins with, and the record that says what it must be."""
        parts: list[tuple[Path, str, tuple[str, ...]]] = [(self.store.root / "blobs" / base.image, "", OF_IMAGE)]
        if base.golden is not None:
            parts.append((_golden_directory(self.store, base), GOLDEN, OF_GOLDEN))
        for directory, prefix, names in parts:
            for name in names:
                if file_name(directory / name) == file and directory.is_dir():
                    return directory / name, prefix, directory / names[-1]
        return None

    async def renew(self, item: StoredItem, file: str) -> None:
        """Put the store's copy of a damaged file in its place, by one rename: who has the old one open keeps it.

        Raises CorruptSnapshot when the copy is damaged too, NoSpace, Unavailable; then the file is as it was.
        """
        async with self._fetching:
            place = await asyncio.to_thread(self._place, base_of(item), file)
            if place is None:
                raise NotFound(f"The file {file} is no part of {item.manifest.key}.")
            path, prefix, record = place
            if not await asyncio.to_thread(_problem, path, record, path.name):
                return  # somebody else who met the damage has mended it
            with self.store.scratch("mend") as scratch:
                new = scratch / path.name
                await self.downloader.fetch_file(item, prefix + path.name, new)
                new.chmod(0o444 if prefix or path.name in ("root.raw", "agent.raw") else 0o644)
                problem = await asyncio.to_thread(_problem, new, new if path == record else record, path.name)
                if problem:
                    raise CorruptSnapshot(f"What the store has as {item.manifest.key} is not what it says: {problem}", file=file)
                await asyncio.to_thread(files.rename, new, path)

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


def _problem(path: Path, record: Path, name: str) -> str:
    """What is wrong with a file by the record of its directory, or with that record itself."""
    try:
        described = described_files(record)
        return "" if path == record else problem_of(path, described["files"][name], lambda _count: None)
    except CorruptData as error:
        return error.message
    except (FileNotFoundError, KeyError):
        return f"The record {record.name} is missing, or does not know {name}."


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
