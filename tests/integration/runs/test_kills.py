"""Executions of AWS's SDK, unmodified, in worker processes against a server process, while these and the database are killed by
SIGKILL at random times and at named points: each ends as if nothing had happened (durable: rules 1 to 4, faults 1, 2, 6 and 19).

What steps did is told by a witness outside. The seed repeats the choices of what is killed; the scheduler decides the rest."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest

from perdure.core.errors import CallbackClosed
from perdure.db.database import Database
from perdure.runs.engine import FACT
from perdure.runs.engine.facts import Checkpointed, Fired, Invoked, Recorded
from perdure.runs.protocol import Action, OperationType
from perdure.runs.service.verify import verify
from perdure.sdk import AsyncClient
from perdure.wire.public import ExecutionStatus
from tests.integration.runs.yard import Yard, pause, yard

#: What each execution tells the witness if nothing happens: first, once, ask, last.
LINES = 4
#: By when of all that the last kill comes.
SHARE = 0.8
IDLE_S = 5.0
SECOND = timedelta(seconds=1)
#: By what the clocks of two servers differ, each of which knows the database's as of its last answer.
CLOCKS = timedelta(seconds=0.5)


@dataclass(frozen=True)
class Plan:
    executions: int
    kills: int
    concurrency: int
    deadline_s: float


SHORT, LONG = Plan(16, 8, 1, 120), Plan(1000, 200, 3, 3000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "plan", [pytest.param(SHORT, id="16 under 8 kills"), pytest.param(LONG, id="1000 under 200 kills", marks=pytest.mark.long)]
)
async def test_every_execution_ends_and_nothing_runs_twice(plan: Plan) -> None:
    seed = secrets.randbelow(1 << 32)
    print(f"seed={seed}")
    async with yard(seed, plan.concurrency) as on, on.client() as client:
        async with asyncio.timeout(plan.deadline_s):
            await _live(on, client, plan)
        print(f"kills={on.killed.total()} {dict(on.killed)}")
        assert on.killed.total() >= plan.kills
        await _check_results(on, client, plan)
        await _check_histories(on, plan)


async def _live(on: Yard, client: AsyncClient, plan: Plan) -> None:
    answering = asyncio.create_task(_say_yes(on, client))
    starting = asyncio.create_task(_start(on, client, plan))
    try:
        await _strike(on, plan)
        await starting
        while await _open(on, client):
            assert not answering.done(), answering.exception()
            await pause(0.3)
    finally:
        for task in (answering, starting):
            task.cancel()
        await asyncio.gather(answering, starting, return_exceptions=True)


async def _start(on: Yard, client: AsyncClient, plan: Plan) -> None:
    """A start that is not answered is repeated, and is the same execution by its name."""
    for number in range(plan.executions):

        async def start(number: int = number) -> None:
            await client.executions.start("story", {"n": number}, name=f"story-{number}")

        await on.surely(start)


async def _say_yes(on: Yard, client: AsyncClient) -> None:
    """To every callback that the witness was told of."""
    answered = set[str]()
    while True:
        for callback_id in {words[3] for words in on.told() if words[1] == "ask"} - answered:

            async def succeed(callback_id: str = callback_id) -> None:
                await client.callbacks.succeed(callback_id, "yes")

            with suppress(CallbackClosed):  # the answer to the first time was lost
                await on.surely(succeed)
            answered.add(callback_id)
        await pause(0.1)


async def _strike(on: Yard, plan: Plan) -> None:
    """As the executions go on, so that the last kill still meets some."""
    loop = asyncio.get_running_loop()
    while (kills := on.killed.total()) < plan.kills:
        wanted, until = SHARE * (kills + 1) / plan.kills * plan.executions * LINES, loop.time() + IDLE_S
        while on.lines() < wanted and loop.time() < until:
            await pause(0.02)
        await on.strike()


async def _open(on: Yard, client: AsyncClient) -> bool:
    async def some() -> bool:
        return bool([one async for one in client.executions.list(status="RUNNING")])

    return await on.surely(some)


# -------------------------------------------------------------------------------------------------------------- what must hold


async def _check_results(on: Yard, client: AsyncClient, plan: Plan) -> None:
    effects = Counter((words[0], words[1]) for words in on.told())
    listed = [one async for one in client.executions.list(function="story")]
    assert sorted(one.name for one in listed) == sorted(f"story-{number}" for number in range(plan.executions))
    for one in listed:
        assert one.status is ExecutionStatus.SUCCEEDED, one
        number = one.name.partition("-")[2]
        result: dict[str, Any] = await (await client.executions.get(one.execution_id)).result()
        once = result.pop("once")
        doubled = {"doubled": 2 * int(number)} if int(number) % 4 == 0 else {}
        assert result == {"first": "first", "asked": '"yes"', "last": "last"} | doubled
        assert effects[number, "first"] and effects[number, "last"]
        assert effects[number, "once"] <= 1, f"{one.name}: a step that runs at most once ran {effects[number, 'once']} times"
        assert once == "interrupted" or effects[number, "once"] == 1


async def _check_histories(on: Yard, plan: Plan) -> None:
    database = Database(on.url)
    await database.open()
    try:
        checked, problems = await verify(database)
        assert problems == []
        assert checked == plan.executions + len(range(0, plan.executions, 4)), "each, and one child of every fourth"
        assert await database.all("runs.due", limit=1) == [], "nothing is left to do"
        told = Counter((words[0], words[1], words[2]) for words in on.told() if words[1] != "ask")
        assert set(told.values()) == {1}, "no invocation runs a step twice"
        for row in await database.all("runs.verified", after="", limit=10 * plan.executions):
            await _check_history(database, row["id"], told)
    finally:
        await database.close()


async def _check_history(database: Database, execution_id: str, told: Counter[tuple[str, str, str]]) -> None:
    """No invocation that began after a step was recorded has run it, and no wait was over early."""
    begun: dict[str, int] = {}
    done: dict[str, int] = {}
    due: dict[str, datetime] = {}
    for row in await database.all("runs.entries", id=execution_id, after=0, limit=10_000):
        match FACT.validate_json(row["fact"]):
            case Invoked() as invoked:
                begun[invoked.request_id] = row["seq"]
            case Checkpointed() as checkpoint:
                done |= {one.update.name or "": row["seq"] for one in checkpoint.records if _ends_a_step(one)}
                due |= {one.update.id: one.due for one in checkpoint.records if one.due is not None and _is_wait(one)}
                assert all(due[one.update.id] > row["at"] + SECOND - CLOCKS for one in checkpoint.records if _is_wait(one))
            case Fired() as fired:
                early = [one.operation_id for one in fired.firings if row["at"] < due.get(one.operation_id, row["at"])]
                assert not early, f"{execution_id}: waits were over early: {early}"
            case _:
                pass
    for number, step, request in told:
        if request in begun and step in done:
            assert begun[request] < done[step], f"story-{number}: {step} was recorded, and {request} ran it again"


def _ends_a_step(one: Recorded) -> bool:
    return one.update.type is OperationType.STEP and one.update.action is Action.SUCCEED


def _is_wait(one: Recorded) -> bool:
    return one.update.type is OperationType.WAIT and one.update.action is Action.START
