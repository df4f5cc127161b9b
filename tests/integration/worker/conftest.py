"""A real server over the engine in memory, and ``perdure worker`` in a process of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.core.config import Settings
from tests.fakes.api_server import FakeServer
from tests.integration.worker.stage import HANDLERS, Started

Start = Callable[..., Started]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    try:
        with FakeServer(Settings(home=home, listen_port=0, url=None, api_key=None)) as running:
            yield running
    finally:
        shutil.rmtree(home)


@pytest.fixture
def worker(server: FakeServer, tmp_path: Path) -> Iterator[Start]:
    """Start ``perdure worker`` with these words; ``environment`` is added to its own. None outlives the test."""
    started: list[Started] = []

    def start(*words: str, environment: dict[str, str] | None = None) -> Started:
        path = os.pathsep.join(part for part in (str(HANDLERS), os.environ.get("PYTHONPATH", "")) if part)
        own = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PERDURE_"))}
        own |= {"PERDURE_HOME": str(server.settings.home), "PYTHONPATH": path, "NOTES": str(tmp_path)}
        started.append(Started(words, {**own, **(environment or {})}, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.end()
