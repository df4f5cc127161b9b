"""What tests of executions over real HTTP share: a worker that is played, and a plain client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import pytest

from tests.fakes.api_server import FakeServer
from tests.fakes.lived_executions import Lives
from tests.fakes.workspaces import KEY


class Played:
    """A worker's doings inside the server, from outside of its loop."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._lives = Lives(server.executions)
        self.do(lambda lives: lives.serve())

    def do(self, work: Callable[[Lives], Awaitable[Any]]) -> Any:
        async def inside() -> Any:
            return await work(self._lives)

        return self._server.run(inside)

    def advance(self, seconds: float) -> None:
        self._server.run(lambda: self._server.executions.advance(seconds))


@pytest.fixture
def worker(server: FakeServer) -> Played:
    return Played(server)


@pytest.fixture
def http(server: FakeServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"{server.url}/v1", headers={"authorization": f"Bearer {KEY}"}, timeout=30) as made:
        yield made


def error_of(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]
