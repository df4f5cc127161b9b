"""A server of durable executions that dies before or behind any statement: every execution goes on as if nothing had happened.
The worker repeats what was not answered, as AWS's clients do, or dies with the server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from perdure.core.clock import SystemClock
from perdure.core.errors import CallbackClosed, NotFound, StaleCheckpoint
from perdure.core.ids import DEFAULT_TENANT
from perdure.db.database import Database
from perdure.runs.protocol import (
    CheckpointAnswer,
    CheckpointRequest,
    ExecutionStatus,
    InvocationInput,
    InvocationOutput,
    InvocationStatus,
)
from perdure.runs.service.model import Assignment, Flight, FunctionSpec, NewExecution
from perdure.runs.service.service import ExecutionService
from perdure.runs.service.verify import verify
from tests.fakes.database import fresh_url
from tests.integration.runs.played import WAIT_S, Playing
from tests.simulation.fuse import Fuse, FusedDatabase, Killed, killed_everywhere, steps

T = TypeVar("T")
TENANT = DEFAULT_TENANT
FUNCTIONS = (FunctionSpec("main", "v1"), FunctionSpec("child", "v1", is_durable=False))
MOST_TURNS = 60


@dataclass
class Life:
    """One execution of ``main``, from its start to its end, on servers of which the first dies."""

    url: str
    fuse: Fuse
    does_worker_die: bool
    effects: Counter[str] = field(default_factory=Counter)
    shifted_s: float = 0.0
    asked_at_s: float | None = None
    service: ExecutionService = field(init=False)
    database: Database = field(init=False)
    worker: str = ""
    deaths: int = 0

    async def open(self) -> None:
        self.database = Database(self.url, max_connections=4)
        await self.database.open()
        self.database.shift_clock(self.shifted_s)
        fused: Any = FusedDatabase(Fuse() if self.deaths else self.fuse, self.database)
        self.service = ExecutionService(fused, SystemClock())

    async def close(self) -> None:
        await self.service.close()
        await self.database.close()

    async def again(self) -> None:
        self.deaths += 1
        await self.close()
        await self.open()

    def now_s(self) -> float:
        return self.shifted_s + asyncio.get_running_loop().time()

    async def pass_time(self, seconds: float) -> None:
        self.shifted_s += seconds
        self.database.shift_clock(seconds)

    async def surely(self, call: Callable[[], Awaitable[T]]) -> T:
        """As a client that repeats what was not answered."""
        while True:
            try:
                return await call()
            except Killed:
                await self.again()

    # ------------------------------------------------------------------------------------------------------------------- worker

    async def live(self) -> ExecutionStatus:
        await self.open()
        try:
            await self.surely(self._clockwork)
            await self._register()
            begun = await self.surely(lambda: self.service.begin(NewExecution(TENANT, "main", '"in"', name="life")))
            for _ in range(MOST_TURNS):
                if await self._turn(begun.execution_id):
                    info = await self.surely(lambda: self.service.describe(TENANT, begun.execution_id))
                    assert info.result == '"out"'
                    return info.status
            raise AssertionError("it has not ended")
        finally:
            await self.close()

    async def _register(self) -> None:
        self.worker = (await self.surely(lambda: self.service.register(TENANT, "w", FUNCTIONS))).id

    async def _turn(self, execution_id: str) -> bool:
        """Whatever can be done now; whether it has ended."""
        deaths = self.deaths
        work = await self.surely(lambda: self.service.take(TENANT, self.worker, 0))
        if work is not None:
            try:
                await self._invocation(work)
            except Killed:  # the worker dies with its server: its lease ends
                await self.again()
                await self._register()
            except StaleCheckpoint:  # it was fenced off
                pass
        else:
            await self.service.settled()
            for callback in await self.surely(lambda: self.service.callbacks(TENANT)):
                await self._say_yes(callback.callback_id)
            await self.pass_time(31 if self.deaths == deaths else 40)
            await self.surely(self._clockwork)
        info = await self.surely(lambda: self.service.ended(TENANT, execution_id, 0))
        return info is not None

    async def _clockwork(self) -> None:
        await self.service.clockwork.turn()
        await self.service.clockwork.sweep()

    async def _say_yes(self, callback_id: str) -> None:
        try:
            await self.surely(lambda: self.service.complete_callback(TENANT, callback_id, '"yes"'))
        except (CallbackClosed, NotFound):
            assert self.deaths, "nobody else completes it"

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        return await call() if self.does_worker_die else await self.surely(call)

    async def _invocation(self, work: Assignment) -> None:
        flight = Flight(work.execution_id, work.invocation)
        if work.function == "child":
            output = InvocationOutput(status=InvocationStatus.SUCCEEDED, result='"child"')
            await self._call(lambda: self.service.answer(TENANT, flight, output))
            return
        assert isinstance(work.event, InvocationInput)
        playing = Playing(self, work.execution_id, work.event.checkpoint_token)
        playing.know(work.event.initial_execution_state.operations)
        output = await playing.play()
        await self._call(lambda: self.service.answer(TENANT, flight, output))

    async def checkpoint(self, execution_id: str, request: CheckpointRequest) -> CheckpointAnswer:
        return await self._call(lambda: self.service.checkpoint(TENANT, execution_id, request))

    def effect(self, execution_id: str, what: str) -> None:
        self.effects[what] += 1

    def done(self, execution_id: str, step: str) -> None:
        """What ran is counted at the end."""

    def waits(self, execution_id: str) -> None:
        self.asked_at_s = self.now_s()

    def woken(self, execution_id: str) -> None:
        assert self.asked_at_s is not None and self.now_s() - self.asked_at_s >= WAIT_S, "it is early"


async def live(at: int | None, *, does_worker_die: bool = False) -> Life:
    async with fresh_url() as url:
        life = Life(url, Fuse(at), does_worker_die)
        assert await life.live() is ExecutionStatus.SUCCEEDED
        async with _database(url) as database:
            checked, problems = await verify(database)
            assert (checked, problems) == (2, []), "main and its child"
            assert await database.all("runs.due", limit=10) == [], "nothing is left to do"
        return life


@asynccontextmanager
async def _database(url: str) -> AsyncIterator[Database]:
    database = Database(url)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


async def test_a_life_without_a_death() -> None:
    life = await live(None)
    assert life.effects == {"first": 1, "once 0": 1, "last": 1}
    assert not life.deaths


@pytest.mark.parametrize("step", steps(11))
@pytest.mark.parametrize("does_worker_die", [False, True], ids=["worker-repeats", "worker-dies"])
async def test_a_server_may_die_at_any_statement(does_worker_die: bool, step: int) -> None:
    async def kill(at: int | None) -> Fuse:
        life = await live(at, does_worker_die=does_worker_die)
        once = {name: count for name, count in life.effects.items() if name.startswith("once")}
        assert set(once.values()) == {1}, f"an attempt that must run once ran {once}"
        if not does_worker_die:
            assert life.effects["first"] == life.effects["last"] == 1
        return life.fuse

    whole, fired = await killed_everywhere(kill, step)
    points = {"before a batch", "after a batch", "before runs.ready", "after runs.told", "before runs.due", "before runs.load"}
    assert points <= set(whole.passed)
    assert fired.total() >= whole.count // step


@pytest.mark.parametrize("step", steps(3))
async def test_a_server_may_die_at_any_statement_of_a_deletion(step: int) -> None:
    """What was kept for long enough goes as a whole, whoever dies over it, and its chain holds all the while."""

    async def kill(at: int | None) -> Fuse:
        fuse = Fuse(at)
        async with fresh_url() as url, _database(url) as database:
            first = ExecutionService(database, SystemClock())
            worker = await first.register(TENANT, "w", FUNCTIONS)
            begun = await first.begin(NewExecution(TENANT, "child", '"in"'))
            work = await first.take(TENANT, worker.id, 0)
            assert work is not None
            output = InvocationOutput(status=InvocationStatus.SUCCEEDED, result='"out"')
            await first.answer(TENANT, Flight(work.execution_id, work.invocation), output)
            database.shift_clock(2 * WAIT_S)
            fused: Any = FusedDatabase(fuse, database)
            dying = ExecutionService(fused, SystemClock(), keep_s=WAIT_S)
            with suppress(Killed):
                await dying.clockwork.sweep()
            await dying.close()
            assert await verify(database) == (1, [])
            next_one = ExecutionService(database, SystemClock(), keep_s=WAIT_S)
            while not await next_one.clockwork.sweep():
                pass
            with pytest.raises(NotFound):
                await next_one.describe(TENANT, begun.execution_id)
            row = await database.one("runs.load", id=begun.execution_id)
            assert row is not None and row["ops"] == [] and '"in"' not in row["started"] and "out" not in row["head"]
            entries = await database.all("runs.links", id=begun.execution_id, after=0, last=100, limit=100)
            assert entries and all(one["fact"] is None for one in entries)
            assert await verify(database) == (1, [])
        return fuse

    whole, fired = await killed_everywhere(kill, step)
    assert {"in transaction, before runs.forget_data", "before a commit", "after a batch"} <= set(whole.passed)
    assert fired
