"""The embedded server: from nothing, adopted, killed, half made, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote

import psycopg
import pytest

from perdure.core.errors import HostUnfit
from perdure.db.embedded import EmbeddedPostgres

SETTINGS = {"fsync": "off"}


@pytest.fixture
async def postgres(home: Path) -> AsyncIterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(home, settings=SETTINGS)
    yield server
    await server.stop()


async def ask(url: str, question: str = "select 1") -> object:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        cursor = await connection.execute(question)  # type: ignore[arg-type]
        row = await cursor.fetchone() if cursor.description else None
        return row[0] if row else None


async def test_it_starts_from_nothing_and_listens_on_a_socket_only(postgres: EmbeddedPostgres, home: Path) -> None:
    url = await postgres.start()
    assert await ask(url, "show listen_addresses") == ""
    assert str(await ask(url, "show server_version")).startswith("18")
    pid = postgres.pid()
    assert pid is not None
    owner = Path(f"/proc/{pid}").stat().st_uid
    assert owner != 0, "it never runs as root"
    assert (home / "db").stat().st_mode & 0o077 == 0
    if os.geteuid() == 0:
        assert (home / "db" / "data").stat().st_uid == owner


async def test_a_running_one_is_adopted_and_one_with_other_settings_replaced(postgres: EmbeddedPostgres, home: Path) -> None:
    await postgres.start()
    pid = postgres.pid()
    again = EmbeddedPostgres(home, settings=SETTINGS)
    await again.start()
    assert again.pid() == pid
    other = EmbeddedPostgres(home, settings={**SETTINGS, "work_mem": "5MB"})
    assert await ask(await other.start(), "show work_mem") == "5MB"
    assert other.pid() != pid


async def test_a_killed_server_comes_back_with_what_was_committed(home: Path) -> None:
    postgres = EmbeddedPostgres(home)  # with fsync
    try:
        url = await postgres.start()
        await ask(url, "create table kept as select 42 as answer")
        pid = postgres.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        url = await postgres.start()
        assert postgres.pid() != pid
        assert await ask(url, "select answer from kept") == 42
    finally:
        await postgres.stop()


async def test_a_lock_file_of_a_pid_that_is_somebody_else_now_does_not_matter(postgres: EmbeddedPostgres, home: Path) -> None:
    await postgres.start()
    await postgres.stop()
    (home / "db" / "data" / "postmaster.pid").write_text(f"{os.getpid()}\n{home}/db/data\n")
    assert postgres.pid() is None
    assert await ask(await postgres.start()) == 1


async def test_an_empty_lock_file_does_not_matter(postgres: EmbeddedPostgres, home: Path) -> None:
    await postgres.start()
    await postgres.stop()
    (home / "db" / "data" / "postmaster.pid").write_text("")
    assert await ask(await postgres.start()) == 1


async def test_a_killed_initdb_leaves_nothing_half_made(postgres: EmbeddedPostgres, home: Path) -> None:
    half = home / "db" / "data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    assert await ask(await postgres.start()) == 1
    assert not half.exists()


async def test_a_home_too_long_for_a_socket_path_works(home: Path) -> None:
    deep = home / ("x" * 100)
    deep.mkdir()
    postgres = EmbeddedPostgres(deep, settings=SETTINGS)
    try:
        url = await postgres.start()
        assert await ask(url) == 1
        elsewhere = Path(unquote(url.partition("host=")[2]))
        assert elsewhere.is_dir() and home not in elsewhere.parents
    finally:
        await postgres.stop()
    assert not elsewhere.exists()


async def test_stopping_twice_and_before_starting_is_fine(home: Path) -> None:
    postgres = EmbeddedPostgres(home, settings=SETTINGS)
    await postgres.stop()
    await postgres.start()
    await postgres.stop()
    await postgres.stop()
    assert postgres.pid() is None


async def test_a_setting_it_does_not_know_says_what_postgres_said(home: Path) -> None:
    with pytest.raises(HostUnfit, match="unrecognized configuration parameter"):
        await EmbeddedPostgres(home, settings={**SETTINGS, "no_such_thing": "1"}).start()
    await asyncio.sleep(0)
