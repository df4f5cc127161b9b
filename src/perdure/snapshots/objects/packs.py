"""Packs: objects with many chunks and an index of them at the end.

Layout (little endian)::

    magic "PDRPACK1" | flags u8 (1: sealed) | zeros, 7 | chunk ... | index | foot
    index   zstd of one row per chunk, in the order of the chunks: id, 32 bytes | stored bytes u32 | content bytes u32 | codec u8
    foot    index bytes u32 | chunks u32 | sha256 of pack id and index | magic "PDREND01"

A chunk is stored as it is or compressed by zstd. In a sealed pack chunks and index are each AES-256-GCM under a key that belongs
to this pack alone; the nonce is the chunk's number, the index has the last one. So a chunk moved, swapped or taken from elsewhere
is refused. A chunk's id is checked on every read in any case. Lengths are not hidden: who reads the store sees how well each
chunk compresses.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import zstandard
from cryptography.exceptions import InvalidTag

from perdure.core.errors import CorruptSnapshot
from perdure.snapshots.objects.keys import ScopeKeys
from perdure.wire.objects import Pack, PackId, Scope

ID_BYTES = 32
#: Largest content of a chunk: a region of 64 KiB with its head.
CHUNK_MAX = (64 << 10) + 64
HEAD = 16
_MAGIC = b"PDRPACK1"
_END = b"PDREND01"
_FOOT = struct.Struct("<II32s8s")
FOOT = _FOOT.size
_ROW = np.dtype([("id", "V32"), ("stored", "<u4"), ("content", "<u4"), ("codec", "u1")])
_INDEX_NONCE = (1 << 32) - 1
_SEALED = 1
_LEVEL = 3
_WORTH_COMPRESSING = 0.97
_CHUNKS_MAX = 1 << 20


class Codec(IntEnum):
    RAW = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk is."""

    pack_id: PackId
    number: int
    offset: int
    stored: int
    content: int
    codec: Codec


@dataclass(frozen=True, slots=True)
class PackIndex:
    """All chunks of one pack by id."""

    pack_id: PackId
    places: dict[bytes, Place]

    def stored_bytes(self) -> int:
        return sum(place.stored for place in self.places.values())


class PackBuilder:
    """Collects chunks for one pack. Not for several threads at once."""

    def __init__(self, pack_id: PackId, scope: Scope, keys: ScopeKeys) -> None:
        self.pack_id = pack_id
        self._scope = scope
        self._seal = keys.sealer(f"pack {pack_id}")
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._parts: list[bytes] = [_MAGIC + bytes((_SEALED if self._seal else 0,)) + bytes(7)]
        self._rows: list[tuple[bytes, int, int, int]] = []
        self._places: dict[bytes, Place] = {}
        self.size = HEAD

    def __contains__(self, chunk_id: bytes) -> bool:
        return chunk_id in self._places

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, chunk_id: bytes, content: bytes | memoryview) -> None:
        if not 0 < len(content) <= CHUNK_MAX:
            raise ValueError(f"a chunk holds 1 to {CHUNK_MAX} bytes, not {len(content)}")
        codec, payload = Codec.ZSTD, self._compressor.compress(content)
        if len(payload) > len(content) * _WORTH_COMPRESSING:
            codec, payload = Codec.RAW, bytes(content)
        number = len(self._rows)
        if self._seal is not None:
            payload = self._seal.encrypt(_nonce(number), payload, None)
        self._places[chunk_id] = Place(self.pack_id, number, self.size, len(payload), len(content), codec)
        self._rows.append((chunk_id, len(payload), len(content), codec))
        self._parts.append(payload)
        self.size += len(payload)

    def build(self) -> tuple[Pack, bytes, PackIndex]:
        """The pack's row, its object and its index."""
        index = self._compressor.compress(np.array(self._rows, _ROW).tobytes())
        if self._seal is not None:
            index = self._seal.encrypt(_nonce(_INDEX_NONCE), index, None)
        foot = _FOOT.pack(len(index), len(self._rows), _digest(self.pack_id, index), _END)
        data = b"".join((*self._parts, index, foot))
        pack = Pack(self.pack_id, self._scope, len(data), len(index) + FOOT)
        return pack, data, PackIndex(self.pack_id, self._places)


