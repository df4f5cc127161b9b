"""Commands, files and ports of a guest: the operations of wire.node.Guest that go over the data channel."""

from __future__ import annotations

import hashlib
import json
import posixpath
import signal as signals
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Literal

from perdure.core.errors import InvalidRequest, MachineFailed, PerdureError
from perdure.core.ids import ExecId
from perdure.machines.guestlink_exec import LinkExec, info_of, integer, moment_s
from perdure.machines.guestlink_stream import LinkStream
from perdure.wire.guest import EventKind
from perdure.wire.guest.ops import Op
from perdure.wire.node import ExecInfo, ExecSpec, FileInfo, FileKind, FileWritten
from perdure.wire.paths import guest_path

_LISTING_MAX = 64 * 1024 * 1024
#: What may be on the way of a file. A round trip to a guest takes milliseconds.
_TRANSFER_WINDOW = 1024 * 1024


class GuestFiles(ABC):
    """The data channel's half of a link."""

    def __init__(self, unresponsive_s: float) -> None:
        self._unresponsive_s = unresponsive_s
        self._open: Counter[str] = Counter()
        self._last_activity = time.monotonic()
        self._operations = 0

    @abstractmethod
    async def _open_stream(self, request: dict[str, Any]) -> LinkStream:
        """A new stream, once the link is ready."""

    @abstractmethod
    def _note_started(self, exec_id: ExecId) -> bool:
        """A command runs from now on. False when it was known to run."""

    @abstractmethod
    def _note_ended(self, exec_id: ExecId) -> None:
        """A command does not run any more. Safe twice."""

    def _touch(self) -> None:
        self._last_activity = time.monotonic()
        self._operations += 1

    def _count(self, stream: LinkStream, kind: Literal["exec", "stream", "outbound"]) -> None:
        """Count a stream as activity until it is over."""
        self._open[kind] += 1
        self._touch()

        def over() -> None:
            self._open[kind] -= 1
            self._touch()

        stream.on_over.append(over)

    async def _ask(
        self, request: dict[str, Any], kind: Literal["exec", "stream"] = "stream"
    ) -> tuple[LinkStream, dict[str, Any]]:
        stream = await self._open_stream(request)
        self._count(stream, kind)
        return stream, await stream.accepted(self._unresponsive_s)

    async def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        """A short operation whose acceptance is its result."""
        stream, result = await self._ask_only(request)
        await stream.close()
        return result

    async def _ask_only(self, request: dict[str, Any]) -> tuple[LinkStream, dict[str, Any]]:
        """Ask for something that needs nothing more from this side: the stream is over when the answer is."""
        stream = await self._open_stream(request)
        self._count(stream, "stream")
        await stream.close_write()
        return stream, await stream.accepted(self._unresponsive_s)

    # --------------------------------------------------------------------------------------------------- commands

    async def start_exec(self, spec: ExecSpec) -> LinkExec:
        """Start a command. Raises AlreadyExists for an id that the guest knows: attach instead, and nothing runs twice."""
        # Noted before it is asked for: a short command's end is told on the other channel and may overtake the answer.
        is_new = self._note_started(spec.exec_id)
        try:
            stream, _ = await self._ask(_exec_request(spec), "exec")
        except PerdureError:
            if is_new:
                self._note_ended(spec.exec_id)
            raise
        return self._handle(spec.exec_id, stream, (0, 0), takes_stdin=spec.stdin)

    async def attach_exec(self, exec_id: ExecId, stdout_offset: int = 0, stderr_offset: int = 0) -> LinkExec:
        stream = await self._attach(exec_id, stdout_offset, stderr_offset)
        return self._handle(exec_id, stream, (stdout_offset, stderr_offset))

    async def _attach(self, exec_id: ExecId, stdout_offset: int, stderr_offset: int) -> LinkStream:
        if stdout_offset < 0 or stderr_offset < 0:
            raise InvalidRequest("An output offset is not negative.")
        request = {"op": Op.ATTACH, "exec_id": exec_id, "stdout": stdout_offset, "stderr": stderr_offset}
        return (await self._ask(request, "exec"))[0]

    def _handle(self, exec_id: ExecId, stream: LinkStream, offsets: tuple[int, int], *, takes_stdin: bool = True) -> LinkExec:
        return LinkExec(
            exec_id,
            stream,
            offsets,
            lambda out, err: self._attach(exec_id, out, err),
            takes_stdin=takes_stdin,
            on_exited=lambda: self._note_ended(exec_id),
        )

    async def signal_exec(self, exec_id: ExecId, signal: int) -> None:
        if signal not in signals.valid_signals():
            raise InvalidRequest(f"{signal} is not a signal number.")
        await self._do({"op": Op.SIGNAL, "exec_id": exec_id, "signal": int(signal)})

    async def kill_exec(self, exec_id: ExecId) -> None:
        await self._do({"op": Op.KILL, "exec_id": exec_id})

    async def list_execs(self) -> tuple[ExecInfo, ...]:
        return tuple([info_of(row) for row in _rows(await self._collect({"op": Op.LIST_EXECS}))])

    # ------------------------------------------------------------------------------------------------------ files

    async def stat(self, path: str) -> FileInfo:
        result = await self._do({"op": Op.STAT, "path": guest_path(path)})
        return _file_of(result.get("info"))

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        return tuple([_file_of(row) for row in _rows(await self._collect({"op": Op.LIST, "path": guest_path(path)}))])

    async def _collect(self, request: dict[str, Any]) -> bytes:
        stream, _ = await self._ask_only(request)
        collected = bytearray()
        try:
            while data := await stream.read():
                collected += data
                if len(collected) > _LISTING_MAX:
                    raise MachineFailed("The workspace's listing is longer than 64 MiB.", hint="List a smaller directory.")
        finally:
            await stream.close()
        return bytes(collected)

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequest("Offset and length of a read are not negative.")
        request = {"op": Op.READ, "path": guest_path(path), "offset": offset, "length": length, "window": _TRANSFER_WINDOW}
        stream, _ = await self._ask_only(request)
        try:
            while data := await stream.read():
                yield data
        finally:
            await stream.close()

    async def write_file(self, path: str, content: AsyncIterator[bytes], *, mode: int | None = None) -> FileWritten:
        if mode is not None and not 0 <= mode <= 0o7777:
            raise InvalidRequest(f"{mode:o} is not a file mode.")
        # Bytes follow at once: a refusal comes early enough to stop all but a window of them.
        stream = await self._open_stream({"op": Op.WRITE, "path": guest_path(path), "mode": mode, "window": _TRANSFER_WINDOW})
        self._count(stream, "stream")
        length, crc, digest = 0, 0, hashlib.sha256()
        try:
            async for data in content:
                await stream.write(data)
                length, crc = length + len(data), zlib.crc32(data, crc)
                digest.update(data)
            await stream.message({"ev": "commit", "length": length, "crc32": crc})
            while True:
                event = await stream.next_event()
                if event is None:
                    raise MachineFailed("The workspace's agent ended the transfer without an answer.", ambiguous=True)
                if event.kind == EventKind.MESSAGE and event.value.get("ev") == "written":
                    break
        finally:
            await stream.close()
        if (event.value.get("length"), event.value.get("crc32")) != (length, crc):
            raise MachineFailed("The workspace wrote something else than was sent.", ambiguous=True)
        return FileWritten(path=path, length=length, crc32=crc, sha256=digest.hexdigest())

    async def make_dir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> None:
        await self._do({"op": Op.MKDIR, "path": guest_path(path), "parents": parents, "mode": mode})

    async def rename(self, source: str, destination: str) -> None:
        await self._do({"op": Op.RENAME, "path": guest_path(source), "destination": guest_path(destination)})

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        if posixpath.normpath(path).strip("/") == "":
            raise InvalidRequest("A workspace's root cannot be removed.", hint="Delete the workspace instead.")
        await self._do({"op": Op.REMOVE, "path": guest_path(path), "recursive": recursive})

    # ------------------------------------------------------------------------------------------------------ ports

    async def open_tcp(self, port: int) -> LinkStream:
        if not 1 <= port <= 65535:
            raise InvalidRequest(f"{port} is not a port number (1 to 65535).")
        return (await self._ask({"op": Op.TCP, "port": port}))[0]


