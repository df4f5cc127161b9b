"""A server with a domain for ports, a workspace ``demo``, and programs in it that behave as a test wants."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.core.config import Settings
from perdure.sdk import Workspace
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY

DEADLINE_S = 60
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def ported() -> Iterator[FakeServer]:
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
    settings = Settings(home=home, listen_port=0, url=None, api_key=None, ingress_domain="ws.localhost", port_answer_s=30)
    try:
        with FakeServer(settings) as running:
            yield running
    finally:
        shutil.rmtree(home)


@pytest.fixture
def server(ported: FakeServer) -> FakeServer:
    ported.reset()
    return ported


class Echo(BaseHTTPRequestHandler):
    """Says what it was asked."""

    protocol_version = "HTTP/1.1"
    connections: set[Any]

    def _answer(self) -> None:
        length = int(self.headers.get("content-length", "0"))
        if self.headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
        self.connections.add(self.client_address)
        told = {"line": self.requestline, "headers": self.headers.items(), "sha256": hashlib.sha256(body).hexdigest()}
        content = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.send_header("set-cookie", "a=1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_HEAD = do_PROPFIND = _answer

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def program(server: FakeServer, handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """A program in ``demo`` that does what it likes with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    server.workspaces.world("demo").ports.add(port)

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_handled, args=(handle, connection), daemon=True).start()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield port
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(DEADLINE_S)


def _handled(handle: Callable[[socket.socket], None], connection: socket.socket) -> None:
    connection.settimeout(DEADLINE_S)
    with connection, suppress(OSError):  # the other side is gone, which some tests are about
        handle(connection)


def head_of(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        data = connection.recv(1)
        assert data, "it ended before its head"
        received += data
    return received


@pytest.fixture
def port(server: FakeServer, demo: Workspace) -> Iterator[int]:
    """The echo."""
    Echo.connections = set()
    web = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    web.daemon_threads = True
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    server.workspaces.world("demo").ports.add(web.server_port)
    yield web.server_port
    web.shutdown()
    thread.join()
    web.server_close()


@pytest.fixture
def http(server: FakeServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=DEADLINE_S) as made:
        yield made


def by_path(port: int, path: str = "/") -> str:
    return f"/v1/workspaces/demo/ports/{port}{path}"


def host_of(server: FakeServer, port: int, name: str = "demo") -> str:
    return f"{name}--{port}.ws.localhost:{server.url.rpartition(':')[2]}"


def raw(server: FakeServer) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), DEADLINE_S)
    made.settimeout(DEADLINE_S)
    return made
