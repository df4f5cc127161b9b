"""An embedded cluster of an older PostgreSQL becomes one of ours: by our pg_upgrade and the older version's own programs.

    HOME/db/data            the older cluster, until the new one is complete
    HOME/db/data.upgrade    the new one: in the making while there is ``data``, complete when there is not
    HOME/db/data.before     the older one, until the new one has started and answered
    HOME/db/upgrade.log     what the programs said

The older cluster is only read (pg_upgrade copies), so whatever interrupts an upgrade, it can be begun anew, and going back is one
rename. The older version's programs come with the wheel for one major version, and otherwise from the host's packages.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from perdure.core import files
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import HostUnfit, NoSpace
from perdure.db.programs import USER, Programs, end_leftovers, last_line, postmaster, processes_in

#: What pg_upgrade writes beside the copy: a fresh cluster, dumps and logs.
ROOM_BYTES = 128 << 20
START_DEADLINE_S = 600  # recovery of a server that was killed; it ends earlier when it fails
_NEEDED = ("postgres", "pg_ctl", "pg_controldata", "pg_resetwal")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Of the cluster in ``root``, to ``major``, whose programs these are. ``sync`` is off for clusters of tests."""

    root: Path
    socket: Path  # a directory; its path is short enough for a socket
    programs: Programs
    major: int
    sync: bool = True

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def fresh(self) -> Path:
        return self.root / "data.upgrade"

    @property
    def before(self) -> Path:
        return self.root / "data.before"

    @property
    def removed(self) -> Path:
        return self.root / "data.removed"

    @property
    def work(self) -> Path:
        """pg_upgrade's working directory, and by that the mark of the processes of an upgrade."""
        return self.root / "upgrade"

    @property
    def log(self) -> Path:
        return self.root / "upgrade.log"


async def bring_up_to_date(upgrade: Upgrade) -> bool:
    """Finish or undo what was interrupted, and upgrade an older cluster. False when there is no cluster at all.

    Raises HostUnfit when it cannot be done, with the command that mends it, or NoSpace; then the older cluster is as it was.
    """
    await _settle(upgrade)
    if not upgrade.data.exists():
        return False
    found = _major(upgrade)
    if found == upgrade.major:
        return True
    if found > upgrade.major:
        raise HostUnfit(
            f"{_made(upgrade, found)}, which cannot read it.",
            hint="Use the newer release of Perdure that made it; or set PERDURE_HOME to another directory.",
        )
    if upgrade.before.exists():
        raise HostUnfit(
            f"{upgrade.before} holds a database from before an upgrade, and {upgrade.data} one of PostgreSQL {found} beside it.",
            hint=f"Look which one is yours. To go on with the first: rm -r {upgrade.data} && mv {upgrade.before} {upgrade.data}",
        )
    older = await _find_older(upgrade, found)
    log.info("the embedded database is upgraded", found=found, to=upgrade.major, programs=str(older.directory))
    _check_room(upgrade)
    upgrade.work.mkdir(mode=0o700)
    os.chown(upgrade.work, upgrade.programs.account.uid, upgrade.programs.account.gid)
    crashpoint(CrashPoint.UPGRADE_BEGUN)
    await _shut_down(upgrade, older)
    crashpoint(CrashPoint.UPGRADE_SHUT_DOWN)
    await _make(upgrade, older)
    crashpoint(CrashPoint.UPGRADE_COPIED)
    await asyncio.to_thread(shutil.rmtree, upgrade.work)
    _switch(upgrade)
    log.info("the embedded database was upgraded; the one before is kept until this one has started", major=upgrade.major)
    return True


async def confirm(upgrade: Upgrade) -> None:
    """The new cluster has started and answers: the older one goes."""
    if not upgrade.before.exists():
        return
    crashpoint(CrashPoint.UPGRADE_ANSWERS)
    upgrade.before.rename(upgrade.removed)  # first, so that a half removed one is never taken for one to go back to
    files.DISK.sync_dir(upgrade.root)
    crashpoint(CrashPoint.UPGRADE_LET_GO)
    await asyncio.to_thread(shutil.rmtree, upgrade.removed)


