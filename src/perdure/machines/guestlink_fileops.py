"""Files of a guest: wire.node.FileOperations over a link."""

from __future__ import annotations

import hashlib
import json
import posixpath
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Any

from perdure.core.errors import InvalidRequest, MachineFailed
from perdure.machines.guestlink_asking import Asking
from perdure.machines.guestlink_exec import integer, moment_s
from perdure.machines.guestlink_stream import LinkStream, clean
from perdure.wire.guest import EventKind
from perdure.wire.guest.ops import Op
from perdure.wire.node import (
    Attributes,
    FileHash,
    FileInfo,
    FileKind,
    FileWritten,
    FinishUpload,
    Place,
    TreeWritten,
    WatchEvent,
    WatchKind,
)
from perdure.wire.paths import guest_place, shown

#: What may be on the way of a file. A round trip to a guest takes milliseconds.
_TRANSFER_WINDOW = 1024 * 1024
#: A path of 4096 bytes, escaped, twice.
_EVENT_BYTES_MAX = 64 * 1024


class LinkReading:
    """Implements wire.node.ByteReading."""

    def __init__(self, stream: LinkStream) -> None:
        self._stream = stream

    async def chunks(self) -> AsyncIterator[bytes]:
        while data := await self._stream.read():
            yield data

    async def close(self) -> None:
        await self._stream.close()


class LinkFile(LinkReading):
    """Implements wire.node.FileReading."""

    def __init__(self, stream: LinkStream, info: FileInfo, size: int | None, offset: int) -> None:
        super().__init__(stream)
        self.info = info
        self.size = size
        self.offset = offset


class LinkWatch:
    """Implements wire.node.WatchHandle."""

    def __init__(self, stream: LinkStream, watch_id: str) -> None:
        self._stream = stream
        self.watch_id = watch_id

    async def events(self) -> AsyncIterator[WatchEvent]:
        rest = b""
        while data := await self._stream.read():
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _EVENT_BYTES_MAX:
                raise MachineFailed("The workspace's agent sent an event that cannot be read.")
            for line in lines:
                yield _event_of(line)

    async def close(self) -> None:
        await self._stream.close()


