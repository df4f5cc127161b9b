"""A dump of one instant, and putting it back, with the wheel's own programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perdure.core.errors import HostUnfit, NoSpace, Unavailable
from perdure.db import dump as dumping
from perdure.db.database import Database
from perdure.db.dump import _failed, _target
from perdure.db.embedded import MAJOR
from tests.fakes.database import empty_url, fresh_database, fresh_url

NODE = {"id": "nod_1", "tenant_id": "ten_default", "lease_s": 1.0}


async def nodes(url: str) -> list[str]:
    database = Database(url, max_connections=2)
    await database.open()
    try:
        return [row["id"] for row in await database.all("nodes.all")]
    finally:
        await database.close()


async def test_a_dump_is_of_the_instant_and_not_of_what_came_after(tmp_path: Path) -> None:
    async with fresh_database() as database, empty_url() as url:
        await database.one("nodes.register", **NODE)
        async with dumping.frozen(database.url) as frozen:
            await database.one("nodes.register", **{**NODE, "id": "nod_2"})
            assert [row["id"] for row in await frozen.rows.all("nodes.all")] == ["nod_1"]
            await dumping.dump(frozen, tmp_path / "dump")
        assert await dumping.is_empty(url)
        await dumping.load(url, tmp_path / "dump")
        assert not await dumping.is_empty(url)
        assert await nodes(url) == ["nod_1"]


async def test_a_load_that_fails_leaves_nothing(tmp_path: Path) -> None:
    async with fresh_database() as database, empty_url() as url:
        await database.one("nodes.register", **NODE)
        async with dumping.frozen(database.url) as frozen:
            await dumping.dump(frozen, tmp_path / "dump")
        whole = (tmp_path / "dump").read_bytes()
        (tmp_path / "dump").write_bytes(whole[: len(whole) * 2 // 3])
        with pytest.raises(HostUnfit, match="The database could not be restored: "):
            await dumping.load(url, tmp_path / "dump")
        assert await dumping.is_empty(url)


async def test_a_load_into_a_database_in_use_changes_nothing(tmp_path: Path) -> None:
    async with fresh_database() as database, fresh_url() as other:
        async with dumping.frozen(database.url) as frozen:
            await dumping.dump(frozen, tmp_path / "dump")
        with pytest.raises(HostUnfit, match="already exists"):
            await dumping.load(other, tmp_path / "dump")
        assert await nodes(other) == []


async def test_a_server_that_is_newer_than_our_programs(tmp_path: Path) -> None:
    async with fresh_database() as database, dumping.frozen(database.url) as frozen:
        assert frozen.major == MAJOR
        with pytest.raises(HostUnfit, match=f"The database is PostgreSQL {MAJOR + 1}; this release can dump up to {MAJOR}"):
            await dumping.dump(replace(frozen, major=MAJOR + 1), tmp_path / "dump")


async def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    url = f"postgresql://perdure@/perdure?host={tmp_path}"
    with pytest.raises(Unavailable):
        async with dumping.frozen(url):
            pass
    with pytest.raises(Unavailable):
        await dumping.is_empty(url)
    (tmp_path / "dump").write_bytes(b"PGDMP")
    with pytest.raises((Unavailable, HostUnfit)):
        await dumping.load(url, tmp_path / "dump")


def test_a_password_is_no_argument() -> None:
    target, environment = _target("postgresql://me:secret@db.example:5433/name?sslmode=require")
    assert "secret" not in target and environment == {"PGPASSWORD": "secret"}
    assert "db.example" in target and "5433" in target and "sslmode=require" in target


def test_failures_are_told_apart() -> None:
    full = _failed("dumped", "pg_dump: error: could not write to output file: No space left on device\n")
    assert isinstance(full, NoSpace) and "There is no room" in full.message
    away = _failed("dumped", 'pg_dump: error: connection to server on socket "x" failed: gone\n')
    assert isinstance(away, Unavailable)
    other = _failed("restored", "pg_restore: warning: x\npg_restore: error: it broke.\nsomething else\n")
    assert isinstance(other, HostUnfit) and other.message == "The database could not be restored: pg_restore: error: it broke."
    assert _failed("restored", "").message.endswith("it said nothing.")
