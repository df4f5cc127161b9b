"""What a service in memory says of one execution. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from perdure.core.errors import InvalidRequest
from perdure.runs import engine
from perdure.runs.protocol import ExecutionName, ExecutionSummary, ExecutionTimeout
from perdure.runs.service.model import Insight, ListQuery, NewExecution, OpenCallback
from tests.fakes.run_history import Run

_NAME: TypeAdapter[str] = TypeAdapter(ExecutionName)
_TIMEOUT: TypeAdapter[int] = TypeAdapter(ExecutionTimeout)


def insight(state: engine.State, new: NewExecution) -> Insight:
    return Insight(
        standing=engine.standing(state),
        code=state.code,
        priority=new.priority,
        key=new.key,
        invocations=state.invocations,
        operations=len(state.operations),
        history_bytes=state.history_bytes,
        pause=state.pause.cause if state.pause else None,
        last_error=state.last_error,
        born=state.born,
        digest=state.digest,
    )


def fits(run: Run, query: ListQuery) -> bool:
    state = run.state
    return (
        (query.function is None or state.started.function == query.function)
        and (not query.statuses or state.status in query.statuses)
        and (query.name is None or state.started.name == query.name)
        and (query.started_after is None or state.started_at >= query.started_after)
        and (query.started_before is None or state.started_at <= query.started_before)
    )


def summary(run: Run) -> ExecutionSummary:
    told = engine.description(run.state, with_data=False)
    return ExecutionSummary(**{name: getattr(told, name) for name in ExecutionSummary.model_fields})


def open_callback(run: Run, op: engine.Op) -> OpenCallback:
    started = run.state.started
    return OpenCallback(
        callback_id=op.callback_id or "",
        execution_id=run.state.id,
        arn=started.arn,
        function=started.function,
        operation_id=op.id,
        name=op.name,
        started_at=op.started_at,
        due=op.due,
        heartbeat_due=op.heartbeat_due,
    )


def check(new: NewExecution) -> None:
    """Raises InvalidRequest for what no execution can have."""
    checks: list[tuple[str, TypeAdapter[Any], Any]] = [("name", _NAME, new.name), ("timeout_s", _TIMEOUT, new.timeout_s)]
    for what, adapter, value in checks:
        try:
            if value is not None:
                adapter.validate_python(value)
        except ValidationError as error:
            raise InvalidRequest(f"{what}: {error.errors()[0]['msg']}.") from None
