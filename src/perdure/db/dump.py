"""A dump of the whole database at one instant, and putting it back: pg_dump and pg_restore of the embedded wheel.

``frozen`` holds one instant of the database open: what is read there and what ``dump`` writes are the same rows. The file is
pg_dump's custom format without compression (the chunks of a backup are compressed, and unchanged ones are known again), so that
any pg_restore of that major or a newer one reads it without us. Putting it back is one transaction: all, or nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from perdure.core.errors import HostUnfit, NoSpace, PerdureError, Unavailable
from perdure.db.database import Transaction
from perdure.db.embedded import MAJOR, binaries
from perdure.db.programs import run_client

_FULL_WORDS = ("No space left on device", "Disk quota exceeded")
_AWAY_WORDS = ("connection to server", "terminating connection", "server closed the connection")


@dataclass(frozen=True, slots=True)
class Frozen:
    """One instant. ``token`` names it to pg_dump, ``rows`` reads in it; ``major`` is the server's version."""

    url: str
    token: str
    rows: Transaction
    major: int


@asynccontextmanager
async def frozen(url: str) -> AsyncIterator[Frozen]:
    """Hold an instant open as long as the block lasts. Raises Unavailable."""
    try:
        async with await psycopg.AsyncConnection.connect(url, connect_timeout=30, row_factory=dict_row) as connection:
            await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await connection.set_read_only(True)
            row = await (await connection.execute("select pg_export_snapshot() as token")).fetchone()
            assert row is not None, "a function gives a row"
            yield Frozen(url, str(row["token"]), Transaction(connection), connection.info.server_version // 10000)
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise Unavailable("The database does not answer.", hint="Look at 'perdure doctor'.", internal=str(error)) from error


async def dump(instant: Frozen, path: Path) -> None:
    """Write all of it into a new file. Raises HostUnfit when the server is newer than our pg_dump, NoSpace or Unavailable."""
    if instant.major > MAJOR:
        raise HostUnfit(
            f"The database is PostgreSQL {instant.major}; this release can dump up to {MAJOR}.",
            hint="Install a Perdure that brings a newer PostgreSQL, or back the database up with its own tools as well.",
        )
    options = ("--format=custom", "--compress=none", "--no-owner", "--no-privileges", f"--snapshot={instant.token}")
    code, said = await _run("pg_dump", instant.url, *options, f"--file={path}")
    if code != 0:
        raise _failed("dumped", said)


async def load(url: str, path: Path) -> None:
    """Put a dump into an empty database, in one transaction. Raises HostUnfit, NoSpace or Unavailable."""
    options = ("--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges")
    code, said = await _run("pg_restore", url, *options, str(path))
    if code != 0:
        raise _failed("restored", said)


async def is_empty(url: str) -> bool:
    """Whether nobody has made a table there. Raises Unavailable."""
    try:
        async with await psycopg.AsyncConnection.connect(url, connect_timeout=30) as connection:
            found = await connection.execute("select 1 from pg_class where relnamespace = 'public'::regnamespace limit 1")
            return await found.fetchone() is None
    except psycopg.OperationalError as error:
        raise Unavailable("The database does not answer.", hint="Check PERDURE_DATABASE_URL.", internal=str(error)) from error


async def _run(program: str, url: str, *arguments: str) -> tuple[int, str]:
    """Run a client program against a database; returns its exit code and what it said."""
    target, environment = _target(url)
    return await run_client(binaries() / program, f"--dbname={target}", *arguments, environment=environment)


def _target(url: str) -> tuple[str, Mapping[str, str]]:
    """The database as an argument, which every user of the host can see, and its password as a variable, which they cannot."""
    parts = conninfo_to_dict(url)
    password = parts.pop("password", None)
    return make_conninfo("", **parts), {} if password is None else {"PGPASSWORD": str(password)}


def _failed(done: str, said: str) -> PerdureError:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next((line for line in lines if "error:" in line), lines[-1] if lines else "it said nothing")
    if any(word in said for word in _FULL_WORDS):
        return NoSpace(f"There is no room for the database to be {done}.", internal=said)
    if any(word in said for word in _AWAY_WORDS):
        return Unavailable("The database went away.", hint="Look at 'perdure doctor', and try again.", internal=said)
    return HostUnfit(f"The database could not be {done}: {last.rstrip('.')}.", internal=said)
