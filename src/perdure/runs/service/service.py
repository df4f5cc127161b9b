"""``ExecutionService``: durable executions over PostgreSQL.

outside     what people and programs ask
working     what workers and the functions that they run ask
clockwork   what nobody asks for: timers, leases, parents
deciding    reading, deciding and committing for all three
committer   one transaction for all that is to be committed at a moment
news        what servers of one database tell each other
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import structlog

from perdure.core.clock import Clock, epoch_ms
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import AlreadyExists, NotFound, PayloadTooLarge, PerdureError
from perdure.core.ids import TenantId
from perdure.db.database import Database
from perdure.runs.engine import CompleteInvoke, Decision, Finish, Parent, Reason, Rules, StartChild, Warn
from perdure.runs.protocol import ErrorObject, ExecutionStatus
from perdure.runs.service.clockwork import Clockwork
from perdure.runs.service.committer import Committer
from perdure.runs.service.deciding import Decider
from perdure.runs.service.model import Begun, NewExecution
from perdure.runs.service.news import News
from perdure.runs.service.outside import Outside
from perdure.runs.service.signals import Signals
from perdure.runs.service.working import Working

_RULES = Rules()
#: What follows from the last commits is waited for so long; the clockwork of the next server finds the rest.
_CLOSE_S = 5.0
log = structlog.get_logger(__name__)


class ExecutionService:
    """Implements ``model.Executions``. ``start`` before use, ``close`` after. ``keep_s``: executions are deleted so long after
    their end; None: never."""

    def __init__(self, database: Database, clock: Clock, rules: Rules = _RULES, keep_s: float | None = None) -> None:
        self._database = database
        self._ready, self._ends = Signals(), Signals()
        self.news = News(self._ready, self._ends, epoch_ms(clock))
        self._decider = Decider(database, clock, rules, self._moved, Committer(database, self.news.payload))
        self._outside = Outside(database, clock, self._decider, self._ends)
        self._working = Working(database, clock, self._decider, self._ready, self._follow)
        self.clockwork = Clockwork(database, self._decider, self._start_child, keep_s)
        self._following: set[asyncio.Task[None]] = set()

        self.ended, self.describe, self.history = self._outside.ended, self._outside.describe, self._outside.history
        self.inspect, self.operations, self.find = self._outside.inspect, self._outside.operations, self._outside.find
        self.stop, self.pause = self._outside.stop, self._outside.pause
        self.resume, self.delete, self.callbacks = self._outside.resume, self._outside.delete, self._outside.callbacks
        self.complete_callback, self.heartbeat = self._outside.complete_callback, self._outside.heartbeat
        self.checkpoint, self.state = self._working.checkpoint, self._working.state
        self.functions, self.register, self.leave = self._working.functions, self._working.register, self._working.leave
        self.take, self.beat = self._working.take, self._working.beat
        self.answer, self.fail = self._working.answer, self._working.fail

    async def start(self) -> None:
        await self.clockwork.turn()
        self.clockwork.start()
        self.news.start(self._database.url)

    async def close(self) -> None:
        await self.news.close()
        await self.clockwork.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.settled()
        for task in list(self._following):
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await self._decider.committer.close()

    async def settled(self) -> None:
        """Until everything that followed from earlier commits has been done, or left to the clockwork."""
        while self._following:
            await asyncio.gather(*self._following, return_exceptions=True)

    async def begin(self, new: NewExecution) -> Begun:
        return await self._begin(new, None)

    async def _begin(self, new: NewExecution, parent: Parent | None) -> Begun:
        begun, decision = await self._outside.begin(new, parent)
        if decision is not None:
            self._moved(new.tenant_id, decision)
            crashpoint(CrashPoint.RUNS_START_COMMITTED if parent is None else CrashPoint.RUNS_CHILD_STARTED)
        return begun

    # ------------------------------------------------------------------------------------------------------------ what follows

    def _moved(self, tenant_id: str, decision: Decision) -> None:
        """After a commit. What has to follow in any case, the clockwork finds again in the database."""
        state, standing = decision.state, decision.standing
        if standing.reason is Reason.STUCK:
            log.error("an execution has nothing that will ever move it", execution=state.id, status=state.status.value)
        if standing.reason is Reason.INVOKE:
            self._ready.tell((tenant_id, state.started.function))
        if standing.timer_at is not None or state.invocation is not None:
            self.clockwork.soon()
        if state.has_ended:
            self._ends.tell(state.id)
        if state.invocation is None:  # a place in its function's or its key's row is free
            self._ready.tell((tenant_id, state.started.function))
        for todo in decision.todo:
            match todo:
                case Warn():
                    log.warning(todo.message, execution=state.id, tenant=tenant_id, notice=todo.notice.value)
                case StartChild():
                    self._follow(self._start_child(tenant_id, state.id, todo))
                case Finish(parent=Parent()):
                    self._follow(self.clockwork.tell_parent(state))
                case _:
                    pass

    def _follow(self, what: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await what
            except PerdureError as error:
                log.info("left to the clockwork", error=error.message)

        task = asyncio.create_task(guarded(), name="runs-follow")
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _start_child(self, tenant_id: str, parent_id: str, child: StartChild) -> None:
        """Twice is once: the parent's operation has one child."""
        crashpoint(CrashPoint.RUNS_CHILD_WANTED)
        new = NewExecution(TenantId(tenant_id), child.function, child.payload, name=child.key)
        try:
            await self._begin(new, Parent(execution_id=parent_id, operation_id=child.operation_id))
        except (AlreadyExists, NotFound, PayloadTooLarge) as problem:
            error = ErrorObject(error_type=type(problem).__name__, error_message=problem.message)
            outcome = CompleteInvoke(child.operation_id, ExecutionStatus.FAILED, error=error)
            await self._decider.decide(None, parent_id, outcome, "child")
