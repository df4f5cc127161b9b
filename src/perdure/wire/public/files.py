"""Files."""

from __future__ import annotations

import base64
from datetime import datetime

from pydantic import Field

from perdure.wire.node import FileKind
from perdure.wire.public.common import Answer


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
    """What the workspace acknowledged; ``sha256`` is over the bytes the server received."""

    path: str
    length: int
    crc32: int
    sha256: str
