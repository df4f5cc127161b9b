"""A real PostgreSQL for tests: one embedded cluster per test session, one database per test, copied from a migrated template.

A database that a test has had goes away when the next one is made: at once, PostgreSQL would stand and wait, a tenth of a second
at a time, until the connections that have just been closed are gone. What is left at the end goes with the cluster.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from pathlib import Path

import psycopg
from psycopg import sql

from perdure.db.database import Database
from perdure.db.embedded import EmbeddedPostgres
from perdure.db.migrations import migrate

_TEMPLATE = "template_perdure"
#: Copying files is half the work of copying them through the log. It wants a checkpoint, which costs nothing without ``fsync``.
_COPIED = "strategy file_copy"
_numbers = itertools.count(1)
_used: list[str] = []


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


@cache
def _stopped_cluster() -> Path:
    """``db`` of a home whose database was made, migrated and stopped."""
    home = Path(tempfile.mkdtemp(prefix="perdure-planted-", dir="/tmp"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    postgres = EmbeddedPostgres(home, settings={"fsync": "off"})
    _run(postgres, "start")
    try:
        migrate(postgres.url())
    finally:
        _run(postgres, "stop")
    return home / "db"


def plant(home: Path) -> None:
    """Give a home that has no database the one that a first start would make. Where that start is not what is tested, nobody has
    to wait for it."""
    if not (home / "db").exists():
        (home / "db").mkdir()
        copy = ["cp", "-a", "--sparse=always"]  # the files keep their owner, who may not be us
        subprocess.run([*copy, str(_stopped_cluster() / "data"), str(home / "db" / "data")], check=True)


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
async def _copy_of(template: str) -> AsyncIterator[str]:
    postgres = cluster()
    name = f"test_{next(_numbers)}"
    async with await psycopg.AsyncConnection.connect(postgres.url("postgres"), autocommit=True) as connection:
        while _used:
            await connection.execute(f"drop database if exists {_used.pop()} with (force)")
        await connection.execute(f"create database {name} template {template} {_COPIED}")
    try:
        yield postgres.url(name)
    finally:
        _used.append(name)


def fresh_url() -> AbstractAsyncContextManager[str]:
    """URL of a migrated, empty database that goes away afterwards."""
    return _copy_of(_TEMPLATE)


def empty_url() -> AbstractAsyncContextManager[str]:
    """URL of a database without a table, which goes away afterwards."""
    return _copy_of("template0")


@asynccontextmanager
async def fresh_database() -> AsyncIterator[Database]:
    async with fresh_url() as url:
        database = Database(url)
        await database.open()
        try:
            yield database
        finally:
            await database.close()
