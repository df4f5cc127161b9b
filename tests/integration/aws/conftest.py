"""A real server, and boto3 as it is: its requests are signed, and go over a real socket."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from perdure.access.service import OPERATOR_KEY_ID
from perdure.core.config import Settings
from perdure.core.ids import DEFAULT_TENANT
from perdure.runs.engine import State
from perdure.runs.protocol import (
    CheckpointAnswer,
    CheckpointRequest,
    InvocationInput,
    InvocationOutput,
    InvocationStatus,
    OperationUpdate,
)
from perdure.runs.service.model import Assignment, Flight, FunctionSpec, ListQuery, NewExecution
from tests.fakes.access import AWS_SECRET
from tests.fakes.api_server import FakeServer
from tests.fakes.memory_executions import MemoryExecutions


@cache
def session() -> Any:
    """One for all tests: it keeps what it has read of the services' models."""
    return boto3.Session()


def aws(url: str, service: str = "lambda", *, key_id: str = OPERATOR_KEY_ID, secret: str = AWS_SECRET, attempts: int = 1) -> Any:
    """A client as anybody would make it, but for its patience."""
    config = Config(retries={"mode": "standard", "max_attempts": attempts}, connect_timeout=30, read_timeout=60)
    pair = {"aws_access_key_id": key_id, "aws_secret_access_key": secret}
    return session().client(service, region_name="eu-central-1", endpoint_url=url, config=config, **pair)


@dataclass
class World:
    """The server's executions, and a worker of them that the test plays."""

    server: FakeServer
    worker_id: str = ""

    @property
    def runs(self) -> MemoryExecutions:
        return self.server.executions

    def serve(self, *names: str, **parts: Any) -> None:
        specs = tuple(FunctionSpec(name, **{"digest": "v1", **parts}) for name in names or ("main",))
        self.worker_id = self.server.run(lambda: self.runs.register(DEFAULT_TENANT, "test", specs)).id

    def begin(self, **parts: Any) -> str:
        """Its ARN."""
        return self.server.run(lambda: self.runs.begin(NewExecution(DEFAULT_TENANT, "main", **parts))).arn

    def take(self, wait_s: float = 0) -> Assignment:
        taken = self.server.run(lambda: self.runs.take(DEFAULT_TENANT, self.worker_id, wait_s))
        assert taken is not None
        return taken

    def token(self, taken: Assignment) -> str:
        assert isinstance(taken.event, InvocationInput)
        return taken.event.checkpoint_token

    def send(self, taken: Assignment, *updates: OperationUpdate) -> CheckpointAnswer:
        request = CheckpointRequest(checkpoint_token=self.token(taken), updates=updates, client_token="c")
        return self.server.run(lambda: self.runs.checkpoint(DEFAULT_TENANT, taken.execution_id, request))

    def answer(self, taken: Assignment, status: InvocationStatus = InvocationStatus.SUCCEEDED, **parts: Any) -> None:
        output = InvocationOutput(status=status, **parts)
        flight = Flight(taken.execution_id, taken.invocation)
        self.server.run(lambda: self.runs.answer(DEFAULT_TENANT, flight, output))

    def forget(self) -> None:
        """Stop and delete all executions."""

        async def forget() -> None:
            for one in (await self.runs.find(DEFAULT_TENANT, ListQuery())).executions:
                execution_id = one.durable_execution_arn.rpartition("/")[2]
                await self.runs.stop(DEFAULT_TENANT, execution_id, None)
                await self.runs.delete(DEFAULT_TENANT, execution_id)

        self.server.run(forget)

    def advance(self, seconds: float) -> None:
        self.server.run(lambda: self.runs.advance(seconds))

    def state(self, arn: str) -> State:
        return self.runs.run_of(arn.rpartition("/")[2]).state


@pytest.fixture(scope="session")
def _serving() -> Iterator[FakeServer]:
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    try:
        with FakeServer(Settings(home=home, listen_port=0, url=None, api_key=None, auth_failures_per_min=0)) as running:
            yield running
    finally:
        shutil.rmtree(home)


@pytest.fixture
def world(_serving: FakeServer) -> World:
    """Serving, with nothing in it."""
    _serving.reset()
    return World(_serving)


@pytest.fixture
def client(world: World) -> Any:
    return aws(world.server.url)


@pytest.fixture
def tasks(world: World) -> Any:
    return aws(world.server.url, "stepfunctions")
