"""What the service of durable executions takes and returns. Frozen values; the API renders them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from perdure.core.ids import TenantId
from perdure.runs.engine import CodeRule, Failure, PauseCause, Standing
from perdure.runs.protocol import (
    CheckpointAnswer,
    CheckpointRequest,
    ErrorObject,
    Event,
    ExecutionInfo,
    ExecutionStatus,
    ExecutionSummary,
    InvocationInput,
    InvocationOutput,
    OperationPage,
)

#: How long a worker's invocation is believed in without a word from it, in seconds.
LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """A function as a worker serves it. ``digest``: of its code. ``timeout_s``: of one invocation. ``is_durable``: it speaks the
    checkpoint protocol; else it takes its payload and returns a value, which ends its execution. ``concurrency``: how many of its
    invocations are in flight at a time, over all workers; None: no limit."""

    name: str
    digest: str
    timeout_s: int = 900
    is_durable: bool = True
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """As the last worker has registered it. ``workers`` were heard of within a lease. ``executions`` of it have not ended;
    ``waiting`` of these want an invocation that nobody has taken, the first of them since ``waiting_since``."""

    spec: FunctionSpec
    registered_at: datetime
    workers: int
    executions: int = 0
    waiting: int = 0
    waiting_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    id: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class NewExecution:
    """``name`` makes it idempotent: the same name and input are the same execution. ``key``: executions of a tenant with the same
    one run one after the other. ``priority``: higher ones are invoked first."""

    tenant_id: TenantId
    function: str
    input: str | None = None
    name: str | None = None
    timeout_s: int | None = None
    code: CodeRule = CodeRule.ANY
    priority: int = 0
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """``is_new``: False for one that was there by its name."""

    execution_id: str
    arn: str
    is_new: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """An invocation that a worker has taken. ``event`` is what the handler is called with: an ``InvocationInput`` of a durable
    function, the execution's input of another one. ``deadline_at``: when the function's timeout ends it."""

    execution_id: str
    arn: str
    function: str
    invocation: int
    request_id: str
    deadline_at: datetime
    event: InvocationInput | str | None


@dataclass(frozen=True, slots=True)
class Flight:
    """An invocation that a worker has in flight."""

    execution_id: str
    invocation: int


@dataclass(frozen=True, slots=True)
class ListQuery:
    """``statuses`` empty: all. Newest first, unless ``oldest_first``. ``marker`` is of the page before."""

    function: str | None = None
    statuses: tuple[ExecutionStatus, ...] = ()
    name: str | None = None
    started_after: datetime | None = None
    started_before: datetime | None = None
    oldest_first: bool = False
    marker: str | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class Found:
    executions: tuple[ExecutionSummary, ...]
    next_marker: str | None


@dataclass(frozen=True, slots=True)
class EventPage:
    events: tuple[Event, ...]
    next_marker: str | None


@dataclass(frozen=True, slots=True)
class OpenCallback:
    callback_id: str
    execution_id: str
    arn: str
    function: str
    operation_id: str
    name: str | None
    started_at: datetime
    due: datetime | None
    heartbeat_due: datetime | None


@dataclass(frozen=True, slots=True)
class Insight:
    """What operators are told of an execution beside its ``ExecutionInfo``. ``invocations`` counts the one in flight too;
    ``last_error`` is of the last invocation that failed; ``born`` and ``digest`` are of the code that ran it first and last."""

    standing: Standing
    code: CodeRule
    priority: int
    key: str | None
    invocations: int
    operations: int
    history_bytes: int
    pause: PauseCause | None = None
    last_error: ErrorObject | None = None
    born: str | None = None
    digest: str | None = None


class Executions(Protocol):
    """The commands. What is another tenant's is NotFound. ``Unavailable`` and ``Busy`` may pass by themselves."""

    # ------------------------------------------------------------------------------------------------------------ from outside

    async def begin(self, new: NewExecution) -> Begun:
        """Raises NotFound when no worker has ever registered the function, AlreadyExists for a name that is taken by one with
        another input, PayloadTooLarge, InvalidRequest."""
        ...

    async def ended(self, tenant_id: TenantId, execution_id: str, wait_s: float) -> ExecutionInfo | None:
        """What became of it; None when it has not ended after ``wait_s``."""
        ...

    async def describe(self, tenant_id: TenantId, execution_id: str, *, with_data: bool = True) -> ExecutionInfo: ...

    async def history(
        self, tenant_id: TenantId, execution_id: str, *, marker: str | None, limit: int, newest_first: bool, with_data: bool
    ) -> EventPage: ...

    async def inspect(self, tenant_id: TenantId, execution_id: str) -> Insight: ...

    async def operations(self, tenant_id: TenantId, execution_id: str, *, marker: str | None, limit: int) -> OperationPage:
        """All there are, in order of their creation, those below closed contexts too."""
        ...

    async def find(self, tenant_id: TenantId, query: ListQuery) -> Found: ...

    async def stop(self, tenant_id: TenantId, execution_id: str, error: ErrorObject | None) -> datetime:
        """When it stopped. Raises ExecutionEnded."""
        ...

    async def pause(self, tenant_id: TenantId, execution_id: str, reason: str | None, *, timeout_paused: bool) -> None: ...

    async def resume(self, tenant_id: TenantId, execution_id: str, reason: str | None, code: CodeRule | None = None) -> None: ...

    async def delete(self, tenant_id: TenantId, execution_id: str) -> datetime:
        """Raises Conflict for one that has not ended."""
        ...

    async def complete_callback(
        self, tenant_id: TenantId, callback_id: str, result: str | None, error: ErrorObject | None = None
    ) -> None:
        """``error`` None: it succeeded. Raises CallbackClosed, NotFound, PayloadTooLarge."""
        ...

    async def heartbeat(self, tenant_id: TenantId, callback_id: str) -> None: ...

    async def callbacks(self, tenant_id: TenantId, execution_id: str | None = None) -> list[OpenCallback]:
        """Oldest first."""
        ...

    # ------------------------------------------------------------------------------------------------------- from the function

    async def checkpoint(self, tenant_id: TenantId, execution_id: str, request: CheckpointRequest) -> CheckpointAnswer:
        """Raises StaleCheckpoint, InvalidRequest, PayloadTooLarge."""
        ...

    async def state(
        self, tenant_id: TenantId, execution_id: str, token: str, marker: str | None, limit: int | None
    ) -> OperationPage: ...

    # --------------------------------------------------------------------------------------------------------- from the worker

    async def functions(self, tenant_id: TenantId) -> list[Function]: ...

    async def register(self, tenant_id: TenantId, name: str, functions: tuple[FunctionSpec, ...]) -> Worker:
        """A worker and what it serves. Whoever starts again is another worker."""
        ...

    async def leave(self, tenant_id: TenantId, worker_id: str) -> None:
        """It takes nothing any more. What it has in flight it may still answer."""
        ...

    async def take(self, tenant_id: TenantId, worker_id: str, wait_s: float) -> Assignment | None:
        """The next invocation for it, with a lease; None when there is none within ``wait_s``. Raises NotFound for a worker that
        is not known any more, Conflict for one that has left."""
        ...

    async def beat(self, tenant_id: TenantId, worker_id: str, flights: tuple[Flight, ...]) -> tuple[Flight, ...]:
        """Keep the leases of these. Those that are returned are over: whatever they still do counts for nothing."""
        ...

    async def answer(self, tenant_id: TenantId, flight: Flight, output: InvocationOutput) -> None:
        """Nothing happens when the invocation is over."""
        ...

    async def fail(self, tenant_id: TenantId, flight: Flight, failure: Failure, error: ErrorObject | None = None) -> None:
        """Nothing happens when the invocation is over. A function that is not durable and raised has failed: it is not run again,
        since nothing says how far it came."""
        ...


#: Why a worker's failure is what it is, by the word that it sends.
FAILURES: Mapping[str, Failure] = {
    one.value: one for one in (Failure.RAISED, Failure.TIMED_OUT, Failure.RETURNED, Failure.INVALID)
}
