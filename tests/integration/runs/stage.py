"""Servers of durable executions over one real database, and functions that are driven by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from perdure.core.clock import SystemClock
from perdure.core.ids import DEFAULT_TENANT, TenantId
from perdure.db.database import Database
from perdure.runs.engine import Rules
from perdure.runs.protocol import (
    Action,
    CheckpointAnswer,
    CheckpointRequest,
    InvocationInput,
    InvocationOutput,
    InvocationStatus,
    OperationType,
    OperationUpdate,
)
from perdure.runs.service.model import Assignment, Flight, FunctionSpec, NewExecution
from perdure.runs.service.service import ExecutionService
from tests.fakes.database import fresh_url

TENANT = DEFAULT_TENANT
OTHER = TenantId("ten_other")
MAIN = FunctionSpec("main", "v1")


def update(kind: str, action: str, op: str, **options: Any) -> OperationUpdate:
    return OperationUpdate(id=op, type=OperationType(kind), action=Action(action), **options)


def waits(seconds: int, op: str = "wait") -> OperationUpdate:
    return OperationUpdate.model_validate({"Id": op, "Type": "WAIT", "Action": "START", "WaitOptions": {"WaitSeconds": seconds}})


def asks(op: str = "ask", timeout_s: int = 0) -> OperationUpdate:
    options = {"TimeoutSeconds": timeout_s}
    return OperationUpdate.model_validate({"Id": op, "Type": "CALLBACK", "Action": "START", "CallbackOptions": options})


def invokes(function: str, payload: str = "1", op: str = "invoke") -> OperationUpdate:
    options = {"FunctionName": function}
    return OperationUpdate.model_validate(
        {"Id": op, "Type": "CHAINED_INVOKE", "Action": "START", "Payload": payload, "ChainedInvokeOptions": options}
    )


@dataclass
class Running:
    """One invocation of a function that a test plays."""

    service: ExecutionService
    work: Assignment
    token: str = field(init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.work.event, InvocationInput)
        self.token = self.work.event.checkpoint_token

    @property
    def flight(self) -> Flight:
        return Flight(self.work.execution_id, self.work.invocation)

    async def checkpoint(self, *updates: OperationUpdate, key: str | None = None) -> CheckpointAnswer:
        request = CheckpointRequest(checkpoint_token=self.token, updates=updates, client_token=key)
        answer = await self.service.checkpoint(TENANT, self.work.execution_id, request)
        self.token = answer.checkpoint_token or ""
        return answer

    async def answer(self, status: str, result: str | None = None) -> None:
        await self.service.answer(TENANT, self.flight, InvocationOutput(status=InvocationStatus(status), result=result))


@dataclass
class Stage:
    """``first`` and ``second`` are servers of one database whose clockworks are turned by hand."""

    first: ExecutionService
    second: ExecutionService
    databases: list[Database]
    worker: str

    @property
    def database(self) -> Database:
        return self.databases[0]

    async def begin(self, function: str = "main", **options: Any) -> str:
        return (await self.first.begin(NewExecution(TENANT, function, **options))).execution_id

    async def take(self, service: ExecutionService | None = None, worker: str | None = None) -> Running:
        service = service or self.first
        work = await service.take(TENANT, worker or self.worker, 0)
        assert work is not None, "there is nothing to take"
        return Running(service, work)

    async def pass_time(self, seconds: float) -> None:
        """On the database's clock, for all; what is due is done by the second server."""
        for database in self.databases:
            database.shift_clock(seconds)
        await self.first.clockwork.turn()
        await self.second.clockwork.turn()

    async def status(self, execution_id: str) -> str:
        return (await self.second.describe(TENANT, execution_id)).status.value


@asynccontextmanager
async def stage(*functions: FunctionSpec, rules: Rules | None = None) -> AsyncIterator[Stage]:
    async with fresh_url() as url:
        databases = [Database(url), Database(url)]
        for database in databases:
            await database.open()
        services = [ExecutionService(database, SystemClock(), rules or Rules()) for database in databases]
        for service in services:
            await service.clockwork.turn()
        worker = await services[0].register(TENANT, "w", functions or (MAIN,))
        try:
            yield Stage(services[0], services[1], databases, worker.id)
        finally:
            for service in services:
                await service.close()
            for database in databases:
                await database.close()
