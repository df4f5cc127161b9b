"""Two servers of one database: what one makes ready or brings to its end, those who wait at the other hear of at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest

from perdure.runs.service import news, outside, working
from perdure.runs.service.model import Assignment, FunctionSpec
from tests.integration.runs.stage import MAIN, TENANT, Stage, asks, stage

DEADLINE_S = 60
#: Nobody looks by himself within the test.
NEVER_S = 3600.0


@pytest.fixture
async def on(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(working, "_LOOK_S", NEVER_S)
    monkeypatch.setattr(working, "_KNOWN_S", NEVER_S)
    monkeypatch.setattr(outside, "_LOOK_S", NEVER_S)
    async with stage(MAIN, FunctionSpec("narrow", "v1", concurrency=1)) as made:
        for service in (made.first, made.second):
            service.news.start(made.database.url)
            assert service.news.listener is not None
            async with asyncio.timeout(DEADLINE_S):
                await service.news.listener.listens.wait()
        yield made


async def waiting(call: Callable[[], Awaitable[object]], on: Stage) -> asyncio.Task[object]:
    """The call, once it waits at the second server."""

    async def whole() -> object:
        return await call()

    task = asyncio.create_task(whole())
    async with asyncio.timeout(DEADLINE_S):
        while not (on.second._ready._waiting or on.second._ends._waiting):
            await on.database.one("runs.clock")
        for _ in range(3):  # what it looks at once more before it waits
            await on.database.one("runs.clock")
    assert not task.done()
    return task


async def taken(task: asyncio.Task[object]) -> Assignment:
    async with asyncio.timeout(DEADLINE_S):
        work = await task
    assert isinstance(work, Assignment)
    return work


async def test_work_that_another_server_has_made(on: Stage) -> None:
    task = await waiting(lambda: on.second.take(TENANT, on.worker, NEVER_S), on)
    execution_id = await on.begin()
    assert (await taken(task)).execution_id == execution_id


async def test_a_callback_that_is_completed_at_another_server(on: Stage) -> None:
    await on.begin()
    run = await on.take()
    answer = await run.checkpoint(asks())
    (asked,) = [op for op in answer.new_execution_state.operations if op.callback_details]
    await run.answer("PENDING")
    task = await waiting(lambda: on.second.take(TENANT, on.worker, NEVER_S), on)
    assert asked.callback_details is not None
    await on.first.complete_callback(TENANT, asked.callback_details.callback_id or "", '"yes"')
    assert (await taken(task)).invocation == 2


async def test_a_place_that_is_free_again(on: Stage) -> None:
    await on.begin("narrow")
    run = await on.take()
    second = await on.begin("narrow")
    task = await waiting(lambda: on.second.take(TENANT, on.worker, NEVER_S), on)
    await run.answer("SUCCEEDED", "1")
    assert (await taken(task)).execution_id == second


async def test_an_end(on: Stage) -> None:
    execution_id = await on.begin()
    run = await on.take()
    task = await waiting(lambda: on.second.ended(TENANT, execution_id, NEVER_S), on)
    await run.answer("SUCCEEDED", "1")
    async with asyncio.timeout(DEADLINE_S):
        assert await task is not None


async def test_what_was_said_while_nobody_listened_is_looked_for_afterwards(on: Stage) -> None:
    """The connection breaks, and work is made before there is another one."""
    listener = on.second.news.listener
    assert listener is not None
    task = await waiting(lambda: on.second.take(TENANT, on.worker, NEVER_S), on)
    heard = asyncio.Event()
    hear = listener._heard

    def hear_later(payload: str | None) -> None:
        """It is lost, unless somebody looks at the next connect."""
        if payload is None:
            hear(payload)
            heard.set()

    listener._heard = hear_later
    execution_id = await on.begin()
    async with await psycopg.AsyncConnection.connect(on.database.url, autocommit=True) as connection:
        await connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'perdure-listener' and datname = current_database()"
        )
    assert (await taken(task)).execution_id == execution_id
    assert heard.is_set()


async def test_what_a_function_reports_is_told_to_nobody(on: Stage) -> None:
    """A notification takes a lock of the whole database, so steps do without."""
    await on.begin()
    run = await on.take()
    told: list[str] = []
    payload = on.first.news.payload

    def watched(what: object) -> str | None:
        made = payload(what)  # type: ignore[arg-type]
        told.extend([made] if made else [])
        return made

    on.first._decider.committer._payload = watched
    await run.checkpoint(asks())
    await run.answer("PENDING")
    assert told == []


def test_too_much_for_one_notification_is_everything() -> None:
    from perdure.runs.service.signals import Signals

    made = news.News(Signals(), Signals(), 1)
    assert made.payload([]) is None
    many = made.payload(news.work("ten_a", f"function-{number:060}") for number in range(200))
    assert many is not None and many.endswith("\n*") and len(many) < 100
    few = made.payload([news.end("exn_1"), news.end("exn_1")])
    assert few is not None and few.count("exn_1") == 1


def test_ones_own_news_are_none_and_nonsense_harms_nobody() -> None:
    from perdure.runs.service.signals import Signals

    async def heard(payload: str | None) -> bool:
        ready = Signals()
        one = news.News(ready, Signals(), 1)
        with ready.listen([("ten_a", "main")]) as listening:
            one.hear(payload if payload is None else payload.replace("OWN", one._server))
            return await listening.wait(0)

    assert asyncio.run(heard(f"other\n{news.work('ten_a', 'main')}"))
    assert not asyncio.run(heard(f"OWN\n{news.work('ten_a', 'main')}"))
    assert not asyncio.run(heard(f"other\n{news.work('ten_b', 'main')}"))
    assert asyncio.run(heard(None)) and asyncio.run(heard("other\n*")), "then anything may have happened"
    assert not asyncio.run(heard("other\nwork\nend"))
