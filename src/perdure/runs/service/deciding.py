"""Deciding on executions: what is known, what the engine makes of it, and the commit that holds only if nobody else was faster.

A state is kept in memory while an invocation of it is in flight, for its checkpoints come one after another. Any number of
servers may decide on one execution: each commit names the entry that it was decided behind, and whoever was overtaken reads and
decides again. An answer that records nothing, and a refusal, are checked in the same way.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from perdure.core.clock import Clock
from perdure.core.errors import Busy, NotFound, PerdureError
from perdure.db.database import Database
from perdure.runs.engine import FACT, Command, Decision, Rules, assemble, decide
from perdure.runs.engine.facts import Started
from perdure.runs.protocol import ExecutionStatus
from perdure.runs.service.committer import Committer
from perdure.runs.service.rows import Claim, Kept, change

_ATTEMPTS = 20
_DELETED = ExecutionStatus.DELETING.value
#: How many operations all states together may have that are kept in memory.
_KEPT_OPERATIONS = 200_000


class DatabaseTime:
    """The database's clock, as of its last answer and what has passed since on a clock that nobody sets."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._then: tuple[datetime, float] | None = None

    def told(self, now: datetime) -> datetime:
        self._then = (now, self._clock.monotonic())
        return now

    def now(self) -> datetime:
        assert self._then is not None, "the database has not been asked anything yet"
        then, at = self._then
        return then + timedelta(seconds=self._clock.monotonic() - at)


def no_such_execution() -> NotFound:
    return NotFound("There is no such execution.", hint="List them with 'perdure execution ls'.")


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock
    waiting: int = 0


class Decider:
    """``moved`` is called with the tenant and each decision that was committed, even if its caller has left meanwhile."""

    def __init__(self, database: Database, clock: Clock, rules: Rules, moved: Callable[[str, Decision], None]) -> None:
        self.time = DatabaseTime(clock)
        self.rules = rules
        self.committer = Committer(database)
        self._database = database
        self._moved = moved
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._operations = 0
        self._turns: dict[str, _Turn] = {}

    async def decide(
        self, tenant_id: str | None, execution_id: str, command: Command, actor: str, claim: Claim | None = None
    ) -> Decision:
        """What the command makes of it, recorded. ``tenant_id`` None: the server itself. Raises what the engine raises, and
        AlreadyExists for a claim whose slot another one was given."""
        async with self._turn(execution_id):
            for _ in range(_ATTEMPTS):
                before, is_fresh = await self._known(tenant_id, execution_id)
                try:
                    decision = decide(before.state, command, self.time.now(), self.rules)
                except PerdureError:
                    if is_fresh or await self._is_current(before):
                        raise
                    continue
                if not decision.entries:
                    if is_fresh or await self._is_current(before):
                        return decision
                    continue
                if await asyncio.shield(self._commit(before, decision, actor, claim)):
                    return decision
        raise Busy("Too many others change this execution at the same time.", hint="Try again in a moment.")

    async def read(self, tenant_id: str | None, execution_id: str) -> Kept:
        """As it is in the database. Raises NotFound, to a tenant also for one that was deleted."""
        row = await self._database.one("runs.load", id=execution_id)
        if row is None or (tenant_id is not None and (row["tenant_id"] != tenant_id or row["status"] == _DELETED)):
            raise no_such_execution()
        self.time.told(row["now"])
        started = FACT.validate_json(row["started"])
        assert isinstance(started, Started)
        return Kept(row["tenant_id"], assemble(started, row["head"], row["ops"]), row["hash"])

    # --------------------------------------------------------------------------------------------------------------------- parts

    async def _known(self, tenant_id: str | None, execution_id: str) -> tuple[Kept, bool]:
        kept = self._kept.get(execution_id)
        if kept is None or (tenant_id is not None and kept.tenant_id != tenant_id):
            return await self.read(tenant_id, execution_id), True
        return kept, False

    async def _is_current(self, kept: Kept) -> bool:
        """Whether what is kept is what the database has; else it is forgotten."""
        row = await self._database.one("runs.seq", id=kept.state.id)
        if row is not None and row["seq"] == kept.state.seq:
            self.time.told(row["now"])
            return True
        self._forget(kept.state.id)
        return False

    async def _commit(self, before: Kept, decision: Decision, actor: str, claim: Claim | None) -> bool:
        execution_id = decision.state.id
        changed = change(before, decision, actor, claim)
        try:
            outcome = await self.committer.commit("runs.commit", changed)
        except BaseException:
            self._forget(execution_id)  # it may have been committed
            raise
        self.time.told(outcome.now)
        self._forget(execution_id)
        if not outcome.is_done:
            return False
        if decision.state.invocation is not None and not decision.state.has_ended:
            self._keep(Kept(before.tenant_id, decision.state, changed["hash"]))
        self._moved(before.tenant_id, decision)
        return True

    def _keep(self, kept: Kept) -> None:
        self._kept[kept.state.id] = kept
        self._operations += len(kept.state.operations)
        while self._operations > _KEPT_OPERATIONS and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))

    def _forget(self, execution_id: str) -> None:
        kept = self._kept.pop(execution_id, None)
        if kept is not None:
            self._operations -= len(kept.state.operations)

    @asynccontextmanager
    async def _turn(self, execution_id: str) -> AsyncIterator[None]:
        """One decision at a time on an execution in this process: the others would only be overtaken."""
        turn = self._turns.setdefault(execution_id, _Turn(asyncio.Lock()))
        turn.waiting += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                self._turns.pop(execution_id, None)
