"""Flushing the guest's disks, ahead of a sleep where that can be.

A sleep flushes first, so that the disk is whole for who boots it without its memory. Its caller waits for that, so what commands
and file operations wrote is flushed as soon as they have ended and it has been quiet for a moment, and a flush that would find
nothing is left out. Only users' processes, the agent's hands and, rarely, its workers write to the disk: when none has done
anything since a flush began, and that one has ended, the disk holds everything.
"""

from __future__ import annotations

import _thread
import os

from perdure.guest import caches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.guest.hands import Hands
    from perdure.guest.loop import Loop, Timer
    from perdure.guest.world import World

    Mark = tuple[int, int, int]

QUIET_S = 0.25


class Flusher:
    """One per agent. Flushes run in threads: they may take long, and forking a worker costs more than a small one."""

    def __init__(self, loop: Loop, world: World, hands: Hands) -> None:
        self._loop = loop
        self._world = world
        self._hands = hands
        self._clean: Mark | None = None
        self._own_work = 0
        self._timer: Timer | None = None

    def stir(self) -> None:
        """Something that may write has begun or ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(QUIET_S, lambda: self.flush(lambda: None))

    def worked(self) -> None:
        """A worker of the agent's may have written."""
        self._own_work += 1
        self.stir()

    def flush(self, done: Callable[[], None]) -> None:
        """Call back, perhaps at once, when everything written so far is on the disks."""
        mark = self._mark()
        if mark is not None and mark == self._clean:
            done()
            return

        def work() -> None:
            os.sync()
            self._loop.post(lambda: self._flushed(mark, done))

        _thread.start_new_thread(work, ())

    def slim(self, limit_bytes: int, done: Callable[[int], None]) -> None:
        """Drop the page cache if it is larger than this; call back with its size then, with 0 when it stays. After a flush."""
        before = caches.droppable_bytes()
        if before <= limit_bytes:
            done(0)
            return

        def work() -> None:
            try:
                caches.drop()
            except OSError:
                self._loop.post(lambda: done(0))  # then the snapshot is as large as it is
                return
            self._loop.post(lambda: done(before))

        _thread.start_new_thread(work, ())

    def _flushed(self, mark: Mark | None, done: Callable[[], None]) -> None:
        self._clean = mark
        done()

    def _mark(self) -> Mark | None:
        """Differs when anything may have been written between; None when nobody can tell."""
        used_us = self._world.cpu_us()
        return (used_us, self._hands.begun, self._own_work) if used_us and not self._hands.busy else None
