"""From the schema before to this one, with rows in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from psycopg.errors import CheckViolation

from perdure.db import migrations
from perdure.db.database import connect_migrated
from tests.fakes.database import cluster

WORKSPACE = (
    "insert into workspaces (id, tenant_id, name, kind, state, generation, node_id, image, image_name, memory_mib, vcpus,"
    " disk_gib, hostname, machine_id, idle_timeout_s, checkpoint_interval_s, head_snapshot_id)"
    " values (%s, 'ten_a', %s, 'workspace', 'hibernated', 1, 'nod_a', 'abc', 'base', 512, 1, 8, 'h', 'm', 0, 0, %s)"
)
SNAPSHOT = (
    "insert into snapshots (id, tenant_id, workspace_id, origin_id, node_id, state, parent_id, reason, generation, created_at)"
    " values (%s, 'ten_a', %s, 'ws_a', 'nod_a', %s, %s, 'automatic', 1, timestamptz '2026-01-01' + %s * interval '1 second')"
)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with await psycopg.AsyncConnection.connect(cluster().url("postgres"), autocommit=True) as connection:
        await connection.execute("create database before_retention")
        yield cluster().url("before_retention")
        await connection.execute("drop database before_retention with (force)")


def migrate_to(url: str, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations.HERE).replace("%", "%%"))
    config.attributes["connect"] = lambda: psycopg.connect(url)
    command.upgrade(config, revision)


async def test_rows_of_the_release_before_are_kept_and_the_tree_is_mended(url: str) -> None:
    migrate_to(url, "0002")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("insert into nodes (id, tenant_id, state, lease_until) values ('nod_a', 'ten_a', 'up', now())")
        connection.execute(WORKSPACE, ("ws_a", "a", "snp_4"))
        connection.execute(WORKSPACE, ("ws_b", "b", None))
        for name, owner, state, parent, second in [
            ("snp_1", "ws_a", "complete", "snp_0", 1),  # its parent was removed, and nothing is older
            ("snp_2", "ws_b", "complete", "snp_1", 2),
            ("snp_3", "ws_a", "complete", None, 3),
            ("snp_4", "ws_a", "complete", "snp_x", 4),  # its parent was removed
            ("snp_5", "ws_a", "pending", "snp_4", 5),
        ]:
            connection.execute(SNAPSHOT, (name, owner, state, parent, second))
    database = await connect_migrated(url)
    assert migrations.current(url) == migrations.head()
    with psycopg.connect(url, autocommit=True) as connection:
        parents = dict(connection.execute("select id, parent_id from snapshots").fetchall())
        assert parents == {"snp_1": None, "snp_2": "snp_1", "snp_3": None, "snp_4": "snp_3", "snp_5": "snp_4"}
        assert connection.execute("select keep_snapshots from workspaces").fetchall() == [(None,), (None,)]
        connection.execute(WORKSPACE, ("ws_c", "c", None))  # as the release before writes it
        with pytest.raises(CheckViolation):
            connection.execute("update workspaces set keep_snapshots = -1")
    await database.close()
    migrate_to(url, "head")
    with psycopg.connect(url) as connection:
        assert dict(connection.execute("select id, parent_id from snapshots").fetchall()) == parents, "twice is once"
