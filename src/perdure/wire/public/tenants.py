"""Tenants: who owns workspaces, and has a key of their own in an object store that is encrypted."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from perdure.wire.public.common import Answer, Body, Name, Paged


class CreateTenant(Body):
    name: Name


class TenantInfo(Answer):
    id: str
    name: str
    created_at: datetime
    created_by: str


class TenantList(Paged):
    tenants: list[TenantInfo]


class ShredTenant(Body):
    """``delete_workspaces``: with all their snapshots. Without it a tenant that has workspaces is not shredded."""

    delete_workspaces: bool = False


class ShreddedTenantInfo(Answer):
    """The tenant's key is gone, and what it had in the object store can never be read again."""

    tenant: str
    asked_at: datetime = Field(description="When the tenant was shredded; of one that was so before, then.")
    deleted: list[str] = Field(description="Workspaces that were deleted with it.")
    left: list[str] = Field(description="Workspaces on other nodes, which delete them when they run.")
