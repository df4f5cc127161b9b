"""The kernel's initramfs archive format ("newc" cpio), written deterministically.

Source: Documentation/driver-api/early-userspace/buffer-format.rst of the Linux kernel.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One member. ``mode`` includes the file type; ``content`` is a link's target or a file's bytes; owner is root, time 0."""

    name: str  # without a leading slash
    mode: int
    content: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(name: str, mode: int = 0o755) -> Entry:
    return Entry(name, stat.S_IFDIR | mode)


def file(name: str, content: bytes, mode: int = 0o644) -> Entry:
    return Entry(name, stat.S_IFREG | mode, content)


def character_device(name: str, major: int, minor: int, mode: int = 0o600) -> Entry:
    return Entry(name, stat.S_IFCHR | mode, b"", (major, minor))


def archive(entries: Iterable[Entry]) -> bytes:
    """The archive's bytes, ready to be given to the kernel uncompressed."""
    parts = [_member(number, entry) for number, entry in enumerate(entries, start=1)]
    parts.append(_member(0, Entry("TRAILER!!!", 0)))
    whole = b"".join(parts)
    return whole + b"\0" * (-len(whole) % 512)


def _member(inode: int, entry: Entry) -> bytes:
    name = entry.name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    numbers = (inode, entry.mode, 0, 0, links, 0, len(entry.content), 0, 0, *entry.device, len(name), 0)
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + name
    return _padded(head) + _padded(entry.content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
