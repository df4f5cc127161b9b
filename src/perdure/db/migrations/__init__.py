"""Schema changes, applied at start by whoever comes first, under an advisory lock.

``versions/NNNN_name.py`` is an alembic revision whose id is ``NNNN``; its SQL lies beside it in ``versions/NNNN_name.sql``.
Migrations only go forward. A database newer than this release is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from perdure.core.errors import HostUnfit, InvalidRequest, Unavailable

HERE = Path(__file__).parent
_LOCK = 0x7065_7264  # "perd"


def head() -> str:
    """The newest revision that this release brings."""
    return max(path.name[:4] for path in (HERE / "versions").glob("[0-9][0-9][0-9][0-9]_*.py"))


def current(url: str) -> str | None:
    """The revision a database is at; None for an empty one. Raises Unavailable, or InvalidRequest for a URL that is none."""
    try:
        conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:  # what it says may quote the URL, and a password in it
        raise InvalidRequest(
            "The database's URL is not one that PostgreSQL understands.",
            hint="Write PERDURE_DATABASE_URL=postgresql://USER:PASSWORD@HOST:PORT/DATABASE.",
        ) from error
    try:
        with psycopg.connect(url, connect_timeout=30, autocommit=True) as connection:
            found = connection.execute("select to_regclass('alembic_version') is not null").fetchone()
            if not found or not found[0]:
                return None
            row = connection.execute("select version_num from alembic_version").fetchone()
            return str(row[0]) if row else None
    except psycopg.OperationalError as error:
        raise Unavailable(
            "The database does not answer.",
            hint="Check PERDURE_DATABASE_URL, or HOME/db/postgres.log of the embedded one.",
            internal=str(error),
        ) from error


def migrate(url: str) -> None:
    """Bring the schema to ``head``. Blocking; raises HostUnfit when the database is newer than this release."""
    at = current(url)
    if at == head():
        return  # the usual start: alembic and SQLAlchemy are not even imported
    if at is not None and at > head():
        raise HostUnfit(
            f"The database's schema ({at}) is newer than this release knows ({head()}).",
            hint="Install the newer release again; going back needs a backup from before the upgrade.",
        )
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(HERE).replace("%", "%%"))
    with psycopg.connect(url, autocommit=True) as lock:
        lock.execute("select pg_advisory_lock(%s)", (_LOCK,))  # freed when this connection ends, however it ends
        config.attributes["connect"] = lambda: psycopg.connect(url)
        command.upgrade(config, "head")


def run_sql(operations: Any, revision_file: str) -> None:
    """Run the SQL beside a revision, ``run_sql(op, __file__)``: on the driver itself, which takes many statements at once
    and, without parameters, leaves percent signs alone."""
    text = Path(revision_file).with_suffix(".sql").read_text(encoding="utf-8")
    operations.get_bind().connection.driver_connection.execute(text)
