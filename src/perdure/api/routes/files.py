"""Files in a workspace. Paths are query parameters, percent-encoded bytes: a guest's names need not be UTF-8."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from posixpath import dirname
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from perdure.api import render
from perdure.api.deps import Call, GuestPath, awake_headers, exact_query
from perdure.api.streams import ContentStream
from perdure.core.errors import InvalidRequest, NotFound
from perdure.wire import node, public
from perdure.wire.paths import guest_path

log = logging.getLogger(__name__)
router = APIRouter(prefix="/workspaces/{ref}/files", tags=["files"])
_BYTES: dict[str, Any] = {"content": {"application/octet-stream": {}}}


def _mode(text: str | None, default: int | None) -> int | None:
    if text is None:
        return default
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"{text!r} is not a file mode.", hint="Write it in octal, such as 644.")
    return mode


class Range(BaseModel):
    """Which bytes, and whether to look at the file first."""

    offset: int = Field(default=0, ge=0)
    length: int | None = Field(default=None, ge=0)
    describe: bool = Field(default=True, description="Declare length, size and etag; false spares a look into the workspace.")


@router.get("/content", response_class=ContentStream, status_code=200, responses={200: _BYTES})
async def read_file(ref: str, path: GuestPath, query: Annotated[Range, Query()], call: Call) -> ContentStream:
    """A file's bytes, streamed. A cut answer is visibly cut: it misses its declared length or its last chunk."""
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        headers = awake_headers(awake)
        declared = await _describe(awake.guest, path, query, headers) if query.describe else None
        content = awake.guest.read_file(path, query.offset, query.length)
        if isinstance(content, AsyncGenerator):
            stack.push_async_callback(content.aclose)
        first = await anext(content, b"")  # what is wrong with the file is told before the status is sent
        return ContentStream(_chained(first, content), declared, stack.pop_all(), call.closing, headers)


async def _describe(guest: node.Guest, path: str, query: Range, headers: dict[str, str]) -> int | None:
    """Set the headers that describe the file; returns the answer's length if it has one."""
    info = await guest.stat(path)
    if info.kind is node.FileKind.DIRECTORY:
        raise InvalidRequest(f"{render.text(path)!r} is a directory.", hint="List it, or copy it with 'perdure cp'.")
    if info.kind is node.FileKind.OTHER:
        raise InvalidRequest(f"{render.text(path)!r} is a device, socket or pipe.", hint="Only regular files can be read.")
    if info.kind is not node.FileKind.FILE or info.size == 0:  # /proc files say 0 and have content
        return None
    headers["etag"] = f'W/"{int(info.modified_at.timestamp() * 1_000_000):x}-{info.size:x}"'
    headers["perdure-file-size"] = str(info.size)
    available = max(0, info.size - query.offset)
    return available if query.length is None else min(available, query.length)


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk


class _Upload:
    """The body, and whether any of it has been taken."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.begun = False

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._request.stream():
            self.begun = True
            yield chunk


@router.put("/content", openapi_extra={"requestBody": _BYTES})
async def write_file(
    ref: str,
    path: GuestPath,
    request: Request,
    response: Response,
    call: Call,
    mode: Annotated[str | None, Query(description="Octal; default 644 for a new file, unchanged for an old one.")] = None,
    parents: Annotated[bool, Query(description="Make missing directories above it.")] = False,
) -> public.FileWritten:
    """Replace a file atomically by the body, streamed: the old content stays until all of the new is written and verified."""
    bits = _mode(mode, None)
    upload = _Upload(request)
    async with call.awake(ref) as awake:
        try:
            written = await awake.guest.write_file(path, upload.chunks(), mode=bits)
        except NotFound:
            if not parents or upload.begun:
                raise
            await awake.guest.make_dir(dirname(path), parents=True)
            written = await awake.guest.write_file(path, upload.chunks(), mode=bits)
        response.headers.update(awake_headers(awake))
        response.headers["etag"] = f'"{written.sha256}"'
    return public.FileWritten(path=render.text(written.path), length=written.length, crc32=written.crc32, sha256=written.sha256)


@router.get("/stat")
async def stat_file(ref: str, path: GuestPath, response: Response, call: Call) -> public.FileInfo:
    """Does not follow a symbolic link at the end of the path."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return render.file_info(await awake.guest.stat(path))


@router.get("/list")
async def list_dir(ref: str, path: GuestPath, response: Response, call: Call) -> public.FileList:
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return public.FileList(files=[render.file_info(one) for one in await awake.guest.list_dir(path)])


@router.post("/mkdir")
async def make_dir(
    ref: str,
    path: GuestPath,
    response: Response,
    call: Call,
    parents: Annotated[bool, Query()] = True,
    mode: Annotated[str | None, Query(description="Octal, default 755.")] = None,
) -> public.Done:
    """Make a directory; one that exists already is fine with ``parents``."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.make_dir(path, parents=parents, mode=_mode(mode, 0o755) or 0)
    return public.Done()


@router.post("/rename")
async def rename(
    ref: str,
    request: Request,
    response: Response,
    call: Call,
    source: Annotated[str, Query()],
    destination: Annotated[str, Query()],
) -> public.Done:
    """Replaces the destination, atomically."""
    old, new = guest_path(exact_query(request, "source")), guest_path(exact_query(request, "destination"))
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.rename(old, new)
    return public.Done()


@router.delete("")
async def remove(
    ref: str, path: GuestPath, response: Response, call: Call, recursive: Annotated[bool, Query()] = False
) -> public.Done:
    """Remove a file, link or empty directory; with ``recursive`` also a full one."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.remove(path, recursive=recursive)
    return public.Done()
