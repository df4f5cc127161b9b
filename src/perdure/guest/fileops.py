"""File operations, as a hand does them inside the user's root.

A written file appears complete or not at all: the bytes go to an unnamed file on the same file system, are flushed, and take
the name only when length and checksum are the sender's. Until then the old content stays; a transfer that breaks off leaves
nothing behind. What comes in pieces is in ``uploads``, whole directories in ``trees``, which are imported by ``prepare``.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import zlib

from perdure.guest import launch, linux, within
from perdure.guest.hands import Tag, Talk
from perdure.guest.worker import Refusal, refusal_of
from perdure.wire.guest.ops import HIDDEN, Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Work = Callable[[Talk, dict[str, Any]], None]

#: What is taken off the window at a time.
_TOOK_BYTES = 128 * 1024
_HASHED_BYTES = 256 * 1024
#: A file that says it is no larger is read before its size is told: those of /proc say 0, those of /sys 4096, and both lie.
_SMALL_BYTES = 64 * 1024
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def place(request: dict[str, Any], *, follow: bool = True, make: bool = False) -> tuple[str, int]:
    """(the request's path as system calls take it, flags to open it with). Below ``root``, if there is one."""
    root = request.get("root")
    if root is None:
        return request["path"], 0
    return within.enter(root, request["path"], follow=follow, make=make), os.O_NOFOLLOW


def revision_of(facts: os.stat_result) -> str:
    """Changes whenever the file does: another file, a write, or another mode or owner."""
    return f"{facts.st_ino:x}-{facts.st_size:x}-{facts.st_mtime_ns:x}-{facts.st_ctime_ns:x}"


def info_of(facts: os.stat_result, shown: str, name: str, target: str | None = None) -> dict[str, Any]:
    kind = _KINDS.get(stat.S_IFMT(facts.st_mode), "other")
    return {
        "path": shown,
        "name": name,
        "kind": kind,
        "size": facts.st_size,
        "mode": stat.S_IMODE(facts.st_mode),
        "uid": facts.st_uid,
        "gid": facts.st_gid,
        "modified_ns": facts.st_mtime_ns,
        "target": target,
        "revision": revision_of(facts) if kind == "file" else None,
    }


def _info(path: str, shown: str, name: str, directory: int | None = None) -> dict[str, Any]:
    facts = os.lstat(path, dir_fd=directory)
    return info_of(facts, shown, name, os.readlink(path, dir_fd=directory) if stat.S_ISLNK(facts.st_mode) else None)


def base_name(path: str) -> str:
    return os.path.basename(path.rstrip("/")) or "/"


def _stat(talk: Talk, request: dict[str, Any]) -> None:
    path, _ = place(request, follow=False)
    talk.say(Tag.OVER, {"info": _info(path, request["path"], base_name(request["path"]))})


def _list(talk: Talk, request: dict[str, Any]) -> None:
    path, flags = place(request)
    rows = []
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        for name in sorted(os.listdir(fd)):
            try:
                rows.append(json.dumps(_info(name, os.path.join(request["path"], name), name, fd)))
            except FileNotFoundError:
                continue  # removed since
    finally:
        os.close(fd)
    text = "\n".join(rows).encode()
    talk.say(Tag.GO, {})
    give(talk, text)
    talk.say(Tag.END)


def give(talk: Talk, data: bytes | bytearray) -> None:
    """Send bytes as there is room."""
    position = 0
    while position < len(data):
        wanted = int(talk.listen())
        talk.say(Tag.DATA, bytes(data[position : position + wanted]))
        position += wanted


def open_regular(request: dict[str, Any]) -> tuple[int, os.stat_result]:
    """The request's file, open for reading. Raises Refusal for anything but a regular file."""
    path, flags = place(request)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        os.close(fd)
        what = "is a directory" if stat.S_ISDIR(facts.st_mode) else "is not a regular file"
        raise Refusal(Code.INVALID, f"{request['path']}: {what}.")
    return fd, facts


def beginning(fd: int, facts: os.stat_result) -> tuple[bytes, int | None]:
    """What of a file must be read to know its size, and its size: None when it may be anything."""
    if facts.st_size > _SMALL_BYTES:
        return b"", facts.st_size
    head = bytearray()
    while len(head) <= _SMALL_BYTES:
        data = os.read(fd, _SMALL_BYTES + 1 - len(head))
        head += data
        if not data or 0 < len(head) == facts.st_size:
            return bytes(head), len(head)
    return bytes(head), None


def _read(talk: Talk, request: dict[str, Any]) -> None:
    fd, facts = open_regular(request)
    try:
        offset, length = int(request.get("offset") or 0), request.get("length")
        if request.get("revision") not in (None, revision_of(facts)):
            offset, length = 0, None  # it is not the file that the reader has the beginning of
        head, size = beginning(fd, facts)
        told = info_of(facts, request["path"], base_name(request["path"]))
        talk.say(Tag.GO, {"size": size, "offset": offset, "info": told})
        end = None if length is None else offset + int(length)
        head_end = len(head) if end is None else min(end, len(head))
        give(talk, head[offset:head_end])
        if not head or size is None:
            position = max(offset, len(head))
            os.lseek(fd, position, os.SEEK_SET)
            _give_file(talk, fd, None if end is None else max(0, end - position))
        talk.say(Tag.END)
    finally:
        os.close(fd)


def _give_file(talk: Talk, fd: int, left: int | None) -> None:
    while left != 0:
        wanted = int(talk.listen())
        data = os.read(fd, wanted if left is None else min(wanted, left))
        if not data:
            return
        left = None if left is None else left - len(data)
        talk.say(Tag.DATA, data)


def _hash(talk: Talk, request: dict[str, Any]) -> None:
    fd, facts = open_regular(request)
    try:
        talk.say(Tag.GO, {})
        length, digest = digest_of(fd, talk)
        told = {"size": length, "sha256": digest, "revision": revision_of(facts)}
        give(talk, json.dumps(told).encode())
        talk.say(Tag.END)
    finally:
        os.close(fd)


def digest_of(fd: int, talk: Talk) -> tuple[int, str]:
    """Length and SHA-256 of what is left of a file. Stops when nobody waits for it any more."""
    digest, length = _hashes["sha256"](), 0
    while data := os.read(fd, _HASHED_BYTES):
        digest.update(data)
        length += len(data)
        talk.check()
    return length, digest.hexdigest()


def write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write(talk: Talk, request: dict[str, Any]) -> None:
    path, mode = request["path"], request.get("mode")
    real = real_place(request)
    old = old_file(path, real)
    hidden, fd = new_file(real)
    try:
        talk.say(Tag.GO, {})
        length, crc, wanted = receive(talk, fd)
        if (wanted.get("length"), wanted.get("crc32")) != (length, crc):
            raise Refusal(Code.FAILED, f"{path}: what arrived is not what was sent; the old content stays.")
        become(fd, old, mode)
        if not hidden:
            hidden = _hidden_name(real)
            linux.link_unnamed(fd, hidden)
        os.close(fd)  # before anybody is told: a program that is still open for writing cannot be executed
        fd = -1
        os.rename(hidden, real)
        hidden = ""
        sync_directory(os.path.dirname(real) or ".")
    finally:
        if fd >= 0:
            os.close(fd)
        if hidden and os.path.lexists(hidden):
            os.unlink(hidden)
    talk.say(Tag.WRITTEN, {"ev": "written", "length": length, "crc32": crc})


def real_place(request: dict[str, Any]) -> str:
    """Where a file is to be written: what a link names, not the link."""
    path, flags = place(request)
    return path if flags else os.path.realpath(path)


def become(fd: int, old: os.stat_result | None, mode: int | None) -> None:
    """Give a new file owner and mode, by default those of the one that it replaces, and flush it."""
    if old is not None:
        os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, int(mode) if mode is not None else stat.S_IMODE(old.st_mode) if old is not None else 0o644)
    os.fsync(fd)


