"""What disk layers hold together: several adjacent ones read as QEMU reads them, and written as one.

Of every 4 KiB of the disk the topmost layer that knows anything about them tells what they are: data, or zeros that hide what is
below. What none of them knows stays open in the new layer, too, for the layers under it. Only the tables that say so are read,
never a reference count, and what a table says is a guest's word: a VMM that was taken over wrote it. Where QEMU reads zeros past
the end of a file, so does this; where QEMU gives the guest an error, this raises CorruptSnapshot; and no layer may name more
clusters than its file has, so that what is written is never larger than what was read.

Layers of small clusters only (``layers``), all of one size. Format: QEMU's docs/interop/qcow2.rst.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash
from numpy.typing import NDArray

from perdure.core.errors import InvalidRequest
from perdure.core.files import Disk, Hole, no_space_named
from perdure.snapshots.bases import Abandoned
from perdure.snapshots.layers import CLUSTER, L2_ENTRIES, Layout, corrupt, read_tables

#: Handed to the disk at once: gigabytes that wait for one fsync would stand in everybody else's way.
SYNC_BYTES = 32 << 20

#: Entries of an L2 table as they are used here: an offset in the file, or one of these.
OPEN, ZERO = 0, 1

_OFFSET = 0x00FF_FFFF_FFFF_FE00
_COPIED = 1 << 63  # its cluster is used once
_COMPRESSED = 1 << 62

Entries = NDArray[np.uint64]


class LayerReader:
    """An open layer. Raises CorruptSnapshot naming it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clusters_named = 0
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise corrupt(path, "the file is missing") from error
        with ExitStack() as undo:
            undo.enter_context(self._file)
            tables = read_tables(self._file, path)
            if not tables.is_plain:
                raise InvalidRequest(f"The layer {path.name} is of a kind that cannot be merged.")
            self.virtual_bytes = tables.virtual_bytes
            self._size = os.fstat(self._file.fileno()).st_size
            count = Layout.of(self.virtual_bytes).l1_entries
            if len(tables.l1) < count * 8:
                raise corrupt(path, "its first table is too short")
            raw = np.frombuffer(tables.l1, ">u8", count).astype(np.uint64)
            self._l1 = raw & np.uint64(_OFFSET)
            self._aligned(self._l1)
            undo.pop_all()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> LayerReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def used(self) -> NDArray[np.intp]:
        """Numbers of the L2 tables that there are."""
        return np.flatnonzero(self._l1)

    def entries(self, number: int) -> Entries | None:
        """An L2 table in the form used here."""
        offset = int(self._l1[number])
        if not offset:
            return None
        raw = np.frombuffer(self.read(offset, CLUSTER), ">u8").astype(np.uint64)
        if (raw & np.uint64(_COMPRESSED)).any():
            raise corrupt(self.path, "it has compressed clusters, which layers do not have")
        found = raw & np.uint64(_OFFSET)
        is_zero = (raw & np.uint64(ZERO)).astype(bool)
        self._aligned(found[~is_zero])
        found[is_zero | (found >= self._size)] = ZERO
        found[raw & np.uint64(_OFFSET | ZERO) == 0] = OPEN
        beyond = -(-self.virtual_bytes // CLUSTER) - number * L2_ENTRIES
        found[max(0, beyond) :] = OPEN
        return found

    def count(self, entries: Entries) -> None:
        """Hold the layer to what its file has room for, over all of its tables."""
        self._clusters_named += 1 + int(np.count_nonzero(entries > ZERO))
        if self._clusters_named * CLUSTER > self._size + CLUSTER:
            raise corrupt(self.path, "its tables name more than it has")

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray()
        while len(data) < length and (part := os.pread(self._file.fileno(), length - len(data), offset + len(data))):
            data += part
        return bytes(data).ljust(length, b"\0")

    def _aligned(self, offsets: Entries) -> None:
        if (offsets % np.uint64(CLUSTER)).any():
            raise corrupt(self.path, "its tables name clusters where none can be")


@dataclass(frozen=True, slots=True)
class Written:
    """Apparent size in bytes, and xxh3_128 in hex."""

    size: int
    checksum: str


class Union:
    """Adjacent layers of a disk, bottom first, as one. Stops with Abandoned as soon as it is ``enough``."""

    def __init__(self, paths: Sequence[Path], enough: threading.Event) -> None:
        self._enough = enough
        with ExitStack() as opened:
            self._layers = [opened.enter_context(LayerReader(path)) for path in paths]
            sizes = {layer.virtual_bytes for layer in self._layers}
            if len(sizes) != 1:
                raise InvalidRequest(f"Layers of {sorted(sizes)} bytes cannot be merged; they must be of one size.")
            self._virtual_bytes = sizes.pop()
            self._counts = self._count()  # of data clusters, by number of the L2 table
            self.layout = Layout.of(self._virtual_bytes, len(self._counts) + sum(self._counts.values()))
            self._opened = opened.pop_all()

    def __enter__(self) -> Union:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()

    def write(self, path: Path, disk: Disk) -> Written:
        """Into a new file, fsynced (its directory is not). After an error, NoSpace for one, there is a file that is nobody's."""
        digest, synced = xxhash.xxh3_128(), 0
        with no_space_named(path):
            handle = disk.create(path, 0o644)
            with closing(handle):
                for part in self._parts():
                    if isinstance(part, Hole):
                        handle.cut(handle.size + part.length)
                        digest.update(bytes(part.length))
                    else:
                        handle.write(part)
                        digest.update(part)
                    if handle.size - synced >= SYNC_BYTES:
                        handle.sync()
                        synced = handle.size
                handle.sync()
        return Written(handle.size, digest.hexdigest())

    def _count(self) -> dict[int, int]:
        numbers = np.unique(np.concatenate([layer.used for layer in self._layers]))
        found = {}
        for number in numbers.tolist():
            entries, _ = self._table(number, is_first=True)
            if entries.any():
                found[number] = int(np.count_nonzero(entries > ZERO))
        return found

    def _table(self, number: int, *, is_first: bool = False) -> tuple[Entries, NDArray[np.uint8]]:
        """What the layers together say, and which of them said it."""
        if self._enough.is_set():
            raise Abandoned
        both = np.zeros(L2_ENTRIES, np.uint64)
        source = np.zeros(L2_ENTRIES, np.uint8)
        for which in reversed(range(len(self._layers))):
            entries = self._layers[which].entries(number)
            if entries is None:
                continue
            if is_first:
                self._layers[which].count(entries)
            new = (both == OPEN) & (entries != OPEN)
            both[new], source[new] = entries[new], which
        return both, source

    def _parts(self) -> Iterator[bytes | Hole]:
        l1, at = np.zeros(self.layout.l1_entries, ">u8"), self.layout.end
        for number, count in self._counts.items():
            l1[number] = at | _COPIED
            at += (1 + count) * CLUSTER
        yield from self.layout.head(l1.tobytes())
        at = self.layout.end
        for number, count in self._counts.items():
            entries, source = self._table(number)
            data = np.flatnonzero(entries > ZERO)
            assert len(data) == count, "frozen layers do not change"
            table = entries.astype(">u8")
            table[data] = _COPIED | (at + CLUSTER * np.arange(1, count + 1, dtype=np.uint64))
            yield table.tobytes()
            yield from self._data(entries[data], source[data])
            at += (1 + count) * CLUSTER

    def _data(self, offsets: Entries, source: NDArray[np.uint8]) -> Iterator[bytes]:
        """Clusters in this order; those that lie one behind the other are read at once."""
        if not len(offsets):
            return
        breaks = np.flatnonzero((np.diff(offsets) != CLUSTER) | (np.diff(source) != 0)) + 1
        for run in np.split(np.arange(len(offsets)), breaks):
            yield self._layers[int(source[run[0]])].read(int(offsets[run[0]]), len(run) * CLUSTER)
