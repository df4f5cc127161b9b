"""Workspaces of the release before are listed, and have no request that made them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from perdure.core.ids import TenantId
from perdure.db import migrations
from perdure.db.database import connect_migrated
from perdure.workspaces.model import Wanted
from perdure.workspaces.store import WorkspaceStore
from tests.fakes.database import empty_database
from tests.integration.db.test_retention_migration import WORKSPACE, migrate_to

(REVISION,) = (path.name[:4] for path in Path(migrations.__file__).parent.glob("versions/*_listing.py"))


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with empty_database("before_listing") as url:
        yield url


async def test_what_is_there_already_is_found(url: str) -> None:
    migrate_to(url, f"{int(REVISION) - 1:04d}")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("insert into nodes (id, tenant_id, state, lease_until) values ('nod_a', 'ten_a', 'up', now())")
        for name in ("a", "b"):
            connection.execute(WORKSPACE, (f"ws_{name}", name, None))
        connection.execute("""update workspaces set metadata = '{"user": "7"}' where id = 'ws_b'""")
    database = await connect_migrated(url)
    try:
        store = WorkspaceStore(database)
        found = await store.find(TenantId("ten_a"), Wanted(metadata={"user": "7"}))
        assert [one.workspace.name for one in found] == ["b"]
        assert await store.by_request(TenantId("ten_a"), "any-key-at-all") is None
        assert len(await store.find(TenantId("ten_a"))) == 2, "many may have no request at all"
    finally:
        await database.close()
    migrations.migrate(url)
    assert migrations.current(url) == migrations.head()
