"""The warm pool with machines that only have a state."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from perdure.core.errors import HostUnfit
from perdure.machines.driver import Machine, MachineState
from perdure.node.pool import KEYS_MAX, WarmPool


class Stub:
    def __init__(self, pid: int) -> None:
        self.pid, self.state = pid, MachineState.PREPARED
        self.asked, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()

    async def kill(self) -> None:
        self.asked.set()
        await self.may_end.wait()
        self.state = MachineState.DEAD


class Factory:
    def __init__(self) -> None:
        self.made: list[Stub] = []
        self.broken = False
        self.asked = asyncio.Event()

    async def __call__(self, key: str) -> Machine:
        self.asked.set()
        await asyncio.sleep(0)
        if self.broken:
            raise HostUnfit("QEMU is not installed.")
        self.made.append(Stub(len(self.made)))
        return cast("Machine", self.made[-1])

    def alive(self) -> int:
        return sum(stub.state is MachineState.PREPARED for stub in self.made)


async def test_a_claim_takes_the_waiting_machine_and_refills_behind() -> None:
    factory = Factory()
    pool: WarmPool[str] = WarmPool(factory, size=1)
    first, pooled = await pool.claim("golden")
    assert not pooled
    pool.refill("golden")
    await pool.filled("golden")
    assert pool.count() == 1
    second, pooled = await pool.claim("golden")
    assert pooled and second is not first
    assert pool.count() == 0
    await pool.close()


async def test_size_zero_turns_the_pool_off() -> None:
    factory = Factory()
    pool: WarmPool[str] = WarmPool(factory, size=0)
    pool.refill("golden")
    await pool.filled("golden")
    assert factory.made == []
    _, pooled = await pool.claim("golden")
    assert not pooled


async def test_a_machine_that_died_waiting_is_not_handed_out() -> None:
    factory = Factory()
    pool: WarmPool[str] = WarmPool(factory, size=1)
    pool.refill("golden")
    await pool.filled("golden")
    factory.made[0].state = MachineState.DEAD
    machine, pooled = await pool.claim("golden")
    assert not pooled and machine.state is MachineState.PREPARED


async def test_a_pool_that_cannot_fill_tells_the_claimer_not_the_filler() -> None:
    factory = Factory()
    factory.broken = True
    pool: WarmPool[str] = WarmPool(factory, size=1)
    pool.refill("golden")
    await pool.filled("golden")
    with pytest.raises(HostUnfit):
        await pool.claim("golden")
    factory.broken = False
    pool.refill("golden")
    await pool.filled("golden")
    assert pool.count("golden") == 1
    await pool.close()


async def test_close_and_drop_leave_no_machine() -> None:
    factory = Factory()
    pool: WarmPool[Any] = WarmPool(factory, size=2)
    for key in range(KEYS_MAX + 2):
        pool.refill(key)
        await pool.filled(key)
    assert pool.count() <= (KEYS_MAX + 1) * 2
    pool.refill("last")  # a fill that is still under way when the pool closes
    await pool.close()
    assert factory.alive() == 0


@pytest.mark.parametrize("end", ["drop", "close"])
async def test_a_drop_that_is_broken_off_hands_nothing_out_and_is_finished_by_the_next(end: str) -> None:
    factory = Factory()
    pool: WarmPool[str] = WarmPool(factory, size=2)
    pool.refill("old")
    await pool.filled("old")
    slow, other = factory.made
    slow.may_end.clear()
    dropping = asyncio.create_task(pool.drop("old"))
    async with asyncio.timeout(10):
        await slow.asked.wait()
    dropping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropping
    assert (slow.state, other.state) == (MachineState.PREPARED,) * 2
    assert pool.count() == 0 and set(pool.pids()) == {slow.pid, other.pid}, "they belong to nobody, and are not forgotten"
    machine, pooled = await pool.claim("old")
    assert not pooled and machine not in (slow, other)
    slow.may_end.set()
    await (pool.drop("another") if end == "drop" else pool.close())
    assert (slow.state, other.state) == (MachineState.DEAD,) * 2
    assert pool.pids() == []
    await pool.close()


async def test_a_refill_waits_until_the_wake_has_had_its_first_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.node.pool.REFILL_DELAY_S", 0.01)
    factory = Factory()
    pool: WarmPool[str] = WarmPool(factory, size=1)
    pool.refill_soon("golden")
    assert not factory.made
    async with asyncio.timeout(10):
        await factory.asked.wait()
    await pool.filled("golden")
    assert pool.count("golden") == 1
    pool.refill_soon("golden")
    await pool.close()
    assert factory.alive() == 0


@pytest.mark.parametrize("latest", [3600.0, 0.05])
async def test_a_refill_waits_for_starts_under_way_but_not_for_ever(monkeypatch: pytest.MonkeyPatch, latest: float) -> None:
    monkeypatch.setattr("perdure.node.pool.REFILL_DELAY_S", 0.01)
    monkeypatch.setattr("perdure.node.pool.REFILL_LATEST_S", latest)
    factory = Factory()
    pool: WarmPool[str] = WarmPool(factory, size=1)
    await pool.claim("golden")
    await pool.claim("golden")
    made = len(factory.made)
    factory.asked.clear()
    pool.refill_soon("golden")  # the other is still starting
    if latest > 1:
        looked = asyncio.Event()
        look = pool._refill_when_quiet
        monkeypatch.setattr(pool, "_refill_when_quiet", lambda *given: (looked.set(), look(*given)))
        async with asyncio.timeout(10):
            await looked.wait()
        assert len(factory.made) == made
        pool.refill_soon("golden")
    async with asyncio.timeout(10):
        await factory.asked.wait()
    await pool.filled("golden")
    assert pool.count("golden") == 1
    await pool.close()
