"""Tenants and keys in a real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
import pytest

from perdure.access import service
from perdure.access.model import LOCAL, OPERATOR, NewKey, Principal
from perdure.access.service import KNOWN_S, AccessService
from perdure.core.errors import AlreadyExists, InvalidRequest, MissingScope, NoSpace, NotFound, PerdureError, Unavailable
from perdure.core.ids import DEFAULT_TENANT, TenantId
from perdure.core.scopes import KeyScope, KeyState
from perdure.db.database import Database
from tests.fakes.access import SIGNING_KEY
from tests.fakes.clock import FakeClock
from tests.fakes.database import fresh_database

OPERATOR_KEY = "pdk_of-the-operator"
READ = frozenset({KeyScope.READ})
ADMIN = frozenset({KeyScope.ADMIN})


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    async with fresh_database() as database:
        yield database


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def access(database: Database, clock: FakeClock) -> AccessService:
    return AccessService(database, clock, OPERATOR_KEY, SIGNING_KEY)


def later(database: Database, clock: FakeClock, seconds: float) -> None:
    clock.advance(seconds)
    database.shift_clock(seconds)


async def execute(database: Database, statement: LiteralString) -> list[Any]:
    """SQL that the product does not have."""
    async with await psycopg.AsyncConnection.connect(database.url, autocommit=True) as connection:
        done = await connection.execute(statement)
        return await done.fetchall() if done.description else []


async def test_a_key_is_its_tenants_and_has_its_scopes(access: AccessService) -> None:
    acme = await access.create_tenant(OPERATOR, "acme")
    scopes = frozenset({KeyScope.INVOKE, KeyScope.APPROVE})
    key, secret = await access.create_key(LOCAL, NewKey("agent", scopes, tenant="acme"))
    assert await access.authenticate(secret) == Principal(f"key:{key.id}", acme.id, scopes)
    assert (key.state, key.created_by, key.expires_at, key.revoked_at) == (KeyState.ACTIVE, "local", None, None)
    assert await access.authenticate(OPERATOR_KEY) == OPERATOR
    assert (OPERATOR.tenant_id, OPERATOR.is_operator) == (DEFAULT_TENANT, True)


@pytest.mark.parametrize("wrong", ["", "pdk_", OPERATOR_KEY[:-1], OPERATOR_KEY + "x", "\udcff", "pdk_\udcff", "pdk_ä"])
async def test_whatever_is_no_key_is_nobodys(access: AccessService, wrong: str) -> None:
    assert await access.authenticate(wrong) is None


async def test_the_secret_is_in_no_row(access: AccessService, database: Database) -> None:
    key, secret = await access.create_key(OPERATOR, NewKey("agent", READ))
    (row,) = await execute(database, "select api_keys::text, length(hash) from api_keys")
    assert secret not in row[0]
    assert secret.encode().hex() not in row[0]
    assert secret.startswith(key.prefix)
    assert (len(key.prefix), len(secret), row[1]) == (12, 47, 32)


async def test_a_key_expires_by_the_databases_clock(
    access: AccessService, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "KNOWN_S", 10_000.0)
    key, secret = await access.create_key(OPERATOR, NewKey("agent", READ, expires_s=3600))
    assert key.expires_at is not None
    assert round((key.expires_at - key.created_at).total_seconds()) == 3600
    assert await access.authenticate(secret) is not None
    later(database, clock, 3000)
    assert await access.authenticate(secret) is not None
    later(database, clock, 601)
    assert await access.authenticate(secret) is None, "an answer is believed for longer, but not past the key's end"
    assert [one.state for one in await access.keys(OPERATOR)] == [KeyState.EXPIRED]


async def test_a_revocation_counts_at_once_here_and_soon_in_other_processes(
    access: AccessService, database: Database, clock: FakeClock
) -> None:
    other = AccessService(database, clock, OPERATOR_KEY, SIGNING_KEY)
    key, secret = await access.create_key(OPERATOR, NewKey("agent", READ))
    assert await access.authenticate(secret) and await other.authenticate(secret)
    revoked = await access.revoke(LOCAL, "agent")
    assert (revoked.id, revoked.state, revoked.revoked_by) == (key.id, KeyState.REVOKED, "local")
    assert await access.authenticate(secret) is None
    assert await other.authenticate(secret) is not None, "an answer is believed for a while"
    clock.advance(KNOWN_S)
    assert await other.authenticate(secret) is None


class FullDatabase:
    """The real one, on a disk that is full."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    async def run(self, query: str, /, **parameters: Any) -> int:
        raise NoSpace("The database's disk is full.")


async def test_a_full_disk_locks_nobody_out(access: AccessService, database: Database, clock: FakeClock) -> None:
    key, secret = await access.create_key(OPERATOR, NewKey("agent", READ))
    full = AccessService(FullDatabase(database), clock, OPERATOR_KEY, SIGNING_KEY)  # type: ignore[arg-type]
    principal = await full.authenticate(secret)
    assert principal is not None and principal.name == f"key:{key.id}"


