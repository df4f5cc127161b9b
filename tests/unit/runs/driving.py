"""One execution and a clock, for tests that go command by command."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.runs.engine import Answer, Checkpoint, Command, Decision, Invoke, Op, Reason, Rules, State, standing
from perdure.runs.protocol import (
    Action,
    CallbackOptions,
    ChainedInvokeOptions,
    ErrorObject,
    InvocationOutput,
    InvocationStatus,
    OperationType,
    OperationUpdate,
    StepOptions,
    WaitOptions,
)
from tests.fakes.executions import Executions

DAY = datetime(2026, 3, 1, tzinfo=UTC)
ERROR = ErrorObject(error_type="Broken", error_message="it broke")


def update(op_id: str, kind: OperationType, action: Action, **parts: Any) -> OperationUpdate:
    return OperationUpdate(id=op_id, type=kind, action=action, **parts)


def step(op_id: str, action: Action = Action.START, **parts: Any) -> OperationUpdate:
    if action is Action.RETRY:
        parts.setdefault("step_options", StepOptions(next_attempt_delay_seconds=10))
    return update(op_id, OperationType.STEP, action, **parts)


def wait(op_id: str, seconds: int = 60, action: Action = Action.START, **parts: Any) -> OperationUpdate:
    return update(op_id, OperationType.WAIT, action, wait_options=WaitOptions(wait_seconds=seconds), **parts)


def callback(op_id: str, timeout_s: int = 0, heartbeat_s: int = 0) -> OperationUpdate:
    options = CallbackOptions(timeout_seconds=timeout_s, heartbeat_timeout_seconds=heartbeat_s)
    return update(op_id, OperationType.CALLBACK, Action.START, callback_options=options)


def context(op_id: str, action: Action = Action.START, **parts: Any) -> OperationUpdate:
    return update(op_id, OperationType.CONTEXT, action, **parts)


def invoke(op_id: str, function: str = "other", **parts: Any) -> OperationUpdate:
    options = ChainedInvokeOptions(function_name=function)
    return update(op_id, OperationType.CHAINED_INVOKE, Action.START, chained_invoke_options=options, **parts)


def execution(action: Action, **parts: Any) -> OperationUpdate:
    return update("execution-result-1", OperationType.EXECUTION, action, **parts)


class Driver:
    """Commands in order. ``token`` is what the worker in flight was given last."""

    def __init__(self, *, rules: Rules | None = None, **start: Any) -> None:
        self.world = Executions(DAY, rules or Rules())
        self.id = self.world.start("main", {"n": 1}, **start)
        self.token = ""
        self.count = 0

    @property
    def state(self) -> State:
        return self.world.state(self.id)

    def op(self, op_id: str) -> Op:
        return self.state.operations[op_id]

    def kinds(self) -> list[str]:
        return [entry.fact.kind for entry in self.world.runs[self.id].history]

    def pass_time(self, seconds: float) -> None:
        self.world.now += timedelta(seconds=seconds)

    def do(self, command: Command) -> Decision:
        return self.world.do(self.id, command)

    def invoke(self, digest: str | None = "v1") -> Decision:
        decision = self.do(Invoke(f"request-{self.state.invocations + 1}", digest))
        assert decision.reply is not None and decision.reply.token is not None
        self.token = decision.reply.token
        return decision

    def send(self, *updates: OperationUpdate, refused: dict[str, ErrorObject] | None = None) -> Decision:
        self.count += 1
        decision = self.do(Checkpoint(self.token, updates, f"client-{self.count}", refused or {}))
        assert decision.reply is not None
        self.token = decision.reply.token or self.token
        return decision

    def answer(self, status: InvocationStatus = InvocationStatus.PENDING, **parts: Any) -> Decision:
        return self.do(Answer(self.state.invocations, InvocationOutput(status=status, **parts)))

    def ids(self, decision: Decision) -> list[str]:
        assert decision.reply is not None
        return [op.id for op in decision.reply.operations]


def reason(driver: Driver) -> Reason:
    return standing(driver.state).reason


def the_callback(driver: Driver, op_id: str = "c") -> str:
    callback_id = driver.op(op_id).callback_id
    assert callback_id is not None
    return callback_id


def waiting(*, rules: Rules | None = None) -> Driver:
    """It waits for a callback, and nothing is in flight."""
    driver = Driver(rules=rules)
    driver.invoke()
    driver.send(callback("c"))
    driver.answer()
    return driver
