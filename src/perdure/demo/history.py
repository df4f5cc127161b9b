"""The demo's real input: a git history, as a bundle.

In a checkout it is this repository's own. An installed wheel has no repository around it: then the workspace's own git makes a
history out of the installed package's source files, one commit for each directory, and nothing is fetched from anywhere.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import perdure
from perdure.core.errors import BuildFailed

PACKAGE = Path(perdure.__file__).resolve().parent

#: Commits the unpacked package in a few steps, so that the history has a shape; each commit costs an emulated guest seconds.
MAKE_HISTORY = """
set -e
cd /root/project
git init -q -b main .
git config user.name demo
git config user.email demo@perdure.invalid
git add '*.py'
git commit -q -m "Add the code"
git add .
git diff --cached --quiet || git commit -q -m "Add what the code needs"
"""

CLONE = """
set -e
git clone -q -b main /root/history.bundle /root/project
git -C /root/project config user.name demo
git -C /root/project config user.email demo@perdure.invalid
"""


@dataclass(frozen=True, slots=True)
class History:
    """Bytes to put at ``path`` in the workspace, and the shell commands that make /root/project of them."""

    what: str
    path: str
    content: bytes
    commands: str
    head: str | None  # the commit that the checkout must have, where the host knows it


def checkout() -> Path | None:
    """The repository that this package is imported from, if it is."""
    root = PACKAGE.parent.parent
    return root if (root / ".git").exists() and (root / "src" / "perdure") == PACKAGE and shutil.which("git") else None


async def history() -> History:
    """The best history there is here."""
    root = checkout()
    if root is not None:
        try:
            return await _bundle(root)
        except BuildFailed:
            pass  # a checkout without commits, or one that git refuses to read: the package itself is there anyway
    return _package()


async def _bundle(root: Path) -> History:
    from perdure.images.command import run

    with tempfile.TemporaryDirectory(prefix="perdure-demo-") as scratch:
        file = Path(scratch) / "history.bundle"
        git = ["git", "-c", "safe.directory=*", "-C", str(root)]
        head = (await run([*git, "rev-parse", "HEAD"], what="git rev-parse")).strip()
        # The bundle names a branch, whatever the checkout calls the commit it stands on.
        clone = Path(scratch) / "clone.git"
        await run(
            ["git", "-c", "safe.directory=*", "clone", "-q", "--bare", "--no-hardlinks", str(root), str(clone)], what="git clone"
        )
        await run(["git", "-C", str(clone), "update-ref", "refs/heads/main", head], what="git update-ref")
        await run(["git", "-C", str(clone), "bundle", "create", "-q", str(file), "main"], what="git bundle")
        content = file.read_bytes()
    return History("this repository's history", "/root/history.bundle", content, CLONE, head)


def _package() -> History:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(PACKAGE, "project", filter=_is_source)
    commands = "tar -xzf /root/package.tar.gz -C /root --no-same-owner\n" + MAKE_HISTORY
    return History("the installed package's sources", "/root/package.tar.gz", packed.getvalue(), commands, None)


def _is_source(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(entry.name).name
    return None if name.startswith(".") or name == "__pycache__" else entry
