"""Durable writes: the one module that decides when a file exists.

Everything Perdure must find again after a crash is written here. The rules it follows are those of POSIX: bytes are durable after
``fsync`` of the file, a name is durable after ``fsync`` of its directory, and ``rename`` is atomic to every reader but durable
only after the directory's ``fsync``. So new content goes under a temporary name, is fsynced, takes its name by rename, and the
directory is fsynced last: at any instant a reader and the next start see the complete old thing or the complete new one.

Functions take a ``Disk``, the few operations that all of this is made of. Tests pass a recording disk (``tests/fakes/disk.py``)
that can show what a crash after any operation would have left.

A full disk raises ``NoSpace``; the old content is still there and the temporary file is gone. Names that start with ``.tmp-`` are
temporary: whoever opens a directory may remove what an earlier process left under them (``is_temporary``).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import AlreadyExists, NoSpace


@dataclass(frozen=True, slots=True)
class Hole:
    """A part of a file's content: so many zero bytes that take no room on the disk."""

    length: int


Bytes = bytes | bytearray | memoryview
Content = Bytes | Iterable[Bytes | Hole]

TEMPORARY = ".tmp-"
FULL = (errno.ENOSPC, errno.EDQUOT)
_IOV_MAX = 512


def _write_all(fd: int, parts: list[memoryview]) -> int:
    """``writev`` until everything is written; returns the number of bytes."""
    total = 0
    while parts:
        written = os.writev(fd, parts[:_IOV_MAX])
        total += written
        while written and parts:
            if written >= parts[0].nbytes:
                written -= parts.pop(0).nbytes
            else:
                parts[0] = parts[0][written:]
                written = 0
        while parts and parts[0].nbytes == 0:
            parts.pop(0)
    return total


