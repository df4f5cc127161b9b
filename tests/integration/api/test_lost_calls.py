"""What a client says and does when the wire loses something, and that running out of patience ends nothing but the call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from perdure.core.errors import Busy, NotFound, PerdureError, error_classes
from perdure.sdk import (
    AsyncClient,
    AsyncWorkspace,
    CallTimedOut,
    Client,
    ConnectionLost,
    ForeignAnswer,
    StillRunning,
    Workspace,
    _core,
)
from perdure.wire import public
from tests.fakes.api_server import FakeServer
from tests.fakes.bad_wire import BadWire, Loss
from tests.fakes.workspaces import KEY


@pytest.fixture
def wire(server: FakeServer) -> Iterator[BadWire]:
    with BadWire(server.url) as made:
        yield made


@pytest.fixture
def far(wire: BadWire) -> Iterator[Client]:
    """A client whose calls go over the bad wire."""
    with Client(url=wire.url, api_key=KEY) as made:
        yield made


def flags(error: PerdureError) -> tuple[bool, bool, bool]:
    return error.retryable, error.ambiguous, error.gone


@pytest.mark.parametrize("loss", Loss)
def test_what_may_be_done_twice_is_repeated(demo: Workspace, far: Client, wire: BadWire, loss: Loss) -> None:
    ws = Workspace.connect("demo", wake=False, client=far)
    wire.losses = [loss] * _core.RETRIES
    assert ws.refresh().state == "running"
    assert wire.lost == _core.RETRIES
    wire.losses = [loss]
    ws.sleep()
    assert len(ws.snapshots()) == 1


def test_what_may_not_be_done_twice_is_told_as_ambiguous(demo: Workspace, far: Client, wire: BadWire) -> None:
    """(peers: row 30)"""
    ws = Workspace.connect("demo", client=far)
    wire.losses = [Loss.ANSWER]
    with pytest.raises(ConnectionLost) as caught:
        ws.checkpoint()
    assert flags(caught.value) == (False, True, False)
    assert "may have been done" in caught.value.hint
    assert len(demo.snapshots()) == 1, "it was done, once"


def test_an_answer_of_somebody_else_is_ambiguous_too(demo: Workspace, far: Client, wire: BadWire) -> None:
    """A proxy that says 502 may have passed the request on, or not."""
    ws = Workspace.connect("demo", client=far)
    wire.losses = [Loss.FOREIGN]
    with pytest.raises(ForeignAnswer) as caught:
        ws.checkpoint()
    assert flags(caught.value) == (False, True, False) and caught.value.hint
    assert "HTTP status 502" in caught.value.message and demo.snapshots() == []
    wire.losses = [Loss.FOREIGN] * (_core.RETRIES + 1)
    with pytest.raises(ForeignAnswer) as caught:
        ws.refresh()
    assert flags(caught.value) == (True, False, False)


@pytest.mark.parametrize("status", [200, 404, 500])
def test_something_else_at_the_servers_address(status: int) -> None:
    """Whatever it answers, what is raised is an error with its flags."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        with Client(url=f"http://127.0.0.1:{web.server_port}", api_key=KEY) as client, pytest.raises(PerdureError) as caught:
            client.health()
    finally:
        web.shutdown()
        thread.join()
        web.server_close()
    assert flags(caught.value) == (status != 404, False, False)
    assert isinstance(caught.value, ForeignAnswer) is (status != 404)


def test_a_request_that_was_cut_was_not_done_and_is_sent_again(far: Client, wire: BadWire, server: FakeServer) -> None:
    """Nothing acts on a part of a request: the client knows that it had not left whole."""
    wire.losses = [Loss.REQUEST]
    call = _core.Call("POST", "/v1/images", body={"recipe": "[image]\n" + "#" * 900_000, "name": "x" * 3_000_000})
    with pytest.raises(PerdureError) as caught:
        far.request(call)
    assert (wire.lost, caught.value.code) == (1, "invalid_request"), "it came whole at the second time, and was judged"


def test_when_all_attempts_are_lost_the_error_says_what_is_left_to_do(demo: Workspace, far: Client, wire: BadWire) -> None:
    ws = Workspace.connect("demo", client=far)
    wire.losses = [Loss.ANSWER] * (_core.RETRIES + 1)
    with pytest.raises(ConnectionLost) as caught:
        ws.refresh()
    assert flags(caught.value) == (True, False, False)
    assert "nothing twice" in caught.value.hint
    wire.losses = [Loss.ANSWER] * (_core.RETRIES + 1)
    with pytest.raises(ConnectionLost) as caught:
        Workspace.create("other", client=far)
    assert flags(caught.value) == (False, True, False), "another create is another request"
    assert Workspace.connect("other", client=far).info.state == "running", "and so it was: it had been done"


