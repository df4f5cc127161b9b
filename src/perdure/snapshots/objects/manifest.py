"""The manifest of an item: which files it has, and of which chunks each consists.

It names chunks, not packs: packs may be rewritten while manifests stay. It carries ``facts``, the caller's own record (for a
snapshot: tenant, workspace, parent, generation and the rest of its local manifest), so that a catalogue can be made from the
store alone.

Layout: magic "PDRITEM1" | body | sha256 of all before it. The body, sealed where the scope has keys, is: header bytes u32 | JSON
header | zstd of the columns: for each file its chunks' numbers, u32 each, and ids, 32 bytes each.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from cryptography.exceptions import InvalidTag

from perdure.core.errors import CorruptSnapshot, InvalidRequest
from perdure.snapshots.objects.chunks import BLOCK, Kind
from perdure.snapshots.objects.keys import ScopeKeys
from perdure.snapshots.objects.packs import ID_BYTES
from perdure.wire.objects import ItemKey, Scope

_MAGIC = b"PDRITEM1"
_VERSION = 1
_NONCE_BYTES = 12
_SUM = 32

Numbers = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """``numbers`` ascend; ``ids`` has 32 bytes for each."""

    name: str
    kind: Kind
    size: int
    numbers: Numbers
    ids: bytes

    def chunk_ids(self) -> list[bytes]:
        return [self.ids[at : at + ID_BYTES] for at in range(0, len(self.ids), ID_BYTES)]

    def length_of(self, number: int) -> int:
        """Bytes of a block."""
        return min(BLOCK, self.size - number * BLOCK)


@dataclass(frozen=True, slots=True)
class ItemManifest:
    """All of an item. ``attempt`` is the upload that made this; with the key it is the manifest's name."""

    key: ItemKey
    attempt: int
    files: tuple[StoredFile, ...]
    needs: tuple[ItemKey, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def file(self, name: str) -> StoredFile:
        """Raises CorruptSnapshot when there is none of that name."""
        for file in self.files:
            if file.name == name:
                return file
        raise CorruptSnapshot(f"The stored item {self.key} has no file {name}.")

    def chunk_ids(self) -> frozenset[bytes]:
        return frozenset(chunk_id for file in self.files for chunk_id in file.chunk_ids())

    def to_bytes(self, keys: ScopeKeys) -> bytes:
        if len({file.name for file in self.files}) != len(self.files):
            raise InvalidRequest(f"The item {self.key} has two files of one name.")
        header = json.dumps(
            {
                "version": _VERSION,
                "scope": self.key.scope,
                "name": self.key.name,
                "attempt": self.attempt,
                "needs": [[need.scope, need.name] for need in self.needs],
                "facts": self.facts,
                "files": [[file.name, file.kind, file.size, len(file.numbers)] for file in self.files],
            }
        ).encode()
        columns = b"".join(part for file in self.files for part in (file.numbers.astype("<u4").tobytes(), file.ids))
        body = struct.pack("<I", len(header)) + header + zstandard.ZstdCompressor(level=1).compress(columns)
        seal = keys.sealer(f"item {self.key} {self.attempt}")
        if seal is not None:
            # Random, since attempts are numbered by a database that may be restored to an earlier day.
            nonce = os.urandom(_NONCE_BYTES)
            body = nonce + seal.encrypt(nonce, body, None)
        data = _MAGIC + body
        return data + hashlib.sha256(data).digest()


def read_manifest(key: ItemKey, attempt: int, data: bytes, keys: ScopeKeys) -> ItemManifest:
    """Raises CorruptSnapshot naming the item unless this is the manifest of this attempt."""
    try:
        if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(data[:-_SUM]).digest() != data[-_SUM:]:
            raise ValueError("its checksum does not hold")
        body = data[len(_MAGIC) : -_SUM]
        seal = keys.sealer(f"item {key} {attempt}")
        if seal is not None:
            body = seal.decrypt(body[:_NONCE_BYTES], body[_NONCE_BYTES:], None)
        manifest = _parsed(body)
        if (manifest.key, manifest.attempt) != (key, attempt):
            raise ValueError(f"it belongs to {manifest.key}")
    except (ValueError, KeyError, TypeError, struct.error, zstandard.ZstdError, InvalidTag, InvalidRequest) as error:
        raise CorruptSnapshot(
            f"The stored manifest of {key} is damaged: {str(error) or 'it cannot be unsealed'}.",
            hint="Wake the workspace from an earlier snapshot (perdure snapshot ls NAME).",
        ) from error
    return manifest


def _parsed(body: bytes) -> ItemManifest:
    (length,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + length])
    if header["version"] != _VERSION:
        raise ValueError(f"it has format {header['version']}, this release reads {_VERSION}")
    counts = [int(count) for _, _, _, count in header["files"]]
    total = sum(counts) * (4 + ID_BYTES)
    columns = zstandard.ZstdDecompressor().decompress(body[4 + length :], max_output_size=max(1, total))
    if len(columns) != total or min(counts, default=0) < 0:
        raise ValueError("its columns have the wrong length")
    files, at = [], 0
    for (name, kind, size, _), count in zip(header["files"], counts, strict=True):
        numbers = np.frombuffer(columns, "<u4", count, at)
        at += 4 * count
        ids = columns[at : at + ID_BYTES * count]
        at += ID_BYTES * count
        if count and (not (numbers[1:] > numbers[:-1]).all() or int(numbers[-1]) * BLOCK >= int(size)):
            raise ValueError(f"the chunks of its file {name} are out of order")
        files.append(StoredFile(str(name), Kind(kind), int(size), numbers, ids))
    key = ItemKey(Scope(header["scope"]), header["name"])
    needs = tuple(ItemKey(Scope(scope), name) for scope, name in header["needs"])
    return ItemManifest(key, int(header["attempt"]), tuple(files), needs, header["facts"])
