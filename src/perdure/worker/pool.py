"""A pool of warm processes: each is lent to one invocation at a time, and one is kept ready while there is room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from perdure.worker.model import Runner, StartFailed, Tell

#: Seconds between starts that fail, doubled each time.
BACKOFF_S = 0.2
BACKOFF_MAX_S = 10.0

Kind = TypeVar("Kind", bound=Runner)


class Pool(Generic[Kind]):
    """At most ``size`` processes. Each is replaced after ``recycle_after`` invocations (0: never), and when it has died."""

    def __init__(self, start: Callable[[], Awaitable[Kind]], size: int, recycle_after: int, tell: Tell) -> None:
        self._start = start
        self._size = size
        self._recycle_after = recycle_after
        self._tell = tell
        self._idle: asyncio.Queue[Kind] = asyncio.Queue()
        self._uses: dict[Kind, int] = {}  # of all that live
        self._starting: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def first(self) -> Kind:
        """Start one, and keep it for whoever comes. Raises StartFailed: there is no use in trying again."""
        runner = await self._start()
        self._uses[runner] = 0
        self._idle.put_nowait(runner)
        return runner

    async def acquire(self) -> Kind:
        """A process that is alive, once there is one. It is the caller's until ``release``."""
        while True:
            self._grow()
            runner = await self._idle.get()
            if runner.is_alive:
                self._grow()
                return runner
            self._tell("process-died", where="between invocations")
            self._discard(runner)

    def release(self, runner: Kind, *, used: bool = True) -> None:
        """Give it back, dead or alive."""
        self._uses[runner] += used
        is_spent = 0 < self._recycle_after <= self._uses[runner]
        if self._closed or is_spent or not runner.is_alive:
            self._discard(runner)
            self._grow()
        else:
            self._idle.put_nowait(runner)

    def _discard(self, runner: Kind) -> None:
        del self._uses[runner]
        task = asyncio.ensure_future(runner.kill())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _grow(self) -> None:
        if self._idle.empty() and len(self._uses) < self._size and self._starting is None and not self._closed:
            self._starting = asyncio.ensure_future(self._start_one())

    async def _start_one(self) -> None:
        delay_s = BACKOFF_S
        try:
            while True:
                try:
                    await self.first()
                    return
                except StartFailed as error:
                    self._tell("start-failed", message=error.message, again_in_s=delay_s)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, BACKOFF_MAX_S)
        finally:
            self._starting = None

    async def close(self) -> None:
        """Kill all, lent ones too."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        for runner in list(self._uses):
            self._discard(runner)
        await asyncio.gather(*self._ending, return_exceptions=True)
