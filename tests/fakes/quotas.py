"""Limits in memory, of one tenant. Storage is what a test says it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from perdure.access.limits import Ask, Limits, Quota, Use, refuse
from perdure.access.model import Principal
from perdure.core.errors import InvalidRequest
from perdure.core.ids import TenantId, WorkspaceId
from perdure.workspaces.lifecycle import WITH_MACHINE
from perdure.workspaces.model import Workspace


class FakeQuotas:
    """``used_bytes`` counts as storage. ``check`` refuses; the fake workspaces themselves ask nobody."""

    def __init__(self, rows: Callable[[], Mapping[WorkspaceId, Workspace]]) -> None:
        self._rows = rows
        self.now = Limits()
        self.used_bytes = 0

    async def limits(self, tenant_id: TenantId) -> Limits:
        return self.now

    async def use(self, tenant_id: TenantId) -> Use:
        rows = self._rows().values()
        awake = [row for row in rows if row.state in WITH_MACHINE]
        memory = sum(row.size.memory_mib for row in awake)
        return Use(len(rows), memory, self.used_bytes, tuple(row.name for row in awake))

    async def set(self, caller: Principal, tenant_id: TenantId, changes: Mapping[Quota, float | None]) -> Limits:
        if not changes:
            raise InvalidRequest("No limit was given.", hint=f"Give at least one of {', '.join(Quota)}.")
        self.now = replace(self.now, **{quota.value: value for quota, value in changes.items()})
        return self.now

    async def check(self, tenant_id: TenantId, ask: Ask) -> None:
        refuse(self.now, await self.use(tenant_id), ask)
