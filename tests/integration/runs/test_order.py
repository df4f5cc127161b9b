"""Which execution is run next, by whom, and how many at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure.runs.engine import CodeRule, Failure
from perdure.runs.service.model import Flight, FunctionSpec
from tests.integration.runs.stage import TENANT, stage, waits


async def test_priority_then_age() -> None:
    async with stage() as on:
        low = await on.begin()
        old = await on.begin(priority=5)
        young = await on.begin(priority=5)
        assert [(await on.take()).work.execution_id for _ in range(3)] == [old, young, low]


async def test_executions_with_one_key_have_one_invocation_at_a_time() -> None:
    async with stage() as on:
        begun = [await on.begin(key="customer-1") for _ in range(3)]
        taken = await asyncio.gather(*(service.take(TENANT, on.worker, 0) for service in (on.first, on.second) * 4))
        (work,) = [one for one in taken if one is not None]
        assert work.execution_id in begun
        run = await on.begin(key="customer-2")
        assert (await on.take()).work.execution_id == run
        await on.first.fail(TENANT, Flight(work.execution_id, work.invocation), Failure.RETURNED)
        assert (await on.take()).work.execution_id in begun


async def test_a_functions_concurrency_holds_over_all_servers() -> None:
    async with stage(FunctionSpec("main", "v1", concurrency=2)) as on:
        for _ in range(6):
            await on.begin()
        taken = await asyncio.gather(*(service.take(TENANT, on.worker, 0) for service in (on.first, on.second) * 6))
        flights = [Flight(one.execution_id, one.invocation) for one in taken if one is not None]
        while len(flights) < 2:  # whoever lost a race for a place has taken nothing
            flights.append((await on.take()).flight)
        assert len(flights) == 2
        assert await on.first.take(TENANT, on.worker, 0) is None
        await on.first.fail(TENANT, flights[0], Failure.RETURNED)
        await on.take()
        assert await on.second.take(TENANT, on.worker, 0) is None


async def test_one_that_waits_holds_no_place() -> None:
    async with stage(FunctionSpec("main", "v1", concurrency=1)) as on:
        await on.begin(key="k")
        second = await on.begin(key="k")
        run = await on.take()
        await run.checkpoint(waits(3600))
        assert await on.first.take(TENANT, on.worker, 0) is None
        await run.answer("PENDING")
        assert (await on.take()).work.execution_id == second


async def test_code_that_an_execution_is_bound_to_is_waited_for() -> None:
    async with stage() as on:
        bound = await on.begin(code=CodeRule.EXACT)
        run = await on.take()
        await on.first.fail(TENANT, run.flight, Failure.RETURNED)
        other = await on.second.register(TENANT, "w", (FunctionSpec("main", "v2"),))
        assert await on.second.take(TENANT, other.id, 0) is None
        free = await on.begin()
        assert (await on.take(on.second, other.id)).work.execution_id == free
        assert (await on.take()).work.execution_id == bound


async def test_work_that_nobody_waits_for_any_more_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that leaves while it is given something costs its execution no attempt."""
    async with stage() as on:
        await on.begin()
        committing, may_go_on = asyncio.Event(), asyncio.Event()
        commit = on.first._decider.committer.commit

        async def held(*change: Any) -> Any:
            committing.set()
            await may_go_on.wait()
            return await commit(*change)

        monkeypatch.setattr(on.first._decider.committer, "commit", held)
        taking = asyncio.create_task(on.first.take(TENANT, on.worker, 60))
        await committing.wait()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        may_go_on.set()
        await on.first.settled()
        assert (await on.take(on.second)).work.invocation == 2
