"""What the host can see from outside: VMM processes below the server, their CPU time and memory, and bytes on disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from perdure.core.config import Settings
from perdure.db.programs import processes_in

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> set[int]:
    """Every process below ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def vmms(server_pid: int) -> set[int]:
    """The VMM processes of a server, those that wait in its pool included."""
    return {pid for pid in descendants(server_pid) if _name(pid).startswith("qemu")}


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used; 0 when it is gone."""
    stat = _stat(pid)
    return (int(stat[11]) + int(stat[12])) / _TICKS_PER_S if stat is not None else 0.0


def private_bytes(pids: Iterable[int]) -> int:
    """Memory that would be free if these processes ended: their private pages, not the shared base."""
    return sum(_rollup(pid, "Private_") for pid in pids)


def proportional_bytes(pids: Iterable[int]) -> int:
    """Their memory, with what several processes share counted once among them."""
    return sum(_rollup(pid, "Pss:") for pid in pids)


def resident_bytes(pid: int) -> int:
    return _rollup(pid, "Rss:")


def _rollup(pid: int, *names: str) -> int:
    """Bytes of these lines of the process's smaps_rollup; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(names))


def database(settings: Settings) -> set[int]:
    """The processes of an embedded PostgreSQL; none of an external one."""
    return set(processes_in(settings.home / "db" / "data"))


def stored_bytes(directory: Path) -> int:
    """Bytes that the files below ``directory`` take on disk: holes cost nothing, hard links are counted once."""
    seen: dict[tuple[int, int], int] = {}
    for parent, directories, names in os.walk(directory):  # unlike Path.rglob, it goes on when a directory is removed under it
        for name in (*directories, *names):
            try:
                status = Path(parent, name).lstat()
            except FileNotFoundError:
                continue  # removed meanwhile
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def kill(pid: int) -> None:
    """SIGKILL, as the host's memory killer would."""
    os.kill(pid, signal.SIGKILL)


def mapped_files(pids: Iterable[int], name: str) -> set[tuple[str, int]]:
    """(device, inode) of every file of that name that one of the processes has mapped."""
    found = set()
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # it ended meanwhile
        for line in text.splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].rpartition("/")[2] == name:
                found.add((fields[3], int(fields[4])))
    return found
