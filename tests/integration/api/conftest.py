"""A real server over fake services, and clients of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.core.config import Settings
from perdure.sdk import Client, Workspace
from tests.fakes.api_server import FakeServer


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeServer]:
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    try:
        with FakeServer(Settings(home=home, listen_port=0, url=None, api_key=None, auth_failures_per_min=0)) as running:
            yield running
    finally:
        shutil.rmtree(home)


@pytest.fixture
def server(shared_server: FakeServer) -> FakeServer:
    """Serving, and empty."""
    shared_server.reset()
    return shared_server


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(settings=server.settings) as made:
        yield made


@pytest.fixture
def demo(client: Client) -> Workspace:
    """A workspace named demo."""
    return Workspace.create("demo", client=client)