def new_file(real: str) -> tuple[str, int]:
    """(name, descriptor) of a file that nobody sees yet; no name where the file system knows unnamed ones."""
    try:
        return "", os.open(os.path.dirname(real) or ".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EOPNOTSUPP):
            raise
    return named_new_file(real)


def named_new_file(real: str) -> tuple[str, int]:
    """(name, descriptor) of a new file beside another, whose name nobody looks at."""
    hidden = _hidden_name(real)
    return hidden, os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def old_file(path: str, real: str) -> os.stat_result | None:
    if path.endswith("/"):
        raise Refusal(Code.INVALID, f"{path}: names a directory, not a file.")
    try:
        old = os.lstat(real)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        raise Refusal(Code.INVALID, f"{path}: is a directory.")
    if not stat.S_ISREG(old.st_mode):
        raise Refusal(Code.INVALID, f"{path}: is not a regular file, so it cannot be replaced.")
    return old


def _hidden_name(real: str) -> str:
    return os.path.join(os.path.dirname(real), f"{HIDDEN}{os.urandom(8).hex()}")


def receive(talk: Talk, fd: int) -> tuple[int, int, dict[str, Any]]:
    """Write what comes: (bytes, checksum, what the sender says that they are)."""
    length = crc = untold = 0
    while not isinstance(data := talk.listen(), dict):
        crc = zlib.crc32(data, crc)
        write_all(fd, data)
        length += len(data)
        untold += len(data)
        if untold >= _TOOK_BYTES or not talk.has_word:
            talk.say(Tag.TOOK, untold)
            untold = 0
    return length, crc, data


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mkdir(talk: Talk, request: dict[str, Any]) -> None:
    parents, mode = bool(request.get("parents")), int(request.get("mode", 0o755))
    path, flags = place(request, make=parents)
    if parents and not flags:
        os.makedirs(os.path.dirname(path.rstrip("/")) or "/", exist_ok=True)
    try:
        os.mkdir(path, mode)
        os.chmod(path, mode)
    except FileExistsError:
        if not (parents and os.path.isdir(path)):
            raise
    talk.say(Tag.OVER, {})


def _rename(talk: Talk, request: dict[str, Any]) -> None:
    destination = str(request["destination"])
    try:
        path, flags = place(request, follow=False)
        if not flags:
            os.rename(path, destination)
        else:
            here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                into, _ = place({"root": request["root"], "path": destination}, follow=False)
                os.rename(path, into, src_dir_fd=here)
            finally:
                os.close(here)
    except OSError as error:
        raise refusal_of(error, f"{request['path']} to {destination}") from error
    talk.say(Tag.OVER, {})


def _remove_tree(path: str) -> None:
    for _, directories, files, directory in os.fwalk(path, topdown=False):
        for name in files:
            os.unlink(name, dir_fd=directory)
        for name in directories:
            if stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode):
                os.unlink(name, dir_fd=directory)
            else:
                os.rmdir(name, dir_fd=directory)
    os.rmdir(path)