def test_a_command_whose_start_is_lost_runs_once(demo: Workspace, far: Client, wire: BadWire, server: FakeServer) -> None:
    """(peers: rows 26 and 30)"""
    ws = Workspace.connect("demo", client=far)
    wire.losses = [Loss.ANSWER, Loss.REQUEST]
    assert ws.commands.run("echo once").stdout == "once\n"
    assert wire.lost == 2
    wire.losses = [Loss.ANSWER]
    ws.commands.run("hang", background=True).kill()
    assert len(server.workspaces.world("demo").commands) == 2


def test_a_command_that_may_have_started_is_ambiguous_in_the_end(
    demo: Workspace, far: Client, wire: BadWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "RECONNECTS", 2)
    ws = Workspace.connect("demo", client=far)
    wire.losses = [Loss.ANSWER] * 3
    with pytest.raises(ConnectionLost) as caught:
        ws.commands.run("echo once")
    assert flags(caught.value) == (False, True, False)


def test_repetitions_stay_within_the_callers_patience(
    demo: Workspace, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def busy(*_: object) -> None:
        asked.append(1)
        raise Busy("The queue is full.")

    monkeypatch.setattr(server.workspaces, "get", busy)
    with Client(settings=server.settings, timeout_s=0.25) as client, pytest.raises(Busy):
        Workspace.connect("demo", wake=False, client=client)
    assert len(asked) <= 2, "the third would come after 0.3 seconds"
    with Client(settings=server.settings) as client, pytest.raises(Busy):
        Workspace.connect("demo", wake=False, client=client)
    assert len(asked) >= 1 + 1 + _core.RETRIES, "who has no deadline tries longer"


Act = Callable[[Workspace], object]
OUTLAST: list[tuple[str, Act, bool]] = [
    ("wake", lambda ws: ws.wake(), False),
    ("wake", lambda ws: Workspace.connect(ws.name, client=ws.client), False),
    ("sleep", lambda ws: ws.sleep(), False),
    ("get", lambda ws: ws.refresh(), False),
    ("checkpoint", lambda ws: ws.checkpoint(), True),
    ("fork", lambda ws: ws.fork(), True),
]


@pytest.mark.parametrize(("name", "act", "ambiguous"), OUTLAST, ids=["wake", "connect", "sleep", "refresh", "checkpoint", "fork"])
def test_who_stops_waiting_stops_nothing(
    demo: Workspace, server: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str, act: Act, ambiguous: bool
) -> None:
    """(peers: rows 5, 6 and 26: a client's timeout is the client's)"""
    original, proceed, done = getattr(server.workspaces, name), asyncio.Event(), []

    async def slow(*args: object, **more: object) -> object:
        await proceed.wait()
        result = await original(*args, **more)
        done.append(name)
        return result

    monkeypatch.setattr(server.workspaces, name, slow)
    with Client(settings=server.settings, timeout_s=0.2) as client:
        ws = Workspace(demo.info, client)
        with pytest.raises(CallTimedOut) as caught:
            act(ws)
    assert flags(caught.value) == (not ambiguous, ambiguous, False)
    assert "goes on" in caught.value.message

    async def go() -> None:
        proceed.set()

    server.run(go)
    server.wait_for(lambda: done == [name])
    assert any(row.name == "demo" for row in server.workspaces.rows.values())


def test_who_stops_waiting_for_a_command_finds_it_again(server: FakeServer, demo: Workspace) -> None:
    """(peers: row 26)"""
    with Client(settings=server.settings, timeout_s=0.2) as client:
        ws = Workspace.connect("demo", client=client)
        with pytest.raises(StillRunning) as caught:
            ws.commands.run("echo begun; hang", timeout=0.3)
        assert not caught.value.ambiguous
        handle = ws.commands.attach(caught.value.exec_id)
        assert next(iter(handle)).text == "begun\n"
        handle.kill()
        assert handle.wait().end == "killed", "it lived until then"


async def test_an_async_call_that_is_cancelled_ends_no_command(server: FakeServer, demo: Workspace) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.connect("demo", client=client)
        handle = await ws.commands.run("hang", background=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await handle.wait()
        assert (await ws.commands.get(handle.exec_id)).outcome is None
        await handle.kill()
        assert (await handle.wait()).end == "killed"


def test_an_error_names_its_request(client: Client) -> None:
    with pytest.raises(NotFound) as caught:
        Workspace.connect("nobody", client=client)
    assert caught.value.request_id.startswith("req_")
    assert caught.value.public()["request_id"] == caught.value.request_id
    assert "request_id" not in NotFound("x").public()


@pytest.mark.parametrize("kind", error_classes().values(), ids=lambda kind: kind.code)
def test_every_error_says_what_a_retry_loop_must_know(kind: type[PerdureError]) -> None:
    """(peers §4a: typed errors that say retryable, ambiguous, gone)"""
    error = kind("What happened.")
    assert error.code and isinstance(error.status, int)
    assert {type(value) for value in flags(error)} == {bool}
    assert not (error.retryable and (error.ambiguous or error.gone)), "it cannot be both"
    told = public.ErrorInfo.model_validate(error.public())
    assert (told.code, told.retryable, told.ambiguous, told.gone) == (error.code, *flags(error))
    assert (error.hint, error.request_id) == (error.default_hint, "")
