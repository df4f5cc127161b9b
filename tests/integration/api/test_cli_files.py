"""``perdure cp`` of what is large, and ``perdure watch``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from perdure.sdk import Client, Workspace, _transfers
from perdure.wire.node import FileKind
from tests.fakes.api_server import FakeServer
from tests.fakes.memory_guest import Node
from tests.integration.api.test_cli import PROGRAM, Run, environment, perdure

__all__ = ["perdure"]


@pytest.fixture
def demo(client: Client) -> Workspace:
    return Workspace.create("demo", client=client)


def test_cp_keeps_a_tree_as_it_is(perdure: Run, demo: Workspace, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "run").write_text("x")
    (source / "run").chmod(0o700)
    (source / "link").symlink_to("run")
    os.utime(source / "run", ns=(0, 1_234_567_890_987_654_321))
    there = perdure(f"cp --json {source} demo:/root/tree")
    assert {name: there.json[name] for name in ("files", "directories", "links", "bytes")} == {
        "files": 1,
        "directories": 2,
        "links": 1,
        "bytes": 1,
    }
    assert perdure(f"cp demo:/root/tree {tmp_path}/back").code == 0
    known = (tmp_path / "back/run").stat()
    assert (known.st_mode & 0o777, known.st_mtime_ns) == (0o700, 1_234_567_890_987_654_321)
    assert str((tmp_path / "back/link").readlink()) == "run"
    assert (tmp_path / "back/empty").is_dir()


def test_cp_goes_on_when_it_is_run_again(
    perdure: Run, demo: Workspace, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transfers, "RESUMED_BYTES", 1000)
    data = os.urandom(3_000_000)
    server.workspaces.world("demo").put("/root/f", Node(FileKind.FILE, bytearray(data)))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_transfers.Incoming, "took", interrupted)
        assert perdure(f"cp demo:/root/f {tmp_path}/f").code == 130
    assert [path.name.startswith(".perdure-part-") for path in tmp_path.iterdir()] == [True]
    assert perdure(f"cp demo:/root/f {tmp_path}/f").out == "1 file copied, 3.0 MB\n"
    assert (tmp_path / "f").read_bytes() == data
    assert perdure(f"cp {tmp_path}/f demo:/root/g").out == "1 file copied, 3.0 MB\n"
    assert bytes(server.workspaces.world("demo").files["/root/g"].content) == data


def test_cp_shows_how_far_it_is_on_a_terminal_only(
    perdure: Run, demo: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"x" * 5_000_000)
    assert perdure(f"cp {tmp_path}/f demo:/root/f").err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = perdure(f"cp {tmp_path}/f demo:/root/f").err
    assert "5.0/5.0 MB" in shown
    assert perdure(f"cp --json demo:/root/f {tmp_path}/g").err == ""


def watching(server: FakeServer, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["env", "--default-signal=INT", *PROGRAM, "watch", "demo", *words],
        env=environment(server),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_watch(demo: Workspace, server: FakeServer) -> None:
    world = server.workspaces.world("demo")
    with watching(server, "--json", "-r", ".") as process:
        assert process.stdout is not None
        server.wait_for(lambda: bool(world.watches))
        demo.files.make_dir("/root/sub")
        assert json.loads(process.stdout.readline()) | {"seq": 0} == {
            **{"type": "created", "path": "/root/sub", "directory": True, "seq": 0, "watch_id": None, "generation": None},
            **{"old_path": None, "raw_path": None, "raw_old_path": None, "reason": None, "error": None},
        }
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    server.wait_for(lambda: server.workspaces.held.get(server.workspaces.find_row("demo").id, 0) == 0)


def test_watch_for_people(demo: Workspace, server: FakeServer) -> None:
    world = server.workspaces.world("demo")
    with watching(server) as process:
        assert process.stdout is not None and process.stderr is not None
        server.wait_for(lambda: bool(world.watches))
        demo.files.write("/root/a\x1b[31m", "x")
        demo.files.rename("/root/a\x1b[31m", "/root/b")
        demo.files.make_dir("/root/d")
        lines = [process.stdout.readline() for _ in range(3)]
        demo.sleep()
        assert process.wait(60) == 0
        assert lines == ["created     /root/a\\x1b[31m\n", "renamed     /root/a\\x1b[31m → /root/b\n", "created     /root/d/\n"]
        assert "was put to sleep" in process.stderr.read()


def test_watch_of_nothing_is_told(perdure: Run, demo: Workspace) -> None:
    answer = perdure("watch --json demo /none")
    assert (answer.code, answer.error["code"]) == (1, "not_found")
    assert perdure("watch --json nobody").error["code"] == "not_found"
