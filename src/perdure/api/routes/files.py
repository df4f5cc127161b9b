"""Files in a workspace. Paths are query parameters, percent-encoded bytes: a guest's names need not be UTF-8."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from posixpath import dirname
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from perdure.api import render
from perdure.api.deps import Call, GuestPath, awake_headers, check_path, exact_query
from perdure.api.streams import ContentStream
from perdure.core.errors import InvalidRequest
from perdure.wire import node, public

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


@router.get("/content", response_class=ContentStream, status_code=200, responses={200: _BYTES})
async def read_file(
    ref: str,
    path: GuestPath,
    call: Call,
    offset: Annotated[int, Query(ge=0)] = 0,
    length: Annotated[int | None, Query(ge=0)] = None,
) -> ContentStream:
    """A file's bytes, streamed. The length is declared when the file has one; a cut answer is visibly cut."""
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        info = await awake.guest.stat(path)
        if info.kind is node.FileKind.DIRECTORY:
            raise InvalidRequest(f"{render.text(path)!r} is a directory.", hint="List it, or copy it with 'perdure cp'.")
        if info.kind is node.FileKind.OTHER:
            raise InvalidRequest(f"{render.text(path)!r} is a device, socket or pipe.", hint="Only regular files can be read.")
        content = awake.guest.read_file(path, offset, length)
        if isinstance(content, AsyncGenerator):
            stack.push_async_callback(content.aclose)
        headers = awake_headers(awake)
        declared: int | None = None
        if info.kind is node.FileKind.FILE and info.size > 0:  # /proc files say 0 and have content
            declared = max(0, info.size - offset)
            declared = declared if length is None else min(declared, length)
            headers["etag"] = f'W/"{int(info.modified_at.timestamp() * 1_000_000):x}-{info.size:x}"'
            headers["perdure-file-size"] = str(info.size)
        return ContentStream(content, declared, stack.pop_all(), call.closing, headers)


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
    async with call.awake(ref) as awake:
        if parents:
            await awake.guest.make_dir(dirname(path) or "/", parents=True)
        written = await awake.guest.write_file(path, request.stream(), mode=bits)
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
    old, new = check_path(exact_query(request, "source")), check_path(exact_query(request, "destination"))
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
