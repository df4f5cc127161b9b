"""Crash points kill what they are told to, at the pass they are told, and are free otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.core import crashpoints
from perdure.core.crashpoints import CrashPoint, Victim, crashpoint
from perdure.core.errors import InvalidRequest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "crash"
    crashpoints.arm(path)
    yield path
    crashpoints.arm(None)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_nothing_happens_where_nothing_is_armed() -> None:
    for point in CrashPoint:
        crashpoint(point, vmm=os.getpid())


def test_a_machine_dies_at_its_point_and_pass_and_the_file_says_that_it_did(file: Path, victim: subprocess.Popen[bytes]) -> None:
    crashpoint(CrashPoint.CAPTURE_PAUSED, victim.pid)  # no file: none is wanted now
    file.write_text("capture.paused vmm 2\n")
    crashpoint(CrashPoint.CAPTURE_PAUSED, victim.pid)
    crashpoint(CrashPoint.CAPTURE_COPIED, victim.pid)
    assert victim.poll() is None
    assert file.exists()
    crashpoint(CrashPoint.CAPTURE_PAUSED, victim.pid)
    assert victim.poll() == -signal.SIGKILL, "it is dead when the point has been passed"
    assert not file.exists()


def test_another_line_counts_anew(file: Path, victim: subprocess.Popen[bytes]) -> None:
    file.write_text("start.claimed vmm 2")
    crashpoint(CrashPoint.START_CLAIMED, victim.pid)
    file.write_text("start.running vmm 2")
    crashpoint(CrashPoint.START_RUNNING, victim.pid)
    assert victim.poll() is None


def test_the_server_dies_within_the_point_also_in_a_thread(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, threading; from perdure.core.crashpoints import *; from perdure.core import crashpoints\n"
        "crashpoints.arm(pathlib.Path(sys.argv[1]))\n"
        "worker = threading.Thread(target=lambda: (crashpoint(CrashPoint.CAPTURE_WRITTEN), print('after', flush=True)))\n"
        "worker.start(); worker.join(); print('after', flush=True)"
    )
    path = tmp_path / "crash"
    path.write_text("capture.written server 1")
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, b"", b"")
    assert not path.exists()


def test_a_machine_cannot_die_where_there_is_none(file: Path) -> None:
    file.write_text("create.recorded vmm 1")
    with pytest.raises(InvalidRequest, match=r"no machine at the crash point create\.recorded"):
        crashpoint(CrashPoint.CREATE_RECORDED)


@pytest.mark.parametrize(
    "line", ["", "capture.paused", "capture.paused vmm", "nowhere vmm 1", "capture.paused host 1", "a b c d"]
)
def test_a_line_that_is_no_crash_is_told(line: str) -> None:
    with pytest.raises(InvalidRequest, match="must be 'POINT VICTIM HIT'"):
        crashpoints.parse(line)


def test_a_line_is_read_as_it_is_written() -> None:
    assert crashpoints.parse("wake.recorded server 3") == (CrashPoint.WAKE_RECORDED, Victim.SERVER, 3)


def test_every_point_is_passed_somewhere() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "crashpoints.py")
    assert [point.name for point in CrashPoint if f"CrashPoint.{point.name}" not in sources] == []


def test_the_same_line_written_again_counts_anew(file: Path) -> None:
    for _ in range(2):
        with subprocess.Popen(["sleep", "60"]) as process:
            file.write_text("capture.copied vmm 1")
            crashpoint(CrashPoint.CAPTURE_COPIED, vmm=process.pid)
            assert process.wait() == -signal.SIGKILL
        assert not file.exists()
