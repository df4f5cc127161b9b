"""Whatever is changed in the database behind the service's back is found, and named."""

from __future__ import annotations

from typing import Any, cast

import psycopg
import pytest
from psycopg.rows import DictRow, dict_row

from perdure.core.ids import WorkspaceId
from perdure.db import queries
from perdure.db.database import Database
from perdure.runs.service.heads import SignedHeads
from perdure.runs.service.histories import History, Of, StoredHistories
from perdure.runs.service.verify import verify
from perdure.snapshots.objects.client import open_objects
from tests.integration.runs.stage import TENANT, asks, stage, waits


class Within:
    """As much of a database as ``verify`` needs, within a transaction that is taken back."""

    def __init__(self, connection: psycopg.AsyncConnection[DictRow]) -> None:
        self._connection = connection

    async def all(self, query: str, /, **parameters: Any) -> list[DictRow]:
        cursor = await self._connection.execute(queries.load()[query], parameters)
        return await cursor.fetchall()


def unsigned(database: Database) -> SignedHeads:
    """Nothing was signed yet."""
    return SignedHeads(database, open_objects("memory:///"), b"k" * 32)


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


async def test_threads_of_workspaces_and_executions_are_verified_together() -> None:
    async with stage() as on:
        execution_id = await on.begin(input="1")
        workspace = WorkspaceId("wsp_1")
        async with await psycopg.AsyncConnection.connect(on.database.url, autocommit=True) as connection:
            await connection.execute("select journal_append('ten_a', 'wsp_1', 'created', 1, '{}')")
            await connection.execute("select journal_append('ten_a', 'wsp_1', 'woken', 2, '{}')")
            found = [one async for one in StoredHistories(on.database, unsigned(on.database)).verify()]
            assert found == [History(Of.WORKSPACE, workspace, 2), History(Of.EXECUTION, execution_id, 1)]
            await connection.execute("alter table journal disable trigger user")
            await connection.execute("update journal set kind = 'forked' where seq = 1")
        thread, execution = [one async for one in StoredHistories(on.database, unsigned(on.database)).verify()]
        assert (thread.wrong, execution.wrong) == (1, None)


async def test_one_that_is_deleted_while_it_is_verified_is_no_violation() -> None:
    """Its row was read before, its entries are read after its facts are gone."""
    async with stage() as on:
        execution_id = await on.begin(input="1")
        run = await on.take()
        await run.answer("SUCCEEDED", "1")

        class Late:
            """Deletes it between the two."""

            has_deleted = False

            async def all(self, query: str, /, **parameters: Any) -> Any:
                if query == "runs.links" and not self.has_deleted:
                    self.has_deleted = True
                    await on.first.delete(TENANT, execution_id)
                    await on.first.clockwork.sweep()
                return await on.database.all(query, **parameters)

        assert await verify(cast("Database", Late())) == (1, [])


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
