"""Limits of tenants as rows, and the moment in which more is given to a tenant or refused.

Whoever is about to add a workspace or to start a machine locks its tenant's row, counts, and writes its own row in the same
transaction; so of many at once no more get in than there is room for. A tenant without a row has no limits and is not locked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from perdure.access.limits import Ask, Limits, Quota, Use, refuse
from perdure.access.model import Principal
from perdure.core.errors import InvalidRequest
from perdure.core.ids import TenantId
from perdure.db.database import Database, Transaction

NO_LIMITS = Limits()


class Quotas:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def limits(self, tenant_id: TenantId) -> Limits:
        row = await self._database.one("quotas.of", tenant_id=tenant_id)
        return NO_LIMITS if row is None else _limits(row)

    async def use(self, tenant_id: TenantId) -> Use:
        return _use(await self._database.one("quotas.use", tenant_id=tenant_id))

    async def set(self, caller: Principal, tenant_id: TenantId, changes: Mapping[Quota, float | None]) -> Limits:
        """Change those that are given; None takes a limit away. What a tenant has above a new limit stays."""
        if not changes:
            raise InvalidRequest("No limit was given.", hint=f"Give at least one of {', '.join(Quota)}.")
        values = {quota.value: changes.get(quota) for quota in Quota}
        row = await self._database.one(
            "quotas.set", tenant_id=tenant_id, given=[quota.value for quota in changes], by=caller.name, **values
        )
        assert row is not None, "an upsert returns its row"
        return _limits(row)

    async def check(self, tenant_id: TenantId, ask: Ask) -> None:
        """Whether there is room now. Nothing is reserved: it spares work that ``admit`` would refuse in the end."""
        limits = await self.limits(tenant_id)
        if limits != NO_LIMITS:
            refuse(limits, await self.use(tenant_id), ask)

    async def admit(self, tx: Transaction, tenant_id: TenantId, ask: Ask) -> None:
        """The first statement of the transaction that makes it so: until that ends, nobody else of the tenant is admitted."""
        row = await tx.one("quotas.lock", tenant_id=tenant_id)
        if row is not None:
            refuse(_limits(row), _use(await tx.one("quotas.use", tenant_id=tenant_id)), ask)

    @asynccontextmanager
    async def admitted(self, tenant_id: TenantId, ask: Ask) -> AsyncIterator[Transaction | None]:
        """The transaction in which to write the row. None for a tenant without limits: a statement of its own will do."""
        if await self.limits(tenant_id) == NO_LIMITS:
            yield None
            return
        async with self._database.transaction() as tx:
            await self.admit(tx, tenant_id, ask)
            yield tx


def _limits(row: Mapping[str, Any]) -> Limits:
    return Limits(*(row[quota.value] for quota in Quota))


def _use(row: Mapping[str, Any] | None) -> Use:
    assert row is not None, "counting returns a row"
    return Use(row["workspaces"], row["memory_awake_mib"], row["storage_bytes"], tuple(row["awake"]))