async def _settle(upgrade: Upgrade) -> None:
    """After an upgrade that was interrupted at any point: the older cluster as it was, or the new one."""
    if upgrade.work.exists():
        await _end_earlier(upgrade)
        await asyncio.to_thread(shutil.rmtree, upgrade.work)
    if not upgrade.data.exists() and upgrade.before.exists():
        is_complete = upgrade.fresh.exists()
        _put_in_place(upgrade, upgrade.fresh if is_complete else upgrade.before)
        if is_complete:
            crashpoint(CrashPoint.UPGRADE_SWITCHED)
    for debris in (upgrade.fresh, upgrade.removed):
        if debris.exists():
            await asyncio.to_thread(shutil.rmtree, debris)


async def _end_earlier(upgrade: Upgrade) -> None:
    """End what an upgrade of a killed server still runs: first pg_upgrade, which would start others, then the servers."""
    while processes_in(upgrade.work):
        await end_leftovers(upgrade.work, signal.SIGKILL)
    for data in (upgrade.data, upgrade.fresh):
        await end_leftovers(data)


def way_back(upgrade: Upgrade) -> str:
    """What somebody may do whose new cluster does not start; empty when there is nothing to go back to."""
    if not upgrade.before.exists():
        return ""
    return (
        f" The database from before the upgrade is kept. To go back to the release that made it: "
        f"rm -r {upgrade.data} && mv {upgrade.before} {upgrade.data}"
    )


def _made(upgrade: Upgrade, found: int) -> str:
    return f"The database in {upgrade.data} was made by PostgreSQL {found}; this release brings {upgrade.major}"


def _major(upgrade: Upgrade) -> int:
    version = upgrade.data / "PG_VERSION"
    try:
        return int(version.read_text().strip().split(".")[0])
    except (OSError, ValueError) as error:
        raise HostUnfit(
            f"{version} does not say which PostgreSQL made the database beside it.",
            hint=f"If it is not a database of yours, move {upgrade.data} away; otherwise bring it back from a backup.",
            internal=str(error),
        ) from error


# ------------------------------------------------------------------------------------------------------------ the older version


async def _find_older(upgrade: Upgrade, major: int) -> Programs:
    """The programs of the version that made the cluster: beside ours in the wheel, or of the host's packages."""
    for directory in _places(upgrade.programs.directory, major):
        if all((directory / name).exists() for name in _NEEDED):
            programs = replace(upgrade.programs, directory=directory)
            code, output = await programs.run("postgres", "--version")
            if code == 0 and re.search(rf"\b{major}[.\d]*\b", output):
                return programs
    raise HostUnfit(
        f"{_made(upgrade, major)}. To upgrade it the programs of {major} are needed once, which this host lacks.",
        hint=f"Run 'apt-get install --no-install-recommends postgresql-{major}' (they are looked for in "
        f"/usr/lib/postgresql/{major}/bin) and start again, which upgrades the database. Nothing of it has been changed.",
    )


def _places(ours: Path, major: int) -> Iterator[Path]:
    yield from sorted(ours.parents[1].glob("pginstall*/bin"))
    yield Path(f"/usr/lib/postgresql/{major}/bin")
    yield Path(f"/usr/pgsql-{major}/bin")


def _check_room(upgrade: Upgrade) -> None:
    need = sum(files.stored_bytes(path) for path in upgrade.data.rglob("*") if path.is_file()) + ROOM_BYTES
    free = files.free_bytes(upgrade.root)
    if free < need:
        raise NoSpace(
            f"Upgrading the database needs {need >> 20} MiB of disk space, but {upgrade.root} has {free >> 20} MiB left.",
            hint="Free some disk space and start again; the database has not been changed.",
        )


