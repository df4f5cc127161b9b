"""The agent's event loop: epoll, timers, and nothing else.

asyncio would do, but importing it and running its layers costs an emulated guest several times what this does, and the first
reply after a wake pays for every instruction the translator has not seen yet.
"""

from __future__ import annotations

import heapq
import os
import select
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
EDGE = select.EPOLLET
URGENT = select.EPOLLPRI


class Timer:
    """A callback due at a moment of the monotonic clock, which stands still while the workspace sleeps."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None

    def __lt__(self, other: Timer) -> bool:
        return self.due < other.due


class Loop:
    """Callbacks on descriptors and timers. A callback that raises ends the agent: init starts it again."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._timers: list[Timer] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._turn_ends: list[Callable[[], None]] = []
        self._posted: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False
        self.running = True
        self.add(self._bell, READ, self._on_bell)

    def add(self, fd: int, mask: int, callback: Callable[[int], None]) -> None:
        """Call back with the ready mask whenever ``fd`` is ready; errors and hang-ups are always reported."""
        self._epoll.register(fd, mask)
        self._callbacks[fd] = callback

    def remove(self, fd: int) -> None:
        """Stop watching, before the descriptor is closed. Safe when it is not watched."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def watches(self, fd: int) -> bool:
        return fd in self._callbacks

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + delay_s, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def post(self, callback: Callable[[], None]) -> None:
        """Call soon, from any thread."""
        self._posted.append(callback)
        if not self._rung:
            self._rung = True
            os.eventfd_write(self._bell, 1)

    def _on_bell(self, _mask: int) -> None:
        os.eventfd_read(self._bell)
        self._rung = False  # before the queue is emptied, so that what comes meanwhile rings again
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        """Call after every turn, before waiting again."""
        self._turn_ends.append(callback)

    def run(self) -> None:
        while self.running:
            self.turn()

    def turn(self) -> None:
        """Wait once and run what became due."""
        for callback in self._turn_ends:
            callback()
        for fd, mask in self._epoll.poll(self._timeout()):
            ready = self._callbacks.get(fd)
            if ready is not None:
                ready(mask)
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        now = time.monotonic()
        while self._timers and self._timers[0].due <= now:
            due = heapq.heappop(self._timers).callback
            if due is not None:
                due()

    def _timeout(self) -> float:
        if self._soon:
            return 0
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0].due - time.monotonic()) if self._timers else -1
