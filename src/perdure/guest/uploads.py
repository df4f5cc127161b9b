"""Uploads in pieces: what has arrived stays, so that a connection, a server or a generation may end in between.

An upload is a file in ``UPLOADS_DIR`` and nothing else: its length says where to go on, and it sleeps, forks and rewinds with
the workspace's disk. It takes its name in one step when its length, and its SHA-256 if that is told, are the sender's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time

from perdure.guest import fileops
from perdure.guest.hands import Tag, Talk
from perdure.guest.worker import Refusal
from perdure.wire.guest.ops import UPLOAD_KEPT_S, UPLOADS_DIR, Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ID = re.compile(r"^upl_[0-9a-z]{8,64}$")
_COPIED_BYTES = 256 * 1024


def _file(request: dict[str, Any]) -> str:
    upload = request.get("id")
    if not isinstance(upload, str) or not _ID.match(upload):
        raise Refusal(Code.INVALID, "That is not an upload's id.")
    return f"{UPLOADS_DIR}/{upload}"


def _open(request: dict[str, Any], flags: int) -> int:
    try:
        return os.open(_file(request), flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        gone = f"There is no upload {request['id']}: it is finished, or nothing came of it for {UPLOAD_KEPT_S // 3600} hours."
        raise Refusal(Code.NOT_FOUND, gone) from None


def _lock(fd: int) -> None:
    """For this operation alone. A transfer whose client is gone holds it for a moment longer."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal(Code.BUSY, "Another transfer writes this upload.") from None


def _upload(talk: Talk, request: dict[str, Any]) -> None:
    file, do = _file(request), request.get("do")
    if do == "begin":
        os.makedirs(UPLOADS_DIR, 0o700, exist_ok=True)
        _remove_stale()
        if request.get("path") is not None:
            fileops.old_file(request["path"], fileops.real_place(request))  # what cannot be replaced is told before it is sent
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.utime(fd)
    elif do == "look":
        fd = _open(request, os.O_RDONLY)
    elif do == "drop":
        try:
            os.unlink(file)
        except FileNotFoundError:
            pass
        talk.say(Tag.OVER, {"offset": 0})
        return
    else:
        raise Refusal(Code.INVALID, f"An upload knows no {do!r}.")
    try:
        talk.say(Tag.OVER, {"offset": os.fstat(fd).st_size})
    finally:
        os.close(fd)


def _remove_stale() -> None:
    oldest = time.time() - UPLOAD_KEPT_S
    for name in os.listdir(UPLOADS_DIR):
        path = f"{UPLOADS_DIR}/{name}"
        try:
            if os.lstat(path).st_mtime < oldest:
                os.unlink(path)
        except OSError:
            continue  # somebody else's, or gone already


def _append(talk: Talk, request: dict[str, Any]) -> None:
    fd = _open(request, os.O_WRONLY)
    try:
        _lock(fd)
        offset = os.fstat(fd).st_size
        if request.get("offset") != offset:
            raise Refusal(Code.CONFLICT, f"The upload has {offset} bytes, not {request.get('offset')}; go on from there.")
        os.lseek(fd, offset, os.SEEK_SET)
        talk.say(Tag.GO, {})
        length, crc, wanted = fileops.receive(talk, fd)
        if (wanted.get("length"), wanted.get("crc32")) != (length, crc):
            os.ftruncate(fd, offset)
            raise Refusal(Code.FAILED, "What arrived is not what was sent; the piece was thrown away.")
    finally:
        os.close(fd)
    talk.say(Tag.WRITTEN, {"ev": "written", "length": length, "crc32": crc})


def _finish(talk: Talk, request: dict[str, Any]) -> None:
    talk.say(Tag.GO, {})
    real = fileops.real_place(request)
    old = fileops.old_file(request["path"], real)
    try:
        fd = _open(request, os.O_RDWR)
    except Refusal:
        if not _is_there(talk, request, real):
            raise
    else:
        try:
            _lock(fd)
            _check(talk, request, fd)
            fileops.become(fd, old, request.get("mode"))
            _name(_file(request), fd, real, request, old)
        finally:
            os.close(fd)
    talk.say(Tag.WRITTEN, {"ev": "written", "length": request.get("length")})


def _check(talk: Talk, request: dict[str, Any], fd: int) -> None:
    length, wanted = os.fstat(fd).st_size, request.get("length")
    if length != wanted:
        raise Refusal(Code.CONFLICT, f"The upload has {length} bytes, not {wanted}; go on from there.")
    if request.get("sha256") is None:
        return
    digest = fileops.digest_of(fd, talk)[1]
    if digest != request["sha256"]:
        os.unlink(_file(request))
        raise Refusal(Code.CONFLICT, f"The upload's SHA-256 is {digest}, not the one that was told; it was thrown away.")


def _is_there(talk: Talk, request: dict[str, Any], real: str) -> bool:
    """Whether an earlier call, whose answer was lost, has done it."""
    if request.get("sha256") is None:
        return False
    try:
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(fd)
        is_it = stat.S_ISREG(facts.st_mode) and facts.st_size == request.get("length")
        return is_it and fileops.digest_of(fd, talk)[1] == request.get("sha256")
    finally:
        os.close(fd)


def _name(file: str, fd: int, real: str, request: dict[str, Any], old: os.stat_result | None) -> None:
    directory = os.path.dirname(real) or "."
    try:
        os.rename(file, real)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(fd, real, request, old)  # another file system, such as /run
        os.unlink(file)
    fileops.sync_directory(directory)


def _copy(source: int, real: str, request: dict[str, Any], old: os.stat_result | None) -> None:
    hidden, fd = fileops.named_new_file(real)
    try:
        os.lseek(source, 0, os.SEEK_SET)
        while data := os.read(source, _COPIED_BYTES):
            fileops.write_all(fd, data)
        fileops.become(fd, old, request.get("mode"))
        os.rename(hidden, real)
    except BaseException:
        os.unlink(hidden)
        raise
    finally:
        os.close(fd)


WORKS = {Op.UPLOAD: _upload, Op.APPEND: _append, Op.FINISH: _finish}
