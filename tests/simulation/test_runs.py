"""A server of durable executions that dies before or behind any statement: every execution goes on as if nothing had happened.
The worker repeats what was not answered, as AWS's clients do, or dies with the server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from perdure.core.clock import SystemClock
from perdure.core.errors import CallbackClosed, NotFound, StaleCheckpoint
from perdure.core.ids import DEFAULT_TENANT
from perdure.db.database import Database
from perdure.runs.protocol import (
    Action,
    CheckpointRequest,
    ExecutionStatus,
    InvocationInput,
    InvocationOutput,
    InvocationStatus,
    Operation,
    OperationStatus,
    OperationUpdate,
)
from perdure.runs.service.model import Assignment, Flight, FunctionSpec, NewExecution
from perdure.runs.service.service import ExecutionService
from perdure.runs.service.verify import verify
from tests.fakes.database import fresh_url
from tests.integration.runs.stage import asks, invokes, update, waits
from tests.simulation.fuse import Fuse, FusedDatabase, Killed, killed_everywhere, steps

T = TypeVar("T")
TENANT = DEFAULT_TENANT
FUNCTIONS = (FunctionSpec("main", "v1"), FunctionSpec("child", "v1", is_durable=False))
WAIT_S = 60
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

    async def checkpoint(self, execution_id: str, request: CheckpointRequest) -> Any:
        return await self._call(lambda: self.service.checkpoint(TENANT, execution_id, request))


PENDING = InvocationOutput(status=InvocationStatus.PENDING)


@dataclass
class Playing:
    """The function: what AWS's SDK would do with what it is told."""

    life: Life
    execution_id: str
    token: str
    operations: dict[str, Operation] = field(default_factory=dict)
    calls: int = 0

    def know(self, operations: Sequence[Operation]) -> None:
        self.operations |= {op.id: op for op in operations}

    async def say(self, *updates: OperationUpdate) -> None:
        self.calls += 1
        request = CheckpointRequest(checkpoint_token=self.token, updates=updates, client_token=f"c{self.calls}")
        answer = await self.life.checkpoint(self.execution_id, request)
        assert answer.checkpoint_token is not None, "nobody has paused it"
        self.token = answer.checkpoint_token
        self.know(answer.new_execution_state.operations)

    def status(self, op: str) -> OperationStatus | None:
        return self.operations[op].status if op in self.operations else None

    async def play(self) -> InvocationOutput:
        await self._step("first")
        if not await self._once("once"):
            return PENDING
        for op, start in (("wait", waits(WAIT_S)), ("ask", asks()), ("invoke", invokes("child", op="invoke"))):
            if self.status(op) is None:
                self.life.asked_at_s = self.life.now_s() if op == "wait" else self.life.asked_at_s
                await self.say(start)
            if self.status(op) is OperationStatus.STARTED:
                return PENDING
            assert self.status(op) is OperationStatus.SUCCEEDED
            if op == "wait":
                assert self.life.asked_at_s is not None and self.life.now_s() - self.life.asked_at_s >= WAIT_S, "it is early"
        await self._step("last")
        return InvocationOutput(status=InvocationStatus.SUCCEEDED, result='"out"')

    async def _step(self, op: str) -> None:
        """At least once."""
        if self.status(op) is None:
            await self.say(update("STEP", "START", op))
        if self.status(op) is OperationStatus.STARTED:
            self.life.effects[op] += 1
            await self.say(update("STEP", "SUCCEED", op, payload='"done"'))

    async def _once(self, op: str) -> bool:
        """At most once per attempt: one that was begun by somebody who is gone is not begun again."""
        status = self.status(op)
        if status is OperationStatus.STARTED:
            options = {"NextAttemptDelaySeconds": 5}
            await self.say(
                OperationUpdate.model_validate({"Id": op, "Type": "STEP", "Action": Action.RETRY, "StepOptions": options})
            )
            return False
        if status is OperationStatus.PENDING:
            return False
        if status is not OperationStatus.SUCCEEDED:
            await self.say(update("STEP", "START", op))
            attempt = self.operations[op].step_details.attempt if self.operations[op].step_details else 0  # type: ignore[union-attr]
            self.life.effects[f"{op} {attempt}"] += 1
            await self.say(update("STEP", "SUCCEED", op, payload='"done"'))
        return True


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
