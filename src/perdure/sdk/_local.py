"""The local side of copying files, where everything that comes from a workspace is an attacker's.

``LocalTree`` never follows a link below its destination: every directory is opened by descriptor with ``O_NOFOLLOW`` and every
file is made under a temporary name beside its place and renamed. A link is made only if it is relative, climbs (``..``) only at
its beginning and not above the destination: since the directories it climbs are real ones, it then stays inside.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from perdure.core.errors import CorruptData, InvalidRequest, NoSpace, NotFound, PerdureError
from perdure.wire import public
from perdure.wire.node import FileKind

DEPTH_MAX = 128
ENTRIES_MAX = 2_000_000
NAME_BYTES_MAX = 255
#: A file may have grown by this much since its size was listed; one without a size (as in /proc) may have this much.
GROWTH_BYTES_MAX = 64 << 20
_HASHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Skipped:
    path: str
    reason: str


@dataclass(slots=True)
class Transfer:
    """What a copy did."""

    files: int = 0
    directories: int = 0
    links: int = 0
    bytes: int = 0
    skipped: list[Skipped] = field(default_factory=list)


#: Told how many more bytes have been copied.
OnBytes = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class LocalFile:
    """Something to upload. ``relative`` is below the root, "" for the root itself."""

    path: Path
    relative: str
    is_directory: bool
    mode: int
    size: int
    modified_ns: int = 0
    target: str | None = None  # of a symbolic link


def local_error(path: str | os.PathLike[str], error: OSError) -> PerdureError:
    """One sentence for what the local file system refused."""
    shown = os.fspath(path)
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace(f"There is no space left for {shown!r}.", hint="Free some local disk space and copy again.")
    if error.errno == errno.ENOENT:
        return NotFound(f"There is no local file {shown!r}.", hint="Check the path.")
    return InvalidRequest(f"The local path {shown!r} cannot be used: {os.strerror(error.errno or 0)}.", hint="Check the path.")


@contextmanager
def read_local(entry: LocalFile) -> Iterator[IO[bytes]]:
    """The file, open for reading."""
    try:
        file = entry.path.open("rb")
    except OSError as error:
        raise local_error(entry.path, error) from error
    with file:
        yield file


def walk_local(local: str | os.PathLike[str], transfer: Transfer) -> Iterator[LocalFile]:
    """A file or a tree, parents first. Links that stay inside are links; others to files are followed. What else there is, links
    out of it to directories and special files, is noted as skipped."""
    root = Path(local)
    try:
        facts = root.stat()
    except OSError as error:
        raise local_error(root, error) from error
    yield from _walk(root, "", facts, transfer)


def _walk(path: Path, relative: str, facts: os.stat_result, transfer: Transfer) -> Iterator[LocalFile]:
    mode, moment = stat.S_IMODE(facts.st_mode) & 0o777, facts.st_mtime_ns
    if stat.S_ISREG(facts.st_mode):
        yield LocalFile(path, relative, False, mode, facts.st_size, moment)
        return
    if not stat.S_ISDIR(facts.st_mode):
        transfer.skipped.append(Skipped(str(path), "it is a device, socket or pipe"))
        return
    yield LocalFile(path, relative, True, mode, 0, moment)
    try:
        names = sorted(child.name for child in path.iterdir())
    except OSError as error:
        raise local_error(path, error) from error
    depth = len(Path(relative).parts)
    for name in names:
        child, below = path / name, f"{relative}/{name}" if relative else name
        try:
            found = child.lstat()
            if stat.S_ISLNK(found.st_mode):
                link = _inner_link(child, below, found, depth)
                if link is not None:
                    yield link
                    continue
                found = child.stat()
        except OSError:
            transfer.skipped.append(Skipped(str(child), "it is a link to nothing"))
            continue
        if child.is_symlink() and stat.S_ISDIR(found.st_mode):
            transfer.skipped.append(Skipped(str(child), "it is a link to a directory"))
            continue
        yield from _walk(child, below, found, transfer)


def _inner_link(path: Path, relative: str, facts: os.stat_result, depth: int) -> LocalFile | None:
    target = str(path.readlink())
    if _link_problem(target, depth) is not None:
        return None
    return LocalFile(path, relative, False, 0o777, 0, facts.st_mtime_ns, target)


class LocalFileWriter:
    """Writes one file and counts. ``length`` may not be 0 at first: an earlier copy has come so far."""

    def __init__(self, descriptor: int, shown: str, limit: int, length: int = 0) -> None:
        self._descriptor = descriptor
        self._shown = shown
        self._limit = limit
        self.length = length
        os.lseek(descriptor, length, os.SEEK_SET)

    def write(self, data: bytes) -> None:
        self.length += len(data)
        if self.length > self._limit:
            raise InvalidRequest(
                f"{self._shown!r} is much larger than the workspace said; the copy was stopped.",
                hint="Copy it by itself if you trust it.",
            )
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def restart(self) -> None:
        """Throw away what was written."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.length = 0

    def sha256(self) -> str:
        """Of all that was written, by this copy and an earlier one."""
        digest, position = hashlib.sha256(), 0
        while piece := os.pread(self._descriptor, _HASHED_BYTES, position):
            digest.update(piece)
            position += len(piece)
        return digest.hexdigest()


