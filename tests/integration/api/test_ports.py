"""Ports of a workspace over real HTTP, to programs that behave and to some that do not; WebSockets too."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

from perdure.core.config import Settings
from perdure.sdk import Workspace
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY
from tests.integration.api.programs import (
    BEARER,
    DEADLINE_S,
    Echo,
    by_path,
    head_of,
    host_of,
    http,
    port,
    ported,
    program,
    raw,
    server,
)

__all__ = ["http", "port", "ported", "server"]

DOUBLE = [Subprotocol("double")]


# ------------------------------------------------------------------------------------------------------------------ requests


def test_by_path_with_a_key(http: httpx2.Client, port: int) -> None:
    answer = http.post(by_path(port, "/a%2Fb?x=1"), content=b"body", headers={**BEARER, "cookie": "a=1", "x-own": "1"})
    assert answer.status_code == 200
    told = answer.json()
    names = {name.lower(): value for name, value in told["headers"]}
    assert told["line"] == "POST /a%2Fb?x=1 HTTP/1.1" and told["sha256"] == hashlib.sha256(b"body").hexdigest()
    assert names["host"] == f"localhost:{port}" and names["x-own"] == "1" and names["x-forwarded-for"] == "127.0.0.1"
    assert not names.keys() & {"authorization", "cookie"} and KEY not in str(told)
    assert answer.headers["content-security-policy"] == "sandbox" and "set-cookie" not in answer.headers
    assert answer.headers["perdure-generation"] == "1" and answer.headers["perdure-request-id"].startswith("req_")


def test_nobody_is_believed_about_where_he_comes_from(http: httpx2.Client, port: int) -> None:
    claims = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}
    names = {name.lower(): value for name, value in http.get(by_path(port), headers={**BEARER, **claims}).json()["headers"]}
    assert (names["x-forwarded-for"], names["x-forwarded-proto"]) == ("127.0.0.1", "http")


def test_behind_a_proxy_that_is_trusted_it_is(home: Path) -> None:
    Echo.connections = set()
    settings = Settings(
        home=home, listen_port=0, url=None, api_key=None, trusted_proxies=("127.0.0.1",), auth_failures_per_min=0.001
    )
    with FakeServer(settings) as server, httpx2.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        client.post("/v1/workspaces", headers=BEARER, json={"name": "demo"})
        web = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            server.workspaces.world("demo").ports.add(web.server_port)
            claims = {"x-forwarded-for": "6.6.6.6, 203.0.113.9", "x-forwarded-proto": "https"}
            told = client.get(by_path(web.server_port), headers={**BEARER, **claims}).json()
            names = {name.lower(): value for name, value in told["headers"]}
            assert (names["x-forwarded-for"], names["x-forwarded-proto"]) == ("203.0.113.9", "https")
            link = client.post("/v1/workspaces/demo/shares", headers={**BEARER, **claims}, json={"port": web.server_port})
            assert link.json()["url"].startswith("https://127.0.0.1:")
        finally:
            web.shutdown()
            thread.join()
            web.server_close()
        wrong = {"authorization": "Bearer pdk_wrong", "x-forwarded-for": "203.0.113.9"}
        while client.get("/v1/health", headers=wrong).status_code == 401:
            pass  # until that address has sent too many
        other = client.get("/v1/health", headers={**wrong, "x-forwarded-for": "203.0.113.10"})
        assert other.status_code == 401, "its neighbour behind the same proxy has not"


def test_a_path_with_dots_is_not_ours_to_resolve(server: FakeServer, port: int) -> None:
    with raw(server) as client:
        target = by_path(port, "/../../../../etc/./passwd")
        client.sendall(
            f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n".encode()
        )
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"GET /../../../../etc/./passwd HTTP/1.1" in received


def test_every_method_passes(http: httpx2.Client, port: int) -> None:
    for method in ("GET", "PUT", "PROPFIND"):
        assert http.request(method, by_path(port), headers=BEARER).json()["line"] == f"{method} / HTTP/1.1"
    head = http.head(by_path(port), headers=BEARER)
    assert head.status_code == 200 and int(head.headers["content-length"]) > 0 and head.content == b""


def test_over_the_socket_without_a_key(server: FakeServer, port: int) -> None:
    transport = httpx2.HTTPTransport(uds=str(server.settings.api_socket))
    with httpx2.Client(base_url="http://perdure", transport=transport) as local:
        assert (
            local.get(by_path(port), headers={"authorization": "Basic b3du"})
            .json()["headers"]
            .count(["authorization", "Basic b3du"])
        )


def test_a_sleeping_workspace_is_woken_once_by_many(server: FakeServer, demo: Workspace, port: int) -> None:
    """All callers of a stampede get the same generation, none a 404 (peers: row 16)."""
    demo.sleep()
    answers: list[httpx2.Response] = []

    def ask() -> None:
        with httpx2.Client(base_url=server.url, timeout=DEADLINE_S) as http:
            answers.append(http.get(by_path(port), headers=BEARER))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.status_code, one.headers["perdure-generation"]) for one in answers] == [(200, "2")] * 8
    row = server.workspaces.find_row("demo")
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)


def test_connections_are_used_again_within_a_generation(http: httpx2.Client, demo: Workspace, port: int) -> None:
    """(peers: row 10)"""
    for _ in range(3):
        assert http.get(by_path(port), headers=BEARER).status_code == 200
    assert len(Echo.connections) == 1
    demo.sleep()
    assert http.get(by_path(port), headers=BEARER).status_code == 200
    assert len(Echo.connections) == 2


def test_megabytes_pass_whole_in_both_directions(server: FakeServer, http: httpx2.Client, port: int) -> None:
    content = bytes(range(256)) * 4096
    sent = (content for _ in range(32))
    assert http.put(by_path(port), content=sent, headers=BEARER).json()["sha256"] == hashlib.sha256(content * 32).hexdigest()

    def give(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(32):
            connection.sendall(b"%x\r\n" % len(content) + content + b"\r\n")
        connection.sendall(b"0\r\n\r\n")

    with program(server, give) as giver:
        received = hashlib.sha256()
        with http.stream("GET", by_path(giver), headers=BEARER) as answer:
            for piece in answer.iter_raw():
                received.update(piece)
        assert received.hexdigest() == hashlib.sha256(content * 32).hexdigest()


def test_server_sent_events_arrive_one_by_one(server: FakeServer, demo: Workspace, http: httpx2.Client) -> None:
    seen = threading.Semaphore(0)

    def tell(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for count in range(3):
            connection.sendall(b"data: %d\n\n" % count)
            assert seen.acquire(timeout=DEADLINE_S), "the client has not seen what was sent before"

    with program(server, tell) as port, http.stream("GET", by_path(port), headers=BEARER) as answer:
        lines = []
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                seen.release()
    assert lines == ["data: 0", "data: 1", "data: 2"]


def test_a_client_that_leaves_takes_the_programs_connection_along(server: FakeServer, demo: Workspace) -> None:
    ended = threading.Event()

    def wait(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nbegun")
        while connection.recv(100):
            pass
        ended.set()

    with program(server, wait) as port:
        with raw(server) as client:
            client.sendall(f"GET {by_path(port)} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
            while b"begun" not in client.recv(65536):
                pass
        assert ended.wait(DEADLINE_S)
    row = server.workspaces.find_row("demo")
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)


@pytest.mark.parametrize(
    ("answer", "code"),
    [(b"", "port_closed"), (b"HTTP/1.1 2", "port_closed"), (b"220 mail\r\n\r\n", "port_malformed")],
)
def test_programs_that_do_not_answer_properly(
    server: FakeServer, demo: Workspace, http: httpx2.Client, answer: bytes, code: str
) -> None:
    def rude(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(answer)

    with program(server, rude) as port:
        found = http.get(by_path(port), headers=BEARER)
        assert (found.status_code, found.json()["error"]["code"], found.headers["perdure-reason"]) == (502, code, code)
        page = http.get("/", headers={**BEARER, "host": host_of(server, port), "accept": "text/html"})
        assert (page.status_code, page.headers["perdure-reason"]) == (502, code)
        assert page.headers["content-type"].startswith("text/html") and "The program in the workspace" in page.text


def test_an_answer_that_breaks_off_is_seen_to(server: FakeServer, demo: Workspace, http: httpx2.Client) -> None:
    def torn(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345")

    with program(server, torn) as port, pytest.raises(httpx2.RemoteProtocolError):
        http.get(by_path(port), headers=BEARER)


def test_nothing_listens(http: httpx2.Client, demo: Workspace) -> None:
    found = http.get(by_path(1), headers=BEARER)
    assert (found.status_code, found.headers["perdure-reason"]) == (502, "port_refused")
    assert "Nothing listens on port 1" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 4\r\ncontent-length: 60\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"content-length: +4\r\n",
        b"content-length : 4\r\n",
    ],
)
def test_a_request_that_could_be_read_in_two_ways_is_refused(server: FakeServer, port: int, framing: bytes) -> None:
    with raw(server) as client:
        client.sendall(
            f"POST {by_path(port)} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n".encode()
            + framing
            + b"\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1") == 1
    assert not Echo.connections


def test_what_is_in_a_body_is_no_request(server: FakeServer, port: int) -> None:
    """Both framings at once: the chunks count, and the program gets one framing of our own."""
    hidden = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    with raw(server) as client:
        client.sendall(
            f"POST {by_path(port)} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n".encode()
            + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % len(hidden)
            + hidden
            + b"\r\n0\r\n\r\n"
        )
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert (
        hashlib.sha256(hidden).hexdigest().encode() in received
        and b"content-length" not in received.split(b"\r\n\r\n")[1].lower()
    )
    assert len(Echo.connections) == 1


def test_two_requests_on_one_connection_are_two(server: FakeServer, port: int) -> None:
    one = f"GET {by_path(port, '/1')} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n\r\n"
    two = f"GET {by_path(port, '/2')} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    with raw(server) as client:
        client.sendall((one + two).encode())
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"GET /1 HTTP/1.1" in received and b"GET /2" not in received and b"HTTP/1.1 401" in received, "each shows its own key"


def test_a_server_that_stops_ends_what_is_open(server: FakeServer, demo: Workspace) -> None:
    asked, ended = threading.Event(), threading.Event()

    def wait(connection: socket.socket) -> None:
        head_of(connection)
        asked.set()
        while connection.recv(100):
            pass
        ended.set()

    with program(server, wait) as port, raw(server) as client:
        client.sendall(f"GET {by_path(port)} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
        assert asked.wait(DEADLINE_S)
        server.stop()
        received = b"".join(iter(lambda: client.recv(65536), b""))
        assert received.startswith(b"HTTP/1.1 503") and b"The server is stopping" in received
        assert ended.wait(DEADLINE_S)
        server.start()


# ---------------------------------------------------------------------------------------------------------------- WebSockets


@pytest.fixture
def chat(server: FakeServer, demo: Workspace) -> Iterator[int]:
    """A WebSocket server that says everything twice, and ends at ``bye``."""

    def talk(connection: ServerConnection) -> None:
        for message in connection:
            if message == "bye":
                connection.close(4001, "bye yourself")
            elif message == "die":
                connection.socket.shutdown(socket.SHUT_RDWR)
            else:
                connection.send(message + message)

    with serve(talk, "127.0.0.1", 0, subprotocols=DOUBLE, max_size=None) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        chosen = int(running.socket.getsockname()[1])
        server.workspaces.world("demo").ports.add(chosen)
        yield chosen
        running.shutdown()
        thread.join()


def test_a_websocket_by_path_and_by_host(server: FakeServer, demo: Workspace, chat: int) -> None:
    demo.sleep()
    base = server.url.replace("http", "ws")
    with connect(base + by_path(chat, "/talk"), additional_headers=BEARER, subprotocols=DOUBLE, proxy=None) as socket_:
        assert socket_.subprotocol == "double"
        for message in ("hé", b"\x00\xff", "x" * 200_000):
            socket_.send(message)
            assert socket_.recv(DEADLINE_S) == message + message  # type: ignore[operator]
    link = demo.ports.share(chat)
    url = f"ws://{host_of(server, chat)}/talk?perdure_share={link.token}"
    with connect(url, sock=raw(server), subprotocols=DOUBLE, proxy=None) as socket_:
        socket_.send("a")
        assert socket_.recv(DEADLINE_S) == "aa"
        socket_.send("bye")
        with pytest.raises(ConnectionClosedError) as closed:
            socket_.recv(DEADLINE_S)
        assert closed.value.rcvd is not None and (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "bye yourself")
    row = server.workspaces.find_row("demo")
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)


def test_a_websocket_whose_program_dies(server: FakeServer, chat: int) -> None:
    with connect(
        server.url.replace("http", "ws") + by_path(chat), additional_headers=BEARER, subprotocols=DOUBLE, proxy=None
    ) as socket_:
        socket_.send("die")
        with pytest.raises(ConnectionClosedError) as closed:
            socket_.recv(DEADLINE_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011


def test_websockets_that_are_refused(server: FakeServer, chat: int, port: int) -> None:
    base = server.url.replace("http", "ws")
    cases: list[tuple[str, dict[str, str], int]] = [
        (by_path(chat), {}, 401),
        (by_path(chat), {**BEARER, "Origin": "https://evil.example"}, 403),
        (by_path(1), BEARER, 502),
        (by_path(port), BEARER, 502),
        (by_path(chat) + "?perdure_share=pds_forged", {}, 401),
    ]
    for path, headers, status in cases:
        with pytest.raises(InvalidStatus) as caught:
            connect(base + path, additional_headers=headers, proxy=None)
        assert caught.value.response.status_code == status, (path, headers)
