"""What must hold of usage, whatever a life was like."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
from psycopg.rows import dict_row

from perdure.core.ids import TenantId
from perdure.db.database import Database
from perdure.metering.usage import Amounts, Metering, Usage, total

GIB = 1 << 30
TICK = timedelta(microseconds=1)


async def rows(database: Database, statement: str, *values: object) -> list[dict[str, Any]]:
    async with await psycopg.AsyncConnection.connect(database.url, row_factory=dict_row) as connection:
        return await (await connection.execute(statement.encode(), values)).fetchall()


async def intervals(database: Database, tenant: TenantId) -> dict[str, list[dict[str, Any]]]:
    """Of each workspace, in order."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    statement = "select * from lifecycle_intervals where tenant_id = %s order by workspace_id, from_at, to_at nulls last"
    for row in await rows(database, statement, tenant):
        found[row["workspace_id"]].append(row)
    return found


async def check(database: Database, tenant: TenantId) -> list[Usage]:
    """All there is to ask of a tenant's usage; returns it as of the last entry."""
    lives = await rows(
        database,
        "select workspace_id, min(at) as born, max(at) filter (where kind = 'deleted') as died, max(at) as last"
        " from journal where tenant_id = %s group by workspace_id",
        tenant,
    )
    end = max((life["last"] for life in lives), default=datetime(2000, 1, 1, tzinfo=UTC)) + TICK
    metering = Metering(database)
    found = await metering.of(tenant, None, None, end)
    used = {one.workspace_id: one.amounts for one in found}
    spans = await intervals(database, tenant)
    assert set(used) == set(spans) == {life["workspace_id"] for life in lives}
    for life in lives:
        mine, amounts = spans[life["workspace_id"]], used[life["workspace_id"]]
        assert mine[0]["from_at"] == life["born"]
        assert mine[-1]["to_at"] == life["died"], "the last one is open, or ends with the workspace"
        assert all(before["to_at"] == after["from_at"] for before, after in pairwise(mine)), "a hole, or two at once"
        assert amounts.awake + amounts.paused + amounts.asleep == (life["died"] or end) - life["born"], "not the wall time"
        memory = (amounts.awake + amounts.paused).total_seconds() * GIB / 2
        assert abs(amounts.memory_byte_s - memory) <= 1e-6 * max(1.0, memory)
        await _check_asleep(metering, tenant, mine)
    await _check_parts(metering, tenant, found, min((life["born"] for life in lives), default=end), end)
    assert not await rows(database, "select 1 from stored_spans where to_at < from_at")
    both = "select 1 from journal where body->'spent' is not null and body->>'alive_until' is not null and kind <> 'restored'"
    assert not await rows(database, both), "what its meters say at an instant was spent by then, not after its end"
    return found


async def _check_asleep(metering: Metering, tenant: TenantId, mine: list[dict[str, Any]]) -> None:
    """Asleep costs bytes only. The last instant is left out: while a clock that was set back catches up, all that a workspace
    does after it woke happens at that same instant."""
    for one in mine:
        if one["phase"] == "asleep" and one["to_at"] is not None:
            (slept,) = await metering.of(tenant, one["workspace_id"], one["from_at"], one["to_at"] - TICK)
            amounts = slept.amounts
            assert amounts.asleep == one["to_at"] - TICK - one["from_at"]
            assert (amounts.cpu_s, amounts.memory_byte_s, *_moved(amounts)) == (0, 0, 0, 0, 0, 0)


def _moved(amounts: Amounts) -> tuple[int, int, int, int]:
    return amounts.sent_bytes, amounts.received_bytes, amounts.request_bytes, amounts.answer_bytes


async def _check_parts(metering: Metering, tenant: TenantId, whole: list[Usage], start: datetime, end: datetime) -> None:
    """Two halves are the whole, and asking twice changes nothing."""
    middle = start + (end - start) / 2
    first = total(one.amounts for one in await metering.of(tenant, None, None, middle))
    second = total(one.amounts for one in await metering.of(tenant, None, middle, end))
    both, summed = total([first, second]), total(one.amounts for one in whole)
    assert (both.awake, both.paused, both.asleep) == (summed.awake, summed.paused, summed.asleep)
    assert (both.losses, *_moved(both)) == (summed.losses, *_moved(summed))
    assert abs(both.cpu_s - summed.cpu_s) < 1e-6
    assert abs(both.local_byte_s - summed.local_byte_s) <= 1e-9 * max(1.0, summed.local_byte_s)
    assert whole == await metering.of(tenant, None, None, end)
