"""Verification of recorded histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any, Literal

from fastapi import APIRouter

from perdure.api.deps import Call
from perdure.api.streams import EventSource, EventStream
from perdure.runs.service.histories import History, Of
from perdure.wire import public

router = APIRouter(prefix="/histories", tags=["histories"])
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}, "model": public.HistoriesEvent}}
Kind = Literal["progress", "violation", "done"]
#: Histories between two lines of progress.
_EVERY = 100


@router.post("/verify", response_class=EventStream, status_code=200, responses=_STREAM)
async def verify_histories(call: Call) -> EventStream:
    """Check every hash of every workspace's thread and every execution's history, of all tenants; answers an NDJSON stream.
    Changes nothing; hanging up ends it."""
    source = EventSource(
        events=_events(call.services.histories.verify()),
        heartbeat=public.HistoriesEvent(type="heartbeat"),
        failed=lambda error: public.HistoriesEvent(type="error", error=error),
    )
    return EventStream(source, AsyncExitStack(), call.closing, {})


async def _events(found: AsyncGenerator[History]) -> AsyncIterator[public.HistoriesEvent]:
    read: Counter[Of] = Counter()
    entries = violations = 0

    def event(kind: Kind, violation: public.HistoryViolation | None = None) -> public.HistoriesEvent:
        sums = {"workspaces": read[Of.WORKSPACE], "executions": read[Of.EXECUTION], "entries": entries}
        return public.HistoriesEvent(type=kind, violations=violations, violation=violation, **sums)

    async with aclosing(found):
        async for one in found:
            read[one.of] += 1  # but for what was signed, which is no history
            entries += one.entries
            if one.wrong is not None:
                violations += 1
                yield event("violation", public.HistoryViolation(of=one.of.value, id=one.id, entry=one.wrong, reason=one.reason))
            elif read.total() % _EVERY == 0:
                yield event("progress")
    yield event("done")