class Handle:
    """A file open for writing at its end. Nothing is durable before ``sync``."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.size = size  # bytes, as of the last successful write
        self._fd = fd

    def write(self, *parts: Bytes) -> int:
        """Append the parts; returns the number of bytes. After a failure the file may hold a torn tail: see ``cut``."""
        views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        written = _write_all(self._fd, views)
        self.size += written
        return written

    def cut(self, size: int) -> None:
        """Drop everything after ``size`` bytes, or end the file with a hole up to there."""
        os.ftruncate(self._fd, size)
        os.lseek(self._fd, size, os.SEEK_SET)
        self.size = size

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Disk:
    """The operations that durable writes are made of, on the real file system. Raises OSError."""

    def create(self, path: Path, mode: int) -> Handle:
        """A new empty file; FileExistsError when the name is taken."""
        return Handle(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode), 0)

    def append(self, path: Path) -> Handle:
        """An existing file, to be written at its end."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return Handle(path, fd, os.lseek(fd, 0, os.SEEK_END))

    def rename(self, source: Path, destination: Path) -> None:
        source.rename(destination)

    def link(self, source: Path, destination: Path) -> None:
        destination.hardlink_to(source)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def make_dir(self, path: Path, mode: int) -> None:
        path.mkdir(mode)

    def remove_dir(self, path: Path) -> None:
        path.rmdir()

    def chmod(self, path: Path, mode: int) -> None:
        path.chmod(mode)

    def sync_file(self, path: Path) -> None:
        """Make durable what another process wrote to ``path``."""
        self._sync(path, os.O_RDONLY)

    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY)

    @staticmethod
    def _sync(path: Path, flags: int) -> None:
        fd = os.open(path, flags | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


DISK = Disk()


def is_temporary(path: Path) -> bool:
    """Whether a name belongs to a write that had not finished."""
    return path.name.startswith(TEMPORARY)


def temporary_beside(path: Path) -> Path:
    """A name in the same directory that ``is_temporary`` knows and nothing else uses."""
    return path.with_name(f"{TEMPORARY}{path.name[:60]}-{os.getpid()}-{os.urandom(4).hex()}")


@contextmanager
def no_space_named(path: Path) -> Iterator[None]:
    """Turn a full disk into ``NoSpace`` with a sentence; other OSErrors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise NoSpace(f"There is no room left on the disk to write {path.name}.", internal=f"{path}: {error}") from error
        raise


def write_file(path: Path, content: Content, *, mode: int = 0o644, disk: Disk = DISK) -> int:
    """Replace or make a file atomically and durably; returns the number of bytes.

    A crash leaves the complete old content (or no file) or the complete new one. Raises NoSpace.
    """
    temporary = temporary_beside(path)
    try:
        written = create_file(temporary, content, mode=mode, disk=disk)
        with no_space_named(path):
            disk.rename(temporary, path)
            disk.sync_dir(path.parent)
    except BaseException:
        _discard(temporary, disk)
        raise
    return written


def create_file(path: Path, content: Content, *, mode: int = 0o644, disk: Disk = DISK) -> int:
    """Write a new file in place and fsync it, but not its directory: for files in a directory that is published as a whole.

    Raises NoSpace (then the file is gone again) or AlreadyExists.
    """
    with no_space_named(path):
        try:
            handle = disk.create(path, mode)
        except FileExistsError as error:
            raise AlreadyExists(f"{path.name} exists already.", internal=str(path)) from error
    done = False
    try:
        with no_space_named(path):
            for part in [content] if isinstance(content, bytes | bytearray | memoryview) else content:
                if isinstance(part, Hole):
                    handle.cut(handle.size + part.length)
                else:
                    handle.write(part)
            handle.sync()
        done = True
    finally:
        handle.close()
        if not done:
            _discard(path, disk)
    return handle.size


def sync_tree(directory: Path, *, disk: Disk = DISK) -> None:
    """Fsync every regular file below ``directory``, then every directory, innermost first."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            path = Path(parent, name)
            if stat.S_ISREG(path.lstat().st_mode):
                disk.sync_file(path)
        disk.sync_dir(Path(parent))


def publish_dir(temporary: Path, final: Path, *, disk: Disk = DISK) -> None:
    """Give a finished directory its name: fsync all that is in it, rename, fsync the parent.

    Raises AlreadyExists when ``final`` exists and is not empty; ``temporary`` is left as it was.
    """
    with no_space_named(final):
        sync_tree(temporary, disk=disk)
        try:
            disk.rename(temporary, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise AlreadyExists(f"{final.name} exists already.", internal=str(final)) from error
            raise
        disk.sync_dir(final.parent)


def make_dir(path: Path, *, mode: int = 0o755, disk: Disk = DISK) -> None:
    """Make a directory and its missing parents, durably; one that exists is fine."""
    missing = [path]
    while not missing[-1].parent.is_dir():
        missing.append(missing[-1].parent)
    for directory in reversed(missing):
        with no_space_named(directory):
            try:
                disk.make_dir(directory, mode)
            except FileExistsError:
                if not directory.is_dir():
                    raise
            disk.sync_dir(directory.parent)  # also when it was there: whoever made it may have died before this


def rename(source: Path, destination: Path, *, disk: Disk = DISK) -> None:
    """Rename durably; the content must be durable already. Replaces ``destination``."""
    with no_space_named(destination):
        disk.rename(source, destination)
        disk.sync_dir(destination.parent)
        if source.parent != destination.parent:
            disk.sync_dir(source.parent)


def link(source: Path, destination: Path, *, disk: Disk = DISK) -> None:
    """A second durable name for a file; AlreadyExists when ``destination`` is taken."""
    with no_space_named(destination):
        try:
            disk.link(source, destination)
        except FileExistsError as error:
            raise AlreadyExists(f"{destination.name} exists already.", internal=str(destination)) from error
        disk.sync_dir(destination.parent)


def remove(path: Path, *, disk: Disk = DISK) -> bool:
    """Remove a file durably; False when there was none."""
    try:
        disk.unlink(path)
    except FileNotFoundError:
        return False
    disk.sync_dir(path.parent)
    return True


def remove_tree(path: Path, *, disk: Disk = DISK) -> bool:
    """Remove a directory and all in it, durably; links are removed, not followed. False when there was none."""
    if not path.is_dir() or path.is_symlink():
        return remove(path, disk=disk)
    for parent, directories, names in os.walk(path, topdown=False):
        for name in names:
            disk.unlink(Path(parent, name))
        for name in directories:
            below = Path(parent, name)
            if below.is_symlink():
                disk.unlink(below)
            else:
                disk.remove_dir(below)
    disk.remove_dir(path)
    disk.sync_dir(path.parent)
    return True


def stored_bytes(path: Path) -> int:
    """Bytes a file takes on the disk, holes not counted; 0 when there is none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def data_extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, end) of the parts of an open file that are not holes."""
    offset = 0
    while offset < size:
        try:
            start = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        offset = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, min(offset, size)


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user can still write on the file system of ``path``."""
    return shutil.disk_usage(path).free


def _discard(path: Path, disk: Disk) -> None:
    """Remove what a failed write left; that it cannot be removed must not hide the first error."""
    try:
        disk.unlink(path)
    except OSError:
        return
