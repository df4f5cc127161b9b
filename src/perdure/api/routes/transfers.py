"""Files that take long: uploads in pieces, whole directories as tar streams, and watching one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from perdure.api import render
from perdure.api.deps import AbsoluteText, Bundle, Bytes, Call, GuestPlace, awake_headers, exact_query
from perdure.api.routes.files import Upload, mode_of
from perdure.api.streams import ArchiveStream, EventSource, EventStream
from perdure.core.errors import MachineDied, NotFound, StaleGeneration, Unavailable
from perdure.wire import node, public
from perdure.wire.paths import parent, place_of, shown
from perdure.workspaces.model import Awake

router = APIRouter(prefix="/workspaces/{ref}/files", tags=["files"])
_BYTES: dict[str, Any] = {"content": {"application/octet-stream": {}}}
_TAR: dict[str, Any] = {"content": {"application/x-tar": {}}}
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}, "model": public.WatchEvent}}

Result = TypeVar("Result")
UploadId = Annotated[str, Path(pattern=r"^upl_[0-9a-z]{8,64}$", description="Chosen by the client: upl_ and 8 to 64 of 0-9a-z.")]


# ----------------------------------------------------------------------------------------------------------------- uploads


@router.put("/uploads/{upload_id}")
async def begin_upload(
    ref: str,
    upload_id: UploadId,
    request: Request,
    response: Response,
    call: Call,
    path: Annotated[AbsoluteText | None, Query(description="Where it is to go, to refuse early what cannot be replaced.")] = None,
    root: Annotated[AbsoluteText | None, Query()] = None,
) -> public.FileUpload:
    """Begin an upload in pieces, or take up the one of this id. What has arrived is kept in the workspace, asleep or awake, for
    a day after its last piece."""
    below = None if root is None else exact_query(request, "root")
    place = None if path is None else place_of(below, exact_query(request, "path"))
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return public.FileUpload(upload_id=upload_id, offset=await awake.guest.begin_upload(upload_id, place))


@router.get("/uploads/{upload_id}")
async def upload_offset(ref: str, upload_id: UploadId, response: Response, call: Call) -> public.FileUpload:
    """How much of it the workspace has."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return public.FileUpload(upload_id=upload_id, offset=await awake.guest.upload_offset(upload_id))


@router.patch("/uploads/{upload_id}", openapi_extra={"requestBody": _BYTES})
async def append_upload(
    ref: str,
    upload_id: UploadId,
    request: Request,
    response: Response,
    call: Call,
    offset: Annotated[Bytes, Query(description="Must be the bytes it has.")],
) -> public.FileUpload:
    """Add the body to it, streamed. When the connection breaks, what had arrived stays: ask for the offset, and go on."""
    upload = Upload(request, call.closing)
    await call.check_upload()
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        reached = await _unless_closing(call, awake.guest.append_upload(upload_id, offset, upload.chunks()))
    return public.FileUpload(upload_id=upload_id, offset=reached)


