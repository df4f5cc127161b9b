"""What workspaces used."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from perdure.api import render
from perdure.api.deps import Call
from perdure.wire import public

router = APIRouter(tags=["usage"])


@router.get("/usage")
async def usage(
    call: Call,
    since: Annotated[public.Moment | None, Query(alias="from", description="With its offset; none: from the beginning.")] = None,
    until: Annotated[public.Moment | None, Query(alias="to", description="With its offset; none: until now.")] = None,
    by: public.UsageBy = "workspace",
    workspace: Annotated[str | None, Query(description="Only those that have, or had, this id or name.")] = None,
) -> public.UsageReport:
    """How long workspaces were awake, paused and asleep, and what they used. Deleted ones are included. Changes nothing and wakes
    nobody; the same question about the past has the same answer."""
    tenant_id = call.ctx.tenant_id
    found = await call.services.metering.of(tenant_id, workspace, since, until)
    rows = render.usage_rows(tenant_id, found, by)
    return public.UsageReport(by=by, since=since, until=until, rows=rows)


@router.get("/meters")
async def meters(call: Call) -> public.MeterReadings:
    """What the meters of the workspaces that are awake say now: for who watches them. Wakes nobody."""
    found = await call.workspaces.meters(call.ctx)
    return public.MeterReadings(at=call.services.clock.now(), meters=[render.meters(one) for one in found])
