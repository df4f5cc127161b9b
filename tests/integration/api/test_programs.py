"""A workspace's program over real HTTP: naming it, watching it, reading what it wrote; SDK and command line."""

from __future__ import annotations

import base64
import json
import threading

import httpx2
import pytest

from perdure.core.errors import InvalidRequest, NotFound
from perdure.sdk import AsyncClient, AsyncWorkspace, Workspace
from perdure.sdk._core import Output
from perdure.wire.guest.ops import PROGRAM_FILE
from tests.fakes.api_server import FakeServer
from tests.fakes.contract_program import ContractProgram
from tests.fakes.workspaces import KEY
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]

TALK = ["/bin/sh", "-c", "echo one; warn two; hang"]


def text(chunks: list[Output]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_a_program_from_its_naming_to_its_end(demo: Workspace, server: FakeServer) -> None:
    assert (demo.program.show().state, demo.program.show().program) == ("none", None)
    info = demo.program.set(TALK, envs={"A": "1"}, cwd="/srv", user="agent", port=9000, restart="on-failure", stop_grace_s=3)
    assert info.state == "running" and info.pid and info.generation == 1
    assert info.program is not None
    assert info.program.model_dump(mode="json") == {
        "argv": TALK,
        "env": {"A": "1"},
        "cwd": "/srv",
        "user": "agent",
        "port": 9000,
        "restart": "on-failure",
        "stop_grace_s": 3.0,
    }
    assert PROGRAM_FILE in server.workspaces.world("demo").files
    assert text([*demo.program.logs()]) == "one\ntwo\n"
    stopped = demo.program.stop()
    assert stopped.state == "stopped" and stopped.last is not None and stopped.last.exit_code == 143
    assert demo.program.start().state == "running"
    assert demo.program.restart().state == "running"
    assert text([*demo.program.logs(tail=2)]) == "one\ntwo\n"
    assert demo.program.unset().state == "none"
    assert demo.program.unset().state == "none"
    with pytest.raises(NotFound, match="No program is named") as caught:
        demo.program.start()
    assert "perdure program set" in caught.value.hint


def test_everything_about_a_program_wakes_the_workspace_and_says_so(demo: Workspace, server: FakeServer) -> None:
    demo.program.set(TALK)
    for ask in (demo.program.show, demo.program.stop, lambda: [*demo.program.logs()]):
        demo.sleep()
        demo.report = None
        ask()
        row = server.workspaces.find_row("demo")
        assert row.state == "running"
        server.wait_for(lambda row=row: server.workspaces.held[row.id] == 0)  # the answer is here before the call is over
    demo.sleep()
    demo.program.start()
    assert demo.report is not None and demo.report.memory == "kept"


def test_a_fork_has_its_parents_program(demo: Workspace) -> None:
    demo.program.set(TALK)
    (child,) = demo.fork(1)
    assert isinstance(child, Workspace)
    info = child.program.show()
    assert info.state == "running" and info.program is not None and info.program.argv == TALK


def test_a_look_tells_what_the_program_says_of_itself(demo: Workspace, server: FakeServer, perdure: Run) -> None:
    with ContractProgram() as program:
        server.workspaces.world("demo").ports.add(program.port)
        demo.program.set(["/bin/sh", "-c", "hang"], port=program.port)
        assert demo.program.show().ping == "Healthy"
        program.ping = b'{"status": "HealthyBusy", "time_of_last_update": 1700000000}'
        assert demo.program.show().ping == "HealthyBusy"
        assert perdure("program show demo").out.startswith("demo running, HealthyBusy, pid ")
        program.ping = b"odd"
        assert demo.program.show().ping is None


def test_a_failing_program_is_shown_as_that(demo: Workspace, server: FakeServer) -> None:
    demo.program.set(["/bin/sh", "-c", "exit 7"])
    program = server.workspaces.world("demo").program
    server.wait_for(lambda: program.failures >= 2 and program.state == "backing-off")
    info = demo.program.show()
    assert info.last is not None and info.last.exit_code == 7
    assert info.failures >= 2 and info.restarts >= 2


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ([], {}),
        ([""], {}),
        (["a\0"], {}),
        (["a"], {"port": 0}),
        (["a"], {"port": 70000}),
        (["a"], {"restart": "sometimes"}),
        (["a"], {"stop_grace_s": -1}),
        (["a"], {"envs": {"A=B": "c"}}),
        (["a", "b" * 16000, "c" * 16000], {}),
    ],
)
def test_what_cannot_be_a_program_is_refused_and_wakes_nothing(
    demo: Workspace, server: FakeServer, argv: list[str], options: dict[str, object]
) -> None:
    demo.sleep()
    wakes = server.workspaces.wakes["demo"]
    with pytest.raises(InvalidRequest):
        demo.program.set(argv, **options)  # type: ignore[arg-type]
    assert server.workspaces.wakes["demo"] == wakes
    with pytest.raises(InvalidRequest, match="has no option"):
        demo.program.set(["a"], colour="red")  # type: ignore[call-arg]


