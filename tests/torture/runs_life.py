"""Lives of a server of durable executions, killed by the rounds of ``runs``: the real service and database, functions that are
played in the same process, and a clock that this moves. See ``life`` for the protocol."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from signal import SIGUSR1, SIGUSR2

from perdure.core import crashpoints
from perdure.core.clock import SystemClock
from perdure.core.errors import Conflict, NotFound, PerdureError
from perdure.core.ids import DEFAULT_TENANT
from perdure.db.database import Database
from perdure.runs.engine import Failure, Rules
from perdure.runs.protocol import (
    CheckpointAnswer,
    CheckpointRequest,
    ExecutionStatus,
    InvocationInput,
    InvocationOutput,
    InvocationStatus,
    parse_arn,
)
from perdure.runs.service.heads import SignedHeads
from perdure.runs.service.histories import StoredHistories
from perdure.runs.service.model import Assignment, Flight, FunctionSpec, ListQuery, NewExecution
from perdure.runs.service.service import ExecutionService
from perdure.snapshots.objects.client import open_objects
from tests.integration.runs.played import WAIT_S, Playing
from tests.torture.life import DATABASE_DEADLINE_S, WORK_S, Order, _kill_in_its_place, main
from tests.torture.model import Violation, told_by
from tests.torture.runs_told import Told

TENANT = DEFAULT_TENANT
FUNCTIONS = (FunctionSpec("main", "v1"), FunctionSpec("child", "v1", is_durable=False))
#: Here workers die all the time.
RULES = Rules(attempts={Failure.RAISED: 5, Failure.LOST: 1000, Failure.EMPTY: 3})
KEEP_S = 30 * 86_400.0
LEASE_OVER_S = 31
OPEN_MAX = 8
TURNS_MAX = 100
WEIGHT_OF_WANTED = 60
OPEN = (ExecutionStatus.RUNNING, ExecutionStatus.PAUSING, ExecutionStatus.PAUSED)


class RunsLife:
    """One server, from its start to its end. Implements ``played.World``."""

    def __init__(self, order: Order, say: Callable[[str], None]) -> None:
        self._order = order
        self._say = say
        self._random = Random(order.seed)
        self._crash_file = Path(order.home) / "crash"
        self._told = Told(Path(order.home) / "told")
        self._started_again = asyncio.Event()
        self._is_armed = False
        self._is_back = False
        self._worker = ""

    async def live(self) -> None:
        order = self._order
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(SIGUSR1, self._tell_what_is_awaited)
        loop.add_signal_handler(SIGUSR2, self._started_again.set)
        self.database = Database(order.url, max_connections=4)
        await self.database.open()
        self.database.shift_clock(self._told.shifted_s)
        self.service = ExecutionService(self.database, SystemClock(), RULES, KEEP_S)
        self.heads = SignedHeads(self.database, open_objects((Path(order.home) / "signed").as_uri()), b"k" * 32)
        await self._clockwork()
        if order.checks:
            await self._check()
        if not order.steps:
            return
        if order.crash is not None:
            self._crash_file.write_text(order.crash)
            crashpoints.arm(self._crash_file)
            self._is_armed = True
        if order.kills is not None:
            crashpoints._kill = partial(_kill_in_its_place, order.kills)
        self._say("working")
        until = loop.time() + WORK_S
        for _ in range(order.steps):
            if loop.time() > until:
                return
            await self._attempt(self._step())
            if self._has_fired():
                self._say("fired")
                await self._database_back()
                await self._check()
                return

    def _tell_what_is_awaited(self) -> None:
        for task in asyncio.all_tasks():
            task.print_stack(file=sys.stderr)
        sys.stderr.flush()
        self._say("told")

    def _has_fired(self) -> bool:
        return self._is_armed and not self._crash_file.exists()

    async def _database_back(self) -> None:
        """Somebody starts it again, and tells by a signal; then a server looks which of its connections are dead."""
        if self._order.kills is None:
            return
        async with asyncio.timeout(DATABASE_DEADLINE_S):
            await self._started_again.wait()
            while not self._is_back:
                with suppress(PerdureError):
                    await self.database.renew()
                    await self.service.find(TENANT, ListQuery(limit=1))
                    self._is_back = True

    # ---------------------------------------------------------------------------------------------------------------- work

    async def _step(self) -> None:
        weights = [self._weight(*one) for one in ACTIONS.values()]
        action = self._random.choices(list(ACTIONS), weights)[0]
        await action(self)
        await self.service.settled()

    def _weight(self, weight: int, passes: tuple[str, ...]) -> int:
        is_wanted = (self._order.crash or "").startswith(passes) if passes else False
        return max(weight, WEIGHT_OF_WANTED) if is_wanted else weight

    async def _attempt(self, work: Awaitable[object]) -> None:
        """An error of the product is an answer: nothing was acknowledged."""
        with suppress(PerdureError):
            await work

    async def _pass_time(self, seconds: float) -> None:
        self._told.note("shifted", seconds=seconds)
        self.database.shift_clock(seconds)
        await self.service.clockwork.turn()
        await self.service.settled()

    async def _clockwork(self) -> None:
        await self.service.clockwork.turn()
        await self.service.clockwork.sweep()
        await self.service.settled()

    async def _begin(self) -> None:
        if len(await self._open()) < OPEN_MAX:
            await self._begin_named(f"x{self._random.randrange(1 << 32):08x}")

    async def _begin_named(self, name: str) -> None:
        self._told.note("beginning", name=name)
        await self._registered()
        begun = await self.service.begin(NewExecution(TENANT, "main", '"in"', name=name))
        self._told.note("begun", begun.execution_id, name=name)

    async def _registered(self) -> str:
        if not self._worker:
            self._worker = (await self.service.register(TENANT, "w", FUNCTIONS)).id
        return self._worker

    async def _take(self) -> Assignment | None:
        try:
            return await self.service.take(TENANT, await self._registered(), 0)
        except (NotFound, Conflict):  # nobody has heard of it for a day
            self._worker = ""
            return await self.service.take(TENANT, await self._registered(), 0)

    async def _work(self) -> None:
        while (work := await self._take()) is not None:
            flight = Flight(work.execution_id, work.invocation)
            output = InvocationOutput(status=InvocationStatus.SUCCEEDED, result='"child"')
            if work.function == "main":
                assert isinstance(work.event, InvocationInput)
                playing = Playing(self, work.execution_id, work.event.checkpoint_token, may_be_stopped=True)
                playing.know(work.event.initial_execution_state.operations)
                output = await playing.play()
            await self.service.answer(TENANT, flight, output)
            await self.service.settled()

    async def _wake(self) -> None:
        """Something waits, and its time comes."""
        await self._begin()
        await self._work()
        await self._pass_time(WAIT_S + 1)
        await self._work()

    async def _lose(self) -> None:
        """A worker takes something, and is not heard of again."""
        await self._begin()
        if await self._take() is not None:
            await self._pass_time(LEASE_OVER_S)

    async def _complete(self) -> None:
        await self._wake()
        for one in await self.service.callbacks(TENANT):
            await self.service.complete_callback(TENANT, one.callback_id, '"yes"')

    async def _whole(self) -> None:
        """From a start to an end, with a child."""
        await self._complete()
        await self._work()

    async def _stop(self) -> None:
        await self._begin()
        one = self._random.choice(await self._open())
        self._told.note("stopping", one)
        await self.service.stop(TENANT, one, None)
        self._told.note("stopped", one)

    async def _delete(self) -> None:
        await self._whole()
        if ended := await self._ended():
            one = self._random.choice(ended)
            self._told.note("deleting", one)
            await self.service.delete(TENANT, one)
            self._told.note("deleted", one)
            await self.service.clockwork.sweep()

    async def _expire(self) -> None:
        await self._whole()
        for one in await self._ended():
            self._told.note("deleting", one)
        await self._pass_time(KEEP_S + 1)
        await self.service.clockwork.sweep()

    async def _sign(self) -> None:
        """As a server does by the hour."""
        await self._whole()
        await self.heads.sign(every_s=0)

    async def _open(self) -> list[str]:
        return await self._in(OPEN)

    async def _ended(self) -> list[str]:
        return await self._in(tuple(one for one in ExecutionStatus if one not in OPEN))

    async def _in(self, statuses: tuple[ExecutionStatus, ...]) -> list[str]:
        found = await self.service.find(TENANT, ListQuery(statuses=statuses, limit=1000))
        return [parse_arn(one.durable_execution_arn).id for one in found.executions]

    # ----------------------------------------------------------------------------------------------------------- functions

    async def checkpoint(self, execution_id: str, request: CheckpointRequest) -> CheckpointAnswer:
        return await self.service.checkpoint(TENANT, execution_id, request)

    def effect(self, execution_id: str, what: str) -> None:
        self._told.effect(execution_id, what)

    def done(self, execution_id: str, step: str) -> None:
        self._told.done(execution_id, step)

    def waits(self, execution_id: str) -> None:
        self._told.waits(execution_id)

    def woken(self, execution_id: str) -> None:
        self._told.woken(execution_id)

    # ---------------------------------------------------------------------------------------------------------- invariants

    async def _check(self) -> None:
        """No fault falls into it: what it finds would be that fault."""
        if self._order.kills is not None and self._has_fired() and not self._is_back:
            return
        armed, crashpoints._armed = crashpoints._armed, None
        try:
            await self._hold()
        except Exception as error:
            self._say(f"violation {told_by(error)[0]}")
        finally:
            crashpoints._armed = armed  # with the passes that it has counted
        self._say("checked")

    async def _hold(self) -> None:
        for name in sorted(self._told.wished):  # a start that was not answered is repeated, and is the same one
            await self._begin_named(name)
        await self._to_the_end()
        for execution_id, facts in self._told.facts.items():
            if facts.name:
                await self._check_one(execution_id)
        for one in [one for one, facts in self._told.facts.items() if facts.is_gone]:
            await self._check_gone(one)
        found = [one async for one in StoredHistories(self.database, self.heads).verify()]
        wrong = [one for one in found if one.wrong is not None]
        if wrong or len(found) < len(self._told.facts):
            raise Violation(f"of {len(found)} histories these do not hold: {wrong[:3]}")
        left = await self.database.one("runs.next_due")
        if await self.database.all("runs.due", limit=1) or left is None or left["wait_s"] is not None:
            raise Violation(f"everything has ended, and something is due still: {left}")
        if await self.database.all("runs.deleting", limit=1):
            raise Violation("something of a deleted execution is left after a sweep")

    async def _to_the_end(self) -> None:
        for _ in range(TURNS_MAX):
            await self._work()
            for one in await self.service.callbacks(TENANT):
                await self.service.complete_callback(TENANT, one.callback_id, '"yes"')
            await self._pass_time(LEASE_OVER_S)
            await self._clockwork()
            left = await self.database.one("runs.next_due")
            if not await self._open() and left is not None and left["wait_s"] is None:
                return
        raise Violation(f"these do not come to their end: {(await self._open())[:5]}")

    async def _check_one(self, execution_id: str) -> None:
        facts = self._told.of(execution_id)
        try:
            info = await self.service.describe(TENANT, execution_id)
        except NotFound:
            if not facts.may_be_gone:
                raise Violation(f"{execution_id} was acknowledged and vanished") from None
            return
        if facts.is_gone:
            raise Violation(f"{execution_id} was deleted, and is there")
        if info.status is ExecutionStatus.STOPPED:
            if not facts.may_be_stopped:
                raise Violation(f"{execution_id} is stopped, and nobody has stopped it")
        elif facts.is_stopped or info.status is not ExecutionStatus.SUCCEEDED or info.result != '"out"':
            raise Violation(f"{execution_id} is {info.status.value} with {info.result}, stopped: {facts.is_stopped}")
        elif not {"first", "once", "last"} <= facts.done:
            raise Violation(f"{execution_id} has succeeded, and of its steps only {sorted(facts.done)} were done")

    async def _check_gone(self, execution_id: str) -> None:
        rows = await self.database.all("runs.entries", id=execution_id, after=0, limit=1000)
        kept = await self.database.one("runs.load", id=execution_id)
        if kept is None or kept["ops"] or '"in"' in kept["started"] or any(row["fact"] is not None for row in rows):
            raise Violation(f"{execution_id} was deleted, and what it was given or did is there")


#: What a life does, how often, and the named points that it can pass, by the begin of their names.
ACTIONS: dict[Callable[[RunsLife], Awaitable[None]], tuple[int, tuple[str, ...]]] = {
    RunsLife._begin: (10, ("runs.start-", "runs.batch-")),
    RunsLife._work: (20, ("runs.claim-", "runs.checkpoint-", "runs.answer-", "runs.batch-")),
    RunsLife._wake: (10, ("runs.timer-", "runs.claim-", "runs.checkpoint-", "runs.answer-")),
    RunsLife._lose: (5, ("runs.lease-",)),
    RunsLife._complete: (5, ("runs.callback-",)),
    RunsLife._whole: (10, ("runs.child-", "runs.parent-")),
    RunsLife._stop: (3, ("runs.stop-",)),
    RunsLife._delete: (3, ("runs.delete-",)),
    RunsLife._expire: (1, ("runs.expired",)),
    RunsLife._sign: (3, ("runs.heads-",)),
}


async def _live(order: Order, say: Callable[[str], None]) -> None:
    await RunsLife(order, say).live()


if __name__ == "__main__":
    main(_live)
