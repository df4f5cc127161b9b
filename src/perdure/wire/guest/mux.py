"""Calls and streams over one channel, without I/O.

``receive`` turns bytes into events; ``pull`` yields the bytes to send. In between, each stream has two directions, each with
its own credit: a sender queues at will but ``pull`` takes no more data of a stream than its peer has room for, one frame of
each ready stream in turn, so that an upload does not hold up a command. Messages keep their place among the data and cost no
credit.

A sync starts everything afresh: both sides forget all streams, calls and queued bytes of the connection before it.
"""

from __future__ import annotations

import json
from collections import deque

from perdure.wire.guest.frames import DATA_MAX, NOPS, PAYLOAD_MAX, Decoder, FrameType, encode, encode_sync
from perdure.wire.guest.ops import STREAMS_MAX, WINDOW, WINDOW_MAX, Code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from perdure.wire.guest.frames import Frame


class WireMisuse(RuntimeError):
    """A call that this side's own state forbids: a programming error, never the peer's doing."""


class Role:
    HOST = 1  # odd stream and call ids
    GUEST = 2  # even ones


class EventKind:
    SYNC = "sync"  # value: nonce. All streams are gone; the mux has forgotten them
    BROKEN = "broken"  # value: why
    OPEN = "open"  # value: JSON
    ACCEPT = "accept"  # value: JSON
    DATA = "data"  # value: bytes, flags: sub-stream
    MESSAGE = "message"  # value: JSON
    EOF = "eof"
    RESET = "reset"  # value: JSON {code, message}; the stream is gone
    ROOM = "room"  # the peer gave credit
    CALL = "call"  # value: JSON
    REPLY = "reply"  # value: JSON
    NOTE = "note"  # value: JSON


class Event:
    """One thing that the peer did."""

    __slots__ = ("flags", "kind", "stream", "value")

    def __init__(self, kind: str, stream: int, value: Any = None, flags: int = 0) -> None:
        self.kind = kind
        self.stream = stream
        self.value = value
        self.flags = flags

    def __repr__(self) -> str:
        return f"Event({self.kind!r}, {self.stream}, {self.value!r}, {self.flags})"


