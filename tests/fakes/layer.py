"""What a guest writes into a disk layer and reads from it, one cluster at a time, without QEMU.

Only for layers as ``snapshots.layers`` makes them. The reference counts are left as they are: nobody here goes by them.
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

CLUSTER = 4096
_ENTRIES = CLUSTER // 8
_OFFSET = 0x00FF_FFFF_FFFF_FE00
_COPIED = 1 << 63


def write_cluster(path: Path, number: int, data: bytes) -> None:
    """Put ``data`` at the begin of a cluster of the disk. A new one is whole before a table names it. Raises OSError, with the
    layer as it was, when there is no room."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        l1_at = _entry(fd, 40) + 8 * (number // _ENTRIES)
        table = _entry(fd, l1_at) & _OFFSET
        there = _entry(fd, table + 8 * (number % _ENTRIES)) & _OFFSET if table else 0
        if there:
            _write(fd, data, there)
            return
        end = -(-os.fstat(fd).st_size // CLUSTER) * CLUSTER
        if table:
            _append(fd, data.ljust(CLUSTER, b"\0"), end)
            _write(fd, struct.pack(">Q", end | _COPIED), table + 8 * (number % _ENTRIES))
            return
        entries = bytearray(CLUSTER)
        struct.pack_into(">Q", entries, 8 * (number % _ENTRIES), (end + CLUSTER) | _COPIED)
        _append(fd, bytes(entries) + data.ljust(CLUSTER, b"\0"), end)
        _write(fd, struct.pack(">Q", end | _COPIED), l1_at)
    finally:
        os.close(fd)


def read_cluster(path: Path, number: int) -> bytes:
    """Empty when the layer does not know it, when what it knows is not there, and when it is no layer of a workspace's."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.pread(fd, 4, 0) != b"QFI\xfb":
            return b""
        table = _entry(fd, _entry(fd, 40) + 8 * (number // _ENTRIES)) & _OFFSET
        offset = _entry(fd, table + 8 * (number % _ENTRIES)) & _OFFSET if table else 0
        return os.pread(fd, CLUSTER, offset) if offset else b""
    finally:
        os.close(fd)


def _entry(fd: int, at: int) -> int:
    return int.from_bytes(os.pread(fd, 8, at), "big")


def _append(fd: int, data: bytes, end: int) -> None:
    before = os.fstat(fd).st_size
    try:
        _write(fd, data, end)
    except OSError:
        os.ftruncate(fd, before)
        raise


def _write(fd: int, data: bytes, at: int) -> None:
    if os.pwrite(fd, data, at) < len(data):
        raise OSError(errno.ENOSPC, "only a part was written")
