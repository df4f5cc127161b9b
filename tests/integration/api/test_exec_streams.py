"""Other ways to follow a command: server-sent events, and a WebSocket that also types, resizes and signals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidStatus
from websockets.sync.client import ClientConnection, connect, unix_connect

from perdure.api import streams
from perdure.sdk import Workspace
from perdure.wire import public
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY

SSE = {"accept": "text/event-stream"}


@pytest.fixture
def http(server: FakeServer) -> Iterator[httpx2.Client]:
    transport = httpx2.HTTPTransport(uds=str(server.settings.api_socket))
    with httpx2.Client(transport=transport, base_url="http://perdure") as made:
        yield made


def events(text: str) -> list[dict[str, Any]]:
    """As a browser reads them."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            found.append({**json.loads(fields["data"]), "id": fields["id"], "event": fields["event"]})
    return found


# ---------------------------------------------------------------------------------------------------- server-sent events


def test_events_of_a_start_and_of_an_output(http: httpx2.Client, demo: Workspace) -> None:
    answer = http.post("/v1/workspaces/demo/execs", headers=SSE, json={"shell": "echo one; warn two; exit 3"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    started, one, two, exited = events(answer.text)
    assert (started["event"], started["id"]) == ("started", "0-0")
    assert {(one["id"], one["stream"]), (two["id"], two["stream"])} == {("4-0", "stdout"), ("4-4", "stderr")}
    assert (exited["event"], exited["id"], exited["outcome"]["exit_code"]) == ("exited", "end", 3)
    again = http.get(f"/v1/workspaces/demo/execs/{started['exec_id']}/output", headers=SSE)
    assert events(again.text) == events(answer.text)


def test_a_browser_goes_on_where_it_was_and_stops_at_the_end(http: httpx2.Client, demo: Workspace) -> None:
    result = demo.commands.run("echo abc; warn de; echo fgh")
    path = f"/v1/workspaces/demo/execs/{result.exec_id}/output"
    rest = events(http.get(path, headers={**SSE, "last-event-id": "6-1"}).text)
    data = {event["stream"]: (event["offset"], event["data"]) for event in rest if event["event"] == "output"}
    assert data == {"stdout": (6, "aAo="), "stderr": (1, "ZQo=")}
    assert http.get(path, headers={**SSE, "last-event-id": "6-1"}, params={"stdout_offset": 0}).text.count("event: output") == 2
    assert http.get(path, headers={**SSE, "last-event-id": "end"}).status_code == 204
    for wrong in ("6", "x-y", "-1-2", "1-2-3", "9" * 30 + "-0"):
        refused = http.get(path, headers={**SSE, "last-event-id": wrong})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_request"), wrong


def test_silence_is_a_comment_and_an_error_is_an_event(
    server: FakeServer, http: httpx2.Client, demo: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.02)
    with http.stream("POST", "/v1/workspaces/demo/execs", headers=SSE, json={"shell": "hang"}) as response:
        lines = response.iter_lines()
        while not next(lines).startswith(": heartbeat"):
            pass
        demo.sleep()
        rest = list(lines)
    assert "event: error" in rest
    (data,) = [json.loads(line[6:]) for line in rest if line.startswith("data: ") and '"error"' in line]
    assert data["error"]["code"] == "stale_generation"


# ------------------------------------------------------------------------------------------------------------- WebSocket


@contextmanager
def attached(server: FakeServer, exec_id: str, query: str = "") -> Iterator[ClientConnection]:
    uri = f"ws://perdure/v1/workspaces/demo/execs/{exec_id}/ws{query}"
    with unix_connect(str(server.settings.api_socket), uri, legacy=True) as websocket:
        yield websocket


def until_exit(websocket: ClientConnection) -> tuple[dict[str, bytes], dict[str, Any]]:
    """(output by stream, the last event); each byte comes once, at its offset."""
    output = {"stdout": b"", "stderr": b""}
    while True:
        message = websocket.recv(timeout=60)
        if isinstance(message, bytes):
            stream, offset, data = public.unpack_output(message)
            assert offset == len(output[stream])
            output[stream] += data
        elif (event := json.loads(message))["type"] in {"exited", "error"}:
            return output, event


def test_output_stdin_and_the_end(server: FakeServer, demo: Workspace) -> None:
    """(peers: row 28) Bytes that are no text, cut anywhere, come out as they went in."""
    data = bytes(range(256)) * 3000
    exec_id = demo.commands.run("warn careful; cat", background=True, stdin=True).exec_id
    with attached(server, exec_id) as websocket:
        for start in range(0, len(data), 99_991):
            websocket.send(data[start : start + 99_991])
        websocket.send(json.dumps({"type": "eof"}))
        output, event = until_exit(websocket)
        assert (output["stdout"] == data, output["stderr"], event["outcome"]["exit_code"]) == (True, b"careful\n", 0)
        with pytest.raises(ConnectionClosedOK):
            websocket.recv(timeout=60)
        assert websocket.response is not None and websocket.response.headers[public.GENERATION_HEADER] == "1"
    with attached(server, exec_id, f"?stdout_offset={len(data) - 2}&stderr_offset=7") as websocket:
        messages = [websocket.recv(timeout=60) for _ in range(4)]
    assert {public.unpack_output(one) for one in messages if isinstance(one, bytes)} == {
        ("stdout", len(data) - 2, b"\xfe\xff"),
        ("stderr", 7, b"\n"),
    }


@pytest.mark.parametrize(
    ("told", "end"), [({"type": "signal", "signal": 15}, "signaled"), ({"type": "kill"}, "killed")], ids=["signal", "kill"]
)
def test_signal_and_kill_reach_a_command_that_does_not_read(
    server: FakeServer, demo: Workspace, told: dict[str, Any], end: str
) -> None:
    exec_id = demo.commands.run("hang", background=True, stdin=True).exec_id
    with attached(server, exec_id) as websocket:
        for _ in range(20):
            websocket.send(bytes(10_000))
        websocket.send(json.dumps(told))
        assert until_exit(websocket)[1]["outcome"]["end"] == end


def test_a_client_that_leaves_detaches_and_two_see_the_same(server: FakeServer, demo: Workspace) -> None:
    exec_id = demo.commands.run("cat", background=True, stdin=True).exec_id
    row = server.workspaces.find_row("demo")
    with attached(server, exec_id) as first:
        with attached(server, exec_id) as second:
            second.send(b"both")
            assert public.unpack_output(_output(first))[2] == public.unpack_output(_output(second))[2] == b"both"
        server.wait_for(lambda: server.workspaces.held[row.id] == 1)
        first.send(json.dumps({"type": "eof"}))
        assert until_exit_from(first, 4)["outcome"]["exit_code"] == 0
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)


def _output(websocket: ClientConnection) -> bytes:
    while not isinstance(message := websocket.recv(timeout=60), bytes):
        pass
    return message


def until_exit_from(websocket: ClientConnection, offset: int) -> dict[str, Any]:
    while isinstance(message := websocket.recv(timeout=60), bytes):
        assert public.unpack_output(message)[1] >= offset
    event: dict[str, Any] = json.loads(message)
    return event


@pytest.mark.parametrize(
    "message",
    [
        "",
        "eof",
        "[]",
        '{"type": "dance"}',
        '{"type": "signal"}',
        '{"type": "signal", "signal": 0}',
        '{"type": "resize", "rows": 1}',
        '{"type": "resize", "rows": 0, "cols": 1}',
        '{"type": "eof", "rows": 1, "cols": 1}',
        '{"type": "kill", "more": 1}',
        '{"type": "resize", "rows": 24, "cols": 80}',  # it has no terminal
    ],
)
def test_a_message_that_makes_no_sense_is_told_and_the_command_goes_on(server: FakeServer, demo: Workspace, message: str) -> None:
    exec_id = demo.commands.run("hang", background=True).exec_id
    with attached(server, exec_id) as websocket:
        websocket.send(message)
        _, event = until_exit(websocket)
        assert event["error"]["code"] in {"invalid_request", "conflict"}
        with pytest.raises(ConnectionClosed) as caught:
            websocket.recv(timeout=60)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1011
    assert demo.commands.get(exec_id).outcome is None


def test_typing_into_a_command_without_stdin_is_told(server: FakeServer, demo: Workspace) -> None:
    exec_id = demo.commands.run("hang", background=True).exec_id
    with attached(server, exec_id) as websocket:
        websocket.send(b"x")
        assert until_exit(websocket)[1]["error"]["code"] == "conflict"


def test_refusals_are_http_errors(server: FakeServer, demo: Workspace) -> None:
    exec_id = demo.commands.run("hang", background=True).exec_id
    base, headers = server.url.replace("http", "ws"), {"authorization": f"Bearer {KEY}"}
    cases = {
        f"demo/execs/{exec_id}/ws": (401, {}),
        "demo/execs/exe_none/ws": (404, headers),
        f"none/execs/{exec_id}/ws": (404, headers),
        f"demo/execs/{exec_id}/ws?stdout_offset=-1": (422, headers),
        f"demo/execs/{exec_id}/ws?stdout_offset=x": (422, headers),
        f"demo/execs/{exec_id}/ws?generation=7": (409, headers),
    }
    for path, (status, sent) in cases.items():
        with pytest.raises(InvalidStatus) as caught:
            connect(f"{base}/v1/workspaces/{path}", additional_headers=sent, legacy=True)
        assert caught.value.response.status_code == status, path
        assert b'"error"' in (caught.value.response.body or b"")
    assert server.workspaces.wakes["demo"] == 1


def test_it_wakes_holds_awake_and_ends_with_the_generation(server: FakeServer, demo: Workspace) -> None:
    exec_id = demo.commands.run("hang", background=True).exec_id
    demo.sleep()
    with attached(server, exec_id) as websocket:
        assert server.workspaces.wakes["demo"] == 2
        demo.sleep()
        assert until_exit(websocket)[1]["error"]["code"] == "stale_generation"


def test_a_server_that_stops_says_so_and_the_command_goes_on(server: FakeServer, demo: Workspace) -> None:
    exec_id = demo.commands.run("hang", background=True).exec_id
    with attached(server, exec_id) as websocket:
        assert json.loads(websocket.recv(timeout=60))["type"] == "started"
        server.stop()
        assert until_exit(websocket)[1]["error"]["code"] == "unavailable"
        with pytest.raises(ConnectionClosed):
            websocket.recv(timeout=60)
    server.start()
    assert demo.commands.get(exec_id).outcome is None
