"""Whatever is changed in the database behind the service's back is found, and named."""

from __future__ import annotations

from typing import Any, cast

import psycopg
import pytest
from psycopg.rows import DictRow, dict_row

from perdure.db import queries
from perdure.db.database import Database
from perdure.runs.service.verify import verify
from tests.integration.runs.stage import asks, stage, waits


class Within:
    """As much of a database as ``verify`` needs, within a transaction that is taken back."""

    def __init__(self, connection: psycopg.AsyncConnection[DictRow]) -> None:
        self._connection = connection

    async def all(self, query: str, /, **parameters: Any) -> list[DictRow]:
        cursor = await self._connection.execute(queries.load()[query], parameters)
        return await cursor.fetchall()


@pytest.mark.parametrize(
    ("change", "seq", "reason"),
    [
        ("update executions set status = 'PAUSED'", 0, "status"),
        ("update executions set timer_at = null", 0, "timer"),
        ("update executions set seq = seq - 1", 4, "2 were written"),
        ("update execution_operations set op = '{}' where id = 'wait'", 0, "operations"),
        ("delete from execution_operations where id = 'ask'", 0, "operations"),
        ("update execution_entries set fact = '{}' where seq = 2", 2, "fact was changed"),
        ("update execution_entries set fact = null where seq = 2", 2, "fact is gone"),
        ("update execution_entries set at = at + interval '1 second' where seq = 3", 3, "entry was changed"),
        ("update execution_entries set actor = 'nobody' where seq = 1", 1, "entry was changed"),
        ("delete from execution_entries where seq = 3", 3, "ends at entry 2"),
        ("delete from execution_entries where seq = 2", 2, "is missing"),
    ],
)
async def test_a_change_is_found(change: Any, seq: int, reason: str) -> None:
    async with stage() as on:
        execution_id = await on.begin(input="1")
        run = await on.take()
        await run.checkpoint(waits(60), asks(timeout_s=100))
        assert await verify(on.database) == (1, [])
        async with await psycopg.AsyncConnection.connect(on.database.url, row_factory=dict_row) as connection:
            await connection.execute("alter table execution_entries disable trigger user")
            await connection.execute(change)
            _, problems = await verify(cast("Database", Within(connection)))
            await connection.rollback()
        (problem,) = problems
        assert (problem.execution_id, problem.seq) == (execution_id, seq)
        assert reason in problem.reason
        assert await verify(on.database) == (1, [])


async def test_histories_cannot_be_changed() -> None:
    async with stage() as on:
        await on.begin(input="1")
        for change in (
            "update execution_entries set fact = '{}'",
            "update execution_entries set fact = null",
            "delete from execution_entries",
        ):
            async with await psycopg.AsyncConnection.connect(on.database.url) as connection:
                with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="append-only"):
                    await connection.execute(change)
