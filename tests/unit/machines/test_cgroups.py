"""The cgroup writer over made-up hierarchies: version 1, version 2, and hosts that do not let us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perdure.machines import cgroups
from perdure.machines.cgroups import Hierarchies
from perdure.machines.driver import Limits

LIMITS = Limits(memory_bytes=512 << 20, cpus=1.5, pids=64)

V1_MOUNTS = """\
30 20 0:26 / {root}/memory rw - cgroup cgroup rw,memory
31 20 0:27 / {root}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 20 0:28 /docker/abc {root}/pids rw - cgroup cgroup rw,pids
33 20 0:29 / {root}/unified rw - cgroup2 cgroup2 rw
"""
V1_GROUPS = "5:pids:/docker/abc\n4:memory:/jobs/one\n3:cpu,cpuacct:/\n0::/\n"
V2_MOUNTS = "30 20 0:26 / {root} rw - cgroup2 cgroup2 rw,nsdelegate\n"


def proc(directory: Path, mountinfo: str, groups: str) -> Path:
    made = directory / "proc"
    made.mkdir()
    (made / "mountinfo").write_text(mountinfo)
    (made / "cgroup").write_text(groups)
    return made


def test_version_1_is_found_below_this_process_group(tmp_path: Path) -> None:
    found = cgroups.discover(proc(tmp_path, V1_MOUNTS.format(root="/c"), V1_GROUPS))
    assert found == Hierarchies(
        unified=False,
        directories={"memory": Path("/c/memory/jobs/one"), "cpu": Path("/c/cpu,cpuacct"), "pids": Path("/c/pids")},
    )


def test_version_2_is_found(tmp_path: Path) -> None:
    found = cgroups.discover(proc(tmp_path, V2_MOUNTS.format(root="/c"), "0::/user.slice/me\n"))
    assert found.unified
    assert set(found.directories.values()) == {Path("/c/user.slice/me")}


def test_a_host_without_cgroups(tmp_path: Path) -> None:
    found = cgroups.discover(proc(tmp_path, "30 20 0:26 / / rw - ext4 /dev/vda rw\n", "0::/\n"))
    group = cgroups.create(found, "m1", LIMITS)
    assert set(group.missing) == {"memory", "cpu", "pids"}
    assert "no memory cgroup controller" in group.missing["memory"]
    assert group.directories == ()


def test_nothing_asked_for_is_said(tmp_path: Path) -> None:
    group = cgroups.create(Hierarchies(False, {}), "m1", Limits(pids=None))
    assert set(group.missing.values()) == {"no limit was asked for"}


class FakeKernel:
    """Directories that behave as cgroupfs: a new one has its files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
        self._files = files
        mkdir = Path.mkdir

        def mkdir_with_files(path: Path, *args: object, **options: object) -> None:
            existed = path.exists()
            mkdir(path, *args, **options)  # type: ignore[arg-type]
            if not existed:
                self.populate(path)

        def rmdir_with_files(path: Path) -> None:
            if (path / "cgroup.procs").exists() and (path / "cgroup.procs").read_text().strip():
                raise OSError(16, "Device or resource busy")
            for file in path.iterdir():
                file.unlink()
            os.rmdir(path)  # noqa: PTH106

        monkeypatch.setattr(Path, "mkdir", mkdir_with_files)
        monkeypatch.setattr(Path, "rmdir", rmdir_with_files)

    def populate(self, path: Path) -> None:
        for name, value in self._files.items():
            (path / name).write_text(value)


V1_FILES = dict.fromkeys(("cgroup.procs", "memory.limit_in_bytes", "cpu.cfs_period_us", "cpu.cfs_quota_us", "pids.max"), "")
V2_FILES = dict.fromkeys(
    ("cgroup.procs", "cgroup.controllers", "cgroup.subtree_control", "memory.max", "cpu.max", "pids.max"), ""
)


def test_version_1_limits_are_written_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = {name: tmp_path / name for name in ("memory", "cpu", "pids")}
    for directory in directories.values():
        directory.mkdir()
    FakeKernel(monkeypatch, V1_FILES)
    hierarchies = Hierarchies(False, directories)
    group = cgroups.create(hierarchies, "m1", LIMITS)
    assert group.missing == {}
    assert group.directories == tuple(directories[name] / "perdure" / "m1" for name in ("memory", "cpu", "pids"))
    assert (tmp_path / "memory/perdure/m1/memory.limit_in_bytes").read_text() == str(512 << 20)
    assert (tmp_path / "cpu/perdure/m1/cpu.cfs_quota_us").read_text() == "150000"
    assert (tmp_path / "pids/perdure/m1/pids.max").read_text() == "64"
    group.add(4242)
    assert all((directory / "cgroup.procs").read_text() == "4242" for directory in group.directories)
    assert cgroups.leftovers(hierarchies, "m") == sorted(group.directories)
    assert not group.remove(), "a group with a process in it cannot go"
    for directory in group.directories:
        (directory / "cgroup.procs").write_text("")
    assert group.remove()
    assert group.remove()
    assert cgroups.leftovers(hierarchies, "m") == []


def test_version_2_limits_share_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch, V2_FILES)
    kernel.populate(tmp_path)
    hierarchies = Hierarchies(True, dict.fromkeys(("memory", "cpu", "pids"), tmp_path))
    group = cgroups.create(hierarchies, "m1", LIMITS)
    assert group.missing == {}
    assert group.directories == (tmp_path / "perdure" / "m1",)
    assert (tmp_path / "perdure/m1/memory.max").read_text() == str(512 << 20)
    assert (tmp_path / "perdure/m1/cpu.max").read_text() == "150000 100000"
    assert (tmp_path / "perdure/m1/pids.max").read_text() == "64"


def test_version_2_falls_back_to_the_root_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that holds processes may not hand controllers down; the root may."""
    kernel = FakeKernel(monkeypatch, V2_FILES)
    kernel.populate(tmp_path)
    own = tmp_path / "session"
    own.mkdir()
    write = cgroups._write

    def refusing(path: Path, value: str) -> None:
        if path == own / "cgroup.subtree_control":
            raise OSError(16, "Device or resource busy", str(path))
        write(path, value)

    monkeypatch.setattr(cgroups, "_write", refusing)
    group = cgroups.create(Hierarchies(True, dict.fromkeys(("memory", "cpu", "pids"), own)), "m1", LIMITS)
    assert group.missing == {}
    assert group.directories == (tmp_path / "perdure" / "m1",)


def test_a_hierarchy_that_may_not_be_written_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    group = cgroups.create(Hierarchies(False, {"memory": tmp_path, "cpu": tmp_path, "pids": tmp_path}), "m1", LIMITS)
    assert set(group.missing) == {"memory", "cpu", "pids"}
    assert "Permission denied" in group.missing["memory"]
    assert group.directories == ()


def test_a_kill_for_memory_is_seen(tmp_path: Path) -> None:
    group = cgroups.Group((tmp_path,))
    assert not group.out_of_memory()
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert group.out_of_memory()
