"""resume.json: whole or not at all, and never an old one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from perdure.guest import resume

ANSWER: dict[str, Any] = {"clock_step_ns": 1_500_000_000, "dropped": 2, "running": ["exe_1"], "lost": [], "failed": ["clock: no"]}
HOOK = {"name": "10-a", "outcome": "ok", "exit_code": 0, "ms": 250, "output": "x\n"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def read(root: Path) -> Any:
    return json.loads((root / "run/perdure/resume.json").read_bytes())


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_what_the_host_told_and_what_the_agent_found_are_one_report() -> None:
    report = resume.compose({"generation": 3, "memory": "kept"}, {**ANSWER, "hooks": [HOOK]})
    assert report == {
        "generation": 3,
        "memory": "kept",
        "clock_step_s": 1.5,
        "connections_dropped": 2,
        "execs_running": ["exe_1"],
        "execs_lost": [],
        "problems": ["clock: no"],
        "hooks": [{"name": "10-a", "outcome": "ok", "exit_code": 0, "seconds": 0.25, "output": "x\n"}],
    }


def test_it_is_replaced_and_everybody_may_read_it(root: Path) -> None:
    for generation in (1, 2):
        resume.write(str(root), {"generation": generation})
        assert read(root) == {"generation": generation}
    place = root / "run/perdure"
    assert names(place) == ["resume.json"]
    assert ((place / "resume.json").stat().st_mode & 0o777, place.stat().st_mode & 0o755) == (0o644, 0o755)


def test_who_reads_while_it_is_replaced_has_the_whole_old_one(root: Path) -> None:
    resume.write(str(root), {"generation": 1})
    with (root / "run/perdure/resume.json").open() as file:
        resume.write(str(root), {"generation": 2})
        assert json.load(file) == {"generation": 1}


def test_a_link_leads_nowhere_else(root: Path) -> None:
    (root / "elsewhere").mkdir()
    (root / "run/perdure").symlink_to(root / "elsewhere")
    with pytest.raises(OSError, match=r"."):
        resume.write(str(root), {})
    assert names(root / "elsewhere") == []


def test_what_a_user_put_in_its_place_is_not_opened(root: Path) -> None:
    place = root / "run/perdure"
    place.mkdir()
    os.mkfifo(place / ".resume.json.new")  # who opened it would wait for a reader for ever
    (root / "precious").write_text("kept")
    (place / "resume.json").symlink_to(root / "precious")
    resume.write(str(root), {"generation": 1})
    assert read(root) == {"generation": 1} and (root / "precious").read_text() == "kept"


def test_when_it_cannot_be_written_the_old_one_goes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume.write(str(root), {"generation": 1})

    def full(_fd: int, data: bytes) -> int:
        return len(data) - 1

    monkeypatch.setattr(resume.os, "write", full)
    with pytest.raises(OSError, match="No space") as raised:
        resume.write(str(root), {"generation": 2})
    assert raised.value.errno == errno.ENOSPC
    assert names(root / "run/perdure") == []


def test_without_a_run_directory_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        resume.write(str(tmp_path), {})
