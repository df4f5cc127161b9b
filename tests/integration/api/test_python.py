"""Python in a workspace over real HTTP: the SDK, the command line, bad input, and a wire that loses things."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from pathlib import Path

import httpx2
import pytest

from perdure.core.errors import InvalidRequest, KernelDied, PythonMissing
from perdure.sdk import AsyncClient, AsyncWorkspace, Client, PythonOutput, Workspace
from perdure.wire.public import CODE_CHARS_MAX
from tests.fakes.api_server import FakeServer
from tests.fakes.bad_wire import BadWire, Loss
from tests.fakes.workspaces import KEY
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]

PNG = base64.b64encode(b"\x89PNG picture").decode()
SHOW = f"display({{'image/png': '{PNG}', 'text/plain': '<Figure>'}})"


def post(server: FakeServer, path: str, body: object) -> httpx2.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx2.post(f"{server.url}/v1/workspaces/demo/python{path}", json=body, headers=headers, timeout=60)


def test_a_result_has_all_that_a_cell_gives(demo: Workspace) -> None:
    heard: dict[str, list[str]] = {"stdout": [], "stderr": []}
    outputs: list[PythonOutput] = []
    code = f"import sys\nprint('out')\nprint('err', file=sys.stderr)\n{SHOW}\n6 * 7"
    result = demo.python.run(code, on_stdout=heard["stdout"].append, on_stderr=heard["stderr"].append, on_output=outputs.append)
    assert (result.ok, result.text, result.stdout, result.stderr) == (True, "42", "out\n", "err\n")
    assert ("".join(heard["stdout"]), "".join(heard["stderr"])) == ("out\n", "err\n")
    assert outputs == list(result.results) and [one.is_result for one in outputs] == [False, True]
    assert result.png == b"\x89PNG picture" and outputs[0].html is None and outputs[1].png is None
    assert (result.error, result.execution_count, result.kernel, result.restarted, result.truncated) == (None, 1, 1, False, False)


def test_an_exception_is_a_result(demo: Workspace) -> None:
    result = demo.python.run("print('so far')\n{}['x']")
    assert (result.ok, result.status, result.stdout, result.text) == (False, "error", "so far\n", None)
    assert result.error is not None and str(result.error) == "KeyError: 'x'" and "KeyError" in result.error.traceback


def test_a_cell_wakes_its_workspace_and_variables_are_there(demo: Workspace, server: FakeServer) -> None:
    demo.python.run("x = 1")
    demo.sleep()
    demo.report = None
    assert demo.python.run("x").text == "1"
    assert demo.report is not None
    server.wait_for(lambda: server.workspaces.held[demo.id] == 0)  # let go of when the answer is out


def test_a_fork_goes_on_with_variables_of_its_own(demo: Workspace) -> None:
    demo.python.run("seen = [1]")
    (child,) = demo.fork(1)
    assert isinstance(child, Workspace)
    first = child.python.run("seen.append(2)\nseen")
    assert (first.text, first.restarted, demo.python.run("seen").text) == ("[1, 2]", False, "[1]")


def test_a_kernel_that_dies_is_an_error_and_the_next_one_says_that_it_is_new(demo: Workspace, server: FakeServer) -> None:
    demo.python.run("import asyncio")
    running = threading.Event()
    died: list[KernelDied] = []

    def run() -> None:
        try:
            demo.python.run("print('on')\nawait asyncio.sleep(1000)", on_stdout=lambda _text: running.set())
        except KernelDied as error:
            died.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert running.wait(60)
    server.run(lambda: _kill(server))
    thread.join(60)
    assert [(error.ambiguous, error.retryable, error.details) for error in died] == [(True, False, {"reason": "ended"})]
    result = demo.python.run("1")
    assert (result.restarted, result.reason, result.kernel) == (True, "It was killed by signal 9.", 2)


async def _kill(server: FakeServer) -> None:
    server.workspaces.world("demo").python.kill()


async def test_async_has_the_same(demo: Workspace, server: FakeServer) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.connect("demo", client=client)
        await ws.python.run("import asyncio")
        task = asyncio.create_task(ws.python.run("await asyncio.sleep(1000)"))
        while not await ws.python.interrupt():
            pass
        assert (await task).status == "interrupted"
        assert [event.type async for event in ws.python.stream("1")] == ["started", "execute_result", "done"]
        assert (await ws.python.run("await asyncio.sleep(1000)", timeout_s=0.05)).timed_out


def test_whoever_leaves_leaves_the_cell_running(demo: Workspace, server: FakeServer) -> None:
    demo.python.run("import asyncio\nturn = asyncio.Event()\ndone = False")
    events = demo.python.stream("print('on')\nawait turn.wait()\ndone = True")
    assert [next(events).type, next(events).type] == ["started", "stream"]
    events.close()
    server.wait_for(lambda: server.workspaces.held[demo.id] == 0)
    assert server.workspaces.world("demo").python.kernels["default"].turn.locked()
    server.run(lambda: _set(server))
    assert demo.python.run("done").text == "True"


async def _set(server: FakeServer) -> None:
    server.workspaces.world("demo").python.kernels["default"].names["turn"].set()


@pytest.mark.parametrize("loss", Loss)
def test_what_is_lost_on_the_way_is_taken_up_and_nothing_runs_twice(demo: Workspace, server: FakeServer, loss: Loss) -> None:
    demo.python.run("count = 0")
    with BadWire(server.url) as wire, Client(url=wire.url, api_key=KEY) as far:
        ws = Workspace.connect("demo", client=far)
        wire.losses = [loss, loss]
        result = ws.python.run("count += 1\nprint(count)\ncount")
    assert wire.lost == 2 and (result.text, result.stdout) == ("1", "1\n")


def test_a_server_that_is_started_again_in_the_middle_costs_nothing(demo: Workspace, server: FakeServer) -> None:
    demo.python.run("import asyncio\nturn = asyncio.Event()")
    events = demo.python.stream("print('one')\nawait turn.wait()\nprint('two')")
    seen = [next(events) for _ in range(2)]
    server.stop()
    server.start()
    server.run(lambda: _set(server))
    seen += [*events]
    assert "".join(event.text for event in seen) == "one\ntwo\n" and seen[-1].type == "done"


def test_without_ipykernel_it_is_said_and_nothing_waits(demo: Workspace, server: FakeServer) -> None:
    server.workspaces.world("demo").python.has_ipykernel = False
    with pytest.raises(PythonMissing, match="ipykernel") as caught:
        demo.python.run("1")
    assert "python-data" in caught.value.hint
    server.wait_for(lambda: all(one.exited is not None for one in server.workspaces.world("demo").commands.values()))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"code": 1},
        {"code": None},
        {"code": "1", "context": "Not A Name"},
        {"code": "1", "context": "../default"},
        {"code": "1", "timeout_s": 0},
        {"code": "1", "timeout_s": -1},
        {"code": "1", "timeout_s": "soon"},
        {"code": "1", "exec_id": "mine"},
        {"code": "1", "unknown": True},
        {"code": "x" * (CODE_CHARS_MAX + 1)},
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_what_is_no_cell_is_refused_before_anything_is_woken(demo: Workspace, server: FakeServer, body: object) -> None:
    demo.sleep()
    answer = post(server, "", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
    assert server.workspaces.find_row("demo").state == "hibernated"


def test_the_sdk_finds_a_wrong_argument_itself(demo: Workspace) -> None:
    for wrong in ({"context": ""}, {"context": "a/b"}, {"timeout_s": 0.0}):
        with pytest.raises(InvalidRequest):
            demo.python.run("1", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        demo.python.restart("A B")


def test_a_command_is_not_followed_as_a_cell(demo: Workspace, server: FakeServer) -> None:
    done = demo.commands.run("echo hello")
    path = f"{server.url}/v1/workspaces/demo/python/cells/"
    headers = {"authorization": f"Bearer {KEY}"}
    (line,) = httpx2.get(path + done.exec_id, headers=headers, timeout=60).text.splitlines()
    assert json.loads(line)["failure"]["code"] == "invalid_request"
    assert httpx2.get(path + "exe_0000000000", headers=headers, timeout=60).status_code == 404


def test_a_running_cell_is_listed_as_a_command(demo: Workspace) -> None:
    demo.python.run("import asyncio")
    events = demo.python.stream("print('on')\nawait asyncio.sleep(1000)")
    assert [next(events).type, next(events).type] == ["started", "stream"]
    (running,) = [one for one in demo.commands.list() if one.outcome is None]
    assert "perdure python" in running.command
    assert demo.python.interrupt() is True
    assert [event.status for event in events if event.type == "done"] == ["interrupted"]


# ------------------------------------------------------------------------------------------------------------ command line


def test_the_command_line_prints_what_python_would(perdure: Run, demo: Workspace, tmp_path: Path) -> None:
    assert perdure("python demo", "x = 20").out == ""
    assert perdure("python demo", "print('hello'); x + 1").out == "hello\n21\n"
    script = tmp_path / "script.py"
    script.write_text("print('from a file', x)\n")
    assert perdure(f"python demo {script}").out == "from a file 20\n"
    failed = perdure("python demo", "1 / 0")
    assert (failed.code, failed.out) == (1, "") and "ZeroDivisionError" in failed.err
    late = perdure("python demo --timeout 0.05", "import asyncio; await asyncio.sleep(1000)")
    assert late.code == 124 and "variables are kept" in late.err


def test_it_saves_pictures_and_says_where_they_would_be(perdure: Run, demo: Workspace, tmp_path: Path) -> None:
    told = perdure("python demo", SHOW)
    assert told.out == "<Figure>\n" and "image/png, 12 B: save it with --save DIR" in told.err
    for number in (1, 2):
        saved = perdure(f"python demo --save {tmp_path}/charts", SHOW)
        assert saved.out == f"saved {tmp_path}/charts/output-{number}.png\n"
    assert (tmp_path / "charts/output-1.png").read_bytes() == b"\x89PNG picture"
    document = perdure(f"python demo --json --save {tmp_path}/charts", SHOW).json
    assert document["results"][0]["saved"] == [f"{tmp_path}/charts/output-3.png"]
    assert document["results"][0]["data"]["image/png"] == PNG and document["status"] == "ok"


def test_restart_and_interrupt_on_the_command_line(perdure: Run, demo: Workspace) -> None:
    perdure("python demo", "x = 1")
    assert perdure("python demo --interrupt").out == "Nothing ran.\n"
    assert perdure("python demo --interrupt --json").json == {"interrupted": False}
    assert perdure("python demo --restart").out == "kernel 2 of demo is ready\n"
    again = perdure("python demo", "'x' in globals()")
    assert again.out == "False\n" and "new kernel" in again.err and "on request" in again.err
    assert perdure("python demo --restart --json").json["kernel"] == 3
    assert perdure("python demo --restart 7").out == "7\n"


def test_what_the_command_line_refuses(perdure: Run, demo: Workspace, server: FakeServer, tmp_path: Path) -> None:
    for line, what in {
        "python demo --json": "There is no code",
        "python demo nothing.py --json": "There is no file",
        "python demo --interrupt 1 --json": "nothing else",
        "python demo --context A 1 --json": "context",
        "python demo --timeout -1 1 --json": "timeout_s",
    }.items():
        refused = perdure(line)
        assert (refused.code, refused.error["code"]) == (125, "invalid_request") and what in refused.error["message"]
    binary = tmp_path / "x.py"
    binary.write_bytes(b"\xff")
    assert "not UTF-8" in perdure(f"python demo {binary} --json").error["message"]
    server.workspaces.world("demo").python.has_ipykernel = False
    missing = perdure("python demo 1")
    assert missing.code == 125 and "image python-data" in missing.err
