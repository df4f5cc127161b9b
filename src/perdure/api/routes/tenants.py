"""Tenants. Whoever may call this API at all is the operator."""

from __future__ import annotations

from fastapi import APIRouter

from perdure.api.deps import Call
from perdure.core.ids import TenantId
from perdure.wire import public

router = APIRouter(prefix="/tenants", tags=["tenants"])


@router.post("/{tenant}/shred")
async def shred_tenant(tenant: str, body: public.ShredTenant, call: Call) -> public.ShreddedTenantInfo:
    """Throw away the key of a tenant: what it has in the object store can never be read again. Repeating it is fine."""
    done = await call.workspaces.shred_tenant(call.ctx, TenantId(tenant), with_workspaces=body.delete_workspaces)
    return public.ShreddedTenantInfo(
        tenant=done.tenant_id, asked_at=done.asked_at, deleted=list(done.deleted), left=list(done.left)
    )
