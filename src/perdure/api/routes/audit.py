"""Who did what, and what was refused to whom."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from perdure.access.audit import AuditRow
from perdure.api import render
from perdure.api.deps import Bundle, Call
from perdure.core.ids import TenantId
from perdure.wire import public

router = APIRouter(tags=["audit"])


class Page(BaseModel):
    """Which rows, and how long to wait for one."""

    tenant: str | None = Field(default=None, description="Of one tenant, by id or name; for the operator, who else sees all.")
    since: public.Moment | None = Field(default=None, alias="from", description="With its offset; none: from the first there is.")
    after: int = Field(default=0, ge=0, lt=1 << 63, description="The cursor of the page before.")
    limit: int = Field(default=100, ge=1, le=1000)
    wait_s: float = Field(default=0.0, ge=0, le=30, description="Where there is no row yet: how long to wait for one.")


@router.get("/audit")
async def audit(query: Annotated[Page, Query()], call: Call) -> public.AuditPage:
    """Rows of the caller's tenant, for the operator of all, oldest first. ``next`` is where the following page begins, and where
    rows begin that do not exist yet: who goes on from there misses none."""
    access = call.services.access
    sees_all = query.tenant is None and call.caller.is_operator
    tenant_id = None if sees_all else await access.tenant_of(call.caller, query.tenant)
    rows = await _rows(call, tenant_id, query)
    return public.AuditPage(rows=[render.audit_row(row) for row in rows], next=rows[-1].seq if rows else query.after)


async def _rows(call: Bundle, tenant_id: TenantId | None, query: Page) -> list[AuditRow]:
    audit, clock = call.services.audit, call.services.clock
    until = clock.monotonic() + query.wait_s
    while True:
        rows = await audit.page(tenant_id, query.since, query.after, query.limit)
        if rows or clock.monotonic() >= until or call.closing.is_set():
            return rows
        await audit.more()
