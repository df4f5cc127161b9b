"""What has ended is deleted some time later, with all that it was given and did; what goes on, and what leads to it, stays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from perdure.core.clock import SystemClock
from perdure.core.errors import NotFound
from perdure.db.database import Database
from perdure.runs.engine import Rules
from perdure.runs.protocol import InvocationOutput, InvocationStatus
from perdure.runs.service import clockwork
from perdure.runs.service.model import Flight
from perdure.runs.service.service import ExecutionService
from perdure.runs.service.verify import verify
from tests.fakes.database import fresh_url
from tests.integration.runs.stage import MAIN, TENANT, FunctionSpec, Stage, asks, invokes

DAY_S = 86_400.0
KEEP_S = 30 * DAY_S
FUNCTIONS = (MAIN, FunctionSpec("child", "v1", is_durable=False))


@asynccontextmanager
async def keeping(keep_s: float | None) -> AsyncIterator[Stage]:
    async with fresh_url() as url:
        databases = [Database(url), Database(url)]
        for database in databases:
            await database.open()
        services = [ExecutionService(one, SystemClock(), Rules(), keep_s) for one in databases]
        for service in services:
            await service.clockwork.turn()
        worker = await services[0].register(TENANT, "w", FUNCTIONS)
        try:
            yield Stage(services[0], services[1], databases, worker.id)
        finally:
            for service in services:
                await service.close()
            for database in databases:
                await database.close()


async def end(on: Stage, **options: str) -> str:
    execution_id = await on.begin(input='"plum-in"', **options)
    await (await on.take()).answer("SUCCEEDED", '"plum-out"')
    return execution_id


async def sweep(on: Stage) -> None:
    """By both servers at once, as they do."""
    await on.first.clockwork.sweep()
    await on.second.clockwork.sweep()


async def is_there(on: Stage, execution_id: str) -> bool:
    try:
        await on.second.describe(TENANT, execution_id)
    except NotFound:
        return False
    return True


async def test_it_is_kept_for_so_long_after_its_end_and_then_nothing_of_it_is_left_but_hashes() -> None:
    async with keeping(KEEP_S) as on:
        old = await end(on, name="old")
        await on.pass_time(KEEP_S - DAY_S)
        young = await end(on, name="young")
        await sweep(on)
        assert await is_there(on, old)
        await on.pass_time(2 * DAY_S)
        await sweep(on)
        assert not await is_there(on, old)
        assert await is_there(on, young)
        row = await on.database.one("runs.load", id=old)
        assert row is not None and row["ops"] == []
        assert "plum" not in row["started"] + row["head"]
        entries = await on.database.all("runs.links", id=old, after=0, last=100, limit=100)
        assert entries and all(one["fact"] is None for one in entries)
        assert entries[-1]["actor"] == "retention"
        assert await verify(on.database) == (2, []), "its chain still holds"
        assert (await on.begin(name="old")) != old, "its name is free"


async def test_what_goes_on_is_kept_however_old_it_is() -> None:
    async with keeping(KEEP_S) as on:
        waiting = await on.begin()
        run = await on.take()
        await run.checkpoint(asks())
        await run.answer("PENDING")
        await on.pass_time(20 * KEEP_S)
        await sweep(on)
        assert await on.status(waiting) == "RUNNING"


async def test_a_child_is_kept_as_long_as_its_parent_goes_on() -> None:
    async with keeping(KEEP_S) as on:
        parent = await on.begin()
        run = await on.take()
        await run.checkpoint(invokes("child"))
        await run.answer("PENDING")
        await on.first.settled()
        work = await on.first.take(TENANT, on.worker, 0)
        assert work is not None and work.function == "child"
        output = InvocationOutput(status=InvocationStatus.SUCCEEDED, result="1")
        await on.first.answer(TENANT, Flight(work.execution_id, work.invocation), output)
        await on.first.settled()
        await on.pass_time(2 * KEEP_S)
        await sweep(on)
        assert await is_there(on, work.execution_id), "its parent's history leads to it"
        worker = await on.first.register(TENANT, "w", FUNCTIONS)  # nobody has heard of the other one for a day
        again = await on.take(worker=worker.id)
        await again.answer("SUCCEEDED", "1")
        await sweep(on)
        assert not await is_there(on, work.execution_id)
        assert await is_there(on, parent)
        await on.pass_time(2 * KEEP_S)
        await sweep(on)
        assert not await is_there(on, parent)
        assert await verify(on.database) == (2, [])


async def test_one_that_was_stopped_while_its_function_runs_is_kept_until_that_is_over() -> None:
    async with keeping(0.001) as on:
        execution_id = await on.begin()
        await on.take()
        await on.first.stop(TENANT, execution_id, None)
        await on.pass_time(10)
        await sweep(on)
        assert await is_there(on, execution_id)
        await on.pass_time(31)  # its lease is over
        await sweep(on)
        assert not await is_there(on, execution_id)


async def test_without_retention_everything_is_kept() -> None:
    async with keeping(None) as on:
        execution_id = await end(on)
        await on.pass_time(1000 * KEEP_S)
        await sweep(on)
        assert await is_there(on, execution_id)


async def test_more_than_one_pass_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the next one comes at once."""
    monkeypatch.setattr(clockwork, "_LIMIT", 2)
    async with keeping(KEEP_S) as on:
        found = [await end(on) for _ in range(3)]
        await on.pass_time(2 * KEEP_S)
        assert not await on.first.clockwork.sweep()
        assert await on.first.clockwork.sweep()
        assert not [one for one in found if await is_there(on, one)]
