"""What the host sees: process trees, memory, and bytes on disk, on real processes and files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.core.config import Settings
from perdure.demo import observe


def test_descendants_are_found_through_the_process_between() -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); sys.stdin.read(); p.kill()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as between:
        assert between.stdout is not None
        grandchild = int(between.stdout.readline())
        assert {between.pid, grandchild} <= observe.descendants(os.getpid())
        assert grandchild in observe.descendants(between.pid)
        assert os.getpid() not in observe.descendants(os.getpid())
        assert observe.vmms(between.pid) == set()
        between.communicate(b"")


def test_private_memory_counts_what_a_process_made_its_own_and_forgives_dead_ones() -> None:
    before = observe.private_bytes({os.getpid()})
    mine = bytearray(os.urandom(32 << 20))
    assert observe.private_bytes({os.getpid(), 2**22 + 1}) - before > 24 << 20
    assert len(mine) == 32 << 20


def test_resident_and_proportional_memory_of_ones_own_and_of_dead_processes() -> None:
    resident, proportional = observe.resident_bytes(os.getpid()), observe.proportional_bytes({os.getpid(), 2**22 + 1})
    assert resident >= proportional > 1 << 20
    assert observe.resident_bytes(2**22 + 1) == 0


def test_a_database_is_found_by_the_directory_that_it_works_in(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert observe.database(settings) == set()
    data = tmp_path / "db" / "data"
    data.mkdir(parents=True)
    assert observe.database(settings) == set()
    with subprocess.Popen(["sleep", "60"], cwd=data) as process:
        assert observe.database(settings) == {process.pid}
        process.kill()


def test_stored_bytes_count_blocks_not_holes_and_links_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    empty = observe.stored_bytes(tmp_path)
    (tmp_path / "deep" / "full").write_bytes(os.urandom(1 << 20))
    os.link(tmp_path / "deep" / "full", tmp_path / "again")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    assert 1 << 20 <= observe.stored_bytes(tmp_path) - empty < (1 << 20) + (1 << 17)


def test_what_is_removed_while_it_is_counted_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "full").write_bytes(os.urandom(1 << 20))
    look = Path.lstat

    def the_other_goes(path: Path) -> os.stat_result:
        if path.name == "full":
            shutil.rmtree(tmp_path / ("other" if path.parent.name == "one" else "one"), ignore_errors=True)
        return look(path)

    monkeypatch.setattr(Path, "lstat", the_other_goes)
    assert 1 << 20 <= observe.stored_bytes(tmp_path) < (1 << 20) + (1 << 17)


def test_cpu_time_of_a_dead_process_is_zero() -> None:
    assert observe.cpu_s(os.getpid()) > 0
    assert observe.cpu_s(2**22 + 1) == 0
