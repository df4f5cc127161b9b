"""Releases with an older PostgreSQL: clusters as they made them, with something of value inside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from perdure.db import embedded
from perdure.db.embedded import EmbeddedPostgres
from perdure.db.migrations import migrate

#: Where an older version's programs may be: 16 comes with the wheel, 15 is Debian 12's package.
WHEEL, DEBIAN = 16, 15
_NEWER_SETTINGS = ("io_method",)


def programs_of(major: int) -> Path | None:
    """The directory of an older version's programs, where this host has them."""
    wheel = embedded.binaries().parents[1] / "pginstall" / "bin"
    found = wheel if major == WHEEL else Path(f"/usr/lib/postgresql/{major}/bin")
    return found if (found / "postgres").exists() else None


def as_in_a_wheel(programs: Path, home: Path) -> Path:
    """The programs with their shared files beside them, as a wheel has them; Debian's packages have those elsewhere."""
    if (programs.parent / "share").exists():
        return programs
    wheel = home / f"wheel{programs.parent.name}"
    if not wheel.exists():
        wheel.mkdir()
        (wheel / "bin").symlink_to(programs)
        (wheel / "share").symlink_to(Path("/usr/share/postgresql") / programs.parent.name)
    return wheel / "bin"


@contextmanager
def release_with(major: int, home: Path) -> Iterator[None]:
    """Inside, ``EmbeddedPostgres`` is that of a release whose wheel had this version."""
    programs = programs_of(major)
    assert programs is not None
    directory = as_in_a_wheel(programs, home)
    settings = {name: value for name, value in embedded.SETTINGS.items() if name not in _NEWER_SETTINGS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "MAJOR", major)
        patch.setattr(embedded, "SETTINGS", settings)
        patch.setattr(embedded, "binaries", lambda: directory)
        yield


async def make_older(home: Path, major: int) -> EmbeddedPostgres:
    """A migrated database with rows, made and still served by an older release."""
    with release_with(major, home):
        server = EmbeddedPostgres(home, settings={"fsync": "off"})
        url = await server.start()
    await asyncio.to_thread(migrate, url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("insert into nodes (id, tenant_id, state, lease_until) values ('nod_old', 'tnt', 'up', 'infinity')")
        connection.execute("create table kept as select n, sha256(n::text::bytea) as digest from generate_series(1, 20000) n")
        connection.execute("create index on kept (digest)")
    return server


def holds_all(url: str) -> None:
    """Everything that ``make_older`` put in is there, and found by its index too."""
    with psycopg.connect(url) as connection:
        assert connection.execute("select state from nodes where id = 'nod_old'").fetchone() == ("up",)
        wrong = "select count(*), count(*) filter (where digest <> sha256(n::text::bytea)) from kept"
        assert connection.execute(wrong).fetchone() == (20000, 0)
        connection.execute("set enable_seqscan = off")
        assert connection.execute("select n from kept where digest = sha256('777'::bytea)").fetchone() == (777,)
