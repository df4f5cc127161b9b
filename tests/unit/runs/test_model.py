"""Random lives of an execution against a model that knows nothing of histories, tokens or timers: the program itself, run
straight through in a world where nothing breaks. Whatever is killed, lost, repeated, late, paused or set back on the way, the
execution comes to the same result, and no effect happens more often than its step allows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from perdure.core.errors import CallbackClosed, StaleCheckpoint, StaleInvocation
from perdure.runs.engine import (
    Answer,
    Checkpoint,
    CompleteCallback,
    CompleteInvoke,
    Fail,
    Failure,
    Heartbeat,
    Invoke,
    Op,
    Pause,
    Reason,
    Resume,
    Rules,
    StartChild,
    Tick,
    children_to_start,
    open_callbacks,
)
from perdure.runs.protocol import (
    Action,
    CallbackOptions,
    ChainedInvokeOptions,
    ErrorObject,
    ExecutionStatus,
    InvocationOutput,
    InvocationStatus,
    OperationStatus,
    OperationType,
    OperationUpdate,
    StepOptions,
    WaitOptions,
)
from tests.fakes.executions import Executions

# ------------------------------------------------------------------------------------------------------------- programs and model


@dataclass(frozen=True)
class Step:
    fails: int  # so many attempts fail before one succeeds; more than RETRIES: the step fails
    once: bool


@dataclass(frozen=True)
class Wait:
    seconds: int


@dataclass(frozen=True)
class Callback:
    timeout_s: int  # 0: somebody completes it; else nobody does


@dataclass(frozen=True)
class Call:
    pass


@dataclass(frozen=True)
class Branches:
    of: tuple[tuple[Any, ...], ...]


RETRIES = 2
DELAY_S = 7
Program = tuple[Any, ...]
primitives = st.one_of(
    st.builds(Step, st.integers(0, RETRIES + 1), st.booleans()),
    st.builds(Wait, st.integers(1, 100)),
    st.builds(Callback, st.sampled_from([0, 0, 30])),
    st.just(Call()),
)
branches = st.builds(Branches, st.lists(st.lists(primitives, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple))
programs = st.lists(st.one_of(primitives, branches), min_size=1, max_size=5).map(tuple)


def model(program: Program) -> list[Any]:
    """What it comes to. An at-most-once step that is cut off loses an attempt, so of its outcome it is known only that it has
    one."""
    outcome: list[Any] = []
    for part in program:
        match part:
            case Step(once=True):
                outcome.append({"ok", "failed"})
            case Step(fails=fails):
                outcome.append("ok" if fails <= RETRIES else "failed")
            case Wait():
                outcome.append("waited")
            case Callback(timeout_s=timeout_s):
                outcome.append("timed out" if timeout_s else "approved")
            case Call():
                outcome.append("called")
            case Branches(of=of):
                outcome.append([model(branch) for branch in of])
    return outcome


def agrees(result: Any, expected: Any) -> bool:
    if isinstance(expected, set):
        return result in expected
    if isinstance(expected, list):
        return len(result) == len(expected) and all(agrees(a, b) for a, b in zip(result, expected, strict=True))
    return bool(result == expected)


# ----------------------------------------------------------------------------------------------------------------- a small worker


class Suspended(Exception):
    pass


class Stopped(Exception):
    """It was told to stop: a checkpoint was answered without a token."""


class Killed(Exception):
    pass


class Mishap(StrEnum):
    """What becomes of a checkpoint."""

    NONE = "none"
    LOST = "lost"  # recorded, but its answer never came: it is sent again
    KILLED_BEFORE = "killed before"
    KILLED_AFTER = "killed after"
    GIVEN_UP = "given up"  # the server has given the worker up, which does not know
    STALE = "stale"  # an old checkpoint arrives once more


@dataclass
class Life:
    """The world around one execution, and what really happened in it."""

    data: st.DataObject
    calm: bool = False
    world: Executions = field(default_factory=lambda: Executions(datetime(2026, 1, 1, tzinfo=UTC)))
    effects: Counter[tuple[str, int]] = field(default_factory=Counter)
    once: set[str] = field(default_factory=set)
    peak: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    begun: dict[str, tuple[datetime, int]] = field(default_factory=dict)  # waits: when, and for how long

    def __post_init__(self) -> None:
        self.world.rules = Rules(attempts={}, recheck_s=60)
        self.id = self.world.start("main", [])

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def pass_time(self, seconds: float) -> None:
        self.world.now += timedelta(seconds=seconds)
        self.peak = max(self.peak, self.world.now)

    def mishap(self) -> Mishap:
        if self.calm:
            return Mishap.NONE
        return self.draw(st.sampled_from([Mishap.NONE] * 6 + list(Mishap)))


class Worker:
    """Runs a program by replay, as an SDK does, and reports what it does."""

    def __init__(self, life: Life) -> None:
        self.life = life
        decision = life.world.do(life.id, Invoke("request", "v1"))
        assert decision.reply is not None and decision.reply.token is not None
        self.number, self.token = decision.state.invocations, decision.reply.token
        self.ops: dict[str, Op] = {op.id: op for op in decision.reply.operations}
        self.sent: list[Checkpoint] = []

    def live(self, program: Program) -> None:
        life = self.life
        try:
            result = self.run(program, "r")
            output = InvocationOutput(status=InvocationStatus.SUCCEEDED, result=json.dumps(result))
        except (Suspended, Stopped):
            output = InvocationOutput(status=InvocationStatus.PENDING)
        except Killed:
            with suppress(StaleInvocation):
                life.world.do(life.id, Fail(self.number, Failure.LOST))
            return
        except StaleCheckpoint:
            with pytest.raises(StaleInvocation):
                life.world.do(life.id, Fail(self.number, Failure.RAISED))
            return
        self.look_around()
        with suppress(StaleInvocation):
            life.world.do(life.id, Answer(self.number, output))

    def run(self, program: Program, path: str) -> list[Any]:
        return [self.part(part, f"{path}-{index}") for index, part in enumerate(program)]

    def part(self, part: Any, op_id: str) -> Any:
        match part:
            case Step():
                return self.step(part, op_id)
            case Branches(of=of):
                return self.branches(of, op_id)
            case Wait(seconds=seconds):
                if op_id not in self.ops:
                    self.send(update(op_id, OperationType.WAIT, Action.START, wait_options=WaitOptions(wait_seconds=seconds)))
                self.ended(op_id)
                since, long = self.life.begun[op_id]
                assert self.life.peak >= since + timedelta(seconds=long), "no wait is early"
                return "waited"
            case Callback(timeout_s=timeout_s):
                if op_id not in self.ops:
                    options = CallbackOptions(timeout_seconds=timeout_s, heartbeat_timeout_seconds=0)
                    self.send(update(op_id, OperationType.CALLBACK, Action.START, callback_options=options))
                return "timed out" if self.ended(op_id).status is OperationStatus.TIMED_OUT else self.ops[op_id].payload
            case _:
                if op_id not in self.ops:
                    options_ = ChainedInvokeOptions(function_name="plain")
                    self.send(update(op_id, OperationType.CHAINED_INVOKE, Action.START, chained_invoke_options=options_))
                return self.ended(op_id).payload

    def ended(self, op_id: str) -> Op:
        op = self.ops[op_id]
        if not op.is_closed:
            raise Suspended
        return op

    def step(self, step: Step, op_id: str) -> str:
        op = self.ops.get(op_id)
        if step.once:
            self.life.once.add(op_id)
        if op is not None and op.is_closed:
            return "ok" if op.status is OperationStatus.SUCCEEDED else "failed"
        if op is not None and op.status is OperationStatus.PENDING:
            raise Suspended
        attempt = (op.attempt if op else 0) + 1
        if op is not None and op.status is OperationStatus.STARTED and step.once:
            return self.step_failed(op_id, attempt, "interrupted")
        if op is None or op.status is OperationStatus.READY:
            self.send(update(op_id, OperationType.STEP, Action.START))
        self.life.effects[op_id, attempt] += 1
        if attempt <= step.fails:
            return self.step_failed(op_id, attempt, "failed")
        self.send(update(op_id, OperationType.STEP, Action.SUCCEED, payload="ok"))
        return "ok"

    def step_failed(self, op_id: str, attempt: int, why: str) -> str:
        error = ErrorObject(error_type=why)
        if attempt > RETRIES:
            self.send(update(op_id, OperationType.STEP, Action.FAIL, error=error))
            return "failed"
        options = StepOptions(next_attempt_delay_seconds=DELAY_S)
        self.send(update(op_id, OperationType.STEP, Action.RETRY, error=error, step_options=options))
        raise Suspended

    def branches(self, of: tuple[Program, ...], op_id: str) -> list[Any]:
        """One after another; one that waits does not hold the others."""
        op = self.ops.get(op_id)
        if op is not None and op.is_closed:
            return json.loads(op.payload or "")
        if op is None:
            self.send(update(op_id, OperationType.CONTEXT, Action.START))
        results: list[Any] = []
        is_waiting = False
        for index, branch in enumerate(of):
            try:
                results.append(self.run(branch, f"{op_id}-{index}"))
            except Suspended:
                is_waiting = True
        if is_waiting:
            raise Suspended
        self.send(update(op_id, OperationType.CONTEXT, Action.SUCCEED, payload=json.dumps(results)))
        return results

    # ----------------------------------------------------------------------------------------------------------------- the wire

    def send(self, *updates: OperationUpdate) -> None:
        """Raises Killed, Stopped, StaleCheckpoint."""
        life, mishap = self.life, self.life.mishap()
        self.look_around()
        request = Checkpoint(self.token, updates, client_token=f"{self.number}-{len(self.sent)}")
        match mishap:
            case Mishap.KILLED_BEFORE:
                raise Killed
            case Mishap.GIVEN_UP:
                self.be_given_up()
                with pytest.raises(StaleCheckpoint) as caught:
                    life.world.do(life.id, request)
                raise caught.value
            case Mishap.STALE if self.sent:
                with pytest.raises(StaleCheckpoint):
                    life.world.do(life.id, replace(life.draw(st.sampled_from(self.sent)), client_token="other"))
            case _:
                pass
        self.sent.append(request)
        decision = life.world.do(life.id, request)
        for item in updates:
            if item.wait_options is not None:
                life.begun[item.id] = (life.world.now, item.wait_options.wait_seconds)
        if mishap is Mishap.KILLED_AFTER:
            raise Killed
        if mishap is Mishap.LOST:
            self.look_around()
            decision = life.world.do(life.id, request)
            assert not [entry for entry in decision.entries if entry.fact.kind == "checkpointed"], "it is recorded once"
        reply = decision.reply
        assert reply is not None
        if reply.token is None:
            raise Stopped
        self.token = reply.token
        self.ops.update({op.id: op for op in reply.operations})

    def be_given_up(self) -> None:
        life = self.life
        with suppress(StaleInvocation):
            life.world.do(life.id, Fail(self.number, Failure.LOST))
        now_standing = life.world.standing(life.id)
        if now_standing.reason is Reason.INVOKE and life.draw(st.booleans()):
            life.world.now = max(life.world.now, now_standing.invoke_at or life.world.now)
            life.peak = max(life.peak, life.world.now)
            other = Worker(life)
            if life.draw(st.booleans()):  # else it is still in flight when this one writes
                life.world.do(life.id, Fail(other.number, Failure.RETURNED))

    def look_around(self) -> None:
        """What the world does while the function runs."""
        if not self.life.calm and self.life.draw(st.integers(0, 3)) == 0:
            act(self.life)


def update(op_id: str, kind: OperationType, action: Action, **parts: Any) -> OperationUpdate:
    parent_id = op_id.rsplit("-", 2)[0] if op_id.count("-") > 1 else None
    return OperationUpdate(id=op_id, type=kind, action=action, parent_id=parent_id, **parts)


# ---------------------------------------------------------------------------------------------------------------------- the world


def act(life: Life) -> None:
    """Something happens outside."""
    world = life.world
    state = world.state(life.id)
    match life.draw(st.sampled_from(["tick", "callback", "child", "pause", "resume", "back", "beat"])):
        case "tick":
            life.pass_time(life.draw(st.integers(0, 200)))
            world.do(life.id, Tick())
        case "callback":
            complete_some(life)
        case "child":
            for child in children_to_start(state):
                finish(life, child)
        case "pause" if not state.has_ended:
            world.do(life.id, Pause())
        case "resume" if not state.has_ended:
            world.do(life.id, Resume())
        case "back":
            life.pass_time(-life.draw(st.integers(1, 1000)))
        case "beat":
            for op in list(open_callbacks(state.operations.values())):
                with suppress(CallbackClosed):
                    world.do(life.id, Heartbeat(op.callback_id or ""))
        case _:
            pass


def complete_some(life: Life) -> None:
    """People complete what has no timeout, some of them twice."""
    for op in list(open_callbacks(life.world.state(life.id).operations.values())):
        if op.due is None and op.callback_id is not None:
            life.world.do(life.id, CompleteCallback(op.callback_id, "approved"))
            with pytest.raises(CallbackClosed):
                life.world.do(life.id, CompleteCallback(op.callback_id, "again"))


def finish(life: Life, child: StartChild) -> None:
    outcome = CompleteInvoke(child.operation_id, ExecutionStatus.SUCCEEDED, "called")
    life.world.do(life.id, outcome)
    life.world.do(life.id, outcome)  # told twice


def turns(life: Life, program: Program) -> Iterator[None]:
    """Whatever its standing asks for, until it has ended."""
    while True:
        now_standing = life.world.standing(life.id)
        match now_standing.reason:
            case Reason.ENDED:
                return
            case Reason.INVOKE:
                late = (now_standing.invoke_at - life.world.now).total_seconds() if now_standing.invoke_at else 0
                life.pass_time(max(0.0, late))
                Worker(life).live(program)
            case Reason.OPERATOR:
                life.world.do(life.id, Resume())
            case Reason.ANSWER:
                life.world.do(life.id, Fail(life.world.state(life.id).invocations, Failure.RETURNED))
            case Reason.TIMER | Reason.WORLD:
                complete_some(life)
                for child in children_to_start(life.world.state(life.id)):
                    finish(life, child)
                if now_standing.timer_at is not None:
                    life.pass_time(max(0.0, (now_standing.timer_at - life.world.now).total_seconds()))
                    life.world.do(life.id, Tick())
            case reason:
                raise AssertionError(f"it stands at {reason}")
        yield


def live(program: Program, data: st.DataObject) -> None:
    life = Life(data)
    for count, _ in enumerate(turns(life, program)):
        life.calm = life.calm or count > 15
        assert count < 300, "it does not come to an end"
    state = life.world.state(life.id)
    assert state.status is ExecutionStatus.SUCCEEDED
    assert agrees(json.loads(state.result or ""), model(program))
    assert all(count == 1 for (op_id, _), count in life.effects.items() if op_id in life.once), "at most once in an attempt"
    history = life.world.runs[life.id].history
    assert [entry.seq for entry in history] == list(range(1, len(history) + 1))
    assert [entry.at for entry in history] == sorted(entry.at for entry in history)
    assert sum(entry.fact.kind == "ended" for entry in history) == 1
    life.world.check(life.id)
    life.world.do(life.id, Tick())
    assert life.world.runs[life.id].history == history, "what has ended stays as it is"


ANY = settings(
    deadline=None, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck)
)


@settings(ANY, max_examples=60)
@given(program=programs, data=st.data())
def test_whatever_happens_it_comes_to_what_the_program_says(program: Program, data: st.DataObject) -> None:
    """(durable: rules 1 to 4, 9, 10; faults 1, 4, 7, 18, 19, 20)"""
    live(program, data)


@pytest.mark.long
@settings(ANY, max_examples=500)
@given(program=programs, data=st.data())
def test_five_hundred_lives_come_to_what_their_programs_say(program: Program, data: st.DataObject) -> None:
    live(program, data)