async def _shut_down(upgrade: Upgrade, older: Programs) -> None:
    """The older cluster has no server and was shut down in order; one that was killed is recovered by its own version."""
    data = upgrade.data
    if postmaster(data) is not None:
        await older.stop(data, upgrade.root / "postgres.log")
    await end_leftovers(data)
    (data / "postmaster.pid").unlink(missing_ok=True)
    for left in upgrade.socket.glob(".s.PGSQL.*"):
        left.unlink(missing_ok=True)
    if (await _control_data(upgrade, older)).get("Database cluster state") == "shut down":
        return
    options = {"listen_addresses": "", "unix_socket_directories": str(upgrade.socket), "unix_socket_permissions": "0600"}
    told = " ".join(f"-c {name}={shlex.quote(value)}" for name, value in options.items())
    said = upgrade.root / "postgres.log"
    wait = ("-w", "-t", str(START_DEADLINE_S))
    await _run(upgrade, older, "pg_ctl", "start", "-D", str(data), *wait, "-l", str(said), "-o", told)
    await older.stop(data, said)


async def _control_data(upgrade: Upgrade, older: Programs) -> dict[str, str]:
    output = await _run(upgrade, older, "pg_controldata", "-D", str(upgrade.data))
    pairs = (line.partition(":") for line in output.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


# ------------------------------------------------------------------------------------------------------------------ the new one


async def _make(upgrade: Upgrade, older: Programs) -> None:
    """``data.upgrade``, complete and durable, with everything of ``data``."""
    data, fresh, programs = str(upgrade.data), upgrade.fresh, upgrade.programs
    sums = (await _control_data(upgrade, older)).get("Data page checksum version", "0") != "0"
    how = "--data-checksums" if sums else "--no-data-checksums"
    await programs.make_cluster(fresh, how, sync=upgrade.sync, cwd=upgrade.work)
    crashpoint(CrashPoint.UPGRADE_MADE)
    old, new = ("-b", str(older.directory), "-d", data), ("-B", str(programs.directory), "-D", str(fresh))
    lazy = () if upgrade.sync else ("--no-sync",)
    await _run(upgrade, programs, "pg_upgrade", *old, *new, "-U", USER, "-s", str(upgrade.socket), *lazy)
    if not sums:  # as a new cluster has them
        await _run(upgrade, programs, "pg_checksums", "--enable", "-D", str(fresh), *lazy)


async def _run(upgrade: Upgrade, programs: Programs, program: str, *arguments: str) -> str:
    """Run a program and keep what it says. Raises HostUnfit, or NoSpace where that is what it says."""
    code, output = await programs.run(program, *arguments, cwd=upgrade.work)
    with upgrade.log.open("a") as file:
        file.write(f"{program}: {code}\n{output}\n")
    if code == 0:
        return output
    if "No space left on device" in output:
        raise NoSpace(f"There is no room left on the disk to upgrade the database in {upgrade.data}.", internal=output)
    told = "\n".join(line for line in output.splitlines() if line.strip() != "Failure, exiting")
    raise HostUnfit(
        f"The database in {upgrade.data} could not be upgraded to PostgreSQL {upgrade.major}: {program}: {last_line(told)}",
        hint=f"Nothing of it was changed, and the next start tries again. The whole story is in {upgrade.log}.",
        internal=output,
    )


def _switch(upgrade: Upgrade) -> None:
    """Between these two renames there is no ``data``, which means that ``data.upgrade`` is complete."""
    files.DISK.sync_dir(upgrade.root)
    upgrade.data.rename(upgrade.before)
    files.DISK.sync_dir(upgrade.root)
    crashpoint(CrashPoint.UPGRADE_SET_ASIDE)
    _put_in_place(upgrade, upgrade.fresh)
    crashpoint(CrashPoint.UPGRADE_SWITCHED)


def _put_in_place(upgrade: Upgrade, complete: Path) -> None:
    complete.rename(upgrade.data)
    files.DISK.sync_dir(upgrade.root)
