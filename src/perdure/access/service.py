"""Tenants and keys in the database. The key file's key is known without it, so that the operator can get in while it is away."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from perdure.access.model import LOCAL, OPERATOR, Key, NewKey, Principal, Tenant
from perdure.access.signatures import Pair, secret_of
from perdure.core.clock import Clock, epoch_ms
from perdure.core.errors import AlreadyExists, Forbidden, InvalidRequest, MissingScope, NoSpace, NotFound
from perdure.core.ids import DEFAULT_TENANT, KeyId, TenantId, check_name, is_id, mint
from perdure.core.paging import WHOLE, Page
from perdure.core.scopes import KeyScope, KeyState
from perdure.db.database import Database

KEY_PREFIX = "pdk_"
SECRET_BYTES = 32
#: The access key id of the key file's key, which has no row.
OPERATOR_KEY_ID = "key_operator"
SHOWN_CHARACTERS = len(KEY_PREFIX) + 8  # 48 of the 256 bits: enough to tell keys apart, no help to whoever guesses the rest
#: How long an answer of the database is believed. A revocation counts here at once, and in other processes after this time.
KNOWN_S = 5.0


def new_secret() -> str:
    """A key: 256 random bits behind a prefix that secret scanners can look for."""
    return KEY_PREFIX + secrets.token_urlsafe(SECRET_BYTES)


@dataclass(frozen=True, slots=True)
class _Known:
    key_id: KeyId
    principal: Principal
    until: float  # on the monotonic clock


class AccessService:
    """Implements ``model.Access``."""

    def __init__(self, database: Database, clock: Clock, operator_key: str, signing_key: bytes) -> None:
        self._database = database
        self._clock = clock
        self._operator_key = operator_key.encode()
        self._signing_key = signing_key
        self._known: dict[bytes | str, _Known] = {}  # by hash, and by id
        self._revocations = 0

    # -------------------------------------------------------------------------------------------------------- who calls

    async def authenticate(self, secret: str) -> Principal | None:
        given = secret.encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given, self._operator_key):
            return OPERATOR
        if not secret.startswith(KEY_PREFIX):
            return None
        # Looked up by its hash: how long that takes tells nothing about a secret, for nobody can make a hash begin like another.
        return await self._find(hashlib.sha256(given).digest())

    async def ended(self, key_ids: Collection[KeyId]) -> list[KeyId]:
        rows = await self._database.all("keys.ended", ids=list(key_ids))
        return [KeyId(row["id"]) for row in rows]

    async def signer(self, access_key_id: str) -> tuple[Principal, str] | None:
        if access_key_id == OPERATOR_KEY_ID:
            return OPERATOR, self._secret(OPERATOR_KEY_ID)
        principal = await self._find(access_key_id) if is_id(access_key_id, "key") else None
        return None if principal is None else (principal, self._secret(access_key_id))

    def pair(self, principal: Principal) -> Pair:
        if principal in {OPERATOR, LOCAL}:
            return Pair(OPERATOR_KEY_ID, self._secret(OPERATOR_KEY_ID))
        key_id = principal.key_id
        if key_id is None:
            raise Forbidden("Only an API key has a pair for AWS clients.")
        return Pair(key_id, self._secret(key_id))

    def pair_of(self, key: Key) -> Pair:
        return Pair(key.id, self._secret(key.id))

    def _secret(self, key_id: str) -> str:
        """The operator's ends with the key file's key."""
        salt = hashlib.sha256(self._operator_key).digest() if key_id == OPERATOR_KEY_ID else b""
        return secret_of(self._signing_key, key_id, salt)

    async def _find(self, by: bytes | str) -> Principal | None:
        """A key that counts, by its hash or its id."""
        known = self._known.get(by)
        if known is not None and self._clock.monotonic() < known.until:
            return known.principal
        return await self._look_up(by)

    async def _look_up(self, by: bytes | str) -> Principal | None:
        self._known.pop(by, None)
        revocations = self._revocations
        asked_at = self._clock.monotonic()
        is_hash = isinstance(by, bytes)
        row = await self._database.one("keys.counting", hash=by if is_hash else None, id=None if is_hash else by)
        if row is None:
            return None
        if row["is_unnoted"]:
            with suppress(NoSpace):  # when a key was last used is no reason to refuse it
                await self._database.run("keys.used", id=row["id"])
        scopes = frozenset(KeyScope(scope) for scope in row["scopes"])
        principal = Principal(f"key:{row['id']}", TenantId(row["tenant_id"]), scopes)
        if revocations == self._revocations:  # else it may be this key, revoked since it was read
            believed_s = KNOWN_S if row["left_s"] is None else min(KNOWN_S, row["left_s"])
            self._known[by] = _Known(KeyId(row["id"]), principal, asked_at + believed_s)
        return principal

    # ------------------------------------------------------------------------------------------------------------- keys

    async def create_key(self, caller: Principal, new: NewKey) -> tuple[Key, str]:
        check_name(new.name, "key")
        if not new.scopes:
            raise InvalidRequest("A key without a scope could do nothing.", hint=f"Give at least one of {', '.join(KeyScope)}.")
        if new.expires_s is not None and new.expires_s <= 0:
            raise InvalidRequest("A key cannot expire before it is made.", hint="Give a time after now, or none.")
        tenant_id = await self.tenant_of(caller, new.tenant)
        secret = new_secret()
        try:
            row = await self._database.one(
                "keys.insert",
                **{"id": mint("key", now_ms=epoch_ms(self._clock)), "tenant_id": tenant_id, "name": new.name},
                **{"hash": hashlib.sha256(secret.encode()).digest(), "prefix": secret[:SHOWN_CHARACTERS]},
                **{"scopes": sorted(new.scopes), "by": caller.name, "expires_s": new.expires_s},
            )
        except AlreadyExists as error:
            raise AlreadyExists(
                f"There is a key named {new.name!r} already.", hint="Choose another name, or revoke that one first."
            ) from error
        assert row is not None, "an insert returns its row"
        return _key(row), secret

    async def keys(self, caller: Principal, tenant: str | None = None, page: Page = WHOLE) -> list[Key]:
        tenant_id = await self.tenant_of(caller, tenant)
        return [_key(row) for row in await self._database.all("keys.of_tenant", tenant_id=tenant_id, **_bounds(page))]

    async def revoke(self, caller: Principal, ref: str, tenant: str | None = None) -> Key:
        tenant_id = await self.tenant_of(caller, tenant)
        row = await self._database.one("keys.revoke", tenant_id=tenant_id, ref=ref, by=caller.name)
        if row is None:
            raise NotFound(f"There is no key {ref!r}.", hint="List them with 'perdure key ls'; a revoked one is named by its id.")
        self._revocations += 1
        self._known = {by: known for by, known in self._known.items() if known.key_id != row["id"]}
        return _key(row)

    # ---------------------------------------------------------------------------------------------------------- tenants

    async def create_tenant(self, caller: Principal, name: str) -> Tenant:
        check_name(name, "tenant")
        try:
            row = await self._database.one(
                "tenants.insert", id=mint("ten", now_ms=epoch_ms(self._clock)), name=name, by=caller.name
            )
        except AlreadyExists as error:
            raise AlreadyExists(f"There is a tenant named {name!r} already.", hint="Choose another name.") from error
        assert row is not None, "an insert returns its row"
        return _tenant(row)

    async def find_tenant(self, ref: str) -> Tenant | None:
        row = await self._database.one("tenants.by_ref", ref=ref)
        return None if row is None else _tenant(row)

    async def tenants(self, page: Page = WHOLE) -> list[Tenant]:
        return [_tenant(row) for row in await self._database.all("tenants.all", **_bounds(page))]

    async def tenant_of(self, caller: Principal, ref: str | None) -> TenantId:
        """The tenant meant. Whoever is not the operator learns nothing about others, not even whether they exist."""
        if ref is None or ref == caller.tenant_id:
            return caller.tenant_id
        if not caller.is_operator:
            error = MissingScope("Only the operator may name a tenant.", hint="Leave the tenant out: it is your key's own.")
            error.details = {"needs": KeyScope.ADMIN, "tenant": DEFAULT_TENANT}
            raise error
        found = await self.find_tenant(ref)
        if found is None:
            raise NotFound(f"There is no tenant {ref!r}.", hint="List them with 'perdure tenant ls'.")
        return found.id


def _bounds(page: Page) -> dict[str, Any]:
    return {"after_at": page.after_at, "after_id": page.after_id, "limit": page.sought}


def _key(row: dict[str, Any]) -> Key:
    return Key(
        id=KeyId(row["id"]),
        tenant_id=TenantId(row["tenant_id"]),
        name=row["name"],
        prefix=row["prefix"],
        scopes=frozenset(KeyScope(scope) for scope in row["scopes"]),
        state=KeyState(row["state"]),
        created_at=row["created_at"],
        created_by=row["created_by"],
        expires_at=row["expires_at"],
        last_used_at=row["last_used_at"],
        revoked_at=row["revoked_at"],
        revoked_by=row["revoked_by"],
    )


def _tenant(row: dict[str, Any]) -> Tenant:
    return Tenant(TenantId(row["tenant_id"]), row["name"], row["created_at"], row["created_by"])
