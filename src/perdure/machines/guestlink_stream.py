"""One stream to or from a guest, as the host sees it: bytes and messages in order, flow control, and errors of the one tree.

Everything in here came from a guest and is treated as an attacker's: text is cut and cleaned, counts are bounded, types are
checked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perdure.core.errors import (
    AlreadyExists,
    Busy,
    Conflict,
    Forbidden,
    GuestUnresponsive,
    InvalidRequest,
    MachineDied,
    MachineFailed,
    NoSpace,
    NotFound,
    PathEscape,
    PerdureError,
)
from perdure.wire.guest import Event, EventKind, Mux
from perdure.wire.guest.ops import MESSAGES_MAX, UNKNOWN_CALL, UNKNOWN_OPERATION, Code

_TEXT_MAX = 500

_ERRORS: dict[str, tuple[type[PerdureError], str]] = {
    Code.INVALID: (InvalidRequest, "Correct the request; the workspace is unchanged."),
    Code.NOT_FOUND: (NotFound, "Check the path, port or id; paths are absolute in the workspace's root."),
    Code.EXISTS: (AlreadyExists, "Choose another name, or remove what is there first."),
    Code.CONFLICT: (Conflict, ""),
    Code.ESCAPE: (PathEscape, "Name what is inside; a link that leads out is not followed."),
    Code.FORBIDDEN: (Forbidden, ""),
    Code.NO_SPACE: (NoSpace, "Free some space inside the workspace, or resize its disk; the old content is unchanged."),
    Code.BUSY: (Busy, "Close some of what is open in the workspace, or try again in a moment."),
    Code.STALE: (MachineDied, "The workspace was woken anew meanwhile; try again."),
}


def clean(text: object) -> str:
    """A guest's text made safe to show: printable, one line, at most 500 characters."""
    shown = text if isinstance(text, str) else ""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown[:_TEXT_MAX])


def error_of(refusal: dict[str, Any]) -> PerdureError:
    """The error that a guest's ``{code, message}`` stands for."""
    message = clean(refusal.get("message")) or "The workspace refused without a reason."
    if message.startswith((UNKNOWN_OPERATION, UNKNOWN_CALL)):
        older = "The agent that runs in this workspace is older than the server and cannot do this."
        hint = "Start it from its disk, which brings the agent of today: perdure recover NAME --how disk-boot."
        return Conflict(older, hint=hint, internal=message)
    kind, hint = _ERRORS.get(
        str(refusal.get("code")), (MachineFailed, "Try again; if it happens again, look at the workspace's log.")
    )
    return kind(message, hint=hint or None)


@dataclass(slots=True)
class Moved:
    """Bytes of streams together, to the guest and from it; messages are not in here. It only grows."""

    inward: int = 0
    outward: int = 0


