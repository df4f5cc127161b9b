"""Frozen disk layers: whether each is what was written, to its last byte, before anything builds on it (ADR 21).

A VMM reads its layers by itself and knows of no checksum, so each is read before a guest can: small ones at every start; large
ones when this process has not read them yet, or when the file is not the same any more. A file of which this process has seen
every byte, and that has kept its size and times since, is believed as long as the process lives: gigabytes at every wake would
cost more than the wake.

Synchronous: call it in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from perdure.core.files import stored_bytes
from perdure.core.ids import DiskId
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.bases import Abandoned
from perdure.snapshots.layers import disk_file
from perdure.snapshots.manifest import DiskFact

#: So much of what was read before a start reads again. A sleeping workspace has 8 layers, of some megabytes if it is a light one.
REREAD_BYTES = 64 << 20

#: Device, inode, size, and times of the last change of content and of anything. What a program writes to a file changes it; what
#: rots on a disk does not.
Identity = tuple[int, int, int, int, int]


def identity_of(path: Path) -> Identity:
    """Raises OSError."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class FrozenLayers:
    """Those of one store. Errors are CorruptSnapshot that names the layer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._whole: dict[DiskId, tuple[Identity, str]] = {}  # as it was when its checksum was found to be this

    def check_heads(self, facts: Iterable[DiskFact]) -> None:
        """Size and header of layers: what can be seen before there is a machine for them."""
        for fact in facts:
            self._sized(fact)
            disk_layers.inspect(self._path(fact.disk_id))

    def read(self, fact: DiskFact, told: Callable[[int], None] | None = None) -> None:
        """Every byte of a layer. ``told`` hears of each part's bytes, and may raise to end it."""
        identity, path = self._sized(fact), self._path(fact.disk_id)
        if disk_layers.checksum(path, told) != fact.checksum:
            raise disk_layers.corrupt(path, "its checksum does not hold")
        self._whole[fact.disk_id] = identity, fact.checksum

    def check(self, facts: Iterable[DiskFact], enough: threading.Event | None = None) -> None:
        """What a start asks of its layers: see above. Raises Abandoned as soon as it is ``enough``."""
        left, wanted = REREAD_BYTES, list[DiskFact]()
        for fact in sorted(facts, key=lambda fact: fact.size):
            if self._is_known(fact):
                left -= fact.size
                if left < 0:
                    continue
            wanted.append(fact)
        self.read_all(wanted, enough)

    def read_all(self, facts: Iterable[DiskFact], enough: threading.Event | None = None) -> None:
        """Every byte of several. Raises Abandoned as soon as it is ``enough``."""
        for fact in facts:
            self.read(fact, None if enough is None else ended_by(enough))

    def freeze(self, disk_id: DiskId) -> DiskFact:
        """Size and checksum of a durable layer that nobody writes any more."""
        path = self._path(disk_id)
        identity = self._identity(path)
        fact = DiskFact(disk_id, identity[2], stored_bytes(path), disk_layers.checksum(path))
        self._whole[disk_id] = identity, fact.checksum
        return fact

    def forget(self, disk_id: DiskId) -> None:
        """The layer is gone."""
        self._whole.pop(disk_id, None)

    def _path(self, disk_id: DiskId) -> Path:
        return self._directory / disk_file(disk_id)

    def _sized(self, fact: DiskFact) -> Identity:
        path = self._path(fact.disk_id)
        identity = self._identity(path)
        if identity[2] != fact.size:
            raise disk_layers.corrupt(path, "its size is not the one recorded")
        return identity

    def _is_known(self, fact: DiskFact) -> bool:
        return self._whole.get(fact.disk_id) == (self._identity(self._path(fact.disk_id)), fact.checksum)

    @staticmethod
    def _identity(path: Path) -> Identity:
        try:
            return identity_of(path)
        except FileNotFoundError as error:
            raise disk_layers.corrupt(path, "the file is missing") from error


def ended_by(enough: threading.Event) -> Callable[[int], None]:
    """For who is told of the bytes of a reading: raises Abandoned when it is ``enough``."""

    def told(_count: int) -> None:
        if enough.is_set():
            raise Abandoned

    return told


async def until_enough(work: Callable[[threading.Event], None]) -> None:
    """Work in a thread that ends early when it is ``enough``. A call that is cancelled waits for that."""
    enough = threading.Event()
    task = asyncio.create_task(asyncio.to_thread(work, enough))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        enough.set()
        await asyncio.wait([task])
        task.exception()
        raise
