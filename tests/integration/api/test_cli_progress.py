"""Long work shows on a terminal that it goes on, and leaves nothing of that behind."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import replace

import pytest

from perdure.sdk import Client, Workspace
from perdure.wire.node import Fetching
from perdure.workspaces.model import Upload, UploadState
from tests.fakes.api_server import FakeServer
from tests.integration.api.terminal import terminal
from tests.integration.api.test_cli import PROGRAM, environment


def let_go(server: FakeServer, event: asyncio.Event) -> None:
    async def work() -> None:
        event.set()

    server.run(work)


def test_a_create_that_takes_its_time(server: FakeServer) -> None:
    held = server.workspaces.hold = asyncio.Event()
    with terminal(server, "create", "slow", "--memory-mib", "1024") as screen:
        screen.until(b"Booting base with 1024 MiB and 1 CPU once")
        let_go(server, held)
        assert screen.end() == 0
        assert b"slow" in screen.shown.rpartition(b"half a minute")[2], "the result comes behind the bar"


def test_a_wake_that_fetches(server: FakeServer, client: Client) -> None:
    Workspace.create("demo", client=client).sleep()
    held = server.workspaces.hold = asyncio.Event()
    row = server.workspaces.find_row("demo")
    server.workspaces._put(row, fetching=Fetching(3_000_000, 10_000_000))
    with terminal(server, "wake", "demo") as screen:
        screen.until(b"Fetching demo from the object store: 3.0 MB of at most 10.0 MB")
        let_go(server, held)
        assert screen.end() == 0
        assert b"is awake" in screen.shown


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (("snapshot", "push", "demo"), b"is in the object store"),
        (("sleep", "demo", "--durable", "store"), b"and in the object store"),
        (("checkpoint", "demo", "--durable", "store"), b"written"),
    ],
    ids=["push", "sleep", "checkpoint"],
)
def test_an_upload(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], result: bytes
) -> None:
    ws = Workspace.create("demo", client=client)
    ws.checkpoint()
    server.workspaces.has_store = True
    push, held = server.workspaces.push_snapshot, asyncio.Event()
    upload = Upload(UploadState.UPLOADING, read_bytes=500, sent_bytes=3_000_000, total_bytes=1000)

    async def slow(*args: object, **more: object) -> object:
        history = server.workspaces.history[server.workspaces.find_row("demo").id]
        history[:] = [replace(one, upload=upload) for one in history]
        await held.wait()
        return await push(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(server.workspaces, "push_snapshot", slow)
    with terminal(server, *words) as screen:
        screen.until(b"Uploading, 3.0 MB sent")
        let_go(server, held)
        assert screen.end() == 0
        assert result in screen.shown.rpartition(b"sent")[2]


@pytest.mark.parametrize("words", [("snapshot", "verify", "demo"), ("backup", "/tmp/backup-of-demo")], ids=["verify", "backup"])
def test_streams_of_events(server: FakeServer, client: Client, words: tuple[str, ...]) -> None:
    Workspace.create("demo", client=client).checkpoint()
    with terminal(server, *words) as screen:
        assert screen.end() == 0
        assert screen.shown.rstrip().endswith(b"\x1b[?25h") or b"\x1b[?25h" in screen.shown, "the cursor is there again"


@pytest.mark.parametrize("words", [("create", "slow"), ("create", "slow", "--json")], ids=["text", "json"])
def test_without_a_terminal_nothing_moves(server: FakeServer, words: tuple[str, ...]) -> None:
    held = server.workspaces.hold = asyncio.Event()
    with subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(server)) as process:
        server.wait_for(lambda: bool(server.workspaces.rows))
        let_go(server, held)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert b"\x1b" not in out
