"""What may be asked of an awake workspace's files. Frozen values and a protocol; no I/O."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol


class FileKind(StrEnum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """``name`` is decoded with surrogateescape: a guest's names are bytes."""

    path: str
    name: str
    kind: FileKind
    size: int
    mode: int
    uid: int
    gid: int
    modified_at: datetime
    target: str | None = None  # of a symlink
    revision: str | None = None  # of a file: another one after every change; None from agents before 0.3.1


@dataclass(frozen=True, slots=True)
class Beneath:
    """A path that stays below ``root`` (absolute), wherever links and ``..`` point: what would lead out raises PathEscape.

    ``path`` is relative to ``root``; a slash at its beginning means nothing.
    """

    root: str
    path: str


#: Absolute in the workspace's own root, or below a directory.
Place = str | Beneath


@dataclass(frozen=True, slots=True)
class FileWritten:
    path: str
    length: int
    crc32: int  # computed in the guest over what it wrote, compared with the host's by the node
    sha256: str  # computed on the host over what was sent


@dataclass(frozen=True, slots=True)
class TreeWritten:
    """What an unpacked archive made. ``length`` is the archive's."""

    length: int
    files: int
    directories: int
    links: int


@dataclass(frozen=True, slots=True)
class FileHash:
    size: int
    sha256: str
    revision: str | None


@dataclass(frozen=True, slots=True)
class Attributes:
    """What of a file is to change. ``owner`` is ``user``, ``user:group`` or ``:group``, names or numbers of the workspace."""

    mode: int | None = None
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class FinishUpload:
    """The whole of an upload, and the name it is to take. ``mode``: None keeps the old file's, 0644 for a new one. ``sha256``:
    None for an upload that came in one piece, whose checksum its end has compared already."""

    upload_id: str
    place: Place
    length: int
    sha256: str | None = None
    mode: int | None = None


class WatchKind(StrEnum):
    CREATED = "created"
    WRITTEN = "written"
    REMOVED = "removed"
    RENAMED = "renamed"
    ATTRIBUTES = "attributes"  # mode, owner or times
    OVERFLOW = "overflow"  # events were lost: look at the directory again
    ENDED = "ended"  # the directory is gone; the last event


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """``seq`` counts the events of a watch from 1; a reader that comes back names the last one it has seen."""

    seq: int
    kind: WatchKind
    path: str
    is_directory: bool
    old_path: str | None = None  # of what was renamed
    reason: str = ""


class WatchHandle(Protocol):
    """One attachment to a watch. Closing it detaches; the watch goes on, for an hour without any."""

    watch_id: str

    def events(self) -> AsyncIterator[WatchEvent]:
        """In order. Ends after ENDED; raises what broke the connection."""
        ...

    async def close(self) -> None: ...


class ByteReading(Protocol):
    """Bytes that come from a workspace, once."""

    def chunks(self) -> AsyncIterator[bytes]: ...

    async def close(self) -> None:
        """Safe twice, and in the middle."""
        ...


class FileReading(ByteReading, Protocol):
    """An open file. ``info`` is of the very file that is read."""

    info: FileInfo
    size: int | None  # of its content; None when only reading it tells
    offset: int  # of the first byte that comes


class FileOperations(Protocol):
    """The files of an awake workspace."""

    async def stat(self, path: Place) -> FileInfo: ...

    async def list_dir(self, path: Place) -> tuple[FileInfo, ...]: ...

    async def open_file(
        self, path: Place, offset: int = 0, length: int | None = None, *, revision: str | None = None
    ) -> FileReading:
        """Open a file for reading. With ``revision``: if it is at another one, it is read whole from its beginning."""
        ...

    def read_file(self, path: Place, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]: ...

    async def hash_file(self, path: Place) -> FileHash:
        """Read the whole file inside and hash it; takes as long as that takes."""
        ...

    async def write_file(self, path: Place, content: AsyncIterator[bytes], *, mode: int | None = None) -> FileWritten:
        """Replace atomically: the old content stays until all of the new is written and its checksum agrees."""
        ...

    async def make_dir(self, path: Place, *, parents: bool = True, mode: int = 0o755) -> None: ...

    async def rename(self, source: Place, destination: Place) -> None:
        """Replace the destination. Both are below the same root, or neither is below one."""
        ...

    async def remove(self, path: Place, *, recursive: bool = False) -> None: ...

    async def set_attributes(self, path: Place, attributes: Attributes) -> FileInfo:
        """Follows links, as chmod(1) and chown(1) do."""
        ...

    async def make_link(self, path: Place, target: str) -> None:
        """Make a symbolic link."""
        ...

    async def begin_upload(self, upload_id: str, path: Place | None = None) -> int:
        """Begin an upload in pieces, or take up the one of this id (``upl_…``): the bytes it has. ``path`` is looked at only to
        refuse early what cannot be replaced. An upload is forgotten a day after its last piece."""
        ...

    async def upload_offset(self, upload_id: str) -> int: ...

    async def append_upload(self, upload_id: str, offset: int, content: AsyncIterator[bytes]) -> int:
        """Add bytes; returns how many it has then. What had arrived stays when ``content`` breaks off. Raises Conflict for
        another offset than its end, Busy while another call adds to it."""
        ...

    async def finish_upload(self, finish: FinishUpload) -> None:
        """Give it its name, atomically. Raises Conflict when length or SHA-256 are not those. With a SHA-256, repeating it
        is fine."""
        ...

    async def drop_upload(self, upload_id: str) -> None: ...

    async def pack(self, path: Place) -> ByteReading:
        """A directory as a tar stream."""
        ...

    async def unpack(self, path: Place, content: AsyncIterator[bytes]) -> TreeWritten:
        """Unpack a tar stream into a directory, which is made if it is missing. Refuses members that lead out of it."""
        ...

    async def watch(self, path: Place, *, recursive: bool = False) -> WatchHandle: ...

    async def resume_watch(self, watch_id: str, after: int) -> WatchHandle:
        """Attach to a watch again, after the event of that number. Raises NotFound for one that is not there any more."""
        ...
