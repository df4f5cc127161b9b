"""Tenants, for the operator."""

from __future__ import annotations

from fastapi import APIRouter

from perdure.access.limits import Quota
from perdure.api import render
from perdure.api.deps import Call, Paging
from perdure.api.routes.quotas import quota_of
from perdure.core.ids import TenantId
from perdure.core.paging import Place, cut
from perdure.wire import public

router = APIRouter(prefix="/tenants", tags=["tenants"])


@router.post("", status_code=201)
async def create_tenant(body: public.CreateTenant, call: Call) -> public.TenantInfo:
    """Make a tenant. It has no keys yet."""
    made = await call.services.access.create_tenant(call.caller, body.name)
    call.about(made.id)
    return render.tenant(made)


@router.get("")
async def list_tenants(call: Call, page: Paging) -> public.TenantList:
    """Oldest first, in pages."""
    shown = cut(await call.services.access.tenants(page), page, lambda one: Place(one.created_at, one.id))
    return public.TenantList(tenants=[render.tenant(one) for one in shown.items], next_cursor=shown.next_cursor)


@router.get("/{tenant}/quota")
async def tenant_quota(tenant: str, call: Call) -> public.QuotaInfo:
    """What a tenant may have, and what it has. By id or name."""
    return await quota_of(call, await call.services.access.tenant_of(call.caller, tenant))


@router.patch("/{tenant}/quota")
async def set_quota(tenant: str, body: public.SetQuota, call: Call) -> public.QuotaInfo:
    """Change limits; null takes one away, and those that are left out stay. What a tenant has above a new limit it keeps."""
    tenant_id = await call.services.access.tenant_of(call.caller, tenant)
    call.about(tenant_id)
    changes = {Quota(name): getattr(body, name) for name in body.model_fields_set}
    await call.services.quotas.set(call.caller, tenant_id, changes)
    return await quota_of(call, tenant_id)


@router.post("/{tenant}/shred")
async def shred_tenant(tenant: str, body: public.ShredTenant, call: Call) -> public.ShreddedTenantInfo:
    """Throw away the key of a tenant: what it has in the object store can never be read again. By id or
    name; repeating it is fine."""
    found = await call.services.access.find_tenant(tenant)
    tenant_id = TenantId(tenant) if found is None else found.id
    done = await call.workspaces.shred_tenant(call.ctx, tenant_id, with_workspaces=body.delete_workspaces)
    return public.ShreddedTenantInfo(
        tenant=done.tenant_id, asked_at=done.asked_at, deleted=list(done.deleted), left=list(done.left)
    )
