"""Disk layers: the qcow2 overlays that hold what a workspace wrote.

A layer never names the one below it: the chain is in the manifest or the live record and is given to the VMM explicitly, so that
a file name inside an image is never followed. ``inspect`` refuses a layer that says otherwise (a VMM that was taken over could
write one), and knows whether anything was ever written to it.

New layers are written here directly, without ``qemu-img``: version 3, clusters of 4 KiB, the block size of the guest's file
system, so that a small write allocates no more than it writes. Larger clusters with extended L2 entries do as well, but QEMU
before 8.1 ends with a failed assertion when it reads a half allocated cluster of a layer that is being streamed into; layers of
that kind, made by earlier releases, are read. Format: QEMU's docs/interop/qcow2.rst.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from perdure.core.errors import CorruptSnapshot, InvalidRequest
from perdure.core.files import DISK, Disk, Hole, create_file
from perdure.core.ids import DiskId
from perdure.machines.driver import DiskLayer

_CLUSTER_BITS = 12
CLUSTER = 1 << _CLUSTER_BITS
L2_ENTRIES = CLUSTER // 8  # an L2 table is one cluster of entries of 8 bytes
_L2_COVERS = L2_ENTRIES * CLUSTER
_COUNTS_PER_BLOCK = CLUSTER // 2  # a refcount has 16 bits
_EXTENDED_L2 = 1 << 4
_KINDS = ((_CLUSTER_BITS, 0), (16, _EXTENDED_L2))  # cluster bits and incompatible features
_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII8x")
_STREAMED_BACKING = b"base"  # what block-stream must be told to leave there; given explicit graphs, nobody opens it
_L1_BYTES_MAX = 8 << 20
MAX_DISK_BYTES = 2 << 40  # with an L1 table of 8 MiB, of which QEMU takes 32

_READ = 256 << 10  # small enough for a processor's cache
_rooms = threading.local()


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a layer's header says. ``is_plain``: of the kind that is made now, not of that of earlier releases."""

    virtual_bytes: int
    has_data: bool
    is_plain: bool = True


@dataclass(frozen=True, slots=True)
class Tables:
    """Where a layer's data is found: its first table, whose entries are big-endian, with a hostile VMM in mind."""

    virtual_bytes: int
    l1: bytes
    is_plain: bool


def disk_file(disk_id: DiskId) -> str:
    return f"{disk_id}.qcow2"


def layer(directory: Path, disk_id: DiskId) -> DiskLayer:
    return DiskLayer(directory / disk_file(disk_id), "qcow2")


def create_layer(path: Path, virtual_bytes: int, *, disk: Disk = DISK) -> None:
    """A new empty layer, fsynced (its directory is not). It may be larger than the layer it will lie on. Raises NoSpace."""
    if not 0 < virtual_bytes <= MAX_DISK_BYTES or virtual_bytes % 512:
        raise InvalidRequest(
            f"A disk of {virtual_bytes} bytes cannot be made.", hint=f"Choose 1 to {MAX_DISK_BYTES >> 30} GiB for disk_gib."
        )
    create_file(path, Layout.of(virtual_bytes).head(), disk=disk)


def inspect(path: Path) -> LayerFacts:
    """Read a layer's header and L1 table. Raises CorruptSnapshot when it is not a layer that we made and QEMU kept."""
    try:
        with path.open("rb") as file:
            tables = read_tables(file, path)
    except FileNotFoundError as error:
        raise corrupt(path, "the file is missing") from error
    return LayerFacts(tables.virtual_bytes, any(tables.l1), tables.is_plain)


def read_tables(file: BinaryIO, path: Path) -> Tables:
    """The same of an open layer, with the table itself."""
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise corrupt(path, "it is too short")
    fields = _HEADER.unpack(head)
    magic, version, backing, name_length, bits, virtual, crypt, l1_size, l1_at = fields[:9]
    incompatible = fields[13]
    if magic != b"QFI\xfb" or version != 3 or bits not in dict(_KINDS) or not 0 < virtual <= MAX_DISK_BYTES:
        raise corrupt(path, "its header is not that of a layer")
    file.seek(backing)
    if crypt or incompatible != dict(_KINDS)[bits] or (backing and file.read(name_length) != _STREAMED_BACKING):
        raise corrupt(path, "its header asks for a backing file, encryption or features that layers do not have")
    file.seek(l1_at)
    return Tables(virtual, file.read(min(l1_size * 8, _L1_BYTES_MAX)), bits == _CLUSTER_BITS)


