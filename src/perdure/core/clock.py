"""Time as a parameter: services receive a Clock, tests pass one they can move."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for deadlines."""

    def now(self) -> datetime:
        """Aware UTC wall time."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that counts through suspend of the host (CLOCK_BOOTTIME), for leases and deadlines."""
        ...


class SystemClock:
    """The host's clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def epoch_ms(clock: Clock) -> int:
    """Milliseconds since 1970 of the clock's wall time, for ids."""
    return int(clock.now().timestamp() * 1000)
