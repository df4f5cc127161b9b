"""A full check of an image and its golden snapshots: every byte against the digests recorded when they were made.

A look at an image (``ImageStore.load``) compares sizes only, because a wake must not read a gigabyte that all workspaces share.
One ``ImageVerifier`` serves a whole pass and reads each file once. Synchronous: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from perdure.core.errors import CorruptData
from perdure.images.registry import ImageStore, described_files, file_name, load_golden
from perdure.images.sparse import sparse_sha256
from perdure.wire.node import Damage

#: Hears of each file that is read, by its name, with the bytes read since it was last told. May raise to end the pass.
Told = Callable[[str, int], None]


class ImageVerifier:
    """One pass. Remembers what it has read."""

    def __init__(self, store: ImageStore, told: Told) -> None:
        self._store = store
        self._told = told
        self._known: dict[Path, tuple[Damage, ...]] = {}

    def image(self, digest: str) -> tuple[Damage, ...]:
        """Kernel, initrd, root disk and agent disk, and what is said of them."""
        path = self._store.root / "blobs" / digest / "image.json"
        found = self._beside(path)
        if not found and (other := described_files(path)["digest"]) != digest:
            return (Damage(file_name(path), f"The file {file_name(path)} is damaged: it belongs to the image {other}."),)
        return found

    def golden(self, digest: str, ref: str) -> tuple[Damage, ...]:
        """RAM, disk and device state of a golden snapshot, by the reference that snapshots on it have."""
        path = self._store.golden_path(digest, ref) / "golden.json"
        found = self._beside(path)
        if found:
            return found
        try:
            other = load_golden(path.parent).ref
        except CorruptData as error:
            return (Damage(error.file or file_name(path), error.message),)
        return () if other == ref else (Damage(file_name(path), f"The golden snapshot {ref} is gone; {other} is in its place."),)

    def ram(self, digest: str, ref: str) -> Path:
        """The RAM of a golden that was found whole."""
        return self._store.golden_path(digest, ref) / "ram.base"

    def _beside(self, path: Path) -> tuple[Damage, ...]:
        if path not in self._known:
            self._known[path] = tuple(self._read(path))
        return self._known[path]

    def _read(self, path: Path) -> list[Damage]:
        try:
            described = described_files(path)
        except FileNotFoundError:
            return [Damage(file_name(path), f"The file {file_name(path)} is missing.")]
        except CorruptData as error:
            return [Damage(error.file, error.message)]
        self._told(file_name(path), path.stat().st_size)
        found = []
        for name, facts in described["files"].items():
            file = file_name(path.parent / name)
            if problem := problem_of(path.parent / name, facts, partial(self._told, file)):
                found.append(Damage(file, problem))
        return found


def problem_of(path: Path, facts: Mapping[str, object], told: Callable[[int], None]) -> str:
    """What is wrong with a file of an image, in a sentence, held against what its description says; nothing if it is whole."""
    name = file_name(path)
    try:
        if path.stat().st_size != facts["bytes"]:
            return f"The file {name} is damaged: its size is not the one recorded."
        if sparse_sha256(path, told) != facts["sha256"]:
            return f"The file {name} is damaged: its checksum does not hold."
    except FileNotFoundError:
        return f"The file {name} is missing."
    except OSError as error:
        return f"The file {name} cannot be read ({error.strerror})."
    return ""
