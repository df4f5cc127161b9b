"""Handing what is written to the disk while the rest is still being made, so that the end need not wait for all of it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from perdure.snapshots.segments import SegmentWriter

#: So much is handed over at once; a small capture is synced once.
_BYTES_PER_FLUSH = 64 << 20

_flusher = ThreadPoolExecutor(max_workers=2, thread_name_prefix="perdure-flush")


class Flushes:
    """Around everything that is written to one segment. A failure, theirs too, takes back all that was written since."""

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        self._begun = self._handed = writer.size
        self._running: list[Future[None]] = []

    def __enter__(self) -> Flushes:
        return self

    def look(self) -> None:
        """Hand over what there is, if it is worth it and the disk is not busy with the last."""
        if self._writer.size - self._handed >= _BYTES_PER_FLUSH and (not self._running or self._running[-1].done()):
            self._handed = self._writer.size
            self._running.append(_flusher.submit(self._writer.sync))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        wait(self._running)
        try:
            if error is None:  # an error of theirs is told once: the caller's own sync would not hear of it
                for flush in self._running:
                    flush.result()
        except BaseException:
            self._writer.cut(self._begun)
            raise
        if error is not None:
            self._writer.cut(self._begun)
