"""Commands over real HTTP: what a client sees, and that going away never ends anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import httpx2
import pytest

from perdure.api import streams
from perdure.core.errors import Forgotten, InvalidRequest, KeyReused, NotFound, StaleGeneration
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, ConnectionLost, StillRunning, Workspace
from perdure.wire.node import ExecEnd
from tests.fakes.api_server import FakeServer
from tests.fakes.workspaces import KEY


def test_output_code_and_streams(demo: Workspace) -> None:
    seen: list[tuple[str, str]] = []
    result = demo.commands.run(
        "echo one; warn two; exit 3",
        on_stdout=lambda text: seen.append(("out", text)),
        on_stderr=lambda text: seen.append(("err", text)),
    )
    assert (result.exit_code, result.stdout, result.stderr, result.end, result.ok) == (3, "one\n", "two\n", "exited", False)
    assert sorted(seen) == [("err", "two\n"), ("out", "one\n")]


def test_options_reach_the_command(demo: Workspace) -> None:
    result = demo.commands.run("env A; pwd; whoami", envs={"A": "1"}, cwd="/srv", user="agent")
    assert result.stdout == "1\n/srv\nagent\n"


def test_bytes_that_are_not_text_survive(demo: Workspace) -> None:
    result = demo.commands.run(["bytes", "fffe00c3"])
    assert result.stdout_bytes == b"\xff\xfe\x00\xc3"
    assert result.stdout == "��\x00�"


def test_callback_never_gets_half_a_character(demo: Workspace) -> None:
    pieces: list[str] = []
    demo.commands.run("bytes 61e2; bytes 82ac62", on_stdout=pieces.append)
    assert "".join(pieces) == "a€b"


def test_large_output_arrives_whole_and_can_be_bounded(demo: Workspace) -> None:
    assert demo.commands.run(["spew", "5000000"]).stdout_bytes == b"x" * 5_000_000
    bounded = demo.commands.run(["spew", "5000000"], output_limit_bytes=1000)
    assert (len(bounded.stdout_bytes), bounded.truncated) == (1000, True)
    exact = demo.commands.run(["spew", "1000"], output_limit_bytes=1000)
    assert (len(exact.stdout_bytes), exact.truncated) == (1000, False)


def test_command_that_does_not_exist_is_a_result(demo: Workspace) -> None:
    result = demo.commands.run(["nope"])
    assert (result.exit_code, result.end, result.detail) == (127, "not-started", "there is no command 'nope'")


@pytest.mark.parametrize("limit", ["run_limit_s", "idle_limit_s"])
def test_limit_ends_the_command(demo: Workspace, limit: str) -> None:
    result = demo.commands.run("hang", **{limit: 0.05})  # type: ignore[arg-type]
    assert (result.end, result.exit_code) == (limit.removesuffix("_s").replace("_", "-"), 143)


def test_wait_that_ends_leaves_the_command_running(demo: Workspace) -> None:
    with pytest.raises(StillRunning, match=r"still runs after 0\.05 s; it was not stopped") as caught:
        demo.commands.run("hang", timeout=0.05)
    assert demo.commands.get(caught.value.exec_id).outcome is None
    demo.commands.kill(caught.value.exec_id)
    assert demo.commands.attach(caught.value.exec_id).wait().end == "killed"


def test_background_handle(demo: Workspace) -> None:
    handle = demo.commands.run(["cat"], background=True, stdin=True)
    handle.send_stdin("hello ")
    handle.send_stdin("world", eof=True)
    assert handle.wait().stdout == "hello world"
    assert [output.data for output in demo.commands.attach(handle.exec_id)] == [b"hello world"]


def test_attaching_at_an_offset_goes_on_there(demo: Workspace) -> None:
    handle = demo.commands.run("echo abc; warn de; echo fgh", background=True)
    whole = handle.wait()
    assert handle.offsets == {"stdout": 8, "stderr": 3}
    rest = demo.commands.attach(handle.exec_id, stdout_offset=6, stderr_offset=1).wait()
    assert (rest.stdout, rest.stderr, rest.exit_code, rest.truncated) == ("h\n", "e\n", 0, False)
    done = demo.commands.attach(handle.exec_id, stdout_offset=8, stderr_offset=3)
    assert list(done) == [] and done.outcome is not None and done.outcome.exit_code == whole.exit_code
    with pytest.raises(InvalidRequest, match="not negative"):
        demo.commands.attach(handle.exec_id, stdout_offset=-1)


def test_stdin_larger_than_any_buffer_with_output_of_the_same_size(demo: Workspace) -> None:
    data = bytes(range(256)) * 20_000

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(data), 100_000):
            yield data[start : start + 100_000]

    assert demo.commands.run(["cat"], stdin=pieces()).stdout_bytes == data


def test_failing_stdin_ends_the_command_instead_of_half_feeding_it(demo: Workspace) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        demo.commands.run(["cat"], stdin=broken())
    assert [one.outcome.end for one in demo.commands.list() if one.outcome] == [ExecEnd.KILLED]


def test_signal(demo: Workspace) -> None:
    handle = demo.commands.run("hang", background=True)
    handle.send_signal(15)
    assert (handle.wait().end, handle.wait().signal) == ("signaled", 15)


def test_mistakes_are_told_before_anything_is_sent(demo: Workspace, server: FakeServer) -> None:
    with pytest.raises(InvalidRequest, match="first word is empty"):
        demo.commands.run([""])
    with pytest.raises(InvalidRequest, match="NUL"):
        demo.commands.run(["a\0b"])
    with pytest.raises(InvalidRequest, match="no option 'env'"):
        demo.commands.run("true", env={})  # type: ignore[call-overload]
    with pytest.raises(NotFound, match="no command 'exe_unknown'"):
        demo.commands.attach("exe_unknown")
    assert server.workspaces.world("demo").commands == {}


def test_client_that_goes_away_detaches(server: FakeServer, demo: Workspace) -> None:
    transport = httpx2.HTTPTransport(uds=str(server.settings.api_socket))
    with (
        httpx2.Client(transport=transport, base_url="http://perdure") as http,
        http.stream("POST", "/v1/workspaces/demo/execs", json={"shell": "echo hi; hang"}) as response,
    ):
        lines = response.iter_lines()
        exec_id = json.loads(next(lines))["exec_id"]
        assert json.loads(next(lines))["data"] == "aGkK"
        assert server.workspaces.held[server.workspaces.find_row("demo").id] == 1
    server.wait_for(lambda: server.workspaces.held[server.workspaces.find_row("demo").id] == 0)
    assert server.workspaces.world("demo").commands[exec_id].exited is None


def test_silent_command_has_heartbeats(server: FakeServer, demo: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.02)
    transport = httpx2.HTTPTransport(uds=str(server.settings.api_socket))
    with (
        httpx2.Client(transport=transport, base_url="http://perdure") as http,
        http.stream("POST", "/v1/workspaces/demo/execs", json={"shell": "hang", "wait_s": 0.5}) as response,
    ):
        events = [json.loads(line) for line in response.iter_lines()]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "detached"
    assert kinds.count("heartbeat") > 2


def test_server_restart_is_survived_without_running_twice(server: FakeServer, client: Client, demo: Workspace) -> None:
    """The stream breaks in the middle; the client takes it up at the same byte of the same command."""
    handle = demo.commands.stream("echo first; cat", stdin=True)
    seen = b""
    for output in handle:
        seen += output.data
        if seen == b"first\n":
            server.stop()
            server.start()
            command = server.workspaces.world("demo").commands[handle.exec_id]

            async def more(command: object = command) -> None:
                command.stdin.put_nowait(b"second\n")  # type: ignore[attr-defined]
                command.stdin.put_nowait(None)  # type: ignore[attr-defined]

            server.run(more)
    assert seen == b"first\nsecond\n"
    assert len(server.workspaces.world("demo").commands) == 1
    assert handle.outcome is not None
    assert handle.outcome.exit_code == 0


def test_start_repeated_with_the_same_id_attaches(server: FakeServer, demo: Workspace) -> None:
    transport = httpx2.HTTPTransport(uds=str(server.settings.api_socket))
    body = {"shell": "echo once", "exec_id": "exe_0123456789"}
    with httpx2.Client(transport=transport, base_url="http://perdure") as http:
        answers = [http.post("/v1/workspaces/demo/execs", json=body).text for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(server.workspaces.world("demo").commands) == 1


def test_a_key_runs_once_for_as_many_clients_as_ask(server: FakeServer, demo: Workspace) -> None:
    first = demo.commands.run("echo once", idempotency_key="k")
    assert demo.commands.run("echo once", idempotency_key="k") == first
    with Client(settings=server.settings) as second:
        other = Workspace.connect("demo", client=second)
        assert other.commands.run("echo once", idempotency_key="k").exec_id == first.exec_id
        assert other.commands.run("echo once", background=True, idempotency_key="k").wait() == first
    assert len(server.workspaces.world("demo").commands) == 1
    with pytest.raises(KeyReused, match="another command"):
        demo.commands.run("echo twice", idempotency_key="k")
    server.workspaces.world("demo").commands.clear()
    with pytest.raises(Forgotten) as caught:
        demo.commands.run("echo once", idempotency_key="k")
    assert (caught.value.ambiguous, caught.value.gone) == (True, True)


def test_a_key_that_cannot_be_one_or_stdin_with_it_is_refused_here(demo: Workspace) -> None:
    for key in ("", " k", "k\n", "ключ", "x" * 256):
        with pytest.raises(InvalidRequest, match="idempotency key"):
            demo.commands.run("true", idempotency_key=key)
    with pytest.raises(InvalidRequest, match="reads no stdin"):
        demo.commands.run("cat", stdin=b"x", idempotency_key="k")


class Cutter:
    """A TCP proxy to the server that hangs up after so many bytes of an answer, once."""

    def __init__(self, port: int, after: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._port, self._after = port, after
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._port)) as far:
            there = threading.Thread(target=self._pass, args=(near, far, None), daemon=True)
            there.start()
            self._pass(far, near, self._after if self.cuts == 0 else None)
            there.join()

    def _pass(self, source: socket.socket, sink: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096 if left is None else min(4096, left)):
                sink.sendall(data)
                left = None if left is None else left - len(data)
                if left == 0:
                    self.cuts += 1
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.mark.parametrize("after", [100, 600, 5_000, 700_001, 2_000_000])
def test_a_connection_that_is_cut_in_the_middle_loses_and_doubles_nothing(
    server: FakeServer, demo: Workspace, after: int
) -> None:
    """(peers: row 13) The whole output equals what the command wrote, wherever the connection broke."""
    cutter = Cutter(int(server.url.rpartition(":")[2]), after)
    try:
        with Client(url=cutter.url, api_key=KEY) as client:
            result = Workspace(demo.info, client).commands.run("spew 1000000; bytes e282ac; spew 1000000")
        assert cutter.cuts >= 1
        assert result.stdout_bytes == b"x" * 1_000_000 + "€".encode() + b"x" * 1_000_000
        assert (result.exit_code, result.truncated) == (0, False)
        assert len(server.workspaces.world("demo").commands) == 1
    finally:
        cutter.close()


def test_sleep_ends_the_stream_and_nothing_wakes_it_again(server: FakeServer, demo: Workspace) -> None:
    handle = demo.commands.stream("echo hi; hang")
    with pytest.raises(StaleGeneration):
        for output in handle:
            assert output.data == b"hi\n"
            demo.sleep()
    assert server.workspaces.wakes["demo"] == 1
    resumed = demo.commands.attach(handle.exec_id)
    assert demo.report is not None
    assert demo.report.memory == "kept"
    resumed.kill()
    assert resumed.wait().stdout == "hi\n"


def test_reconnect_after_sleep_is_refused_rather_than_waking(server: FakeServer, demo: Workspace) -> None:
    handle = demo.commands.stream("echo hi; hang")

    def cut() -> None:
        server.stop()
        server.run(lambda: server.workspaces.sleep(None, "demo"))  # type: ignore[arg-type]
        server.start()

    with pytest.raises((StaleGeneration, ConnectionLost)) as caught:
        for _ in handle:
            cut()
    assert isinstance(caught.value, StaleGeneration)
    assert server.workspaces.wakes["demo"] == 1


def test_two_clients_follow_one_command(server: FakeServer, demo: Workspace) -> None:
    handle = demo.commands.run(["cat"], background=True, stdin=True)
    with Client(settings=server.settings) as second:
        other = Workspace.connect("demo", client=second).commands.attach(handle.exec_id)
        handle.send_stdin("shared", eof=True)
        assert (handle.wait().stdout, other.wait().stdout) == ("shared", "shared")


async def test_async_surface(server: FakeServer) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.create("demo", client=client)
        texts: list[str] = []

        async def keep(text: str) -> None:
            texts.append(text)

        results = await asyncio.gather(
            ws.commands.run("echo hi", on_stdout=keep), ws.commands.run(["cat"], stdin=b"fed"), ws.commands.run(["false"])
        )
        assert [one.exit_code for one in results] == [0, 0, 1]
        assert (texts, results[1].stdout) == (["hi\n"], "fed")
        handle = await ws.commands.run("hang", background=True)
        with pytest.raises(StillRunning):
            await handle.wait(0.05)
        await handle.kill()
        assert (await handle.wait()).end == "killed"
