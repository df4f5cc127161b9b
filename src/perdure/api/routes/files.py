"""Files in a workspace. Paths are query parameters, percent-encoded bytes: a guest's names need not be UTF-8."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from perdure.api import render
from perdure.api.deps import AbsoluteText, Bytes, Call, GuestPlace, PathText, awake_headers, exact_query
from perdure.api.streams import ContentStream
from perdure.api.underway import Ending
from perdure.core.errors import InvalidRequest, NotFound, RangeNotSatisfiable
from perdure.wire import node, public
from perdure.wire.paths import parent, place_of, shown

router = APIRouter(prefix="/workspaces/{ref}/files", tags=["files"])
_BYTES: dict[str, Any] = {"content": {"application/octet-stream": {}}}
_MODE = re.compile("[0-7]{1,4}")
MODE: dict[str, Any] = {"json_schema_extra": {"pattern": f"^{_MODE.pattern}$"}}  # ``mode_of`` judges it


def mode_of(text: str | None, default: int | None) -> int | None:
    if text is None:
        return default
    if not _MODE.fullmatch(text):
        raise InvalidRequest(f"{text!r} is not a file mode.", hint="Write it in octal, such as 644.")
    return int(text, 8)


class Part(BaseModel):
    """Which bytes, for callers who do not send a Range."""

    offset: Bytes = 0
    length: Bytes | None = None


_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")


@router.get("/content", response_class=ContentStream, status_code=200, responses={200: _BYTES, 206: _BYTES})
async def read_file(ref: str, path: GuestPlace, query: Annotated[Part, Query()], request: Request, call: Call) -> ContentStream:
    """A file's bytes, streamed. A cut answer is visibly cut: it misses its declared length or its last chunk.

    ``Range: bytes=N-`` with ``If-Range: ETAG`` goes on where an earlier answer was cut (206), or begins anew with 200 when the
    file is not the same any more. A file whose size only reading it tells, as in /proc, has no declared length and no ranges.
    """
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        wanted, is_part = _range_of(request), False
        if wanted is None:
            reading, length = await awake.guest.open_file(path, query.offset, query.length), query.length
        else:
            reading, is_part = await _open_range(awake.guest, path, wanted, request.headers.get("if-range"))
            length = wanted[1] if is_part else None
        stack.push_async_callback(reading.close)
        headers, declared = awake_headers(awake) | _described(reading), None
        if reading.size is not None:
            available = max(0, reading.size - reading.offset)
            declared = available if length is None else min(available, length)
        answer = ContentStream(reading.chunks(), declared, stack.pop_all(), call.closing, headers)
        if is_part:
            answer.status_code = 206
            last = reading.offset + (declared or 0) - 1
            answer.headers["content-range"] = f"bytes {reading.offset}-{last}/{reading.size}"
        return answer


def _range_of(request: Request) -> tuple[int, int | None] | None:
    """(first byte, how many) of a Range header; None without one that is understood, as HTTP has it."""
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        return None
    return int(match[1]), None if match[2] is None else int(match[2]) - int(match[1]) + 1


async def _open_range(
    guest: node.Guest, path: node.Place, wanted: tuple[int, int | None], condition: str | None
) -> tuple[node.FileReading, bool]:
    """The file at that range, and True; or from its beginning when the condition does not hold or it has no ranges."""
    first, length = wanted
    revision = None if condition is None else condition.strip('"')
    reading = await guest.open_file(path, first, length, revision=revision)
    is_other = revision is not None and reading.info.revision != revision
    if is_other and reading.offset == 0:
        return reading, False
    if is_other or reading.size is None:
        await reading.close()
        return await guest.open_file(path), False
    if first >= reading.size:
        await reading.close()
        error = RangeNotSatisfiable(f"{render.text(shown(path))!r} has {reading.size} bytes; there is nothing from {first} on.")
        error.details = {"size": str(reading.size)}
        raise error
    return reading, True


def _described(reading: node.FileReading) -> dict[str, str]:
    info, size = reading.info, reading.size
    if size is None:
        return {}
    headers = {"perdure-file-size": str(size)}
    if info.revision is not None:
        return headers | {"etag": f'"{info.revision}"', "accept-ranges": "bytes"}
    return headers | {"etag": f'W/"{int(info.modified_at.timestamp() * 1_000_000):x}-{size:x}"'}


@router.get("/hash")
async def hash_file(ref: str, path: GuestPlace, response: Response, call: Call) -> public.FileHash:
    """SHA-256 of the whole file, computed inside; takes as long as reading it there does."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        found = await awake.guest.hash_file(path)
    return public.FileHash(size=found.size, sha256=found.sha256, revision=found.revision)


