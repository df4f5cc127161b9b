"""Files of the user's root, each operation done by a worker inside that root.

A written file appears complete or not at all: the bytes go to an unnamed file on the same file system, are flushed, and take
the name only when length and checksum are the sender's. Until then the old content stays; a transfer that breaks off leaves
nothing behind.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections import deque

from perdure.guest import linux, worker
from perdure.guest.loop import READ, WRITE
from perdure.guest.worker import Refusal, Talk, refusal_of
from perdure.wire.guest.frames import DATA_MAX
from perdure.wire.guest.ops import PATH_MAX, Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop
    from perdure.wire.guest.mux import Mux

_CHUNK = 65536
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}

# ------------------------------------------------------------------------------------------------------- in the worker


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


def _stat(talk: Talk, path: str) -> None:
    talk.say(ok=True, info=_info(path, os.path.basename(path.rstrip("/")) or "/"))


def _list(talk: Talk, path: str, out: int) -> None:
    names = os.listdir(path)
    talk.say(ok=True)
    with os.fdopen(out, "w", encoding="ascii") as file:
        for name in sorted(names):
            try:
                info = _info(os.path.join(path, name), name)
            except FileNotFoundError:
                continue  # removed since
            file.write(json.dumps(info) + "\n")
    talk.say(done=True)


def _read(talk: Talk, path: str, offset: int, length: int | None, out: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    facts = os.fstat(fd)
    if stat.S_ISDIR(facts.st_mode):
        raise Refusal(Code.INVALID, f"{path}: is a directory.")
    if not stat.S_ISREG(facts.st_mode):
        raise Refusal(Code.INVALID, f"{path}: is not a regular file.")
    if offset:
        os.lseek(fd, offset, os.SEEK_SET)
    talk.say(ok=True, size=facts.st_size)
    left = -1 if length is None else length
    while left:
        data = os.read(fd, _CHUNK if left < 0 else min(_CHUNK, left))
        if not data:
            break
        left -= len(data) if left > 0 else 0
        _write_all(out, data)
    talk.say(done=True)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write(talk: Talk, path: str, mode: int | None, source: int) -> None:
    real = os.path.realpath(path)
    directory = os.path.dirname(real)
    old = _old_file(path, real)
    hidden = ""
    try:
        fd = os.open(directory, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except IsADirectoryError:  # a file system without unnamed files
        hidden = _hidden_name(real)
        fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        talk.say(ok=True)
        length, crc = _receive(source, fd)
        wanted = talk.listen()
        if (wanted.get("length"), wanted.get("crc32")) != (length, crc):
            raise Refusal(Code.FAILED, f"{path}: what arrived is not what was sent; the old content stays.")
        if old is not None:
            os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, mode if mode is not None else stat.S_IMODE(old.st_mode) if old is not None else 0o644)
        os.fsync(fd)
        if not hidden:
            hidden = _hidden_name(real)
            linux.link_unnamed(fd, hidden)
        os.close(fd)  # before anybody is told: a program that is still open for writing cannot be executed
        os.rename(hidden, real)
        hidden = ""
        _sync_directory(directory)
    finally:
        if hidden and os.path.lexists(hidden):
            os.unlink(hidden)
    talk.say(written=True, length=length, crc32=crc, path=real)


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


def _receive(source: int, fd: int) -> tuple[int, int]:
    length = crc = 0
    while True:
        data = os.read(source, _CHUNK)
        if not data:
            return length, crc
        _write_all(fd, data)
        length += len(data)
        crc = zlib.crc32(data, crc)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mkdir(talk: Talk, path: str, parents: bool, mode: int) -> None:
    if parents:
        os.makedirs(os.path.dirname(path.rstrip("/")) or "/", exist_ok=True)
    try:
        os.mkdir(path, mode)
        os.chmod(path, mode)
    except FileExistsError:
        if not (parents and os.path.isdir(path)):
            raise
    talk.say(ok=True)


def _rename(talk: Talk, path: str, destination: str) -> None:
    try:
        os.rename(path, destination)
    except OSError as error:
        raise refusal_of(error, f"{path} to {destination}") from error
    talk.say(ok=True)


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


def _remove(talk: Talk, path: str, recursive: bool) -> None:
    if not os.path.normpath(path).strip("/"):
        raise Refusal(Code.FORBIDDEN, "The workspace's root cannot be removed; delete the workspace instead.")
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif recursive:
        _remove_tree(path)
    else:
        try:
            os.rmdir(path)
        except OSError as error:
            if not os.listdir(path):
                raise
            raise Refusal(Code.CONFLICT, f"{path}: the directory is not empty; remove it recursively.") from error
    talk.say(ok=True)


# -------------------------------------------------------------------------------------------------------- in the agent


class FileTable:
    """The streams that are about files."""

    def __init__(self, loop: Loop, root: str, mux: Mux) -> None:
        self._loop = loop
        self._root = root
        self._mux = mux
        self._jobs: dict[int, _Job] = {}

    def open(self, stream: int, request: dict[str, Any]) -> None:
        path = request.get("path")
        if not isinstance(path, str) or not path.startswith("/") or "\0" in path or len(os.fsencode(path)) > PATH_MAX:
            self._mux.reset(stream, Code.INVALID, f"A path is absolute and has at most {PATH_MAX} bytes.")
            return
        try:
            job = _JOBS[request["op"]](self._loop, self._root, self._mux, stream, lambda: self._jobs.pop(stream, None))
            self._jobs[stream] = job
            job.start(request)
        except OSError as error:
            self._jobs.pop(stream, None)
            refusal = refusal_of(error, path)
            self._mux.reset(stream, refusal.code, refusal.message)

    def owns(self, stream: int) -> bool:
        return stream in self._jobs

    def on_data(self, stream: int, data: bytes) -> None:
        job = self._jobs.get(stream)
        if job is None:
            self._mux.consumed(stream, len(data))
        else:
            job.on_data(data)

    def on_message(self, stream: int, message: dict[str, Any]) -> None:
        job = self._jobs.get(stream)
        if job is not None:
            job.on_message(message)

    def on_room(self, stream: int) -> None:
        job = self._jobs.get(stream)
        if job is not None:
            job.on_room()

    def on_gone(self, stream: int) -> None:
        job = self._jobs.pop(stream, None)
        if job is not None:
            job.abort()

    def drop_all(self) -> None:
        for stream in list(self._jobs):
            self.on_gone(stream)


class _Job:
    """One operation: the worker says ``ok`` (accept), then ``done`` (end), or a code and a message (reset)."""

    def __init__(self, loop: Loop, root: str, mux: Mux, stream: int, forget: Callable[[], object]) -> None:
        self._loop = loop
        self._root = root
        self._mux = mux
        self._stream = stream
        self._forget = forget
        self._over = False

    def start(self, request: dict[str, Any]) -> None:
        work, keep = self._work(request)
        self._worker = worker.start(self._loop, self._root, work, self._on_worker, keep)
        for fd in keep:
            os.close(fd)

    def _work(self, request: dict[str, Any]) -> tuple[Callable[[Talk], None], tuple[int, ...]]:
        path, op = request["path"], request["op"]
        if op == Op.STAT:
            return lambda talk: _stat(talk, path), ()
        if op == Op.MKDIR:
            return lambda talk: _mkdir(talk, path, bool(request.get("parents")), int(request.get("mode", 0o755))), ()
        if op == Op.RENAME:
            return lambda talk: _rename(talk, path, str(request["destination"])), ()
        return lambda talk: _remove(talk, path, bool(request.get("recursive"))), ()

    def _on_worker(self, message: dict[str, Any] | None) -> None:
        if self._over:
            return
        if message is None:
            message = {"code": Code.FAILED, "message": "The worker ended without an answer."}
        if "code" in message:
            self._over = True
            self._mux.reset(self._stream, message["code"], message["message"])
            self._forget()
        else:
            self._on_progress(message)

    def _on_progress(self, message: dict[str, Any]) -> None:
        self._mux.accept(self._stream, message)
        self._end()

    def _end(self) -> None:
        self._over = True
        self._mux.eof(self._stream)
        self._forget()

    def on_data(self, data: bytes) -> None:
        self._mux.consumed(self._stream, len(data))

    def on_message(self, message: dict[str, Any]) -> None:
        """Nothing to say to a short operation."""

    def on_room(self) -> None:
        """Nothing to send more of."""

    def abort(self) -> None:
        if not self._over:
            self._over = True
            self._worker.abort()


class _Source(_Job):
    """Bytes from a worker's pipe to the stream."""

    _fd = -1

    def _work(self, request: dict[str, Any]) -> tuple[Callable[[Talk], None], tuple[int, ...]]:
        self._done = False
        self._fd, theirs = os.pipe()
        os.set_blocking(self._fd, False)
        path = request["path"]
        if request["op"] == Op.LIST:
            return lambda talk: _list(talk, path, theirs), (theirs,)
        length = request.get("length")
        offset = int(request.get("offset") or 0)
        return lambda talk: _read(talk, path, offset, None if length is None else int(length), theirs), (theirs,)

    def _on_progress(self, message: dict[str, Any]) -> None:
        if "done" in message:
            self._done = True  # the pipe may still hold bytes; its end is the end
            if self._fd < 0:
                self._end()
            return
        self._mux.accept(self._stream, message)
        self.on_room()

    def on_room(self) -> None:
        if self._fd >= 0 and not self._loop.watches(self._fd) and self._mux.room(self._stream) > 0:
            self._loop.add(self._fd, READ, self._on_readable)

    def _on_readable(self, _mask: int) -> None:
        room = self._mux.room(self._stream)
        if room <= 0:
            self._loop.remove(self._fd)
            return
        data = os.read(self._fd, min(room, DATA_MAX))
        if data:
            self._mux.send(self._stream, data)
            return
        self._close()
        if self._done:
            self._end()

    def _close(self) -> None:
        if self._fd >= 0:
            self._loop.remove(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_worker(self, message: dict[str, Any] | None) -> None:
        if message is None and self._done:
            return
        super()._on_worker(message)
        if self._over:
            self._close()

    def abort(self) -> None:
        self._close()
        super().abort()


class _Sink(_Job):
    """Bytes from the stream to a worker's pipe."""

    _fd = -1

    def _work(self, request: dict[str, Any]) -> tuple[Callable[[Talk], None], tuple[int, ...]]:
        self._queue: deque[memoryview] = deque()
        self._commit: dict[str, Any] | None = None
        theirs, self._fd = os.pipe()
        os.set_blocking(self._fd, False)
        mode = request.get("mode")
        path = request["path"]
        return lambda talk: _write(talk, path, None if mode is None else int(mode), theirs), (theirs,)

    def _on_progress(self, message: dict[str, Any]) -> None:
        if "written" in message:
            self._mux.message(self._stream, {"ev": "written", "length": message["length"], "crc32": message["crc32"]})
            self._end()
            return
        self._mux.accept(self._stream, message)

    def on_data(self, data: bytes) -> None:
        self._queue.append(memoryview(data))
        self._flush(0)

    def on_message(self, message: dict[str, Any]) -> None:
        if message.get("ev") == "commit":
            self._commit = message
            self._flush(0)

    def _flush(self, _mask: int) -> None:
        while self._queue and self._fd >= 0:
            data = self._queue[0]
            try:
                sent = os.write(self._fd, data)
            except BlockingIOError:
                if not self._loop.watches(self._fd):
                    self._loop.add(self._fd, WRITE, self._flush)
                return
            except BrokenPipeError:
                self._close()  # it says why in a message
                return
            self._mux.consumed(self._stream, sent)
            if sent == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = data[sent:]
        if self._fd >= 0:
            self._loop.remove(self._fd)
        if self._commit is not None:
            self._worker.say(length=self._commit.get("length"), crc32=self._commit.get("crc32"))
            self._commit = None
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            self._loop.remove(self._fd)
            os.close(self._fd)
            self._fd = -1

    def abort(self) -> None:
        super().abort()  # first: the worker must see that its agent is gone, not a file that ended
        self._close()


_JOBS: dict[str, type[_Job]] = {
    Op.STAT: _Job,
    Op.MKDIR: _Job,
    Op.RENAME: _Job,
    Op.REMOVE: _Job,
    Op.LIST: _Source,
    Op.READ: _Source,
    Op.WRITE: _Sink,
}
