"""A real server, and boto3 as it is: its requests are signed, and go over a real socket."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import psycopg
import pytest
from botocore.config import Config

from perdure.access.model import OPERATOR
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
from perdure.runs.service.model import Assignment, Executions, Flight, FunctionSpec, ListQuery, NewExecution
from perdure.runs.service.service import ExecutionService
from tests.fakes.access import AWS_SECRET
from tests.fakes.api_server import FakeServer
from tests.fakes.database import fresh_url
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
    """The server's executions, in memory or in a database, and a worker of them that the test plays."""

    server: FakeServer
    worker_id: str = ""

    @property
    def runs(self) -> Executions:
        return self.server.services.executions

    @property
    def secret(self) -> str:
        """Of the operator's pair."""
        return self.server.services.access.pair(OPERATOR).secret_access_key

    def serve(self, *names: str, **parts: Any) -> None:
        specs = tuple(FunctionSpec(name, **{"digest": "v1", **parts}) for name in names or ("main",))
        self.worker_id = self.server.run(lambda: self.runs.register(DEFAULT_TENANT, "test", specs)).id

    def begin(self, **parts: Any) -> str:
        """Its ARN."""
        return self.server.run(lambda: self.runs.begin(NewExecution(DEFAULT_TENANT, "main", **parts))).arn

    def take(self, wait_s: float = 0) -> Assignment:
        self.settle()
        taken = self.server.run(lambda: self.runs.take(DEFAULT_TENANT, self.worker_id, wait_s))
        assert taken is not None
        return taken

    def settle(self) -> None:
        """Until what follows from what was done is done."""
        if isinstance(service := self.runs, ExecutionService):
            self.server.run(service.settled)

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
        """Move the clock; what is due by then has happened."""

        async def advance() -> None:
            if isinstance(self.runs, MemoryExecutions):
                await self.runs.advance(seconds)
                return
            assert isinstance(self.runs, ExecutionService)
            self.server.shift_clock(seconds)
            await self.runs.settled()
            await self.runs.clockwork.turn()
            await self.runs.settled()

        self.server.run(advance)

    def state(self, arn: str) -> State:
        runs, execution_id = self.runs, arn.rpartition("/")[2]
        if isinstance(runs, MemoryExecutions):
            return runs.run_of(execution_id).state
        assert isinstance(runs, ExecutionService)
        self.settle()
        return self.server.run(lambda: runs._decider.read(DEFAULT_TENANT, execution_id)).state


@contextmanager
def _home() -> Iterator[Settings]:
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    try:
        yield Settings(home=home, listen_port=0, url=None, api_key=None, auth_failures_per_min=0)
    finally:
        shutil.rmtree(home)


@pytest.fixture(scope="session")
def in_memory() -> Iterator[FakeServer]:
    with _home() as settings, FakeServer(settings) as running:
        yield running


@pytest.fixture(scope="session")
def in_database() -> Iterator[tuple[FakeServer, str]]:
    """With the URL of its database."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    try:
        url = loop.run_until_complete(stack.enter_async_context(fresh_url()))
        with _home() as settings, FakeServer(settings, database_url=url, has_runs=True) as running:
            yield running, url
    finally:
        loop.run_until_complete(stack.aclose())
        loop.close()


@pytest.fixture(params=["memory", "database"])
def world(request: pytest.FixtureRequest) -> World:
    """Serving, with nothing in it."""
    if request.param == "memory":
        server = request.getfixturevalue("in_memory")
        server.reset()
        return World(server)
    server, url = request.getfixturevalue("in_database")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")  # no trigger keeps a history from being forgotten
        connection.execute("truncate functions, workers, executions, execution_operations, execution_entries cascade")
    return World(server)


@pytest.fixture
def client(world: World) -> Any:
    return aws(world.server.url, secret=world.secret)


@pytest.fixture
def tasks(world: World) -> Any:
    return aws(world.server.url, "stepfunctions", secret=world.secret)