def checksum(path: Path, told: Callable[[int], None] | None = None) -> str:
    """xxh3_128 of a file's content in hex. Raises CorruptSnapshot when it is missing. ``told`` hears of each part's bytes."""
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            buffer = _room()
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                if told is not None:
                    told(count)
    except FileNotFoundError as error:
        raise corrupt(path, "the file is missing") from error
    except OSError as error:
        raise corrupt(path, f"it cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _room() -> memoryview:
    """One for each thread, and kept: new memory costs more than what is read into it."""
    if not hasattr(_rooms, "buffer"):
        _rooms.buffer = memoryview(bytearray(_READ))
    room: memoryview = _rooms.buffer
    return room


def size_of(path: Path) -> int:
    """Apparent size in bytes; raises CorruptSnapshot when it is missing."""
    try:
        return path.lstat().st_size
    except FileNotFoundError as error:
        raise corrupt(path, "the file is missing") from error


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a new layer are, in clusters: header, refcount table, refcount blocks, L1 table, and ``behind`` these so
    many more, of L2 tables and data. Every cluster is used once."""

    virtual_bytes: int
    tables: int
    blocks: int
    l1_entries: int
    clusters: int

    @staticmethod
    def of(virtual_bytes: int, behind: int = 0) -> Layout:
        l1_entries = -(-virtual_bytes // _L2_COVERS)
        used = 1 + _clusters(l1_entries * 8) + behind
        tables = blocks = 1
        while blocks * _COUNTS_PER_BLOCK < used + tables + blocks or tables * L2_ENTRIES < blocks:  # they count themselves, too
            blocks = -(-(used + tables + blocks) // _COUNTS_PER_BLOCK)
            tables = -(-blocks // L2_ENTRIES)
        return Layout(virtual_bytes, tables, blocks, l1_entries, used + tables + blocks)

    @property
    def l1_at(self) -> int:
        return (1 + self.tables + self.blocks) * CLUSTER

    @property
    def end(self) -> int:
        """In bytes, where the L1 table ends and the other clusters begin."""
        return self.l1_at + _clusters(self.l1_entries * 8) * CLUSTER

    def head(self, l1: bytes = b"") -> Iterator[bytes | Hole]:
        """Everything up to ``end``. Clusters of the L1 table with nothing in them are holes."""
        header = _HEADER.pack(
            *(b"QFI\xfb", 3, 0, 0, _CLUSTER_BITS, self.virtual_bytes, 0, self.l1_entries, self.l1_at),
            *(CLUSTER, self.tables, 0, 0, 0, 0, 0, 4, 112),
        )
        first = 1 + self.tables
        table = struct.pack(f">{self.blocks}Q", *((first + number) * CLUSTER for number in range(self.blocks)))
        for part, room in ((header, CLUSTER), (table, self.tables * CLUSTER)):
            yield from (part, Hole(room - len(part)))
        full = struct.pack(">H", 1) * _COUNTS_PER_BLOCK
        for counted in range(0, self.clusters, _COUNTS_PER_BLOCK):
            yield full[: 2 * (self.clusters - counted)]
        yield Hole(self.blocks * CLUSTER - 2 * self.clusters)
        used = l1.rstrip(b"\0")
        for at in range(0, len(used), CLUSTER):
            part = l1[at : at + CLUSTER]
            yield part.ljust(CLUSTER, b"\0") if any(part) else Hole(CLUSTER)
        yield Hole(self.end - self.l1_at - _clusters(len(used)) * CLUSTER)


def _clusters(length: int) -> int:
    return -(-length // CLUSTER)


def digest_of(data: bytes) -> str:
    """The same of bytes at hand."""
    return xxhash.xxh3_128_hexdigest(data)


def corrupt(path: Path, why: str) -> CorruptSnapshot:
    """The error that names a damaged file."""
    return CorruptSnapshot(
        f"The stored file {path.name} is damaged: {why}.", file=f"{path.parent.name}/{path.name}", internal=str(path)
    )
