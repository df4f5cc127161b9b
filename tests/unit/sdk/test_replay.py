"""Histories that AWS's durable SDK has written, replayed against the same code and against other code."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aws_durable_execution_sdk_python import DurableContext, durable_execution
from aws_durable_execution_sdk_python.config import Duration, StepConfig
from aws_durable_execution_sdk_python.retries import RetryDecision
from aws_durable_execution_sdk_python.waits import WaitForConditionConfig, WaitForConditionDecision

from perdure.api import render_runs
from perdure.core.errors import InvalidRequest
from perdure.runs.engine import Stop, description, operation, standing
from perdure.runs.protocol import ErrorObject
from perdure.runs.service.model import Insight
from perdure.sdk import replay
from perdure.sdk.replay import Replayed, Verdict
from perdure.wire import public
from tests.fakes.executions import Executions, Function, Killed

Main = Callable[[Any, DurableContext], Any]
RETRIED = StepConfig(retry_strategy=lambda _error, attempt: RetryDecision(attempt < 3, Duration.from_seconds(30)))


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("aws_durable_execution_sdk_python").setLevel(logging.CRITICAL)


class Lived:
    """An execution of a function that went as far as it goes without anybody outside."""

    def __init__(self, main: Main, event: Any = None) -> None:
        self.world = Executions(datetime.now(UTC))
        self.world.functions["main"] = Function(durable_execution(main, boto3_client=self.world.client()))
        self.id = self.world.start("main", event)

    def on(self) -> Lived:
        self.world.run(self.id)
        return self

    @property
    def info(self) -> public.ExecutionInfo:
        state = self.world.state(self.id)
        told = Insight(standing(state), state.code, 0, None, state.invocations, len(state.operations), state.history_bytes)
        return render_runs.execution(description(state), told)

    def against(self, main: Main) -> Replayed:
        """What other code makes of it. Nothing is asked of a server."""
        operations = [render_runs.operation(operation(op)) for op in self.world.state(self.id).operations.values()]
        asked = len(self.world.requests)
        found = replay.replay(self.info, operations, durable_execution(main))
        assert len(self.world.requests) == asked
        return found


def never(_: Any) -> Any:
    raise AssertionError("a replay runs no step")


def two_steps(event: Any, context: DurableContext) -> Any:
    first = context.step(lambda _: event["a"] + 1, name="first")
    return context.step(lambda _: first * 2, name="second")


def test_what_ended_ends_the_same() -> None:
    found = Lived(two_steps, {"a": 1}).on().against(two_steps)
    assert (found.verdict, found.status, found.result, found.moves) == (Verdict.SAME, "SUCCEEDED", 4, ())


def test_no_step_runs_and_results_come_from_the_history() -> None:
    def changed(_: Any, context: DurableContext) -> Any:
        context.step(never, name="first")
        return context.step(never, name="second")

    assert Lived(two_steps, {"a": 1}).on().against(changed).verdict is Verdict.SAME


def test_another_result_is_told() -> None:
    def changed(event: Any, context: DurableContext) -> Any:
        return {"all": two_steps(event, context)}

    found = Lived(two_steps, {"a": 1}).on().against(changed)
    assert (found.verdict, found.result) == (Verdict.DIFFERS, {"all": 4})


def test_a_new_operation_is_named_and_not_begun() -> None:
    def changed(event: Any, context: DurableContext) -> Any:
        two_steps(event, context)
        return context.step(never, name="third")

    found = Lived(two_steps, {"a": 1}).on().against(changed)
    (move,) = found.moves
    assert found.verdict is Verdict.GOES_ON
    assert (move.type, move.name, move.action, move.is_new) == ("STEP", "third", "START", True)


@pytest.mark.parametrize(
    ("what", "expected", "found_there"), [("name", "second", "renamed"), ("type", "STEP", "WAIT"), ("subtype", "Step", "Wait")]
)
def test_an_operation_that_is_another_one_is_named(what: str, expected: str, found_there: str) -> None:
    def changed(event: Any, context: DurableContext) -> Any:
        context.step(lambda _: event["a"] + 1, name="first")
        if what == "name":
            return context.step(never, name="renamed")
        return context.wait(Duration.from_seconds(5), name="second")

    found = Lived(two_steps, {"a": 1}).on().against(changed)
    assert found.verdict is Verdict.NONDETERMINISTIC
    assert found.mismatch is not None
    assert (found.mismatch.type, found.mismatch.name) == ("STEP", "second")
    assert (what, expected, found_there) in found.mismatch.differences


def test_operations_that_are_left_out_are_named() -> None:
    def changed(event: Any, context: DurableContext) -> Any:
        return context.step(lambda _: event["a"] + 1, name="first")

    found = Lived(two_steps, {"a": 1}).on().against(changed)
    assert (found.verdict, [one.name for one in found.left_out]) == (Verdict.DIFFERS, ["second"])


def test_what_waits_waits_the_same_and_a_shorter_wait_changes_nothing() -> None:
    def main(_: Any, context: DurableContext) -> Any:
        context.step(lambda _: 1, name="before")
        context.create_callback(name="approval").result()

    def changed(_: Any, context: DurableContext) -> Any:
        context.step(lambda _: 1, name="before")
        context.create_callback(name="approval").result()
        return "approved"

    for code in (main, changed):
        found = Lived(main).on().against(code)
        assert (found.verdict, found.status, found.moves) == (Verdict.SAME, "PENDING", ())


def test_a_step_that_was_cut_off_is_not_run_here() -> None:
    def main(_: Any, context: DurableContext) -> Any:
        def cut(_: Any) -> Any:
            raise Killed

        return context.step(cut, name="cut")

    lived = Lived(main)
    lived.world.invoke(lived.id)

    def changed(_: Any, context: DurableContext) -> Any:
        return context.step(never, name="cut")

    found = lived.against(changed)
    assert [(move.name, move.action) for move in found.moves][-1][0] == "cut"
    assert found.verdict is Verdict.GOES_ON


def test_a_step_that_waits_for_its_next_attempt_waits() -> None:
    def main(_: Any, context: DurableContext) -> Any:
        def fails(_: Any) -> Any:
            raise ValueError("not yet")

        return context.step(fails, name="flaky", config=RETRIED)

    lived = Lived(main)
    lived.world.invoke(lived.id)
    found = lived.against(main)
    assert (found.verdict, found.status) == (Verdict.SAME, "PENDING")
    failed = lived.on().against(main)
    assert (failed.verdict, failed.status) == (Verdict.SAME, "FAILED"), failed


def test_what_runs_side_by_side_and_children_that_were_too_large_to_keep() -> None:
    def main(_: Any, context: DurableContext) -> Any:
        doubled = context.map([1, 2, 3], lambda ctx, item, *_: ctx.step(lambda _: item * 2), name="doubled")
        large = context.run_in_child_context(lambda ctx: "x" * 300_000 + ctx.step(lambda _: "y"), name="large")
        return [*doubled.get_results(), len(large)]

    found = Lived(main).on().against(main)
    assert (found.verdict, found.result) == (Verdict.SAME, [2, 4, 6, 300_001])

    def changed(_: Any, context: DurableContext) -> Any:
        context.map([1, 2, 3], lambda ctx, item, *_: ctx.step(lambda _: item * 2), name="tripled")

    assert Lived(main).on().against(changed).verdict is Verdict.NONDETERMINISTIC


def test_a_condition_is_not_polled_here() -> None:
    def polls(check: Callable[[int], int]) -> Main:
        def main(_: Any, context: DurableContext) -> Any:
            def decide(state: int, _: int) -> WaitForConditionDecision:
                return WaitForConditionDecision(state < 3, Duration.from_seconds(60))

            return context.wait_for_condition(lambda state, _: check(state), WaitForConditionConfig(decide, 0), name="poll")

        return main

    counts, refuses = polls(lambda state: state + 1), polls(never)
    lived = Lived(counts)
    lived.world.invoke(lived.id)
    between = lived.against(refuses)
    assert (between.verdict, between.status) == (Verdict.SAME, "PENDING"), "it waits for its next poll"
    ended = lived.on().against(refuses)
    assert (ended.verdict, ended.result) == (Verdict.SAME, 3)


def test_other_functions_are_not_called_and_submitters_not_run() -> None:
    def main(_: Any, context: DurableContext) -> Any:
        told = context.invoke("other", {"n": 1}, name="ask")
        context.wait_for_callback(lambda *_: None, name="approval")
        return told

    def changed(_: Any, context: DurableContext) -> Any:
        told = context.invoke("other", {"n": 1}, name="ask")
        context.wait_for_callback(never, name="approval")
        return told

    lived = Lived(main)
    lived.world.functions["other"] = Function(lambda event, _: event["n"] + 1, durable=False)
    lived.on()
    calls = len(lived.world.runs)
    found = lived.against(changed)
    assert (found.verdict, found.status, found.moves) == (Verdict.SAME, "PENDING", ())
    assert len(lived.world.runs) == calls

    def more(_: Any, context: DurableContext) -> Any:
        context.invoke("other", {"n": 1}, name="ask")
        context.invoke("other", {"n": 2}, name="ask again")

    again = Lived(lambda _, context: context.invoke("other", {"n": 1}, name="ask"))
    again.world.functions["other"] = Function(lambda event, _: event["n"] + 1, durable=False)
    (move,) = again.on().against(more).moves
    assert (move.type, move.name, move.is_new) == ("CHAINED_INVOKE", "ask again", True)


def test_branches_that_stand_still_each_tell_what_they_would_do() -> None:
    def main(_: Any, context: DurableContext) -> Any:
        def branch(ctx: DurableContext) -> Any:
            ctx.create_callback(name="asked").result()

        context.parallel([branch, branch], name="both")

    def changed(_: Any, context: DurableContext) -> Any:
        def branch(ctx: DurableContext) -> Any:
            ctx.create_callback(name="asked")
            ctx.step(never, name="more")

        context.parallel([branch, branch], name="both")

    lived = Lived(main).on()
    assert lived.against(main).verdict is Verdict.SAME
    found = lived.against(changed)
    assert (found.verdict, {move.name for move in found.moves}) == (Verdict.GOES_ON, {"more"})
    assert len(found.moves) == 2


def test_an_execution_that_was_stopped_may_be_waited_in() -> None:
    def main(_: Any, context: DurableContext) -> Any:
        context.create_callback(name="asked").result()

    lived = Lived(main).on()
    lived.world.do(lived.id, Stop(ErrorObject(error_message="enough")))
    assert lived.against(main).verdict is Verdict.SAME


def test_the_input_that_was_no_json_is_the_functions_affair() -> None:
    lived = Lived(lambda event, _: event, "{not json")
    with pytest.raises(InvalidRequest, match="The handler did not answer: JSONDecodeError"):
        lived.against(lambda event, _: event)


def test_what_a_handler_prints_is_not_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    lived = Lived(lambda event, _: event, {"a": 1}).on()

    def changed(event: Any, _: Any) -> Any:
        sys.stdout.write("debugging\n")
        return event

    assert lived.against(changed).verdict is Verdict.SAME
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "debugging\n")


def test_operations_are_told_as_the_server_tells_them() -> None:
    """Each member is read as the SDK reads what the server has written."""
    from perdure.runs.protocol import Unit

    def main(_: Any, context: DurableContext) -> Any:
        context.step(lambda _: {"a": [1]}, name="kept")
        context.wait(Duration.from_seconds(5))
        context.run_in_child_context(lambda ctx: "x" * 300_000 + ctx.step(lambda _: "y"), name="large")
        context.create_callback(name="open").result()

    state = Lived(main, {"a": 1}).on().world
    for op in state.state(next(iter(state.runs))).operations.values():
        ours = replay.told(render_runs.operation(operation(op)))
        theirs = json.loads(json.dumps(operation(op).wire(Unit.MILLISECONDS)))
        assert {name: part for name, part in ours.items() if part} == {name: part for name, part in theirs.items() if part}


# --------------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = "from aws_durable_execution_sdk_python import durable_execution\nimport functools\n"
    code += "@durable_execution\ndef main(event, context): return 1\n"
    code += "@functools.wraps(main)\ndef wrapped(event, context): return main(event, context)\n"
    code += "def plain(event, context): raise AssertionError\nnumber = 1\n"
    (tmp_path / "replayed_project.py").write_text(code)
    return tmp_path


@pytest.mark.usefixtures("project")
def test_a_handler_is_found_by_its_place() -> None:
    assert replay.load("replayed_project:main")
    assert replay.load("replayed_project:wrapped")


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("replayed_project", "does not name a handler"),
        (":main", "does not name a handler"),
        ("replayed_project:", "does not name a handler"),
        ("nowhere_at_all:main", "cannot be imported"),
        ("replayed_project:absent", "not a handler of AWS's durable SDK"),
        ("replayed_project:number", "not a handler of AWS's durable SDK"),
        ("replayed_project:plain", "not a handler of AWS's durable SDK"),
    ],
)
def test_what_is_no_handler_is_told_and_not_called(place: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        replay.load(place)


def test_times_are_milliseconds() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=123_456)
    one = public.OperationInfo(
        id="a", type=public.OperationType.WAIT, status=public.OperationStatus.STARTED, started_at=at, due_at=at
    )
    assert replay.told(one)["WaitDetails"] == {"ScheduledEndTimestamp": 1767225600123}
