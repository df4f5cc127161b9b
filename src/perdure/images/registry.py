"""The images on this node: found by name or digest, listed, removed; and what an interrupted build left is swept away.

Layout: see ``model``; besides it ``agents/`` (agent disk releases), ``cache/`` (fetched packages), ``tmp/`` (builds in progress,
each locked by its process) and ``locks/``. Files are shared between images by hard links and removed only by unlink: a machine
that has one open keeps it.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from perdure.core import files
from perdure.core.errors import CorruptData, NotFound
from perdure.images.model import BESIDE, Golden, Image
from perdure.images.recipe import shipped_recipes
from perdure.wire.node import MachineSize

FORMAT = 2
_WITHOUT_CHECKSUM = 1  # the format of earlier releases
_PREFIX = re.compile(r"^[0-9a-f]{6,64}$")
#: What an image's directory must hold besides image.json; checked by size at every look, by checksum in ``verify``.
IMAGE_FILES = ("kernel", "initrd", "root.raw", "agent.raw")
#: Says of the files of an agent release what image.json says of those of an image. One of an earlier version has none.
CHECKSUMS = "checksums.json"


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Bytes on this node's disk. Shared ones are counted by each image that holds them."""

    root: int
    agent: int
    goldens: int

    @property
    def total(self) -> int:
        return self.root + self.agent + self.goldens


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What was an image a moment ago. ``lock`` keeps sweeps away from its directory."""

    image: Image
    names: tuple[str, ...]
    directory: Path
    lock: int


class ImageStore:
    """All images below one directory. Several processes may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # ------------------------------------------------------------------------------------------------------------ finding

    def resolve(self, reference: str) -> Image:
        """The image of that name, digest, or digest prefix of at least 6 digits; NotFound lists the names there are."""
        pointer = self.root / "names" / reference
        if "/" not in reference and not reference.startswith(".") and pointer.is_file():
            return self.load(pointer.read_text().strip())
        if _PREFIX.match(reference):
            found = [digest for digest in self._digests() if digest.startswith(reference)]
            if len(found) == 1:
                return self.load(found[0])
            if found:
                raise NotFound(f"{reference} begins {len(found)} images' digests.", hint="Give more digits.")
        raise self._missing(reference)

    def _missing(self, reference: str) -> NotFound:
        names = ", ".join(sorted(self.names()))
        shipped = shipped_recipes()
        if reference in shipped:
            return NotFound(
                f"The image {reference!r} has not been built here" + (f"; there is: {names}." if names else "."),
                hint=f"Build it with 'perdure image build {reference}', which takes some minutes.",
            )
        return NotFound(
            f"There is no image {reference!r} here; " + (f"there is: {names}." if names else "no image has been built."),
            hint=f"Name one of these, or build one with 'perdure image build RECIPE': a file, or one of {', '.join(shipped)}.",
        )

    def load(self, digest: str) -> Image:
        """An image by its whole digest. Raises NotFound, or CorruptData naming the file that is missing or has another size."""
        directory = self.root / "blobs" / digest
        try:
            return read_described(directory / "image.json", image_from_json)
        except FileNotFoundError:
            raise NotFound(
                f"There is no image {digest[:12]} on this node.", hint="Build it with 'perdure image build'."
            ) from None

    def names(self) -> dict[str, str]:
        """Name -> digest of every named image."""
        folder = self.root / "names"
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        return {path.name: path.read_text().strip() for path in entries if not files.is_temporary(path)}

    def all(self) -> tuple[Image, ...]:
        """Every image: the named ones by name, then those that only workspaces still refer to."""
        named = self.names()
        images = {digest: self.load(digest) for digest in self._digests()}
        order = [digest for digest in named.values() if digest in images]
        return tuple(images[digest] for digest in dict.fromkeys([*order, *images]))

    def goldens(self, image: Image) -> tuple[Golden, ...]:
        """Complete golden snapshots of an image."""
        folder = image.directory / "golden"
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        return tuple(load_golden(path) for path in entries if (path / "golden.json").is_file() and not files.is_temporary(path))

    def golden(self, image: Image, name: str) -> Golden:
        """A golden by the name of its directory, as snapshots record it."""
        path = image.directory / "golden" / name
        if "/" in name or not (path / "golden.json").is_file():
            raise NotFound(f"The golden snapshot {name} of image {image.digest[:12]} is gone.", hint="Boot the disk instead.")
        return load_golden(path)

    def golden_path(self, digest: str, ref: str) -> Path:
        """Where the golden of that reference lies, or would if it was made here."""
        name, _, base = ref.rpartition(".")
        beside = self._beside(digest, name, base)
        return beside if (beside / "golden.json").is_file() else beside.with_name(name)

    def golden_place(self, digest: str, ref: str) -> Path:
        """Where the golden of that reference belongs. One that comes to a node which has made another of its name has its place
        beside that, with its base in the name of its directory."""
        name, _, base = ref.rpartition(".")
        beside = self._beside(digest, name, base)
        plain = beside.with_name(name)
        try:
            return plain if load_golden(plain).ref == ref else beside
        except (CorruptData, FileNotFoundError):
            return self.golden_path(digest, ref)

    def _beside(self, digest: str, name: str, base: str) -> Path:
        return self.root / "blobs" / digest / "golden" / f"{name}{BESIDE}{base}"

    def sizes(self, image: Image) -> ImageSizes:
        return ImageSizes(
            root=files.stored_bytes(image.directory / "root.raw"),
            agent=sum(files.stored_bytes(image.directory / name) for name in ("agent.raw", "kernel", "initrd")),
            goldens=sum(files.stored_bytes(path) for path in (image.directory / "golden").rglob("*")),
        )

    def _digests(self) -> list[str]:
        folder = self.root / "blobs"
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        return [path.name for path in entries if (path / "image.json").is_file()]

    # ----------------------------------------------------------------------------------------------------------- changing

    def publish(self, directory: Path, digest: str) -> Image:
        """Give a finished image its place, and its name to it. An image of the same digest that is there already stays."""
        final = self.root / "blobs" / digest
        if not (final / "image.json").is_file():
            files.make_dir(final.parent)
            files.publish_dir(directory, final)
        image = self.load(digest)
        files.make_dir(self.root / "names")
        files.write_file(self.root / "names" / image.name, f"{digest}\n".encode())
        if not (final / "image.json").is_file():  # a removal that began before the name was there does not know it
            files.remove(self.root / "names" / image.name)
            raise NotFound(f"The image {image.name} was removed while it was built.", hint="Build it again.")
        return image

    def remove(self, reference: str) -> int:
        """Remove an image and its names; returns the bytes that became free. The caller knows that no workspace needs it."""
        return self.discard(self.withdraw(self.resolve(reference)))

    def withdraw(self, image: Image) -> Withdrawn:
        """From here on it is no image, in one step; ``discard`` frees its bytes, or ``put_back`` makes it one again. After a
        crash the sweep does the former. Nothing is synced: that a power cut brings it back harms nobody."""
        names = tuple(name for name, digest in self.names().items() if digest == image.digest)
        place = self.root / "tmp" / f"{files.TEMPORARY}removed-{os.urandom(4).hex()}"
        files.make_dir(place.parent)
        try:
            lock = os.open(image.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"The image {image.name} ({image.digest[:12]}) has been removed meanwhile.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it goes where sweeps look
            for name in names:
                files.DISK.unlink(self.root / "names" / name)
            files.DISK.rename(image.directory, place)
        except BaseException:
            os.close(lock)
            raise
        return Withdrawn(image, names, place, lock)

    def put_back(self, withdrawn: Withdrawn) -> None:
        """It was an image all the time, unless somebody has made it anew meanwhile."""
        image = withdrawn.image
        try:
            if not image.directory.exists():
                files.rename(withdrawn.directory, image.directory)
            for name in set(withdrawn.names) - set(self.names()):
                files.write_file(self.root / "names" / name, f"{image.digest}\n".encode())
        finally:
            os.close(withdrawn.lock)

    def discard(self, withdrawn: Withdrawn) -> int:
        """Returns the bytes that became free."""
        try:
            stats = [path.lstat() for path in withdrawn.directory.rglob("*")]
            files.remove_tree(withdrawn.directory)
            return sum(stat.st_blocks * 512 for stat in stats if stat.st_nlink == 1)
        finally:
            os.close(withdrawn.lock)

    def unnamed(self) -> tuple[Image, ...]:
        """Images that no name points to: removable once no workspace refers to them."""
        named = set(self.names().values())
        return tuple(image for image in self.all() if image.digest not in named)

    def sweep(self) -> tuple[str, ...]:
        """Remove what interrupted builds and removals left; returns the names of what was removed. Safe while others build."""
        removed = []
        folders = [self.root / "tmp", self.root / "blobs", *(self.root / "blobs").glob("*/golden"), self.root / "names"]
        for folder in folders:
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if self._is_debris(path):
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                    removed.append(path.name)
        return tuple(removed)

    def left_builds(self) -> tuple[Path, ...]:
        """Directories of builds whose process is gone."""
        folder = self.root / "tmp"
        return tuple(path for path in (sorted(folder.iterdir()) if folder.is_dir() else ()) if not _is_locked(path))

    def _is_debris(self, path: Path) -> bool:
        if path.parent == self.root / "blobs":
            return not (path / "image.json").is_file()
        return (files.is_temporary(path) or path.parent == self.root / "tmp") and not _is_locked(path)

    @contextmanager
    def scratch(self, what: str, parent: Path | None = None) -> Iterator[Path]:
        """A temporary directory that ``sweep`` leaves alone while this process lives; removed at the end, however it comes."""
        folder = parent or self.root / "tmp"
        files.make_dir(folder)
        path = folder / f"{files.TEMPORARY}{what}-{os.urandom(4).hex()}"
        path.mkdir(mode=0o755)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    @asynccontextmanager
    async def only_one(self, what: str, on_wait: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Hold a lock between processes and tasks: the second calls ``on_wait`` and waits until the first is done."""
        files.make_dir(self.root / "locks")
        descriptor = os.open(self.root / "locks" / what, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _lock(descriptor):
            on_wait()
            locked = _lock_in_thread(descriptor)
            try:
                await asyncio.wrap_future(locked)
            except asyncio.CancelledError:
                # The thread cannot be interrupted; the lock is given back the moment it gets it.
                locked.add_done_callback(lambda _: os.close(descriptor))
                raise
        try:
            yield
        finally:
            os.close(descriptor)


_REBUILD = "Remove the image with 'perdure image rm' and build it again."


def _lock(descriptor: int) -> bool:
    """Take the lock of an open file; False when somebody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_in_thread(descriptor: int) -> Future[None]:
    """Wait for a lock in a thread of its own: were it one of those that all share, enough who wait would keep the one who has the
    lock from ending his work. A process does not wait for it at its end."""
    locked: Future[None] = Future()
    locked.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def wait() -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        locked.set_result(None)

    threading.Thread(target=wait, name="perdure-lock", daemon=True).start()
    return locked


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


T = TypeVar("T")


def described_files(path: Path) -> dict[str, Any]:
    """What image.json or golden.json says. Raises CorruptData when its own checksum does not hold, or FileNotFoundError."""
    try:
        described: dict[str, Any] = json.loads(path.read_bytes())
        if described["format"] != _WITHOUT_CHECKSUM and described.pop("checksum") != _digest(described):
            raise ValueError("its checksum does not hold")
        if described["format"] not in (FORMAT, _WITHOUT_CHECKSUM):
            raise ValueError(f"it has format {described['format']}, this release reads {FORMAT}")
        if not all(isinstance(facts["bytes"], int) and isinstance(facts["sha256"], str) for facts in described["files"].values()):
            raise ValueError("it does not say what the files beside it are")
        if any("/" in name or name in ("", ".", "..") for name in described["files"]):
            raise ValueError("it names a file that does not lie beside it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptData(f"{path} is damaged.", file=file_name(path), hint=_REBUILD, internal=str(error)) from error
    return described


def read_described(path: Path, build: Callable[[Mapping[str, Any], Path], T]) -> T:
    """``build`` of what the file says, when the files it names are there with the sizes it states; else CorruptData."""
    described = described_files(path)
    for name, facts in described["files"].items():
        beside = path.parent / name
        if not beside.is_file() or beside.stat().st_size != facts["bytes"]:
            raise CorruptData(f"{beside} is missing or has a wrong size.", file=file_name(beside), hint=_REBUILD)
    try:
        return build(described, path.parent)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"{path} is damaged.", file=file_name(path), hint=_REBUILD, internal=str(error)) from error


def file_name(path: Path) -> str:
    """A file of an image or an agent release by its name below the image directory, as errors name it."""
    parts = path.parts
    for top in ("blobs", "agents"):
        if top in parts:
            return f"images/{'/'.join(parts[len(parts) - parts[::-1].index(top) - 1 :])}"
    return path.name


def _digest(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _sealed(described: dict[str, Any]) -> bytes:
    return json.dumps({**described, "checksum": _digest(described)}, indent=1, sort_keys=True).encode()


def checksums_to_json(checksums: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Of the files of an agent release."""
    return _sealed({"format": FORMAT, "files": {name: dict(facts) for name, facts in checksums.items()}})


def image_to_json(image: Image, checksums: Mapping[str, Mapping[str, Any]]) -> bytes:
    """image.json: every field of the image, and size and checksum of each file beside it."""
    described: dict[str, Any] = {
        "format": FORMAT,
        "digest": image.digest,
        "name": image.name,
        "created_at": image.created_at.isoformat(),
        "default_size": {"memory_mib": image.default_size.memory_mib, "vcpus": image.default_size.vcpus},
        "disk_gib": image.disk_gib,
        "kernel_version": image.kernel_version,
        "kernel_digest": image.kernel_digest,
        "agent_protocol": image.agent_protocol,
        "agent_release": image.agent_release,
        "recipe_digest": image.recipe_digest,
        "root_digest": image.root_digest,
        "min_memory_mib": image.min_memory_mib,
        "environment": dict(image.environment),
        "egress_allow": list(image.egress_allow),
        "warm_up": list(image.warm_up),
        "packages": dict(image.packages),
        "files": {name: dict(facts) for name, facts in checksums.items()},
    }
    return _sealed(described)


def image_from_json(described: Mapping[str, Any], directory: Path) -> Image:
    size = described["default_size"]
    same = (
        *("digest", "name", "disk_gib", "kernel_version", "kernel_digest", "agent_protocol", "agent_release", "recipe_digest"),
        *("root_digest", "environment", "packages"),
    )
    return Image(
        directory=directory,
        created_at=datetime.fromisoformat(described["created_at"]),
        default_size=MachineSize(size["memory_mib"], size["vcpus"]),
        egress_allow=tuple(described["egress_allow"]),
        warm_up=tuple(described["warm_up"]),
        min_memory_mib=described.get("min_memory_mib", 0),  # images of earlier releases do not say
        **{key: described[key] for key in same},
    )


def golden_to_json(golden: Golden, checksums: Mapping[str, Mapping[str, Any]]) -> bytes:
    described: dict[str, Any] = {
        "format": FORMAT,
        "image": golden.image,
        "size": {"memory_mib": golden.size.memory_mib, "vcpus": golden.size.vcpus},
        "fingerprint": golden.fingerprint,
        "base_id": golden.base_id,
        "boot_s": golden.boot_s,
        "created_at": golden.created_at.isoformat(),
        "ram_bytes": golden.ram_bytes,
        "ram_stored_bytes": golden.ram_stored_bytes,
        "files": {name: dict(facts) for name, facts in checksums.items()},
    }
    return _sealed(described)


def load_golden(directory: Path) -> Golden:
    """Read golden.json and check the sizes it states; CorruptData names what does not fit."""
    return read_described(directory / "golden.json", _golden_from_json)


def _golden_from_json(described: Mapping[str, Any], directory: Path) -> Golden:
    size = described["size"]
    return Golden(
        directory=directory,
        size=MachineSize(size["memory_mib"], size["vcpus"]),
        created_at=datetime.fromisoformat(described["created_at"]).astimezone(UTC),
        **{key: described[key] for key in ("image", "fingerprint", "base_id", "boot_s", "ram_bytes", "ram_stored_bytes")},
    )
