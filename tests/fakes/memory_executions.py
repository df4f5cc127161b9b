"""The service of durable executions in memory: the real engine, no database. One event loop; a clock that a test may move.

Timers, leases and functions' timeouts are looked at whenever somebody calls, whenever the clock is moved, and by whoever waits.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from perdure.core import ids
from perdure.core.clock import Clock, SystemClock, epoch_ms
from perdure.core.errors import (
    AlreadyExists,
    CodeChanged,
    Conflict,
    InvalidRequest,
    NotFound,
    StaleInvocation,
)
from perdure.core.ids import TenantId
from perdure.runs import engine
from perdure.runs.engine import CodeRule, Failure, Parent, Reason, Rules
from perdure.runs.protocol import (
    CheckpointAnswer,
    CheckpointRequest,
    ErrorObject,
    ExecutionArn,
    ExecutionInfo,
    InvocationOutput,
    InvocationStatus,
    OperationPage,
    marker_of,
    parse_callback_id,
    parse_function,
    parse_marker,
)
from perdure.runs.service.model import (
    LEASE_S,
    Assignment,
    Begun,
    EventPage,
    Flight,
    Found,
    Function,
    FunctionSpec,
    Insight,
    ListQuery,
    NewExecution,
    OpenCallback,
    Worker,
)
from tests.fakes import run_views as views
from tests.fakes.run_history import Run


@dataclass(slots=True)
class _Kept:
    """``number`` counts the executions in the order of their start."""

    run: Run
    new: NewExecution
    number: int
    children: dict[str, str] = field(default_factory=dict)  # ARNs, by the operation that started them


@dataclass(slots=True)
class _Worker:
    id: str
    tenant_id: TenantId
    functions: dict[str, FunctionSpec]
    heard_at: datetime
    has_left: bool = False


@dataclass(frozen=True, slots=True)
class _InFlight:
    worker_id: str
    lease_until: datetime
    deadline_at: datetime


class MemoryExecutions:
    """Implements ``runs.service.model.Executions``."""

    def __init__(self, clock: Clock | None = None, rules: Rules | None = None, keep_s: float | None = None) -> None:
        self.rules = rules or Rules()
        self.keep_s = keep_s
        self.lease_s = LEASE_S
        self._clock = clock or SystemClock()
        self._ahead = timedelta(0)
        self._changed = asyncio.Condition()
        self._runs: dict[str, _Kept] = {}
        self._names: dict[tuple[TenantId, str, str], str] = {}
        self._functions: dict[tuple[TenantId, str], Function] = {}
        self._workers: dict[str, _Worker] = {}
        self._flights: dict[Flight, _InFlight] = {}
        self._started = 0

    # ----------------------------------------------------------------------------------------------------------------- for tests

    @property
    def now(self) -> datetime:
        return self._clock.now() + self._ahead

    async def advance(self, seconds: float) -> None:
        """Move the clock; everything that is due by then happens, in its order."""
        until = self.now + timedelta(seconds=seconds)
        while (due := self._next_due()) is not None and due <= until:
            self._ahead += max(due - self.now, timedelta(0))
            self._settle()
        self._ahead += max(until - self.now, timedelta(0))
        await self._tell()

    def run_of(self, execution_id: str) -> Run:
        return self._runs[execution_id].run

    # ------------------------------------------------------------------------------------------------------------- from outside

    async def begin(self, new: NewExecution) -> Begun:
        views.check(new)
        name = parse_function(new.function).name
        begun = self._begin(replace(new, function=name), None)
        await self._tell()
        return begun

    def _begin(self, new: NewExecution, parent: Parent | None) -> Begun:
        if (new.tenant_id, new.function) not in self._functions:
            raise NotFound(f"There is no function {new.function!r}.", hint="Start a worker that serves it: perdure worker.")
        if new.name is not None and (known := self._names.get((new.tenant_id, new.function, new.name))):
            kept = self._runs[known]
            if kept.new.input != new.input:
                raise AlreadyExists(f"Execution {new.name!r} exists with another input.", hint="Choose another name.")
            return Begun(known, kept.run.state.started.arn, is_new=False)
        execution_id = ids.mint("exn", now_ms=epoch_ms(self._clock))
        name = new.name or execution_id
        arn = str(ExecutionArn("us-east-1", "000000000000", new.function, name, execution_id))
        start = engine.Start(
            execution_id=execution_id,
            arn=arn,
            name=name,
            function=new.function,
            secret=secrets.token_hex(8),
            input=new.input,
            timeout_s=new.timeout_s,
            code=new.code,
            parent=parent,
        )
        decision = engine.start(start, self.now, self.rules)
        self._started += 1
        self._runs[execution_id] = _Kept(Run.begun(decision), new, self._started)
        self._names[new.tenant_id, new.function, name] = execution_id
        return Begun(execution_id, arn, is_new=True)

    async def ended(self, tenant_id: TenantId, execution_id: str, wait_s: float) -> ExecutionInfo | None:
        until = asyncio.get_running_loop().time() + wait_s
        while not (state := self._find(tenant_id, execution_id).run.state).has_ended:
            if not await self._wait(until):
                return None
        return engine.description(state)

    async def describe(self, tenant_id: TenantId, execution_id: str, *, with_data: bool = True) -> ExecutionInfo:
        return engine.description(self._find(tenant_id, execution_id).run.state, with_data=with_data)

    async def history(
        self, tenant_id: TenantId, execution_id: str, *, marker: str | None, limit: int, newest_first: bool, with_data: bool
    ) -> EventPage:
        kept = self._find(tenant_id, execution_id)
        events = list(engine.events(kept.run.history, with_data=with_data, children=kept.children))
        events = events[::-1] if newest_first else events
        first = parse_marker(marker)
        rest = len(events) > first + limit
        return EventPage(tuple(events[first : first + limit]), marker_of(first + limit) if rest else None)

    async def inspect(self, tenant_id: TenantId, execution_id: str) -> Insight:
        kept = self._find(tenant_id, execution_id)
        return views.insight(kept.run.state, kept.new)

    async def operations(self, tenant_id: TenantId, execution_id: str, *, marker: str | None, limit: int) -> OperationPage:
        ops = list(self._find(tenant_id, execution_id).run.state.operations.values())
        first = parse_marker(marker)
        page = tuple(engine.operation(op) for op in ops[first : first + limit])
        return OperationPage(operations=page, next_marker=marker_of(first + limit) if len(ops) > first + limit else None)

    async def find(self, tenant_id: TenantId, query: ListQuery) -> Found:
        self._settle()
        mine = [kept for kept in self._runs.values() if kept.new.tenant_id == tenant_id and views.fits(kept.run, query)]
        mine.sort(key=lambda kept: kept.number, reverse=not query.oldest_first)
        first = parse_marker(query.marker)
        rest = len(mine) > first + query.limit
        page = tuple(views.summary(kept.run) for kept in mine[first : first + query.limit])
        return Found(page, marker_of(first + query.limit) if rest else None)

    async def stop(self, tenant_id: TenantId, execution_id: str, error: ErrorObject | None) -> datetime:
        state = await self._do(tenant_id, execution_id, engine.Stop(error))
        assert state.ended_at is not None
        return state.ended_at

    async def pause(self, tenant_id: TenantId, execution_id: str, reason: str | None, *, timeout_paused: bool) -> None:
        await self._do(tenant_id, execution_id, engine.Pause(reason, timeout_paused))

    async def resume(self, tenant_id: TenantId, execution_id: str, reason: str | None, code: CodeRule | None = None) -> None:
        await self._do(tenant_id, execution_id, engine.Resume(reason, code))

    async def delete(self, tenant_id: TenantId, execution_id: str) -> datetime:
        state = await self._do(tenant_id, execution_id, engine.Delete())
        self._drop(execution_id)
        return state.at

    def _drop(self, execution_id: str) -> None:
        kept = self._runs.pop(execution_id)
        del self._names[kept.new.tenant_id, kept.new.function, kept.run.state.started.name]

    async def complete_callback(
        self, tenant_id: TenantId, callback_id: str, result: str | None, error: ErrorObject | None = None
    ) -> None:
        await self._do_callback(tenant_id, callback_id, engine.CompleteCallback(callback_id, result, error))

    async def heartbeat(self, tenant_id: TenantId, callback_id: str) -> None:
        await self._do_callback(tenant_id, callback_id, engine.Heartbeat(callback_id))

    async def _do_callback(self, tenant_id: TenantId, callback_id: str, command: engine.Command) -> None:
        execution_id = parse_callback_id(callback_id).execution_id
        kept = self._runs.get(execution_id)
        if kept is None or kept.new.tenant_id != tenant_id:
            raise NotFound("There is no such callback.", hint="Use the id that the function was given when it made the callback.")
        await self._do(tenant_id, execution_id, command)

    async def callbacks(self, tenant_id: TenantId, execution_id: str | None = None) -> list[OpenCallback]:
        if execution_id is not None:
            self._find(tenant_id, execution_id)
        self._settle()
        found = [
            views.open_callback(kept.run, op)
            for kept in self._runs.values()
            if kept.new.tenant_id == tenant_id and execution_id in {None, kept.run.state.id} and not kept.run.state.has_ended
            for op in engine.open_callbacks(kept.run.state.operations.values())
        ]
        return sorted(found, key=lambda one: one.started_at)

    # ------------------------------------------------------------------------------------------------------- from the function

    async def checkpoint(self, tenant_id: TenantId, execution_id: str, request: CheckpointRequest) -> CheckpointAnswer:
        self._find(tenant_id, execution_id)
        updates = request.updates or ()
        refused: dict[str, ErrorObject] = {}
        for name in {one.chained_invoke_options.function_name for one in updates if one.chained_invoke_options}:
            if not self._is_served(tenant_id, name):
                message = f"There is no function {name!r}."
                refused[name] = ErrorObject(error_type="ResourceNotFoundException", error_message=message)
        command = engine.Checkpoint(request.checkpoint_token, updates, request.client_token, refused)
        decision = self._decide(execution_id, command)
        await self._tell()
        assert decision.reply is not None
        return engine.checkpoint_answer(decision.reply)

    async def state(
        self, tenant_id: TenantId, execution_id: str, token: str, marker: str | None, limit: int | None
    ) -> OperationPage:
        state = self._find(tenant_id, execution_id).run.state
        engine.require_token(state, token)
        return engine.page(state, marker, self.rules, limit)

    # --------------------------------------------------------------------------------------------------------- from the worker

    async def functions(self, tenant_id: TenantId) -> list[Function]:
        self._settle()
        return [
            replace(function, workers=self._serving(tenant_id, name), **self._demand(tenant_id, name))
            for (owner, name), function in sorted(self._functions.items())
            if owner == tenant_id
        ]

    def _serving(self, tenant_id: TenantId, name: str) -> int:
        return sum(self._serves(worker, tenant_id, name) for worker in self._workers.values())

    def _demand(self, tenant_id: TenantId, name: str) -> dict[str, Any]:
        mine = (kept.run for kept in self._runs.values() if (kept.new.tenant_id, kept.new.function) == (tenant_id, name))
        open_ = [run.state for run in mine if not run.state.has_ended]
        waiting = [state.at for state in open_ if engine.standing(state).reason is Reason.INVOKE]
        return {"executions": len(open_), "waiting": len(waiting), "waiting_since": min(waiting, default=None)}

    def _serves(self, worker: _Worker, tenant_id: TenantId, function: str) -> bool:
        is_heard = not worker.has_left and worker.heard_at + timedelta(seconds=self.lease_s) > self.now
        return is_heard and worker.tenant_id == tenant_id and function in worker.functions

    async def register(self, tenant_id: TenantId, name: str, functions: tuple[FunctionSpec, ...]) -> Worker:
        served = {spec.name: spec for spec in functions}
        if not served or len(served) < len(functions):
            raise InvalidRequest("A worker serves at least one function, and each only once.")
        worker = _Worker(ids.mint("wrk", now_ms=epoch_ms(self._clock)), tenant_id, served, self.now)
        self._workers[worker.id] = worker
        for spec in functions:
            self._functions[tenant_id, spec.name] = Function(spec, self.now, 0)
        await self._tell()
        return Worker(worker.id, self.lease_s)

    async def leave(self, tenant_id: TenantId, worker_id: str) -> None:
        self._worker(tenant_id, worker_id).has_left = True
        await self._tell()

    async def take(self, tenant_id: TenantId, worker_id: str, wait_s: float) -> Assignment | None:
        until = asyncio.get_running_loop().time() + wait_s
        while True:
            worker = self._worker(tenant_id, worker_id)
            if worker.has_left:
                raise Conflict("This worker has left.", hint="Register it anew.")
            worker.heard_at = self.now
            self._settle()
            for kept in sorted(self._runs.values(), key=lambda one: (-one.new.priority, one.number)):
                if (assignment := self._offer(worker, kept)) is not None:
                    return assignment
            if not await self._wait(until):
                return None

    def _offer(self, worker: _Worker, kept: _Kept) -> Assignment | None:
        """This execution's next invocation, if it is due and for this worker."""
        run, spec = kept.run, worker.functions.get(kept.new.function)
        now_standing = engine.standing(run.state)
        if spec is None or kept.new.tenant_id != worker.tenant_id or not self._has_turn(kept, spec):
            return None
        if now_standing.reason is not Reason.INVOKE or (now_standing.invoke_at or self.now) > self.now:
            return None
        try:
            decision = self._decide(run.state.id, engine.Invoke(secrets.token_hex(8), spec.digest))
        except CodeChanged:
            return None
        assert decision.reply is not None
        number, deadline_at = decision.state.invocations, self.now + timedelta(seconds=spec.timeout_s)
        leased = _InFlight(worker.id, self.now + timedelta(seconds=self.lease_s), deadline_at)
        self._flights[Flight(run.state.id, number)] = leased
        event = engine.invocation_input(decision.state, decision.reply, self.rules) if spec.is_durable else kept.new.input
        request_id = decision.state.invocation.request_id if decision.state.invocation else ""
        return Assignment(run.state.id, run.state.started.arn, kept.new.function, number, request_id, deadline_at, event)

    def _has_turn(self, kept: _Kept, spec: FunctionSpec) -> bool:
        """Whether nobody before it with its key goes on still, and its function may have one more in flight."""
        new = kept.new
        before = [other for other in self._runs.values() if other.number < kept.number and not other.run.state.has_ended]
        if new.key is not None and any((other.new.tenant_id, other.new.key) == (new.tenant_id, new.key) for other in before):
            return False
        flying = [self._runs[flight.execution_id].new for flight in self._flights if flight.execution_id in self._runs]
        count = sum((one.tenant_id, one.function) == (new.tenant_id, new.function) for one in flying)
        return spec.concurrency is None or count < spec.concurrency

    async def beat(self, tenant_id: TenantId, worker_id: str, flights: tuple[Flight, ...]) -> tuple[Flight, ...]:
        worker = self._worker(tenant_id, worker_id)
        worker.heard_at = self.now
        self._settle()
        over = []
        for flight in flights:
            leased = self._flights.get(flight)
            if leased is None or leased.worker_id != worker_id or self._runs[flight.execution_id].run.state.has_ended:
                over.append(flight)
            else:
                self._flights[flight] = replace(leased, lease_until=self.now + timedelta(seconds=self.lease_s))
        return tuple(over)

    async def answer(self, tenant_id: TenantId, flight: Flight, output: InvocationOutput) -> None:
        await self._land(tenant_id, flight, engine.Answer(flight.invocation, output))

    async def fail(self, tenant_id: TenantId, flight: Flight, failure: Failure, error: ErrorObject | None = None) -> None:
        kept = self._find(tenant_id, flight.execution_id)
        spec = self._functions[tenant_id, kept.new.function].spec
        if not spec.is_durable and failure is Failure.RAISED:  # whatever it did is not known to be done: it is not run again
            await self._land(tenant_id, flight, engine.Answer(flight.invocation, _failed(error)))
            return
        await self._land(tenant_id, flight, engine.Fail(flight.invocation, failure, error))

    async def _land(self, tenant_id: TenantId, flight: Flight, command: engine.Command) -> None:
        self._find(tenant_id, flight.execution_id)
        try:
            self._decide(flight.execution_id, command)
        except StaleInvocation:
            return
        await self._tell()

    # --------------------------------------------------------------------------------------------------------------- in between

    def _find(self, tenant_id: TenantId, execution_id: str) -> _Kept:
        self._settle()
        kept = self._runs.get(execution_id)
        if kept is None or kept.new.tenant_id != tenant_id:
            raise NotFound(f"There is no execution {execution_id!r}.", hint="List them: perdure executions ls.")
        return kept

    def _worker(self, tenant_id: TenantId, worker_id: str) -> _Worker:
        worker = self._workers.get(worker_id)
        if worker is None or worker.tenant_id != tenant_id:
            raise NotFound(f"There is no worker {worker_id!r}.", hint="Register it anew.")
        return worker

    async def _do(self, tenant_id: TenantId, execution_id: str, command: engine.Command) -> engine.State:
        self._find(tenant_id, execution_id)
        decision = self._decide(execution_id, command)
        await self._tell()
        return decision.state

    def _decide(self, execution_id: str, command: engine.Command) -> engine.Decision:
        """Decide, append, and do what is to be done after it."""
        kept = self._runs[execution_id]
        decision = engine.decide(kept.run.state, command, self.now, self.rules)
        kept.run.take(decision)
        flying = decision.state.invocation
        for flight in [one for one in self._flights if one.execution_id == execution_id]:
            if flying is None or flying.number != flight.invocation:
                del self._flights[flight]
        for todo in decision.todo:
            match todo:
                case engine.Finish(parent=Parent() as parent) if parent.execution_id in self._runs:
                    told = engine.CompleteInvoke(parent.operation_id, todo.status, todo.result, todo.error, todo.timeout_s)
                    self._decide(parent.execution_id, told)
                case engine.StartChild():
                    self._start_child(kept, todo)
                case _:
                    pass
        return decision

    def _is_served(self, tenant_id: TenantId, function: str) -> bool:
        try:
            return (tenant_id, parse_function(function).name) in self._functions
        except InvalidRequest:
            return False

    def _start_child(self, kept: _Kept, child: engine.StartChild) -> None:
        parent = Parent(execution_id=kept.run.state.id, operation_id=child.operation_id)
        name = parse_function(child.function).name
        begun = self._begin(NewExecution(kept.new.tenant_id, name, child.payload, name=child.key), parent)
        kept.children[child.operation_id] = begun.arn

    def _settle(self) -> None:
        """Let happen what is due: timers, leases that are over, functions that ran for too long."""
        for flight, leased in list(self._flights.items()):
            if self.now >= min(leased.lease_until, leased.deadline_at) and flight in self._flights:
                failure = Failure.LOST if leased.lease_until <= leased.deadline_at else Failure.TIMED_OUT
                self._decide(flight.execution_id, engine.Fail(flight.invocation, failure))
        for execution_id, kept in list(self._runs.items()):
            timer_at = engine.standing(kept.run.state).timer_at
            if timer_at is not None and timer_at <= self.now:
                self._decide(execution_id, engine.Tick())
        self._expire()

    def _expire(self) -> None:
        """What has been kept for long enough after its end goes; not while somebody runs it still, or its parent goes on."""
        for execution_id, kept in list(self._runs.items()):
            state, parent = kept.run.state, kept.run.state.started.parent
            above = self._runs.get(parent.execution_id) if parent is not None else None
            is_held = state.invocation is not None or (above is not None and not above.run.state.has_ended)
            if self.keep_s is None or state.ended_at is None or is_held:
                continue
            if state.ended_at + timedelta(seconds=self.keep_s) < self.now:
                self._drop(execution_id)

    def _next_due(self) -> datetime | None:
        """When something happens by itself."""
        times: list[datetime | None] = [min(one.lease_until, one.deadline_at) for one in self._flights.values()]
        for kept in self._runs.values():
            now_standing = engine.standing(kept.run.state)
            times += [now_standing.timer_at, now_standing.invoke_at]
        return min((at for at in times if at is not None and at > self.now), default=None)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, until: float) -> bool:
        """Until something may have changed; False when it is too late for that."""
        loop, due = asyncio.get_running_loop(), self._next_due()
        if loop.time() >= until:
            return False
        soon = until if due is None else min(until, loop.time() + (due - self.now).total_seconds())
        try:
            async with asyncio.timeout_at(max(soon, loop.time())), self._changed:
                await self._changed.wait()
        except TimeoutError:
            pass
        return True


def _failed(error: ErrorObject | None) -> InvocationOutput:
    return InvocationOutput(status=InvocationStatus.FAILED, error=error or ErrorObject(error_type="Error"))
