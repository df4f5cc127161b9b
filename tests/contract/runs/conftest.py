"""What serves durable executions, each with a clock that can be moved and one worker's view of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from perdure.core.clock import SystemClock
from perdure.core.ids import TenantId
from perdure.runs.engine import Rules
from perdure.runs.protocol import (
    CheckpointAnswer,
    CheckpointRequest,
    InvocationInput,
    InvocationOutput,
    InvocationStatus,
    Operation,
    OperationUpdate,
)
from perdure.runs.service.model import Assignment, Begun, Executions, Flight, FunctionSpec, NewExecution
from perdure.runs.service.service import ExecutionService
from tests.fakes.database import fresh_database
from tests.fakes.memory_executions import MemoryExecutions

TENANT, OTHER = TenantId("ten_a"), TenantId("ten_b")
#: Pauses that the time which a busy host takes for a test does not reach.
RULES = Rules(backoff_s=300, backoff_max_s=300)
#: How long executions are kept after their end: longer than any other test waits.
KEEP_S = 1000 * 86_400.0


@dataclass
class Bench:
    """``advance`` moves the clock by so many seconds; what is due by then has happened when it returns, or happens when somebody
    asks. ``settled``: what follows from earlier calls is done. ``swept``: what is looked at from time to time was.
    ``worker_id`` is the last one that was registered."""

    runs: Executions
    advance: Callable[[float], Awaitable[None]]
    settled: Callable[[], Awaitable[None]]
    swept: Callable[[], Awaitable[object]]
    worker_id: str = ""

    async def serve(self, *names: str, tenant_id: TenantId = TENANT, **parts: Any) -> str:
        parts = {"digest": "v1", **parts}
        specs = tuple(FunctionSpec(name, **parts) for name in names or ("main",))
        self.worker_id = (await self.runs.register(tenant_id, "worker", specs)).id
        return self.worker_id

    async def begin(self, function: str = "main", **parts: Any) -> Begun:
        return await self.runs.begin(NewExecution(TENANT, function, **parts))

    async def take(self, worker_id: str | None = None) -> Assignment:
        """The next invocation, which there must be."""
        assignment = await self.offered(worker_id)
        assert assignment is not None
        return assignment

    async def offered(self, worker_id: str | None = None) -> Assignment | None:
        await self.settled()
        return await self.runs.take(TENANT, worker_id or self.worker_id, 0)

    async def send(self, assignment: Assignment, token: str, *updates: OperationUpdate, client: str = "c1") -> CheckpointAnswer:
        request = CheckpointRequest(checkpoint_token=token, updates=updates, client_token=client)
        return await self.runs.checkpoint(TENANT, assignment.execution_id, request)

    async def answer(self, assignment: Assignment, status: InvocationStatus = InvocationStatus.PENDING, **parts: Any) -> None:
        await self.runs.answer(TENANT, flight(assignment), InvocationOutput(status=status, **parts))

    async def succeed(self, assignment: Assignment, result: str = "1") -> None:
        await self.answer(assignment, InvocationStatus.SUCCEEDED, result=result)


def flight(assignment: Assignment) -> Flight:
    return Flight(assignment.execution_id, assignment.invocation)


def told(assignment: Assignment) -> InvocationInput:
    assert isinstance(assignment.event, InvocationInput)
    return assignment.event


def token(assignment: Assignment) -> str:
    return told(assignment).checkpoint_token


def ops(assignment: Assignment) -> dict[str, Operation]:
    """What the function is told of its operations, but for the execution itself."""
    return {op.id: op for op in told(assignment).initial_execution_state.operations[1:]}


async def _nothing() -> None:
    pass


@pytest.fixture(params=["fake", "database"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "fake":
        runs = MemoryExecutions(rules=RULES, keep_s=KEEP_S)
        yield Bench(runs, runs.advance, settled=_nothing, swept=_nothing)
        return
    async with fresh_database() as database:
        service = ExecutionService(database, SystemClock(), RULES, KEEP_S)

        async def advance(seconds: float) -> None:
            database.shift_clock(seconds)
            await service.settled()
            await service.clockwork.turn()
            await service.settled()

        try:
            yield Bench(service, advance, service.settled, service.clockwork.sweep)
        finally:
            await service.close()
