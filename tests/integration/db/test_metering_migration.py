"""What is stored already is counted from the migration on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest

from perdure.db import migrations
from perdure.db.database import connect_migrated
from tests.fakes.database import empty_database
from tests.integration.db.test_retention_migration import WORKSPACE, migrate_to

SNAPSHOT = (
    "insert into snapshots (id, tenant_id, workspace_id, origin_id, node_id, state, parent_id, reason, generation,"
    " memory_bytes, memory_total_bytes, disk_bytes, disk_total_bytes, device_bytes)"
    " values (%s, 'ten_a', 'ws_a', 'ws_a', 'nod_a', %s, %s, 'automatic', 1, 10, 1000, 20, 2000, 5)"
)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with empty_database("before_metering") as url:
        yield url


async def test_snapshots_and_packs_of_the_release_before_are_counted(url: str) -> None:
    migrate_to(url, "0008")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("insert into nodes (id, tenant_id, state, lease_until) values ('nod_a', 'ten_a', 'up', now())")
        connection.execute(WORKSPACE, ("ws_a", "a", "snp_2"))
        for name, state, parent in [("snp_1", "complete", None), ("snp_2", "complete", "snp_1"), ("snp_3", "pending", "snp_2")]:
            connection.execute(SNAPSHOT, (name, state, parent))
        connection.execute("insert into store_scopes (scope, tenant_id) values ('ten_a', 'ten_a')")
        connection.execute(
            "insert into store_items (scope, name, tenant_id, state, generation, heard_epoch)"
            " values ('ten_a', 'snp_1', 'ten_a', 'uploading', 1, 0)"
        )
        connection.execute(
            "insert into store_packs (id, scope, tenant_id, state, generation, whole, size, index_bytes)"
            " values ('pck_1', 'ten_a', 'ten_a', 'stored', 1, true, 700, 1)"
        )
        connection.execute("insert into store_holds values ('ten_a', 'snp_1', 'pck_1', 'ten_a')")
    await (await connect_migrated(url)).close()
    assert migrations.current(url) == migrations.head()
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(
            "select object_id, place, bytes, uploaded_bytes from stored_spans order by object_id"
        ).fetchall()
        assert found == [("pck_1", "store", 700, 0), ("snp_1", "node", 3005, 0), ("snp_2", "node", 35, 0)]
        connection.execute("update snapshots set state = 'deleting' where id = 'snp_1'")
        now = connection.execute("select object_id, bytes from stored_spans where to_at is null order by object_id").fetchall()
        assert now == [("pck_1", 700), ("snp_2", 3005)], "what the older one held is below the newer one"
        assert connection.execute("select machines_at = seen_at from nodes").fetchall() == [(True,)]
