"""Heads of histories, signed and kept outside the database: what was cut off, replaced or removed as a whole is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from perdure.core.errors import Unavailable
from perdure.journal.chain import Link, link_hash
from perdure.journal.entries import Journal
from perdure.runs.service import heads
from perdure.runs.service.heads import SignedHeads
from perdure.runs.service.histories import History, Of, StoredHistories
from perdure.snapshots.objects.client import ObstoreObjects, open_objects
from tests.integration.runs.stage import Stage, stage

KEY = b"k" * 32
HOUR_S = 3600.0


@dataclass
class Signing:
    on: Stage
    objects: ObstoreObjects
    heads: SignedHeads

    async def append(self, workspace: str = "wsp_1", kind: str = "woken") -> None:
        await self.sql("select journal_append('ten_a', %s, %s, 1, '{}')", workspace, kind)

    async def sql(self, statement: Any, *parameters: str) -> None:
        async with await psycopg.AsyncConnection.connect(self.on.database.url, autocommit=True) as connection:
            await connection.execute(statement, parameters)

    async def names(self) -> list[str]:
        return sorted([name async for name, _ in self.objects.list("heads/")])

    async def wrong(self, signed: SignedHeads | None = None) -> list[History]:
        found = StoredHistories(self.on.database, signed or self.heads).verify()
        return [one async for one in found if one.wrong is not None]


@pytest.fixture
async def signing() -> AsyncIterator[Signing]:
    """A workspace with three entries and an execution with one, all signed."""
    async with stage() as on:
        objects = open_objects("memory:///")
        made = Signing(on, objects, SignedHeads(on.database, objects, KEY))
        for _ in range(3):
            await made.append()
        await on.begin()
        assert await made.heads.sign() == 2
        assert await made.wrong() == []
        await made.sql("alter table journal disable trigger user")
        await made.sql("alter table execution_entries disable trigger user")
        yield made


async def test_what_was_cut_off_is_noticed(signing: Signing) -> None:
    await signing.sql("delete from journal where seq = 3")
    assert (await Journal(signing.on.database).verify())[1] == [], "its chain alone does not show it"
    (found,) = await signing.wrong()
    assert (found.of, found.id, found.wrong) == (Of.WORKSPACE, "wsp_1", 3)
    assert "ends at entry 2, and 3 were signed" in found.reason


async def test_what_was_written_anew_is_noticed(signing: Signing) -> None:
    """By somebody who knows how the chain is made."""
    rows = await signing.on.database.all("journal.links", workspace_id="wsp_1", after_seq=0, limit=10)
    links = [Link(**row) for row in rows]
    forged = link_hash(links[1].hash, Link(**{**rows[2], "kind": "slept"}))
    await signing.sql("update journal set kind = 'slept', hash = %s where seq = 3", forged)
    assert (await Journal(signing.on.database).verify())[1] == []
    (found,) = await signing.wrong()
    assert (found.wrong, "another one than was signed" in found.reason) == (3, True)


async def test_what_was_removed_as_a_whole_is_noticed(signing: Signing) -> None:
    await signing.sql("delete from execution_entries")
    await signing.sql("delete from execution_operations")
    await signing.sql("delete from executions")
    (found,) = await signing.wrong()
    assert (found.of, found.wrong) == (Of.EXECUTION, 1)
    assert "it had 1 entries" in found.reason


async def test_only_what_has_moved_is_signed_and_not_before_an_hour_is_over(signing: Signing) -> None:
    await signing.append()
    assert await signing.heads.sign() == 0
    signing.on.database.shift_clock(HOUR_S + 1)
    assert await signing.heads.sign() == 1
    signing.on.database.shift_clock(HOUR_S + 1)
    assert await signing.heads.sign() == 0, "nothing has moved"
    assert len(await signing.names()) == 2
    assert await signing.wrong() == []
    await signing.sql("delete from journal where seq = 4")
    assert [one.wrong for one in await signing.wrong()] == [4], "the last of the two counts"


async def test_of_two_servers_one_signs(signing: Signing) -> None:
    await signing.append()
    other = SignedHeads(signing.on.databases[1], signing.objects, KEY)
    done = await asyncio.gather(*(one.sign(every_s=0) for one in (signing.heads, other) * 3))
    assert sum(done) == 1
    assert len(await signing.names()) == 2
    assert await signing.wrong() == []


async def test_objects_that_were_changed_or_removed_are_named(signing: Signing) -> None:
    for _ in range(2):
        await signing.append()
        await signing.heads.sign(every_s=0)
    first, second, third = await signing.names()
    whole = {name: await signing.objects.get(name) for name in (first, second, third)}
    await signing.objects.put(second, whole[second].replace(b"wsp_1", b"wsp_2"))
    assert [(one.of, one.id, "were changed" in one.reason) for one in await signing.wrong()] == [(Of.HEADS, second, True)]
    await signing.objects.delete([second])
    assert [(one.id, "number 2 are missing" in one.reason) for one in await signing.wrong()] == [(third, True)]
    await signing.objects.put(second, whole[first])
    assert [one.id for one in await signing.wrong()] == [second]
    await signing.objects.put(second, whole[second])
    assert await signing.wrong() == []
    stranger = SignedHeads(signing.on.database, signing.objects, b"other" * 7)
    assert ["another master key" in one.reason for one in await signing.wrong(stranger)] == [True]


async def test_in_another_store_all_begins_anew(signing: Signing) -> None:
    elsewhere = open_objects("memory:///")
    moved = SignedHeads(signing.on.database, elsewhere, KEY)
    await signing.append()
    assert await moved.sign(every_s=0) == 2
    assert await signing.wrong(moved) == []
    await signing.sql("delete from journal where seq = 4")
    assert [one.wrong for one in await signing.wrong(moved)] == [4]


async def test_a_put_that_fails_or_whose_server_dies_is_done_again(signing: Signing, monkeypatch: pytest.MonkeyPatch) -> None:
    await signing.append()

    def dies(point: object) -> None:
        raise Unavailable(f"It dies at {point}.")

    with monkeypatch.context() as patched:
        patched.setattr(heads, "crashpoint", dies)
        with pytest.raises(Unavailable):
            await signing.heads.sign(every_s=0)
    assert len(await signing.names()) == 2, "the object is there, no row says so"
    assert await signing.wrong() == []
    await signing.append()
    assert await signing.heads.sign(every_s=0) == 1
    assert len(await signing.names()) == 2, "it was written anew"
    await signing.sql("delete from journal where seq = 5")
    assert [one.wrong for one in await signing.wrong()] == [5]


async def test_more_than_one_object_holds(signing: Signing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MOST", 2)
    for number in range(3):
        await signing.append(f"wsp_{number + 2}")
    assert [await signing.heads.sign(every_s=0) for _ in range(3)] == [2, 1, 0]
    assert await signing.wrong() == []
