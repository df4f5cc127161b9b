"""The manifest of a backup. It is written when all it names is there, so a backup exists if and only if its manifest does.

JSON with a checksum over the rest. It names items of the place by scope, name and attempt, with size and checksum of each one's
own manifest; those name chunks by their content. So whoever has checked this file has a checksum for every byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from perdure.core.errors import CorruptData, HostUnfit, InvalidRequest
from perdure.core.ids import is_id
from perdure.images.recipe import is_image_name
from perdure.wire.objects import ItemKey, Scope

#: Grows when an earlier release could not restore what this one writes. A backup with something left out has the second, for who
#: does not know of it would restore a catalogue that names what is not there.
FORMAT, FORMAT_LEFT_OUT = 1, 2
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY_FILE = ".key"


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item of the backup: which attempt, and what its manifest must be."""

    scope: str
    name: str
    attempt: int
    size: int
    checksum: str

    @property
    def key(self) -> ItemKey:
        return ItemKey(Scope(self.scope), self.name)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A snapshot that was damaged when the backup was made. ``has_disk``: its disk was whole, and is among the snapshots of the
    backup, without the memory. ``heads``: the workspaces whose last snapshot it was. ``snapshot_id`` None: a workspace had no
    snapshot, and its image is what is damaged."""

    snapshot_id: str | None
    workspace: str
    why: str
    has_disk: bool = False
    heads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackupRecord:
    """``sealed``: tenants' content is encrypted; ``keys`` are their wrapped keys (base64 by file name), worth nothing without the
    master key, which is ``master_key`` (base64) if it was asked to be in here. ``key_mark`` tells whether a key is that one."""

    id: str
    created_at: datetime
    release: str
    schema: str
    postgres: int
    dump: StoredItem
    images: tuple[StoredItem, ...]
    snapshots: tuple[StoredItem, ...]
    names: dict[str, str]  # of images: name -> digest
    workspaces: int
    sealed: bool
    key_mark: str | None
    keys: dict[str, str] = field(default_factory=dict)
    master_key: str | None = None
    left_out: tuple[LeftOut, ...] = ()

    @property
    def items(self) -> tuple[StoredItem, ...]:
        return (*self.images, *self.snapshots, self.dump)

    def to_bytes(self) -> bytes:
        made = FORMAT_LEFT_OUT if self.left_out else FORMAT
        plain = json.loads(json.dumps(asdict(self) | {"created_at": self.created_at.isoformat(), "format": made}))
        if not self.left_out:
            del plain["left_out"]  # a backup that is whole is one that every release can read
        return json.dumps({"checksum": _digest(plain), **plain}, indent=1).encode() + b"\n"


def read_record(data: bytes, name: str) -> BackupRecord:
    """Raises CorruptData naming the backup, or HostUnfit when a newer release has made it."""
    try:
        plain: dict[str, Any] = json.loads(data)
        digest = plain.pop("checksum")
        if digest != _digest(plain):
            raise ValueError("its checksum does not hold")
        made = plain.pop("format")
        if made not in (FORMAT, FORMAT_LEFT_OUT):
            raise HostUnfit(
                f"The backup {name} has format {made}, made by Perdure {plain['release']}; this release reads formats up to "
                f"{FORMAT_LEFT_OUT}.",
                hint=f"Restore it with Perdure {plain['release']} or a newer one.",
            )
        plain["created_at"] = datetime.fromisoformat(plain["created_at"])
        plain["dump"] = StoredItem(**plain["dump"])
        for key in ("images", "snapshots"):
            plain[key] = tuple(StoredItem(**one) for one in plain[key])
        plain["left_out"] = tuple(LeftOut(**one | {"heads": tuple(one["heads"])}) for one in plain.get("left_out", ()))
        record = BackupRecord(**plain)
        _check_names(record)
        return record
    except (ValueError, KeyError, TypeError, AttributeError, InvalidRequest) as error:
        raise CorruptData(
            f"The manifest of the backup {name} is damaged: {error}.", hint="Restore another backup of this place (--backup ID)."
        ) from error


def _check_names(record: BackupRecord) -> None:
    """Names become files of the home, and whoever can write into the place can write a manifest."""
    for item in record.items:
        _ = item.key  # InvalidRequest where it is none
    for name, digest in record.names.items():
        if not is_image_name(name) or _DIGEST.fullmatch(digest) is None:
            raise ValueError(f"no image can have the name {name!r} and the digest {digest!r}")
    for name in record.keys:
        if not name.endswith(_KEY_FILE) or not is_id(name.removesuffix(_KEY_FILE), "ten"):
            raise ValueError(f"no tenant has a key of the name {name!r}")


def _digest(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
