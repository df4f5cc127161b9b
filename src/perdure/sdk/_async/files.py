"""Files in a workspace."""

from __future__ import annotations

import builtins
import io
import os
import posixpath
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Literal, TypeVar, overload

from perdure.core.errors import NotFound, PerdureError
from perdure.sdk import _core
from perdure.sdk._acompat import AsyncData, AsyncHashing, achunks, apause
from perdure.sdk._async.watching import AsyncWatch, OnEvent
from perdure.sdk._core import Call
from perdure.sdk._local import LocalFile, LocalTree, OnBytes, Transfer, read_local, walk_local
from perdure.sdk.errors import TransferMismatch
from perdure.wire import public
from perdure.wire.node import FileKind

if TYPE_CHECKING:
    from perdure.sdk._async.workspace import AsyncWorkspace
    from perdure.sdk._local import LocalFileWriter
    from perdure.sdk._transfers import Incoming, Outgoing

Model = TypeVar("Model", bound=public.Answer)
#: A file that says nothing for this long is not coming.
READ_SILENCE_S = 120.0


class AsyncFiles:
    """``workspace.files``. Paths are absolute in the workspace; bytes that are not UTF-8 are surrogate escapes.

    Of ``workspace.files.beneath(root)`` they are below that directory, and neither ``..`` nor links lead out of it.
    """

    def __init__(self, workspace: AsyncWorkspace, root: str | None = None) -> None:
        self._workspace = workspace
        self._root = root

    def beneath(self, root: str) -> AsyncFiles:
        """The files below a directory: every path is resolved inside it, and one that leads out raises PathEscape.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> root = ws.files.beneath("/root")
        >>> await root.read("/notes")
        'remember me'
        """
        return AsyncFiles(self._workspace, root if self._root is None else posixpath.join(self._root, root))

    # ------------------------------------------------------------------------------------------------------------- reading

    @overload
    async def read(self, path: str, format: Literal["text"] = "text") -> str: ...

    @overload
    async def read(self, path: str, format: Literal["bytes"]) -> bytes: ...

    @overload
    async def read(self, path: str, format: Literal["stream"]) -> AsyncIterator[bytes]: ...

    async def read(self, path: str, format: Literal["text", "bytes", "stream"] = "text") -> str | bytes | AsyncIterator[bytes]:
        """A file's content: text (UTF-8, other bytes become U+FFFD), bytes, or a stream of bytes.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> await ws.files.read("/root/notes")
        'remember me'
        >>> await ws.files.read("/root/notes", format="bytes")
        b'remember me'
        """
        if format == "stream":
            return self.stream(path)
        content = bytearray()
        async for piece in self.stream(path):
            content += piece
        return bytes(content) if format == "bytes" else content.decode("utf-8", "replace")

    async def stream(self, path: str, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """A file's bytes as they come. When the connection breaks it goes on where it was, in a workspace that was put to sleep
        too. Raises TransferMismatch when the file is another one then, ConnectionLost when it cannot be gone on with.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> [piece async for piece in ws.files.stream("/root/notes", offset=9)]
        [b'me']
        """
        from perdure.sdk._transfers import Incoming

        async for piece in self._come(path, Incoming(path, offset, length), None):
            yield piece

    async def _come(self, path: str, incoming: Incoming, writer: LocalFileWriter | None) -> AsyncIterator[bytes]:
        """The bytes of one file, across broken connections. ``writer`` is what holds those of an earlier copy."""
        while True:
            call = replace(self._call("GET", "content", path=path, **incoming.query()), headers=tuple(incoming.headers().items()))
            try:
                async with self._workspace.client.stream(call, silence_s=READ_SILENCE_S) as response:
                    self._workspace.note(response.headers)
                    if not incoming.opened(response.status_code, response.headers) and writer is not None:
                        writer.restart()
                    async for piece in response.aiter_raw():
                        incoming.took(len(piece))
                        yield piece
                return
            except PerdureError as error:
                if incoming.complete:
                    return
                delay_s = incoming.broke(error)
            await apause(delay_s)

    async def hash(self, path: str) -> public.FileHash:
        """Size and SHA-256 of a file, computed in the workspace: what a copy of it can be compared with.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> (await ws.files.hash("/root/notes")).sha256 == written.sha256
        True
        """
        return await self._fetch(self._call("GET", "hash", path=path), public.FileHash)

    async def stat(self, path: str) -> public.FileInfo:
        """Does not follow a symbolic link at the end of the path. Raises NotFound.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> info = await ws.files.stat("/root/notes")
        >>> info.kind.value, info.size
        ('file', 11)
        """
        return await self._fetch(self._call("GET", "stat", path=path), public.FileInfo)

    get_info = stat

    async def exists(self, path: str) -> bool:
        """Whether there is something at a path, be it a link to nothing.

        >>> await ws.files.exists("/root/nothing")
        False
        """
        try:
            await self.stat(path)
        except NotFound:
            await self._workspace.refresh()  # raises if it is the workspace that is missing
            return False
        return True

    async def list(self, path: str) -> builtins.list[public.FileInfo]:
        """What a directory contains.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> [info.name for info in await ws.files.list("/root")]
        ['notes']
        """
        return (await self._fetch(self._call("GET", "list", path=path), public.FileList)).files

    # ------------------------------------------------------------------------------------------------------------- writing

    async def write(self, path: str, data: AsyncData, *, mode: int | None = None, parents: bool = True) -> public.FileWritten:
        """Replace a file atomically by ``data`` (text, bytes, a binary file or an iterable of bytes), streamed and verified.

        >>> written = await ws.files.write("/root/notes", "remember me", mode=0o600)
        >>> written.length
        11
        """
        content = AsyncHashing(data)
        call = self._call("PUT", "content", path=path, mode=_octal(mode), parents=parents)
        written = await self._workspace.client.send(call, content, public.FileWritten)
        if (written.length, written.sha256) != (content.length, content.sha256):
            raise TransferMismatch(
                f"The workspace received {written.length} bytes for {path!r} that are not the {content.length} sent.",
                hint="Write the file again.",
            )
        return written

    async def write_files(
        self, files: Mapping[str, AsyncData], *, mode: int | None = None, parents: bool = True
    ) -> builtins.list[public.FileWritten]:
        """Write several files, each atomically, in order. The first that fails ends it.

        >>> written = await ws.files.write_files({"/root/a": "1", "/root/b": b"22"})
        >>> [one.length for one in written]
        [1, 2]
        """
        return [await self.write(path, data, mode=mode, parents=parents) for path, data in files.items()]

    async def write_resumable(
        self,
        path: str,
        file: IO[bytes] | bytes,
        *,
        mode: int | None = None,
        upload_id: str | None = None,
        on_bytes: OnBytes | None = None,
    ) -> public.FileWritten:
        """``write`` for what is large: when the connection breaks it goes on where it was, in a workspace that was put to sleep
        too. ``file`` is read from its beginning and must be seekable. Missing directories are made.

        With an ``upload_id`` of your own (``upl_`` and 8 to 64 of 0-9a-z) another process may go on with it, for a day.

        >>> written = await ws.files.write_resumable("/root/large", b"much of it")
        >>> written.length
        10
        """
        from perdure.sdk._transfers import Outgoing, Patience
        from perdure.sdk._transfers import upload_id as fresh_id

        source = io.BytesIO(file) if isinstance(file, bytes) else file
        upload, outgoing, patience = upload_id or fresh_id(), Outgoing(source, on_bytes), Patience()
        has, resumed, complete = -1, False, False
        while True:
            try:
                if not complete:
                    begun = await self._fetch(self._call("PUT", f"uploads/{upload}", path=path), public.FileUpload)
                    if begun.offset > has:
                        patience.progressed()
                    has, resumed = begun.offset, resumed or begun.offset > 0
                    append = self._call("PATCH", f"uploads/{upload}", offset=has)
                    await self._workspace.client.send(append, achunks(outgoing.pieces(has)), public.FileUpload)
                    complete = True
                return await self._finish(upload, outgoing, resumed, path=path, mode=_octal(mode))
            except PerdureError as error:
                if has < 0:
                    raise
                delay_s = patience.broke(error)
                resumed = True
            await apause(delay_s)

    async def _finish(self, upload: str, outgoing: Outgoing, resumed: bool, **told: object) -> public.FileWritten:
        """Each piece was compared when it arrived; the whole is, where it did not come in one."""
        sha256 = outgoing.sha256
        query = {"length": outgoing.length, "sha256": sha256 if resumed else None, "parents": True, **told}
        written = await self._fetch(self._call("POST", f"uploads/{upload}/finish", **query), public.FileWritten)
        return written.model_copy(update={"sha256": sha256})

    # --------------------------------------------------------------------------------------------------------------- names

    async def make_dir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> None:
        """Make a directory; with ``parents`` one that exists is fine.

        >>> await ws.files.make_dir("/root/a/b")
        >>> await ws.files.exists("/root/a")
        True
        """
        call = self._call("POST", "mkdir", path=path, parents=parents, mode=_octal(mode))
        await self._fetch(replace(call, repeatable=parents), public.Done)

    async def rename(self, source: str, destination: str) -> None:
        """Move, replacing the destination.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> await ws.files.rename("/root/notes", "/root/old-notes")
        """
        await self._fetch(self._call("POST", "rename", source=source, destination=destination), public.Done)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, link or empty directory; with ``recursive`` also a full one.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> await ws.files.remove("/root/notes")
        >>> await ws.files.exists("/root/notes")
        False
        """
        await self._fetch(self._call("DELETE", "", path=path, recursive=recursive), public.Done)

    async def symlink(self, path: str, target: str) -> None:
        """Make a symbolic link that says ``target``. Raises AlreadyExists.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> await ws.files.symlink("/root/link", "notes")
        >>> (await ws.files.stat("/root/link")).target
        'notes'
        """
        await self._fetch(self._call("POST", "symlink", path=path, target=target), public.Done)

    async def chmod(self, path: str, mode: int) -> public.FileInfo:
        """Change permissions, of what a link leads to if it is one.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> oct((await ws.files.chmod("/root/notes", 0o600)).mode)
        '0o600'
        """
        return await self._fetch(self._call("PATCH", "", path=path, mode=_octal(mode)), public.FileInfo)

    async def chown(self, path: str, owner: str) -> public.FileInfo:
        """Change who it belongs to: ``user``, ``user:group`` or ``:group``, names or numbers of the workspace.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> info = await ws.files.chown("/root/notes", "1000:1000")
        >>> info.uid, info.gid
        (1000, 1000)
        """
        return await self._fetch(self._call("PATCH", "", path=path, owner=owner), public.FileInfo)

    # --------------------------------------------------------------------------------------------------------- directories

    async def read_dir(self, path: str) -> AsyncIterator[bytes]:
        """A directory as a tar stream. Do not trust the names and links in it: ``download`` unpacks it safely.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> archive = b"".join([piece async for piece in ws.files.read_dir("/root")])
        """
        async with self._workspace.client.stream(self._call("GET", "tar", path=path), silence_s=READ_SILENCE_S) as response:
            self._workspace.note(response.headers)
            async for piece in response.aiter_raw():
                yield piece

    async def write_dir(self, path: str, archive: AsyncData) -> public.TreeWritten:
        """Unpack a tar stream (not compressed) into a directory, made if it is missing. Raises InvalidRequest for a member that
        would lead out of it; what came before that stays.

        >>> transfer = await ws.files.upload("project", "/root/project")
        >>> archive = b"".join([piece async for piece in ws.files.read_dir("/root/project")])
        >>> copied = await ws.files.write_dir("/root/copy", archive)
        >>> sorted(info.name for info in await ws.files.list("/root/copy"))
        ['README.md', 'main.py']
        """
        return await self._workspace.client.send(self._call("PUT", "tar", path=path), achunks(archive), public.TreeWritten)

    async def upload(self, local: str | os.PathLike[str], remote: str, *, on_bytes: OnBytes | None = None) -> Transfer:
        """Copy a local file or directory tree to exactly ``remote``. Links that stay inside are kept; others to files are
        followed, to directories they are named in the result. ``on_bytes`` is called with how many more bytes were sent.

        A large file is gone on with where it was when the connection breaks, and by the next call, of another process too.

        >>> transfer = await ws.files.upload("project", "/root/project")
        >>> transfer.files, transfer.directories
        (2, 1)
        """
        transfer = Transfer()
        first = next(walk_local(local, transfer), None)
        if first is not None and first.is_directory:
            from perdure.sdk._transfers import pack

            await self.write_dir(remote, pack(local, transfer, on_bytes))
        elif first is not None:
            transfer.bytes = await self._upload_file(first, remote, on_bytes)
            transfer.files = 1
        return transfer

    async def _upload_file(self, entry: LocalFile, path: str, on_bytes: OnBytes | None) -> int:
        from perdure.sdk._transfers import RESUMED_BYTES, upload_id

        with read_local(entry) as file:
            if entry.size < RESUMED_BYTES:
                written = await self.write(path, file, mode=entry.mode)
                if on_bytes is not None:
                    on_bytes(written.length)
                return written.length
            here = (os.path.realpath(entry.path), entry.size, entry.modified_ns)
            upload = upload_id(self._workspace.id, self._root, path, *here)
            return (await self.write_resumable(path, file, mode=entry.mode, upload_id=upload, on_bytes=on_bytes)).length

    async def download(self, remote: str, local: str | os.PathLike[str], *, on_bytes: OnBytes | None = None) -> Transfer:
        """Copy a file or directory tree from the workspace to exactly ``local``.

        Everything that comes from the workspace is treated as an attacker's: nothing is written outside ``local``; links that
        would lead out of it, devices and impossible names are skipped and named in the result; sizes are checked against the
        free space. ``on_bytes`` is called with how many more bytes have come. A large file is gone on with as in ``upload``.

        >>> written = await ws.files.write("/root/notes", "remember me")
        >>> transfer = await ws.files.download("/root/notes", "notes")
        >>> transfer.bytes, transfer.skipped
        (11, [])
        """
        root = await self.stat(remote)
        with LocalTree(local, root) as tree:
            if root.kind is FileKind.DIRECTORY:
                from perdure.sdk._transfers import Unpacker

                with Unpacker(tree, on_bytes) as unpacker:
                    async for piece in self.read_dir(remote):
                        unpacker.feed(piece)
                    unpacker.finish()
            else:
                await self._download_file(root, remote, tree, on_bytes)
        return tree.transfer

    async def _download_file(self, info: public.FileInfo, path: str, tree: LocalTree, on_bytes: OnBytes | None) -> None:
        from perdure.sdk._transfers import RESUMED_BYTES, Incoming, part_name

        is_large = info.kind is FileKind.FILE and info.size >= RESUMED_BYTES and info.revision is not None
        part = part_name(self._workspace.id, self._root, path, info.revision) if is_large else None
        with tree.create((), info, part=part) as file:
            begun = file.length if file.length < info.size else 0
            if file.length and not begun:
                file.restart()
            incoming = Incoming(path, begun, revision=info.revision if begun else None)
            if on_bytes is not None and begun:
                on_bytes(begun)
            async for piece in self._come(path, incoming, file):
                file.write(piece)
                if on_bytes is not None:
                    on_bytes(len(piece))
            if incoming.resumed:
                await self._compare(path, info, file)

    async def _compare(self, path: str, info: public.FileInfo, file: LocalFileWriter) -> None:
        """What came in pieces is compared as a whole, unless it has been changed in the workspace since."""
        told = await self.hash(path)
        if told.revision == info.revision and (told.size, told.sha256) != (file.length, file.sha256()):
            raise TransferMismatch(f"What came of {path!r} is not what is in the workspace.", hint="Copy it again.")

    # ------------------------------------------------------------------------------------------------------------ watching

    def watch_dir(self, path: str, on_event: OnEvent = None, *, recursive: bool = False) -> AsyncWatch:
        """What happens in a directory, from the first iteration on: ``async for event in workspace.files.watch_dir(path)``, or
        ``await workspace.files.watch_dir(path, on_event).run()``. While it is iterated the workspace counts as used.

        >>> async for event in ws.files.watch_dir("/root"):  # doctest: +SKIP
        ...     print(event.type, event.path)
        """
        return AsyncWatch(self._workspace, path, self._root, recursive, on_event)

    # ----------------------------------------------------------------------------------------------------------- internals

    def _call(self, method: str, part: str, **query: object) -> Call:
        where = _core.workspace_path(self._workspace.id, "files", *(part.split("/") if part else ()))
        values = _core.query_of({"root": self._root, **query})
        return Call(method, where, values, repeatable=method in {"GET", "PUT", "PATCH"})

    async def _fetch(self, call: Call, kind: type[Model]) -> Model:
        return await self._workspace.fetch(call, kind)


def _octal(mode: int | None) -> str | None:
    return None if mode is None else f"{mode:o}"
