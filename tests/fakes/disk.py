"""A recording disk: does every operation for real below ``root``, and can show what a crash after any of them would have left.

The model is POSIX at its least helpful: bytes written since the last ``fsync`` of a file, and names changed since the last
``fsync`` of their directory, may be there, absent or (bytes) half there and half garbage.
"""

from __future__ import annotations

import copy
import errno
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from perdure.core.files import Disk, Handle


class Crash(StrEnum):
    """What becomes of everything that was not synced."""

    KEPT = "kept"  # only the process died
    DROPPED = "dropped"  # nothing of it reached the platter
    TORN = "torn"  # names arrived, bytes half
    MIXED = "mixed"  # each name is as it was after some change since the last sync, each file kept some prefix of its bytes


@dataclass
class _File:
    volatile: bytes = b""
    durable: bytes = b""


@dataclass
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    #: What the names were at the last sync and after each change since; a crash may land on any of them.
    history: list[dict[str, _File | _Directory]] = field(default_factory=lambda: [{}])

    def changed(self) -> None:
        self.history.append(dict(self.entries))

    def sync(self) -> None:
        self.history = [dict(self.entries)]


class QuickDisk(Disk):
    """The real file system without waiting for it: for what a test throws away."""

    def create(self, path: Path, mode: int) -> Handle:
        return _QuickHandle(path, super().create(path, mode)._fd, 0)

    def sync_file(self, path: Path) -> None:
        return None

    def sync_dir(self, path: Path) -> None:
        return None


class _QuickHandle(Handle):
    def sync(self) -> None:
        return None


class _RecordingHandle(Handle):
    def __init__(self, disk: RecordingDisk, inner: Handle, node: _File) -> None:
        super().__init__(inner.path, inner._fd, inner.size)
        self._disk = disk
        self._node = node

    def write(self, *parts: bytes | bytearray | memoryview) -> int:
        data = b"".join(bytes(part) for part in parts)
        self._disk.fill_at(self.path.name, len(data))
        room = self._disk.room
        accepted = data if room is None else data[:room]
        written = super().write(accepted)
        with self._disk.guard:
            self._node.volatile += accepted
            self._disk.step(f"write {self.path.name} {written}")
        if room is not None:
            self._disk.room = room - written
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    def cut(self, size: int) -> None:
        super().cut(size)
        with self._disk.guard:
            self._node.volatile = self._node.volatile[:size].ljust(size, b"\0")
            self._disk.step(f"cut {self.path.name}")

    def sync(self) -> None:
        with self._disk.guard:
            self._node.durable = self._node.volatile
            self._disk.step(f"sync {self.path.name}")


