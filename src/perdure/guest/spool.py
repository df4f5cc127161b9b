"""The last bytes of an output stream, by offset, for readers that come late or come back."""

from __future__ import annotations

from perdure.wire.guest.ops import SPOOL_BYTES


class Spool:
    """Keeps about ``limit`` bytes; the oldest go first. Offsets count from the stream's beginning."""

    __slots__ = ("_bytes", "_limit", "start")

    def __init__(self, limit: int = SPOOL_BYTES) -> None:
        self._bytes = bytearray()
        self._limit = limit
        self.start = 0

    @property
    def end(self) -> int:
        return self.start + len(self._bytes)

    @property
    def held(self) -> int:
        return len(self._bytes)

    def append(self, data: bytes) -> None:
        self._bytes += data
        # Moving the rest costs its size, so let some pile up before.
        if len(self._bytes) > self._limit + self._limit // 4:
            self.trim(self._limit)

    def trim(self, keep: int) -> None:
        """Drop all but the last ``keep`` bytes."""
        surplus = len(self._bytes) - keep
        if surplus > 0:
            del self._bytes[:surplus]
            self.start += surplus

    def read(self, offset: int, limit: int) -> tuple[int, bytes]:
        """(bytes lost before them, bytes): what follows ``offset``, beginning later where the spool no longer reaches."""
        gap = max(0, self.start - offset)
        begin = offset + gap - self.start
        return gap, bytes(memoryview(self._bytes)[begin : begin + limit])
