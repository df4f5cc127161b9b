"""A few executions with a history, in whatever serves executions: what a reader of the documentation finds."""

from __future__ import annotations

from typing import Any

from perdure.core.ids import DEFAULT_TENANT, TenantId
from perdure.runs.protocol import (
    Action,
    CallbackOptions,
    CheckpointRequest,
    ErrorObject,
    InvocationInput,
    InvocationOutput,
    InvocationStatus,
    OperationType,
    OperationUpdate,
    StepOptions,
)
from perdure.runs.service.model import Assignment, Executions, Flight, FunctionSpec, NewExecution


class Lives:
    """Plays a worker of one tenant that serves ``greet``."""

    def __init__(self, executions: Executions, tenant_id: TenantId = DEFAULT_TENANT, function: str = "greet") -> None:
        self.executions = executions
        self.tenant_id = tenant_id
        self.function = function
        self.worker_id = ""

    async def serve(self, digest: str = "v1") -> None:
        spec = FunctionSpec(self.function, digest)
        self.worker_id = (await self.executions.register(self.tenant_id, "worker", (spec,))).id

    async def begin(self, name: str | None = None, given: str | None = '{"name": "Ada"}') -> str:
        return (await self.executions.begin(NewExecution(self.tenant_id, self.function, given, name=name))).execution_id

    async def take(self) -> Assignment:
        assignment = await self.executions.take(self.tenant_id, self.worker_id, 0)
        assert assignment is not None, "there is nothing to be done"
        return assignment

    async def record(self, assignment: Assignment, *updates: OperationUpdate) -> None:
        assert isinstance(assignment.event, InvocationInput)
        request = CheckpointRequest(checkpoint_token=assignment.event.checkpoint_token, updates=updates)
        await self.executions.checkpoint(self.tenant_id, assignment.execution_id, request)

    async def answer(self, assignment: Assignment, output: InvocationOutput) -> None:
        await self.executions.answer(self.tenant_id, Flight(assignment.execution_id, assignment.invocation), output)

    # ------------------------------------------------------------------------------------------------------------ whole lives

    async def succeed(self, name: str | None = None, result: str = '{"hello": "Ada"}') -> str:
        """One that has succeeded at once."""
        execution_id = await self.begin(name)
        await self.answer(await self.take(), InvocationOutput(status=InvocationStatus.SUCCEEDED, result=result))
        return execution_id

    async def fail(self, name: str | None = None) -> str:
        execution_id = await self.begin(name)
        error = ErrorObject(error_type="ValueError", error_message="no such person", stack_trace=("main.py, line 7",))
        await self.answer(await self.take(), InvocationOutput(status=InvocationStatus.FAILED, error=error))
        return execution_id

    async def ask(self, name: str | None = None, timeout_s: int = 0, heartbeat_s: int = 0, operation_id: str = "c-1") -> str:
        """One that waits for a callback named ``approval``."""
        execution_id, assignment = await self.begin(name), await self.take()
        options = CallbackOptions(timeout_seconds=timeout_s, heartbeat_timeout_seconds=heartbeat_s)
        kind: dict[str, Any] = {"type": OperationType.CALLBACK, "sub_type": "Callback", "callback_options": options}
        asked = OperationUpdate(id=operation_id, action=Action.START, name="approval", **kind)
        await self.record(assignment, asked)
        await self.answer(assignment, InvocationOutput(status=InvocationStatus.PENDING))
        return execution_id

    async def retry_within(self, name: str | None = None) -> str:
        """One with a context, a step below it that is done, and one that waits for its second attempt."""
        execution_id, assignment = await self.begin(name), await self.take()
        context = OperationUpdate(id="m", type=OperationType.CONTEXT, action=Action.START, name="people", sub_type="Map")
        done: dict[str, Any] = {"id": "m-1", "type": OperationType.STEP, "parent_id": "m", "name": "look", "sub_type": "Step"}
        flaky: dict[str, Any] = {"id": "m-2", "type": OperationType.STEP, "parent_id": "m", "name": "write", "sub_type": "Step"}
        error = ErrorObject(error_type="OSError", error_message="no paper")
        await self.record(
            assignment,
            context,
            OperationUpdate(**done, action=Action.START),
            OperationUpdate(**done, action=Action.SUCCEED, payload='["Ada"]'),
            OperationUpdate(**flaky, action=Action.START),
            OperationUpdate(**flaky, action=Action.RETRY, error=error, step_options=StepOptions(next_attempt_delay_seconds=3600)),
        )
        await self.answer(assignment, InvocationOutput(status=InvocationStatus.PENDING))
        return execution_id


async def furnish(executions: Executions) -> None:
    """``order-1`` has succeeded, ``review-1`` waits for somebody; both are of ``greet``, which a worker serves."""
    lives = Lives(executions)
    await lives.serve()
    await lives.succeed("order-1")
    await lives.ask("review-1")