class LinkStream:
    """Implements wire.node.ByteStream; commands and files use ``next_event`` instead of ``read``."""

    def __init__(self, mux: Mux, stream_id: int, wake_writer: Callable[[], None]) -> None:
        self._mux = mux
        self._id = stream_id
        self._wake_writer = wake_writer
        self._inbox: deque[Event] = deque()
        self._messages = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._accepted: dict[str, Any] | None = None
        self._error: PerdureError | None = None
        self._ended = False
        self._sent_eof = False
        self.moved = Moved()  # where its bytes are counted; who counts several together puts the same one into each
        self._rest = b""  # of the last data event; its credit is given already, which bounds it at one frame
        #: Called once, when the stream is over or has failed.
        self.on_over: list[Callable[[], object]] = []

    # --------------------------------------------------------------------------------------- from the channel

    def on_event(self, event: Event) -> None:
        """The channel's reader hands out an event of this stream."""
        kind = event.kind
        if kind == EventKind.ROOM:
            self._room.set()
            return
        if kind == EventKind.ACCEPT:
            self._accepted = event.value
        elif kind == EventKind.RESET:
            self.fail(error_of(event.value))
            return
        elif kind == EventKind.MESSAGE and self._messages >= MESSAGES_MAX:
            self._mux.reset(self._id, Code.PROTOCOL, "too many messages that nobody read")
            self.fail(MachineFailed("The workspace's agent sent more messages than its stream may hold."))
            return
        else:
            self._inbox.append(event)
            self._messages += kind == EventKind.MESSAGE
        self._changed.set()

    def fail(self, error: PerdureError) -> None:
        """The stream is gone. What arrived before can still be read."""
        if self._error is None:
            self._error = error
        self._changed.set()
        self._room.set()
        self._over()

    def _over(self) -> None:
        callbacks, self.on_over = self.on_over, []
        for callback in callbacks:
            callback()

    # ------------------------------------------------------------------------------------------------ opening

    async def accepted(self, deadline_s: float) -> dict[str, Any]:
        """Wait for the guest's answer to the opening; raises what its refusal means."""
        try:
            async with asyncio.timeout(deadline_s):
                while self._accepted is None:
                    if self._error is not None:
                        raise self._error
                    await self._wait()
        except TimeoutError as error:
            self.abort("the host waited too long")
            raise GuestUnresponsive(
                f"The workspace did not answer within {deadline_s:g} s.",
                hint="Try again; if it stays silent, wake it from its last snapshot.",
                ambiguous=True,
            ) from error
        return self._accepted

    async def accept(self) -> LinkStream:
        """Answer a stream that the guest opened: it is good. Raises what broke it meanwhile."""
        if self._error is not None:
            raise self._error
        self._mux.accept(self._id)
        self._wake_writer()
        return self

    async def refuse(self, status: int, reason: str) -> None:
        """Answer a stream that the guest opened: no. The program gets HTTP 403 for 403, else 502, with ``reason`` as its text."""
        self._mux.reset(self._id, Code.FORBIDDEN if status == 403 else Code.FAILED, reason)
        self._wake_writer()
        self.fail(MachineFailed("The stream was refused."))

    # ------------------------------------------------------------------------------------------------ reading

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def next_event(self) -> Event | None:
        """The next DATA or MESSAGE in order; None at the end. Raises what broke the stream."""
        while not self._inbox:
            if self._ended:
                return None
            if self._error is not None:
                raise self._error
            await self._wait()
        event = self._inbox.popleft()
        if event.kind == EventKind.EOF:
            self._ended = True
            return None
        if event.kind == EventKind.DATA:
            self._mux.consumed(self._id, len(event.value))
            self.moved.outward += len(event.value)
            self._wake_writer()
        else:
            self._messages -= 1
        return event

    async def read(self, limit: int = 65536) -> bytes:
        while not self._rest:
            event = await self.next_event()
            if event is None:
                if self._sent_eof:
                    self._over()
                return b""
            if event.kind == EventKind.DATA:
                self._rest = event.value
        data, self._rest = self._rest[:limit], self._rest[limit:]
        return data

    # ------------------------------------------------------------------------------------------------ writing

    async def write(self, data: bytes) -> None:
        """Queue bytes; returns when the peer's window has taken all but what fits it."""
        view = memoryview(data)
        while view:
            if self._error is not None:
                raise self._error
            room = self._mux.room(self._id)
            if room <= 0:
                self._room.clear()
                if self._error is None and self._mux.room(self._id) <= 0:
                    await self._room.wait()
                continue
            self._mux.send(self._id, bytes(view[:room]))
            self.moved.inward += min(room, len(view))
            self._wake_writer()
            view = view[room:]

    async def message(self, value: dict[str, Any]) -> None:
        """Send a message, in order with the bytes."""
        if self._error is not None:
            raise self._error
        self._mux.message(self._id, value)
        self._wake_writer()

    async def close_write(self) -> None:
        self._sent_eof = True
        self._mux.eof(self._id)
        self._wake_writer()
        if self._ended:
            self._over()

    def leave(self, last: dict[str, Any]) -> None:
        """Be done with the stream, after what was written and a last message; the guest ends it. Safe when it is over."""
        if self._error is None and not self._ended and not self._sent_eof and self._mux.is_open(self._id):
            self._mux.message(self._id, last)
            self._wake_writer()
        self.fail(MachineDied("The stream was closed."))

    async def close(self) -> None:
        self.abort("closed by the host")

    def abort(self, why: str) -> None:
        """End both directions at once. Nothing happens when the stream is over."""
        if self._mux.is_open(self._id):
            self._mux.reset(self._id, Code.STALE, why)
            self._wake_writer()
        self.fail(MachineDied("The stream was closed."))
