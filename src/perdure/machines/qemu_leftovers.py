"""How VMM processes, directories and groups are named, and how those of a dead server are found and removed.

A machine's name goes, with a token of the directory that all run directories share, into QEMU's own ``-name`` and the name of
its cgroup: whatever a killed server leaves behind is found without trusting a file. A machine's directory carries a marker,
written before anything else exists, so that nothing else below the shared directory is ever removed.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import InvalidRequest
from perdure.machines import cgroups
from perdure.machines.driver import LaunchSpec
from perdure.machines.process import Watched, wait_for_exit

MARKER = "machine.name"
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}$")

#: Guest names of machines that this process has started or is starting; a sweep never touches them.
_ours: set[str] = set()


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found and removed."""

    killed: tuple[str, ...] = ()  # machine names
    directories: tuple[Path, ...] = ()
    groups: tuple[Path, ...] = ()


def check_name(name: str) -> None:
    """Raises InvalidRequest for a name that cannot go into file names and command lines."""
    if not _NAME.match(name):
        raise InvalidRequest(f"{name!r} is not a machine name: 1 to 40 letters, digits, dots, dashes and underscores.")


def guest_name(spec: LaunchSpec) -> str:
    return f"perdure-{spec.name}.{token(spec.run_dir.parent)}"


def group_name(spec: LaunchSpec) -> str:
    return f"{token(spec.run_dir.parent)}-{spec.name}"


def token(run_root: Path) -> str:
    """Ten characters that stand for the directory of all run directories."""
    return hashlib.sha256(os.fsencode(os.path.realpath(run_root))).hexdigest()[:10]


def claim(spec: LaunchSpec) -> None:
    """Make the run directory with its marker; the first thing a start does. Raises InvalidRequest when it is in use."""
    check_name(spec.name)
    if guest_name(spec) in _ours:
        raise InvalidRequest(f"A machine named {spec.name} runs already.")
    if (spec.run_dir / MARKER).is_file():  # of a dead machine
        shutil.rmtree(spec.run_dir)
    if spec.run_dir.is_dir() and any(spec.run_dir.iterdir()):
        raise InvalidRequest(
            f"The run directory {spec.run_dir.name} is not empty and not a machine's.", internal=str(spec.run_dir)
        )
    _ours.add(guest_name(spec))
    spec.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (spec.run_dir / MARKER).write_text(spec.name)


def forget(spec: LaunchSpec) -> None:
    """The machine is dead and its directory gone."""
    _ours.discard(guest_name(spec))


async def kill_start(spec: LaunchSpec) -> None:
    """Kill whatever a start that broke off has left: a jailer's child is not known before the jailer tells."""
    mark = token(spec.run_dir.parent)
    found = await asyncio.to_thread(_processes, mark)
    await _kill([pid for pid, name in found if name == spec.name], mark)


async def sweep(run_root: Path, keep: Collection[str] = ()) -> Swept:
    """Kill VMMs that an earlier server left under ``run_root`` and remove their directories and groups.

    Machines of this process are safe; ``keep`` names further ones. Idempotent. Raises DeadlineExceeded when a killed process
    does not go away.
    """
    mark = token(run_root)
    found = await asyncio.to_thread(_processes, mark)
    doomed = [(pid, name) for pid, name in found if not _kept(name, mark, keep)]
    await _kill([pid for pid, _ in doomed], mark)
    directories, groups = await asyncio.to_thread(_remove_traces, run_root, mark, keep)
    return Swept(tuple(sorted({name for _, name in doomed})), directories, groups)


async def _kill(pids: list[int], mark: str) -> None:
    watched = [process for pid in pids if (process := _watch(pid, mark)) is not None]
    for process in watched:
        process.kill()
    for process in watched:
        await wait_for_exit(process)


def _kept(name: str, mark: str, keep: Collection[str]) -> bool:
    return name in keep or f"perdure-{name}.{mark}" in _ours


def _processes(mark: str) -> list[tuple[int, str]]:
    """Pids and machine names of VMMs and their jailers with that token."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (name := _name_of(int(entry.name), mark)) is not None:
            found.append((int(entry.name), name))
    return found


def _name_of(pid: int, mark: str) -> str | None:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    for option, value in itertools.pairwise(arguments):
        if option == b"-name" and (match := re.match(rb"guest=perdure-(.+)\.([0-9a-f]{10}),", value)):
            return match[1].decode() if match[2].decode() == mark else None
    return None


def _watch(pid: int, mark: str) -> Watched | None:
    """Bind to the process and look again: its number may have passed to another since it was listed."""
    try:
        process = Watched(pid)
    except ProcessLookupError:
        return None
    return process if _name_of(pid, mark) is not None else None


def _remove_traces(run_root: Path, mark: str, keep: Collection[str]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    groups = []
    for group in cgroups.leftovers(cgroups.discover(), f"{mark}-"):
        if not _kept(group.name.removeprefix(f"{mark}-"), mark, keep) and cgroups.remove_directory(group):
            groups.append(group)
    directories = []
    for marker in run_root.glob(f"*/{MARKER}"):
        if not _kept(marker.read_text(), mark, keep):
            shutil.rmtree(marker.parent, ignore_errors=True)
            directories.append(marker.parent)
    return tuple(directories), tuple(groups)
