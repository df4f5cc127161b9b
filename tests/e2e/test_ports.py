"""Programs in a real machine, reached over HTTP while they sleep: a web server, a stream of events, WebSockets, large files."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from websockets.sync.client import connect

from perdure.sdk import Workspace
from tests.e2e.live import DEADLINE_S, Live, serving, shell

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

#: On 8000 files of /srv; on 8001 uploads are told by their SHA-256 and GET is a stream; on 8002 a WebSocket says all twice.
PROGRAM = r"""
import base64, hashlib, http.server, socketserver, struct, threading
class Web(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def __init__(self, *args):
        super().__init__(*args, directory="/srv")
class Work(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_PUT(self):
        left, digest = int(self.headers["content-length"]), hashlib.sha256()
        while left:
            data = self.rfile.read(min(left, 65536))
            digest.update(data)
            left -= len(data)
        body = digest.hexdigest().encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for count in range(3):
            self.wfile.write(b"data: %d\n\n" % count)
        open("/root/leaves", "w").write("waits")
        self.close_connection = True
        if self.path == "/forever":
            try:
                self.connection.recv(1)
            except ConnectionResetError:
                pass
            open("/root/leaves", "w").write("left")
class Chat(socketserver.StreamRequestHandler):
    def handle(self):
        headers = {}
        while (line := self.rfile.readline().strip()):
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        accept = hashlib.sha1(headers[b"sec-websocket-key"] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        self.wfile.write(b"HTTP/1.1 101 Go\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                         b"Sec-WebSocket-Accept: " + base64.b64encode(accept) + b"\r\n\r\n")
        while True:
            first, second = self.rfile.read(2)
            size = second & 127
            if size == 126:
                size = struct.unpack(">H", self.rfile.read(2))[0]
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(size)))
            if first & 15 == 8:
                self.wfile.write(b"\x88" + bytes([len(data)]) + data)
                return
            self.wfile.write(bytes([first, len(data) * 2]) + data + data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
servers = [Server(("127.0.0.1", 8000 + at), kind) for at, kind in enumerate((Web, Work, Chat))]
for server in servers[1:]:
    threading.Thread(target=server.serve_forever).start()
open("/root/ready", "w").close()
servers[0].serve_forever()
"""
RUDE = """
import socket
server = socket.create_server(("127.0.0.1", 8004))
open("/root/rude", "w").close()
while True:
    server.accept()[0].sendall(b"hi there\\n\\n")
"""
LARGE = 8 << 20


@pytest.fixture(scope="module")
def live(base_image: Path) -> Iterator[Live]:
    with serving(PERDURE_INGRESS_DOMAIN="ws.localhost", PERDURE_CHECKPOINT_INTERVAL_S="0") as running:
        yield running


@pytest.fixture(scope="module")
def workspace(live: Live) -> Workspace:
    made = live.workspace("demo")
    made.files.write("/root/program.py", PROGRAM.encode())
    shell(made, f"mkdir -p /srv/deep && echo hello > /srv/deep/note && head -c {LARGE} /dev/urandom > /srv/large")
    made.commands.run(["python3", "/root/program.py"], background=True)
    shell(made, "until [ -e /root/ready ]; do sleep 0.2; done")
    return made


class Visitor:
    """Speaks to the server's TCP port, by the address that it tells."""

    def __init__(self, live: Live, workspace: Workspace) -> None:
        self.port = int(urlsplit(workspace.ports.url(8000)).port or 0)
        self.base = f"http://127.0.0.1:{self.port}"
        self.key = (live.home / "run" / "api.key").read_text().strip()
        self.bearer = {"authorization": f"Bearer {self.key}"}

    def path(self, port: int, rest: str = "/") -> str:
        return f"{self.base}/v1/workspaces/demo/ports/{port}{rest}"


@pytest.fixture
def visitor(live: Live, workspace: Workspace) -> Visitor:
    return Visitor(live, workspace)


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=DEADLINE_S) as made:
        yield made


def test_a_request_wakes_it_and_many_wake_it_once(workspace: Workspace, visitor: Visitor) -> None:
    """(peers: rows 15 and 16)"""
    workspace.sleep()
    generation = workspace.refresh().generation
    answers: list[httpx2.Response] = []

    def ask() -> None:
        answers.append(httpx2.get(visitor.path(8000, "/deep/note"), headers=visitor.bearer, timeout=DEADLINE_S))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.status_code, one.text) for one in answers] == [(200, "hello\n")] * 6
    assert {one.headers["perdure-generation"] for one in answers} == {str(generation + 1)}
    assert all(one.headers["content-security-policy"] == "sandbox" for one in answers)


def test_a_redirect_stays_below_the_path(workspace: Workspace, visitor: Visitor, http: httpx2.Client) -> None:
    answer = http.get(visitor.path(8000, "/deep"), headers=visitor.bearer)
    assert (answer.status_code, answer.headers["location"]) == (301, "/v1/workspaces/demo/ports/8000/deep/")
    assert "note" in http.get(visitor.path(8000, "/deep/"), headers=visitor.bearer).text


