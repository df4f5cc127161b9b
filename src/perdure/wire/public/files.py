"""Files."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Literal

from pydantic import Field

from perdure.wire.node import FileKind
from perdure.wire.public.common import Answer, ErrorInfo


class FileInfo(Answer):
    """``name``, ``path``, ``target`` are for showing; a guest's names are bytes: ``raw_path`` has them if they are not UTF-8."""

    path: str
    name: str
    kind: FileKind
    size: int
    mode: int
    uid: int
    gid: int
    modified_at: datetime
    target: str | None = None
    raw_path: str | None = Field(default=None, description="base64 of the path's bytes when they are not UTF-8")
    revision: str | None = Field(default=None, description="Of a file: another one after every change. Its ETag, without quotes.")

    @property
    def fs_path(self) -> str:
        """The exact path, bytes that are not UTF-8 as surrogate escapes (as ``os.fsdecode`` gives)."""
        return self.path if self.raw_path is None else base64.b64decode(self.raw_path).decode("utf-8", "surrogateescape")

    @property
    def fs_name(self) -> str:
        """The exact last component of ``fs_path``."""
        return self.name if self.raw_path is None else self.fs_path.rstrip("/").rpartition("/")[2]


class FileList(Answer):
    files: list[FileInfo]


class FileWritten(Answer):
    """What the workspace acknowledged. ``sha256`` is over the bytes the server received; of an upload in pieces it is what the
    workspace compared, if it was told."""

    path: str
    length: int
    crc32: int | None = None
    sha256: str | None = None


class FileHash(Answer):
    """Of the whole file, computed in the workspace at one reading."""

    size: int
    sha256: str
    revision: str | None = None


class FileUpload(Answer):
    """An upload in pieces. ``offset``: the bytes it has, so where to go on."""

    upload_id: str
    offset: int


class TreeWritten(Answer):
    """What an archive made. ``length`` is the archive's, in bytes."""

    length: int
    files: int
    directories: int
    links: int


class WatchEvent(Answer):
    """One line of a watch's stream.

    First ``started`` (watch_id, generation); then what happened to ``path``, each with its ``seq``: ``created``, ``written``,
    ``removed``, ``renamed`` (from ``old_path``), ``attributes`` (mode, owner or times), or ``overflow``: events were lost, look
    at the directory again. The last line is ``ended`` or ``error``. ``reason`` of the end: ``gone``, the directory is;
    ``generation``, the workspace sleeps or was woken anew: attach again with ``watch_id`` and the last ``seq``.
    """

    type: Literal["started", "created", "written", "removed", "renamed", "attributes", "overflow", "ended", "heartbeat", "error"]
    watch_id: str | None = None
    generation: int | None = None
    seq: int = 0
    path: str = ""
    directory: bool = False
    old_path: str | None = None
    raw_path: str | None = Field(default=None, description="base64 of the path's bytes when they are not UTF-8")
    raw_old_path: str | None = None
    reason: Literal["gone", "generation"] | None = None
    error: ErrorInfo | None = None

    @property
    def fs_path(self) -> str:
        """The exact path, bytes that are not UTF-8 as surrogate escapes."""
        return self.path if self.raw_path is None else base64.b64decode(self.raw_path).decode("utf-8", "surrogateescape")
