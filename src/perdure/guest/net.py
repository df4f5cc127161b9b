"""Connections: from the host to a port inside, and from programs inside to the host.

A program that connects to the API port or asks the proxy for a host gets a stream to the node, which accepts or refuses it.
When the node is not there, or an earlier generation's connections are dropped, programs see a reset at once and do not hang.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections import deque

from perdure.guest.loop import READ, WRITE
from perdure.wire.guest.frames import DATA_MAX
from perdure.wire.guest.ops import API_PORT, PROXY_PORT, Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop
    from perdure.wire.guest.mux import Mux

_CONNECTIONS_MAX = 256
_BACKLOG = 64
_CONNECT_DEADLINE_S = 10.0
_LINGER_RESET = struct.pack("ii", 1, 0)


class Pump:
    """One connected socket and one stream: bytes both ways, half-closes passed on, a reset on one side resets the other."""

    def __init__(self, loop: Loop, mux: Mux, sock: socket.socket, stream: int, over: Callable[[Pump], object]) -> None:
        self.stream = stream
        self._loop = loop
        self._mux = mux
        self._sock = sock
        self._over = over
        self._queue: deque[memoryview] = deque()
        self._read_ended = False
        self._write_ending = False
        self._write_ended = False
        self._mask = 0
        self._dead = False

    def start(self) -> None:
        self._sock.setblocking(False)
        self._update()

    def _update(self) -> None:
        """Watch for what can be done now."""
        mask = 0
        if not self._read_ended and self._mux.room(self.stream) > 0:
            mask |= READ
        if self._queue:
            mask |= WRITE
        if mask == self._mask:
            return
        if self._mask:
            self._loop.remove(self._sock.fileno())
        if mask:
            self._loop.add(self._sock.fileno(), mask, self._on_ready)
        self._mask = mask

    def _on_ready(self, mask: int) -> None:
        if self._queue:
            self._flush()
        if not self._dead and self._mask & READ and mask & ~WRITE:
            self._read()
        if not self._dead:
            self._update()

    def _read(self) -> None:
        room = self._mux.room(self.stream)
        if room <= 0:
            return
        try:
            data = self._sock.recv(min(room, DATA_MAX))
        except BlockingIOError:
            return
        except OSError:
            self._break("the program's side was reset")
            return
        if data:
            self._mux.send(self.stream, data)
            return
        self._read_ended = True
        self._mux.eof(self.stream)
        self._finish_if_done()

    def _break(self, why: str) -> None:
        self._mux.reset(self.stream, Code.FAILED, why)
        self.drop()

    def prepend(self, data: bytes) -> None:
        """Send to the host what was read from the program before the pump began."""
        self._mux.send(self.stream, data)

    def on_data(self, data: bytes) -> None:
        if self._write_ended:
            self._mux.consumed(self.stream, len(data))
            return
        self._queue.append(memoryview(data))
        self._flush()
        if not self._dead:
            self._update()

    def on_eof(self) -> None:
        self._write_ending = True
        self._flush()
        if not self._dead:
            self._update()

    def on_room(self) -> None:
        self._update()

    def _flush(self) -> None:
        while self._queue:
            data = self._queue[0]
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._break("the program's side was reset")
                return
            self._mux.consumed(self.stream, sent)
            if sent == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = data[sent:]
        if self._write_ending and not self._write_ended:
            self._write_ended = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it went away by itself
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._read_ended and self._write_ended:
            self._close()

    def drop(self) -> None:
        """Reset the socket: the other end is gone."""
        if not self._dead:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            except OSError:
                pass
            self._close()

    def _close(self) -> None:
        self._dead = True
        if self._mask:
            self._loop.remove(self._sock.fileno())
            self._mask = 0
        self._sock.close()
        self._over(self)


class _Connecting:
    """A connection to a port inside, tried over IPv4 and then IPv6. Never blocks: a listener's queue may be full."""

    def __init__(self, network: Network, loop: Loop, mux: Mux, stream: int, port: int) -> None:
        self._network = network
        self._loop = loop
        self._mux = mux
        self._stream = stream
        self._port = port
        self._families = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
        self._sock: socket.socket | None = None
        self._timer = loop.call_later(_CONNECT_DEADLINE_S, self._give_up)
        self._next()

    def _next(self) -> None:
        if not self._families:
            self._give_up()
            return
        family, host = self._families.pop(0)
        try:
            self._sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        except OSError:
            self._next()  # a kernel without that family
            return
        code = self._sock.connect_ex((host, self._port))
        if code == errno.EINPROGRESS:
            self._loop.add(self._sock.fileno(), WRITE, self._on_ready)
        else:
            self._settle(code)

    def _on_ready(self, _mask: int) -> None:
        assert self._sock is not None
        self._loop.remove(self._sock.fileno())
        self._settle(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _settle(self, code: int) -> None:
        assert self._sock is not None
        if code:
            self._sock.close()
            self._sock = None
            self._next()
            return
        self._timer.cancel()
        if self._mux.is_open(self._stream):
            self._mux.accept(self._stream)
            self._network.join(self._sock, self._stream)
        else:
            self._sock.close()

    def _give_up(self) -> None:
        self._timer.cancel()
        if self._sock is not None:
            self._loop.remove(self._sock.fileno())
            self._sock.close()
        self._mux.reset(self._stream, Code.NOT_FOUND, f"Nothing listens on port {self._port} in the workspace.")


class Network:
    """All pumps, and the two listeners."""

    def __init__(self, loop: Loop, mux: Mux, ports: tuple[int, int] = (API_PORT, PROXY_PORT)) -> None:
        self._loop = loop
        self._mux = mux
        self._ports = ports
        self._pumps: dict[int, Pump] = {}
        self._asked: dict[int, Callable[[dict[str, Any] | None], None]] = {}
        self._listening: list[socket.socket] = []
        self.problems: list[str] = []

    def listen(self, serve_proxy: Callable[[socket.socket], None]) -> None:
        """Open both loopback ports. One that a program of the user holds is left to it and named in ``problems``."""
        for port, serve in zip(self._ports, (self._serve_api, serve_proxy), strict=True):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError as error:
                self.problems.append(f"The agent cannot listen on 127.0.0.1:{port}: {error.strerror}.")
                sock.close()
                continue
            sock.listen(_BACKLOG)
            self._loop.add(sock.fileno(), READ, self._acceptor(sock, serve))
            self._listening.append(sock)

    def _acceptor(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> Callable[[int], None]:
        def accept(_mask: int) -> None:
            try:
                connection, _ = sock.accept()
            except OSError:
                return  # it gave up while it waited
            if len(self._pumps) + len(self._asked) >= _CONNECTIONS_MAX:
                connection.close()
            else:
                serve(connection)

        return accept

    def _serve_api(self, connection: socket.socket) -> None:
        def answered(refusal: dict[str, Any] | None) -> None:
            if refusal is None:
                self.join(connection, stream)
            else:
                connection.close()

        stream = self.ask({"op": Op.API}, answered)

    # ------------------------------------------------------------------------------------------ opened by the guest

    def ask(self, request: dict[str, Any], answered: Callable[[dict[str, Any] | None], None]) -> int:
        """Open a stream to the host; ``answered(None)`` when it accepts, ``answered({code, message})`` when not."""
        if not self._mux.synced:
            self._loop.call_soon(lambda: answered({"code": Code.STALE, "message": "The node is not connected."}))
            return -1
        stream = self._mux.open(request)
        self._asked[stream] = answered
        return stream

    def join(self, connection: socket.socket, stream: int, first: bytes = b"") -> None:
        """Pump between a program's connection and an open stream, beginning with ``first`` to the host."""
        pump = Pump(self._loop, self._mux, connection, stream, lambda over: self._pumps.pop(over.stream, None))
        self._pumps[stream] = pump
        pump.prepend(first)
        pump.start()

    # ------------------------------------------------------------------------------------------- opened by the host

    def open(self, stream: int, request: dict[str, Any]) -> None:
        port = request.get("port")
        if not isinstance(port, int) or not 1 <= port <= 65535:
            self._mux.reset(stream, Code.INVALID, f"{port!r} is not a port number (1 to 65535).")
            return
        _Connecting(self, self._loop, self._mux, stream, port)

    # -------------------------------------------------------------------------------------------------------- events

    def on_accept(self, stream: int) -> None:
        answered = self._asked.pop(stream, None)
        if answered is not None:
            answered(None)

    def on_data(self, stream: int, data: bytes) -> None:
        pump = self._pumps.get(stream)
        if pump is None:
            self._mux.consumed(stream, len(data))
        else:
            pump.on_data(data)

    def on_eof(self, stream: int) -> None:
        pump = self._pumps.get(stream)
        if pump is not None:
            pump.on_eof()

    def on_room(self, stream: int) -> None:
        pump = self._pumps.get(stream)
        if pump is not None:
            pump.on_room()

    def on_gone(self, stream: int, reason: dict[str, Any]) -> None:
        answered = self._asked.pop(stream, None)
        if answered is not None:
            answered(reason)
        pump = self._pumps.get(stream)
        if pump is not None:
            pump.drop()

    def drop_all(self) -> int:
        """Reset every connection that leads out of this generation; returns how many."""
        count = len(self._pumps) + len(self._asked)
        for pump in list(self._pumps.values()):
            pump.drop()
        asked, self._asked = self._asked, {}
        for answered in asked.values():
            answered({"code": Code.STALE, "message": "The workspace was woken anew; ask again."})
        return count
