"""A built wheel holds all that a server needs and nothing else, and works from outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.style.source import ROOT, files

SHIPPED = {".py", ".sql", ".toml", ".typed", ".mako", ".sh", ".json", ".html", ".css", ".js", ".mjs", ""}


@pytest.fixture(scope="module")
def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_is_the_package_and_its_metadata(members: set[str]) -> None:
    source = {path.relative_to(ROOT / "src").as_posix() for path in files(below="src")}
    assert {name for name in members if ".dist-info/" not in name} == source
    kinds = {Path(name).suffix for name in source}
    assert kinds <= SHIPPED, f"{kinds - SHIPPED}: is this meant to be shipped? Then name it here."


@pytest.mark.parametrize("needed", ["perdure/py.typed", "perdure/guest/__init__.py", "perdure/wire/guest/__init__.py"])
def test_the_wheel_holds(needed: str, members: set[str]) -> None:
    assert needed in members


def test_the_wheel_holds_every_query_and_recipe(members: set[str]) -> None:
    assert [name for name in members if name.endswith(".sql")]
    assert [name for name in members if name.startswith("perdure/images/assets/") and name.endswith(".toml")]


def test_the_metadata_names_licence_command_and_python(wheel: Path, members: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = {name.split(".dist-info/")[1]: archive.read(name).decode() for name in members if ".dist-info/" in name}
    assert "License-Expression: Apache-2.0" in text["METADATA"]
    assert "Requires-Python: >=3.11" in text["METADATA"]
    assert "perdure = perdure.cli.main:main" in text["entry_points.txt"]
    assert text["licenses/LICENSE"].lstrip().startswith("Apache License")


def test_the_command_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import perdure; print(perdure.__file__); from perdure.cli.main import main; main()"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert "create" in done.stdout and "demo" in done.stdout
