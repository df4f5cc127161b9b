"""The agent's side of file operations: streams on one side, hands (``hands``, ``fileops``) on the other, bytes between them."""

from __future__ import annotations

import os

from perdure.guest.fileops import WORKS
from perdure.guest.hands import Hands, Tag
from perdure.guest.worker import Refusal
from perdure.wire.guest.frames import DATA_MAX
from perdure.wire.guest.ops import PATH_MAX, Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop
    from perdure.wire.guest.mux import Mux

#: What a hand may read ahead of the stream.
_AHEAD_BYTES = 4 * DATA_MAX


class FileTable:
    """The streams that are about files."""

    def __init__(self, loop: Loop, root: str, mux: Mux, on_ended: Callable[[], None]) -> None:
        self.mux = mux
        self.on_ended = on_ended
        self.hands = Hands(loop, root, WORKS)
        self.jobs: dict[int, _Job] = {}

    def open(self, stream: int, request: dict[str, Any]) -> None:
        path = request.get("path")
        if not isinstance(path, str) or not path.startswith("/") or "\0" in path or len(os.fsencode(path)) > PATH_MAX:
            self.mux.reset(stream, Code.INVALID, f"A path is absolute and has at most {PATH_MAX} bytes.")
            return
        try:
            self.jobs[stream] = _JOBS.get(request["op"], _Job)(self, stream, request)
        except Refusal as refusal:
            self.mux.reset(stream, refusal.code, refusal.message)

    def owns(self, stream: int) -> bool:
        return stream in self.jobs

    def on_data(self, stream: int, data: bytes | memoryview) -> None:
        """Bytes of a stream; a view holds only during the call."""
        job = self.jobs.get(stream)
        if job is None:
            self.mux.consumed(stream, len(data))
        else:
            job.on_data(data)

    def on_message(self, stream: int, message: dict[str, Any]) -> None:
        job = self.jobs.get(stream)
        if job is not None:
            job.on_message(message)

    def on_room(self, stream: int) -> None:
        job = self.jobs.get(stream)
        if job is not None:
            job.on_room()

    def on_gone(self, stream: int) -> None:
        job = self.jobs.pop(stream, None)
        if job is not None:
            job.abort()

    def drop_all(self) -> None:
        for stream in list(self.jobs):
            self.on_gone(stream)


class _Job:
    """One operation."""

    def __init__(self, table: FileTable, stream: int, request: dict[str, Any]) -> None:
        self._table = table
        self._mux = table.mux
        self._stream = stream
        self._hand = table.hands.take()
        self._hand.ask(request, self._on_packet)

    def _on_packet(self, tag: str, value: Any) -> None:
        mux, stream = self._mux, self._stream
        if tag == Tag.DATA:
            mux.send(stream, value)
            self.on_sent(len(value))
        elif tag == Tag.TOOK:
            mux.consumed(stream, value)
        elif tag == Tag.GO:
            mux.accept(stream, value)
            self.on_room()
        else:
            if tag == Tag.OVER:
                mux.accept(stream, value)
            elif tag == Tag.WRITTEN:
                mux.message(stream, value)
            elif tag == Tag.REFUSED:
                mux.reset(stream, *value)
            self._table.hands.give(self._hand)
            self._table.jobs.pop(stream, None)
            mux.eof(stream)
            self._table.on_ended()

    def on_data(self, data: bytes | memoryview) -> None:
        self._mux.consumed(self._stream, len(data))

    def on_message(self, message: dict[str, Any]) -> None:
        """Nothing to say to a short operation."""

    def on_sent(self, size: int) -> None:
        """Data of the hand went to the stream."""

    def on_room(self) -> None:
        """Nothing to send more of."""

    def abort(self) -> None:
        """Nobody waits for it any more."""
        self._hand.drop()


class _Source(_Job):
    """Bytes of a hand to the stream: asked for as there is room, a few frames ahead."""

    _asked = 0  # bytes that the hand may still give

    def on_sent(self, size: int) -> None:
        self._asked = max(0, self._asked - DATA_MAX)
        self.on_room()

    def on_room(self) -> None:
        while self._asked < _AHEAD_BYTES and self._mux.room(self._stream) - self._asked >= DATA_MAX:
            self._asked += DATA_MAX
            self._hand.say(DATA_MAX)


class _Sink(_Job):
    """Bytes of the stream to a hand; the window bounds what waits for it."""

    def on_data(self, data: bytes | memoryview) -> None:
        self._hand.say(bytes(data))

    def on_message(self, message: dict[str, Any]) -> None:
        if message.get("ev") == "commit":
            self._hand.say({"length": message.get("length"), "crc32": message.get("crc32")})


_JOBS: dict[str, type[_Job]] = {Op.LIST: _Source, Op.READ: _Source, Op.WRITE: _Sink}
