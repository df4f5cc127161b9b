"""``perdure execution``, ``callback``, ``function`` and ``replay`` against a real server over the service in memory."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.api_server import FakeServer
from tests.fakes.lived_executions import Lives
from tests.integration.api.test_cli import Run, perdure

__all__ = ["perdure"]  # the fixture

Play = Callable[[Callable[[Lives], Awaitable[Any]]], Any]
TIMES = [(r"\d+ (ms|s|min|h|d)\b", "T"), (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "AT"), (r"exn_\w{26}", "EXN")]


@pytest.fixture
def play(server: FakeServer) -> Play:
    lives = Lives(server.executions)

    def run(work: Callable[[Lives], Awaitable[Any]]) -> Any:
        async def inside() -> Any:
            return await work(lives)

        return server.run(inside)

    run(lambda one: one.serve())
    return run


def still(text: str) -> str:
    """Without what differs from run to run, and without the width of columns."""
    for pattern, word in TIMES:
        text = re.sub(pattern, word, text)
    return re.sub(r" {2,}", "  ", text)


def test_ls(perdure: Run, play: Play) -> None:
    assert perdure("executions ls").out == "No executions. Start one with 'perdure execution start FUNCTION INPUT'.\n"
    play(lambda lives: lives.succeed("order-1"))
    play(lambda lives: lives.fail("order-2"))
    play(lambda lives: lives.begin())
    listed = still(perdure("execution ls").out).splitlines()
    assert listed == [
        "NAME  ID  FUNCTION  STATUS  STARTED  TOOK",
        "  EXN  greet  RUNNING  T ago",
        "order-2  EXN  greet  FAILED  T ago  T",
        "order-1  EXN  greet  SUCCEEDED  T ago  T",
    ]
    assert len(perdure("execution ls --status FAILED --status SUCCEEDED --json").json["executions"]) == 2
    assert [one["name"] for one in perdure("execution ls --name order-1 --json").json["executions"]] == ["order-1"]
    assert perdure("execution ls --function other --json").json == {"executions": [], "more": False}
    short = perdure("execution ls --limit 1")
    assert (len(short.out.splitlines()), short.err) == (2, "Only the newest 1; more with --limit.\n")
    assert perdure("execution ls --limit 1 --json").json["more"] is True


def test_show_is_a_tree_that_says_what_is_waited_for(perdure: Run, play: Play) -> None:
    play(lambda lives: lives.retry_within("order-1"))
    assert still(perdure("execution show order-1").out).splitlines() == [
        "order-1  EXN  greet  RUNNING",
        "started  AT UTC, T ago; 1 invocation",
        "standing  waits for step write since T, until AT UTC, in T",
        'input  {"name": "Ada"}  15 B',
        "",
        "OPERATION  STATUS  ATTEMPTS  TOOK  DETAIL",
        "map people  STARTED  T",
        '  step look  SUCCEEDED  1  T  ["Ada"]',
        "  step write  PENDING  1  T  next attempt AT UTC, in T; after OSError: no paper",
    ]
    found = perdure("execution show order-1 --json").json
    assert (found["execution"]["name"], len(found["operations"])) == ("order-1", 4)


def test_show_prints_the_command_that_completes_a_callback(perdure: Run, play: Play) -> None:
    play(lambda lives: lives.ask("review-1"))
    shown = perdure("execution show review-1").out
    assert "standing  waits for callback approval since" in shown
    assert "callback approval is open; complete it with\n" in shown
    command = shown.splitlines()[-1].strip()
    assert re.fullmatch(r"perdure callback succeed \S+ '\{\}'", command)
    done = perdure(command.removeprefix("perdure ").replace("'", ""))
    assert (done.code, done.out) == (0, "It has succeeded; its execution goes on\n")
    after = perdure("execution show review-1").out
    assert "is open" not in after
    assert "callback approval  SUCCEEDED" in after


def test_show_says_how_it_ended_and_that_nobody_serves_it(perdure: Run, play: Play, server: FakeServer) -> None:
    play(lambda lives: lives.fail("order-1"))
    shown = perdure("execution show order-1").out
    assert "error     ValueError: no such person\n" in shown
    assert "standing  ended after" in shown
    play(lambda lives: lives.begin("order-2"))
    waiting = perdure("execution show order-2")
    assert ("standing  waits for a worker since" in waiting.out, waiting.err) == (True, "")
    play(lambda lives: server.executions.leave(lives.tenant_id, lives.worker_id))
    assert perdure("execution show order-2").err == "! No worker serves greet now: start one with 'perdure worker'.\n"


def test_start_and_wait(perdure: Run, play: Play, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = perdure("execution start greet --name order-1 --timeout 30d --priority 2 --key printer --code exact", '{"a": [1]}')
    assert (begun.code, still(begun.out)) == (0, "EXN is started\n")
    assert still(perdure("execution start greet --name order-1", '{"a": [1]}').out) == "EXN was there already\n"
    info = perdure("execution show order-1 --json").json["execution"]
    assert (info["input"], info["timeout_s"], info["priority"], info["key"], info["code"]) == (
        {"a": [1]},
        30 * 86400,
        2,
        "printer",
        "exact",
    )
    late = perdure("execution wait order-1 --timeout 0.1s --json")
    assert (late.code, late.error["code"]) == (1, "execution_running")
    play(lambda lives: lives.succeed())  # takes order-1, which is older
    assert perdure("execution wait order-1").out == '{"hello": "Ada"}\n'
    assert perdure("execution wait order-1 --json").json["result"] == {"hello": "Ada"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'"from stdin"'), encoding="utf-8"))
    started = perdure("execution start greet - --json").json
    assert perdure(f"execution show {started['execution_id']} --json").json["execution"]["input"] == "from stdin"


def test_an_end_without_a_result_is_an_error(perdure: Run, play: Play) -> None:
    play(lambda lives: lives.fail("order-1"))
    failed = perdure("execution wait order-1 --json")
    assert (failed.code, failed.error["code"]) == (1, "execution_failed")
    assert failed.error["message"].endswith("failed: ValueError: no such person.")


@pytest.mark.usefixtures("play")
def test_what_is_wrong_on_the_command_line_is_one_sentence(perdure: Run) -> None:
    for words, complaint in (
        (["execution", "start", "greet", "{not json"], "INPUT is not JSON: "),
        (["execution", "start", "greet", "--timeout", "soon"], "'soon' is not a duration."),
        (["execution", "start", "nobody"], "no function"),
        (["execution", "show", "absent"], "There is no execution 'absent'."),
        (["execution", "show", "a/b"], "'a/b' is not an execution's id, name or ARN."),
        (["execution", "rm", "absent", "--yes"], "There is no execution 'absent'."),
        (["callback", "succeed", "nonsense"], "There is no such callback."),
        (["callback", "succeed", "nonsense", "{"], "RESULT is not JSON: "),
        (["callback", "ls", "absent"], "There is no execution 'absent'."),
        (["replay", "absent", "no_such_module:main"], "The module 'no_such_module' cannot be imported: "),
        (["replay", "absent", "nonsense"], "'nonsense' does not name a handler."),
    ):
        refused = perdure("", *words)
        assert refused.code == 1, words
        assert refused.out == ""
        assert complaint in refused.err
        told = perdure("", *words, "--json")
        assert complaint in told.error["message"], words


def test_history_prints_awss_events(perdure: Run, play: Play) -> None:
    play(lambda lives: lives.retry_within("order-1"))
    lines = [line.strip() for line in still(perdure("execution history order-1").out).splitlines()]
    assert lines == [
        '1  AT  ExecutionStarted  {"name": "Ada"}',
        "2  AT  ContextStarted people",
        "3  AT  StepStarted look",
        '4  AT  StepSucceeded look  ["Ada"]',
        "5  AT  StepStarted write",
        "6  AT  StepFailed write  OSError: no paper; attempt 1, next in T",
        "7  AT  InvocationCompleted",
    ]
    events = perdure("execution history order-1 --json").json["events"]
    assert [one["EventId"] for one in events] == [*range(1, 8)]
    last = perdure("execution history order-1 --newest-first --limit 1 --json").json["events"]
    assert last == events[-1:]


def test_steering(perdure: Run, play: Play) -> None:
    play(lambda lives: lives.begin("order-1"))
    assert perdure("execution pause order-1 --reason", "no paper").out == "order-1 is PAUSED\n"
    assert "standing  paused by an operator since" in perdure("execution show order-1").out
    assert perdure("execution retry order-1").out == "order-1 is resumed\n"
    assert perdure("execution pause order-1 --timeout-goes-on --json").json["pause"]["timeout_paused"] is False
    assert perdure("execution resume order-1 --code exact").out == "order-1 is RUNNING\n"
    assert perdure("execution stop order-1 -m enough --type Cancelled").out == "order-1 is stopped\n"
    again = perdure("execution stop order-1 --json")
    assert (again.code, again.error["code"]) == (1, "execution_ended")
    retried = still(perdure("execution retry order-1").out)
    assert retried == "order-1 has ended; EXN is started with the same function and input\n"
    assert perdure("execution retry order-1 --name order-2 --json").json["resumed"] is False
    assert perdure("execution show order-2 --json").json["execution"]["input"] == {"name": "Ada"}


def test_rm_asks_and_takes_no_running_one(perdure: Run, play: Play) -> None:
    play(lambda lives: lives.succeed("order-1"))
    play(lambda lives: lives.begin("order-2"))
    assert "needs a confirmation" in perdure("execution rm order-1").err
    refused = perdure("execution rm order-2 --yes --json")
    assert (refused.code, refused.error["code"]) == (1, "conflict")
    assert still(perdure("execution rm order-1 --yes").out) == "EXN is deleted\n"
    assert perdure("execution show order-1").code == 1


def test_callbacks(perdure: Run, play: Play) -> None:
    assert perdure("callbacks ls").out == "No callback is open.\n"
    play(lambda lives: lives.ask("review-1", timeout_s=600, heartbeat_s=60))
    play(lambda lives: lives.ask("review-2"))
    listed = still(perdure("callback ls").out).splitlines()
    assert listed[0] == "NAME  EXECUTION  FUNCTION  OPEN SINCE  UNTIL  ID"
    assert re.fullmatch(r"approval  EXN  greet  T ago  AT UTC, in T  \S+", listed[1])
    first, second = perdure("callback ls --json").json["callbacks"]
    assert perdure(f"callback beat {first['callback_id']}").out == "Its heartbeat's timeout begins anew\n"
    assert perdure(f"callback succeed {first['callback_id']}", '{"ok": true}').code == 0
    failed = perdure(f"callback fail {second['callback_id']} --message refused --type Refused --json")
    assert failed.json == {"callback_id": second["callback_id"], "done": "failed"}
    assert perdure("callback ls review-1 --json").json == {"callbacks": []}
    closed = perdure(f"callback beat {first['callback_id']} --json")
    assert (closed.code, closed.error["code"], closed.error["gone"]) == (1, "callback_closed", True)


def test_functions_raise_an_alarm_for_executions_that_nobody_runs(perdure: Run, play: Play, server: FakeServer) -> None:
    play(lambda lives: lives.begin("order-1"))
    served = perdure("functions ls")
    assert served.err == ""
    assert still(served.out).splitlines()[1] == "greet  v1  1  T  1  1  T ago"
    play(lambda lives: server.executions.leave(lives.tenant_id, lives.worker_id))
    alarm = perdure("function ls").err
    assert still(alarm) == "! No worker serves greet: 1 open, 1 waiting for a worker, the first since T ago.\n"
    told = perdure("function ls --json").json
    assert (told["unserved"], told["functions"][0]["executions"], told["functions"][0]["waiting"]) == (["greet"], 1, 1)


def test_hostile_names_and_results_do_nothing_to_a_terminal(perdure: Run, play: Play) -> None:
    play(lambda lives: lives.succeed("order-1", result=json.dumps("\x1b[31m[bold]\u202e")))
    for line in ("execution show order-1", "execution wait order-1", "execution history order-1"):
        out = perdure(line).out
        assert "\x1b" not in out
        assert "\u202e" not in out


def test_completion_of_references(perdure: Run, play: Play) -> None:
    play(lambda lives: lives.succeed("order-1"))
    play(lambda lives: lives.ask("review-1"))
    assert perdure("__complete executions show o").out == "order-1\tgreet SUCCEEDED\n"
    assert perdure("__complete execution start gr").out == "greet\t\n"
    assert perdure("__complete callback succeed Y").out.endswith("\tgreet approval\n")
    assert "review-1" in perdure("__complete replay re").out


# --------------------------------------------------------------------------------------------------------------------- replay

CODE = """
from aws_durable_execution_sdk_python import durable_execution
from aws_durable_execution_sdk_python.config import Duration

