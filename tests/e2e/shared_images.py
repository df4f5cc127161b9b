"""An image cache of a test's own, whose big files are shared with the usual one: what it changes, nobody else sees."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def share_images(source: Path, digest: str, target: Path, *, goldens: bool = True) -> None:
    """The image of that digest, the names, the agent releases, the fetched packages and what is known of the host's KVM, of
    ``source``, below ``target``."""
    (target / "blobs").mkdir(parents=True)
    how = ["-l"] if source.stat().st_dev == target.stat().st_dev else ["--sparse=always"]
    for path in (*(source / name for name in ("names", "agents", "cache", "accelerator.json")), source / "blobs" / digest):
        if path.exists():
            subprocess.run(["cp", "-a", *how, str(path), str(target / path.relative_to(source).parent)], check=True)
    if not goldens:
        shutil.rmtree(target / "blobs" / digest / "golden")
        (target / "blobs" / digest / "golden").mkdir()
