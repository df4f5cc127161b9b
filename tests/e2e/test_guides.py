"""The documents that promise to run do run, each against a server of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import documents
from tests.fakes.database import plant

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs/guides").glob("*.md")) if path.stem not in documents.NEED_IMAGES),
]
#: Those that ``make test`` runs; the others are second-line, since their every step is tested elsewhere too.
FIRST = {"README", "first-workspace", "first-agent"}
PARAMETERS = [pytest.param(path, id=path.stem, marks=() if path.stem in FIRST else pytest.mark.long) for path in GUIDES]


def _free_port() -> int:
    """A guide that speaks TCP must know the port before there is a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def environment(home: Path, images_dir: Path, base_image: Path) -> Iterator[dict[str, str]]:
    """What a reader's shell has, with a home of its own; a server that a failed guide leaves is stopped."""
    scripts = Path(sys.executable).parent
    names = {
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        "PERDURE_HOME": str(home),
        "PERDURE_IMAGE_DIR": str(images_dir),
        "PERDURE_LISTEN_PORT": str(_free_port()),
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "LANG": "C.UTF-8",
    }
    try:
        yield names
    finally:
        subprocess.run([scripts / "perdure", "down"], env=names, capture_output=True, timeout=120, check=False)


@pytest.mark.qemu
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", PARAMETERS)
def test_a_guide_runs_as_it_stands(document: Path, tmp_path: Path, home: Path, environment: dict[str, str]) -> None:
    if document.stem != "README":  # which is the first start of a reader
        plant(home)
    assert documents.run(document, tmp_path, environment) > 0