@durable_execution
def same(event, context):
    return {"hello": event["name"]}

@durable_execution
def more(event, context):
    return context.step(lambda _: open("a-step-ran", "w").close(), name="ask again")

@durable_execution
def other(event, context):
    print("debugging")
    return {"goodbye": event["name"]}

@durable_execution
def wrong(event, context):
    context.wait(Duration.from_seconds(5), name="approval")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "replay_by_command", raising=False)
    (tmp_path / "replay_by_command.py").write_text(CODE)
    return tmp_path


def test_replay(perdure: Run, play: Play, project: Path) -> None:
    play(lambda lives: lives.succeed("order-1"))
    same = perdure("replay order-1 replay_by_command:same")
    assert (same.code, same.out) == (0, "same: 0 operations of the history fit, and nothing new would be done\n")
    more = perdure("replay order-1 replay_by_command:more")
    assert (more.code, more.out) == (0, "goes on: 0 operations of the history fit\n  with NEW operation STEP ask again\n")
    assert not (project / "a-step-ran").exists()
    other = perdure("replay order-1 replay_by_command:other --json")
    assert (other.code, other.json["verdict"], other.json["result"]) == (1, "differs", {"goodbye": "Ada"})
    assert other.err == "debugging\n"


@pytest.mark.usefixtures("project")
def test_replay_of_what_does_not_fit(perdure: Run, play: Play) -> None:
    play(lambda lives: lives.succeed("order-1"))
    (first,) = perdure("replay order-1 replay_by_command:more --json").json["moves"]
    play(lambda lives: lives.ask("review-1", operation_id=first["operation_id"]))
    wrong = perdure("replay review-1 replay_by_command:wrong")
    assert (wrong.code, wrong.err) == (1, "")
    assert wrong.out.splitlines() == [
        f"NonDeterministicExecutionError at operation CALLBACK approval ({first['operation_id']})",
        "  type: expected CALLBACK, found WAIT",
        "  subtype: expected Callback, found Wait",
    ]
    told = perdure("replay review-1 replay_by_command:wrong --json").json
    assert (told["verdict"], told["mismatch"]["name"], told["moves"]) == ("nondeterministic", "approval", [])
    ended = perdure("replay review-1 replay_by_command:same")
    assert ended.code == 1
    assert ended.out == 'differs: it would end SUCCEEDED with {"hello": "Ada"}\n  leaves out callback approval\n'
