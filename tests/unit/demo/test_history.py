"""The demo's input: this repository as a bundle, or the package's sources where there is none. Both become a checkout."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from perdure.demo import history as module
from perdure.demo.history import History, history


def check_out(source: History, root: Path) -> tuple[str, int, int]:
    """Do in ``root`` what the workspace does in /root."""
    (root / Path(source.path).name).write_bytes(source.content)
    script = source.commands.replace("/root/", f"{root}/").replace("-C /root ", f"-C {root} ")
    subprocess.run(["sh", "-c", script], check=True)
    git = ["git", "-C", str(root / "project")]
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    commits = int(subprocess.check_output([*git, "rev-list", "--count", "HEAD"], text=True))
    names = len(subprocess.check_output([*git, "ls-files"], text=True).splitlines())
    assert subprocess.check_output([*git, "status", "--porcelain"], text=True) == ""
    return head, commits, names


async def test_a_checkout_gives_its_own_history(tmp_path: Path) -> None:
    source = await history()
    head, commits, names = check_out(source, tmp_path)
    assert source.what == "this repository's history"
    assert head == source.head
    assert commits > 10
    assert names > 50


async def test_an_installed_package_gives_its_sources_with_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "checkout", lambda: None)
    source = await history()
    _, commits, names = check_out(source, tmp_path)
    assert source.what == "the installed package's sources"
    assert commits == 2
    assert names > 50


async def test_a_repository_that_git_cannot_read_falls_back_to_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(module, "checkout", lambda: tmp_path)
    assert (await history()).what == "the installed package's sources"


async def test_the_package_holds_no_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "checkout", lambda: None)
    packed = tmp_path / "package.tar.gz"
    packed.write_bytes((await history()).content)
    with tarfile.open(packed) as archive:
        assert not [name for name in archive.getnames() if "__pycache__" in name]
