"""Directories as tar streams, made and unpacked here, with our own reader and writer and never the user's ``tar``.

Nothing is buffered but a file whose size says nothing (see ``fileops.beginning``). Every step below the directory is relative to
a descriptor and follows no link, so neither an archive nor whoever changes the tree meanwhile leads out of it.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib

from perdure.guest import fileops, linux
from perdure.guest.hands import Tag, Talk
from perdure.guest.worker import Refusal, refusal_of
from perdure.wire.guest import tar
from perdure.wire.guest.frames import DATA_MAX
from perdure.wire.guest.ops import HIDDEN, Code, Op
from perdure.wire.guest.tar import BadArchive, Entry, Kind, Reader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TOOK_BYTES = 128 * 1024
#: A file of /proc may be as large as this.
_UNSIZED_MAX = 64 * 1024 * 1024
_STEP = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


# ----------------------------------------------------------------------------------------------------------------- packing


class _Out:
    """What goes to the stream, in frames as large as they may be."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._buffer = bytearray()

    def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= DATA_MAX:
            self._send()

    def flush(self) -> None:
        while self._buffer:
            self._send()

    def _send(self) -> None:
        wanted = int(self._talk.listen())
        self._talk.say(Tag.DATA, bytes(self._buffer[:wanted]))
        del self._buffer[:wanted]


def _pack(talk: Talk, request: dict[str, Any]) -> None:
    path, flags = fileops.place(request)
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        talk.say(Tag.GO, {})
        out = _Out(talk)

        def unread(error: OSError) -> None:
            if error.errno != errno.ENOENT:
                out.write(tar.comment(f"skipped: {(error.strerror or 'it cannot be read').lower()}: {error.filename}"))

        for directory, directories, files, fd in os.fwalk(".", onerror=unread, dir_fd=top):
            relative = directory[2:]
            out.write(tar.header(_entry(os.fstat(fd), Kind.DIRECTORY, f"{relative or '.'}/")))
            links = [name for name in directories if _is_link(name, fd)]
            for name in sorted([*files, *links]):
                try:
                    _pack_one(out, os.path.join(relative, name), name, fd)
                except FileNotFoundError:
                    continue  # removed since
            directories.sort()
        out.write(tar.END)
        out.flush()
        talk.say(Tag.END)
    finally:
        os.close(top)


def _is_link(name: str, directory: int) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode)
    except FileNotFoundError:
        return False


def _entry(facts: os.stat_result, kind: str, path: str, *, size: int = 0, target: str = "") -> Entry:
    return Entry(path, kind, size=size, mode=stat.S_IMODE(facts.st_mode), mtime_ns=facts.st_mtime_ns, target=target)


