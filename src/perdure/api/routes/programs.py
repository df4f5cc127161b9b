"""A workspace's program: which it is, how it does, what it wrote. All of it wakes the workspace, for the guest knows it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from perdure.api import render
from perdure.api.deps import Bundle, Bytes, Call, awake_headers
from perdure.api.streams import EventSource, EventStream
from perdure.wire import node, public

router = APIRouter(prefix="/workspaces/{ref}/program", tags=["program"])
#: How long a look waits for the program's own word.
PING_S = 2.0
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}, "model": public.LogChunk}}


class LogQuery(BaseModel):
    """Which of what is kept: from a byte offset on, or the last lines; neither: all."""

    offset: Bytes | None = None
    tail: Bytes | None = Field(default=None, description="The last so many lines; not beside an offset.")
    follow: bool = Field(default=False, description="And what it writes from then on.")


@router.get("")
async def get_program(ref: str, call: Call, response: Response) -> public.ProgramInfo:
    """What the workspace's program does, and what it says of itself; ``none`` where none is named."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        status = await awake.guest.program()
        ping = await awake.guest.ping_program(PING_S) if status.state is node.ProgramState.RUNNING else None
        return render.program(status, awake.workspace.generation, ping)


@router.put("")
async def set_program(ref: str, body: public.SetProgram, call: Call, response: Response) -> public.ProgramInfo:
    """Name the workspace's program and start it, in place of the one before. A file on the workspace's disk keeps it."""
    spec = node.ProgramSpec(
        argv=tuple(body.argv),
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        port=body.port,
        restart=body.restart,
        stop_grace_s=body.stop_grace_s,
    )
    spec.to_file()  # what cannot be one is told before anything is woken
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return render.program(await awake.guest.set_program(spec), awake.workspace.generation)


@router.delete("")
async def unset_program(ref: str, call: Call, response: Response) -> public.ProgramInfo:
    """End the program and forget it. Succeeds where there is none."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return render.program(await awake.guest.set_program(None), awake.workspace.generation)


@router.post("/start")
async def start_program(ref: str, call: Call, response: Response) -> public.ProgramInfo:
    """Start it, now if it backs off; nothing happens when it runs."""
    return await _act(ref, call, response, node.ProgramAct.START)


@router.post("/stop")
async def stop_program(ref: str, call: Call, response: Response) -> public.ProgramInfo:
    """SIGTERM, and SIGKILL after its grace. It stays so until it is started, or its machine boots from disk."""
    return await _act(ref, call, response, node.ProgramAct.STOP)


@router.post("/restart")
async def restart_program(ref: str, call: Call, response: Response) -> public.ProgramInfo:
    """End it and start it anew, as its file is now."""
    return await _act(ref, call, response, node.ProgramAct.RESTART)


async def _act(ref: str, call: Bundle, response: Response, act: node.ProgramAct) -> public.ProgramInfo:
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return render.program(await awake.guest.act_on_program(act), awake.workspace.generation)


@router.get("/logs", response_class=EventStream, status_code=200, responses=_STREAM)
async def program_logs(ref: str, query: Annotated[LogQuery, Query()], call: Call) -> EventStream:
    """What the program wrote to stdout and stderr, in its order; about the last mebibyte is kept. An offset beyond the end means
    that the machine has booted since and the log began anew: it then comes from its start. Following keeps it awake."""
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        chunks = awake.guest.program_log(node.LogRequest(query.offset, query.tail, query.follow))
        if isinstance(chunks, AsyncGenerator):
            stack.push_async_callback(chunks.aclose)
        return EventStream(_source(chunks), stack.pop_all(), call.closing, awake_headers(awake))


def _source(chunks: AsyncIterator[node.LogChunk]) -> EventSource:
    async def events() -> AsyncIterator[public.Answer]:
        async for chunk in chunks:
            yield render.log_chunk(chunk)

    return EventSource(
        events=events(),
        heartbeat=public.LogChunk(type="heartbeat"),
        failed=lambda error: public.LogChunk(type="error", error=error),
    )