class Upload:
    """The body, and whether any of it has been taken."""

    def __init__(self, request: Request, closing: Ending) -> None:
        self._request = request
        self._closing = closing
        self.begun = False

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._request.stream():
            if self._closing.why is not None:  # the key has ended since the last one came
                raise self._closing.why.twin()
            self.begun = True
            yield chunk


@router.put("/content", openapi_extra={"requestBody": _BYTES})
async def write_file(
    ref: str,
    path: GuestPlace,
    request: Request,
    response: Response,
    call: Call,
    mode: Annotated[str | None, Query(description="Octal; default 644 for a new one, unchanged for an old one.", **MODE)] = None,
    parents: Annotated[bool, Query(description="Make missing directories above it.")] = False,
) -> public.FileWritten:
    """Replace a file atomically by the body, streamed: the old content stays until all of the new is written and verified."""
    bits = mode_of(mode, None)
    upload = Upload(request, call.closing)
    await call.check_upload()
    async with call.awake(ref) as awake:
        try:
            written = await awake.guest.write_file(path, upload.chunks(), mode=bits)
        except NotFound:
            if not parents or upload.begun:
                raise
            await awake.guest.make_dir(parent(path), parents=True)
            written = await awake.guest.write_file(path, upload.chunks(), mode=bits)
        response.headers.update(awake_headers(awake))
        response.headers["etag"] = f'"{written.sha256}"'
    return public.FileWritten(path=render.text(written.path), length=written.length, crc32=written.crc32, sha256=written.sha256)


@router.get("/stat")
async def stat_file(ref: str, path: GuestPlace, response: Response, call: Call) -> public.FileInfo:
    """Does not follow a symbolic link at the end of the path."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return render.file_info(await awake.guest.stat(path))


@router.get("/list")
async def list_dir(ref: str, path: GuestPlace, response: Response, call: Call) -> public.FileList:
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return public.FileList(files=[render.file_info(one) for one in await awake.guest.list_dir(path)])


@router.post("/mkdir")
async def make_dir(
    ref: str,
    path: GuestPlace,
    response: Response,
    call: Call,
    parents: Annotated[bool, Query()] = True,
    mode: Annotated[str | None, Query(description="Octal, default 755.", **MODE)] = None,
) -> public.Done:
    """Make a directory; one that exists already is fine with ``parents``."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.make_dir(path, parents=parents, mode=mode_of(mode, 0o755) or 0)
    return public.Done()


@router.post("/rename")
async def rename(
    ref: str,
    request: Request,
    response: Response,
    call: Call,
    source: PathText,
    destination: PathText,
    root: Annotated[AbsoluteText | None, Query(description="A directory that both stay below.")] = None,
) -> public.Done:
    """Replaces the destination, atomically."""
    below = None if root is None else exact_query(request, "root")
    old, new = (place_of(below, exact_query(request, name)) for name in ("source", "destination"))
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.rename(old, new)
    return public.Done()


@router.post("/symlink")
async def make_link(
    ref: str,
    path: GuestPlace,
    request: Request,
    response: Response,
    call: Call,
    target: Annotated[str, Query(description="What the link says; it need not exist.", json_schema_extra={"minLength": 1})],
) -> public.Done:
    """Make a symbolic link."""
    says = exact_query(request, "target")
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.make_link(path, says)
    return public.Done()


@router.patch("")
async def set_attributes(
    ref: str,
    path: GuestPlace,
    response: Response,
    call: Call,
    mode: Annotated[str | None, Query(description="Octal.", **MODE)] = None,
    owner: Annotated[str | None, Query(description="USER, USER:GROUP or :GROUP; names or numbers.", max_length=200)] = None,
) -> public.FileInfo:
    """Change mode and owner, of what a link leads to if it is one."""
    wanted = node.Attributes(mode_of(mode, None), owner)
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return render.file_info(await awake.guest.set_attributes(path, wanted))


@router.delete("")
async def remove(
    ref: str, path: GuestPlace, response: Response, call: Call, recursive: Annotated[bool, Query()] = False
) -> public.Done:
    """Remove a file, link or empty directory; with ``recursive`` also a full one."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.remove(path, recursive=recursive)
    return public.Done()