class LinkFiles(Asking):
    """The half of a link that is about files."""

    async def stat(self, path: Place) -> FileInfo:
        result = await self._do({"op": Op.STAT, **guest_place(path)})
        return _file_of(result.get("info"))

    async def list_dir(self, path: Place) -> tuple[FileInfo, ...]:
        return tuple([_file_of(row) for row in rows_of(await self._collect({"op": Op.LIST, **guest_place(path)}))])

    # ---------------------------------------------------------------------------------------------------- reading

    async def open_file(
        self, path: Place, offset: int = 0, length: int | None = None, *, revision: str | None = None
    ) -> LinkFile:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequest("Offset and length of a read are not negative.")
        request = {"op": Op.READ, **guest_place(path), "offset": offset, "length": length, "window": _TRANSFER_WINDOW}
        if revision is not None:
            request["revision"] = revision
        stream, answer = await self._ask_only(request)
        try:
            size, begins = answer.get("size"), answer.get("offset")
            if begins is None and revision is not None:  # an agent before 0.3.1, which cannot tell whether it changed
                await stream.close()
                return await self.open_file(path)
            if "info" in answer:
                info = _file_of(answer["info"])
            else:
                info, size = await self.stat(path), size or None
        except BaseException:
            await stream.close()
            raise
        return LinkFile(stream, info, None if size is None else max(0, integer(size)), integer(begins, offset))

    async def read_file(self, path: Place, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes]:
        reading = await self.open_file(path, offset, length)
        try:
            async for data in reading.chunks():
                yield data
        finally:
            await reading.close()

    async def hash_file(self, path: Place) -> FileHash:
        rows = rows_of(await self._collect({"op": Op.HASH, **guest_place(path)}))
        if len(rows) != 1 or not isinstance(rows[0].get("sha256"), str):
            raise MachineFailed("The workspace's agent hashed something that is no file.")
        revision = rows[0].get("revision")
        return FileHash(integer(rows[0].get("size")), clean(rows[0]["sha256"]), clean(revision) if revision else None)

    async def pack(self, path: Place) -> LinkReading:
        return LinkReading((await self._ask_only({"op": Op.PACK, **guest_place(path), "window": _TRANSFER_WINDOW}))[0])

    # ---------------------------------------------------------------------------------------------------- writing

    async def write_file(self, path: Place, content: AsyncIterator[bytes], *, mode: int | None = None) -> FileWritten:
        _check_mode(mode)
        sent = await self._send({"op": Op.WRITE, **guest_place(path), "mode": mode}, content)
        return FileWritten(path=shown(path), length=sent.length, crc32=sent.crc, sha256=sent.digest.hexdigest())

    async def unpack(self, path: Place, content: AsyncIterator[bytes]) -> TreeWritten:
        sent = await self._send({"op": Op.UNPACK, **guest_place(path)}, content)
        counts = [max(0, integer(sent.answer.get(name))) for name in ("files", "directories", "links")]
        return TreeWritten(sent.length, *counts)

    async def _send(self, request: dict[str, Any], content: AsyncIterator[bytes]) -> _Sent:
        """Send bytes; returns when the guest has all of them and says the same of them."""
        # Bytes follow at once: a refusal comes early enough to stop all but a window of them.
        stream = await self._open_stream({**request, "window": _TRANSFER_WINDOW})
        self._count(stream, "stream")
        sent = _Sent()
        try:
            async for data in content:
                await stream.write(data)
                sent.add(data)
            await stream.message({"ev": "commit", "length": sent.length, "crc32": sent.crc})
            sent.answer = await _written(stream)
        finally:
            await stream.close()
        if (sent.answer.get("length"), sent.answer.get("crc32")) != (sent.length, sent.crc):
            raise MachineFailed("The workspace wrote something else than was sent.", ambiguous=True)
        return sent

    # ---------------------------------------------------------------------------------------------------- uploads

    async def begin_upload(self, upload_id: str, path: Place | None = None) -> int:
        where = {} if path is None else guest_place(path)
        return await self._upload({"do": "begin", "id": upload_id, **where})

    async def upload_offset(self, upload_id: str) -> int:
        return await self._upload({"do": "look", "id": upload_id})

    async def drop_upload(self, upload_id: str) -> None:
        await self._upload({"do": "drop", "id": upload_id})

    async def _upload(self, request: dict[str, Any]) -> int:
        return max(0, integer((await self._do({"op": Op.UPLOAD, **request})).get("offset")))

    async def append_upload(self, upload_id: str, offset: int, content: AsyncIterator[bytes]) -> int:
        sent = await self._send({"op": Op.APPEND, "id": upload_id, "offset": offset}, content)
        return offset + sent.length

    async def finish_upload(self, finish: FinishUpload) -> None:
        _check_mode(finish.mode)
        wanted = {"length": finish.length, "sha256": finish.sha256, "mode": finish.mode}
        request = {"op": Op.FINISH, "id": finish.upload_id, **guest_place(finish.place), **wanted}
        stream, _ = await self._ask(request)
        try:
            await _written(stream)
        finally:
            await stream.close()

    # ------------------------------------------------------------------------------------------------------ names

    async def make_dir(self, path: Place, *, parents: bool = True, mode: int = 0o755) -> None:
        await self._do({"op": Op.MKDIR, **guest_place(path), "parents": parents, "mode": mode})

    async def rename(self, source: Place, destination: Place) -> None:
        old, new = guest_place(source), guest_place(destination)
        if old.get("root") != new.get("root"):
            raise InvalidRequest("Both names of a rename are below the same root.")
        await self._do({"op": Op.RENAME, **old, "destination": new["path"]})

    async def remove(self, path: Place, *, recursive: bool = False) -> None:
        if posixpath.normpath(shown(path)).strip("/") in {"", "."}:
            raise InvalidRequest("A workspace's root cannot be removed.", hint="Delete the workspace instead.")
        await self._do({"op": Op.REMOVE, **guest_place(path), "recursive": recursive})

    async def set_attributes(self, path: Place, attributes: Attributes) -> FileInfo:
        _check_mode(attributes.mode)
        request = {"op": Op.ATTRIBUTES, **guest_place(path), "mode": attributes.mode, "owner": attributes.owner}
        return _file_of((await self._do(request)).get("info"))

    async def make_link(self, path: Place, target: str) -> None:
        if not target or "\0" in target:
            raise InvalidRequest("A link needs a target, without NUL.")
        await self._do({"op": Op.SYMLINK, **guest_place(path), "target": target})

    # -------------------------------------------------------------------------------------------------- watching

    async def watch(self, path: Place, *, recursive: bool = False) -> LinkWatch:
        return await self._watch({**guest_place(path), "recursive": recursive})

    async def resume_watch(self, watch_id: str, after: int) -> LinkWatch:
        return await self._watch({"watch": watch_id, "after": after})

    async def _watch(self, request: dict[str, Any]) -> LinkWatch:
        stream, answer = await self._ask_only({"op": Op.WATCH, **request})
        return LinkWatch(stream, clean(answer.get("watch")))


class _Sent:
    """What has left, and what the guest said of it."""

    def __init__(self) -> None:
        self.length = self.crc = 0
        self.digest = hashlib.sha256()
        self.answer: dict[str, Any] = {}

    def add(self, data: bytes) -> None:
        self.length, self.crc = self.length + len(data), zlib.crc32(data, self.crc)
        self.digest.update(data)


async def _written(stream: LinkStream) -> dict[str, Any]:
    """The guest's word that it is done, however long that takes."""
    while True:
        event = await stream.next_event()
        if event is None:
            raise MachineFailed("The workspace's agent ended the transfer without an answer.", ambiguous=True)
        if event.kind == EventKind.MESSAGE and event.value.get("ev") == "written":
            answer: dict[str, Any] = event.value
            return answer


def _check_mode(mode: int | None) -> None:
    if mode is not None and not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"{mode:o} is not a file mode.")


def rows_of(text: bytes) -> list[dict[str, Any]]:
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
    kind, target, revision = row.get("kind"), row.get("target"), row.get("revision")
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
        revision=clean(revision) if isinstance(revision, str) else None,
    )


def _event_of(line: bytes) -> WatchEvent:
    rows = rows_of(line)
    kind = rows[0].get("kind") if len(rows) == 1 else None
    if kind not in list(WatchKind) or not isinstance(rows[0].get("path"), str):
        raise MachineFailed("The workspace's agent sent an event that cannot be read.")
    row, old = rows[0], rows[0].get("old_path")
    return WatchEvent(
        seq=max(0, integer(row.get("seq"))),
        kind=WatchKind(kind),
        path=row["path"],
        is_directory=row.get("directory") is True,
        old_path=old if isinstance(old, str) else None,
        reason=clean(row.get("reason")),
    )