def _pack_one(out: _Out, path: str, name: str, directory: int) -> None:
    """Anything but a directory. What cannot be packed is named in a remark, ``skipped: REASON: PATH``."""
    facts = os.lstat(name, dir_fd=directory)
    if stat.S_ISLNK(facts.st_mode):
        target = os.readlink(name, dir_fd=directory)
        out.write(tar.header(_entry(facts, Kind.SYMLINK, path, target=target)))
    elif not stat.S_ISREG(facts.st_mode):
        out.write(tar.comment(f"skipped: it is a device, socket or pipe: {path}"))
    else:
        try:
            fd = os.open(name, _READ, dir_fd=directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            out.write(tar.comment(f"skipped: {(error.strerror or 'it cannot be read').lower()}: {path}"))
            return
        try:
            _pack_file(out, path, fd)
        finally:
            os.close(fd)


def _pack_file(out: _Out, path: str, fd: int) -> None:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        return  # something else has taken its place
    try:
        head, size = fileops.beginning(fd, facts)
        if size is None:
            head = _all_of(fd, head)
            size = len(head)
    except OSError as error:
        reason = "it has no end" if error.errno == errno.EFBIG else (error.strerror or "it cannot be read").lower()
        out.write(tar.comment(f"skipped: {reason}: {path}"))
        return
    out.write(tar.header(_entry(facts, Kind.FILE, path, size=size)))
    out.write(head)
    left = size - len(head)
    while left:
        data = os.read(fd, min(left, DATA_MAX))
        if not data:
            raise Refusal(Code.FAILED, f"{path}: became shorter while it was read; copy it again.")
        left -= len(data)
        out.write(data)
    out.write(tar.padding(size))


def _all_of(fd: int, head: bytes) -> bytes:
    """The whole of a file whose size says nothing."""
    whole = bytearray(head)
    while data := os.read(fd, DATA_MAX):
        whole += data
        if len(whole) > _UNSIZED_MAX:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return bytes(whole)


# --------------------------------------------------------------------------------------------------------------- unpacking


def _unpack(talk: Talk, request: dict[str, Any]) -> None:
    path, flags = fileops.place(request, make=True)
    made = not os.path.lexists(path)
    if made:
        os.makedirs(path, exist_ok=True)
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    into = _Into(top, made)
    try:
        talk.say(Tag.GO, {})
        length, crc, wanted = _feed(talk, into)
        if (wanted.get("length"), wanted.get("crc32")) != (length, crc):
            raise Refusal(Code.FAILED, f"{request['path']}: what arrived is not what was sent.")
        into.finish()
        linux.sync_file_system(top)
    except BadArchive as error:
        raise Refusal(Code.INVALID, f"{str(error).rstrip('.')}. What came before it was unpacked.") from error
    except OSError as error:
        raise refusal_of(error, request["path"]) from error
    finally:
        into.close()
        os.close(top)
    counts = {"files": into.files, "directories": into.directories, "links": into.links}
    talk.say(Tag.WRITTEN, {"ev": "written", "length": length, "crc32": crc, **counts})


def _feed(talk: Talk, into: _Into) -> tuple[int, int, dict[str, Any]]:
    length = crc = untold = 0
    while not isinstance(data := talk.listen(), dict):
        crc = zlib.crc32(data, crc)
        into.write(data)
        length += len(data)
        untold += len(data)
        if untold >= _TOOK_BYTES or not talk.has_word:
            talk.say(Tag.TOOK, untold)
            untold = 0
    return length, crc, data


class _Into:
    """A directory that an archive is unpacked into. Files and links replace what has their name; directories are merged."""

    def __init__(self, top: int, made: bool) -> None:
        self._top = top
        self._made = made
        self._reader = Reader()
        self._path: list[tuple[str, int]] = []  # the directory of the last member, with descriptors
        self._moments: list[tuple[list[str], int, int]] = []  # of directories, set last: filling one changes its time
        self._file: tuple[int, int, str, str, Entry] | None = None  # descriptor, directory, hidden name, name
        self.files = self.directories = self.links = 0

    def write(self, data: bytes) -> None:
        for part in self._reader.feed(data):
            if isinstance(part, Entry):
                self._begin(part)
            elif part is None:
                self._end_file()
            elif self._file is not None:
                fileops.write_all(self._file[0], part)

    def finish(self) -> None:
        self._reader.finish()
        for names, mode, moment in reversed(self._moments):
            directory = self._enter(names)
            os.fchmod(directory, mode)
            os.utime(directory, ns=(moment, moment))

    def close(self) -> None:
        """Let go of everything; a file that is not complete leaves nothing behind."""
        if self._file is not None:
            fd, directory, hidden, _, _ = self._file
            os.close(fd)
            os.unlink(hidden, dir_fd=directory)
            self._file = None
        while self._path:
            os.close(self._path.pop()[1])

    def _enter(self, names: list[str]) -> int:
        """The descriptor of a directory below the top, made where it is missing."""
        common = 0
        while common < len(names) and common < len(self._path) and self._path[common][0] == names[common]:
            common += 1
        while len(self._path) > common:
            os.close(self._path.pop()[1])
        for name in names[common:]:
            here = self._path[-1][1] if self._path else self._top
            try:
                os.mkdir(name, 0o755, dir_fd=here)
                self.directories += 1
            except FileExistsError:
                pass
            try:
                self._path.append((name, os.open(name, _STEP, dir_fd=here)))
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                raise Refusal(Code.CONFLICT, f"{'/'.join(names)}: something that is no directory is in its place.") from error
        return self._path[-1][1] if self._path else self._top

    def _begin(self, entry: Entry) -> None:
        names = tar.parts_of(entry.path)
        if entry.kind == Kind.DIRECTORY:
            self._enter(names)
            if names or self._made:
                self._moments.append((names, entry.mode & 0o777, entry.mtime_ns))
            return
        if not names:
            raise BadArchive("A file without a name is in it.")
        directory, name = self._enter(names[:-1]), names[-1]
        hidden = f"{HIDDEN}{os.urandom(8).hex()}"
        if entry.kind == Kind.FILE:
            fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
            self._file = (fd, directory, hidden, name, entry)
        elif entry.kind == Kind.SYMLINK:
            if not entry.target or tar.leads_out(entry.target, len(names) - 1):
                raise Refusal(Code.ESCAPE, f"{entry.path}: is a link that could lead out. What came before it was unpacked.")
            os.symlink(entry.target, hidden, dir_fd=directory)
            os.utime(hidden, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=directory, follow_symlinks=False)
            self._take_name(directory, hidden, name)
            self.links += 1
        elif entry.kind == Kind.HARD_LINK:
            self._hard_link(entry, names, hidden)
        else:
            raise BadArchive(f"{entry.path!r} is a device or pipe, which is not unpacked here.")

    def _hard_link(self, entry: Entry, names: list[str], hidden: str) -> None:
        target = tar.parts_of(entry.target)
        if not target:
            raise BadArchive(f"{entry.path!r} is a link to nothing.")
        source = os.dup(self._enter(target[:-1]))
        try:
            directory = self._enter(names[:-1])
            os.link(target[-1], hidden, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(source)
        self._take_name(directory, hidden, names[-1])
        self.files += 1

    def _end_file(self) -> None:
        if self._file is None:
            return
        fd, directory, hidden, name, entry = self._file
        self._file = None
        try:
            os.fchmod(fd, entry.mode & 0o777)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)
        self._take_name(directory, hidden, name)
        self.files += 1

    def _take_name(self, directory: int, hidden: str, name: str) -> None:
        try:
            os.rename(hidden, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            os.unlink(hidden, dir_fd=directory)
            if error.errno == errno.EISDIR:
                raise Refusal(Code.CONFLICT, f"{name}: a directory is in its place.") from error
            raise
        # Renaming one name of a file onto another of the same file does nothing, and both stay.
        try:
            os.unlink(hidden, dir_fd=directory)
        except FileNotFoundError:
            pass


WORKS = {Op.PACK: _pack, Op.UNPACK: _unpack}
