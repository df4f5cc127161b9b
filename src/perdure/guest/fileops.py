"""File operations, as a hand does them inside the user's root.

A written file appears complete or not at all: the bytes go to an unnamed file on the same file system, are flushed, and take
the name only when length and checksum are the sender's. Until then the old content stays; a transfer that breaks off leaves
nothing behind.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib

from perdure.guest import linux
from perdure.guest.hands import Tag, Talk
from perdure.guest.worker import Refusal, refusal_of
from perdure.wire.guest.ops import Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: What is taken off the window at a time.
_TOOK_BYTES = 128 * 1024
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def _info(path: str, name: str) -> dict[str, Any]:
    facts = os.lstat(path)
    kind = _KINDS.get(stat.S_IFMT(facts.st_mode), "other")
    return {
        "path": path,
        "name": name,
        "kind": kind,
        "size": facts.st_size,
        "mode": stat.S_IMODE(facts.st_mode),
        "uid": facts.st_uid,
        "gid": facts.st_gid,
        "modified_ns": facts.st_mtime_ns,
        "target": os.readlink(path) if kind == "symlink" else None,
    }


def _stat(talk: Talk, request: dict[str, Any]) -> None:
    path = request["path"]
    talk.say(Tag.OVER, {"info": _info(path, os.path.basename(path.rstrip("/")) or "/")})


def _list(talk: Talk, request: dict[str, Any]) -> None:
    path, rows = request["path"], []
    for name in sorted(os.listdir(path)):
        try:
            rows.append(json.dumps(_info(os.path.join(path, name), name)))
        except FileNotFoundError:
            continue  # removed since
    text = "\n".join(rows).encode()
    talk.say(Tag.GO, {})
    position = 0
    while position < len(text):
        wanted = int(talk.listen())
        talk.say(Tag.DATA, text[position : position + wanted])
        position += wanted
    talk.say(Tag.END)


def _read(talk: Talk, request: dict[str, Any]) -> None:
    path, offset, length = request["path"], int(request.get("offset") or 0), request.get("length")
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(fd)
        if stat.S_ISDIR(facts.st_mode):
            raise Refusal(Code.INVALID, f"{path}: is a directory.")
        if not stat.S_ISREG(facts.st_mode):
            raise Refusal(Code.INVALID, f"{path}: is not a regular file.")
        if offset:
            os.lseek(fd, offset, os.SEEK_SET)
        talk.say(Tag.GO, {"size": facts.st_size})
        left = None if length is None else int(length)
        while left != 0:
            wanted = int(talk.listen())
            data = os.read(fd, wanted if left is None else min(wanted, left))
            if not data:
                break
            left = None if left is None else left - len(data)
            talk.say(Tag.DATA, data)
        talk.say(Tag.END)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write(talk: Talk, request: dict[str, Any]) -> None:
    path, mode = request["path"], request.get("mode")
    real = os.path.realpath(path)
    directory = os.path.dirname(real)
    old = _old_file(path, real)
    hidden, fd = _new_file(real)
    try:
        talk.say(Tag.GO, {})
        length, crc, wanted = _receive(talk, fd)
        if (wanted.get("length"), wanted.get("crc32")) != (length, crc):
            raise Refusal(Code.FAILED, f"{path}: what arrived is not what was sent; the old content stays.")
        if old is not None:
            os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, int(mode) if mode is not None else stat.S_IMODE(old.st_mode) if old is not None else 0o644)
        os.fsync(fd)
        if not hidden:
            hidden = _hidden_name(real)
            linux.link_unnamed(fd, hidden)
        os.close(fd)  # before anybody is told: a program that is still open for writing cannot be executed
        fd = -1
        os.rename(hidden, real)
        hidden = ""
        _sync_directory(directory)
    finally:
        if fd >= 0:
            os.close(fd)
        if hidden and os.path.lexists(hidden):
            os.unlink(hidden)
    talk.say(Tag.WRITTEN, {"ev": "written", "length": length, "crc32": crc})


def _new_file(real: str) -> tuple[str, int]:
    """(name, descriptor) of a file that nobody sees yet; no name where the file system knows unnamed ones."""
    try:
        return "", os.open(os.path.dirname(real), os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EOPNOTSUPP):
            raise
    hidden = _hidden_name(real)
    return hidden, os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _old_file(path: str, real: str) -> os.stat_result | None:
    if path.endswith("/"):
        raise Refusal(Code.INVALID, f"{path}: names a directory, not a file.")
    try:
        old = os.stat(real)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        raise Refusal(Code.INVALID, f"{path}: is a directory.")
    if not stat.S_ISREG(old.st_mode):
        raise Refusal(Code.INVALID, f"{path}: is not a regular file, so it cannot be replaced.")
    return old


def _hidden_name(real: str) -> str:
    return f"{os.path.dirname(real).rstrip('/')}/.perdure-{os.urandom(8).hex()}"


def _receive(talk: Talk, fd: int) -> tuple[int, int, dict[str, Any]]:
    """Write what comes: (bytes, checksum, what the sender says that they are)."""
    length = crc = untold = 0
    while not isinstance(data := talk.listen(), dict):
        crc = zlib.crc32(data, crc)
        _write_all(fd, data)
        length += len(data)
        untold += len(data)
        if untold >= _TOOK_BYTES or not talk.has_word:
            talk.say(Tag.TOOK, untold)
            untold = 0
    return length, crc, data


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mkdir(talk: Talk, request: dict[str, Any]) -> None:
    path, parents, mode = request["path"], bool(request.get("parents")), int(request.get("mode", 0o755))
    if parents:
        os.makedirs(os.path.dirname(path.rstrip("/")) or "/", exist_ok=True)
    try:
        os.mkdir(path, mode)
        os.chmod(path, mode)
    except FileExistsError:
        if not (parents and os.path.isdir(path)):
            raise
    talk.say(Tag.OVER, {})


def _rename(talk: Talk, request: dict[str, Any]) -> None:
    path, destination = request["path"], str(request["destination"])
    try:
        os.rename(path, destination)
    except OSError as error:
        raise refusal_of(error, f"{path} to {destination}") from error
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
    path = request["path"]
    if not os.path.normpath(path).strip("/"):
        raise Refusal(Code.FORBIDDEN, "The workspace's root cannot be removed; delete the workspace instead.")
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


WORKS: dict[str, Callable[[Talk, dict[str, Any]], None]] = {
    Op.STAT: _stat,
    Op.LIST: _list,
    Op.READ: _read,
    Op.WRITE: _write,
    Op.MKDIR: _mkdir,
    Op.RENAME: _rename,
    Op.REMOVE: _remove,
}
