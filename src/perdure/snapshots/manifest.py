"""What a snapshot is on disk, and what a running machine is: the manifest and the live record.

A snapshot exists if and only if its ``manifest.json`` does; the manifest is renamed into place after everything it names is
durable. The live record is intent: it is durable before a machine starts and names every layer the machine may write, so that
after a crash its disk can be found. Both are JSON with a checksum over the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import xxhash

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import BaseId, DiskId, SegmentId, SnapshotId, TenantId, WorkspaceId, is_id
from perdure.snapshots.layers import disk_file
from perdure.snapshots.segments import segment_file
from perdure.wire.node import MachineSize, SnapshotFacts

VERSION = 1
MANIFEST = "manifest.json"
INDEX = "ram.index"
DEVICES = "devices.state"
#: The index of a snapshot as it was captured or fetched, and what a merge wrote in its place.
_INDEX = re.compile(r"ram(\.[0-9a-z_]{1,40})?\.index")
_DEVICES = re.compile(r"devices(\.[0-9a-z_]{1,40})?\.state")
#: An image by its digest, and a golden by its reference.
_IMAGE, _GOLDEN = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,120}"), re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,240}")


@dataclass(frozen=True, slots=True)
class BaseFact:
    """A RAM file in the store's ``bases``, which snapshots and their forks map as others map a golden's. ``stored`` is its size
    without holes, in bytes; ``checksum`` is that of ``bases.checksum``, which does not mind how zeros are stored."""

    base_id: BaseId
    size: int
    stored: int
    checksum: str


@dataclass(frozen=True, slots=True)
class BaseRef:
    """What lies below a workspace's own state: an image, and a golden snapshot of it.

    ``golden`` is the ``Golden.ref``, which a golden made again under the same name does not have: what was made on the first does
    not fit the second. None where the image's own root disk, or empty memory, is the base, or ``private``: memory that had become
    too different from the golden's and was given a base of its own (``rebase``).
    """

    image: str
    golden: str | None
    private: BaseFact | None = None


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file of the snapshot's directory. ``checksum`` is xxh3_128 in hex."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class DiskFact:
    """A frozen layer in the store's ``disks``; ``stored`` is its size without holes, in bytes."""

    disk_id: DiskId
    size: int
    stored: int
    checksum: str


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """The memory half of a snapshot; absent from a disk-only one."""

    base: BaseRef
    index: FileFact
    devices: FileFact
    segments: Mapping[SegmentId, int]  # to the end of the last frame needed
    pages: int
    added_bytes: int
    total_bytes: int
    fingerprint: str
    fingerprint_parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete snapshot. ``layers`` are the workspace's own, bottom first, above the disk of ``disk_base``."""

    snapshot_id: SnapshotId
    workspace_id: WorkspaceId
    tenant_id: TenantId
    generation: int
    parent_id: SnapshotId | None
    image: str
    size: MachineSize
    disk_gib: int
    created_at: datetime
    quiesced: bool
    pause_s: float
    disk_base: BaseRef
    layers: tuple[DiskFact, ...]
    memory: MemoryFacts | None
    version: int = VERSION

    @property
    def disk_ids(self) -> tuple[DiskId, ...]:
        return tuple(layer.disk_id for layer in self.layers)

    @property
    def private_base(self) -> BaseFact | None:
        return None if self.memory is None else self.memory.base.private

    def stored_files(self) -> frozenset[str]:
        """Names of the segments, disks and bases that this snapshot needs."""
        segments = self.memory.segments if self.memory else ()
        bases = () if self.private_base is None else (self.private_base.base_id,)
        return frozenset((*map(segment_file, segments), *map(disk_file, self.disk_ids), *map(base_file, bases)))

    def facts(self) -> SnapshotFacts:
        memory = self.memory
        return SnapshotFacts(
            snapshot_id=self.snapshot_id,
            workspace_id=self.workspace_id,
            tenant_id=self.tenant_id,
            generation=self.generation,
            parent_id=self.parent_id,
            image=self.image,
            size=self.size,
            disk_gib=self.disk_gib,
            created_at=self.created_at,
            has_memory=memory is not None,
            quiesced=self.quiesced,
            pages=memory.pages if memory else 0,
            memory_bytes=memory.added_bytes if memory else 0,
            memory_total_bytes=memory.total_bytes if memory else 0,
            disk_bytes=self.layers[-1].stored if self.layers else 0,
            disk_total_bytes=sum(layer.stored for layer in self.layers),
            device_bytes=memory.devices.size if memory else 0,
            pause_s=self.pause_s,
            fingerprint=memory.fingerprint if memory else "",
        )

    def to_bytes(self) -> bytes:
        return _sealed(_plain(self))

    @staticmethod
    def from_bytes(data: bytes, name: str) -> Manifest:
        """Raises CorruptSnapshot naming ``name``, also for one that names what would lie outside of the store."""
        with _Reading(name):
            manifest = _manifest(_unsealed(data))
            _check_names(manifest)
            return manifest


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """A start was recorded. ``layers`` are the workspace's own, bottom first; the machine writes one of the last two.

    ``pid_started`` is field 22 of /proc/PID/stat, so that a process with a reused number is not taken for this one.
    """

    workspace_id: WorkspaceId
    tenant_id: TenantId
    generation: int
    image: str
    size: MachineSize
    disk_gib: int
    disk_base: BaseRef
    layers: tuple[DiskId, ...]
    parent_id: SnapshotId | None  # the last complete snapshot when this was written
    pid: int | None = None
    pid_started: int | None = None
    version: int = field(default=VERSION)

    def to_bytes(self) -> bytes:
        return _sealed(_plain(self))

    @staticmethod
    def from_bytes(data: bytes, name: str) -> LiveRecord:
        """Raises CorruptSnapshot naming ``name``."""
        with _Reading(name):
            raw = _unsealed(data)
            raw["size"] = MachineSize(**raw["size"])
            raw["disk_base"] = _base_ref(raw["disk_base"])
            raw["layers"] = tuple(raw["layers"])
            return LiveRecord(**raw)


