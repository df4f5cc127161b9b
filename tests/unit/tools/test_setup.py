"""The setup script says what to do where it cannot go on. Programs it calls are stubs, so nothing is installed here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REAL = ("bash", "dirname", "mktemp", "tail", "rm", "cat", "sed", "grep", "sha256sum", "cut", "env", "mkdir", "awk", "readlink")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the script, and a PATH on which stand only a few real programs."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "tools/setup.sh", tmp_path / "tools/setup.sh")
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in REAL:
        found = shutil.which(name)
        assert found, name
        (tmp_path / "bin" / name).symlink_to(found)
    return tmp_path


def stub(checkout: Path, name: str, body: str) -> None:
    path = checkout / "bin" / name
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(0o755)


def setup(checkout: Path, *stages: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(checkout / "bin"), "HOME": str(checkout)}
    command = [checkout / "bin/bash", checkout / "tools/setup.sh", *stages]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_unknown_stage_is_named_with_those_there_are(checkout: Path) -> None:
    stub(checkout, "id", "echo 0")
    done = setup(checkout, "sytem")
    assert done.returncode == 1
    assert "no stage 'sytem'" in done.stderr and "system venv qemu10 image" in done.stderr


def test_without_rights_it_prints_the_command_to_run(checkout: Path) -> None:
    stub(checkout, "id", "echo 1000")
    stub(checkout, "sudo", "exit 1")
    stub(checkout, "dpkg-query", "printf '%s installed\\n' git cpio zstd e2fsprogs xz-utils ca-certificates")
    stub(checkout, "apt-get", f"touch {checkout}/apt-was-run")
    done = setup(checkout, "system")
    assert done.returncode == 1
    missing = "qemu-system-x86 qemu-utils mmdebstrap bubblewrap debian-archive-keyring uidmap"
    wanted = f"sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends {missing}'"
    assert wanted in done.stderr
    assert not (checkout / "apt-was-run").exists()


def test_with_rights_it_installs_what_is_missing_and_nothing_else(checkout: Path) -> None:
    stub(checkout, "id", "echo 0")
    stub(checkout, "dpkg-query", "printf '%s installed\\n' \"${@:3}\" | grep -v cpio")
    stub(checkout, "apt-get", f'echo "$@" >>{checkout}/asked')
    done = setup(checkout, "system")
    assert done.returncode == 0, done.stderr
    (asked,) = (checkout / "asked").read_text().splitlines()
    assert asked.endswith("install -y --no-install-recommends cpio")


def test_a_failing_install_fetches_the_lists_once_and_then_shows_why(checkout: Path) -> None:
    stub(checkout, "id", "echo 0")
    stub(checkout, "dpkg-query", "exit 1")
    stub(
        checkout, "apt-get", f'echo "$@" >>{checkout}/asked; case "$*" in *update) ;; *) echo "E: no such thing"; exit 100;; esac'
    )
    done = setup(checkout, "system")
    assert done.returncode == 1
    assert "E: no such thing" in done.stderr and "apt could not install" in done.stderr
    assert len((checkout / "asked").read_text().splitlines()) == 3


def test_nothing_missing_does_nothing(checkout: Path) -> None:
    stub(checkout, "id", "echo 0")
    stub(checkout, "dpkg-query", "printf '%s installed\\n' \"${@:3}\"")
    done = setup(checkout, "system")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_elsewhere_than_debian_it_names_the_missing_commands(checkout: Path) -> None:
    stub(checkout, "id", "echo 0")
    stub(checkout, "qemu-system-x86_64", "")
    done = setup(checkout, "system")
    assert done.returncode == 1
    assert "not a Debian-like system" in done.stderr and "bwrap" in done.stderr and "qemu-system-x86_64" not in done.stderr


def test_without_a_new_python_it_says_which_it_looked_for(checkout: Path) -> None:
    stub(checkout, "id", "echo 0")
    stub(checkout, "python3", "exit 1")
    done = setup(checkout, "venv")
    assert done.returncode == 1
    assert "no Python 3.11 or newer" in done.stderr and "PERDURE_SETUP_PYTHON" in done.stderr