def test_offsets_gaps_and_a_log_that_began_anew(demo: Workspace, server: FakeServer) -> None:
    demo.program.set(["/bin/sh", "-c", "spew 1500000; echo end; hang"])
    program = server.workspaces.world("demo").program
    server.wait_for(lambda: program.log.endswith(b"end\n"))
    first, *rest = demo.program.logs(offset=0)
    assert (first.gap, first.offset) == (program.log_start, program.log_start) and program.log_start > 0
    assert sum(len(one.data) for one in (first, *rest)) == len(program.log)
    assert text([*demo.program.logs(offset=1_500_001)]) == "nd\n"
    assert next(iter(demo.program.logs(offset=10**9))).offset < 10**9


def test_following_gets_what_comes_over_a_server_that_starts_anew(demo: Workspace, server: FakeServer) -> None:
    demo.program.set(["/bin/sh", "-c", "echo one; hang"])
    program = server.workspaces.world("demo").program
    seen: list[Output] = []
    arrived = threading.Semaphore(0)

    def follow() -> None:
        for chunk in demo.program.logs(follow=True):
            seen.append(chunk)
            arrived.release()
            if "three" in text(seen):
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert arrived.acquire(timeout=60)
    row = server.workspaces.find_row("demo")
    assert server.workspaces.held[row.id] == 1, "following keeps it awake"

    async def say(line: bytes) -> None:
        program.write(line)

    server.run(lambda: say(b"two\n"))
    assert arrived.acquire(timeout=60)
    server.stop()
    server.start()
    server.run(lambda: say(b"three\n"))
    thread.join(60)
    assert text(seen) == "one\ntwo\nthree\n"
    server.wait_for(lambda: server.workspaces.held[row.id] == 0)


async def test_async_logs(server: FakeServer) -> None:
    async with AsyncClient(settings=server.settings) as client:
        ws = await AsyncWorkspace.create("demo", client=client)
        await ws.program.set(TALK)
        assert "".join([chunk.text async for chunk in ws.program.logs()]) == "one\ntwo\n"


def test_bad_questions_to_the_log(demo: Workspace, server: FakeServer) -> None:
    with httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as http:
        for query in ("offset=-1", "tail=-1", "offset=x", "follow=maybe"):
            response = http.get(f"/v1/workspaces/demo/program/logs?{query}")
            assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request"), query


# ---------------------------------------------------------------------------------------------------------- command line


def test_the_commands(demo: Workspace, perdure: Run) -> None:
    assert perdure("program show demo").out == "demo has no program. Name one: perdure program set NAME -- COMMAND …\n"
    made = perdure("program set demo --port 9000 -e A=1 --restart never --", *TALK).out.splitlines()
    assert made[0].startswith("demo running, pid ")
    assert made[1:] == ["  runs      /bin/sh -c 'echo one; warn two; hang'", "  port      9000, restart never"]
    assert perdure("program show demo --json").json["program"]["env"] == {"A": "1"}
    assert perdure("logs demo").out == "one\ntwo\n"
    assert perdure("logs demo --tail 1").out == "two\n"
    assert perdure("logs demo --json --offset 4").json == {"offset": 4, "gap": 0, "data": "two\n"}
    perdure("program set demo --", "/bin/sh", "-c", "bytes e282; hang")
    odd = [json.loads(line) for line in perdure("logs demo --json").out.splitlines()]
    assert b"".join(base64.b64decode(one["data_base64"]) for one in odd if "data_base64" in one).endswith(b"\xe2\x82")
    stopped = perdure("program stop demo").out
    assert stopped.startswith("demo stopped\n") and "  ended     with exit code 143 after " in stopped
    assert perdure("program start demo").out.startswith("demo running")
    assert perdure("program restart demo --json").json["state"] == "running"
    assert perdure("program unset demo").out.startswith("demo has no program")


def test_mistakes_on_the_command_line(demo: Workspace, perdure: Run) -> None:
    for line, code in (
        ("program start demo --json", "not_found"),
        ("logs demo --tail 1 --offset 1 --json", "invalid_request"),
        ("logs absent --json", "not_found"),
        ("program set demo --port 0 --json -- a", "invalid_request"),
    ):
        answer = perdure(line)
        assert answer.code != 0 and answer.error["code"] == code, line
    assert perdure("program set demo").code == 2
