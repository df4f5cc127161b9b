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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from perdure.core.errors import CorruptSnapshot, InvalidRequest
from perdure.core.files import DISK, Disk, Hole, create_file
from perdure.core.ids import DiskId
from perdure.machines.driver import DiskLayer

_CLUSTER_BITS = 12
_CLUSTER = 1 << _CLUSTER_BITS
_L2_COVERS = (_CLUSTER // 8) * _CLUSTER  # an L2 table is one cluster of entries of 8 bytes
_COUNTS_PER_BLOCK = _CLUSTER // 2  # a refcount has 16 bits
_EXTENDED_L2 = 1 << 4
_KINDS = ((_CLUSTER_BITS, 0), (16, _EXTENDED_L2))  # cluster bits and incompatible features
_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII8x")
_STREAMED_BACKING = b"base"  # what block-stream must be told to leave there; given explicit graphs, nobody opens it
_L1_BYTES_MAX = 8 << 20
MAX_DISK_BYTES = 2 << 40  # with an L1 table of 8 MiB, of which QEMU takes 32

_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a layer's header says."""

    virtual_bytes: int
    has_data: bool


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
    create_file(path, _empty(virtual_bytes), disk=disk)


def inspect(path: Path) -> LayerFacts:
    """Read a layer's header and L1 table. Raises CorruptSnapshot when it is not a layer that we made and QEMU kept."""
    try:
        with path.open("rb") as file:
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
            l1 = file.read(min(l1_size * 8, _L1_BYTES_MAX))
    except FileNotFoundError as error:
        raise corrupt(path, "the file is missing") from error
    return LayerFacts(virtual, any(l1))


def checksum(path: Path, told: Callable[[int], None] | None = None) -> str:
    """xxh3_128 of a file's content in hex. Raises CorruptSnapshot when it is missing. ``told`` hears of each part's bytes."""
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(_READ))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                if told is not None:
                    told(count)
    except FileNotFoundError as error:
        raise corrupt(path, "the file is missing") from error
    except OSError as error:
        raise corrupt(path, f"it cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def size_of(path: Path) -> int:
    """Apparent size in bytes; raises CorruptSnapshot when it is missing."""
    try:
        return path.lstat().st_size
    except FileNotFoundError as error:
        raise corrupt(path, "the file is missing") from error


def _empty(virtual_bytes: int) -> list[bytes | Hole]:
    """Header and refcount table, of one cluster each, refcount blocks, and the L1 table, which is a hole."""
    l1_entries = -(-virtual_bytes // _L2_COVERS)
    l1_clusters = -(-l1_entries * 8 // _CLUSTER)
    blocks = -(-(2 + l1_clusters) // (_COUNTS_PER_BLOCK - 1))  # each counts itself, too
    used = 2 + blocks + l1_clusters
    header = _HEADER.pack(
        *(b"QFI\xfb", 3, 0, 0, _CLUSTER_BITS, virtual_bytes, 0, l1_entries, (2 + blocks) * _CLUSTER),
        *(_CLUSTER, 1, 0, 0, 0, 0, 0, 4, 112),
    )
    table = struct.pack(f">{blocks}Q", *((2 + number) * _CLUSTER for number in range(blocks)))
    counts = struct.pack(">H", 1) * used
    parts = [part for data in (header, table) for part in (data, Hole(_CLUSTER - len(data)))]
    return [*parts, counts, Hole(blocks * _CLUSTER - len(counts)), Hole(l1_clusters * _CLUSTER)]


def digest_of(data: bytes) -> str:
    """The same of bytes at hand."""
    return xxhash.xxh3_128_hexdigest(data)


def corrupt(path: Path, why: str) -> CorruptSnapshot:
    """The error that names a damaged file."""
    return CorruptSnapshot(
        f"The stored file {path.name} is damaged: {why}.", file=f"{path.parent.name}/{path.name}", internal=str(path)
    )
