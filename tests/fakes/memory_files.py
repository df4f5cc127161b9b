"""Files of a workspace in memory: the part of ``MemoryGuest`` that is ``wire.node.FileOperations``."""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import re
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from perdure.core.errors import (
    AlreadyExists,
    Busy,
    Conflict,
    InvalidRequest,
    MachineFailed,
    NotFound,
    PathEscape,
    StaleGeneration,
)
from perdure.machines.guestlink_stream import Moved
from perdure.wire import node
from perdure.wire.guest import tar
from perdure.wire.guest.ops import UPLOADS_DIR
from perdure.wire.node import Beneath, FileKind, Place, WatchKind
from perdure.wire.paths import shown
from tests.fakes.memory_watch import Handle, Watch

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MOMENT_NS = int(MOMENT.timestamp()) * 10**9
_KINDS = {tar.Kind.FILE: FileKind.FILE, tar.Kind.DIRECTORY: FileKind.DIRECTORY, tar.Kind.SYMLINK: FileKind.SYMLINK}


@dataclass
class Node:
    kind: FileKind
    content: bytearray = field(default_factory=bytearray)
    mode: int = 0o644
    target: str | None = None
    declared_size: int | None = None  # what stat says, when it lies
    owner: tuple[int, int] = (0, 0)
    modified_ns: int = MOMENT_NS
    revision: str = "0"


class Disk:
    """What survives generations: files, those of uploads in pieces too; ``busy`` are the uploads that are being written."""

    def __init__(self) -> None:
        self.files: dict[str, Node] = {"/": Node(FileKind.DIRECTORY, mode=0o755), "/root": Node(FileKind.DIRECTORY, mode=0o755)}
        self.busy: set[str] = set()
        self.watches: dict[str, Watch] = {}
        self.largest_chunk = 0  # of any upload
        self.fail_write_after: int | None = None
        self._changes = 0

    def put(self, path: str, made: Node) -> None:
        old = self.files.get(path)
        self._changes += 1
        made.revision = str(self._changes)
        self.files[path] = made
        self.tell(WatchKind.CREATED if old is None else WatchKind.WRITTEN, path, made.kind is FileKind.DIRECTORY)

    def tell(self, kind: WatchKind, path: str, is_directory: bool, old: str | None = None) -> None:
        for watch in self.watches.values():
            watch.tell(kind, path, is_directory, old)


class Reading:
    """Bytes of a file or an archive."""

    def __init__(self, files: MemoryFiles, content: bytes) -> None:
        self._files = files
        self._content = content

    async def chunks(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._content), 65536):
            chunk = self._content[start : start + 65536]
            self._files.moved.outward += len(chunk)
            yield chunk
            self._files.check()

    async def close(self) -> None:
        """Nothing is held."""


class FileReading(Reading):
    def __init__(self, files: MemoryFiles, content: bytes, info: node.FileInfo, size: int | None, offset: int) -> None:
        super().__init__(files, content)
        self.info, self.size, self.offset = info, size, offset


