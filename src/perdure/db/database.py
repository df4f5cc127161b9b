"""The pool, transactions, named queries and the one place where PostgreSQL's errors become ours.

Statements run one at a time in autocommit (``one``, ``all``, ``run``: a single round trip, commit included) or inside
``transaction()``. Isolation is READ COMMITTED: rows are locked by the updates that decide, and every decision names a generation.
``retrying`` runs a function again when PostgreSQL gave up a transaction for reasons of concurrency.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from perdure.core.errors import AlreadyExists, Busy, NoSpace, PerdureError, Unavailable
from perdure.db import queries

T = TypeVar("T")

MAX_CONNECTIONS = 12
MAX_WAITING = 2000
CHECKOUT_DEADLINE_S = 30.0
RETRIES = 5
#: psycopg derives these from OperationalError each by itself.
GIVEN_UP = (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected, psycopg.errors.TransactionRollback)


class Transaction:
    """Named statements on one connection."""

    def __init__(self, connection: psycopg.AsyncConnection[DictRow]) -> None:
        self._connection = connection

    async def one(self, query: str, /, **parameters: Any) -> DictRow | None:
        """The first row, or None."""
        with _mapped():
            cursor = await self._connection.execute(queries.load()[query], parameters)
            return await cursor.fetchone()

    async def all(self, query: str, /, **parameters: Any) -> list[DictRow]:
        with _mapped():
            cursor = await self._connection.execute(queries.load()[query], parameters)
            return await cursor.fetchall()

    async def run(self, query: str, /, **parameters: Any) -> int:
        """Rows changed."""
        with _mapped():
            cursor = await self._connection.execute(queries.load()[query], parameters)
            return cursor.rowcount


class Database:
    """A pool of connections to one PostgreSQL database. ``open`` before use, ``close`` after."""

    def __init__(self, url: str, *, max_connections: int = MAX_CONNECTIONS) -> None:
        self.url = url
        self._offset_s = 0.0
        self._renewal: asyncio.Task[None] | None = None
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[DictRow]] = AsyncConnectionPool(
            url,
            min_size=min(2, max_connections),
            max_size=max_connections,
            max_waiting=MAX_WAITING,
            timeout=CHECKOUT_DEADLINE_S,
            open=False,
            kwargs={"autocommit": True, "row_factory": dict_row, "prepare_threshold": 1, "application_name": "perdure"},
            name="perdure",
        )

    async def open(self) -> None:
        """Connect. Raises Unavailable with the reason when the server does not let us in."""
        with _mapped():
            # One plain connection first: the pool would retry in the background and hide why it fails.
            async with await psycopg.AsyncConnection.connect(self.url, connect_timeout=int(CHECKOUT_DEADLINE_S)):
                pass
            await self._pool.open(wait=True, timeout=CHECKOUT_DEADLINE_S)

    async def close(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        await self._pool.close()

    async def renew(self) -> None:
        """The server was started again: put new connections in the place of those that broke."""
        with _mapped():
            await self._pool.check()

    @property
    def occupancy(self) -> tuple[int, int, int]:
        """Connections that are open, those of them that are in use, and calls that wait for one."""
        stats = self._pool.get_stats()
        size = stats.get("pool_size", 0)
        return size, size - stats.get("pool_available", 0), stats.get("requests_waiting", 0)

    def shift_clock(self, seconds: float) -> None:
        """Tests only: ``perdure_now()`` answers this much later for everything that runs on this pool from here on."""
        self._offset_s += seconds

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """All or nothing: committed when the block ends, rolled back when it raises."""
        with _mapped():
            async with self._checkout() as connection, connection.transaction():
                await self._shift(connection)
                yield Transaction(connection)

    @asynccontextmanager
    async def _checkout(self) -> AsyncIterator[psycopg.AsyncConnection[DictRow]]:
        """A connection. One that breaks tells that others have too: a server that went down costs one call, not one for each."""
        async with self._pool.connection() as connection:
            try:
                yield connection
            except psycopg.OperationalError:
                if connection.broken and (self._renewal is None or self._renewal.done()):
                    self._renewal = asyncio.create_task(self._pool.check(), name="database-renewal")
                raise

    async def one(self, query: str, /, **parameters: Any) -> DictRow | None:
        async with self._statement() as transaction:
            return await transaction.one(query, **parameters)

    async def all(self, query: str, /, **parameters: Any) -> list[DictRow]:
        async with self._statement() as transaction:
            return await transaction.all(query, **parameters)

    async def run(self, query: str, /, **parameters: Any) -> int:
        async with self._statement() as transaction:
            return await transaction.run(query, **parameters)

    async def batch(self, statements: Sequence[tuple[str, Mapping[str, Any]]]) -> list[DictRow | None]:
        """The first rows of these (query, parameters), all in one transaction and one round trip: none waits for the answer of
        another. Raises what any of them raises; then none has happened."""
        if len(statements) == 1:  # a transaction of its own
            return [await self.one(statements[0][0], **statements[0][1])]
        with _mapped():
            async with self._checkout() as connection, connection.pipeline(), connection.transaction():
                await self._shift(connection)
                cursors = [await connection.execute(queries.load()[query], given) for query, given in statements]
                return [await cursor.fetchone() for cursor in cursors]

    async def retrying(self, function: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run ``function`` in a transaction, again when PostgreSQL reports a deadlock or a failed serialization."""
        for attempt in range(1, RETRIES + 1):
            try:
                async with self.transaction() as transaction:
                    return await function(transaction)
            except Unavailable as error:
                if attempt == RETRIES or not isinstance(error.__cause__, GIVEN_UP):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    @asynccontextmanager
    async def _statement(self) -> AsyncIterator[Transaction]:
        if self._offset_s:
            async with self.transaction() as transaction:
                yield transaction
            return
        with _mapped():
            async with self._checkout() as connection:
                yield Transaction(connection)

    async def _shift(self, connection: psycopg.AsyncConnection[DictRow]) -> None:
        if self._offset_s:
            await connection.execute(queries.load()["clock.shift"], {"offset": f"{self._offset_s} seconds"})


async def connect_migrated(url: str) -> Database:
    """Bring the schema up to date and return an open Database: what the composition root calls."""
    from perdure.db.migrations import migrate

    await asyncio.to_thread(migrate, url)
    database = Database(url)
    await database.open()
    return database


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.UniqueViolation as error:
        constraint = error.diag.constraint_name or "a unique rule"
        raise AlreadyExists("Something of that name or id exists already.", internal=constraint) from error
    except psycopg.errors.DiskFull as error:
        raise NoSpace("The database's disk is full.", internal=str(error)) from error
    except GIVEN_UP as error:
        raise Unavailable("The database gave the transaction up for another one.", internal=str(error)) from error
    except (PoolTimeout, TooManyRequests) as error:
        raise Busy("All connections to the database are in use.", internal=str(error)) from error
    except (psycopg.OperationalError, psycopg.InterfaceError, PoolClosed) as error:
        raise Unavailable(
            "The database does not answer.",
            hint="Look at 'perdure doctor'; what was committed is safe.",
            internal=str(error),
            ambiguous=True,  # the connection may have broken after the commit
        ) from error
    except psycopg.DataError as error:
        raise PerdureError("The database refused a value; this is a defect in Perdure.", internal=str(error)) from error