class RecordingDisk(Disk):
    """``operations`` names what was done; ``states[i]`` is the file system after the first ``i`` operations.

    Threads may use it: one operation happens at a time.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[str] = []
        self.states: list[_Directory] = [_Directory()]
        self.room: int | None = None  # bytes until the disk is full
        #: The n-th write to a file whose name it picks meets a full disk, half-way; so do all after it until ``make_room``.
        self.full_at: tuple[Callable[[str], bool], int] | None = None
        self.met_full: str | None = None  # the name of that file
        self.keeps_states = True
        self.guard = threading.RLock()
        self._tree = _Directory()

    def step(self, operation: str) -> None:
        with self.guard:
            self.operations.append(operation)
            if self.keeps_states:
                self.states.append(copy.deepcopy(self._tree))

    def fill_at(self, name: str, length: int) -> None:
        """A write of so many bytes begins: is it the one at which the disk is full?"""
        if self.full_at is None or not self.full_at[0](name):
            return
        picks, left = self.full_at
        self.full_at = (picks, left - 1) if left > 1 else None
        if left == 1:
            self.room, self.met_full = length // 2, name

    def make_room(self) -> None:
        self.room = None

    def create(self, path: Path, mode: int) -> Handle:
        inner = super().create(path, mode)
        node = _File()
        with self.guard:
            self._set(path, node)
            self.step(f"create {path.name}")
        return _RecordingHandle(self, inner, node)

    def append(self, path: Path) -> Handle:
        node = self._get(path)
        assert isinstance(node, _File)
        return _RecordingHandle(self, super().append(path), node)

    def rename(self, source: Path, destination: Path) -> None:
        super().rename(source, destination)
        with self.guard:
            node = self._drop(source)
            self._set(destination, node)
            self.step(f"rename {source.name} {destination.name}")

    def link(self, source: Path, destination: Path) -> None:
        super().link(source, destination)
        with self.guard:
            self._set(destination, self._get(source))
            self.step(f"link {destination.name}")

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        with self.guard:
            if path.name in self._directory(path.parent).entries:
                self._drop(path)
            self.step(f"unlink {path.name}")

    def make_dir(self, path: Path, mode: int) -> None:
        super().make_dir(path, mode)
        with self.guard:
            self._set(path, _Directory())
            self.step(f"mkdir {path.name}")

    def remove_dir(self, path: Path) -> None:
        super().remove_dir(path)
        with self.guard:
            self._drop(path)
            self.step(f"rmdir {path.name}")

    def wrote(self, path: Path) -> None:
        """Another process wrote to a file: it is known here from now on, with the content it has, none of that synced."""
        with self.guard:
            self._external(path).volatile = path.read_bytes()
            self.step(f"external write {path.name}")

    def sync_file(self, path: Path) -> None:
        with self.guard:
            node = self._external(path)
            node.volatile = node.durable = path.read_bytes()
            self.step(f"sync {path.name}")

    def _external(self, path: Path) -> _File:
        node = self._directory(path.parent).entries.get(path.name)
        if node is None:
            self._set(path, node := _File())
        assert isinstance(node, _File)
        return node

    def sync_dir(self, path: Path) -> None:
        if path == self.root or self.root in path.parents:
            with self.guard:
                self._directory(path).sync()
                self.step(f"syncdir {path.name}")

    def materialise(self, after: int, crash: Crash, target: Path, *, seed: int = 0) -> None:
        """Write to the empty directory ``target`` what a crash after the first ``after`` operations may leave."""
        _write(self.states[after], crash, target, random.Random(seed))

    def _directory(self, path: Path) -> _Directory:
        node: _File | _Directory = self._tree
        for part in path.relative_to(self.root).parts:
            assert isinstance(node, _Directory)
            node = node.entries[part]
        assert isinstance(node, _Directory)
        return node

    def _get(self, path: Path) -> _File | _Directory:
        return self._directory(path.parent).entries[path.name]

    def _set(self, path: Path, node: _File | _Directory) -> None:
        directory = self._directory(path.parent)
        directory.entries[path.name] = node
        directory.changed()

    def _drop(self, path: Path) -> _File | _Directory:
        directory = self._directory(path.parent)
        node = directory.entries.pop(path.name)
        directory.changed()
        return node


def _entries(directory: _Directory, crash: Crash, rng: random.Random) -> dict[str, _File | _Directory]:
    if crash is Crash.DROPPED:
        return directory.history[0]
    if crash is not Crash.MIXED:
        return directory.entries
    names = sorted({name for names in directory.history for name in names})
    picked = {name: rng.choice(directory.history).get(name) for name in names}
    return {name: node for name, node in picked.items() if node is not None}


def _bytes(file: _File, crash: Crash, rng: random.Random) -> bytes:
    if crash is Crash.KEPT or file.volatile == file.durable:
        return file.volatile
    if crash is Crash.DROPPED:
        return file.durable
    start = len(file.durable) if file.volatile.startswith(file.durable) else 0
    kept = (len(file.volatile) - start) // 2 if crash is Crash.TORN else rng.randint(0, len(file.volatile) - start)
    lost = len(file.volatile) - start - kept
    return file.volatile[: start + kept] + bytes(lost // 2 if crash is Crash.TORN else 0)


def _write(directory: _Directory, crash: Crash, target: Path, rng: random.Random) -> None:
    for name, node in _entries(directory, crash, rng).items():
        if isinstance(node, _Directory):
            (target / name).mkdir()
            _write(node, crash, target / name, rng)
        else:
            (target / name).write_bytes(_bytes(node, crash, rng))