class _Stream:
    __slots__ = ("eof_received", "eof_sent", "given", "in_ready", "queue", "queued", "send_credit", "unreturned", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.send_credit = window
        self.given = window  # bytes the peer may still send us
        self.unreturned = 0  # bytes consumed here that the peer has not been told of
        self.queue: deque[tuple[int, int, bytes]] = deque()
        self.queued = 0  # bytes of data in the queue
        self.eof_sent = False
        self.eof_received = False
        self.in_ready = False


def _pack(value: object) -> bytes:
    """JSON; bytes are JSON already."""
    return value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()


class Mux:
    """One side of one channel."""

    def __init__(self, role: int, *, window: int = WINDOW) -> None:
        self._decoder = Decoder()
        self._role = role
        self._window = window
        self._streams: dict[int, _Stream] = {}
        self._urgent: deque[bytes] = deque()
        self._ready: deque[int] = deque()
        self._next_id = role
        self._awaited: bytes | None = None
        self._peer_streams = 0
        self.synced = False

    # ------------------------------------------------------------------------------------------------------- sync

    def begin(self, nonce: bytes) -> None:
        """Host: start a connection. Nothing received counts before the guest's echo of ``nonce``."""
        self._forget()
        self._decoder = Decoder()
        self._awaited = nonce
        self._urgent.append(NOPS)
        self._urgent.append(encode_sync(nonce))

    def announce(self, nonce: bytes) -> None:
        """Guest: drop all that is queued and send a sync (the echo of the host's, or ANNOUNCE at start)."""
        self._forget()
        self._urgent.append(encode_sync(nonce))

    def _forget(self) -> None:
        self._streams.clear()
        self._urgent.clear()
        self._ready.clear()
        self._peer_streams = 0
        self.synced = False

    # -------------------------------------------------------------------------------------------------- receiving

    def receive(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """What the peer did, in order. Never raises for anything a peer can send."""
        return self._events(self._decoder.feed(data))

    def space(self) -> memoryview:
        """Where a reader may put bytes for ``received``."""
        return self._decoder.space()

    def received(self, count: int) -> list[Event]:
        """``receive`` without a copy: ``count`` bytes were put into ``space()``. Data events hold views until the next."""
        return self._events(self._decoder.advance(count, lend=True))

    def _events(self, frames: list[Frame]) -> list[Event]:
        events: list[Event] = []
        for kind, flags, stream, payload in frames:
            if kind == FrameType.DATA:
                self._on_data(stream, flags, payload, events)
            elif kind == FrameType.SYNC:
                self._on_sync(bytes(payload), events)
            elif kind == FrameType.BROKEN:
                if self.synced:
                    self.synced = False
                    events.append(Event(EventKind.BROKEN, 0, bytes(payload).decode()))
            elif self.synced:
                self._on_frame(kind, stream, bytes(payload), events)
        return events

    def _on_sync(self, nonce: bytes, events: list[Event]) -> None:
        if self._role == Role.GUEST:
            self.announce(nonce)
            self.synced = True
            events.append(Event(EventKind.SYNC, 0, nonce))
        elif nonce == self._awaited:
            self.synced = True
            events.append(Event(EventKind.SYNC, 0, nonce))
        elif self.synced:
            # The agent started anew (or something plays tricks): nothing of this connection holds any more.
            self.synced = False
            events.append(Event(EventKind.BROKEN, 0, "the agent started again"))

    def _on_data(self, stream_id: int, flags: int, payload: bytes | memoryview, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or not self.synced:
            return  # late bytes of a stream that was reset
        stream.given -= len(payload)
        if stream.given < 0 or stream.eof_received:
            self._violation(stream_id, "data beyond the window or the end", events)
            return
        events.append(Event(EventKind.DATA, stream_id, payload, flags))

    def _on_frame(self, kind: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        if kind == FrameType.CREDIT:
            self._on_credit(stream_id, payload, events)
            return
        value: Any = None
        if kind != FrameType.EOF:
            try:
                value = json.loads(payload)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                self._violation(stream_id, "a frame without a JSON object", events)
                return
        if kind == FrameType.OPEN:
            self._on_open(stream_id, value, events)
        elif kind == FrameType.CALL:
            events.append(Event(EventKind.CALL, stream_id, value))
        elif kind == FrameType.REPLY:
            events.append(Event(EventKind.REPLY, stream_id, value))
        elif kind == FrameType.NOTE:
            events.append(Event(EventKind.NOTE, 0, value))
        else:
            self._on_stream_frame(kind, stream_id, value, events)

    def _on_stream_frame(self, kind: int, stream_id: int, value: Any, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if kind == FrameType.RESET:
            self._remove(stream_id)
            events.append(Event(EventKind.RESET, stream_id, value))
        elif stream.eof_received:
            self._violation(stream_id, "a frame after the end", events)
        elif kind == FrameType.ACCEPT:
            events.append(Event(EventKind.ACCEPT, stream_id, value))
        elif kind == FrameType.MESSAGE:
            events.append(Event(EventKind.MESSAGE, stream_id, value))
        else:
            stream.eof_received = True
            self._remove_if_done(stream_id, stream)
            events.append(Event(EventKind.EOF, stream_id))

    def _on_open(self, stream_id: int, value: Any, events: list[Event]) -> None:
        if stream_id % 2 == self._role % 2 or stream_id in self._streams:
            return  # not an id that the peer may use; answering would hit a stream of ours
        if self._peer_streams >= STREAMS_MAX:
            refusal = {"code": Code.BUSY, "message": f"more than {STREAMS_MAX} streams are open"}
            self._urgent.append(encode(FrameType.RESET, stream_id, _pack(refusal)))
            return
        self._streams[stream_id] = _Stream(self._window_of(value))
        self._peer_streams += 1
        events.append(Event(EventKind.OPEN, stream_id, value))

    def _on_credit(self, stream_id: int, payload: bytes, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or len(payload) != 4:
            return
        stream.send_credit = min(stream.send_credit + int.from_bytes(payload, "little"), stream.window)
        self._mark_ready(stream_id, stream)
        events.append(Event(EventKind.ROOM, stream_id))

    def _violation(self, stream_id: int, what: str, events: list[Event]) -> None:
        if stream_id in self._streams:
            reason = {"code": Code.PROTOCOL, "message": what}
            self.reset(stream_id, Code.PROTOCOL, what)
            events.append(Event(EventKind.RESET, stream_id, reason))

    # ---------------------------------------------------------------------------------------------------- sending

    def open(self, info: dict[str, Any]) -> int:
        """Open a stream for a purpose; returns its id. Data may be queued at once."""
        stream_id = self._take_id()
        self._streams[stream_id] = _Stream(self._window if self._role == Role.GUEST else _asked_window(info, self._window))
        self._urgent.append(encode(FrameType.OPEN, stream_id, _pack(info)))
        return stream_id

    def _window_of(self, info: dict[str, Any]) -> int:
        """Only a host may ask for more than the usual: the other end's memory would be the host's."""
        return _asked_window(info, self._window) if self._role == Role.GUEST else self._window

    def _take_id(self) -> int:
        taken = self._next_id
        self._next_id = taken + 2 if taken < 0xFFFF_FFF0 else self._role
        return taken if taken not in self._streams else self._take_id()

    def accept(self, stream_id: int, info: dict[str, Any] | bytes | None = None) -> None:
        if stream_id in self._streams:
            self._urgent.append(encode(FrameType.ACCEPT, stream_id, _pack(info or {})))

    def reset(self, stream_id: int, code: str, message: str) -> None:
        """Refuse or break a stream; what was queued on it is dropped. Nothing happens when it is gone already."""
        if stream_id in self._streams:
            self._remove(stream_id)
            self._urgent.append(encode(FrameType.RESET, stream_id, _pack({"code": code, "message": message[:2000]})))

    def send(self, stream_id: int, data: bytes, flags: int = 0) -> None:
        """Queue data, any length. Nothing happens when the stream is gone: its reset is (or was) reported as an event."""
        if data:
            stream = self._writable(stream_id)
            if stream is not None:
                for start in range(0, len(data), DATA_MAX):
                    stream.queue.append((FrameType.DATA, flags, data[start : start + DATA_MAX]))
                stream.queued += len(data)
                self._mark_ready(stream_id, stream)

    def message(self, stream_id: int, value: dict[str, Any] | bytes) -> None:
        """Queue a message, in order with the data."""
        stream = self._writable(stream_id)
        if stream is not None:
            stream.queue.append((FrameType.MESSAGE, 0, _pack(value)))
            self._mark_ready(stream_id, stream)

    def eof(self, stream_id: int) -> None:
        """Nothing more will be sent on this stream."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.eof_sent:
            stream.eof_sent = True
            stream.queue.append((FrameType.EOF, 0, b""))
            self._mark_ready(stream_id, stream)

    def _writable(self, stream_id: int) -> _Stream | None:
        stream = self._streams.get(stream_id)
        if stream is not None and stream.eof_sent:
            raise WireMisuse("data after the end of a stream")
        return stream

    def call(self, value: dict[str, Any]) -> int:
        call_id = self._take_id()
        self._urgent.append(encode(FrameType.CALL, call_id, _pack(value)))
        return call_id

    def reply(self, call_id: int, value: dict[str, Any]) -> None:
        self._urgent.append(encode(FrameType.REPLY, call_id, _pack(value)))

    def note(self, value: dict[str, Any]) -> None:
        if self.synced:
            self._urgent.append(encode(FrameType.NOTE, 0, _pack(value)))

    def consumed(self, stream_id: int, count: int) -> None:
        """The reader took ``count`` bytes of data: the peer may send as many again."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.eof_received:
            return
        stream.unreturned += count
        if stream.unreturned * 4 >= stream.window:
            stream.given += stream.unreturned
            self._urgent.append(encode(FrameType.CREDIT, stream_id, stream.unreturned.to_bytes(4, "little")))
            stream.unreturned = 0

    def room(self, stream_id: int) -> int:
        """Bytes of data that could be sent on at once; 0 or less: wait for a ROOM event. 0 when the stream is gone."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.send_credit - stream.queued

    def is_open(self, stream_id: int) -> bool:
        return stream_id in self._streams

    # ------------------------------------------------------------------------------------------------------ output

    @property
    def has_output(self) -> bool:
        return bool(self._urgent or self._ready)

    def pull_urgent(self) -> bytes:
        """What goes before all data: calls, replies, credit. For a sender that holds data back."""
        parts = b"".join(self._urgent)
        self._urgent.clear()
        return parts

    def pull(self, limit: int = 65536) -> bytes:
        """Whole frames to send now, up to about ``limit`` bytes (one frame at least, when there is one)."""
        parts: list[bytes] = []
        size = 0
        urgent = self._urgent
        while urgent and (not parts or size < limit):
            part = urgent.popleft()
            parts.append(part)
            size += len(part)
        while self._ready and (not parts or size < limit):
            part = self._next_frame(self._ready.popleft())
            parts.append(part)
            size += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _next_frame(self, stream_id: int) -> bytes:
        stream = self._streams[stream_id]
        stream.in_ready = False
        kind, flags, payload = stream.queue.popleft()
        if kind == FrameType.DATA:
            size = min(len(payload), stream.send_credit)
            if size < len(payload):
                stream.queue.appendleft((kind, flags, payload[size:]))
                payload = payload[:size]
            stream.send_credit -= size
            stream.queued -= size
        elif kind == FrameType.EOF:
            self._remove_if_done(stream_id, stream)
        self._mark_ready(stream_id, stream)
        return encode(kind, stream_id, payload, flags)

    def _mark_ready(self, stream_id: int, stream: _Stream) -> None:
        if stream.in_ready or not stream.queue:
            return
        if stream.queue[0][0] != FrameType.DATA or stream.send_credit > 0:
            stream.in_ready = True
            self._ready.append(stream_id)

    def _remove_if_done(self, stream_id: int, stream: _Stream) -> None:
        if stream.eof_received and stream.eof_sent and not stream.queue:
            self._remove(stream_id)

    def _remove(self, stream_id: int) -> None:
        stream = self._streams.pop(stream_id)
        if stream.in_ready:
            self._ready.remove(stream_id)
        if stream_id % 2 != self._role % 2:
            self._peer_streams -= 1


def _asked_window(info: dict[str, Any], usual: int) -> int:
    asked = info.get("window")
    return max(usual, min(asked, WINDOW_MAX)) if type(asked) is int else usual


def payload_fits(value: object) -> bool:
    """Whether a JSON object fits one frame."""
    return len(_pack(value)) <= PAYLOAD_MAX