def _remove(talk: Talk, request: dict[str, Any]) -> None:
    path, _ = place(request, follow=False)
    if os.path.normpath(path).strip("/") in ("", "."):
        raise Refusal(Code.FORBIDDEN, "The root itself cannot be removed.")
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif request.get("recursive"):
        _remove_tree(path)
    else:
        try:
            os.rmdir(path)
        except OSError as error:
            if not os.listdir(path):
                raise
            raise Refusal(Code.CONFLICT, f"{path}: the directory is not empty; remove it recursively.") from error
    talk.say(Tag.OVER, {})


def _attributes(talk: Talk, request: dict[str, Any]) -> None:
    """Mode and owner of what the path names; of a link's target, as chmod(1) and chown(1) do it."""
    path, flags = place(request)
    mode, owner = request.get("mode"), request.get("owner")
    if flags and stat.S_ISLNK(os.lstat(path).st_mode):
        raise Refusal(Code.ESCAPE, f"{request['path']}: became a link meanwhile.")
    if owner is not None:
        os.chown(path, *_owner(str(owner)))
    if mode is not None:
        os.chmod(path, int(mode))  # after chown, which takes set-user-id away
    talk.say(Tag.OVER, {"info": info_of(os.stat(path), request["path"], base_name(request["path"]))})


def _owner(text: str) -> tuple[int, int]:
    """``user``, ``user:group`` or ``:group``, names or numbers of the workspace; -1 for what stays."""
    user, colon, group = text.partition(":")
    try:
        uid = launch.find_account(user).uid if user else -1
    except launch.CannotStart as error:
        raise Refusal(Code.INVALID, error.detail) from error
    if not colon or not group:
        return uid, -1
    if group.isdecimal():
        return uid, int(group)
    found = [int(row[2]) for row in launch.rows("/etc/group") if len(row) >= 3 and row[0] == group and row[2].isdecimal()]
    if not found:
        raise Refusal(Code.INVALID, f"There is no group {group!r} in the workspace's /etc/group.")
    return uid, found[0]


def _symlink(talk: Talk, request: dict[str, Any]) -> None:
    path, _ = place(request, follow=False)
    os.symlink(str(request["target"]), path)
    talk.say(Tag.OVER, {})


def prepare(op: str) -> None:
    """Import what an operation needs, in the agent's own thread: a hand sees the user's files only, and must not import those."""
    if op in (Op.HASH, Op.FINISH) and not _hashes:
        # Not hashlib where there is another: it loads OpenSSL, megabytes of each sleeping guest.
        module = __import__("_sha2" if sys.version_info >= (3, 12) else "hashlib")
        _hashes["sha256"] = module.sha256
    if op in WORKS:
        return
    if op in _UPLOADS:
        from perdure.guest import uploads

        WORKS.update(uploads.WORKS)
    elif op in _TREES:
        from perdure.guest import trees

        WORKS.update(trees.WORKS)
    elif op == Op.WATCH:
        from perdure.guest import watches

        WORKS[op] = watches.add_directories


WORKS: dict[str, Work] = {
    Op.STAT: _stat,
    Op.LIST: _list,
    Op.READ: _read,
    Op.HASH: _hash,
    Op.WRITE: _write,
    Op.MKDIR: _mkdir,
    Op.RENAME: _rename,
    Op.REMOVE: _remove,
    Op.ATTRIBUTES: _attributes,
    Op.SYMLINK: _symlink,
}
_UPLOADS = frozenset((Op.UPLOAD, Op.APPEND, Op.FINISH))
_TREES = frozenset((Op.PACK, Op.UNPACK))
#: All that ``prepare`` can make ready.
OPERATIONS = frozenset((*WORKS, *_UPLOADS, *_TREES, Op.WATCH))
_hashes: dict[str, Callable[[], Any]] = {}
