"""Copies that go on after something broke, and directories as tar streams: what async and sync code share. No network here."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, Self

from perdure.core.errors import InvalidRequest, PerdureError
from perdure.sdk import _core
from perdure.sdk._core import CHUNK_BYTES
from perdure.sdk._local import LocalFile, LocalFileWriter, LocalTree, OnBytes, Skipped, Transfer, local_error, walk_local
from perdure.sdk.errors import ConnectionLost, TransferMismatch
from perdure.wire import public
from perdure.wire.guest import tar
from perdure.wire.node import FileKind

#: A file of this size is copied so that it can be gone on with. Smaller ones are sooner copied again.
RESUMED_BYTES = 16 << 20
#: What a local file whose size says nothing may have, as those of /proc.
UNSIZED_BYTES_MAX = 64 << 20
#: What may be over the next time: the server starts again, the workspace was put to sleep, an earlier transfer is not over yet.
_PASSING = {"unavailable", "server_unreachable", "busy", "machine_died", "stale_generation"}


class Patience:
    """When to go on with a transfer that broke, and when to give up."""

    def __init__(self) -> None:
        self._breaks = 0

    def progressed(self) -> None:
        self._breaks = 0

    def broke(self, error: PerdureError) -> float:
        """Seconds to wait before it is taken up again; raises ``error`` when that is pointless."""
        self._breaks += 1
        if not (isinstance(error, ConnectionLost) or error.code in _PASSING) or self._breaks > _core.RECONNECTS:
            raise error
        return _core.delay_s(self._breaks)


class Incoming:
    """A file on its way here. ``position`` is the next byte; it is taken up there as long as the file is the same."""

    def __init__(self, path: str, offset: int = 0, length: int | None = None, *, revision: str | None = None) -> None:
        self.position = offset
        self.resumed = revision is not None  # an earlier copy has come so far
        self._path = path
        self._end = None if length is None else offset + length
        self._etag = None if revision is None else f'"{revision}"'
        self._opened = False
        self._patience = Patience()

    def query(self) -> dict[str, object]:
        """What asks for the part; what is gone on with is asked for by ``headers``."""
        if self._etag is not None:
            return {}
        return {"offset": self.position or None, "length": None if self._end is None else self._end - self.position}

    def headers(self) -> dict[str, str]:
        if self._etag is None:
            return {}
        last = "" if self._end is None else str(self._end - 1)
        return {"range": f"bytes={self.position}-{last}", "if-range": self._etag}

    def opened(self, status: int, headers: Mapping[str, str]) -> bool:
        """An answer begins. False: it is another file than an earlier copy's, from its beginning. Raises TransferMismatch when
        that is so in the middle of this one."""
        goes_on = self._etag is None or status == 206 or self.position == 0
        if not goes_on and self._opened:
            raise TransferMismatch(f"{self._path!r} was changed while it was read.", hint="Read it again.")
        if not goes_on:
            self.position, self.resumed = 0, False
        self._opened = True
        etag = headers.get("etag", "")
        self._etag = etag if etag.startswith('"') else None
        return goes_on

    def took(self, count: int) -> None:
        self.position += count
        self._patience.progressed()

    @property
    def complete(self) -> bool:
        return self._end is not None and self.position >= self._end

    def broke(self, error: PerdureError) -> float:
        """As ``Patience``; a file whose sameness nobody can tell is not gone on with."""
        if self._opened and self._etag is None:
            raise error
        delay_s = self._patience.broke(error) if self._opened else _refuse(error)
        self.resumed = True
        return delay_s


def _refuse(error: PerdureError) -> float:
    """What never began is for the caller to begin again."""
    raise error


class Outgoing:
    """A file on its way out, from any of its bytes on: hashed once, told of once."""

    def __init__(self, file: IO[bytes], on_bytes: OnBytes | None = None) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._on_bytes = on_bytes
        self.length = 0
        """How far it was read; all of it in the end."""

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def pieces(self, offset: int) -> Iterator[bytes]:
        """From ``offset`` on. What nobody has hashed before it is, on the way."""
        position = min(offset, self.length)
        self._file.seek(position)
        while piece := self._file.read(CHUNK_BYTES):
            new = max(0, position + len(piece) - self.length)
            if new:
                self._digest.update(piece[len(piece) - new :])
                self.length += new
                if self._on_bytes is not None:
                    self._on_bytes(new)
            if position + len(piece) > offset:
                yield piece[max(0, offset - position) :]
            position += len(piece)
        if self.length < offset:
            raise InvalidRequest(
                f"The workspace has {offset} bytes of it already, and it has {self.length} here: it is another file.",
                hint="Copy it again.",
            )


def upload_id(*parts: object) -> str:
    """The id of an upload: the same for the same parts, so that the next process goes on with it. Without any a new one."""
    if not parts:
        return f"upl_{secrets.token_hex(20)}"
    return f"upl_{hashlib.sha256(repr(parts).encode('utf-8', 'surrogateescape')).hexdigest()[:40]}"


def part_name(*parts: object) -> str:
    """The local name of a download that is not complete."""
    return f".perdure-part-{hashlib.sha256(repr(parts).encode('utf-8', 'surrogateescape')).hexdigest()[:24]}"


# ------------------------------------------------------------------------------------------------------------- directories


def pack(local: str | os.PathLike[str], transfer: Transfer, on_bytes: OnBytes | None = None) -> Iterator[bytes]:
    """A local directory as a tar stream; counts into ``transfer`` what it has."""
    for entry in walk_local(local, transfer):
        if entry.is_directory:
            transfer.directories += 1
            yield tar.header(_entry(entry, tar.Kind.DIRECTORY, f"{entry.relative or '.'}/"))
        elif entry.target is not None:
            transfer.links += 1
            yield tar.header(_entry(entry, tar.Kind.SYMLINK, entry.relative))
        else:
            yield from _pack_file(entry, transfer, on_bytes)
    yield tar.END


def _entry(entry: LocalFile, kind: str, path: str, size: int = 0) -> tar.Entry:
    return tar.Entry(path, kind, size=size, mode=entry.mode, mtime_ns=entry.modified_ns, target=entry.target or "")


def _pack_file(entry: LocalFile, transfer: Transfer, on_bytes: OnBytes | None) -> Iterator[bytes]:
    try:
        file = entry.path.open("rb")
    except OSError as error:
        transfer.skipped.append(Skipped(str(entry.path), f"it cannot be read: {os.strerror(error.errno or 0)}"))
        return
    with file:
        try:
            size = os.fstat(file.fileno()).st_size
            head = b"" if size else file.read(UNSIZED_BYTES_MAX)  # as in /proc, where only reading tells
        except OSError as error:
            raise local_error(entry.path, error) from error
        size = size or len(head)
        yield tar.header(_entry(entry, tar.Kind.FILE, entry.relative, size))
        left = size
        while left:
            piece = head or file.read(min(CHUNK_BYTES, left))
            head = b""
            if not piece:
                raise InvalidRequest(f"The local file {str(entry.path)!r} became shorter while it was read.", hint="Copy again.")
            left -= len(piece)
            transfer.bytes += len(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
            yield piece
        yield tar.padding(size)
    transfer.files += 1


@dataclass
class _Directory:
    name: str
    info: public.FileInfo
    modified_ns: int | None


class Unpacker:
    """Unpacks a workspace's tar stream into a ``LocalTree``, which lets nothing be made outside of it.

    What could lead out is skipped and named, like everything else that must not be made here.
    """

    def __init__(self, tree: LocalTree, on_bytes: OnBytes | None = None) -> None:
        self._tree = tree
        self._on_bytes = on_bytes
        self._reader = tar.Reader()
        self._path: list[_Directory] = []  # that are open in the tree, its top left out
        self._top: _Directory | None = None
        self._closed: tuple[str, ...] | None = None  # a directory that could not be entered: what is below it goes with it
        self._file = ExitStack()
        self._writer: LocalFileWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._writer = None
        self._file.__exit__(kind, value, trace)  # a file that is not complete leaves nothing

    def feed(self, data: bytes) -> None:
        """Raises InvalidRequest for what is no archive."""
        try:
            for part in self._reader.feed(data):
                if isinstance(part, tar.Entry):
                    self._begin(part)
                elif part is None:
                    self._writer = None
                    self._file.close()
                elif self._writer is not None:
                    self._writer.write(part)
                    if self._on_bytes is not None:
                        self._on_bytes(len(part))
        except tar.BadArchive as error:
            raise InvalidRequest(f"The workspace sent an archive that cannot be read: {error}", hint="Copy again.") from error

    def finish(self) -> None:
        """All has come. Raises ConnectionLost if it has not."""
        try:
            self._reader.finish()
        except tar.BadArchive as error:
            raise ConnectionLost("The workspace's archive ended in the middle.") from error
        self._climb(0)
        if self._top is not None:
            self._tree.leave((), self._top.info, modified_ns=self._top.modified_ns)
        self._note_remarks()

    def _note_remarks(self) -> None:
        """What the workspace could not pack."""
        remarks, self._reader.comments = self._reader.comments, []
        for remark in remarks:
            skipped, _, rest = remark.partition(": ")
            if skipped == "skipped":
                reason, _, path = rest.partition(": ")
                self._tree.skip((path,), reason)

    def _begin(self, entry: tar.Entry) -> None:
        self._note_remarks()
        info = _info_of(entry)
        try:
            names = tuple(tar.parts_of(entry.path))
        except tar.BadArchive:
            self._tree.skip((entry.path,), "its name is not a file name")
            return
        if self._top is None:
            self._top = _Directory("", info, entry.mtime_ns if not names else None)
            if not self._tree.enter((), info):
                raise InvalidRequest("The destination cannot be entered.", hint="Choose another one.")
        if entry.kind == tar.Kind.DIRECTORY:
            if names and self._enter(names):
                self._path[-1].info, self._path[-1].modified_ns = info, entry.mtime_ns
            return
        if not names or not self._enter(names[:-1]):
            return
        name = self._tree.admit_name(names[:-1], names[-1])
        if name is None:
            return
        if entry.kind == tar.Kind.FILE:
            self._writer = self._file.enter_context(self._tree.create(names, info, modified_ns=entry.mtime_ns))
        elif entry.kind == tar.Kind.SYMLINK:
            self._tree.link(names, info)
        else:
            self._tree.skip(names, "it is a device, socket or pipe")

    def _enter(self, names: tuple[str, ...]) -> bool:
        """Go into a directory of the tree; False when its place, or that of one above it, is taken."""
        if self._closed is not None and names[: len(self._closed)] == self._closed:
            return False
        common = 0
        while common < min(len(names), len(self._path)) and self._path[common].name == names[common]:
            common += 1
        self._climb(common)
        for depth in range(common, len(names)):
            plain = _info_of(tar.Entry("", tar.Kind.DIRECTORY, mode=0o755))
            if self._tree.admit_name(names[:depth], names[depth]) is None or not self._tree.enter(names[: depth + 1], plain):
                self._closed = names[: depth + 1]
                return False
            self._path.append(_Directory(names[depth], plain, None))
        return True

    def _climb(self, depth: int) -> None:
        while len(self._path) > depth:
            names = tuple(one.name for one in self._path)
            done = self._path.pop()
            self._tree.leave(names, done.info, modified_ns=done.modified_ns)


def _info_of(entry: tar.Entry) -> public.FileInfo:
    kinds = {tar.Kind.FILE: FileKind.FILE, tar.Kind.DIRECTORY: FileKind.DIRECTORY, tar.Kind.SYMLINK: FileKind.SYMLINK}
    return public.FileInfo.model_construct(
        path=entry.path,
        name=entry.path,
        kind=kinds.get(entry.kind, FileKind.OTHER),
        size=entry.size,
        mode=entry.mode,
        uid=0,
        gid=0,
        modified_at=datetime.fromtimestamp(0, UTC),
        target=entry.target,
    )
