"""A server without tenants: it knows the operator's key and no other."""

from __future__ import annotations

from perdure.access.model import OPERATOR, Key, NewKey, Principal, Tenant
from perdure.core.errors import NotFound, Unavailable
from perdure.core.ids import TenantId


class FakeAccess:
    def __init__(self, operator_key: str) -> None:
        self._operator_key = operator_key

    async def authenticate(self, secret: str) -> Principal | None:
        return OPERATOR if secret == self._operator_key else None

    async def create_key(self, caller: Principal, new: NewKey) -> tuple[Key, str]:
        raise Unavailable("There are no keys here.")

    async def keys(self, caller: Principal, tenant: str | None = None) -> list[Key]:
        raise Unavailable("There are no keys here.")

    async def revoke(self, caller: Principal, ref: str, tenant: str | None = None) -> Key:
        raise Unavailable("There are no keys here.")

    async def create_tenant(self, caller: Principal, name: str) -> Tenant:
        raise Unavailable("There are no tenants here.")

    async def find_tenant(self, ref: str) -> Tenant | None:
        return None

    async def tenants(self) -> list[Tenant]:
        raise Unavailable("There are no tenants here.")

    async def tenant_of(self, caller: Principal, ref: str | None) -> TenantId:
        if ref in {None, caller.tenant_id}:
            return caller.tenant_id
        raise NotFound(f"There is no tenant {ref!r}.")
