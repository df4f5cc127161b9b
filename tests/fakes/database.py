"""A real PostgreSQL for tests: one embedded cluster per test session, one database per test, copied from a migrated template."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import psycopg
from psycopg import sql

from perdure.db.database import Database
from perdure.db.embedded import EmbeddedPostgres
from perdure.db.migrations import migrate

_TEMPLATE = "template_perdure"
_numbers = itertools.count(1)


@cache
def cluster() -> EmbeddedPostgres:
    """The session's cluster. It is thrown away, so it need not wait for the disk."""
    home = Path(tempfile.mkdtemp(prefix="perdure-test-", dir="/tmp"))
    postgres = EmbeddedPostgres(home, settings={"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"})
    _run(postgres, "start")
    atexit.register(_end, postgres, home)
    with psycopg.connect(postgres.url("postgres"), autocommit=True) as connection:
        connection.execute(f"create database {_TEMPLATE}")
    migrate(postgres.url(_TEMPLATE))
    return postgres


@asynccontextmanager
async def empty_database(name: str) -> AsyncIterator[str]:
    """URL of a database in which nothing of ours has been, until the block ends."""
    postgres = cluster()
    async with await psycopg.AsyncConnection.connect(postgres.url("postgres"), autocommit=True) as connection:
        await connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            yield postgres.url(name)
        finally:
            await connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def _run(postgres: EmbeddedPostgres, method: str) -> None:
    """In a thread of its own: the caller may be inside a running loop."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(getattr(postgres, method)())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _end(postgres: EmbeddedPostgres, home: Path) -> None:
    asyncio.run(postgres.stop())
    shutil.rmtree(home, ignore_errors=True)


@asynccontextmanager
async def fresh_url() -> AsyncIterator[str]:
    """URL of a migrated, empty database that goes away afterwards."""
    postgres = cluster()
    name = f"test_{next(_numbers)}"
    async with await psycopg.AsyncConnection.connect(postgres.url("postgres"), autocommit=True) as connection:
        await connection.execute(f"create database {name} template {_TEMPLATE}")
        try:
            yield postgres.url(name)
        finally:
            await connection.execute(f"drop database {name} with (force)")


@asynccontextmanager
async def fresh_database() -> AsyncIterator[Database]:
    async with fresh_url() as url:
        database = Database(url)
        await database.open()
        try:
            yield database
        finally:
            await database.close()
