"""What the access service takes and returns. Frozen values; the API renders them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from perdure.access.signatures import Pair
from perdure.core.ids import DEFAULT_TENANT, KeyId, TenantId
from perdure.core.paging import WHOLE, Page
from perdure.core.scopes import KeyScope, KeyState, granted


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. ``name`` is what the thread of a workspace says: ``key:KEY_ID``, ``operator`` (the key file) or ``local`` (the
    Unix socket). ``scopes`` are those given; ``may`` asks what they include too."""

    name: str
    tenant_id: TenantId
    scopes: frozenset[KeyScope]

    def may(self, needed: KeyScope) -> bool:
        return needed in granted(self.scopes)

    @property
    def key_id(self) -> KeyId | None:
        """Of the key with a row, which may end; None for the key file's key, for the Unix socket and for visitors."""
        kind, _, key_id = self.name.partition(":")
        return KeyId(key_id) if kind == "key" else None

    @property
    def is_operator(self) -> bool:
        """Whether it may do what concerns the whole server: other tenants, images, backups."""
        return self.tenant_id == DEFAULT_TENANT and self.may(KeyScope.ADMIN)


_ADMIN = frozenset({KeyScope.ADMIN})
#: Whoever has the key file that ``up`` wrote, and whoever can open the Unix socket.
OPERATOR = Principal("operator", DEFAULT_TENANT, _ADMIN)
LOCAL = Principal("local", DEFAULT_TENANT, _ADMIN)
#: Whoever comes with a share link instead of a key: no scope, of no tenant. The link says where it may go.
VISITOR = Principal("visitor", TenantId(""), frozenset())


@dataclass(frozen=True, slots=True)
class Tenant:
    id: TenantId
    name: str
    created_at: datetime
    created_by: str


@dataclass(frozen=True, slots=True)
class Key:
    """One row of ``api_keys``; the secret is nowhere."""

    id: KeyId
    tenant_id: TenantId
    name: str
    prefix: str
    scopes: frozenset[KeyScope]
    state: KeyState
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None


@dataclass(frozen=True, slots=True)
class NewKey:
    """``tenant`` is an id or a name, None the caller's own; ``expires_s`` None: it does not expire."""

    name: str
    scopes: frozenset[KeyScope]
    expires_s: float | None = None
    tenant: str | None = None


class Access(Protocol):
    """Tenants and keys. A ``tenant`` other than the caller's own is for the operator; None is the caller's."""

    async def authenticate(self, secret: str) -> Principal | None:
        """The principal of an API key; None for one that is unknown, expired or revoked."""
        ...

    async def ended(self, key_ids: Collection[KeyId]) -> list[KeyId]:
        """Those of these keys that count no more, whichever server has revoked them."""
        ...

    async def signer(self, access_key_id: str) -> tuple[Principal, str] | None:
        """Who signs requests with this access key id, and the secret to verify them with; None as for ``authenticate``."""
        ...

    def pair(self, principal: Principal) -> Pair:
        """The pair that belongs to a principal's key. Raises Forbidden for whoever has no key."""
        ...

    def pair_of(self, key: Key) -> Pair: ...

    async def create_key(self, caller: Principal, new: NewKey) -> tuple[Key, str]:
        """The key and its secret, which nobody can ask for again. Raises AlreadyExists for a name in use."""
        ...

    async def keys(self, caller: Principal, tenant: str | None = None, page: Page = WHOLE) -> list[Key]:
        """Revoked and expired ones too, newest last; ``page.sought`` of them where there are so many."""
        ...

    async def revoke(self, caller: Principal, ref: str, tenant: str | None = None) -> Key:
        """By id or name. Calls that begin after it has returned are refused; revoking a revoked one, by its id, succeeds."""
        ...

    async def create_tenant(self, caller: Principal, name: str) -> Tenant:
        """Raises AlreadyExists for a name in use."""
        ...

    async def find_tenant(self, ref: str) -> Tenant | None:
        """By id or name."""
        ...

    async def tenants(self, page: Page = WHOLE) -> list[Tenant]:
        """Oldest first; ``page.sought`` of them where there are so many."""
        ...

    async def tenant_of(self, caller: Principal, ref: str | None) -> TenantId:
        """The tenant that a caller means by an id, a name or nothing. Raises MissingScope, and NotFound for the operator."""
        ...
