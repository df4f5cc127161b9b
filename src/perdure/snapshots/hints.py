"""Hints: which parts of files a wake touched, so that the next wake of a cold snapshot can ask the disk for them ahead.

After a reboot of the host nothing is in its page cache, and a guest that goes on where it was reads the base of its memory page
by page, each a wait for the disk. A hint is a list of ranges; it is beside the snapshot and no part of it: one that is missing,
torn or of another release is no hint, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from perdure.core.files import Disk, is_temporary, make_dir, remove, write_file
from perdure.core.ids import SnapshotId, is_id
from perdure.machines.driver import PageNumbers

VERSION = 1
#: Holes of so many pages are read along: one larger request costs less than two.
GAP_PAGES = 8
#: Of one file; what lies further up is left out. 64 MiB of ranges is more than a wake touches.
RANGES_MAX = 4096

Ranges = npt.NDArray[np.uint32]  # shape (n, 2): first page, number of pages; ascending


def ranges_of(pages: PageNumbers) -> Ranges:
    """Ranges that cover these pages (ascending), with small gaps closed."""
    if not len(pages):
        return np.empty((0, 2), np.uint32)
    breaks = np.flatnonzero(np.diff(pages.astype(np.int64)) > GAP_PAGES + 1) + 1
    first, last = pages[np.r_[0, breaks]], pages[np.r_[breaks - 1, len(pages) - 1]]
    return np.column_stack((first, last - first + 1)).astype(np.uint32)[:RANGES_MAX]


def pages_of(ranges: Ranges) -> PageNumbers:
    """All pages of ranges, ascending."""
    return np.concatenate(
        [np.empty(0, np.uint32), *(np.arange(at, at + count, dtype=np.uint32) for at, count in ranges.tolist())]
    )


def merged(some: Ranges, others: Ranges) -> Ranges:
    return ranges_of(np.union1d(pages_of(some), pages_of(others)).astype(np.uint32))


@dataclass(frozen=True, slots=True)
class Hint:
    """``ram``: of whatever base lies below the memory. ``files``: of disk layers, by the names of their files."""

    ram: Ranges = field(default_factory=lambda: np.empty((0, 2), np.uint32))
    files: Mapping[str, Ranges] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        said = {"version": VERSION, "ram": self.ram.tolist(), "files": {name: at.tolist() for name, at in self.files.items()}}
        body = json.dumps(said, separators=(",", ":"), sort_keys=True).encode()
        return xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body

    @staticmethod
    def from_bytes(data: bytes) -> Hint | None:
        """None when it is not one that this release wrote."""
        check, _, body = data.partition(b"\n")
        if check != xxhash.xxh3_64_hexdigest(body).encode():
            return None
        said = json.loads(body)
        if said["version"] != VERSION:
            return None
        return Hint(_ranges(said["ram"]), {name: _ranges(at) for name, at in said["files"].items()})


def _ranges(said: list[list[int]]) -> Ranges:
    return np.array(said, np.uint32).reshape(-1, 2)


class Hints:
    """The hints of a store, one file a snapshot. Thread-safe as far as the file system is."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk

    def open(self, known: Iterable[SnapshotId]) -> None:
        """Remove those of snapshots that are gone."""
        make_dir(self._directory, mode=0o700, disk=self._disk)
        wanted = frozenset(known)
        for path in list(self._directory.iterdir()):
            if is_temporary(path) or path.stem not in wanted:
                remove(path, disk=self._disk)

    def read(self, snapshot_id: SnapshotId) -> Hint | None:
        try:
            return Hint.from_bytes(self._path(snapshot_id).read_bytes())
        except OSError:
            return None

    def write(self, snapshot_id: SnapshotId, hint: Hint) -> None:
        """Raises OSError or NoSpace; nothing depends on it."""
        if is_id(snapshot_id, "snp"):
            write_file(self._path(snapshot_id), hint.to_bytes(), mode=0o600, disk=self._disk)

    def drop(self, snapshot_id: SnapshotId) -> None:
        remove(self._path(snapshot_id), disk=self._disk)

    def _path(self, snapshot_id: SnapshotId) -> Path:
        return self._directory / f"{snapshot_id}.hint"
