"""The HTTP proxy on guest loopback: the one way out.

``CONNECT host:port`` becomes a stream to the node's egress gateway, which decides. Plain ``http://`` requests are forwarded in
origin form with ``Connection: close``: one request per connection keeps a connection bound to the one host it was allowed for.
What cannot be done is answered in HTTP with one plain sentence, so that curl, pip and git show it.
"""

from __future__ import annotations

import socket

from perdure.guest.loop import READ
from perdure.wire.guest.ops import Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from perdure.guest.loop import Loop, Timer
    from perdure.guest.net import Network

_HEAD_MAX = 65536
_PHRASE_MAX = 300
_HEAD_DEADLINE_S = 30.0
_HOP_HEADERS = (b"proxy-connection:", b"proxy-authorization:", b"connection:", b"keep-alive:")


class BadRequest(Exception):
    """A request head that is not for a proxy; the text is the answer's sentence."""


class Target:
    """Where a request leads, and what to send there first."""

    __slots__ = ("first", "host", "port", "tunnel")

    def __init__(self, host: str, port: int, tunnel: bool, first: bytes) -> None:
        self.host = host
        self.port = port
        self.tunnel = tunnel
        self.first = first


def split_authority(authority: str, default_port: int | None) -> tuple[str, int]:
    """``host``, ``host:port`` or ``[v6]:port``. Raises BadRequest."""
    if authority.startswith("["):
        host, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise BadRequest(f"{authority!r} is not a host and port.")
        port = rest[1:]
    else:
        host, _, port = authority.partition(":")
    number = int(port) if port.isascii() and port.isdecimal() else (default_port if not port else None)
    if not host or number is None or not 1 <= number <= 65535:
        raise BadRequest(f"{authority!r} is not a host and port.")
    return host, number


def parse_head(head: bytes, rest: bytes) -> Target:
    """Read a request head (without its blank line). Raises BadRequest with a sentence for the program."""
    lines = head.split(b"\r\n")
    parts = lines[0].split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        raise BadRequest("This is the workspace's HTTP proxy; it understands HTTP/1 requests.")
    method, target = parts[0], parts[1].decode("latin-1")
    if method == b"CONNECT":
        host, port = split_authority(target, None)
        return Target(host, port, True, rest)
    scheme, separator, remainder = target.partition("://")
    if not separator or scheme.lower() != "http":
        raise BadRequest("This is the workspace's HTTP proxy: use CONNECT, or a full http:// address.")
    authority, slash, path = remainder.partition("/")
    if not slash and "?" in authority:
        authority, _, query = authority.partition("?")
        path = "?" + query
    host, port = split_authority(authority.rpartition("@")[2], 80)
    headers = [line for line in lines[1:] if not line.lower().startswith(_HOP_HEADERS)]
    request_line = b"%b /%b %b" % (method, path.encode("latin-1"), parts[2])
    return Target(host, port, False, b"\r\n".join([request_line, *headers, b"Connection: close", b"", b""]) + rest)


def answer(status: int, reason: str, sentence: str) -> bytes:
    """A whole HTTP response that carries one sentence, in its reason phrase too: what tools show of a refused CONNECT."""
    sentence = " ".join(sentence.split())
    body = (sentence + "\n").encode()
    phrase = "".join(char if " " <= char <= "~" else "?" for char in f"{reason}: {sentence[:_PHRASE_MAX]}")
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


class Proxy:
    """Serves connections of programs until they are joined to a stream."""

    def __init__(self, loop: Loop, network: Network) -> None:
        self._loop = loop
        self._network = network

    def serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        _Head(self._loop, self._network, connection)


class _Head:
    """A connection whose request head is not complete yet, or not answered."""

    def __init__(self, loop: Loop, network: Network, connection: socket.socket) -> None:
        self._loop = loop
        self._network = network
        self._connection = connection
        self._bytes = b""
        self._timer: Timer = loop.call_later(_HEAD_DEADLINE_S, lambda: self._end(b""))
        loop.add(connection.fileno(), READ, self._on_ready)

    def _on_ready(self, _mask: int) -> None:
        try:
            data = self._connection.recv(_HEAD_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._bytes += data
        head, blank, rest = self._bytes.partition(b"\r\n\r\n")
        if blank:
            self._begin(head, rest)
        elif not data:
            self._end(b"")
        elif len(self._bytes) > _HEAD_MAX:
            self._end(answer(431, "Request Header Fields Too Large", "The request's head is longer than 64 KiB."))

    def _begin(self, head: bytes, rest: bytes) -> None:
        self._timer.cancel()
        self._loop.remove(self._connection.fileno())
        try:
            target = parse_head(head, rest)
        except BadRequest as bad:
            self._end(answer(400, "Bad Request", str(bad)))
            return

        def answered(refusal: dict[str, Any] | None) -> None:
            if refusal is not None:
                self._refuse(refusal)
                return
            if target.tunnel:
                try:
                    self._connection.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
                except OSError:
                    pass  # the program is gone; the pump sees it, too, and resets the stream
            self._network.join(self._connection, stream, target.first)

        stream = self._network.ask({"op": Op.EGRESS, "host": target.host, "port": target.port}, answered)

    def _refuse(self, refusal: dict[str, Any]) -> None:
        message = str(refusal.get("message", "refused"))
        if refusal.get("code") == Code.FORBIDDEN:
            self._end(answer(403, "Forbidden", message))
        else:
            self._end(answer(502, "Bad Gateway", message))

    def _end(self, last: bytes) -> None:
        self._timer.cancel()
        fd = self._connection.fileno()
        if fd < 0:
            return
        self._loop.remove(fd)
        try:
            if last:
                self._connection.send(last)
                self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # nobody listens to the answer
        self._connection.close()
