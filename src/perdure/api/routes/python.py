"""Cells of Python in a workspace's kernels: run one, follow it, interrupt it, and start a kernel anew.

A stream is an attachment: a client that goes away detaches, and the cell goes on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from perdure.api import exec_streams
from perdure.api.deps import Bundle, Bytes, Call, awake_headers
from perdure.api.kernels.talk import Kernels
from perdure.api.streams import EventSource, EventStream
from perdure.core.ids import ExecId
from perdure.wire import public
from perdure.workspaces.model import Awake

router = APIRouter(prefix="/workspaces/{ref}/python", tags=["python"])
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}, "model": public.PythonEvent}}


class FollowCell(BaseModel):
    """Where to go on."""

    context: public.Context = public.DEFAULT_CONTEXT
    offset: Bytes = Field(default=0, description="That of the last event that arrived.")
    generation: int | None = Field(default=None, description="Refuse, and do not wake, if it is not running at this one.")


@router.post("", response_class=EventStream, status_code=200, responses=_STREAM)
async def run_python(ref: str, body: public.RunPython, call: Call) -> EventStream:
    """Run a cell in the workspace's Python kernel; answers a stream of what it says. The kernel's variables stay, over sleeps and
    forks. It is started where there is none. Cells of one context run one after the other. The stream ends with ``failed``, code
    ``python_missing``, where the workspace has no ipykernel."""
    check_limit = await call.exec_limit()
    exec_id = ExecId(body.exec_id) if body.exec_id else call.new_exec_id()
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        kernels = _kernels(awake, call)
        handle = await kernels.run(exec_id, body, check_limit)
        stack.push_async_callback(handle.close)
        return _stream(kernels.events(handle, body.context), exec_id, stack, awake, call)


@router.get("/cells/{exec_id}", response_class=EventStream, status_code=200, responses=_STREAM)
async def follow_python(ref: str, exec_id: str, query: Annotated[FollowCell, Query()], call: Call) -> EventStream:
    """Attach to a cell: what it says from an offset on, then live."""
    await exec_streams.check_generation(call, ref, query.generation)
    async with AsyncExitStack() as stack:
        awake = await stack.enter_async_context(call.awake(ref))
        handle = await awake.guest.attach_exec(ExecId(exec_id), query.offset, 0)
        stack.push_async_callback(handle.close)
        events = _kernels(awake, call).events(handle, query.context, query.offset)
        return _stream(events, ExecId(exec_id), stack, awake, call)


@router.post("/interrupt")
async def interrupt_python(ref: str, body: public.PythonContext, response: Response, call: Call) -> public.PythonInterrupted:
    """Interrupt the cell that runs, as Ctrl-C does; those that wait run then. The kernel and its variables stay."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return public.PythonInterrupted(interrupted=await _kernels(awake, call).interrupt(body.context))


@router.post("/restart")
async def restart_python(ref: str, body: public.PythonContext, response: Response, call: Call) -> public.PythonKernel:
    """End the kernel, with what runs in it, and start a new one. Answers when that is ready."""
    async with call.awake(ref) as awake:
        response.headers.update(awake_headers(awake))
        return await _kernels(awake, call).restart(body.context)


def _kernels(awake: Awake, call: Bundle) -> Kernels:
    return Kernels(awake.guest, call.new_exec_id)


def _stream(
    events: AsyncGenerator[public.PythonEvent], exec_id: ExecId, stack: AsyncExitStack, awake: Awake, call: Bundle
) -> EventStream:
    source = EventSource(
        events=events,
        heartbeat=public.PythonEvent(type="heartbeat"),
        failed=lambda error: public.PythonEvent(type="failed", exec_id=exec_id, failure=error),
    )
    return EventStream(source, stack.pop_all(), call.closing, awake_headers(awake))
