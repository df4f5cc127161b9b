"""The lease keeper: what it tells the watchdog when renewals succeed, fail and hang."""

from __future__ import annotations

import asyncio

import pytest

from perdure.core.clock import SystemClock
from perdure.core.errors import StaleGeneration, Unavailable
from perdure.core.ids import NodeId
from perdure.node.lease import LeaseKeeper

NODE = NodeId("nod_test")


class Authority:
    def __init__(self) -> None:
        self.failing: Exception | None = None
        self.hanging = False
        self.renewals = 0
        self.asked = asyncio.Event()

    async def renew(self, node_id: NodeId) -> float:
        assert node_id == NODE
        self.asked.set()
        if self.hanging:
            await asyncio.Event().wait()
        if self.failing:
            raise self.failing
        self.renewals += 1
        return 20.0


class Seen:
    def __init__(self) -> None:
        self.changes: asyncio.Queue[bool] = asyncio.Queue()

    def __call__(self, frozen: bool) -> None:
        self.changes.put_nowait(frozen)


async def test_a_node_that_gets_no_lease_does_not_start() -> None:
    authority = Authority()
    authority.failing = StaleGeneration("Another process has registered.")
    keeper = LeaseKeeper(authority, NODE, SystemClock(), 0.3, list, Seen())
    with pytest.raises(StaleGeneration):
        await keeper.start()
    await keeper.close()


@pytest.mark.parametrize("how", ["refused", "hanging"])
async def test_freezes_while_renewals_fail_and_thaws_when_they_succeed(how: str) -> None:
    authority, seen = Authority(), Seen()
    keeper = LeaseKeeper(authority, NODE, SystemClock(), 0.3, list, seen)
    await keeper.start()
    try:
        if how == "hanging":
            authority.hanging = True
        else:
            authority.failing = Unavailable("The database is away.")
        async with asyncio.timeout(10):
            assert await seen.changes.get() is True
            assert keeper.frozen
            authority.hanging, authority.failing = False, None
            assert await seen.changes.get() is False
    finally:
        await keeper.close()
    assert authority.renewals >= 2


async def test_stays_thawed_while_renewals_succeed() -> None:
    authority, seen = Authority(), Seen()
    keeper = LeaseKeeper(authority, NODE, SystemClock(), 3.0, list, seen)
    await keeper.start()
    authority.asked.clear()
    async with asyncio.timeout(10):
        await authority.asked.wait()
    await keeper.close()
    assert seen.changes.empty()