def _exec_request(spec: ExecSpec) -> dict[str, Any]:
    if (spec.argv is None) == (spec.shell is None) or spec.argv == ():
        raise InvalidRequest("A command is either argv, with at least the program, or shell.")
    texts = [*(spec.argv or ()), spec.shell or "", *spec.env.values(), *spec.env]
    if any("\0" in text for text in texts) or any("=" in name or not name for name in spec.env):
        raise InvalidRequest("A command's words hold no NUL, and a variable's name neither '=' nor nothing.")
    for limit in (spec.run_limit_s, spec.idle_limit_s):
        if limit is not None and limit <= 0:
            raise InvalidRequest("A limit is a positive number of seconds.")
    return {
        "op": Op.EXEC,
        "exec_id": spec.exec_id,
        "argv": None if spec.argv is None else list(spec.argv),
        "shell": spec.shell,
        "env": dict(spec.env),
        "cwd": spec.cwd,
        "user": spec.user,
        "stdin": spec.stdin,
        "run_limit_s": spec.run_limit_s,
        "idle_limit_s": spec.idle_limit_s,
        "kill_grace_s": spec.kill_grace_s,
    }


def _rows(text: bytes) -> list[dict[str, Any]]:
    """Objects, one a line or one list of them."""
    try:
        rows = [json.loads(line) for line in text.splitlines() if line]
    except (ValueError, RecursionError) as error:
        raise MachineFailed("The workspace's agent sent a listing that cannot be read.") from error
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    return [row for row in rows if isinstance(row, dict)]


def _file_of(row: object) -> FileInfo:
    """A guest's row about a file. Names are the guest's bytes, kept as they are; whoever shows or uses them must be careful."""
    if not isinstance(row, dict) or not isinstance(row.get("path"), str) or not isinstance(row.get("name"), str):
        raise MachineFailed("The workspace's agent described something that is no file.")
    kind, target = row.get("kind"), row.get("target")
    return FileInfo(
        path=row["path"],
        name=row["name"],
        kind=FileKind(kind) if kind in list(FileKind) else FileKind.OTHER,
        size=max(0, integer(row.get("size"))),
        mode=integer(row.get("mode")) & 0o7777,
        uid=integer(row.get("uid")),
        gid=integer(row.get("gid")),
        modified_at=datetime.fromtimestamp(moment_s(row.get("modified_ns")), UTC),
        target=target if isinstance(target, str) else None,
    )