async def _unless_closing(call: Bundle, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work that waits for a client; a server that stops, or knows the key no more, gives it up and says so."""
    task, closing = asyncio.ensure_future(work), asyncio.ensure_future(call.closing.wait())
    try:
        await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        stopping = Unavailable("The server is stopping; what has arrived stays.", hint="Go on when it is back.", ambiguous=True)
        raise call.closing.reason(stopping)
    finally:
        task.cancel()
        closing.cancel()
        await asyncio.gather(task, closing, return_exceptions=True)


class Whole(BaseModel):
    """What the file must be."""

    length: Bytes
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$", description="Compared with the file in the workspace.")
    mode: str | None = Field(default=None, description="Octal; default 644 for a new file, unchanged for an old one.")
    parents: bool = Field(default=False, description="Make missing directories above it.")


@router.post("/uploads/{upload_id}/finish")
async def finish_upload(
    ref: str, upload_id: UploadId, path: GuestPlace, query: Annotated[Whole, Query()], response: Response, call: Call
) -> public.FileWritten:
    """Give it its name, atomically, if length and SHA-256 (computed in the workspace) are right. Each piece has been compared
    already; ``sha256`` is for an upload that was broken off and taken up again. With it, repeating this is fine."""
    finish = node.FinishUpload(upload_id, path, query.length, query.sha256, mode_of(query.mode, None))
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        if query.parents:
            await awake.guest.make_dir(parent(path), parents=True)
        await awake.guest.finish_upload(finish)
    return public.FileWritten(path=render.text(shown(path)), length=query.length, sha256=query.sha256)


@router.delete("/uploads/{upload_id}")
async def drop_upload(ref: str, upload_id: UploadId, response: Response, call: Call) -> public.Done:
    """Throw it away. Dropping one that is not there is fine."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.drop_upload(upload_id)
    return public.Done()


# ------------------------------------------------------------------------------------------------------------- directories


@router.get("/tar", response_class=ArchiveStream, status_code=200, responses={200: _TAR})
async def read_dir(ref: str, path: GuestPlace, call: Call) -> ArchiveStream:
    """A directory as a tar stream (pax), made in the workspace. Devices, sockets and pipes are left out. What is in it comes from
    the workspace: whoever unpacks it must not trust its names and links."""
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        reading = await awake.guest.pack(path)
        stack.push_async_callback(reading.close)
        return ArchiveStream(reading.chunks(), None, stack.pop_all(), call.closing, awake_headers(awake))


@router.put("/tar", openapi_extra={"requestBody": _TAR})
async def write_dir(ref: str, path: GuestPlace, request: Request, response: Response, call: Call) -> public.TreeWritten:
    """Unpack a tar stream (pax, ustar or GNU, not compressed) into a directory, which is made if it is missing.

    Files replace what has their name, each at once; directories are merged. A member that would lead out (absolute, ``..``, a
    link) or is a device ends it with an error; what came before it stays.
    """
    upload = Upload(request, call.closing)
    await call.check_upload()
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        made = await _unless_closing(call, awake.guest.unpack(path, upload.chunks()))
    return public.TreeWritten(length=made.length, files=made.files, directories=made.directories, links=made.links)


# ---------------------------------------------------------------------------------------------------------------- watching


class Attach(BaseModel):
    """A watch that is there already."""

    recursive: bool = False
    watch_id: str | None = Field(default=None, max_length=80, description="Go on with this watch, which an earlier stream began.")
    after: Bytes = Field(default=0, description="The last `seq` that was seen of it.")


@router.get("/watch", response_class=EventStream, status_code=200, responses=_EVENTS)
async def watch_dir(ref: str, path: GuestPlace, query: Annotated[Attach, Query()], call: Call) -> EventStream:
    """What happens in a directory, as it happens: an NDJSON stream.

    The watch is the workspace's own and goes on without a stream for an hour of waking time, keeping its last 256 KiB of events;
    it sleeps and wakes with the memory. Where it is not there any more, a new one begins, and its first event is ``overflow``.
    """
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        handle, is_new = await _watch(awake.guest, path, query)
        stack.push_async_callback(handle.close)
        lost = is_new and query.watch_id is not None
        source = EventSource(
            events=_events(awake, handle, shown(path) if lost else None),
            heartbeat=public.WatchEvent(type="heartbeat"),
            failed=lambda error: public.WatchEvent(type="error", watch_id=handle.watch_id, error=error),
        )
        return EventStream(source, stack.pop_all(), call.closing, awake_headers(awake))


async def _watch(guest: node.Guest, path: node.Place, query: Attach) -> tuple[node.WatchHandle, bool]:
    if query.watch_id is not None:
        try:
            return await guest.resume_watch(query.watch_id, query.after), False
        except NotFound:
            pass
    return await guest.watch(path, recursive=query.recursive), True


async def _events(awake: Awake, handle: node.WatchHandle, lost: str | None) -> AsyncIterator[public.Answer]:
    generation = awake.workspace.generation
    yield public.WatchEvent(type="started", watch_id=handle.watch_id, generation=generation)
    if lost is not None:
        yield public.WatchEvent(type="overflow", path=render.text(lost), directory=True)
    try:
        async for event in handle.events():
            yield render.watch_event(event)
    except (MachineDied, StaleGeneration):  # it sleeps, or has ended some other way; what it is then is not this stream's to say
        yield public.WatchEvent(type="ended", watch_id=handle.watch_id, generation=generation, reason="generation")
