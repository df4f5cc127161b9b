"""A durable function that a test plays: what AWS's SDK would do with what it is told. One step that may run again, one that must
not, a wait, a callback, a chained invoke, and a last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from perdure.runs.protocol import (
    Action,
    CheckpointAnswer,
    CheckpointRequest,
    InvocationOutput,
    InvocationStatus,
    Operation,
    OperationStatus,
    OperationUpdate,
)
from tests.integration.runs.stage import asks, invokes, update, waits

WAIT_S = 60
PENDING = InvocationOutput(status=InvocationStatus.PENDING)


class World(Protocol):
    """Where it is played: who takes its checkpoints, and who sees what it does."""

    async def checkpoint(self, execution_id: str, request: CheckpointRequest) -> CheckpointAnswer: ...

    def effect(self, execution_id: str, what: str) -> None:
        """A step does what it is there for. Of one that must run once, each attempt has a name of its own."""
        ...

    def done(self, execution_id: str, step: str) -> None:
        """The function knows that a step's end is recorded."""
        ...

    def waits(self, execution_id: str) -> None:
        """It asks to be woken in ``WAIT_S``."""
        ...

    def woken(self, execution_id: str) -> None: ...


@dataclass
class Playing:
    """One invocation. ``may_be_stopped``: its child, by somebody outside."""

    world: World
    execution_id: str
    token: str
    may_be_stopped: bool = False
    operations: dict[str, Operation] = field(default_factory=dict)
    calls: int = 0

    def know(self, operations: Sequence[Operation]) -> None:
        self.operations |= {op.id: op for op in operations}

    async def say(self, *updates: OperationUpdate) -> None:
        self.calls += 1
        request = CheckpointRequest(checkpoint_token=self.token, updates=updates, client_token=f"c{self.calls}")
        answer = await self.world.checkpoint(self.execution_id, request)
        assert answer.checkpoint_token is not None, "nobody has paused it"
        self.token = answer.checkpoint_token
        self.know(answer.new_execution_state.operations)

    def status(self, op: str) -> OperationStatus | None:
        return self.operations[op].status if op in self.operations else None

    async def play(self) -> InvocationOutput:
        await self._step("first")
        if not await self._once("once"):
            return PENDING
        for op, start in (("wait", waits(WAIT_S)), ("ask", asks()), ("invoke", invokes("child", op="invoke"))):
            if self.status(op) is None:
                if op == "wait":
                    self.world.waits(self.execution_id)
                await self.say(start)
            if self.status(op) is OperationStatus.STARTED:
                return PENDING
            is_stopped = self.may_be_stopped and self.status(op) is OperationStatus.STOPPED
            assert is_stopped or self.status(op) is OperationStatus.SUCCEEDED
            if op == "wait":
                self.world.woken(self.execution_id)
        await self._step("last")
        return InvocationOutput(status=InvocationStatus.SUCCEEDED, result='"out"')

    async def _step(self, op: str) -> None:
        """At least once."""
        if self.status(op) is None:
            await self.say(update("STEP", "START", op))
        if self.status(op) is OperationStatus.STARTED:
            self.world.effect(self.execution_id, op)
            await self.say(update("STEP", "SUCCEED", op, payload='"done"'))
        self.world.done(self.execution_id, op)

    async def _once(self, op: str) -> bool:
        """At most once per attempt: one that was begun by somebody who is gone is not begun again."""
        status = self.status(op)
        if status is OperationStatus.STARTED:
            options = {"NextAttemptDelaySeconds": 5}
            await self.say(
                OperationUpdate.model_validate({"Id": op, "Type": "STEP", "Action": Action.RETRY, "StepOptions": options})
            )
            return False
        if status is OperationStatus.PENDING:
            return False
        if status is not OperationStatus.SUCCEEDED:
            await self.say(update("STEP", "START", op))
            attempt = self.operations[op].step_details.attempt if self.operations[op].step_details else 0  # type: ignore[union-attr]
            self.world.effect(self.execution_id, f"{op} {attempt}")
            await self.say(update("STEP", "SUCCEED", op, payload='"done"'))
        self.world.done(self.execution_id, op)
        return True