def index_bytes(pack_id: PackId, foot: bytes) -> int:
    """From a pack's last bytes the length of index and foot. Raises CorruptSnapshot."""
    if len(foot) != FOOT or foot[-8:] != _END:
        raise _corrupt(pack_id, "it does not end like a pack")
    length: int = _FOOT.unpack(foot)[0]
    return length + FOOT


def read_index(pack_id: PackId, size: int, tail: bytes, keys: ScopeKeys) -> PackIndex:
    """The index from a pack's last bytes. Raises CorruptSnapshot naming the pack."""
    if len(tail) != index_bytes(pack_id, tail[-FOOT:]):
        raise _corrupt(pack_id, "its index has another length than its foot says")
    _, count, digest, _ = _FOOT.unpack(tail[-FOOT:])
    index, seal = tail[:-FOOT], keys.sealer(f"pack {pack_id}")
    try:
        if digest != _digest(pack_id, index) or count > _CHUNKS_MAX:
            raise ValueError("its index's checksum does not hold")
        if seal is not None:
            index = seal.decrypt(_nonce(_INDEX_NONCE), index, None)
        raw = zstandard.ZstdDecompressor().decompress(index, max_output_size=max(1, count * _ROW.itemsize))
        rows = np.frombuffer(raw, _ROW)
        if len(rows) != count or HEAD + int(rows["stored"].sum(dtype=np.int64)) + len(tail) != size:
            raise ValueError("its index does not fit its size")
        if count and (int(rows["content"].max()) > CHUNK_MAX or int(rows["codec"].max()) > max(Codec)):
            raise ValueError("its index holds what no chunk can be")
    except (ValueError, zstandard.ZstdError, InvalidTag) as error:
        raise _corrupt(pack_id, str(error) or "its index cannot be unsealed") from error
    places, at = {}, HEAD
    for number, (chunk_id, stored, content, codec) in enumerate(rows.tolist()):
        places[bytes(chunk_id)] = Place(pack_id, number, at, stored, content, Codec(codec))
        at += stored
    return PackIndex(pack_id, places)


class ChunkReader:
    """Decodes the chunks of one pack."""

    def __init__(self, pack_id: PackId, keys: ScopeKeys) -> None:
        self._pack_id = pack_id
        self._keys = keys
        self._seal = keys.sealer(f"pack {pack_id}")

    def content(self, chunk_id: bytes, place: Place, stored: bytes | memoryview) -> bytes:
        """Raises CorruptSnapshot naming pack and chunk unless these are the bytes that the id names."""
        try:
            data = self._opened(place, bytes(stored))
        except (ValueError, zstandard.ZstdError, InvalidTag) as error:
            raise self._damaged(chunk_id, "cannot be decoded") from error
        if len(data) != place.content or self._keys.chunk_id(data) != chunk_id:
            raise self._damaged(chunk_id, "does not hold what its name says")
        return data

    def _opened(self, place: Place, data: bytes) -> bytes:
        if self._seal is not None:
            data = self._seal.decrypt(_nonce(place.number), data, None)
        if place.codec is Codec.ZSTD:
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=CHUNK_MAX)
        return data

    def _damaged(self, chunk_id: bytes, why: str) -> CorruptSnapshot:
        return _corrupt(self._pack_id, f"its chunk {chunk_id.hex()[:16]} {why}")


def joined(places: Sequence[Place], *, gap: int, limit: int) -> list[list[Place]]:
    """Places of one pack grouped into reads: neighbours at most ``gap`` bytes apart, at most ``limit`` bytes together."""
    groups: list[list[Place]] = []
    for place in sorted(places, key=lambda place: place.offset):
        last = groups[-1] if groups else None
        if (
            last
            and place.offset - (last[-1].offset + last[-1].stored) <= gap
            and place.offset + place.stored - last[0].offset <= limit
        ):
            last.append(place)
        else:
            groups.append([place])
    return groups


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _digest(pack_id: PackId, index: bytes) -> bytes:
    return hashlib.sha256(pack_id.encode() + b"\0" + index).digest()


def _corrupt(pack_id: PackId, why: str) -> CorruptSnapshot:
    return CorruptSnapshot(
        f"The stored object {pack_id} is damaged: {why}.",
        hint="Wake the workspace from a snapshot that does not need it (perdure snapshot ls NAME).",
    )
