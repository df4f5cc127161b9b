"""A server process that is killed at one point: before or after a statement, a commit, or a call to the node.

A ``Fuse`` counts these points and blows at the chosen one; from then on nothing of that process gets anywhere. ``FusedDatabase``
and ``FusedCalls`` put it around the real database and, say, the fake node, so production code knows nothing of it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from typing import Any

import pytest

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
                *("_of_node", "entries", "holders", "used_by", "quotas.of", "quotas.use"),
                *("runs.load", "seq", "clock", "ready", "soonest", "worker", "due", "callbacks", "unstarted", "known_functions"),
            )
        ):
            self._fuse.point(f"after {query}")
        return result

    async def batch(self, statements: Sequence[tuple[str, Mapping[str, Any]]]) -> Any:
        return await self._around("a batch", lambda: self._inner.batch(statements))

    async def one(self, query: str, /, **parameters: Any) -> Any:
        return await self._around(query, lambda: self._inner.one(query, **parameters))

    async def all(self, query: str, /, **parameters: Any) -> Any:
        return await self._around(query, lambda: self._inner.all(query, **parameters))

    async def run(self, query: str, /, **parameters: Any) -> Any:
        return await self._around(query, lambda: self._inner.run(query, **parameters))


class FusedCalls:
    """Stands before ``inner``. Its calls that change something, by their names, have two points; the others have none."""

    def __init__(self, fuse: Callable[[], Fuse], name: str, inner: object, changing: Collection[str]) -> None:
        self._fuse, self._name, self._inner, self._changing = fuse, name, inner, changing

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        if name not in self._changing:
            return real
        return self._awaited(name, real) if iscoroutinefunction(real) else self._called(name, real)

    def _awaited(self, name: str, real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **named: Any) -> Any:
            self._fuse().point(f"before {self._name}.{name}")
            result = await real(*arguments, **named)
            self._fuse().point(f"after {self._name}.{name}")
            return result

        return call

    def _called(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._fuse().point(f"before {self._name}.{name}")
            result = real(*arguments, **named)
            self._fuse().point(f"after {self._name}.{name}")
            return result

        return call


def fused_node(fuse: Fuse, node: FakeNode) -> FusedCalls:
    return FusedCalls(lambda: fuse, "node", node, ("start", "capture", "stop", "salvage", "delete_snapshots"))


def steps(short: int) -> list[Any]:
    """The parameter ``step`` of a test: every ``short``-th point as a rule, each of them in the long form."""
    return [pytest.param(short, id=f"at 1 of {short}"), pytest.param(1, id="at each", marks=pytest.mark.long)]


async def killed_everywhere(kill: Callable[[int | None], Awaitable[Fuse]], step: int = 1) -> tuple[Fuse, Counter[str]]:
    """Let ``kill`` go through once as a whole, and then be killed at each point, or at every ``step``-th. Returns the fuse of
    the first, and how often which point was the one."""
    whole = await kill(None)
    fired: Counter[str] = Counter()
    for at in itertools.count(1, step):
        fuse = await kill(at)
        if fuse.blew_at is None:
            return whole, fired
        fired[fuse.blew_at] += 1
    raise AssertionError("counting does not end")