class LocalTree:
    """The destination of a download: exactly ``local``, a directory or a file as ``root`` is."""

    def __init__(self, local: str | os.PathLike[str], root: public.FileInfo) -> None:
        self._local = Path(local)
        self._root = root
        self._open: list[int] = []  # descriptors: of the root's parent (file) or of the directories being filled
        self._names: list[set[str]] = []
        self._entries = 0
        self.transfer = Transfer()

    def __enter__(self) -> Self:
        if self._root.kind is not FileKind.DIRECTORY:
            try:
                self._open.append(os.open(self._local.parent, os.O_RDONLY | os.O_DIRECTORY))
            except OSError as error:
                raise local_error(self._local.parent, error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        while self._open:
            os.close(self._open.pop())

    # --------------------------------------------------------------------------------------------------------- directories

    def enter(self, relative: tuple[str, ...], info: public.FileInfo) -> bool:
        """Make or open a directory and go into it; False when its place is taken by something else."""
        if len(relative) > DEPTH_MAX:
            self.skip(relative, f"it is more than {DEPTH_MAX} directories deep")
            return False
        try:
            if not relative:
                self._local.mkdir(exist_ok=True)
                descriptor = os.open(self._local, os.O_RDONLY | os.O_DIRECTORY)
            else:
                self._make(relative[-1])
                descriptor = os.open(relative[-1], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._open[-1])
        except OSError as error:
            if not relative or error.errno not in {errno.ENOTDIR, errno.ELOOP, errno.EEXIST}:
                raise local_error(self._shown(relative), error) from error
            self.skip(relative, "something that is not a directory is in its place")
            return False
        self._open.append(descriptor)
        self._names.append(set())
        self.transfer.directories += 1
        return True

    def _make(self, name: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._open[-1])

    def leave(self, relative: tuple[str, ...], info: public.FileInfo, *, modified_ns: int | None = None) -> None:
        """Done with a directory that was entered: give it its mode, and its time if that is known."""
        descriptor = self._open.pop()
        self._names.pop()
        try:
            if relative:
                os.fchmod(descriptor, info.mode & 0o777 | 0o700)
            if modified_ns is not None:
                os.utime(descriptor, ns=(modified_ns, modified_ns))
        finally:
            os.close(descriptor)

    def admit(self, relative: tuple[str, ...], child: public.FileInfo) -> str | None:
        """The exact name of an entry of the current directory, None when it must not be used here."""
        return self.admit_name(relative, child.fs_name)

    def admit_name(self, relative: tuple[str, ...], name: str) -> str | None:
        self._entries += 1
        if self._entries > ENTRIES_MAX:
            flood = f"The workspace lists more than {ENTRIES_MAX} files; the copy was stopped."
            raise InvalidRequest(flood, hint="Copy less at once.")
        problem: str | None = _name_problem(name)
        if problem is None and name in self._names[-1]:
            problem = "the workspace listed the name twice"
        if problem is not None:
            self.skip((*relative, name), problem)
            return None
        self._names[-1].add(name)
        return name

    # --------------------------------------------------------------------------------------------------------------- files

    @contextmanager
    def create(
        self, relative: tuple[str, ...], info: public.FileInfo, *, modified_ns: int | None = None, part: str | None = None
    ) -> Iterator[LocalFileWriter]:
        """A file that appears, complete, when the block ends well.

        With ``part``, a name of its own, what was written stays otherwise, and the next copy under that name goes on after it.
        """
        name = relative[-1] if relative else self._local.name
        shown = self._shown(relative)
        temporary = part or f".perdure-{secrets.token_hex(8)}"
        where = self._open[-1]
        try:
            limit = self._limit(info, relative, shown)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (0 if part else os.O_EXCL)
            descriptor = os.open(temporary, flags, 0o600, dir_fd=where)
            begun = _own_length(descriptor) if part else 0
            try:
                writer = LocalFileWriter(descriptor, shown, limit, begun)
                yield writer
                mode = 0o644 if info.kind is FileKind.SYMLINK else info.mode & 0o777
                os.fchmod(descriptor, mode)
                if modified_ns is not None:
                    os.utime(descriptor, ns=(modified_ns, modified_ns))
                os.replace(temporary, name, src_dir_fd=where, dst_dir_fd=where)
            except BaseException as error:
                if not part or isinstance(error, InvalidRequest | CorruptData):  # what cannot be gone on with
                    os.unlink(temporary, dir_fd=where)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise local_error(shown, error) from error
        self.transfer.files += 1
        self.transfer.bytes += writer.length

    def _limit(self, info: public.FileInfo, relative: tuple[str, ...], shown: str) -> int:
        space = os.fstatvfs(self._open[-1])
        free = space.f_bavail * space.f_frsize
        if info.kind is FileKind.SYMLINK:  # the root only: its size is the link's
            return free * 9 // 10
        if info.size > free:
            raise NoSpace(
                f"{shown!r} needs {info.size} bytes and {free} are free; the copy was stopped before it.",
                hint="Free some local disk space, or leave the file out.",
            )
        return info.size + GROWTH_BYTES_MAX

    def link(self, relative: tuple[str, ...], info: public.FileInfo) -> None:
        """Make a symbolic link if it stays inside."""
        target = info.target or ""
        problem = _link_problem(target, len(relative) - 1)
        if problem is not None:
            self.skip(relative, problem)
            return
        temporary = f".perdure-{secrets.token_hex(8)}"
        try:
            os.symlink(target, temporary, dir_fd=self._open[-1])
            try:
                os.replace(temporary, relative[-1], src_dir_fd=self._open[-1], dst_dir_fd=self._open[-1])
            except OSError:
                os.unlink(temporary, dir_fd=self._open[-1])
                raise
        except OSError as error:
            raise local_error(self._shown(relative), error) from error
        self.transfer.links += 1

    def skip(self, relative: tuple[str, ...], reason: str) -> None:
        self.transfer.skipped.append(Skipped("/".join(relative), reason))

    def _shown(self, relative: tuple[str, ...]) -> str:
        return str(self._local.joinpath(*relative))


def _own_length(descriptor: int) -> int:
    """How far an earlier copy came. Raises InvalidRequest for a file that no copy of this user's made."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_nlink != 1:
        os.close(descriptor)
        raise InvalidRequest("Something that is not the part of an earlier copy has its name.", hint="Remove it.")
    return facts.st_size


def _name_problem(name: str) -> str | None:
    if name in {"", ".", ".."} or "/" in name or "\0" in name:
        return "its name is not a file name"
    if len(os.fsencode(name)) > NAME_BYTES_MAX:
        return "its name is too long"
    return None


def _link_problem(target: str, depth: int) -> str | None:
    """Why a link in a directory ``depth`` levels below the destination must not be made, None when it stays inside."""
    if not target or "\0" in target or "\ufffd" in target:
        return "its target is not a path"
    if target.startswith("/"):
        return "it is a link to an absolute path"
    from perdure.wire.guest.tar import leads_out

    if leads_out(target, depth):
        return "it is a link that could lead out of the destination"
    return None
