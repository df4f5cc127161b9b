"""What moves executions when nobody asks: timers, leases that end, ends that a parent has not been told of, children not started.

All of it is a repeated question to the database, never a list that was made at the start: whatever a server that died has left
behind, this one or any other finds. One task per server, whatever the number of executions; while nothing is due it asks every
two seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import structlog

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import Conflict, NotFound, PerdureError, StaleInvocation
from perdure.db.database import Database
from perdure.runs.engine import CompleteInvoke, Delete, Fail, Failure, StartChild, State, Tick, children_to_start, head_of
from perdure.runs.service.deciding import Decider

_IDLE_S = 2.0
_LIMIT = 200
_AT_ONCE = 8
#: Children that their parents' own server has not started after so long are started by whoever finds them.
_OLDER_S = 5.0
#: How often that, deletions and workers that are gone are looked at.
_SWEEP_S = 30.0

log = structlog.get_logger(__name__)


class Clockwork:
    """``start_child`` starts what a chained invoke asks for, for (tenant, parent's id); twice is once. ``keep_s``: executions are
    deleted so long after their end; None: never."""

    def __init__(
        self,
        database: Database,
        decider: Decider,
        start_child: Callable[[str, str, StartChild], Awaitable[None]],
        keep_s: float | None,
    ) -> None:
        self._database = database
        self._decider = decider
        self._start_child = start_child
        self._keep_s = keep_s
        self._soon = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._gate = asyncio.Semaphore(_AT_ONCE)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="runs-clockwork")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def soon(self) -> None:
        """Something may be due earlier than was known."""
        self._soon.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        swept = -_SWEEP_S
        while True:
            wait_s = _IDLE_S
            try:
                if loop.time() - swept >= _SWEEP_S:
                    is_done = await self.sweep()
                    swept = loop.time() if is_done else swept
                wait_s = await self.turn()
            except PerdureError as error:
                log.warning("executions are not moved for a moment", error=error.message, internal=error.internal)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._soon.wait()
            self._soon.clear()

    async def turn(self) -> float:
        """Do whatever is due; in how many seconds there may be more."""
        rows = await self._database.all("runs.due", limit=_LIMIT)
        await asyncio.gather(*(self._guarded(row["id"], row["what"], row["invocation"]) for row in rows))
        row = await self._database.one("runs.next_due")
        assert row is not None, "it always has a row"
        self._decider.time.told(row["now"])
        if row["wait_s"] is None:
            return _IDLE_S
        return min(max(float(row["wait_s"]), 0.02 if rows else 0.0), _IDLE_S)

    async def _guarded(self, execution_id: str, what: str, invocation: int) -> None:
        async with self._gate:
            try:
                await self._move(execution_id, what, invocation)
            except (NotFound, StaleInvocation):
                return  # it was moved meanwhile
            except PerdureError as error:
                log.warning("an execution was not moved", execution=execution_id, by=what, error=error.message)

    async def _move(self, execution_id: str, what: str, invocation: int) -> None:
        match what:
            case "timer":
                crashpoint(CrashPoint.RUNS_TIMER_DUE)
                await self._decider.decide(None, execution_id, Tick(), "timer")
                crashpoint(CrashPoint.RUNS_TIMER_FIRED)
            case "lost":
                crashpoint(CrashPoint.RUNS_LEASE_OVER)
                await self._decider.decide(None, execution_id, Fail(invocation, Failure.LOST), "lease")
                crashpoint(CrashPoint.RUNS_LEASE_TAKEN)
            case "timed-out":
                await self._decider.decide(None, execution_id, Fail(invocation, Failure.TIMED_OUT), "timer")
            case _:
                await self.tell_parent((await self._decider.read(None, execution_id)).state)

    async def tell_parent(self, state: State) -> None:
        """An execution's end, to the operation that started it. Twice is once."""
        parent = state.started.parent
        if parent is not None:
            crashpoint(CrashPoint.RUNS_PARENT_OWED)
            outcome = CompleteInvoke(parent.operation_id, state.status, state.result, state.error, state.started.timeout_s)
            with suppress(NotFound):  # the parent is gone
                await self._decider.decide(None, parent.execution_id, outcome, "child")
            crashpoint(CrashPoint.RUNS_PARENT_TOLD)
        await self._database.run("runs.told", id=state.id)

    async def sweep(self) -> bool:
        """What is looked at from time to time. False: there is more of it than one pass does."""
        for row in await self._database.all("runs.unstarted", older_s=_OLDER_S, limit=_LIMIT):
            kept = await self._decider.read(None, row["id"])
            for child in children_to_start(kept.state):
                await self._start_child(kept.tenant_id, kept.state.id, child)
        expired = await self._expire()
        deleting = await self._database.all("runs.deleting", limit=_LIMIT)
        for row in deleting:
            await self._forget(row["id"])
        await self._database.run("runs.forget_workers")
        return max(expired, len(deleting)) < _LIMIT

    async def _expire(self) -> int:
        """Delete what has been kept for long enough after its end; how many there were."""
        if self._keep_s is None:
            return 0
        rows = await self._database.all("runs.expired", keep_s=self._keep_s, limit=_LIMIT)
        for row in rows:
            crashpoint(CrashPoint.RUNS_EXPIRED)
            with suppress(NotFound, Conflict):
                await self._decider.decide(None, row["id"], Delete(), "retention")
            crashpoint(CrashPoint.RUNS_DELETE_COMMITTED)
        return len(rows)

    async def _forget(self, execution_id: str) -> None:
        """What a deleted execution was given, did and returned. The hashes of its history stay, so that the chain still holds."""
        state = (await self._decider.read(None, execution_id)).state
        started = state.started.model_copy(update={"input": None})
        bare = replace(state, result=None, error=None, last_error=None, pause=None)
        async with self._database.transaction() as transaction:
            await transaction.run("runs.forget_operations", id=execution_id)
            await transaction.run(
                "runs.forget_data", id=execution_id, started=started.model_dump_json(exclude_none=True), head=head_of(bare)
            )
            await transaction.run("runs.forget_facts", id=execution_id)
        self._decider.forget(execution_id)
        crashpoint(CrashPoint.RUNS_DELETE_FORGOTTEN)
