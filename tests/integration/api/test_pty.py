"""Terminals through the API and the SDK: several clients, connections that break, sleep, a server that is started again."""

from __future__ import annotations

import asyncio
import threading

import pytest

from perdure.core.errors import Conflict, InvalidRequest, NotFound, StaleGeneration
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, ConnectionLost, Pty, Workspace
from tests.fakes.api_server import FakeServer


def until(pty: Pty, wanted: bytes) -> bytes:
    """What it shows up to that, which it must show."""
    shown = b""
    for data in pty:
        shown += data
        if wanted in shown:
            return shown
    raise AssertionError((wanted, shown))


def test_a_shell(demo: Workspace) -> None:
    with demo.pty.create(30, 100) as pty:
        pty.send("size\r")
        assert until(pty, b"30 100").startswith(b"$ size\r\n30 100")
        pty.resize(50, 120)
        pty.send(b"size\r")
        until(pty, b"50 120")
        (listed,) = demo.pty.list()
        assert listed.pty is not None
        assert (listed.exec_id, listed.pty.rows, listed.pty.cols, listed.command) == (pty.exec_id, 50, 120, "(shell)")
        pty.send("exit 4\r")
        assert (pty.wait().exit_code, pty.outcome) == (4, pty.outcome)
    assert [info.exec_id for info in demo.commands.list()] == [pty.exec_id], "it is one of the commands"


def test_a_command_instead_of_a_shell(demo: Workspace) -> None:
    shown: list[bytes] = []
    pty = demo.pty.create(5, 7, cmd=["size"], envs={"A": "1"})
    assert pty.wait(on_data=shown.append).exit_code == 0
    assert b"".join(shown) == b"5 7\r\n"


def test_who_comes_later_sees_what_was_shown_first(server: FakeServer, demo: Workspace) -> None:
    first = demo.pty.create()
    first.send("echo early\r")
    until(first, b"\r\nearly\r\n")
    with Client(settings=server.settings) as client:
        second = Workspace.connect("demo", client=client).pty.connect(first.exec_id)
        assert b"early" in until(second, b"\r\nearly\r\n")
        second.send("echo late\r")
        until(second, b"\r\nlate\r\n")
        until(first, b"\r\nlate\r\n")
        third = Workspace.connect("demo", client=client).pty.connect(first.exec_id, offset=len("$ echo "))
        assert until(third, b"early").startswith(b"early")
        for pty in (third, second):
            pty.detach()
    first.kill()
    assert first.wait().end == "killed"


def test_leaving_does_not_end_it_and_iterating_ends_when_another_thread_leaves(demo: Workspace) -> None:
    pty = demo.pty.create()
    until(pty, b"$ ")
    timer = threading.Timer(0.1, pty.detach)
    timer.start()
    assert list(pty) == []
    timer.join()
    with pytest.raises(ConnectionLost):
        pty.send("x")
    with pytest.raises(ConnectionLost, match="it goes on"):
        pty.wait()
    assert demo.commands.get(pty.exec_id).outcome is None


def test_a_server_that_is_started_again_costs_nothing_that_was_shown(server: FakeServer, demo: Workspace) -> None:
    pty = demo.pty.create()
    until(pty, b"$ ")
    server.stop()
    with pytest.raises(ConnectionLost):
        for _ in range(1000):
            pty.send("lost")
    server.start()
    command = server.workspaces.world("demo").commands[pty.exec_id]

    async def type_there() -> None:
        command.stdin.put_nowait(b"echo back\r")

    server.run(type_there)
    assert until(pty, b"\r\nback\r\n$ ").endswith(b"echo back\r\nback\r\n$ ")
    pty.send("exit\r")
    assert pty.wait().exit_code == 0


def test_it_survives_sleep_and_is_not_woken_by_a_client_that_was_attached(server: FakeServer, demo: Workspace) -> None:
    pty = demo.pty.create()
    pty.send("echo before\r")
    until(pty, b"\r\nbefore\r\n")
    demo.sleep()
    with pytest.raises(StaleGeneration):
        list(pty)
    assert server.workspaces.wakes["demo"] == 1
    again = demo.pty.connect(pty.exec_id)
    until(again, b"\r\nbefore\r\n")
    again.send("exit 6\r")
    assert again.wait().exit_code == 6


def test_a_key_makes_one_terminal(demo: Workspace) -> None:
    first = demo.pty.create(idempotency_key="the shell")
    assert demo.pty.create(idempotency_key="the shell").exec_id == first.exec_id


def test_mistakes(demo: Workspace) -> None:
    for rows, cols in ((0, 80), (24, 0), (24, 5000)):
        with pytest.raises(InvalidRequest):
            demo.pty.create(rows, cols)
    pty = demo.pty.create()
    with pytest.raises(InvalidRequest):
        pty.resize(0, 1)
    with pytest.raises(InvalidRequest):
        pty.send_signal(0)
    with pytest.raises(NotFound):
        demo.pty.connect("exe_none")
    plain = demo.commands.run("hang", background=True)
    with pytest.raises(Conflict, match="has no terminal"):
        demo.pty.resize(plain.exec_id, 24, 80)
    with pytest.raises(InvalidRequest):
        demo.commands.run([])


async def test_async_surface(server: FakeServer) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.create("demo", client=client)
        async with await ws.pty.create(30, 100) as pty:
            shown = b""

            async def watch() -> None:
                nonlocal shown
                async for data in pty:
                    shown += data

            watching = asyncio.create_task(watch())
            await pty.resize(31, 100)
            await pty.send_signal(28)
            await pty.send("size\r")
            await pty.send("exit 2\r")
            await watching
            assert pty.outcome is not None
            assert (pty.outcome.exit_code, b"31 100" in shown, pty.lost) == (2, True, 0)