class SlowDatabase:
    """The real one; a look-up has read its row and waits until ``go`` is set."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.has_read = asyncio.Event()
        self.go = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    async def run(self, query: str, /, **parameters: Any) -> int:
        self.has_read.set()
        await self.go.wait()
        return await self._database.run(query, **parameters)


async def test_a_look_up_that_a_revocation_overtakes_is_not_believed_after_it(database: Database, clock: FakeClock) -> None:
    slow = SlowDatabase(database)
    access = AccessService(slow, clock, OPERATOR_KEY, SIGNING_KEY)  # type: ignore[arg-type]
    _, secret = await access.create_key(OPERATOR, NewKey("agent", READ))
    looking = asyncio.create_task(access.authenticate(secret))
    await slow.has_read.wait()
    await access.revoke(OPERATOR, "agent")
    slow.go.set()
    await looking
    assert await access.authenticate(secret) is None


async def test_a_known_key_needs_no_database_and_a_new_one_does(access: AccessService, database: Database) -> None:
    _, known = await access.create_key(OPERATOR, NewKey("known", READ))
    _, new = await access.create_key(OPERATOR, NewKey("new", READ))
    await access.authenticate(known)
    await database.close()
    assert await access.authenticate(known) is not None
    assert await access.authenticate(OPERATOR_KEY) == OPERATOR
    with pytest.raises(Unavailable):
        await access.authenticate(new)


async def test_the_last_use_is_noted_every_ten_minutes(access: AccessService, database: Database, clock: FakeClock) -> None:
    _, secret = await access.create_key(OPERATOR, NewKey("agent", READ))
    seen = []
    for _ in range(4):
        await access.authenticate(secret)
        seen.append((await access.keys(OPERATOR))[0].last_used_at)
        later(database, clock, 301)
    first, second, third, fourth = seen
    assert first is not None
    assert third is not None
    assert first == second, "five minutes later"
    assert third == fourth
    assert third - first > timedelta(minutes=10)


async def test_names_are_unique_among_what_counts_in_a_tenant(access: AccessService) -> None:
    await access.create_tenant(OPERATOR, "acme")
    first, _ = await access.create_key(OPERATOR, NewKey("agent", READ))
    await access.create_key(OPERATOR, NewKey("agent", READ, tenant="acme"))
    with pytest.raises(AlreadyExists, match="a key named 'agent' already"):
        await access.create_key(OPERATOR, NewKey("agent", READ))
    with pytest.raises(AlreadyExists, match="a tenant named 'acme' already"):
        await access.create_tenant(OPERATOR, "acme")
    await access.revoke(OPERATOR, "agent")
    second, _ = await access.create_key(OPERATOR, NewKey("agent", READ))
    assert [(one.id, one.state) for one in await access.keys(OPERATOR)] == [(first.id, "revoked"), (second.id, "active")]


async def test_revoking_again_changes_nothing(access: AccessService) -> None:
    key, _ = await access.create_key(OPERATOR, NewKey("agent", READ))
    once = await access.revoke(OPERATOR, key.id)
    assert await access.revoke(LOCAL, key.id) == once
    with pytest.raises(NotFound, match="no key 'agent'"):
        await access.revoke(OPERATOR, "agent")


async def test_only_the_operator_reaches_into_other_tenants(access: AccessService) -> None:
    acme = await access.create_tenant(OPERATOR, "acme")
    await access.create_tenant(OPERATOR, "other")
    admin = Principal("key:key_1", acme.id, ADMIN)
    mine, _ = await access.create_key(admin, NewKey("agent", ADMIN))
    theirs, _ = await access.create_key(OPERATOR, NewKey("agent", ADMIN))
    assert (mine.tenant_id, theirs.tenant_id) == (acme.id, DEFAULT_TENANT)
    assert await access.keys(admin) == await access.keys(admin, acme.id) == await access.keys(OPERATOR, "acme") == [mine]
    for tenant in ("other", "default", "nobody", DEFAULT_TENANT):
        for attempt in (access.keys(admin, tenant), access.revoke(admin, "agent", tenant)):
            with pytest.raises(MissingScope, match="Only the operator may name a tenant"):
                await attempt
    with pytest.raises(NotFound, match="no key"):
        await access.revoke(admin, theirs.id)
    with pytest.raises(NotFound, match="no tenant 'nobody'"):
        await access.keys(OPERATOR, "nobody")
    assert not Principal("key:key_2", DEFAULT_TENANT, frozenset({KeyScope.OPERATE, KeyScope.APPROVE})).is_operator
    assert not admin.is_operator


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (NewKey("Agent X", READ), "'Agent X' is not a key name"),
        (NewKey("key_1", READ), "'key_1' is not a key name"),
        (NewKey("agent\n", READ), "is not a key name"),
        (NewKey("agent", frozenset()), "without a scope"),
        (NewKey("agent", READ, expires_s=0), "cannot expire before"),
    ],
)
async def test_keys_that_are_not_made(access: AccessService, new: NewKey, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await access.create_key(OPERATOR, new)
    assert await access.keys(OPERATOR) == []


async def test_a_tenant_that_was_only_found_gets_a_name_once(access: AccessService, database: Database) -> None:
    found = TenantId("ten_" + "0" * 26)
    for _ in range(2):
        await database.run("tenants.adopt", id=found)
    await database.run("tenants.adopt", id=DEFAULT_TENANT)
    assert [(one.id, one.name) for one in await access.tenants()] == [(DEFAULT_TENANT, "default"), (found, "ten-" + "0" * 26)]
    assert await access.keys(OPERATOR, "ten-" + "0" * 26) == []


async def test_a_thousand_callers_with_one_key_are_all_let_in(access: AccessService) -> None:
    _, secret = await access.create_key(OPERATOR, NewKey("agent", READ))
    found = await asyncio.gather(*(access.authenticate(secret) for _ in range(1000)), return_exceptions=True)
    assert not [one for one in found if one is None or isinstance(one, PerdureError)]
