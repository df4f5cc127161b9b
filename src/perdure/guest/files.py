"""The agent's side of file operations: streams on one side, hands (``hands``, ``fileops``) on the other, bytes between them."""

from __future__ import annotations

import os

from perdure.guest.fileops import WORKS, prepare
from perdure.guest.hands import Hands, Tag
from perdure.guest.worker import Refusal, refusal_of
from perdure.wire.guest.frames import DATA_MAX
from perdure.wire.guest.ops import PATH_MAX, Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop
    from perdure.guest.watches import Reader, Watches
    from perdure.wire.guest.mux import Mux

#: What a hand may read ahead of the stream.
_AHEAD_BYTES = 4 * DATA_MAX


class FileTable:
    """The streams that are about files."""

    def __init__(self, loop: Loop, root: str, mux: Mux, on_ended: Callable[[], None]) -> None:
        self.mux = mux
        self.on_ended = on_ended
        self.hands = Hands(loop, root, WORKS)
        self.jobs: dict[int, _Job | Reader] = {}
        self._loop = loop
        self._watches: Watches | None = None

    def watches(self) -> Watches:
        """All there are; they outlive their streams."""
        if self._watches is None:
            from perdure.guest.watches import Watches

            self._watches = Watches(self, self._loop)
        return self._watches

    def open(self, stream: int, request: dict[str, Any]) -> None:
        op = request["op"]
        problem = _problem(request)
        if problem:
            self.mux.reset(stream, Code.INVALID, problem)
            return
        prepare(op)
        try:
            if op == Op.WATCH:
                from perdure.guest.watches import Reader

                reader = Reader(self, stream, request)
                if not reader.over:
                    self.jobs[stream] = reader
            else:
                self.jobs[stream] = _JOBS.get(op, _Job)(self, stream, request)
        except Refusal as refusal:
            self.mux.reset(stream, refusal.code, refusal.message)
        except OSError as error:  # no more descriptors, say
            why = refusal_of(error, str(request.get("path")))
            self.mux.reset(stream, why.code, why.message)

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


def _problem(request: dict[str, Any]) -> str:
    """What is wrong with the request's paths; "" when nothing is."""
    root = request.get("root")
    needed = request["op"] not in _WITHOUT_PATH and request.get("watch") is None
    for name in ("root", "path", "destination"):
        path = request.get(name)
        if path is None and not (name == "path" and needed):
            continue
        anywhere = root is not None and name != "root"  # below the root, wherever it begins
        if (
            not isinstance(path, str)
            or "\0" in path
            or len(os.fsencode(path)) > PATH_MAX
            or not (anywhere or path.startswith("/"))
        ):
            return "A path is absolute, unless it is below a root."
    return ""


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


_JOBS: dict[str, type[_Job]] = {
    **dict.fromkeys((Op.LIST, Op.READ, Op.HASH, Op.PACK), _Source),
    **dict.fromkeys((Op.WRITE, Op.APPEND, Op.UNPACK), _Sink),
}
_WITHOUT_PATH = frozenset((Op.UPLOAD, Op.APPEND))
