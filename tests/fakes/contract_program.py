"""A program that speaks the container contract, well or badly, on this host's loopback: what a fake workspace's program is.

``POST /invocations`` does what the payload's ``do`` says; ``GET /ping`` answers ``ping``.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

DEADLINE_S = 60
PIECE = b"x" * 65536


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ContractProgram

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.pings += 1
        ping = self.server.ping
        if ping is None:
            self.server.release.wait(DEADLINE_S)
            return
        self._answer(200 if self.path == "/ping" else 404, ping)

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        if self.headers.get("content-type") == "application/octet-stream":
            self._count(length)
            return
        body = self.rfile.read(length)
        payload = json.loads(body or b"null")
        do = payload.get("do", "echo") if isinstance(payload, dict) else "echo"
        getattr(self, f"_do_{do}")(payload)

    def _count(self, length: int) -> None:
        read = 0
        while read < length:
            data = self.rfile.read(min(65536, length - read))
            if not data:
                self.server.cut_after = read
                return
            read += len(data)
        self._answer(200, json.dumps({"bytes": read}).encode())

    def _do_echo(self, payload: Any) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        told = {"path": self.path, "headers": headers, "payload": payload}
        self._answer(200, json.dumps(told).encode(), set_cookie="a=b", x_secret="1", cache_control="no-store")

    def _do_fail(self, payload: Any) -> None:
        self._answer(payload["status"], b'{"error": "its own"}')

    def _chunked(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _do_stream(self, _payload: Any) -> None:
        """Three events, the second and third of which wait for whoever watches."""
        self._chunked("text/event-stream")
        for number in range(3):
            if number:
                assert self.server.steps.acquire(timeout=DEADLINE_S)
            self._chunk(b'id: %d\nevent: step\ndata: {"number": %d}\n\n' % (number, number))
        self._chunk(b"")

    def _do_cut(self, _payload: Any) -> None:
        self._chunked("application/json")
        self._chunk(b'{"half":')
        self.close_connection = True

    def _do_leave(self, _payload: Any) -> None:
        self.close_connection = True

    def _do_garbage(self, _payload: Any) -> None:
        self.wfile.write(b"this is not HTTP\r\n\r\n")
        self.close_connection = True

    def _do_flood(self, _payload: Any) -> None:
        """Answers without end, as fast as it is read."""
        self._chunked("application/octet-stream")
        try:
            while True:
                self._chunk(PIECE)
                self.server.sent += len(PIECE)
        except OSError:
            self.server.left.set()
        self.close_connection = True

    def _do_hang(self, _payload: Any) -> None:
        """Waits for its caller to leave."""
        self.server.asked.set()
        self.connection.settimeout(DEADLINE_S)
        try:
            gone = self.connection.recv(1) == b""
        except ConnectionError:
            gone = True
        if gone:
            self.server.left.set()
        self.close_connection = True


class ContractProgram(ThreadingHTTPServer):
    """``with ContractProgram() as program``: listens on ``port``."""

    daemon_threads = True
    #: The usual five are too few for fifty callers at once: the kernel drops whom a busy host does not accept in time.
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ping: bytes | None = b'{"status": "Healthy", "time_of_last_update": 1700000000}'
        self.pings = 0
        self.sent = 0
        self.cut_after: int | None = None
        self.steps = threading.Semaphore(0)
        self.release = threading.Event()
        self.asked = threading.Event()
        self.left = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def port(self) -> int:
        return self.server_port

    def handle_error(self, *_: object) -> None:
        """A caller that left is what the tests are about."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.release.set()
        self.shutdown()
        self._thread.join()
        self.server_close()
