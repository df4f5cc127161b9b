"""``perdure demo`` and ``perdure bench`` as a user runs them: steps hold, documents have their shape, nothing is left. The demo
is run by a user without a checkout: from the wheel, in an empty environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

COMMAND = Path(sys.executable).parent / "perdure"
pytestmark = [pytest.mark.qemu, pytest.mark.slow]


@dataclass
class Place:
    """Where the demo puts its temporary home, and the environment that makes it do so."""

    directory: Path
    environment: dict[str, str]

    def left_files(self) -> list[str]:
        return sorted(str(path.relative_to(self.directory)) for path in self.directory.rglob("*"))

    def left_processes(self) -> list[str]:
        """Command lines of processes that name the place or work in it."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                where = line + str((entry / "cwd").readlink()) + (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it ended, or it is another user's
            if str(self.directory) in where:
                found.append(line)
        return found


@pytest.fixture
def place(home: Path, images_dir: Path, base_image: Path) -> Iterator[Place]:
    home.chmod(0o711)  # the embedded database's user passes through
    names = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "TMPDIR": str(home),
        "PERDURE_IMAGE_DIR": str(images_dir),
        "LANG": "C.UTF-8",
        "COLUMNS": "200",
    }
    yield Place(home, names)


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The command of an environment that has the wheel and what it depends on."""
    uv = Path(sys.executable).parent / "uv"
    python = tmp_path / "venv/bin/python"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, tmp_path / "venv"], check=True)
    locked = ["--constraint", ROOT / "requirements.lock"]
    subprocess.run([uv, "pip", "install", "-q", "--python", python, *locked, wheel], check=True)
    return python.with_name("perdure")


def run(place: Place, *arguments: str, command: Path = COMMAND, timeout: float = 1500) -> dict[str, Any]:
    done = subprocess.run(
        [command, *arguments], env=place.environment, cwd=place.directory, capture_output=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout.decode()}\n{done.stderr.decode()}"
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.timeout(1800)
def test_the_demo_of_an_installed_wheel_holds_on_real_input_and_leaves_nothing(place: Place, installed: Path) -> None:
    document = run(place, "demo", "--json", command=installed)
    assert document["ok"] is True
    assert [step["name"] for step in document["steps"] if not step["ok"]] == []
    assert len(document["steps"]) >= 11
    assert all(set(step) == {"name", "ok", "seconds", "detail"} and step["detail"] for step in document["steps"])
    figures = {figure["name"]: figure for figure in document["figures"]}
    assert set(figures) == {
        "cold boot", "hibernate", "wake (first byte)", "checkpoint pause", "fork (each)", "bytes per sleeping workspace",
    }  # fmt: skip
    assert all(figure["value"] > 0 for figure in figures.values())
    assert figures["wake (first byte)"]["ratio_to_cold_boot"] < 1
    assert place.left_files() == []
    assert place.left_processes() == []


@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("step", ["Create a workspace", "Index it"])
def test_ctrl_c_in_the_middle_ends_with_one_line_and_leaves_nothing(place: Place, step: str) -> None:
    """The signal goes to the whole foreground group, as a terminal sends it."""
    with subprocess.Popen(
        [COMMAND, "demo"], env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if step.encode() in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        _, complaint = process.communicate(timeout=600)
    assert process.returncode == 130, complaint.decode()
    assert complaint.decode().splitlines() == ["Interrupted; everything the demo started has been put away."]
    assert place.left_files() == []
    assert place.left_processes() == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_benchmark_prints_the_rows_that_scripts_read_and_leaves_nothing(place: Place) -> None:
    document = run(place, "bench", "wake", "--samples", "2", "--json")
    assert document["suite"] == "wake"
    assert document["host"]["cpus"] >= 1
    rows = {row["name"]: row for row in document["rows"]}
    assert all({"name", "value", "unit", "baseline", "ratio", "goal", "met"} <= set(row) for row in rows.values())
    for name in ("request to guest running", "request to first agent reply", "request to first exec reply"):
        assert rows[f"{name} p50"]["baseline"]
        assert rows[f"{name} p50"]["ratio"] > 0
        assert rows[f"{name} p95"]["met"] is None
    assert rows["base files under 5 workspaces"]["value"] == 1
    assert rows["processes of 5 sleeping workspaces"]["value"] == 0
    assert rows["bytes of a sleeping workspace after the light script"]["value"] > 5
    assert 0 < rows["bytes of each of 5 fresh sleeping workspaces"]["value"] < 12
    assert place.left_files() == []
    assert place.left_processes() == []


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_benchmark_of_snapshots_prints_its_rows_and_leaves_nothing(place: Place) -> None:
    document = run(place, "bench", "snapshots", "--samples", "1", "--json", timeout=2700)
    rows = {row["name"]: row for row in document["rows"]}
    fork = rows["fork of 8 branches of a running workspace p50"]
    assert fork["baseline"].startswith("bare: 8 restores") and fork["ratio"] > 0
    assert rows["fork of 8 branches of a running workspace, against cold boots p50"]["ratio"] < 1
    assert 0 < rows["private memory of a branch after the light script, without its delta"]["value"] < 500
    cold = next(row for name, row in rows.items() if name.startswith("wake with cold caches"))
    assert (cold["value"] is None) == ("it takes root" in cold["note"])
    assert rows["hibernate with 1000 MiB of live data in 2048 MiB, all of it changed p50"]["baseline_value"] > 0
    assert rows["wake with 1000 MiB of live data after rebase, request to first agent reply p50"]["ratio"] > 0
    assert rows["processor use of a compaction while asleep p50"]["value"] > 0
    assert rows["dedup ratio of 3 light workspaces of one image"]["value"] > 1
    assert place.left_files() == []
    assert place.left_processes() == []


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_benchmark_of_a_server_prints_its_rows_and_leaves_nothing(place: Place) -> None:
    document = run(place, "bench", "serve", "--samples", "2", "--json", timeout=2700)
    rows = {row["name"]: row for row in document["rows"]}
    assert rows["warm command, SDK to exit code and back p50"]["ratio"] > 0
    assert rows["streams of 20 at once on one workspace that failed or lost a byte"]["value"] == 0
    assert rows["upload p50"]["baseline_value"] > 0 and rows["download p50"]["baseline_value"] > 0
    assert rows["6 sleeping workspaces woken at once: wakes that failed"]["value"] == 0
    assert rows["6 sleeping workspaces woken at once: machines starting at a time"]["value"] <= 2
    assert rows["memory of the idle API process"]["value"] > 0 and rows["memory of its database"]["value"] > 0
    assert place.left_files() == []
    assert place.left_processes() == []


def test_an_unknown_suite_is_one_sentence(place: Place) -> None:
    done = subprocess.run(
        [COMMAND, "bench", "nothing", "--json"], env=place.environment, capture_output=True, timeout=60, check=False
    )
    error = json.loads(done.stderr)["error"]
    assert (done.returncode, error["code"], error["message"]) == (1, "invalid_request", "There is no benchmark suite 'nothing'.")
    assert "wake" in error["hint"]
