"""The unit for systemd: systemd finds nothing wrong with it, and the server under it has the settings of whoever printed it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.cli import unit
from perdure.cli.main import main
from perdure.core.config import SECRETS, Settings

COMMAND = [sys.executable, "-m", "perdure.cli.main", "up"]
ANALYZE = shutil.which("systemd-analyze")


def settings_of(text: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What a server would read that was started with the unit's environment and nothing else."""
    for name in [name for name in os.environ if name.startswith("PERDURE_")]:
        monkeypatch.delenv(name)
    for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE):
        (word,) = shlex.split(line.replace("%%", "%"))
        name, _, value = word.partition("=")
        monkeypatch.setenv(name, value)
    return Settings()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"home": Path('/srv/a b/100%/"quoted"/$HOME/it\'s'), "shutdown_deadline_s": 600.0},
        {"allowed_hosts": ("a.example", "b.example"), "jail": "require", "listen_port": 0, "lease_s": 0.5},
    ],
    ids=["nothing", "odd letters", "many"],
)
def test_the_server_gets_the_settings_of_who_printed_it(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERDURE_HOME", raising=False)
    settings = Settings(**given)
    text = unit.text(settings, COMMAND, 120.0)
    assert settings_of(text, monkeypatch) == settings


@pytest.mark.parametrize(
    "given",
    [
        {"database_url": "postgresql://me:secret-2@host/db"},
        {"store_url": "s3://bucket", "store_options": ("access_key_id=me", "secret_access_key=secret-3")},
        {"database_url": "postgresql://me:secret-2@host/db", "store_options": ("secret_access_key=secret-3",)},
    ],
    ids=["database", "store", "both"],
)
def test_secrets_stay_out_of_a_file_that_everybody_may_read(given: dict[str, Any]) -> None:
    settings = Settings(home=Path("/srv/perdure"), api_key="secret-1", **given)
    text = unit.text(settings, COMMAND, 120.0)
    assert "secret" not in text
    assert "secret" not in repr(settings)
    assert "EnvironmentFile=/srv/perdure/environment" in text.splitlines(), "else it would start with something else"
    (comment,) = [line for line in text.splitlines() if line.startswith("# Put ")]
    assert set(re.findall(r"PERDURE_(\w+)=…", comment)) == {name.upper() for name in given if name != "store_url"}


def test_what_may_hold_a_secret_is_marked() -> None:
    assert {"api_key", "database_url", "store_options"} == SECRETS


@pytest.mark.parametrize("deadline_s", [1.0, 60.0, 3600.0])
def test_systemd_waits_longer_than_the_server_may_take(
    deadline_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_SHUTDOWN_DEADLINE_S", str(deadline_s))
    assert main(["up", "--systemd"]) == 0
    printed = capsys.readouterr().out
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", printed, re.MULTILINE)
    assert int(stop_s) > deadline_s
    assert f"Environment=PERDURE_SHUTDOWN_DEADLINE_S={deadline_s}" in printed.splitlines(), "the server has the same deadline"


def test_a_stop_is_the_servers_to_do_and_a_crash_is_repaired() -> None:
    """SIGTERM goes to the server alone, as its machines must live until they are captured; an exit code of 0 is no crash."""
    lines = unit.text(Settings(), COMMAND, 120.0).splitlines()
    assert {"Type=notify", "KillMode=mixed", "Restart=on-failure", "Delegate=yes", "OOMPolicy=continue"} <= set(lines)


@pytest.mark.parametrize("user", [0, 65534])
def test_it_runs_as_the_user_whose_home_it_is(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(unit.getpass, "getuser", lambda: "alice")
    assert ("User=alice" in unit.text(Settings(), COMMAND, 120.0).splitlines()) is (user != 0)


@pytest.mark.skipif(ANALYZE is None, reason="this host has no systemd-analyze (package systemd)")
@pytest.mark.parametrize(
    "given",
    [{}, {"home": Path('/srv/a b/100%/"quoted"'), "database_url": "postgresql://host/db", "qemu": "/opt/a b/qemu"}],
    ids=["plain", "odd letters"],
)
def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path, given: dict[str, Any]) -> None:
    path = tmp_path / "perdure.service"
    path.write_text(unit.text(Settings(**given), [*COMMAND, "--odd=$HOME 100%"], 120.0))
    assert ANALYZE is not None
    done = subprocess.run([ANALYZE, "verify", "--man=no", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
