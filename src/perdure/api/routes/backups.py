"""Backups of the whole server."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter

from perdure.api.deps import Call
from perdure.api.streams import EventSource, EventStream
from perdure.wire import public

router = APIRouter(prefix="/backups", tags=["backups"])
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}, "model": public.BackupEvent}}


@router.post("", response_class=EventStream, status_code=200, responses=_STREAM)
async def make_backup(body: public.MakeBackup, call: Call) -> EventStream:
    """Back up database, snapshots and images while the server works; answers an NDJSON stream of backup events.

    Hanging up ends it, and the next backup into the same place goes on with what was sent."""
    source = EventSource(
        events=call.services.backups.make(call.ctx, body),
        heartbeat=public.BackupEvent(type="heartbeat"),
        failed=lambda error: public.BackupEvent(type="error", error=error),
    )
    return EventStream(source, AsyncExitStack(), call.closing, {})
