"""Invocations over real HTTP: from a client through the server to a real program at the far end, which may be a bad one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.server import Server, ServerConnection, serve

from perdure.core.errors import (
    InvalidRequest,
    PerdureError,
    PortClosed,
    PortMalformed,
    PortSilent,
    ProgramFailing,
    ProgramMissing,
    ProgramNotReady,
    ProgramSilent,
)
from perdure.sdk import AsyncClient, AsyncWorkspace, CallTimedOut, Client, ConnectionLost, Workspace
from perdure.wire import public
from tests.fakes.api_server import DEADLINE_S, FakeServer
from tests.fakes.contract_program import ContractProgram
from tests.fakes.workspaces import KEY
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]

HANG = ["/bin/sh", "-c", "echo begun; hang"]


@pytest.fixture
def program(server: FakeServer, demo: Workspace) -> Iterator[ContractProgram]:
    """The program of the workspace demo."""
    with ContractProgram() as made:
        server.workspaces.world("demo").ports.add(made.port)
        demo.program.set(HANG, port=made.port)
        yield made


def http(server: FakeServer) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=DEADLINE_S)


# ----------------------------------------------------------------------------------------------------------- what passes


def test_an_answer_while_asleep(demo: Workspace, server: FakeServer, program: ContractProgram) -> None:
    demo.sleep()
    result = demo.invoke({"question": "é"})
    assert (result.status, result.ok, result.content_type) == (200, True, "application/json")
    assert result.json()["payload"] == {"question": "é"} and result.json()["path"] == "/invocations"
    assert demo.report is not None and demo.report.memory == "kept", "a wake is never silent"
    row = server.workspaces.find_row("demo")
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)


def test_the_contracts_headers_pass_and_no_others(demo: Workspace, server: FakeServer, program: ContractProgram) -> None:
    sent = {
        "X-Amzn-Bedrock-AgentCore-Runtime-Custom-Colour": "red",
        "X-Amzn-Bedrock-AgentCore-Runtime-User-Id": "forged",
        "traceparent": "00-1-2-01",
        "cookie": "session=mine",
        "x-forwarded-for": "10.0.0.1",
        "te": "trailers",
        "content-type": "application/json; charset=utf-8",
        "accept": "application/json",
    }
    with http(server) as client:
        response = client.post("/v1/workspaces/demo/invocations", content=b'{"a": 1}', headers=sent)
    told = response.json()["headers"]
    workspace_id = server.workspaces.find_row("demo").id
    assert told.pop("host").startswith("localhost")
    assert told.pop("x-amzn-bedrock-agentcore-runtime-request-id") == response.headers[public.REQUEST_ID_HEADER]
    assert told == {
        "content-type": "application/json; charset=utf-8",
        "accept": "application/json",
        "content-length": "8",
        "connection": "close",
        "traceparent": "00-1-2-01",
        "x-amzn-bedrock-agentcore-runtime-custom-colour": "red",
        "x-amzn-bedrock-agentcore-runtime-session-id": workspace_id,
    }
    assert "set-cookie" not in response.headers and "x-secret" not in response.headers
    assert response.headers["content-security-policy"] == "sandbox" and response.headers["x-content-type-options"] == "nosniff"
    assert response.headers[public.ANSWERED_BY_HEADER] == "program" and response.headers["cache-control"] == "no-store"
    assert response.headers.get_list("content-type") == ["application/json"]


def test_sdk_options_reach_the_program(demo: Workspace, program: ContractProgram) -> None:
    told = demo.invoke(None, session_id="s-1", headers={"Colour": "red"}, accept="text/plain").json()
    assert told["payload"] is None and told["headers"]["accept"] == "text/plain"
    assert told["headers"]["x-amzn-bedrock-agentcore-runtime-session-id"] == "s-1"
    assert told["headers"]["x-amzn-bedrock-agentcore-runtime-custom-colour"] == "red"
    with pytest.raises(InvalidRequest, match="has no option 'colour'"):
        demo.invoke({}, colour="red")  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        demo.invoke({1, 2})


def test_an_error_of_the_programs_own_is_a_result(demo: Workspace, program: ContractProgram) -> None:
    for status in (400, 404, 500, 503):
        result = demo.invoke({"do": "fail", "status": status})
        assert (result.status, result.ok, result.json()) == (status, False, {"error": "its own"})


def test_large_bodies_pass_as_they_come(demo: Workspace, server: FakeServer, program: ContractProgram) -> None:
    """More than the API takes of its own bodies."""
    size = 20_000_000
    assert demo.invoke(b"x" * size).json() == {"bytes": size}


def test_events_arrive_one_by_one_as_they_are_sent(demo: Workspace, program: ContractProgram) -> None:
    numbers = []
    call = demo.invoke({"do": "stream"}, stream=True)
    for event in call:
        numbers.append((event.id, event.event, event.json()["number"]))
        program.steps.release()  # the program sends the next one only when this has arrived
    assert numbers == [("0", "step", 0), ("1", "step", 1), ("2", "step", 2)]
    assert (call.status, call.content_type) == (200, "text/event-stream")


async def test_async_events_and_many_at_once(server: FakeServer, program: ContractProgram) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.connect("demo", client=client)
        results = await asyncio.gather(*(ws.invoke({"n": n}) for n in range(20)))
        assert [one.json()["payload"]["n"] for one in results] == [*range(20)]
        call = await ws.invoke({"do": "stream"}, stream=True)
        seen = []
        async for event in call:
            seen.append(event.json()["number"])
            program.steps.release()
        assert seen == [0, 1, 2]
        assert [event.data async for event in await ws.invoke({"do": "fail", "status": 400}, stream=True)] == [
            '{"error": "its own"}'
        ]


def test_fifty_invocations_of_a_sleeping_workspace_cause_one_wake(
    demo: Workspace, server: FakeServer, program: ContractProgram
) -> None:
    """(peers: row 15, row 16)"""
    demo.sleep()
    before = server.workspaces.wakes["demo"]

    async def all_of_them() -> list[Any]:
        async with AsyncClient(settings=server.settings) as client:
            ws = await AsyncWorkspace.connect("demo", wake=False, client=client)
            return [one.json() for one in await asyncio.gather(*(ws.invoke({"n": n}) for n in range(50)))]

    answers = asyncio.run(all_of_them())
    assert sorted(one["payload"]["n"] for one in answers) == [*range(50)]
    assert server.workspaces.wakes["demo"] == before + 1


def test_an_answer_waits_for_its_reader(demo: Workspace, server: FakeServer, program: ContractProgram) -> None:
    """What nobody reads is not collected anywhere: the program is held up, and let go when its caller leaves."""
    with Client(settings=server.settings) as client, client.stream(_call({"do": "flood"}), silence_s=None) as response:
        pieces = response.iter_raw()
        next(pieces)
        seen = -1
        never = threading.Event()
        while seen != program.sent:  # until it is stuck
            seen = program.sent
            never.wait(0.3)
        assert program.sent < 64 << 20
    assert program.left.wait(DEADLINE_S)
    server.wait_for(lambda: server.workspaces.held[server.workspaces.find_row("demo").id] == 0)


def _call(payload: object) -> Any:
    from perdure.sdk._invoke import invocation

    return invocation("demo", payload, {})


# ------------------------------------------------------------------------------------------------------- what goes wrong


def test_without_a_program_the_reason_is_told_at_once(demo: Workspace) -> None:
    with pytest.raises(ProgramMissing, match="no program to invoke") as caught:
        demo.invoke({})
    assert caught.value.details == {"reason": "no-program"}
    assert (caught.value.retryable, caught.value.ambiguous) == (False, False) and "perdure program set" in caught.value.hint


def test_a_crashed_program_is_told_with_its_last_lines(demo: Workspace, server: FakeServer) -> None:
    demo.program.set(["/bin/sh", "-c", "echo loading; warn no such module; exit 3"])
    with pytest.raises(ProgramFailing, match="failed 3 times in a row, the last time with exit code 3") as caught:
        demo.invoke({})
    assert caught.value.details["reason"] == "crashed"
    assert caught.value.details["log"].endswith("loading\nno such module")
    with http(server) as client:
        response = client.post("/v1/workspaces/demo/invocations", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (502, "program_failing")
    assert public.ANSWERED_BY_HEADER not in response.headers


@pytest.mark.parametrize(("restart", "reason"), [("never", "ended"), ("always", "stopped")])
def test_a_program_that_is_over_is_told_at_once(demo: Workspace, restart: str, reason: str) -> None:
    demo.program.set(["/bin/sh", "-c", "exit 0" if restart == "never" else "hang"], restart=restart)
    if reason == "stopped":
        demo.program.stop()
    with pytest.raises(ProgramFailing) as caught:
        demo.invoke({})
    assert caught.value.details["reason"] == reason


@pytest.fixture
def impatient(server: FakeServer) -> Iterator[None]:
    """A server that waits for a program and its answers for a moment only."""
    settings = server.services.settings
    before = settings.program_deadline_s, settings.invoke_limit_s
    for name, value in (("program_deadline_s", 0.3), ("invoke_limit_s", 0.3)):
        object.__setattr__(settings, name, value)
    yield
    for name, value in zip(("program_deadline_s", "invoke_limit_s"), before, strict=True):
        object.__setattr__(settings, name, value)


def test_a_program_that_does_not_listen_or_answer_is_told_apart(
    demo: Workspace, server: FakeServer, program: ContractProgram, impatient: None
) -> None:
    world = server.workspaces.world("demo")
    world.ports.clear()
    with pytest.raises(ProgramNotReady, match=f"did not listen on port {program.port}") as caught:
        demo.invoke({})
    assert caught.value.details == {"reason": "not-listening", "log": "begun"} and caught.value.retryable
    world.ports.add(program.port)
    for ping in (b'{"status": "Odd"}', b"pong", None):
        program.ping = ping
        with pytest.raises(ProgramSilent, match="did not answer GET /ping") as silent:
            demo.invoke({})
        assert silent.value.details["reason"] == "no-answer"
    with http(server) as client:
        assert client.post("/v1/workspaces/demo/invocations", json={}).status_code == 504


def test_an_invocation_waits_for_a_program_that_begins_to_listen(
    demo: Workspace, server: FakeServer, program: ContractProgram
) -> None:
    world = server.workspaces.world("demo")
    world.ports.clear()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(demo.invoke({"n": 1}).json()["payload"]), daemon=True)
    thread.start()
    row = server.workspaces.find_row("demo")
    server.wait_for(lambda: server.workspaces.held.get(row.id, 0) == 1)
    world.ports.add(program.port)
    thread.join(DEADLINE_S)
    assert results == [{"n": 1}]


@pytest.mark.parametrize(
    ("do", "kind", "status"), [("leave", PortClosed, 502), ("garbage", PortMalformed, 502), ("hang", PortSilent, 504)]
)
def test_what_a_program_does_wrong_is_ambiguous_and_not_repeated(
    demo: Workspace, server: FakeServer, program: ContractProgram, impatient: None, do: str, kind: type[Exception], status: int
) -> None:
    with http(server) as client:
        response = client.post("/v1/workspaces/demo/invocations", json={"do": do})
    error = response.json()["error"]
    assert (response.status_code, error["ambiguous"], error["retryable"]) == (status, True, False)
    with pytest.raises(kind):
        demo.invoke({"do": do})


def test_an_answer_that_is_cut_is_seen_to_be_cut(demo: Workspace, program: ContractProgram) -> None:
    with pytest.raises(ConnectionLost) as caught:
        demo.invoke({"do": "cut"})
    assert caught.value.ambiguous and not caught.value.retryable


def test_who_leaves_ends_the_connection_to_the_program(demo: Workspace, server: FakeServer, program: ContractProgram) -> None:
    with pytest.raises(CallTimedOut) as caught:
        demo.invoke({"do": "hang"}, timeout_s=0.2)
    assert caught.value.ambiguous
    assert program.left.wait(DEADLINE_S)
    row = server.workspaces.find_row("demo")
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)


def test_who_leaves_a_stream_ends_it(demo: Workspace, server: FakeServer, program: ContractProgram) -> None:
    for _ in demo.invoke({"do": "stream"}, stream=True):
        break
    row = server.workspaces.find_row("demo")
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)


def test_who_leaves_in_the_middle_of_his_body_leaves_nothing(server: FakeServer, program: ContractProgram) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        raw.sendall(
            b"POST /v1/workspaces/demo/invocations HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
            + f"authorization: Bearer {KEY}\r\n".encode()
            + b"content-length: 1000000\r\n\r\n"
            + b"x" * 100_000
        )
        row = server.workspaces.find_row("demo")
        server.wait_for(lambda: server.workspaces.held.get(row.id, 0) == 1)
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)
    server.wait_for(lambda: program.cut_after is not None)


def test_a_workspace_is_held_awake_while_an_invocation_is_open(
    demo: Workspace, server: FakeServer, program: ContractProgram
) -> None:
    """(peers: row 12, row 13)"""
    failures: list[PerdureError] = []

    def ask() -> None:
        try:
            demo.invoke({"do": "hang"})
        except PerdureError as error:
            failures.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert program.asked.wait(DEADLINE_S)
    row = server.workspaces.find_row("demo")
    assert server.workspaces.held[row.id] == 1
    server.stop()  # the server ends what is open, and says so
    thread.join(DEADLINE_S)
    assert program.left.wait(DEADLINE_S)
    assert [error.ambiguous for error in failures] == [True]
    server.start()


# ------------------------------------------------------------------------------------------------------------- WebSocket


@pytest.fixture
def chat(server: FakeServer, demo: Workspace) -> Iterator[Server]:
    """A program with a WebSocket at ``/ws``: echoes, closes on request, refuses who asks for it."""

    def answer(connection: ServerConnection, request: Any) -> Any:
        if request.path == "/ping":
            return connection.respond(200, json.dumps({"status": "Healthy"}))
        if request.headers.get("x-amzn-bedrock-agentcore-runtime-custom-refuse"):
            return connection.respond(403, "not you\n")
        return None

    def echo(connection: ServerConnection) -> None:
        assert connection.request is not None
        connection.send(json.dumps(dict(connection.request.headers.raw_items())).lower())
        for message in connection:
            if message == "bye":
                connection.close(4001, "enough")
                return
            connection.send(message)

    with serve(echo, "127.0.0.1", 0, process_request=answer) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        port = made.socket.getsockname()[1]
        server.workspaces.world("demo").ports.add(port)
        demo.program.set(HANG, port=port)
        yield made
        made.shutdown()
        thread.join()


def _url(server: FakeServer) -> str:
    return server.url.replace("http", "ws") + "/v1/workspaces/demo/invocations/ws"


_AUTHORIZED = {"authorization": f"Bearer {KEY}"}


async def test_a_websocket_passes_text_and_bytes_and_holds_it_awake(server: FakeServer, demo: Workspace, chat: Server) -> None:
    demo.sleep()
    row = server.workspaces.find_row("demo")
    async with connect(_url(server), additional_headers=_AUTHORIZED) as socket:
        told = json.loads(await socket.recv())
        assert "authorization" not in told and told["x-amzn-bedrock-agentcore-runtime-session-id"] == row.id.lower()
        for message in ("é", b"\x00\xff", "x" * 200_000):
            await socket.send(message)
            assert await socket.recv() == message
        assert server.workspaces.held[row.id] == 1
        await socket.send("bye")
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (4001, "enough")
    await asyncio.to_thread(server.wait_for, lambda: server.workspaces.held[row.id] == 0)


async def test_a_websocket_that_its_client_leaves_is_closed_at_the_program(
    server: FakeServer, demo: Workspace, chat: Server
) -> None:
    row = server.workspaces.find_row("demo")
    async with connect(_url(server), additional_headers=_AUTHORIZED) as socket:
        await socket.recv()
    await asyncio.to_thread(server.wait_for, lambda: server.workspaces.held[row.id] == 0)


async def test_refused_websockets_are_http_errors(server: FakeServer, demo: Workspace, chat: Server) -> None:
    async def refused(**more: str) -> tuple[int, bytes]:
        headers = {**_AUTHORIZED, **{f"x-amzn-bedrock-agentcore-runtime-custom-{name}": value for name, value in more.items()}}
        with pytest.raises(InvalidStatus) as caught:
            async with connect(_url(server), additional_headers=headers):
                pass
        return caught.value.response.status_code, caught.value.response.body or b""

    assert await refused(refuse="1") == (403, b"not you\n")
    await asyncio.to_thread(demo.program.stop)
    server.workspaces.world("demo").ports.clear()
    status, body = await refused()
    assert status == 502 and json.loads(body)["error"]["details"]["reason"] == "stopped"


# ---------------------------------------------------------------------------------------------------------- command line


def test_the_command(perdure: Run, demo: Workspace, program: ContractProgram, tmp_path: Any) -> None:
    demo.sleep()
    answer = perdure("invoke demo --json --header Colour=red --session-id s-2 --payload", '{"a": 1}')
    assert answer.code == 0 and answer.json["status"] == 200 and answer.json["content_type"] == "application/json"
    assert answer.json["body"]["payload"] == {"a": 1}
    assert answer.json["body"]["headers"]["x-amzn-bedrock-agentcore-runtime-custom-colour"] == "red"
    (tmp_path / "payload").write_text('{"from": "file"}')
    assert json.loads(perdure("invoke demo --payload", f"@{tmp_path}/payload").out)["payload"] == {"from": "file"}
    failed = perdure("invoke demo --payload", '{"do": "fail", "status": 500}')
    assert (failed.code, failed.out) == (2, '{"error": "its own"}\n') and "HTTP status 500" in failed.err
    for _ in range(3):
        program.steps.release()
    streamed = perdure("invoke demo --stream --json --payload", '{"do": "stream"}').out.splitlines()
    assert [json.loads(line)["data"] for line in streamed] == ['{"number": 0}', '{"number": 1}', '{"number": 2}']


def test_mistakes_on_the_command_line_wake_nothing(perdure: Run, demo: Workspace, server: FakeServer) -> None:
    demo.sleep()
    wakes = server.workspaces.wakes["demo"]
    for words in (("--payload", "{"), ("--payload", "@/no/such/file"), ("--header", "x", "--payload", "1")):
        answer = perdure("invoke demo --json", *words)
        assert answer.code == 1 and answer.error["code"] == "invalid_request" and answer.error["hint"], words
    assert server.workspaces.wakes["demo"] == wakes
    assert perdure("invoke demo --json").error["details"] == {"reason": "no-program"}