def check_base_names(ref: BaseRef) -> BaseRef:
    """Return it, or raise ValueError when its names could lead out of the image directory."""
    _require(_IMAGE.fullmatch(ref.image) is not None, "an image", ref.image)
    _require(ref.golden is None or _GOLDEN.fullmatch(ref.golden) is not None, "a golden snapshot", ref.golden)
    return ref


def base_file(base_id: BaseId) -> str:
    return f"{base_id}.ram"


def is_as_written(data: bytes) -> bool:
    """Whether a record that can be read is so to the last byte; its checksum is over what it says, not over how it is spelt."""
    return json.dumps(json.loads(data), indent=1).encode() + b"\n" == data


def explain_mismatch(manifest: Manifest, parts: Mapping[str, str]) -> str:
    """Which parts of the fingerprint differ between a snapshot and this host, for a person: "qemu: 7.2.22 is now 10.0.2"."""
    before = manifest.memory.fingerprint_parts if manifest.memory else {}
    names = [name for name in sorted({*before, *parts}) if before.get(name) != parts.get(name)]
    return "; ".join(f"{name}: {before.get(name, 'absent')} is now {parts.get(name, 'absent')}" for name in names)


class _Reading:
    """Turns every way a JSON file can be wrong into CorruptSnapshot."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | KeyError | TypeError | AttributeError):
            raise CorruptSnapshot(f"The record {self._name} is damaged: {error}.", file=self._name) from error


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and times as JSON values."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    fields = getattr(type(value), "__dataclass_fields__", None)
    return {name: _plain(getattr(value, name)) for name in fields} if fields else value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sealed(value: Any) -> bytes:
    digest = xxhash.xxh3_128_hexdigest(_canonical(value))
    return json.dumps({"checksum": digest, **value}, indent=1).encode() + b"\n"


def _unsealed(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(data)
    digest = value.pop("checksum")
    if digest != xxhash.xxh3_128_hexdigest(_canonical(value)):
        raise ValueError("its checksum does not hold")
    if value["version"] != VERSION:
        raise ValueError(f"it has format {value['version']}, this release reads {VERSION}")
    return value


def _manifest(raw: dict[str, Any]) -> Manifest:
    memory = raw["memory"]
    if memory is not None:
        memory["base"] = _base_ref(memory["base"])
        memory["index"] = FileFact(**memory["index"])
        memory["devices"] = FileFact(**memory["devices"])
        raw["memory"] = MemoryFacts(**memory)
    raw["created_at"] = datetime.fromisoformat(raw["created_at"])
    raw["size"] = MachineSize(**raw["size"])
    raw["disk_base"] = _base_ref(raw["disk_base"])
    raw["layers"] = tuple(DiskFact(**layer) for layer in raw["layers"])
    return Manifest(**raw)


def _check_names(manifest: Manifest) -> None:
    """Every name in it becomes part of a path, and whoever can write into an object store or a backup can write a manifest."""
    _require(is_id(manifest.snapshot_id, "snp"), "a snapshot", manifest.snapshot_id)
    _require(is_id(manifest.workspace_id, "ws"), "a workspace", manifest.workspace_id)
    _require(is_id(manifest.tenant_id, "ten"), "a tenant", manifest.tenant_id)
    _require(manifest.parent_id is None or is_id(manifest.parent_id, "snp"), "a snapshot", manifest.parent_id)
    _require(_IMAGE.fullmatch(manifest.image) is not None, "an image", manifest.image)
    check_base_names(manifest.disk_base)
    for layer in manifest.layers:
        _require(is_id(layer.disk_id, "dsk"), "a disk layer", layer.disk_id)
    memory, own = manifest.memory, manifest.private_base
    if memory is None:
        return
    check_base_names(memory.base)
    _require(own is None or is_id(own.base_id, "bas"), "a base", own)
    _require(_INDEX.fullmatch(memory.index.name) is not None, "an index", memory.index.name)
    _require(_DEVICES.fullmatch(memory.devices.name) is not None, "the devices", memory.devices.name)
    for segment_id in memory.segments:
        _require(is_id(segment_id, "seg"), "a segment", segment_id)


def _require(holds: bool, what: str, name: object) -> None:
    if not holds:
        raise ValueError(f"{name!r} is no name of {what}")


def _base_ref(raw: dict[str, Any]) -> BaseRef:
    """Earlier releases wrote none that is private."""
    private = raw.pop("private", None)
    return BaseRef(**raw, private=None if private is None else BaseFact(**private))