class MemoryFiles:
    """Operations on a ``Disk``."""

    def __init__(self, world: Disk) -> None:
        self.disk = world
        self.broken = asyncio.Event()
        self.moved = Moved()  # by this generation's callers

    async def _arriving(self, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in content:
            self.moved.inward += len(chunk)
            self.disk.largest_chunk = max(self.disk.largest_chunk, len(chunk))
            yield chunk

    def check(self) -> None:
        if self.broken.is_set():
            raise StaleGeneration("The workspace is no longer at this generation.")

    # places

    def _where(self, place: Place, *, follow: bool = True) -> str:
        """The absolute path of a place; of one below a root as its links lead, or PathEscape."""
        self.check()
        if isinstance(place, str):
            where = posixpath.normpath(place)
            target = self.disk.files[where].target if follow and where in self.disk.files else None
            leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(where), target or ""))
            return leads_to if target is not None and leads_to in self.disk.files else where
        root, at, links = posixpath.normpath(place.root), list[str](), 0
        todo = place.path.split("/")[::-1]
        while todo:
            name = todo.pop()
            if name == ".." and not at:
                raise PathEscape(f"{place.path}: leads out of its root.")
            if name in {"", "."}:
                continue
            if name == "..":
                at.pop()
                continue
            found = self.disk.files.get(posixpath.join(root, *at, name))
            if found is not None and found.kind is FileKind.SYMLINK and (any(todo) or follow):
                links += 1
                if links > 40 or (found.target or "").startswith("/"):
                    raise PathEscape(f"{place.path}: the link {name} leads out of its root.")
                todo += (found.target or "").split("/")[::-1]
            else:
                at.append(name)
        return posixpath.join(root, *at)

    def _node(self, path: str) -> Node:
        self.check()
        if path not in self.disk.files:
            raise NotFound(f"There is no {path!r} in the workspace.")
        return self.disk.files[path]

    def _inside(self, path: str) -> list[str]:
        return [one for one in self.disk.files if one != path and one.startswith(path.rstrip("/") + "/")]

    def _info(self, path: str, place: Place, found: Node) -> node.FileInfo:
        return node.FileInfo(
            shown(place),
            posixpath.basename(path) or "/",
            found.kind,
            len(found.content) if found.declared_size is None else found.declared_size,
            found.mode,
            *found.owner,
            datetime.fromtimestamp(found.modified_ns / 1e9, UTC),
            found.target,
            found.revision if found.kind is FileKind.FILE else None,
        )

    async def stat(self, path: Place) -> node.FileInfo:
        where = self._where(path, follow=False)
        return self._info(where, path, self._node(where))

    async def list_dir(self, path: Place) -> tuple[node.FileInfo, ...]:
        root = self._where(path)
        if self._node(root).kind is not FileKind.DIRECTORY:
            raise InvalidRequest(f"{shown(path)!r} is not a directory.")
        inside = sorted(one for one in self.disk.files if one != "/" and posixpath.dirname(one) == root)
        names = [(one, posixpath.join(shown(path), one.rpartition("/")[2])) for one in inside]
        return tuple(self._info(one, named, self.disk.files[one]) for one, named in names)

    # reading

    async def open_file(
        self, path: Place, offset: int = 0, length: int | None = None, *, revision: str | None = None
    ) -> FileReading:
        where = self._where(path)
        found = self._node(where)
        if found.kind is not FileKind.FILE and found.kind is not FileKind.SYMLINK:
            what = "a directory" if found.kind is FileKind.DIRECTORY else "not a regular file"
            raise InvalidRequest(f"{shown(path)}: is {what}.")
        if revision is not None and revision != found.revision:
            offset, length = 0, None
        content = bytes(found.content[offset : None if length is None else offset + length])
        size = len(found.content) if found.declared_size is None else None
        return FileReading(self, content, self._info(where, path, found), size, offset)

    async def read_file(self, path: Place, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        async for chunk in (await self.open_file(path, offset, length)).chunks():
            yield chunk

    async def hash_file(self, path: Place) -> node.FileHash:
        reading = await self.open_file(path)
        content = bytes(self._node(self._where(path)).content)  # read inside: nobody gets a byte of it
        return node.FileHash(len(content), hashlib.sha256(content).hexdigest(), reading.info.revision)

    # writing

    async def write_file(self, path: Place, content: AsyncIterator[bytes], *, mode: int | None = None) -> node.FileWritten:
        where = self._where(path)
        self._check_target(where)
        digest, crc, length, kept = hashlib.sha256(), 0, 0, bytearray()
        async for chunk in self._arriving(content):
            digest.update(chunk)
            crc = zlib.crc32(chunk, crc)
            length += len(chunk)
            if len(kept) < 1 << 20:  # what is larger is counted and hashed, not kept
                kept += chunk
            if self.disk.fail_write_after is not None and length > self.disk.fail_write_after:
                raise MachineFailed("The guest broke in the middle of a write.")
        self._replace(where, kept, mode)
        return node.FileWritten(shown(path), length, crc, digest.hexdigest())

    def _check_target(self, where: str) -> None:
        if self._node(posixpath.dirname(where)).kind is not FileKind.DIRECTORY:
            raise InvalidRequest("The parent is not a directory.")
        if where in self.disk.files and self.disk.files[where].kind is FileKind.DIRECTORY:
            raise InvalidRequest(f"{where}: is a directory.")

    def _replace(self, where: str, content: bytearray, mode: int | None) -> None:
        self.check()
        old = self.disk.files.get(where)
        self.disk.put(where, Node(FileKind.FILE, content, mode if mode is not None else old.mode if old else 0o644))

    async def begin_upload(self, upload_id: str, path: Place | None = None) -> int:
        self.check()
        if path is not None:
            where = self._where(path)
            if where in self.disk.files:
                self._check_target(where)
        return len(self.disk.files.setdefault(_piece(upload_id), Node(FileKind.FILE, mode=0o600)).content)

    def _upload(self, upload_id: str) -> bytearray:
        self.check()
        if _piece(upload_id) not in self.disk.files:
            raise NotFound(f"There is no upload {upload_id}.")
        return self.disk.files[_piece(upload_id)].content

    async def upload_offset(self, upload_id: str) -> int:
        return len(self._upload(upload_id))

    async def append_upload(self, upload_id: str, offset: int, content: AsyncIterator[bytes]) -> int:
        kept = self._upload(upload_id)
        if upload_id in self.disk.busy:
            raise Busy("Another transfer writes this upload.")
        if len(kept) != offset:
            raise Conflict(f"The upload has {len(kept)} bytes, not {offset}; go on from there.")
        self.disk.busy.add(upload_id)
        try:
            async for chunk in self._arriving(content):
                self.check()
                kept += chunk
        finally:
            self.disk.busy.discard(upload_id)
        return len(kept)

    async def finish_upload(self, finish: node.FinishUpload) -> None:
        where = self._where(finish.place)
        self._check_target(where)
        old = self.disk.files.get(where)
        if _piece(finish.upload_id) not in self.disk.files and old is not None and finish.sha256 and _is(old.content, finish):
            return
        kept = self._upload(finish.upload_id)
        if len(kept) != finish.length:
            raise Conflict(f"The upload has {len(kept)} bytes, not {finish.length}; go on from there.")
        del self.disk.files[_piece(finish.upload_id)]
        if not _is(kept, finish):
            raise Conflict("The upload's SHA-256 is not the one that was told; it was thrown away.")
        self._replace(where, kept, finish.mode)

    async def drop_upload(self, upload_id: str) -> None:
        self.check()
        self.disk.files.pop(_piece(upload_id), None)

    # names

    async def make_dir(self, path: Place, *, parents: bool = True, mode: int = 0o755) -> None:
        where = self._where(path)
        if where in self.disk.files:
            if not parents or self._node(where).kind is not FileKind.DIRECTORY:
                raise AlreadyExists(f"{shown(path)!r} exists.")
            return
        if parents:
            await self.make_dir(posixpath.dirname(where))
        self._node(posixpath.dirname(where))
        self.disk.put(where, Node(FileKind.DIRECTORY, mode=mode))

    async def rename(self, source: Place, destination: Place) -> None:
        if isinstance(source, str) is not isinstance(destination, str):
            raise InvalidRequest("Both names of a rename are below the same root.")
        old, new = self._where(source, follow=False), self._where(destination, follow=False)
        moved = self._node(old)
        self._node(posixpath.dirname(new))
        for one in self._inside(old):
            self.disk.files[new + one[len(old) :]] = self.disk.files.pop(one)
        self.disk.files[new] = self.disk.files.pop(old)
        self.disk.tell(WatchKind.RENAMED, new, moved.kind is FileKind.DIRECTORY, old)

    async def remove(self, path: Place, *, recursive: bool = False) -> None:
        where = self._where(path, follow=False)
        if where == (posixpath.normpath(path.root) if isinstance(path, Beneath) else "/"):
            raise InvalidRequest("The root itself cannot be removed.")
        self._node(where)
        inside = self._inside(where)
        if inside and not recursive:
            raise Conflict(f"{shown(path)!r} is not empty.")
        for one in [*sorted(inside, reverse=True), where]:
            gone = self.disk.files.pop(one)
            self.disk.tell(WatchKind.REMOVED, one, gone.kind is FileKind.DIRECTORY)

    async def set_attributes(self, path: Place, attributes: node.Attributes) -> node.FileInfo:
        where = self._where(path)
        found = self._node(where)
        if attributes.owner is not None:
            user, _, group = attributes.owner.partition(":")
            if not all(one in {"", "root", "nobody"} or one.isdecimal() for one in (user, group)):
                raise InvalidRequest(f"There is no user {user!r} in the workspace's /etc/passwd.")
            numbers = {"root": 0, "nobody": 65534}
            found.owner = (numbers.get(user, int(user or found.owner[0]) if user.isdecimal() or not user else 0), found.owner[1])
            if group.isdecimal():
                found.owner = (found.owner[0], int(group))
        if attributes.mode is not None:
            found.mode = attributes.mode
        self.disk.tell(WatchKind.ATTRIBUTES, where, found.kind is FileKind.DIRECTORY)
        return self._info(where, path, found)

    async def make_link(self, path: Place, target: str) -> None:
        where = self._where(path, follow=False)
        self._node(posixpath.dirname(where))
        if where in self.disk.files:
            raise AlreadyExists(f"{shown(path)!r} exists.")
        self.disk.put(where, Node(FileKind.SYMLINK, mode=0o777, target=target))

    # directories

    async def pack(self, path: Place) -> Reading:
        root = self._where(path)
        if self._node(root).kind is not FileKind.DIRECTORY:
            raise InvalidRequest(f"{shown(path)}: is not a directory.")
        parts = [_header(self.disk.files[root], "./")]
        for one in sorted(self._inside(root), key=lambda path: path.split("/")):
            found, relative = self.disk.files[one], one[len(root.rstrip("/")) + 1 :]
            if found.kind is FileKind.OTHER:
                parts.append(tar.comment(f"skipped: it is a device, socket or pipe: {relative}"))
                continue
            content = bytes(found.content) if found.kind is FileKind.FILE else b""
            parts += [_header(found, relative), content, tar.padding(len(content))]
        return Reading(self, b"".join([*parts, tar.END]))

    async def unpack(self, path: Place, content: AsyncIterator[bytes]) -> node.TreeWritten:
        await self.make_dir(path)
        root, reader, length = self._where(path), tar.Reader(), 0
        counts = dict.fromkeys(FileKind, 0)
        current: tuple[str, tar.Entry, bytearray] | None = None
        try:
            async for chunk in self._arriving(content):
                length += len(chunk)
                for part in reader.feed(chunk):
                    if isinstance(part, tar.Entry):
                        current = (self._member(root, part), part, bytearray())
                        if part.kind != tar.Kind.FILE:
                            counts[self._put(*current)] += 1
                    elif part is None and current is not None:
                        counts[self._put(*current)] += 1
                    elif part is not None and current is not None:
                        current[2].extend(part)
            reader.finish()
        except tar.BadArchive as error:
            raise InvalidRequest(f"{str(error).rstrip('.')}. What came before it was unpacked.") from error
        return node.TreeWritten(length, counts[FileKind.FILE], counts[FileKind.OTHER], counts[FileKind.SYMLINK])

    def _member(self, root: str, entry: tar.Entry) -> str:
        self.check()
        names = tar.parts_of(entry.path)
        if entry.kind not in _KINDS:
            raise tar.BadArchive(f"{entry.path!r} is a device or pipe, which is not unpacked here.")
        if entry.kind == tar.Kind.SYMLINK and tar.leads_out(entry.target, len(names) - 1):
            raise PathEscape(f"{entry.path}: is a link that could lead out. What came before it was unpacked.")
        for depth in range(1, len(names)):
            above = posixpath.join(root, *names[:depth])
            if above not in self.disk.files:
                self.disk.put(above, Node(FileKind.DIRECTORY, mode=0o755))
            if self.disk.files[above].kind is not FileKind.DIRECTORY:
                raise Conflict(f"{above}: something that is no directory is in its place.")
        return posixpath.join(root, *names)

    def _put(self, where: str, entry: tar.Entry, content: bytearray) -> FileKind:
        """Make the member; returns what it counts as (OTHER for a directory that is new)."""
        kind, old = _KINDS[entry.kind], self.disk.files.get(where)
        if kind is FileKind.DIRECTORY:
            if old is None:
                self.disk.put(where, Node(kind, mode=entry.mode & 0o777, modified_ns=entry.mtime_ns))
                return FileKind.OTHER
            return FileKind.DIRECTORY
        if old is not None and old.kind is FileKind.DIRECTORY:
            raise Conflict(f"{where}: a directory is in its place.")
        target = entry.target if kind is FileKind.SYMLINK else None
        self.disk.put(where, Node(kind, content, entry.mode & 0o777, target, modified_ns=entry.mtime_ns))
        return kind

    # watching

    async def watch(self, path: Place, *, recursive: bool = False) -> Handle:
        where = self._where(path)
        if self._node(where).kind is not FileKind.DIRECTORY:
            raise InvalidRequest(f"{shown(path)}: not a directory.")
        watch = Watch(f"wch_{len(self.disk.watches):020d}", where, path, recursive)
        self.disk.watches[watch.id] = watch
        return Handle(watch, 0, self.broken)

    async def resume_watch(self, watch_id: str, after: int) -> Handle:
        self.check()
        if watch_id not in self.disk.watches:
            raise NotFound(f"There is no watch {watch_id}: memory was not kept, or nobody read it for long.")
        return Handle(self.disk.watches[watch_id], after, self.broken)


def _piece(upload_id: str) -> str:
    if not re.fullmatch("upl_[0-9a-z]{8,64}", upload_id):
        raise InvalidRequest("That is not an upload's id.")
    return f"{UPLOADS_DIR}/{upload_id}"


def _is(content: bytearray, finish: node.FinishUpload) -> bool:
    return len(content) == finish.length and finish.sha256 in {None, hashlib.sha256(content).hexdigest()}


def _header(found: Node, name: str) -> bytes:
    kind = {value: key for key, value in _KINDS.items()}[found.kind]
    size = len(found.content) if found.kind is FileKind.FILE else 0
    slash = "/" if found.kind is FileKind.DIRECTORY and not name.endswith("/") else ""
    entry = tar.Entry(name + slash, kind, size=size, mode=found.mode, mtime_ns=found.modified_ns, target=found.target or "")
    return tar.header(entry)
