"""Times to wake at and policies for long sleeps: from the schema before to this one, with rows in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg.errors import CheckViolation

from perdure.db import migrations
from perdure.db.database import connect_migrated
from tests.fakes.database import cluster
from tests.integration.db.test_retention_migration import WORKSPACE, migrate_to

BEFORE = "0013"
UPDATE = "update workspaces set asleep_action = %s, asleep_after_days = %s where id = 'ws_a'"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with await psycopg.AsyncConnection.connect(cluster().url("postgres"), autocommit=True) as connection:
        await connection.execute("create database before_idle")
        yield cluster().url("before_idle")
        await connection.execute("drop database before_idle with (force)")


async def test_workspaces_of_the_release_before_are_kept_whatever_they_do(url: str) -> None:
    migrate_to(url, BEFORE)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("insert into nodes (id, tenant_id, state, lease_until) values ('nod_a', 'ten_a', 'up', now())")
        connection.execute(WORKSPACE, ("ws_a", "a", None))
    database = await connect_migrated(url)
    assert migrations.current(url) == migrations.head()
    with psycopg.connect(url, autocommit=True) as connection:
        columns = "select wake_at, asleep_after_days, asleep_action, asleep_noted from workspaces"
        assert connection.execute(columns).fetchall() == [(None, None, "keep", None)]
        connection.execute(WORKSPACE, ("ws_b", "b", None))  # as the release before writes it
        for action, days in (("delete", None), ("keep", 3), ("delete", 0.5), ("burn", 3)):
            with pytest.raises(CheckViolation):
                connection.execute(UPDATE, (action, days))
        connection.execute(UPDATE, ("delete", 1))
        connection.execute(UPDATE, ("keep", None))
    await database.close()
    migrate_to(url, "head")
    with psycopg.connect(url) as connection:
        assert connection.execute("select count(*) from workspaces where asleep_action = 'keep'").fetchall() == [(2,)]
