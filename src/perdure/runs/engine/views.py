"""What an execution looks like from outside: operations, pages of them, its description, its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.runs.engine.commands import Reply
from perdure.runs.engine.rules import Rules
from perdure.runs.engine.state import Op, State
from perdure.runs.protocol import (
    CallbackDetails,
    ChainedInvokeDetails,
    CheckpointAnswer,
    ContextDetails,
    DurableConfig,
    ExecutionDetails,
    ExecutionInfo,
    InvocationInput,
    Operation,
    OperationPage,
    OperationType,
    PauseDetails,
    StepDetails,
    WaitDetails,
    marker_of,
    parse_arn,
    parse_marker,
    size_bytes,
)


def operation(op: Op) -> Operation:
    """One operation as a function is told of it."""
    result, error = op.payload, op.error
    told = Operation(
        id=op.id,
        type=op.type,
        status=op.status,
        start_timestamp=op.started_at,
        end_timestamp=op.ended_at,
        parent_id=op.parent_id,
        name=op.name,
        sub_type=op.sub_type,
    )
    match op.type:
        case OperationType.EXECUTION:
            details: dict[str, object] = {"execution_details": ExecutionDetails(input_payload=op.payload)}
        case OperationType.CONTEXT:
            context = ContextDetails(replay_children=op.replay_children or None, result=result, error=error)
            details = {"context_details": context}
        case OperationType.STEP:
            step = StepDetails(attempt=op.attempt, next_attempt_timestamp=op.due, result=result, error=error)
            details = {"step_details": step}
        case OperationType.WAIT:
            details = {"wait_details": WaitDetails(scheduled_end_timestamp=op.due)}
        case OperationType.CALLBACK:
            details = {"callback_details": CallbackDetails(callback_id=op.callback_id, result=result, error=error)}
        case OperationType.CHAINED_INVOKE:
            details = {"chained_invoke_details": ChainedInvokeDetails(result=result, error=error)}
    return told.model_copy(update=details)


def page(state: State, marker: str | None, rules: Rules, max_items: int | None = None) -> OperationPage:
    """The operations from a marker on, in order of their creation, as many as a page may hold but one at least.

    What is below a closed context is left out: the context's own result stands for it, unless it says that its children are
    needed to rebuild it (``replay_children``). Raises InvalidRequest for a marker that is not one.
    """
    ops = list(state.operations.values())
    most = min(max_items or rules.page_items_max, rules.page_items_max)
    chosen: list[Operation] = []
    size, hidden = 0, _hidden(state)
    for position in range(parse_marker(marker), len(ops)):
        op = ops[position]
        if op.id in hidden:
            continue
        cost = size_bytes(op.payload) + (op.error.size_bytes if op.error else 0)
        if chosen and (len(chosen) >= most or size + cost > rules.page_bytes_max):
            return OperationPage(operations=tuple(chosen), next_marker=marker_of(position))
        chosen.append(operation(op))
        size += cost
    return OperationPage(operations=tuple(chosen))


def _hidden(state: State) -> set[str]:
    """Whatever is below a context whose result stands for it. A parent is always older than its children."""
    hidden: set[str] = set()
    for op in state.operations.values():
        parent = state.operations.get(op.parent_id) if op.parent_id else None
        if parent is not None and (parent.id in hidden or (parent.is_closed and not parent.replay_children)):
            hidden.add(op.id)
    return hidden


def invocation_input(state: State, reply: Reply, rules: Rules) -> InvocationInput:
    """The event of the invocation that ``reply`` has begun; the function fetches further pages itself."""
    assert reply.token is not None, "an invocation begins with a token"
    return InvocationInput(
        durable_execution_arn=state.started.arn,
        checkpoint_token=reply.token,
        initial_execution_state=page(state, None, rules),
        updated_operation_ids=reply.updated_ids,
    )


def checkpoint_answer(reply: Reply) -> CheckpointAnswer:
    told = OperationPage(operations=tuple(operation(op) for op in reply.operations))
    return CheckpointAnswer(checkpoint_token=reply.token, new_execution_state=told)


def description(state: State, *, with_data: bool = True) -> ExecutionInfo:
    """The answer of GetDurableExecution."""
    started, pause = state.started, state.pause
    arn = parse_arn(started.arn)
    return ExecutionInfo(
        durable_execution_arn=started.arn,
        durable_execution_name=started.name,
        function_arn=arn.function_arn,
        version=arn.version,
        start_timestamp=state.started_at,
        status=state.status,
        end_timestamp=state.ended_at,
        input_payload=started.input if with_data else None,
        result=state.result if with_data else None,
        error=state.error if with_data else None,
        execution_data_included=with_data,
        durable_config=DurableConfig(execution_timeout=started.timeout_s) if started.timeout_s else None,
        expected_execution_timeout_timestamp=state.running_deadline,
        pause_details=None
        if pause is None
        else PauseDetails(
            pause_request_timestamp=pause.at,
            execution_timeout_paused=pause.timeout_paused,
            reason=pause.reason if with_data else None,
        ),
    )


def open_callbacks(ops: Iterable[Op]) -> Sequence[Op]:
    """Callbacks that somebody outside may still complete."""
    return [op for op in ops if op.type is OperationType.CALLBACK and not op.is_closed]
