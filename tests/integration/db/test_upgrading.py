"""An embedded cluster of an older PostgreSQL is upgraded, or refused with the command that mends it; it is never lost."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from perdure.core import files
from perdure.core.crashpoints import CrashPoint
from perdure.core.errors import HostUnfit, NoSpace
from perdure.db import upgrading
from perdure.db.database import connect_migrated
from perdure.db.embedded import MAJOR, EmbeddedPostgres
from perdure.db.programs import processes_in
from tests.integration.db.older import DEBIAN, WHEEL, holds_all, make_older, programs_of, release_with

SETTINGS = {"fsync": "off"}
pytestmark = pytest.mark.slow


@pytest.fixture
async def postgres(home: Path) -> AsyncIterator[EmbeddedPostgres]:
    """Ours, not started, over the home that an older release's cluster is made in."""
    home.chmod(0o711)
    server = EmbeddedPostgres(home, settings=SETTINGS)
    yield server
    await server.stop()


def left(home: Path) -> set[str]:
    return {path.name for path in (home / "db").iterdir()} - {"data", "socket", "postgres.log", "upgrade.log"}


def digest(directory: Path) -> str:
    """Names and contents of everything below."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        found.update(str(path.relative_to(directory)).encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


def do(command: str) -> None:
    """What a hint told to do."""
    subprocess.run(command, shell=True, check=True)


@pytest.mark.parametrize("major", [WHEEL, pytest.param(DEBIAN, marks=pytest.mark.long)])
async def test_an_older_cluster_is_upgraded_with_everything_in_it(postgres: EmbeddedPostgres, home: Path, major: int) -> None:
    if programs_of(major) is None:
        pytest.skip(f"this host has no PostgreSQL {major}: 'apt-get install postgresql-{major}' brings it on Debian 12")
    await (await make_older(home, major)).stop()
    url = await postgres.start()
    assert (home / "db" / "data" / "PG_VERSION").read_text() == f"{MAJOR}\n"
    holds_all(url)
    with psycopg.connect(url) as connection:
        assert connection.execute("show data_checksums").fetchone() == ("on",), "as a new cluster has them"
    assert left(home) == set()
    pid = postgres.pid()
    assert await postgres.start() == url and postgres.pid() == pid, "nothing is upgraded twice"
    await (await connect_migrated(url)).close()


@pytest.mark.long
async def test_what_an_older_server_had_committed_when_it_was_killed_is_upgraded(postgres: EmbeddedPostgres, home: Path) -> None:
    older = await make_older(home, WHEEL)
    pid = older.pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    holds_all(await postgres.start())
    assert left(home) == set()


@pytest.mark.long
async def test_an_older_server_that_still_runs_is_stopped_first(postgres: EmbeddedPostgres, home: Path) -> None:
    older = await make_older(home, WHEEL)
    assert older.pid() is not None
    holds_all(await postgres.start())
    assert len([pid for pid in processes_in(home / "db" / "data") if pid == postgres.pid()]) == 1


# ------------------------------------------------------------------------------------------------------------------- refusals


async def test_without_the_older_programs_it_is_refused_with_the_command_that_brings_them(
    postgres: EmbeddedPostgres, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await make_older(home, WHEEL)).stop()
    before = digest(home / "db" / "data")
    with monkeypatch.context() as patch:
        patch.setattr(upgrading, "_places", lambda ours, major: iter([home / "nothing"]))
        with pytest.raises(
            HostUnfit, match=rf"made by PostgreSQL {WHEEL}; this release brings {MAJOR}\. .* this host lacks"
        ) as no:
            await postgres.start()
    assert f"apt-get install --no-install-recommends postgresql-{WHEEL}" in no.value.hint
    assert digest(home / "db" / "data") == before
    holds_all(await postgres.start())  # they have been installed


async def test_programs_of_another_version_in_their_place_are_not_taken(
    postgres: EmbeddedPostgres, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "db" / "data").mkdir(parents=True)
    (home / "db" / "data" / "PG_VERSION").write_text("14\n")
    monkeypatch.setattr(upgrading, "_places", lambda ours, major: iter([ours]))
    with pytest.raises(HostUnfit, match="programs of 14 are needed once, which this host lacks"):
        await postgres.start()


async def test_one_of_a_newer_version_is_refused(postgres: EmbeddedPostgres, home: Path) -> None:
    (home / "db" / "data").mkdir(parents=True)
    (home / "db" / "data" / "PG_VERSION").write_text(f"{MAJOR + 1}\n")
    with pytest.raises(
        HostUnfit, match=f"made by PostgreSQL {MAJOR + 1}; this release brings {MAJOR}, which cannot read it"
    ) as no:
        await postgres.start()
    assert "newer release" in no.value.hint


@pytest.mark.parametrize("text", [None, "", "eighteen\n"])
async def test_one_that_does_not_say_its_version_is_left_alone(postgres: EmbeddedPostgres, home: Path, text: str | None) -> None:
    (home / "db" / "data").mkdir(parents=True)
    (home / "db" / "data" / "base").write_text("somebody's")
    if text is not None:
        (home / "db" / "data" / "PG_VERSION").write_text(text)
    with pytest.raises(HostUnfit, match="does not say which PostgreSQL made the database"):
        await postgres.start()
    assert (home / "db" / "data" / "base").read_text() == "somebody's"


async def test_one_that_cannot_be_upgraded_is_kept_and_the_reason_said(postgres: EmbeddedPostgres, home: Path) -> None:
    older = await make_older(home, WHEEL)
    with psycopg.connect(older.url("postgres"), autocommit=True) as connection:
        connection.execute("create database closed allow_connections false")
    await older.stop()
    with pytest.raises(HostUnfit, match=rf"could not be upgraded to PostgreSQL {MAJOR}: pg_upgrade: ") as no:
        await postgres.start()
    assert "upgrade.log" in no.value.hint
    assert "must allow connections" in (home / "db" / "upgrade.log").read_text()
    with release_with(WHEEL, home):
        again = EmbeddedPostgres(home, settings=SETTINGS)
        holds_all(await again.start())
    with psycopg.connect(again.url("postgres"), autocommit=True) as connection:
        connection.execute("drop database closed")
    await again.stop()
    holds_all(await postgres.start())
    assert left(home) == set()


async def test_without_room_for_a_copy_it_is_not_begun(
    postgres: EmbeddedPostgres, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await make_older(home, WHEEL)).stop()
    with monkeypatch.context() as patch:
        patch.setattr(files, "free_bytes", lambda path: 100 << 20)
        with pytest.raises(NoSpace, match=r"Upgrading the database needs \d+ MiB .* 100 MiB left"):
            await postgres.start()
    assert left(home) == set()


@pytest.mark.long
async def test_a_new_cluster_that_does_not_start_tells_the_way_back(home: Path) -> None:
    home.chmod(0o711)
    older = await make_older(home, WHEEL)
    await older.stop()
    broken = EmbeddedPostgres(home, settings={**SETTINGS, "no_such_thing": "1"})
    with pytest.raises(HostUnfit, match="unrecognized configuration parameter") as no:
        await broken.start()
    command = re.search(r"go back to the release that made it: (.+)$", no.value.hint)
    assert command is not None
    do(command[1])
    with release_with(WHEEL, home):
        holds_all(await older.start())
    await older.stop()


# -------------------------------------------------------------------------------------------------------------------- crashes

#: In the order of an upgrade; each next life of the server comes one step further.
STEPS = (
    *(CrashPoint.UPGRADE_BEGUN, CrashPoint.UPGRADE_SHUT_DOWN, CrashPoint.UPGRADE_MADE),
    *("inside pg_upgrade", "after pg_upgrade"),
    CrashPoint.UPGRADE_COPIED,
    "before rename data",
    *(CrashPoint.UPGRADE_SET_ASIDE, CrashPoint.UPGRADE_SWITCHED),
    *("before pg_ctl", "after pg_ctl"),
    *(CrashPoint.UPGRADE_ANSWERS, CrashPoint.UPGRADE_LET_GO),
)


def test_every_named_point_of_an_upgrade_is_among_the_steps() -> None:
    assert {point for point in CrashPoint if point.value.startswith("upgrade.")} <= set(STEPS)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_killed_at_every_step_it_loses_nothing(postgres: EmbeddedPostgres, home: Path) -> None:
    await (await make_older(home, WHEEL)).stop()
    root = home / "db"
    for step in STEPS:
        dying = [sys.executable, "-m", "tests.integration.db.dying", str(home), step]
        died = await asyncio.create_subprocess_exec(*dying, cwd=Path(__file__).parents[3])
        assert await died.wait() == -signal.SIGKILL, f"it lived through {step!r}"
        versions = {name: (root / name / "PG_VERSION").exists() for name in ("data", "data.before", "data.upgrade")}
        assert any(versions.values()), f"after {step!r}"
    holds_all(await postgres.start())
    assert left(home) == set()
    await postgres.stop()
    assert [pid for path in root.rglob("*") if path.is_dir() for pid in processes_in(path)] == []


@pytest.mark.long
async def test_what_an_interrupted_upgrade_still_runs_is_ended_before_another_begins(
    postgres: EmbeddedPostgres, home: Path
) -> None:
    await (await make_older(home, WHEEL)).stop()
    work, half = home / "db" / "upgrade", home / "db" / "data.upgrade"
    running = []
    for place in (work, half):
        place.mkdir()
        running.append(await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE, cwd=place))
    holds_all(await postgres.start())
    ended = [await asyncio.wait_for(process.wait(), 10) for process in running]
    assert ended == [-signal.SIGKILL, -signal.SIGQUIT]
    assert left(home) == set()


@pytest.mark.long
async def test_two_clusters_side_by_side_are_for_the_operator_to_judge(postgres: EmbeddedPostgres, home: Path) -> None:
    """An older release was started between the two renames, and made an empty one."""
    await (await make_older(home, WHEEL)).stop()
    (home / "db" / "data").rename(home / "db" / "data.before")
    (home / "db" / "data").mkdir()
    (home / "db" / "data" / "PG_VERSION").write_text(f"{WHEEL}\n")
    with pytest.raises(HostUnfit, match="holds a database from before an upgrade") as no:
        await postgres.start()
    command = no.value.hint.partition("To go on with the first: ")[2]
    do(command)
    holds_all(await postgres.start())
