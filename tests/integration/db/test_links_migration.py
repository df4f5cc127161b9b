"""Ports that the release before shared stay shared, by the links that it gave out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from perdure.access import tokens
from perdure.access.model import Principal
from perdure.access.shares import PortRef, ShareRevoked, ShareService
from perdure.access.tokens import Grant
from perdure.core.clock import SystemClock
from perdure.core.ids import TenantId, WorkspaceId
from perdure.core.scopes import KeyScope
from perdure.db import migrations
from perdure.db.database import connect_migrated
from tests.fakes.database import empty_database
from tests.integration.db.test_retention_migration import WORKSPACE, migrate_to

(REVISION,) = (path.name[:4] for path in Path(migrations.__file__).parent.glob("versions/*_links.py"))
KEY = b"k" * 32
OWNER = Principal("key:k", TenantId("ten_a"), frozenset({KeyScope.ADMIN}))
SHARE = """insert into port_shares (workspace_id, port, tenant_id, series, links_until, shared_by)
           values ('ws_a', 80, 'ten_a', 7, now() + interval '1 day', 'key:k')"""


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with empty_database("before_links") as url:
        yield url


async def test_links_that_are_out_count_until_their_port_is_unshared(url: str) -> None:
    migrate_to(url, f"{int(REVISION) - 1:04d}")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("insert into nodes (id, tenant_id, state, lease_until) values ('nod_a', 'ten_a', 'up', now())")
        connection.execute(WORKSPACE, ("ws_a", "a", None))
        connection.execute(SHARE)
    database = await connect_migrated(url)
    try:
        service, to = ShareService(database, KEY, SystemClock()), PortRef("ws_a", 80)
        older = tokens.sign(KEY, Grant(TenantId("ten_a"), WorkspaceId("ws_a"), 80, 1 << 40, 7))
        await service.admit(older, to)
        assert await service.links(OWNER, "a") == [], "nobody knows which there are"
        made = await service.share(OWNER, "a", 80, expires_s=60)
        await service.revoke(OWNER, "a", made.link.id)
        await service.admit(older, to)
        await service.unshare(OWNER, "a", 80)
        with pytest.raises(ShareRevoked):
            await service.admit(older, to)
    finally:
        await database.close()
    migrations.migrate(url)
    assert migrations.current(url) == migrations.head()
