"""Deciding on executions: what is known, what the engine makes of it, and the commit that holds only if nobody else was faster.

A state is kept in memory while an invocation of it is in flight, for its checkpoints come one after another. Any number of
servers may decide on one execution: each commit names the entry that it was decided behind, and whoever was overtaken reads and
decides again. An answer that records nothing, and a refusal, are checked in the same way. A few states that were read lately are
kept too, for whoever turns the pages of one.
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
from perdure.runs.service.news import news_of
from perdure.runs.service.rows import Claim, Kept, change

_ATTEMPTS = 20
_DELETED = ExecutionStatus.DELETING.value
#: How many operations all states together may have that are kept in memory.
_KEPT_OPERATIONS = 200_000
#: How many states that were read lately are kept, and how large their histories may be together.
_READ_MOST, _READ_BYTES = 16, 64 << 20


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

    def __init__(
        self, database: Database, clock: Clock, rules: Rules, moved: Callable[[str, Decision], None], committer: Committer
    ) -> None:
        self.time = DatabaseTime(clock)
        self.rules = rules
        self.committer = committer
        self._database = database
        self._moved = moved
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._operations = 0
        self._read: OrderedDict[str, Kept] = OrderedDict()
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
        kept = self._kept.get(execution_id) or self._read.get(execution_id)
        if kept is None or not await self._is_current(kept):
            kept = await self._load(execution_id)
        if tenant_id is not None and (kept.tenant_id != tenant_id or kept.state.status is ExecutionStatus.DELETING):
            raise no_such_execution()
        self._read[execution_id] = kept
        self._read.move_to_end(execution_id)
        while len(self._read) > 1 and not self._has_room():
            self._read.popitem(last=False)
        return kept

    def forget(self, execution_id: str) -> None:
        """Nothing of it is to be kept in memory."""
        kept = self._kept.pop(execution_id, None)
        if kept is not None:
            self._operations -= len(kept.state.operations)
        self._read.pop(execution_id, None)

    # --------------------------------------------------------------------------------------------------------------------- parts

    async def _known(self, tenant_id: str | None, execution_id: str) -> tuple[Kept, bool]:
        """What to decide on, and whether it was read just now."""
        kept = self._kept.get(execution_id)
        if kept is not None and tenant_id in {None, kept.tenant_id}:
            return kept, False
        return await self._load(execution_id, tenant_id), True

    async def _load(self, execution_id: str, tenant_id: str | None = None) -> Kept:
        row = await self._database.one("runs.load", id=execution_id)
        if row is None or (tenant_id is not None and (row["tenant_id"] != tenant_id or row["status"] == _DELETED)):
            raise no_such_execution()
        self.time.told(row["now"])
        started = FACT.validate_json(row["started"])
        assert isinstance(started, Started)
        return Kept(row["tenant_id"], assemble(started, row["head"], row["ops"]), row["hash"], row["is_limited"])

    def _has_room(self) -> bool:
        return len(self._read) <= _READ_MOST and sum(one.state.history_bytes for one in self._read.values()) <= _READ_BYTES

    async def _is_current(self, kept: Kept) -> bool:
        """Whether what is kept is what the database has; else it is forgotten."""
        row = await self._database.one("runs.seq", id=kept.state.id)
        if row is not None and row["seq"] == kept.state.seq:
            self.time.told(row["now"])
            return True
        self.forget(kept.state.id)
        return False

    async def _commit(self, before: Kept, decision: Decision, actor: str, claim: Claim | None) -> bool:
        execution_id = decision.state.id
        changed = change(before, decision, actor, claim)
        try:
            outcome = await self.committer.commit("runs.commit", changed, news_of(before, decision))
        except BaseException:
            self.forget(execution_id)  # it may have been committed
            raise
        self.time.told(outcome.now)
        self.forget(execution_id)
        if not outcome.is_done:
            return False
        if decision.state.invocation is not None and not decision.state.has_ended:
            is_limited = before.is_limited or (claim is not None and claim.slot is not None)
            self._keep(Kept(before.tenant_id, decision.state, changed["hash"], is_limited))
        self._moved(before.tenant_id, decision)
        return True

    def _keep(self, kept: Kept) -> None:
        self._kept[kept.state.id] = kept
        self._operations += len(kept.state.operations)
        while self._operations > _KEPT_OPERATIONS and len(self._kept) > 1:
            self.forget(next(iter(self._kept)))

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
