"""The only tenant of the fake workspaces, others that have none, and their ends."""

from __future__ import annotations

import re

from perdure.core.errors import Conflict, NotFound
from perdure.core.ids import DEFAULT_TENANT, TenantId, WorkspaceId
from perdure.workspaces.model import Context, ShreddedTenant, Workspace
from tests.fakes.memory_guest import MOMENT, MemoryGuest, World

#: An id that somebody has made; it is believed.
_MINTED = re.compile(r"ten_[0-9a-z]{26}")


class FakeTenants:
    """The part of ``Workspaces`` that is about tenants, over the rows of the rest."""

    rows: dict[WorkspaceId, Workspace]
    worlds: dict[WorkspaceId, World]
    guests: dict[WorkspaceId, MemoryGuest]

    def running_execs(self, tenant_id: TenantId) -> int:
        awake = [self.worlds[one] for one in self.guests]
        return sum(command.exited is None for world in awake for command in world.commands.values())

    async def delete(self, ctx: Context, ref: str) -> None:
        raise NotImplementedError

    async def shred_tenant(self, ctx: Context, tenant_id: TenantId, *, with_workspaces: bool = False) -> ShreddedTenant:
        if tenant_id != DEFAULT_TENANT and not _MINTED.fullmatch(tenant_id):
            raise NotFound(f"There is no tenant {tenant_id!r}.", hint=f"Tenants of this server: {DEFAULT_TENANT}.")
        names = tuple(row.name for row in self.rows.values() if row.tenant_id == tenant_id)
        if names and not with_workspaces:
            raise Conflict(f"Tenant {tenant_id} has {len(names)} workspaces that are not deleted: {', '.join(names)}.")
        for name in names:
            await self.delete(ctx, name)
        return ShreddedTenant(tenant_id, MOMENT, names)
