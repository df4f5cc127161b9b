"""Warm pool: VMMs that are started, have the golden base mapped, and wait for a workspace.

Starting a QEMU costs tens of milliseconds; claiming one that waits costs two. A pooled machine belongs to nobody, is never
counted as awake, and is worth nothing: it can be dropped at any time. There is one pool per golden snapshot in use, refilled in
the background after each claim.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import structlog

from perdure.core.errors import PerdureError
from perdure.machines.driver import Machine, MachineState

Key = TypeVar("Key", bound=Hashable)

#: Goldens that keep a pool at the same time; the one claimed longest ago loses its machines first.
KEYS_MAX = 4
REFILL_DELAY_S = 0.5
#: Starts that overlap put a refill off, but no longer than this: a server that is always starting something needs its pool most.
REFILL_LATEST_S = 3.0

log = structlog.get_logger(__name__)


class WarmPool(Generic[Key]):
    """Keeps ``size`` prepared machines per key. ``prepare`` starts one; when it raises, the pool stays short and goes on."""

    def __init__(self, prepare: Callable[[Key], Awaitable[Machine]], size: int) -> None:
        self._prepare = prepare
        self._size = size
        self._waiting: OrderedDict[Key, list[Machine]] = OrderedDict()
        self._fills: dict[Key, asyncio.Task[None]] = {}
        self._dropped: list[Machine] = []  # nobody's any more, and not ended yet
        self._closed = False
        self._starting = 0  # claimed, and their guests have not replied yet

    async def claim(self, key: Key) -> tuple[Machine, bool]:
        """A prepared machine and whether it had been waiting. Call ``refill_soon`` afterwards."""
        self._use(key)
        self._starting += 1
        waiting = self._waiting[key]
        while waiting:
            machine = waiting.pop()
            if machine.state is MachineState.PREPARED:
                return machine, True
            await machine.kill()
        return await self._prepare(key), False

    def refill_soon(self, key: Key) -> None:
        """After a start: fill a moment from now, so that it does not compete with the first replies of the wake before it, nor
        with the children of a fork that are still starting."""
        self._starting = max(0, self._starting - 1)
        if not self._closed and self._size > 0:
            loop = asyncio.get_running_loop()
            loop.call_later(REFILL_DELAY_S, self._refill_when_quiet, key, loop.time() + REFILL_LATEST_S)

    def _refill_when_quiet(self, key: Key, latest: float) -> None:
        loop = asyncio.get_running_loop()
        if self._starting and not self._closed and loop.time() < latest:
            loop.call_later(REFILL_DELAY_S, self._refill_when_quiet, key, latest)
        else:
            self.refill(key)

    def refill(self, key: Key) -> None:
        """Start filling in the background."""
        if self._closed or self._size == 0:
            return
        self._use(key)
        running = self._fills.get(key)
        if running is None or running.done():
            self._fills[key] = asyncio.create_task(self._fill(key), name=f"pool-fill-{key}")

    async def filled(self, key: Key) -> None:
        """Wait until the fill that is under way, if any, has ended."""
        if key in self._fills:
            await asyncio.wait([self._fills[key]])

    def count(self, key: Key | None = None) -> int:
        pools = self._waiting.values() if key is None else [self._waiting.get(key, [])]
        return sum(len(pool) for pool in pools)

    def pids(self) -> list[int]:
        return [machine.pid for pool in (*self._waiting.values(), self._dropped) for machine in pool]

    async def drop(self, key: Key) -> None:
        """Kill what waits for ``key``: its image, VMM or agent disk has changed. Nobody gets it from here on; where this is
        broken off, the next drop or the close ends what it has left."""
        await self._cancel(self._fills.pop(key, None))
        self._dropped += self._waiting.pop(key, [])
        await self._end_dropped()

    async def close(self) -> None:
        self._closed = True
        for key in list(self._waiting):
            await self.drop(key)
        await self._end_dropped()

    async def _end_dropped(self) -> None:
        for machine in list(self._dropped):
            await machine.kill()
            if machine in self._dropped:  # else a second drop was at it, too
                self._dropped.remove(machine)

    def _use(self, key: Key) -> None:
        self._waiting.setdefault(key, [])
        self._waiting.move_to_end(key)

    async def _fill(self, key: Key) -> None:
        while len(self._waiting) > KEYS_MAX:
            await self.drop(next(iter(self._waiting)))
        waiting = self._waiting.get(key)
        while waiting is not None and len(waiting) < self._size and not self._closed:
            try:
                machine = await self._prepare(key)
            except PerdureError as error:
                log.warning("the warm pool could not start a machine", error=error.message, internal=error.internal)
                return
            if self._closed or self._waiting.get(key) is not waiting:
                await machine.kill()
                return
            waiting.append(machine)

    @staticmethod
    async def _cancel(task: asyncio.Task[None] | None) -> None:
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait([task])
