"""What a checkpoint makes of an execution: the fence, the batch, and what the function is told in return. Pure."""

from __future__ import annotations

from perdure.runs.engine import facts
from perdure.runs.engine.batch import check_batch, record
from perdure.runs.engine.commands import Checkpoint, Reply, StartChild
from perdure.runs.engine.deciding import Draft, share_used, watch_limits, will_pass_limit
from perdure.runs.engine.state import Invocation, Op, State
from perdure.runs.protocol import (
    Action,
    CheckpointToken,
    ExecutionStatus,
    OperationType,
    OperationUpdate,
    parse_token,
    stale_token,
)


def current_token(state: State) -> str:
    """The one token that is good now."""
    return str(CheckpointToken(state.id, state.invocations, state.number))


def checkpoint(draft: Draft, command: Checkpoint) -> None:
    """Raises StaleCheckpoint, InvalidRequest or PayloadTooLarge; then nothing of the batch is recorded.

    A batch without updates asks what is new. It leaves no trace in the history unless a timer was due, so a function that asks
    every second does not fill it; its token stays good.
    """
    if (reply := _repeated(draft.state, command)) is not None:
        draft.reply = reply
        return
    invocation = require_token(draft.state, command.token)
    since = invocation.told
    check_batch(draft.state, command.updates, draft.rules)
    share_before = share_used(draft.state, draft.rules)
    if command.updates or draft.state.is_paused:
        _record(draft, command)
    if _end(draft, command.updates):
        draft.reply = Reply(None)
        return
    watch_limits(draft, share_before)
    if draft.state.is_paused:
        draft.reply = Reply(None)
        return
    draft.fire(told=True)
    draft.reply = Reply(current_token(draft.state), tuple(draft.state.touched_since(since)))


def require_token(state: State, text: str) -> Invocation:
    """The invocation in flight, if the token is of it and of its last checkpoint. Raises StaleCheckpoint."""
    token, invocation = parse_token(text), state.invocation
    if token.execution_id != state.id:
        raise stale_token("it is of another execution")
    if state.has_ended:
        raise stale_token("the execution has ended")
    if invocation is None or token.invocation != invocation.number:
        raise stale_token("its invocation is over")
    if token.number != state.number:
        raise stale_token("another checkpoint has been recorded since")
    if invocation.is_withheld:
        raise stale_token("this invocation was told to stop")
    return invocation


def _repeated(state: State, command: Checkpoint) -> Reply | None:
    """The answer to a checkpoint that was recorded before and comes again because its answer was lost; None: it is a new one."""
    last = state.last
    if last is None or command.client_token is None or command.client_token != last.client_token:
        return None
    if command.token != str(CheckpointToken(state.id, last.invocation, last.number)):
        return None
    if state.has_ended or last.is_withheld:
        return Reply(None)
    if state.invocation is None:
        raise stale_token("its invocation is over")
    return Reply(current_token(state), tuple(state.touched_since(last.since)))


def _record(draft: Draft, command: Checkpoint) -> None:
    state = draft.state
    invocation = state.invocation
    assert invocation is not None, "the token was of one"
    records = tuple(record(state, update, draft.now, command.refused) for update in command.updates)
    fact = facts.Checkpointed(
        invocation=invocation.number,
        number=state.number + 1,
        records=records,
        client_token=command.client_token,
        withheld=state.is_paused or will_pass_limit(state, records, draft.rules),
    )
    draft.add(fact)
    draft.todo += [start_of(state, state.operations[item.update.id]) for item in records if _starts(item)]


def _starts(item: facts.Recorded) -> bool:
    return item.update.type is OperationType.CHAINED_INVOKE and item.refused is None


def start_of(state: State, op: Op) -> StartChild:
    """What starts the function of a chained invoke. A function without input is given an empty object, as Invoke does."""
    assert op.start is not None and op.start.update.chained_invoke_options is not None, "checked before"
    update, options = op.start.update, op.start.update.chained_invoke_options
    payload = "{}" if update.payload is None else update.payload
    key = f"{state.id}-{op.position}"
    return StartChild(op.id, options.function_name, key, payload, options.tenant_id, options.x_amzn_trace_id)


def children_to_start(state: State) -> list[StartChild]:
    """Chained invokes that are open: what a server that died after its commit may not have started. Twice is harmless."""
    if state.has_ended:
        return []
    ops = [state.operations[operation_id] for operation_id in state.waiting]
    chained = sorted((op for op in ops if op.type is OperationType.CHAINED_INVOKE), key=lambda op: op.position)
    return [start_of(state, op) for op in chained]


def _end(draft: Draft, updates: tuple[OperationUpdate, ...]) -> bool:
    """An update of the execution itself is its end."""
    last = updates[-1] if updates else None
    if last is None or last.type is not OperationType.EXECUTION:
        return False
    if last.action is Action.SUCCEED:
        draft.end(ExecutionStatus.SUCCEEDED, result=last.payload)
    else:
        draft.end(ExecutionStatus.FAILED, error=last.error)
    return True
