"""Ports of a workspace, reached through the API with a real TCP server at the far end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from perdure.core.errors import InvalidRequest, NotFound
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, Workspace
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY


class _Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[::-1])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port(server: FakeServer, demo: Workspace) -> Iterator[int]:
    """A web server in the workspace that answers with the body reversed."""
    web = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    server.workspaces.world("demo").ports.add(web.server_port)
    yield web.server_port
    web.shutdown()
    thread.join()
    web.server_close()


def test_forward(demo: Workspace, port: int) -> None:
    body = bytes(range(256)) * 4000
    with demo.forward(port) as tunnel, httpx2.Client() as http:
        for _ in range(3):
            assert http.post(tunnel.url, content=body).content == body[::-1]
    with pytest.raises(httpx2.ConnectError):
        httpx2.post(f"http://127.0.0.1:{port + 1 if port < 65535 else port - 1}", content=b"")


def test_forward_wakes_and_holds_awake(demo: Workspace, server: FakeServer, port: int) -> None:
    demo.sleep()
    row = server.workspaces.find_row("demo")
    with demo.forward(port) as tunnel:
        with socket.create_connection(("127.0.0.1", tunnel.local_port)) as raw:
            raw.sendall(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc")
            assert raw.recv(65536).startswith(b"HTTP/1.0 200")
            assert server.workspaces.find_row("demo").state == "running"
        server.wait_for(lambda: server.workspaces.held[row.id] == 0)


def test_half_close_passes_through(demo: Workspace, server: FakeServer) -> None:
    """The far end sees the end of input and still answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    server.workspaces.world("demo").ports.add(listener.getsockname()[1])

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            received = b""
            while data := connection.recv(65536):
                received += data
            connection.sendall(str(len(received)).encode())

    thread = threading.Thread(target=answer)
    thread.start()
    with demo.forward(listener.getsockname()[1]) as tunnel, socket.create_connection(("127.0.0.1", tunnel.local_port)) as raw:
        raw.sendall(b"x" * 100_000)
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(100) == b"100000"
    thread.join()
    listener.close()


def test_nothing_listens(demo: Workspace) -> None:
    with demo.forward(1) as tunnel:
        with socket.create_connection(("127.0.0.1", tunnel.local_port)) as raw:
            assert raw.recv(10) == b""
        assert isinstance(tunnel.last_error, NotFound)
        assert "Nothing listens on port 1" in tunnel.last_error.message


def test_refusals_are_http_errors(server: FakeServer, demo: Workspace) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for path, status in (("demo/tcp/1", 404), ("none/tcp/80", 404), ("demo/tcp/70000", 422)):
        with pytest.raises(InvalidStatus) as caught:
            connect(f"{server.url.replace('http', 'ws')}/v1/workspaces/{path}", additional_headers=headers)
        assert caught.value.response.status_code == status
        assert b'"error"' in (caught.value.response.body or b"")


def test_local_mistakes(demo: Workspace, port: int) -> None:
    with pytest.raises(InvalidRequest, match="is not a TCP port"):
        demo.forward(0)
    with (
        demo.forward(port) as tunnel,
        pytest.raises(InvalidRequest, match="cannot be used"),
        demo.forward(port, local_port=tunnel.local_port),
    ):
        pass


def test_over_tcp_with_key(server: FakeServer, demo: Workspace, port: int) -> None:
    with Client(url=server.url, api_key=KEY) as client, Workspace.connect("demo", client=client).forward(port) as tunnel:
        assert httpx2.post(tunnel.url, content=b"abc").text == "cba"


def test_sleep_ends_open_tunnels(demo: Workspace, server: FakeServer, port: int) -> None:
    with demo.forward(port) as tunnel, socket.create_connection(("127.0.0.1", tunnel.local_port)) as raw:
        row = server.workspaces.find_row("demo")
        server.wait_for(lambda: server.workspaces.held.get(row.id, 0) == 1)
        server.stop()
        assert raw.recv(10) == b""
        server.start()


async def test_async_forward(server: FakeServer, port: int) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.connect("demo", client=client)
        async with ws.forward(port) as tunnel, httpx2.AsyncClient() as http:
            answers = await asyncio.gather(*(http.post(tunnel.url, content=str(n)) for n in range(10, 20)))
        assert [one.text for one in answers] == [str(n)[::-1] for n in range(10, 20)]
