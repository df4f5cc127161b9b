"""A server process that is killed at one point: before or after a statement, a commit, or a call to the node.

A ``Fuse`` counts these points and blows at the chosen one; from then on nothing of that process gets anywhere. ``FusedDatabase``
and ``FusedNode`` put it around the real database and the fake node, so production code knows nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from perdure.db.database import Database, Transaction
from tests.fakes.node import FakeNode


class Killed(BaseException):
    """SIGKILL: not an Exception, so that no handler of the product can survive it."""


class Fuse:
    """Blows at point number ``at``, counted from 1; None never does."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0
        self.blew_at: str | None = None
        self.passed: Counter[str] = Counter()

    def point(self, name: str) -> None:
        if self.blew_at is not None:
            raise Killed
        self.count += 1
        self.passed[name] += 1
        if self.count == self.at:
            self.blew_at = name
            raise Killed


class FusedTransaction:
    def __init__(self, fuse: Fuse, inner: Transaction) -> None:
        self._fuse, self._inner = fuse, inner

    async def one(self, query: str, /, **parameters: Any) -> Any:
        self._fuse.point(f"in transaction, before {query}")
        return await self._inner.one(query, **parameters)

    async def all(self, query: str, /, **parameters: Any) -> Any:
        self._fuse.point(f"in transaction, before {query}")
        return await self._inner.all(query, **parameters)

    async def run(self, query: str, /, **parameters: Any) -> Any:
        self._fuse.point(f"in transaction, before {query}")
        return await self._inner.run(query, **parameters)


class FusedDatabase:
    """Reads have one point (there is nothing to lose in them), writes two: before, and after the commit."""

    def __init__(self, fuse: Fuse, inner: Database) -> None:
        self._fuse, self._inner = fuse, inner

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[FusedTransaction]:
        self._fuse.point("before a transaction")
        async with self._inner.transaction() as tx:
            yield FusedTransaction(self._fuse, tx)
            self._fuse.point("before a commit")
        self._fuse.point("after a commit")

    async def _around(self, query: str, work: Callable[[], Awaitable[Any]]) -> Any:
        self._fuse.point(f"before {query}")
        result = await work()
        if not query.endswith(
            (
                *("by_id", "by_ref", "find", "standing", "on_node", "unfinished", "names_like", "of_workspace", "deleting"),
                *("_of_node", "entries", "holders", "used_by"),
            )
        ):
            self._fuse.point(f"after {query}")
        return result

    async def one(self, query: str, /, **parameters: Any) -> Any:
        return await self._around(query, lambda: self._inner.one(query, **parameters))

    async def all(self, query: str, /, **parameters: Any) -> Any:
        return await self._around(query, lambda: self._inner.all(query, **parameters))

    async def run(self, query: str, /, **parameters: Any) -> Any:
        return await self._around(query, lambda: self._inner.run(query, **parameters))


class FusedNode:
    """Calls that change something have two points, the others none."""

    CHANGING = ("start", "capture", "stop", "salvage", "delete_snapshots")

    def __init__(self, fuse: Fuse, inner: FakeNode) -> None:
        self._fuse, self._inner = fuse, inner

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        if name not in self.CHANGING:
            return real

        async def call(*arguments: Any, **named: Any) -> Any:
            self._fuse.point(f"before node.{name}")
            result = await real(*arguments, **named)
            self._fuse.point(f"after node.{name}")
            return result

        return call
