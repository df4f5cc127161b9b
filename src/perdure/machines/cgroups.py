"""Limits on a VMM process through cgroups, version 2 or 1, without systemd.

Every machine gets a group ``perdure/<name>`` in each hierarchy that carries a controller we need. The parent ``perdure`` is
made below this process's own group (version 1, and version 2 where that is allowed) or at the root of the hierarchy (version
2: a group with processes of its own may not hand controllers down). What the host does not permit is left out, and the reason
is told to whoever asks how well a machine is confined.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perdure.machines.driver import Limits

PARENT = "perdure"
CPU_PERIOD_US = 100_000
_CONTROLLERS = ("memory", "cpu", "pids")


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where groups can be made: controller name -> directory of this process's group; ``unified`` for version 2."""

    unified: bool
    directories: Mapping[str, Path]


@dataclass(slots=True)
class Group:
    """The groups of one machine. ``missing`` says per limit (memory, cpu, pids) why it does not hold."""

    directories: tuple[Path, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, pid: int) -> None:
        """Move a process in; one that is gone already is no error."""
        for directory in self.directories:
            try:
                _write(directory / "cgroup.procs", str(pid))
            except ProcessLookupError:
                return

    def out_of_memory(self) -> bool:
        """Whether the kernel killed something of this group for the memory limit."""
        for directory in self.directories:
            for name in ("memory.events", "memory.oom_control"):
                try:
                    lines = (directory / name).read_text().splitlines()
                except OSError:
                    continue
                if any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in lines):
                    return True
        return False

    def remove(self) -> bool:
        """Remove the groups, which must be empty. Safe twice. Returns whether they are gone."""
        return all([remove_directory(directory) for directory in self.directories])


def remove_directory(directory: Path) -> bool:
    """Remove one group; False when processes are still in it."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def limits_missing(name: str) -> Mapping[str, str]:
    """Which limits (memory, cpu, pids) cannot be set here, and why: found out with a group of that name, which is removed."""
    group = create(discover(), name, Limits(memory_bytes=1 << 30, cpus=1.0, pids=64))
    group.remove()
    return group.missing


def discover(proc: Path = Path("/proc/self")) -> Hierarchies:
    """Read which hierarchies are mounted and where this process is in them (cgroups(7))."""
    mounts = _mounts(proc / "mountinfo")
    own = {}
    for line in (proc / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        for controller in controllers.split(",") if controllers else ["unified"] if number == "0" else []:
            own[controller] = path
    v1 = {name: _below(*mounts[name], own.get(name, "/")) for name in _CONTROLLERS if name in mounts}
    if v1 or "unified" not in mounts:
        return Hierarchies(unified=False, directories=v1)
    home = _below(*mounts["unified"], own.get("unified", "/"))
    return Hierarchies(unified=True, directories=dict.fromkeys(_CONTROLLERS, home))


def create(hierarchies: Hierarchies, name: str, limits: Limits) -> Group:
    """Make the machine's groups and set its limits. Never raises: what fails is explained in ``missing``."""
    group = Group()
    directories: list[Path] = []
    for controller, setting in _settings(limits, hierarchies.unified).items():
        if setting is None:
            group.missing[controller] = "no limit was asked for"
            continue
        if controller not in hierarchies.directories:
            group.missing[controller] = f"this host has no {controller} cgroup controller mounted"
            continue
        try:
            directory = _make(hierarchies, controller, name)
            if directory not in directories:
                directories.append(directory)
            for file, value in setting.items():
                _write(directory / file, value)
        except OSError as error:
            group.missing[controller] = f"the {controller} cgroup may not be written by this user or here: {error.strerror}"
    group.directories = tuple(directories)
    return group


def leftovers(hierarchies: Hierarchies, prefix: str) -> list[Path]:
    """Existing machine groups whose name starts with ``prefix``."""
    found = []
    for parent in {p for controller in hierarchies.directories for p in _parents(hierarchies, controller)}:
        if parent.is_dir():
            found += [entry for entry in parent.iterdir() if entry.is_dir() and entry.name.startswith(prefix)]
    return sorted(found)


def _settings(limits: Limits, unified: bool) -> dict[str, dict[str, str] | None]:
    """Per controller: file -> value, or None when there is nothing to limit."""
    memory = pids = cpu = None
    if limits.memory_bytes is not None:
        memory = {"memory.max" if unified else "memory.limit_in_bytes": str(limits.memory_bytes)}
    if limits.pids is not None:
        pids = {"pids.max": str(limits.pids)}
    if limits.cpus is not None:
        quota = str(int(limits.cpus * CPU_PERIOD_US))
        cpu = (
            {"cpu.max": f"{quota} {CPU_PERIOD_US}"}
            if unified
            else {"cpu.cfs_period_us": str(CPU_PERIOD_US), "cpu.cfs_quota_us": quota}
        )
    return {"memory": memory, "cpu": cpu, "pids": pids}


def _parents(hierarchies: Hierarchies, controller: str) -> list[Path]:
    own = hierarchies.directories[controller]
    if not hierarchies.unified:
        return [own / PARENT]
    root = own
    while (root.parent / "cgroup.controllers").is_file():
        root = root.parent
    return [own / PARENT] if own == root else [own / PARENT, root / PARENT]


def _make(hierarchies: Hierarchies, controller: str, name: str) -> Path:
    failure: OSError | None = None
    for parent in _parents(hierarchies, controller):
        try:
            if hierarchies.unified:
                _write(parent.parent / "cgroup.subtree_control", f"+{controller}")
            parent.mkdir(exist_ok=True)
            if hierarchies.unified:
                _write(parent / "cgroup.subtree_control", f"+{controller}")
            (parent / name).mkdir(exist_ok=True)
        except OSError as error:
            failure = error
            continue
        return parent / name
    assert failure is not None
    raise failure


def _write(path: Path, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(fd)


def _mounts(mountinfo: Path) -> dict[str, tuple[Path, str]]:
    """Controller (or "unified") -> (mount point, the group that is mounted there)."""
    found: dict[str, tuple[Path, str]] = {}
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if kind[0] == "cgroup2":
            found.setdefault("unified", (Path(fields[4]), fields[3]))
        elif kind[0] == "cgroup":
            for option in kind[2].split(","):
                found.setdefault(option, (Path(fields[4]), fields[3]))
    return found


def _below(mount: Path, root: str, path: str) -> Path:
    """Directory of group ``path`` in a mount that shows the tree from ``root`` on."""
    if path == root or not path.startswith(root):
        return mount
    return mount / path[len(root) :].lstrip("/")
