"""PostgreSQL's own programs, run as the account that a cluster belongs to, and the processes that a cluster has.

PostgreSQL refuses to run as root, so a root server drops to the system user ``perdure-db`` (``nobody`` where users cannot be
made). Where that user may not pass the directories above the programs or the data, it gets the one capability to do so (ADR 4).
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psycopg

from perdure.core.errors import DeadlineExceeded, HostUnfit
from perdure.core.programs import end, start

USER = "perdure"
SYSTEM_USER = "perdure-db"
STOP_DEADLINE_S = 60.0

Right = Literal["none", "search", "exec"]


@dataclass(frozen=True, slots=True)
class Account:
    """Who runs the server, and the words to put before a command so that it does."""

    uid: int
    gid: int
    prefix: tuple[str, ...] = ()
    drop: bool = False


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one PostgreSQL, and who runs them."""

    directory: Path
    account: Account

    async def run(self, program: str, *arguments: str, cwd: Path = Path("/")) -> tuple[int, str]:
        """Run one of them as the account; returns its exit code and merged output."""
        account = self.account
        who = {"user": account.uid, "group": account.gid, "extra_groups": []} if account.drop else {}
        process = await start(
            *account.prefix,
            str(self.directory / program),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=cwd,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TZ": "UTC"},
            **who,
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode(errors="replace")

    async def make_cluster(self, directory: Path, *options: str, sync: bool = True, cwd: Path = Path("/")) -> None:
        """A new cluster: UTF-8, no locale, entered without a password by who reaches its socket. Raises HostUnfit."""
        usual = ["-U", USER, "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-instructions"]
        if not sync:
            usual.append("--no-sync")
        code, output = await self.run("initdb", "-D", str(directory), *usual, *options, cwd=cwd)
        if code != 0:
            shutil.rmtree(directory, ignore_errors=True)
            raise HostUnfit(f"The embedded database could not be made: {last_line(output)}", internal=output)

    async def stop(self, data: Path, log: Path) -> None:
        """Fast shutdown of a cluster's server: what is committed is on disk. Raises DeadlineExceeded."""
        wait = ("-w", "-t", str(int(STOP_DEADLINE_S)))
        code, output = await self.run("pg_ctl", "stop", "-D", str(data), "-m", "fast", *wait)
        if code != 0 and postmaster(data) is not None:
            raise DeadlineExceeded(
                "The embedded database did not stop in time.", hint=f"Look at {log}; stopping again is safe.", internal=output
            )


async def run_client(path: Path, *arguments: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a program that only speaks to a server, as who we are; returns its exit code and merged output. One that is given up is
    killed."""
    process = await start(
        str(path),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TZ": "UTC", **environment},
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        await end(process)
        raise
    return process.returncode or 0, output.decode(errors="replace")


async def find_account(reads: Iterable[Path], enters: Iterable[Path]) -> Account:
    """The account of a server that must read the files ``reads`` and enter the directories ``enters``, which are its own."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    entry = await _system_user()
    needs: list[Right] = [
        *(_missing_right(path, entry.pw_uid, entry.pw_gid) for path in reads),
        *(_missing_right(path / "x", entry.pw_uid, entry.pw_gid, own_parent=True) for path in enters),
    ]
    need: Right = "exec" if "exec" in needs else "search" if "search" in needs else "none"
    return Account(entry.pw_uid, entry.pw_gid, _capability_prefix(need, entry), drop=need == "none")


def postmaster(data: Path) -> int | None:
    """Process id of the running postmaster of a cluster, or None."""
    try:
        first = (data / "postmaster.pid").read_text().split("\n", 1)[0]
        pid = int(first)
    except (OSError, ValueError):
        return None
    return pid if pid in processes_in(data) else None


async def _system_user() -> pwd.struct_passwd:
    """The account a root server drops to; made on first use like a distribution's package would."""
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        pass
    useradd = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin")
    if useradd is not None:
        process = await start(
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


def processes_in(directory: Path) -> list[int]:
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


async def end_leftovers(directory: Path, how: signal.Signals = signal.SIGQUIT) -> None:
    """End backends that a killed postmaster left behind: they must be gone before another may open the cluster."""
    for pid in processes_in(directory):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            os.kill(pid, how)
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


async def answers(url: str) -> bool:
    try:
        async with await psycopg.AsyncConnection.connect(url, connect_timeout=10) as connection:
            await connection.execute("select 1")
    except psycopg.Error:
        return False
    return True


def last_line(text: str) -> str:
    """The line that says why: the last error, or else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if "FATAL:" in line or "PANIC:" in line or "error:" in line] or lines
    return lines[-1] if lines else "it said nothing."
