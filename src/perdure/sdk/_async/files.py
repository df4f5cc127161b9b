"""Files in a workspace."""

from __future__ import annotations

import builtins
import os
import posixpath
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Literal, overload

from perdure.core.errors import NotFound
from perdure.sdk import _core
from perdure.sdk._acompat import AsyncData, AsyncHashing
from perdure.sdk._core import Call
from perdure.sdk._local import LocalFile, LocalTree, Transfer, read_local, walk_local
from perdure.sdk.errors import TransferMismatch
from perdure.wire import public
from perdure.wire.node import FileKind

if TYPE_CHECKING:
    from perdure.sdk._async.workspace import AsyncWorkspace

#: A file that says nothing for this long is not coming.
READ_SILENCE_S = 120.0


class AsyncFiles:
    """``workspace.files``. Paths are absolute in the workspace; bytes that are not UTF-8 are surrogate escapes."""

    def __init__(self, workspace: AsyncWorkspace) -> None:
        self._workspace = workspace

    @overload
    async def read(self, path: str, format: Literal["text"] = "text") -> str: ...

    @overload
    async def read(self, path: str, format: Literal["bytes"]) -> bytes: ...

    @overload
    async def read(self, path: str, format: Literal["stream"]) -> AsyncIterator[bytes]: ...

    async def read(self, path: str, format: Literal["text", "bytes", "stream"] = "text") -> str | bytes | AsyncIterator[bytes]:
        """A file's content: text (UTF-8, other bytes become U+FFFD), bytes, or a stream of bytes."""
        if format == "stream":
            return self.stream(path)
        content = bytearray()
        async for piece in self.stream(path):
            content += piece
        return bytes(content) if format == "bytes" else content.decode("utf-8", "replace")

    async def stream(self, path: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """A file's bytes as they come. Raises ConnectionLost when they end too early."""
        call = _core.get(self._path("content"), path=path, offset=offset or None, length=length, describe=False)
        async with self._workspace.client.stream(call, silence_s=READ_SILENCE_S) as response:
            self._workspace.note(response.headers)
            async for piece in response.aiter_raw():
                yield piece

    async def write(self, path: str, data: AsyncData, *, mode: int | None = None, parents: bool = True) -> public.FileWritten:
        """Replace a file atomically by ``data`` (text, bytes, a binary file or an iterable of bytes), streamed and verified."""
        query = {"path": path, "mode": None if mode is None else f"{mode:o}", "parents": parents}
        content = AsyncHashing(data)
        written = await self._workspace.client.send(
            Call("PUT", self._path("content"), _core.query_of(query)), content, public.FileWritten
        )
        if (written.length, written.sha256) != (content.length, content.sha256):
            raise TransferMismatch(
                f"The workspace received {written.length} bytes for {path!r} that are not the {content.length} sent.",
                hint="Write the file again.",
            )
        return written

    async def stat(self, path: str) -> public.FileInfo:
        """Does not follow a symbolic link at the end of the path. Raises NotFound."""
        return await self._workspace.fetch(_core.get(self._path("stat"), path=path), public.FileInfo)

    get_info = stat

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except NotFound:
            await self._workspace.refresh()  # raises if it is the workspace that is missing
            return False
        return True

    async def list(self, path: str) -> builtins.list[public.FileInfo]:
        """What a directory contains."""
        return (await self._workspace.fetch(_core.get(self._path("list"), path=path), public.FileList)).files

    async def make_dir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> None:
        """Make a directory; with ``parents`` one that exists is fine."""
        query = _core.query_of({"path": path, "parents": parents, "mode": f"{mode:o}"})
        await self._workspace.fetch(Call("POST", self._path("mkdir"), query, repeatable=parents), public.Done)

    async def rename(self, source: str, destination: str) -> None:
        """Move, replacing the destination."""
        query = _core.query_of({"source": source, "destination": destination})
        await self._workspace.fetch(Call("POST", self._path("rename"), query), public.Done)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, link or empty directory; with ``recursive`` also a full one."""
        query = _core.query_of({"path": path, "recursive": recursive})
        await self._workspace.fetch(Call("DELETE", self._path(), query), public.Done)

    async def upload(self, local: str | os.PathLike[str], remote: str) -> Transfer:
        """Copy a local file or directory tree to exactly ``remote``. Symbolic links to files are followed, others are skipped."""
        transfer = Transfer()
        for entry in walk_local(local, transfer):
            path = posixpath.join(remote, entry.relative) if entry.relative else remote
            if entry.is_directory:
                await self.make_dir(path)
            else:
                await self._upload_file(entry, path)
            transfer.add(entry)
        return transfer

    async def _upload_file(self, entry: LocalFile, path: str) -> None:
        with read_local(entry) as file:
            await self.write(path, file, mode=entry.mode, parents=not entry.relative)

    async def download(self, remote: str, local: str | os.PathLike[str]) -> Transfer:
        """Copy a file or directory tree from the workspace to exactly ``local``.

        Everything that comes from the workspace is treated as an attacker's: nothing is written outside ``local``; links that
        would lead out of it, devices and impossible names are skipped and named in the result; sizes are checked against the
        free space.
        """
        root = await self.stat(remote)
        with LocalTree(local, root) as tree:
            await self._download(root, remote, (), tree)
        return tree.transfer

    async def _download(self, info: public.FileInfo, path: str, relative: tuple[str, ...], tree: LocalTree) -> None:
        if info.kind is FileKind.DIRECTORY:
            if tree.enter(relative, info):
                for child in await self.list(path):
                    name = tree.admit(relative, child)
                    if name is not None:
                        await self._download(child, posixpath.join(path, name), (*relative, name), tree)
                tree.leave(relative, info)
        elif info.kind is FileKind.FILE or not relative:
            with tree.create(relative, info) as file:
                async for piece in self.stream(path):
                    file.write(piece)
        elif info.kind is FileKind.SYMLINK:
            tree.link(relative, info)
        else:
            tree.skip(relative, "it is a device, socket or pipe")

    def _path(self, *rest: str) -> str:
        return _core.workspace_path(self._workspace.id, "files", *rest)
