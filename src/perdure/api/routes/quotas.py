"""What one's own tenant may have, and has."""

from __future__ import annotations

from fastapi import APIRouter

from perdure.api import render
from perdure.api.deps import Bundle, Call
from perdure.core.ids import TenantId
from perdure.wire import public

router = APIRouter(tags=["tenants"])


@router.get("/quota")
async def quota(call: Call) -> public.QuotaInfo:
    """Limits of the key's own tenant (null: none) beside what counts towards them now. What failed, and what was left of a lost
    machine, counts as no workspace."""
    return await quota_of(call, call.ctx.tenant_id)


async def quota_of(call: Bundle, tenant_id: TenantId) -> public.QuotaInfo:
    """Of a tenant that the caller may look at."""
    quotas = call.services.quotas
    limits, use = await quotas.limits(tenant_id), await quotas.use(tenant_id)
    found = await call.services.access.find_tenant(tenant_id)
    name = None if found is None else found.name
    return render.quota(tenant_id, name, limits, use, call.workspaces.running_execs(tenant_id))
