"""Tenants and keys in memory. Of the keys only the operator's opens anything."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime, timedelta

from perdure.access.model import OPERATOR, Key, NewKey, Principal, Tenant
from perdure.access.service import OPERATOR_KEY_ID
from perdure.access.signatures import Pair
from perdure.core.errors import AlreadyExists, NotFound
from perdure.core.ids import DEFAULT_TENANT, KeyId, TenantId, check_name
from perdure.core.paging import WHOLE, Page, Place
from perdure.core.scopes import KeyState
from tests.fakes.memory_guest import MOMENT

#: What secrets of AWS clients are derived from.
SIGNING_KEY = b"k" * 32
#: The operator's.
AWS_SECRET = "operators/secret+for/aws+clients/0123456"
DEFAULT = Tenant(DEFAULT_TENANT, "default", MOMENT, "installation")


class FakeAccess:
    def __init__(self, operator_key: str) -> None:
        self._operator_key = operator_key
        self.reset()

    def reset(self) -> None:
        """Forget all of them but the default tenant."""
        self._tenants = [DEFAULT]
        self._keys: list[Key] = []

    async def authenticate(self, secret: str) -> Principal | None:
        return OPERATOR if secret == self._operator_key else None

    async def ended(self, key_ids: Collection[KeyId]) -> list[KeyId]:
        counting = {key.id for key in self._keys if key.state is KeyState.ACTIVE}
        return [key_id for key_id in key_ids if key_id not in counting]

    async def signer(self, access_key_id: str) -> tuple[Principal, str] | None:
        return (OPERATOR, AWS_SECRET) if access_key_id == OPERATOR_KEY_ID else None

    def pair(self, principal: Principal) -> Pair:
        return Pair(OPERATOR_KEY_ID, AWS_SECRET)

    def pair_of(self, key: Key) -> Pair:
        return Pair(key.id, f"aws-secret-of-{key.id}")

    async def create_key(self, caller: Principal, new: NewKey) -> tuple[Key, str]:
        check_name(new.name, "key")
        tenant_id = await self._tenant_id(new.tenant)
        if any(one.name == new.name and one.state is KeyState.ACTIVE for one in self._of(tenant_id)):
            raise AlreadyExists(f"There is a key named {new.name!r} already.", hint="Choose another name.")
        expires_at = None if new.expires_s is None else MOMENT + timedelta(seconds=new.expires_s)
        secret = f"pdk_{len(self._keys):039d}"
        who = (KeyId(f"key_{len(self._keys):026d}"), tenant_id, new.name, secret[:12], new.scopes)
        key = Key(*who, KeyState.ACTIVE, self._later(len(self._keys)), caller.name, expires_at, None, None, None)
        self._keys.append(key)
        return key, secret

    async def keys(self, caller: Principal, tenant: str | None = None, page: Page = WHOLE) -> list[Key]:
        found = self._of(await self._tenant_id(tenant))
        return [one for one in found if page.holds(Place(one.created_at, one.id))][: page.sought]

    async def revoke(self, caller: Principal, ref: str, tenant: str | None = None) -> Key:
        for key in self._of(await self._tenant_id(tenant)):
            if key.id == ref or (key.name == ref and key.state is KeyState.ACTIVE):
                revoked = replace(key, state=KeyState.REVOKED, revoked_at=MOMENT, revoked_by=caller.name)
                self._keys[self._keys.index(key)] = revoked
                return revoked
        raise NotFound(f"There is no key {ref!r}.", hint="List them with 'perdure key ls'.")

    async def create_tenant(self, caller: Principal, name: str) -> Tenant:
        check_name(name, "tenant")
        if any(one.name == name for one in self._tenants):
            raise AlreadyExists(f"There is a tenant named {name!r} already.", hint="Choose another name.")
        made = Tenant(TenantId(f"ten_{len(self._tenants):026d}"), name, self._later(len(self._tenants)), caller.name)
        self._tenants.append(made)
        return made

    async def find_tenant(self, ref: str) -> Tenant | None:
        return next((one for one in self._tenants if ref in {one.id, one.name}), None)

    async def tenants(self, page: Page = WHOLE) -> list[Tenant]:
        return [one for one in self._tenants if page.holds(Place(one.created_at, one.id))][: page.sought]

    async def tenant_of(self, caller: Principal, ref: str | None) -> TenantId:
        return await self._tenant_id(ref)

    @staticmethod
    def _later(count: int) -> datetime:
        """Each is made a second after the one before."""
        return MOMENT + timedelta(seconds=count)

    def _of(self, tenant_id: TenantId) -> list[Key]:
        return [one for one in self._keys if one.tenant_id == tenant_id]

    async def _tenant_id(self, ref: str | None) -> TenantId:
        found = await self.find_tenant(ref or DEFAULT_TENANT)
        if found is None:
            raise NotFound(f"There is no tenant {ref!r}.", hint="List them with 'perdure tenant ls'.")
        return found.id
