"""Pool, transactions, error mapping, migrations, the clock, the journal's table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from perdure.core.errors import HostUnfit, InvalidRequest, StaleGeneration, Unavailable
from perdure.core.ids import NodeId, WorkspaceId
from perdure.db import migrations
from perdure.db.database import Database, Transaction, connect_migrated
from perdure.fleet.nodes import NodeRegistry
from perdure.journal.entries import Journal
from tests.fakes.control_plane import CTX, control_plane
from tests.fakes.database import cluster, fresh_database


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    async with fresh_database() as database:
        yield database


@pytest.fixture
async def empty_url() -> AsyncIterator[str]:
    async with await psycopg.AsyncConnection.connect(cluster().url("postgres"), autocommit=True) as connection:
        await connection.execute("create database empty_one")
        yield cluster().url("empty_one")
        await connection.execute("drop database empty_one with (force)")


# ---------------------------------------------------------------------------------------------------------------- migrations


async def test_an_empty_database_is_brought_up_to_date_by_whoever_comes_first(empty_url: str) -> None:
    databases = await asyncio.gather(*(connect_migrated(empty_url) for _ in range(3)))
    assert migrations.current(empty_url) == migrations.head()
    assert await databases[0].one("clock.now")
    for database in databases:
        await database.close()


async def test_a_newer_schema_is_refused(empty_url: str) -> None:
    await (await connect_migrated(empty_url)).close()
    with psycopg.connect(empty_url, autocommit=True) as connection:
        connection.execute("update alembic_version set version_num = '9999'")
    with pytest.raises(HostUnfit, match="newer than this release"):
        await connect_migrated(empty_url)


@pytest.mark.parametrize("url", ["secret-nonsense", "postgresql://user:secret@host:port/x?nothing=1", "http://secret"])
async def test_a_url_that_is_none_is_one_sentence_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest, match="The database's URL is not one") as caught:
        await connect_migrated(url)
    assert "PERDURE_DATABASE_URL=postgresql://" in caught.value.hint
    assert "secret" not in str(caught.value.public())


async def test_a_server_that_is_not_there_is_one_sentence(home: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await connect_migrated(f"postgresql://perdure@/perdure?host={home}")


async def test_every_table_has_a_tenant_and_what_has_a_state_a_generation(database: Database) -> None:
    with psycopg.connect(database.url) as connection:
        rows = connection.execute(
            "select table_name, array_agg(column_name::text) from information_schema.columns "
            "where table_schema = 'public' and table_name <> 'alembic_version' group by 1"
        ).fetchall()
    assert {name for name, _ in rows} >= {"nodes", "workspaces", "snapshots", "journal"}
    for name, columns in rows:
        assert "tenant_id" in columns, name
        assert "state" not in columns or "generation" in columns, name


async def test_no_default_or_function_asks_for_the_time_but_perdure_now(database: Database) -> None:
    with psycopg.connect(database.url) as connection:
        defaults = connection.execute(
            "select column_default from information_schema.columns where table_schema = 'public' and column_default is not null"
        ).fetchall()
        sources = connection.execute(
            "select prosrc from pg_proc p join pg_namespace n on n.oid = pronamespace "
            "where nspname = 'public' and proname <> 'perdure_now'"
        ).fetchall()
    for (text,) in [*defaults, *sources]:
        assert "now()" not in text.replace("perdure_now()", ""), text
        assert "_timestamp" not in text, text


# --------------------------------------------------------------------------------------------------------------------- clock


async def test_the_clock_can_be_shifted_for_everything_on_the_pool(database: Database) -> None:
    before = await database.one("clock.now")
    database.shift_clock(3600)
    after = await database.one("clock.now")
    assert before is not None
    assert after is not None
    assert timedelta(hours=1) <= after["now"] - before["now"] < timedelta(hours=2)
    async with database.transaction() as tx:
        inside = await tx.one("clock.now")
    assert inside is not None
    assert inside["now"] > after["now"]


# -------------------------------------------------------------------------------------------------------------- transactions


async def test_a_transaction_that_raises_changes_nothing(database: Database) -> None:
    registry = NodeRegistry(database, lease_s=20)
    await registry.register(NodeId("nod_a"))
    with pytest.raises(RuntimeError):
        async with database.transaction() as tx:
            await tx.run("nodes.release", id="nod_a", generation=1)
            raise RuntimeError
    assert await registry.renew(NodeId("nod_a")) == 20


async def test_a_deadlock_is_tried_again(database: Database) -> None:
    registry = NodeRegistry(database, lease_s=20)
    for name in ("nod_a", "nod_b"):
        await registry.register(NodeId(name))
    met = asyncio.Barrier(2)
    attempts = 0

    async def cross(first: str, second: str) -> None:
        async def work(tx: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            await tx.run("nodes.renew", id=first, generation=1, lease_s=20)
            if attempts <= 2:
                await met.wait()
            await tx.run("nodes.renew", id=second, generation=1, lease_s=20)

        await database.retrying(work)

    await asyncio.gather(cross("nod_a", "nod_b"), cross("nod_b", "nod_a"))
    assert attempts == 3


async def test_a_broken_connection_is_unavailable_and_the_next_one_works(database: Database) -> None:
    with psycopg.connect(cluster().url("postgres"), autocommit=True) as other:
        other.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'perdure'")
    outcomes = []
    for _ in range(20):
        try:
            await database.one("clock.now")
            outcomes.append("ok")
        except Unavailable as error:
            assert error.ambiguous
            outcomes.append("unavailable")
    assert outcomes[-1] == "ok"


# -------------------------------------------------------------------------------------------------------------------- leases


async def test_a_replaced_node_cannot_renew(database: Database) -> None:
    old, new = NodeRegistry(database, lease_s=20), NodeRegistry(database, lease_s=20)
    node = NodeId("nod_a")
    assert await old.register(node) == 1
    assert await old.renew(node) == 20
    assert await new.register(node) == 2
    with pytest.raises(StaleGeneration, match="holds no lease any more"):
        await old.renew(node)
    await old.release(node)
    assert [lease.is_leased for lease in await new.leases()] == [True], "nor take it down"
    await new.release(node)
    assert [lease.is_leased for lease in await new.leases()] == [False]


async def test_a_lease_runs_out_by_the_databases_clock(database: Database) -> None:
    registry = NodeRegistry(database, lease_s=20)
    await registry.register(NodeId("nod_a"))
    database.shift_clock(19)
    assert (await registry.leases())[0].is_leased
    database.shift_clock(2)
    assert not (await registry.leases())[0].is_leased


async def test_an_unknown_node_holds_nothing(database: Database) -> None:
    with pytest.raises(StaleGeneration):
        await NodeRegistry(database, lease_s=20).renew(NodeId("nod_x"))


# ------------------------------------------------------------------------------------------------------------------- journal


async def test_the_journal_is_append_only_and_forgeries_are_found() -> None:
    async with control_plane() as plane:
        workspace, _ = await plane.create()
        with psycopg.connect(plane.database.url, autocommit=True) as connection:
            for statement in ("update journal set kind = 'x'", "delete from journal", "truncate journal"):
                with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="append-only"):
                    connection.execute(statement)
            journal = Journal(plane.database)
            assert await journal.verify() == (2, [])
            # Somebody who owns the database can take the trigger away; the chain still tells.
            connection.execute("alter table journal disable trigger all")
            connection.execute("update journal set kind = 'x' where seq = 1")
            _, breaks = await journal.verify()
            assert [(found.workspace_id, found.seq) for found in breaks] == [(workspace.id, 1)]


async def test_concurrent_appends_make_one_chain() -> None:
    async with control_plane() as plane:
        workspace, _ = await plane.create()
        journal = Journal(plane.database)

        async def append(number: int) -> int:
            async with plane.database.transaction() as tx:
                return await journal.append(tx, workspace.id, "note", 1, {"n": number, "x": 1e22, "text": "ü%"})

        seqs = await asyncio.gather(*(append(number) for number in range(20)))
        assert sorted(seqs) == list(range(3, 23))
        assert await journal.verify() == (22, [])
        entries = await journal.read(CTX.tenant_id, workspace.id, after_seq=2, limit=5)
        assert [entry.seq for entry in entries] == [3, 4, 5, 6, 7]
        assert entries[0].body["text"] == "ü%"


async def test_an_entry_of_an_unknown_workspace_is_not_written(database: Database) -> None:
    async with database.transaction() as tx:
        assert await Journal(database).append(tx, WorkspaceId("ws_none"), "note", 1, {}) == 0


async def test_time_never_goes_back_in_a_thread() -> None:
    async with control_plane() as plane:
        await plane.create()
        plane.database.shift_clock(-3600)
        await plane.service.keep_awake(CTX, "demo", 5)
        entries = await plane.service.log(CTX, "demo")
        assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
        assert (await Journal(plane.database).verify())[1] == []
