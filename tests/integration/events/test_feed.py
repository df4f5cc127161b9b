"""The feed over real PostgreSQL: one order without holes, whoever commits when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import psycopg
import pytest

from perdure.core.errors import NotFound
from perdure.core.ids import DEFAULT_TENANT, TenantId
from perdure.db import migrations
from perdure.db.database import Database, connect_migrated
from perdure.journal import feed as feeds
from perdure.journal.feed import Feed, FeedEvent, Wanted
from tests.fakes.control_plane import CTX, OTHER, ControlPlane, control_plane
from tests.fakes.database import empty_database, fresh_database
from tests.integration.db.test_retention_migration import migrate_to

ALL = Wanted(DEFAULT_TENANT, after=0, follow=False)
APPEND = "select journal_append(%s, %s, %s, 1, '{}')"


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    async with fresh_database() as made:
        yield made


@pytest.fixture
async def feed(database: Database) -> Feed:
    return Feed(database)


async def read(feed: Feed, wanted: Wanted = ALL) -> list[FeedEvent]:
    return [event async for event in feed.read(await feed.begin(wanted))]


async def connected(database: Database) -> psycopg.AsyncConnection:
    return await psycopg.AsyncConnection.connect(database.url)


async def append(connection: psycopg.AsyncConnection, kind: str, thread: str = "ws_1", tenant: str = DEFAULT_TENANT) -> None:
    await connection.execute(APPEND, (tenant, thread, kind))


async def test_what_commits_late_is_not_passed(database: Database, feed: Feed) -> None:
    """An entry that was written first and committed last: a cursor over its id, or over its time, would have gone past it."""
    async with await connected(database) as slow, await connected(database) as quick:
        await append(slow, "slow", "ws_slow")
        await append(quick, "quick", "ws_quick")
        await quick.commit()
        seen = await read(feed)
        assert [(one.seq, one.kind) for one in seen] == [(1, "quick")]
        await slow.commit()
        assert [(one.seq, one.kind) for one in await read(feed, replace(ALL, after=1))] == [(2, "slow")]
        await append(slow, "gone", "ws_slow")
        await slow.rollback()
    assert [one.kind for one in await read(feed)] == ["quick", "slow"]


async def test_many_writers_and_readers_that_begin_again_anywhere(database: Database) -> None:
    """Each reader sees every entry once, in the order of its thread, however it is interrupted and whichever server numbers."""
    writers, entries = 6, 25
    servers = [Feed(database), Feed(database)]
    chance = random.Random(7)

    async def write(number: int) -> None:
        async with await connected(database) as connection:
            for entry in range(entries):
                await append(connection, f"{entry}", f"ws_{number}")
                await asyncio.sleep(0)
                await (connection.rollback if entry % 10 == 9 else connection.commit)()

    async def follow(server: Feed) -> list[tuple[int, str | None, str]]:
        found: list[tuple[int, str | None, str]] = []
        while len(found) < writers * (entries - entries // 10):
            reading = await server.begin(Wanted(DEFAULT_TENANT, after=found[-1][0] if found else 0))
            breaks_after = chance.randint(1, 12)
            async with aclosing(server.read(reading)) as events:
                async for one in events:
                    found.append((one.seq, one.workspace_id, one.kind))
                    breaks_after -= 1
                    if not breaks_after or len(found) == writers * (entries - entries // 10):
                        break
        return found

    for server in servers:
        await server.start()
    try:
        async with asyncio.timeout(120):
            readers = [asyncio.create_task(follow(server)) for server in (*servers, *servers)]
            await asyncio.gather(*map(write, range(writers)))
            first, *others = await asyncio.gather(*readers)
    finally:
        for server in servers:
            await server.close()
    assert all(other == first for other in others), "all see one order"
    assert [seq for seq, _, _ in first] == list(range(1, len(first) + 1)), "without a hole"
    for number in range(writers):
        kinds = [int(kind) for _, thread, kind in first if thread == f"ws_{number}"]
        assert kinds == [entry for entry in range(entries) if entry % 10 != 9]


async def test_pages_are_read_to_their_end(database: Database, feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PAGE", 3)
    async with await connected(database) as connection:
        for number in range(10):
            await append(connection, "odd" if number % 2 else "even")
    assert [one.seq for one in await read(feed)] == list(range(1, 11))
    assert [one.seq for one in await read(feed, replace(ALL, kinds=("odd",)))] == [2, 4, 6, 8, 10]
    assert [one.seq for one in await read(feed, replace(ALL, after=None, last=2, kinds=("odd",)))] == [8, 10]
    assert [one.seq for one in await read(feed, replace(ALL, after=None, last=0))] == []
    assert [one.seq for one in await read(feed, replace(ALL, after=None, last=99))] == list(range(1, 11))
    assert [one.seq for one in await read(feed, replace(ALL, after=None))] == list(range(1, 11))
    assert [one.seq for one in await read(feed, replace(ALL, after=10**15))] == []


async def test_following_begins_now_and_wakes_for_what_comes(database: Database, feed: Feed) -> None:
    async with await connected(database) as connection:
        await append(connection, "before")
        await connection.commit()
        await feed.start()
        try:
            async with asyncio.timeout(30), aclosing(feed.read(await feed.begin(Wanted(DEFAULT_TENANT)))) as events:
                coming = asyncio.ensure_future(anext(events))
                await append(connection, "elsewhere", "ws_9", "ten_other")
                await append(connection, "after")
                await connection.commit()
                assert (await coming).kind == "after"
        finally:
            await feed.close()


async def test_tenants_have_feeds_of_their_own(database: Database, feed: Feed) -> None:
    async with await connected(database) as connection:
        for number in range(6):
            await append(connection, str(number), f"ws_{number}", ("ten_a", "ten_b")[number % 2])
    for tenant, kinds in (("ten_a", ["0", "2", "4"]), ("ten_b", ["1", "3", "5"]), ("ten_c", [])):
        found = await read(feed, replace(ALL, tenant_id=TenantId(tenant)))
        assert [(one.seq, one.kind) for one in found] == list(enumerate(kinds, start=1))


async def test_a_numbering_that_dies_numbers_nothing_and_loses_nothing(database: Database, feed: Feed) -> None:
    async with await connected(database) as connection:
        await append(connection, "one")
        await connection.commit()

        class Killed(BaseException):
            pass

        with pytest.raises(Killed):
            async with database.transaction() as tx:
                await tx.one("events.turn")
                await tx.one("events.number")
                raise Killed
        await append(connection, "two")
    assert [(one.seq, one.kind) for one in await read(feed)] == [(1, "one"), (2, "two")]


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with control_plane() as made:
        yield made


async def test_what_the_service_does_is_in_the_feed_as_in_the_threads(plane: ControlPlane) -> None:
    """With the reason of each sleep (peers: row 13)."""
    feed = Feed(plane.database)
    workspace, _ = await plane.create("erin")
    await plane.create("fred")
    await plane.service.sleep(CTX, "erin")
    await plane.service.delete(CTX, "fred")
    found = await read(feed)
    erin = [one for one in found if one.workspace == "erin"]
    thread = await plane.service.log(CTX, workspace.id)
    assert [(one.entry_seq, one.at, one.kind, one.generation, one.body) for one in erin] == [
        (entry.seq, entry.at, entry.kind, entry.generation, entry.body) for entry in thread
    ]
    assert {one.workspace_id for one in erin} == {workspace.id}
    assert [one.kind for one in erin] == ["creating", "running", "hibernating", "hibernated"]
    assert erin[2].body["cause"] == "requested by test", "whoever watches sees why it went to sleep"
    for ref in ("fred", next(one.workspace_id for one in found if one.workspace == "fred")):
        gone = await read(feed, replace(ALL, workspace=ref))
        assert [one.kind for one in gone] == ["creating", "running", "deleted"]
    for tenant, ref in ((DEFAULT_TENANT, "nobody"), (OTHER.tenant_id, "erin"), (OTHER.tenant_id, workspace.id)):
        with pytest.raises(NotFound):
            await feed.begin(Wanted(tenant, workspace=ref))


async def test_what_was_there_before_the_feed_comes_first() -> None:
    """The migration numbers the journal that it finds."""
    (own,) = (migrations.HERE / "versions").glob("*_events.py")
    async with empty_database("before_events") as url:
        migrate_to(url, f"{int(own.name[:4]) - 1:04}")
        async with await psycopg.AsyncConnection.connect(url) as connection:
            for number in range(5):
                await append(connection, str(number), f"ws_{number % 2}")
        database = await connect_migrated(url)
        async with await connected(database) as connection:
            await append(connection, "new", "ws_0")
        found = await read(Feed(database))
        await database.close()
    assert [one.seq for one in found] == list(range(1, 7))
    assert [one.kind for one in found if one.workspace_id == "ws_0"] == ["0", "2", "4", "new"]
