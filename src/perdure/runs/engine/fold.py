"""``fold``: from a history to the state. It reads facts, nothing else, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from perdure.runs.engine import facts
from perdure.runs.engine.facts import Entry, Fact, Recorded, Started
from perdure.runs.engine.state import Invocation, LastCheckpoint, Op, Pause, State
from perdure.runs.engine.tables import CLOSED, WAITING, Refusal, Turn, World, execution_turn, operation_turn
from perdure.runs.protocol import (
    Action,
    ErrorObject,
    ExecutionStatus,
    InvocationStatus,
    OperationStatus,
    OperationType,
    size_bytes,
)


def fold(history: Iterable[Entry], onto: State | None = None) -> State:
    """The state after these entries, of which the first is ``Started`` unless there is a state before them. One pass."""
    state = None if onto is None else onto.copy()
    for entry in history:
        if state is None:
            assert isinstance(entry.fact, Started), "a history begins with its start"
            state = State(entry.fact, entry.at, entry.at)
        evolve(state, entry)
    assert state is not None, "an empty history is of nothing"
    return state


def evolve(state: State, entry: Entry) -> None:
    """Take one more entry in, in place."""
    assert entry.seq == state.seq + 1 and entry.at >= state.at, f"entry {entry.seq} does not follow {state.seq}"
    state.seq, state.at = entry.seq, entry.at
    _TAKERS[type(entry.fact)](state, entry.fact, entry.at)


def turn(state: State, what: Turn) -> None:
    to = execution_turn(state.status, what)
    assert not isinstance(to, Refusal), f"{what} was decided, although {to}"
    state.status = to


def _started(state: State, fact: Started, at: datetime) -> None:
    state.owed, state.code, state.deadline, state.known = True, fact.code, fact.deadline, state.seq
    state.born = state.digest = fact.digest
    state.history_bytes += size_bytes(fact.input)
    kind, status = OperationType.EXECUTION, OperationStatus.STARTED
    _keep(state, Op(fact.execution_id, kind, status, at, 0, state.seq, name=fact.name, payload=fact.input))


def _invoked(state: State, fact: facts.Invoked, at: datetime) -> None:
    state.owed, state.not_before, state.last = False, None, None
    state.invocations, state.digest = fact.invocation, fact.digest or state.digest
    state.born = state.born or state.digest
    state.invocation = Invocation(fact.invocation, at, fact.request_id, state.seq, state.seq, state.seq)


def _checkpointed(state: State, fact: facts.Checkpointed, at: datetime) -> None:
    invocation = state.invocation
    assert invocation is not None, "a checkpoint is of an invocation in flight"
    state.last = LastCheckpoint(fact.client_token, fact.invocation, state.number, invocation.told, fact.withheld)
    state.number = fact.number
    state.invocation = replace(
        invocation,
        acked=invocation.told,
        told=state.seq,
        has_recorded=invocation.has_recorded or bool(fact.records),
        is_withheld=fact.withheld,
    )
    for record in fact.records:
        state.history_bytes += record.update.size_bytes
        if record.update.type is not OperationType.EXECUTION:
            before = state.operations.get(record.update.id)
            _keep(state, updated(before, record, at, len(state.operations), state.seq))


def updated(before: Op | None, record: Recorded, at: datetime, position: int, seq: int) -> Op:
    """The operation after one update; the table has allowed it."""
    update = record.update
    to = operation_turn(update.type, before.status if before else None, update.action)
    assert not isinstance(to, Refusal), f"it was decided, although {to}"
    if record.refused is not None:
        to = OperationStatus.FAILED
    op = before or Op(
        update.id, update.type, to, at, position, seq, parent_id=update.parent_id, name=update.name, sub_type=update.sub_type
    )
    is_start, is_step = update.action is Action.START, update.type is OperationType.STEP
    keeps_payload = is_start or update.action is Action.CANCEL
    return replace(
        op,
        status=to,
        touched=seq,
        ended_at=at if to in CLOSED else None,
        # A poll that is cut off begins again from the state of the poll before it.
        payload=op.payload if keeps_payload else update.payload,
        error=record.refused or update.error,
        attempt=op.attempt + (is_step and not is_start),
        due=record.due,
        heartbeat_due=record.heartbeat_due,
        heartbeat_s=update.callback_options.heartbeat_timeout_seconds if update.callback_options else 0,
        callback_id=record.callback_id or op.callback_id,
        replay_children=bool(update.context_options and update.context_options.replay_children),
        start=record if update.type is OperationType.CHAINED_INVOKE else None,
    )


def _fired(state: State, fact: facts.Fired, at: datetime) -> None:
    for firing in fact.firings:
        op = state.operations[firing.operation_id]
        _moved(state, op, World.TIMER, at, error=firing.error or op.error)
    if fact.told and state.invocation is not None:
        state.invocation = replace(state.invocation, told=state.seq)


def _completed(state: State, fact: facts.Completed, at: datetime) -> None:
    state.history_bytes += size_bytes(fact.result) + (fact.error.size_bytes if fact.error else 0)
    op = state.operations[fact.operation_id]
    _moved(state, op, WORLD_OF[fact.status], at, payload=fact.result, error=fact.error)


#: How the world brings about a status that is told from outside.
WORLD_OF = {
    OperationStatus.SUCCEEDED: World.SUCCEEDED,
    OperationStatus.FAILED: World.FAILED,
    OperationStatus.TIMED_OUT: World.TIMED_OUT,
    OperationStatus.STOPPED: World.STOPPED,
}


def _moved(
    state: State, op: Op, cause: World, at: datetime, *, payload: str | None = None, error: ErrorObject | None = None
) -> None:
    """The world has changed an operation, so the function must hear of it."""
    to = operation_turn(op.type, op.status, cause)
    assert not isinstance(to, Refusal), f"it was decided, although {to}"
    ended_at = at if to in CLOSED else None
    payload = op.payload if payload is None else payload
    after = replace(
        op, status=to, touched=state.seq, ended_at=ended_at, payload=payload, error=error, due=None, heartbeat_due=None
    )
    _keep(state, after)
    state.moved = state.seq
    if state.invocation is None:
        if not (state.owed and state.failures):  # it backs off: who has failed is not asked sooner for this
            state.not_before = None
        state.owed = True


def _over(state: State, fact: facts.Answered | facts.Failed, _: datetime) -> None:
    """The invocation in flight is over."""
    invocation = state.invocation
    assert invocation is not None and invocation.number == fact.invocation, "only what is in flight can end"
    state.invocation, state.known = None, invocation.told
    if state.status is ExecutionStatus.PAUSING:
        turn(state, Turn.SETTLE)
    if state.has_ended:
        return
    if isinstance(fact, facts.Failed):
        if invocation.has_recorded:
            state.failures.clear()
        state.failures[fact.failure] = state.failures.get(fact.failure, 0) + 1
        state.owed, state.not_before, state.last_error = True, fact.retry_at, fact.error
        return
    state.failures.clear()
    state.last_error = None
    state.owed = True  # an end that follows takes it back; an answer that does not count is asked for again
    if fact.status is InvocationStatus.PENDING:
        is_unread = state.moved > invocation.acked or invocation.is_withheld
        state.owed = is_unread or fact.recheck_at is not None
        state.not_before = None if is_unread else fact.recheck_at


def _beaten(state: State, fact: facts.Beaten, _: datetime) -> None:
    op = state.operations[fact.operation_id]
    state.operations[op.id] = replace(op, heartbeat_due=fact.heartbeat_due)


def _resumed(state: State, fact: facts.Resumed, _: datetime) -> None:
    turn(state, Turn.RESUME)
    state.pause, state.deadline, state.code = None, fact.deadline, fact.code


def _deleted(state: State, _fact: facts.Deleted, _at: datetime) -> None:
    turn(state, Turn.DELETE)


def _paused(state: State, fact: facts.Paused, at: datetime) -> None:
    turn(state, Turn.PAUSE)
    if state.invocation is None:
        turn(state, Turn.SETTLE)
    state.pause = Pause(at, fact.cause, fact.reason, fact.timeout_paused)


def _ended(state: State, fact: facts.Ended, at: datetime) -> None:
    turn(state, END_TURNS[fact.status])
    op = state.operations[state.id]
    status = OperationStatus(fact.status.value)
    _keep(state, replace(op, status=status, ended_at=at, touched=state.seq, error=fact.error))
    state.ended_at, state.result, state.error = at, fact.result, fact.error
    state.owed, state.not_before, state.pause = False, None, None


END_TURNS = {
    ExecutionStatus.SUCCEEDED: Turn.SUCCEED,
    ExecutionStatus.FAILED: Turn.FAIL,
    ExecutionStatus.TIMED_OUT: Turn.TIME_OUT,
    ExecutionStatus.STOPPED: Turn.STOP,
}


def _keep(state: State, op: Op) -> None:
    state.operations[op.id] = op
    state.recent.pop(op.id, None)
    state.recent[op.id] = None
    if (op.type, op.status) in WAITING:
        state.waiting.add(op.id)
    else:
        state.waiting.discard(op.id)


_TAKERS: Mapping[type[Fact], Callable[[State, Any, datetime], None]] = {
    Started: _started,
    facts.Invoked: _invoked,
    facts.Checkpointed: _checkpointed,
    facts.Fired: _fired,
    facts.Completed: _completed,
    facts.Beaten: _beaten,
    facts.Answered: _over,
    facts.Failed: _over,
    facts.Paused: _paused,
    facts.Resumed: _resumed,
    facts.Ended: _ended,
    facts.Deleted: _deleted,
}
