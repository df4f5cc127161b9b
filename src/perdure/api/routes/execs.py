"""Commands in a workspace: start, follow, feed, end.

A stream is an attachment: a client that goes away detaches, and the command goes on. ``POST`` with an ``exec_id`` that exists
already attaches to that command, so a client that never saw the answer may repeat the call. With ``Idempotency-Key`` it may do
so after anything: the command is never run a second time, even when nobody knows any more what became of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from perdure.api import exec_streams, render
from perdure.api.deps import Bundle, Call, awake_headers
from perdure.api.streams import EventSource, EventStream
from perdure.core import ids, metrics
from perdure.core.errors import AlreadyExists, InvalidRequest, NotFound, QuotaExceeded
from perdure.core.ids import ExecId
from perdure.wire import node, public
from perdure.workspaces.model import Awake

router = APIRouter(prefix="/workspaces/{ref}/execs", tags=["execs"])
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/x-ndjson": {}, exec_streams.SSE: {}}, "model": public.ExecEvent}
}
_STARTED: dict[int | str, dict[str, Any]] = {201: {"model": public.ExecInfo, "description": "With background: it runs."}}

IdempotencyKey = Annotated[
    str | None,
    Header(alias=public.IDEMPOTENCY_HEADER, min_length=1, max_length=255, description="Any text of the client's choice."),
]


@router.post("", response_class=EventStream, status_code=200, responses=_STREAM | _STARTED)
async def start_exec(
    ref: str, body: public.StartExec, request: Request, call: Call, idempotency_key: IdempotencyKey = None
) -> Response:
    """Run a command; answers a stream of its events, or with ``background`` one ExecInfo as soon as it runs.

    With an idempotency key, of this workspace, the same command is never run twice: a repeated call attaches to it, raises 409
    ``idempotency_key_reused`` for another command, and 410 ``forgotten`` when it cannot be known what became of it.
    """
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        handle = await _start_or_attach(call, awake, body, idempotency_key)
        stack.push_async_callback(handle.close)
        if body.background:
            info = await _background(awake, handle)
            return JSONResponse(info.model_dump(mode="json"), status_code=201, headers=awake_headers(awake))
        exec_streams.register(stack, call.exec_handles, awake, handle)
        form = exec_streams.format_for(request, exec_streams.Offsets())
        return EventStream(_source(handle, body.wait_s), stack.pop_all(), call.closing, awake_headers(awake), form)


@router.get("")
async def list_execs(ref: str, response: Response, call: Call) -> public.ExecList:
    """Running commands and the recent finished ones whose output is still kept."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        execs = await awake.guest.list_execs()
        return public.ExecList(execs=[render.exec_info(one, awake.workspace.generation) for one in execs])


@router.get("/{exec_id}")
async def get_exec(ref: str, exec_id: str, response: Response, call: Call) -> public.ExecInfo:
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return render.exec_info(await _find(awake.guest, exec_id), awake.workspace.generation)


@router.get(
    "/{exec_id}/output",
    response_class=EventStream,
    status_code=200,
    responses={**_STREAM, 204: {"description": "Last-Event-ID was that of the last event there will ever be."}},
)
async def follow_exec(
    ref: str,
    exec_id: str,
    query: Annotated[exec_streams.Follow, Query()],
    request: Request,
    call: Call,
    last_event_id: Annotated[
        str, Header(description="The id of the last event that arrived.", json_schema_extra=exec_streams.EVENT_ID)
    ] = "",
) -> Response:
    """Attach to a command: its events from these byte offsets on, then live.

    As NDJSON, or with ``Accept: text/event-stream`` as server-sent events, which a client takes up by ``Last-Event-ID``.
    """
    offsets = exec_streams.begin(last_event_id, query)
    if offsets is None:
        return Response(status_code=204)
    await exec_streams.check_generation(call, ref, query.generation)
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        handle = await awake.guest.attach_exec(ExecId(exec_id), offsets.stdout, offsets.stderr)
        stack.push_async_callback(handle.close)
        exec_streams.register(stack, call.exec_handles, awake, handle)
        form = exec_streams.format_for(request, offsets)
        return EventStream(_source(handle, query.wait_s), stack.pop_all(), call.closing, awake_headers(awake), form)


@router.post("/{exec_id}/stdin", openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}}})
async def write_stdin(
    ref: str, exec_id: str, request: Request, call: Call, eof: Annotated[bool, Query()] = False
) -> public.StdinWritten:
    """Append the body to the command's stdin; with ``eof`` close it afterwards."""
    written = 0
    async with call.awake(ref) as awake, _writer(call.exec_handles, awake, exec_id) as handle:
        async for chunk in request.stream():
            if chunk:
                await handle.write_stdin(chunk)
                written += len(chunk)
        if eof:
            await handle.close_stdin()
    return public.StdinWritten(bytes=written, eof=eof)


