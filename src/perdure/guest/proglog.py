"""What the workspace's program writes: its end is kept, by offset, in two files of the agent's own ``/run``.

Files and not this process's memory, so that a dead agent costs nothing of it. The program writes into a FIFO there that it holds
open for reading as well, so that it neither dies nor fails while there is no agent; at most it waits for the next one.
"""

from __future__ import annotations

import os

from perdure.guest.loop import READ
from perdure.wire.guest.frames import DATA_MAX
from perdure.wire.guest.ops import PROGRAM_LOG_BYTES, Code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from perdure.guest.loop import Loop
    from perdure.wire.guest.mux import Mux

_READ_BYTES = 65536
_PREFIX = "program-log."


class LogFile:
    """About the last ``limit`` bytes. Offsets count from the first byte since the machine booted.

    A file's name says at which offset it begins; the older of the two goes when the newer one is full.
    """

    def __init__(self, directory: str, limit: int = PROGRAM_LOG_BYTES) -> None:
        self._directory = directory
        self._part = limit // 2
        self._starts = sorted(int(name[len(_PREFIX) :]) for name in os.listdir(directory) if name.startswith(_PREFIX))
        self._fd = -1
        self.end = 0
        if self._starts:
            self._open(self._starts[-1])
            self.end = self._starts[-1] + os.fstat(self._fd).st_size

    @property
    def start(self) -> int:
        return self._starts[0] if self._starts else self.end

    def _path(self, start: int) -> str:
        return f"{self._directory}/{_PREFIX}{start}"

    def _open(self, start: int) -> None:
        self.close()
        self._fd = os.open(self._path(start), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Nothing is appended any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def append(self, data: bytes) -> None:
        """Keep it. What a full /run has no room for is dropped, as if it had not been written."""
        try:
            if not self._starts or self.end - self._starts[-1] >= self._part:
                self._next()
            self.end += os.write(self._fd, data)
        except OSError:
            pass

    def _next(self) -> None:
        self._open(self.end)
        self._starts.append(self.end)
        while len(self._starts) > 2:
            os.unlink(self._path(self._starts.pop(0)))

    def read(self, offset: int, limit: int) -> tuple[int, bytes]:
        """(bytes lost before them, bytes): what follows ``offset``."""
        for position, start in enumerate(self._starts):
            following = self._starts[position + 1] if position + 1 < len(self._starts) else self.end
            begin = max(offset, start)
            if begin >= following:
                continue
            fd = os.open(self._path(start), os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(fd, min(limit, following - begin), begin - start)
            finally:
                os.close(fd)
            if data:
                return begin - offset, data
        return max(0, self.end - offset), b""

    def tail(self, lines: int) -> int:
        """Where the last so many lines begin."""
        if lines == 0:
            return self.end
        wanted = lines
        for start in reversed(self._starts):
            _, data = self.read(start, self.end - start)
            if start == self._starts[-1] and data and not data.endswith(b"\n"):
                wanted -= 1  # an unfinished line is one, too
            at = len(data)
            while (at := data.rfind(b"\n", 0, at)) >= 0:
                if wanted <= 0:
                    return start + at + 1
                wanted -= 1
        return self.start


class _Reader:
    """One stream that reads the log."""

    def __init__(self, offset: int, follow: bool) -> None:
        self.offset = offset
        self.follow = follow


class ProgramLog:
    """The FIFO, the file, and who reads."""

    def __init__(self, loop: Loop, mux: Mux, run_dir: str) -> None:
        self._loop = loop
        self._mux = mux
        self._fifo = f"{run_dir}/program-output"
        self._readers: dict[int, _Reader] = {}
        self._fd = -1
        self.file = LogFile(run_dir)
        if os.path.exists(self._fifo):  # of an agent before this one, whose program may be writing
            self._listen()

    def _listen(self) -> None:
        if self._fd < 0:
            self._fd = os.open(self._fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._loop.add(self._fd, READ, self._on_ready)

    def writing_end(self) -> int:
        """A descriptor for a program's output, which blocks when nobody reads. Raises OSError."""
        if not os.path.exists(self._fifo):
            os.mkfifo(self._fifo, 0o600)
        self._listen()
        return os.open(self._fifo, os.O_RDWR | os.O_CLOEXEC)

    def _on_ready(self, _mask: int) -> None:
        self.take()

    def take(self) -> bool:
        """Keep what the program has written by now, a piece at a time. False when there is no more."""
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        self.file.append(data)
        for stream in list(self._readers):
            self._pump(stream)
        return True

    # ---------------------------------------------------------------------------------------------------- streams

    def open(self, stream: int, request: dict[str, Any]) -> None:
        """Serve a reader. An offset beyond the end means that the log began anew with the machine: it is read from its start."""
        offset, tail = request.get("offset"), request.get("tail")
        if not _is_count(offset) or not _is_count(tail):
            self._mux.reset(stream, Code.INVALID, "An offset and a number of lines are whole numbers from 0 on.")
            return
        if offset is None:
            offset = self.file.start if tail is None else self.file.tail(tail)
        elif offset > self.file.end:
            offset = 0
        self._mux.accept(stream, {"offset": offset})
        self._readers[stream] = _Reader(offset, bool(request.get("follow")))
        self._pump(stream)

    def _pump(self, stream: int) -> None:
        reader, mux = self._readers[stream], self._mux
        while reader.offset < self.file.end:
            room = mux.room(stream)
            if room <= 0:
                if not mux.is_open(stream):
                    del self._readers[stream]
                return
            gap, data = self.file.read(reader.offset, min(room, DATA_MAX))
            if gap:
                mux.message(stream, {"ev": "gap", "lost": gap})
            mux.send(stream, data)
            reader.offset += gap + len(data)
        if not reader.follow:
            del self._readers[stream]
            mux.eof(stream)

    def on_room(self, stream: int) -> None:
        if stream in self._readers:
            self._pump(stream)

    def on_gone(self, stream: int) -> None:
        self._readers.pop(stream, None)

    def drop_all(self) -> None:
        self._readers.clear()


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)
