"""HTTP and WebSockets to a program that listens in a workspace: frozen values and protocols; no I/O.

Headers are pairs of bytes in order. Names of answers are lower-case. Framing (Content-Length, Transfer-Encoding, Connection) is
the affair of the connection that is spoken on, so a request must not bring it and an answer's must not be passed on.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from perdure.core.ids import WorkspaceId
from perdure.wire.node.guest import ByteStream, Guest

Headers = tuple[tuple[bytes, bytes], ...]


class PortPhase(StrEnum):
    """How far a request came; ``phase`` in the details of a PortFailed."""

    CONNECTING = "connecting"
    SENDING = "sending"  # the request
    WAITING = "waiting"  # for the answer's head
    ANSWERING = "answering"  # within the answer's body


@dataclass(frozen=True, slots=True)
class PortLimits:
    """What a program may take. Seconds; None means any time."""

    head_bytes: int = 64 * 1024  # of an answer's status line and headers
    answer_s: float = 300.0  # to take the next bytes of the request, and from its end to the answer's head
    body_silence_s: float | None = None  # between pieces of an answer's body: server-sent events are rare at times
    message_bytes: int = 16 << 20  # of a WebSocket's message


@dataclass(frozen=True, slots=True)
class PortPlace:
    """A port of an awake workspace. ``guest`` is that of this generation."""

    workspace_id: WorkspaceId
    generation: int
    guest: Guest
    port: int


@dataclass(frozen=True, slots=True)
class PortRequest:
    """``target`` goes onto the wire as it is. ``length`` is the body's; None: unknown, it is sent in chunks. Without a Host
    header it gets ``localhost`` with the port."""

    method: str
    target: bytes
    headers: Headers = ()
    body: AsyncIterator[bytes] | None = None
    length: int | None = None
    upgrade: str | None = None  # the protocol to change to, such as websocket; without a body
    is_last: bool = False  # of its connection: the program is told, and closes it rather than seeing it reset later


class PortAnswer(Protocol):
    """An answer whose head has arrived. Whoever has it reads ``body`` to its end or calls ``aclose``."""

    status: int
    reason: bytes
    headers: Headers
    upgraded: ByteStream | None  # after status 101: the connection, from the first byte of the new protocol on

    def body(self) -> AsyncGenerator[bytes]:
        """The body in pieces as they arrive, once. Raises PortFailed when it is cut."""
        ...

    async def aclose(self) -> None:
        """End the connection, unless the whole answer was read. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class SocketClosed:
    """How a WebSocket ended: RFC 6455's code, 1006 when without a word."""

    code: int
    reason: str = ""


@runtime_checkable
class PortSocket(Protocol):
    """A WebSocket to a program, open. ``receive`` and ``send`` may run at the same time, each once."""

    subprotocol: str | None
    headers: Headers  # of the handshake's answer

    async def receive(self) -> str | bytes | SocketClosed:
        """The next whole message; after SocketClosed nothing comes any more."""
        ...

    async def send(self, message: str | bytes) -> None:
        """Waits while the program does not read. Raises PortClosed."""
        ...

    async def aclose(self, code: int = 1001, reason: str = "") -> None:
        """Say that it ends, wait a moment for the program to agree, and close. Safe to call twice."""
        ...


class Ports(Protocol):
    """Every call raises PortRefused when nothing listens, another PortFailed for what the program does wrong, and MachineDied,
    GuestUnresponsive or Busy for the workspace itself. Cancelling one closes its connection."""

    async def request(self, place: PortPlace, request: PortRequest, limits: PortLimits | None = None) -> PortAnswer:
        """Returns when the answer's head is there, be it before the whole body is sent."""
        ...

    async def open_socket(
        self, place: PortPlace, request: PortRequest, subprotocols: tuple[str, ...] = (), limits: PortLimits | None = None
    ) -> PortSocket | PortAnswer:
        """A WebSocket; or the answer of a program that does not want to open one. ``request`` is a GET without a body."""
        ...

    async def close(self) -> None:
        """Close the connections that are kept for more requests. What is under way ends by itself."""
        ...