@router.post("/{exec_id}/signal")
async def signal_exec(ref: str, exec_id: str, body: public.SignalExec, response: Response, call: Call) -> public.Done:
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.signal_exec(ExecId(exec_id), body.signal)
    return public.Done()


@router.post("/{exec_id}/resize")
async def resize_exec(ref: str, exec_id: str, body: public.PtySize, response: Response, call: Call) -> public.Done:
    """Tell a terminal its size; the same one again has the programs on it draw anew."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.resize_exec(ExecId(exec_id), node.PtySize(body.rows, body.cols))
    return public.Done()


@router.post("/{exec_id}/kill")
async def kill_exec(ref: str, exec_id: str, response: Response, call: Call) -> public.Done:
    """End everything the command started: SIGTERM, then SIGKILL after its grace."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        await awake.guest.kill_exec(ExecId(exec_id))
    return public.Done()


def _spec(body: public.StartExec, exec_id: ExecId) -> node.ExecSpec:
    return node.ExecSpec(
        exec_id=exec_id,
        argv=None if body.argv is None else tuple(body.argv),
        shell=body.shell,
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        stdin=body.stdin,
        run_limit_s=body.run_limit_s,
        idle_limit_s=body.idle_limit_s,
        kill_grace_s=body.kill_grace_s,
        pty=None if body.pty is None else node.PtySize(body.pty.rows, body.pty.cols),
    )


async def _start_or_attach(call: Bundle, awake: Awake, body: public.StartExec, key: str | None) -> node.ExecHandle:
    guest, check_limit = awake.guest, await call.exec_limit()
    if key is not None:
        exec_id = ids.keyed_exec(awake.workspace.id, key)
        if body.exec_id not in {None, exec_id}:
            raise InvalidRequest("The command's id is not that of its idempotency key.", hint="Give one of the two.")
        return await call.services.keyed_execs.start(awake, _spec(body, exec_id), key, check_limit)
    spec = _spec(body, ExecId(body.exec_id) if body.exec_id else call.new_exec_id())
    try:
        check_limit()
        handle = await guest.start_exec(spec)
        metrics.EXECS.add()
        return handle
    except AlreadyExists:
        return await guest.attach_exec(spec.exec_id)
    except QuotaExceeded:
        with suppress(NotFound):  # a call that is repeated starts nothing
            return await guest.attach_exec(spec.exec_id)
        raise


async def _background(awake: Awake, handle: node.ExecHandle) -> public.ExecInfo:
    async for _ in handle.events():  # started, or ended before it began
        break
    return render.exec_info(await _find(awake.guest, handle.exec_id), awake.workspace.generation)


async def _find(guest: node.Guest, exec_id: str) -> node.ExecInfo:
    for info in await guest.list_execs():
        if info.exec_id == exec_id:
            return info
    raise NotFound(
        f"There is no command {exec_id!r} in this workspace.",
        hint="List them with GET …/execs; old finished ones are forgotten.",
    )


def _source(handle: node.ExecHandle, wait_s: float | None) -> EventSource:
    async def events() -> AsyncIterator[public.Answer]:
        async for event in handle.events():
            yield render.exec_event(event)

    return EventSource(
        events=events(),
        heartbeat=public.ExecEvent(type="heartbeat"),
        failed=lambda error: public.ExecEvent(type="error", exec_id=handle.exec_id, error=error),
        wait_s=wait_s,
        waited=public.ExecEvent(type="detached", exec_id=handle.exec_id),
    )


@asynccontextmanager
async def _writer(live: exec_streams.LiveHandles, awake: Awake, exec_id: str) -> AsyncIterator[node.ExecHandle]:
    """An attachment to write stdin with: a stream's, or a new one whose output is read and dropped meanwhile."""
    key = (awake.workspace.id, awake.workspace.generation, exec_id)
    if key in live:
        yield live[key]
        return
    info = await _find(awake.guest, exec_id)
    handle = await awake.guest.attach_exec(ExecId(exec_id), info.stdout_bytes, info.stderr_bytes)
    drain = asyncio.create_task(_drain(handle))
    try:
        yield handle
    finally:
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)
        await handle.close()


async def _drain(handle: node.ExecHandle) -> None:
    async for _ in handle.events():
        pass
