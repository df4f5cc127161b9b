"""Keeps a node's lease renewed, and tells the watchdog how sure it may be.

Renewals go out every third of the freeze time. The time that counts is the one before the request was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from perdure.core.clock import Clock
from perdure.core.errors import PerdureError
from perdure.core.ids import NodeId
from perdure.node.watchdog import FreezeWatchdog, OnChange
from perdure.wire.node import LeaseAuthority

RENEWALS_PER_FREEZE = 3

log = structlog.get_logger(__name__)


class LeaseKeeper:
    """Renews in a task, freezes by a thread. ``pids`` are the VMM processes that may run only under the lease."""

    def __init__(
        self,
        authority: LeaseAuthority,
        node_id: NodeId,
        clock: Clock,
        freeze_s: float,
        pids: Callable[[], Iterable[int]],
        on_change: OnChange,
    ) -> None:
        self._authority = authority
        self._node_id = node_id
        self._clock = clock
        self._interval_s = freeze_s / RENEWALS_PER_FREEZE
        loop = asyncio.get_running_loop()

        def in_loop(frozen: bool) -> None:
            loop.call_soon_threadsafe(on_change, frozen)

        self._watchdog = FreezeWatchdog(clock, freeze_s, pids, in_loop)
        self._task: asyncio.Task[None] | None = None

    @property
    def frozen(self) -> bool:
        return self._watchdog.frozen

    async def start(self) -> None:
        """The first renewal must succeed: a node without a lease starts nothing."""
        asked_at = self._clock.monotonic()
        await self._authority.renew(self._node_id)
        self._watchdog.start(asked_at)
        self._task = asyncio.create_task(self._keep(), name="lease-keeper")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await asyncio.to_thread(self._watchdog.close)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            asked_at = self._clock.monotonic()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._authority.renew(self._node_id)
            except (PerdureError, TimeoutError, OSError) as error:
                log.warning("the node's lease was not renewed", node=self._node_id, error=str(error), frozen=self.frozen)
                continue
            self._watchdog.renewed(asked_at)