def test_a_connection_that_was_kept_is_none_that_a_sleep_drops(
    workspace: Workspace, visitor: Visitor, http: httpx2.Client
) -> None:
    """Nothing half torn is frozen in, and the report tells of no connection that nobody used (peers: rows 11 and 12)."""
    assert http.get(visitor.path(8000, "/deep/note"), headers=visitor.bearer).text == "hello\n"
    workspace.sleep()
    assert workspace.wake().connections_dropped == 0


def test_large_files_pass_whole(workspace: Workspace, visitor: Visitor, http: httpx2.Client) -> None:
    content = bytes(range(256)) * (LARGE // 256)
    told = http.put(visitor.path(8001), content=content, headers=visitor.bearer).text
    assert told == hashlib.sha256(content).hexdigest()
    received = http.get(visitor.path(8000, "/large"), headers=visitor.bearer).content
    assert hashlib.sha256(received).hexdigest() == shell(workspace, "sha256sum < /srv/large").split()[0]


def test_events_and_a_client_that_leaves(workspace: Workspace, visitor: Visitor, http: httpx2.Client) -> None:
    shell(workspace, "rm -f /root/leaves")
    with http.stream("GET", visitor.path(8001, "/forever"), headers=visitor.bearer) as answer:
        lines = answer.iter_lines()
        assert [line for line in (next(lines) for _ in range(6)) if line] == ["data: 0", "data: 1", "data: 2"]
        shell(workspace, "until grep -q waits /root/leaves; do sleep 0.2; done")
    shell(workspace, "until grep -q left /root/leaves; do sleep 0.2; done")


def test_a_websocket_to_a_sleeper(workspace: Workspace, visitor: Visitor) -> None:
    workspace.sleep()
    url = visitor.path(8002).replace("http", "ws")
    with connect(url, additional_headers=visitor.bearer, open_timeout=DEADLINE_S, proxy=None) as socket_:
        for message in ("hé", b"\x00\xff"):
            socket_.send(message)
            assert socket_.recv(DEADLINE_S) == message + message  # type: ignore[operator]


def test_a_link_from_the_command_line_to_a_browsers_page(live: Live, workspace: Workspace, visitor: Visitor) -> None:
    url = live.ok("share", "demo", "8000", "--expires", "10min").text
    parts = urlsplit(url)
    workspace.sleep()
    with httpx2.Client(headers={"host": parts.netloc, "accept": "text/html"}, timeout=DEADLINE_S) as browser:
        first = browser.get(f"{visitor.base}/deep/note?{parts.query}")
        assert (first.status_code, first.headers["location"]) == (303, f"http://{parts.netloc}/deep/note")
        cookie = {"cookie": first.headers["set-cookie"].partition(";")[0]}
        assert browser.get(f"{visitor.base}/deep/note", headers=cookie).text == "hello\n"
        live.ok("unshare", "demo", "8000")
        assert browser.get(f"{visitor.base}/deep/note", headers=cookie).status_code == 401
    assert "port-shared" in live.ok("log", "demo").text


def test_a_rewound_guest_gets_no_connection_of_before(workspace: Workspace, visitor: Visitor, http: httpx2.Client) -> None:
    """(peers: row 10)"""
    workspace.checkpoint("before")
    assert http.get(visitor.path(8000, "/deep/note"), headers=visitor.bearer).text == "hello\n"
    workspace.rewind("before")
    assert http.get(visitor.path(8000, "/deep/note"), headers=visitor.bearer).text == "hello\n"


def test_a_program_that_is_not_there_or_does_not_speak_http(workspace: Workspace, visitor: Visitor, http: httpx2.Client) -> None:
    found = http.get(visitor.path(9), headers=visitor.bearer)
    assert (found.status_code, found.headers["perdure-reason"]) == (502, "port_refused")
    workspace.files.write("/root/rude.py", RUDE.encode())
    workspace.commands.run(["python3", "/root/rude.py"], background=True)
    shell(workspace, "until [ -e /root/rude ]; do sleep 0.2; done")
    found = http.get(visitor.path(8004), headers=visitor.bearer)
    assert (found.status_code, found.headers["perdure-reason"]) == (502, "port_malformed")


def test_a_stopping_server_answers_what_is_open(live: Live, workspace: Workspace, visitor: Visitor) -> None:
    with socket.create_connection(("127.0.0.1", visitor.port), DEADLINE_S) as client:
        target = "/v1/workspaces/demo/ports/8001/forever"
        client.sendall(f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {visitor.key}\r\n\r\n".encode())
        received = client.recv(65536)
        while b"data: 2" not in received:
            received += client.recv(65536)
        live.ok("down")
        while data := client.recv(65536):
            received += data
    assert not received.endswith(b"0\r\n\r\n"), "it was cut, visibly"
