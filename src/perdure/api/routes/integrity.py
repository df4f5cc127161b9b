"""Verification of stored snapshots."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import APIRouter

from perdure.api import render
from perdure.api.deps import Call
from perdure.api.streams import EventSource, EventStream
from perdure.wire import public
from perdure.workspaces.model import Verified, Verifying

router = APIRouter(prefix="/snapshots", tags=["snapshots"])
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}, "model": public.VerifyEvent}}


@router.post("/verify", response_class=EventStream, status_code=200, responses=_STREAM)
async def verify_snapshots(body: public.VerifySnapshots, call: Call) -> EventStream:
    """Check every stored byte; answers an NDJSON stream of verify events. Hanging up ends it. Wakes nothing."""
    if body.workspace is not None:
        await call.workspaces.get(call.ctx, body.workspace)  # a name that is wrong is told by the status
    found = call.workspaces.verify(call.ctx, body.workspace, snapshot=body.snapshot, trial=body.boot)
    source = EventSource(
        events=_events(found),
        heartbeat=public.VerifyEvent(type="heartbeat"),
        failed=lambda error: public.VerifyEvent(type="error", error=error),
    )
    return EventStream(source, AsyncExitStack(), call.closing, {})


async def _events(found: AsyncGenerator[Verifying | Verified, None]) -> AsyncIterator[public.VerifyEvent]:
    count = damaged = read_bytes = 0
    async with aclosing(found):
        async for event in found:
            if isinstance(event, Verifying):
                read_bytes += event.read_bytes
                yield render.verifying(event)
                continue
            count += 1
            damaged += not event.intact
            yield public.VerifyEvent(type="snapshot", result=render.verified(event))
    yield public.VerifyEvent(type="done", done=count, count=count, damaged=damaged, read_bytes=read_bytes)
