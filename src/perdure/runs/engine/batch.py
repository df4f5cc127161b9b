"""Whether a checkpoint's batch of updates may be recorded: all of it, or none. Pure.

The sentences are AWS's where it has one, since people search for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from perdure.core.errors import InvalidRequest, PayloadTooLarge
from perdure.runs.engine.facts import Recorded
from perdure.runs.engine.rules import Rules
from perdure.runs.engine.state import Op, State
from perdure.runs.engine.tables import ACTIONS, Refusal, operation_turn
from perdure.runs.protocol import Action, CallbackName, ErrorObject, OperationStatus, OperationType, OperationUpdate, size_bytes

#: Of these a START and one more update may be in the same batch.
_TWICE = frozenset({OperationType.STEP, OperationType.CONTEXT})


@dataclass(frozen=True, slots=True)
class _Seen:
    """What an earlier update of the same batch made of an operation."""

    update: OperationUpdate
    status: OperationStatus


@dataclass(slots=True)
class _Batch:
    state: State
    rules: Rules
    seen: dict[str, _Seen] = field(default_factory=dict)


def check_batch(state: State, updates: tuple[OperationUpdate, ...], rules: Rules) -> None:
    """Raises InvalidRequest, which names the operation and the rule; nothing of the batch is recorded then."""
    executions = [update for update in updates if update.type is OperationType.EXECUTION]
    if len(executions) > 1:
        raise InvalidRequest("Cannot checkpoint multiple EXECUTION updates.")
    if executions and updates[-1] is not executions[0]:
        raise InvalidRequest("EXECUTION checkpoint must be the last update.")
    batch = _Batch(state, rules)
    for update in updates:
        _check_parts(update)
        check_size(update.payload, update.error, rules, f"operation {update.id!r}")
        _check_repeat(batch, update)
        _check_parent(batch, update)
        _check_identity(batch, update)
        batch.seen[update.id] = _Seen(update, _check_turn(batch, update))


def check_size(payload: str | None, error: ErrorObject | None, rules: Rules, whose: str) -> None:
    """Raises PayloadTooLarge. The size is known before anything is written, and the same call fails the same way again."""
    limits = (
        ("payload_bytes_max", size_bytes(payload), rules.payload_bytes_max),
        ("error_bytes_max", error.size_bytes if error else 0, rules.error_bytes_max),
    )
    for limit, size, most in limits:
        if size > most:
            what = "payload" if limit == "payload_bytes_max" else "error"
            problem = PayloadTooLarge(f"The {what} of {whose} has {size:,} bytes, and {most:,} are allowed.")
            problem.details = {"limit": limit, "limit_bytes": str(most), "size_bytes": str(size)}
            raise problem


def _refuse(update: OperationUpdate, why: str) -> InvalidRequest:
    return InvalidRequest(f"{why} (operation {update.id!r}).", hint="Nothing of this checkpoint was recorded.")


def _check_parts(update: OperationUpdate) -> None:
    """Which members an update of this kind must and must not have."""
    if update.action not in ACTIONS[update.type]:
        raise _refuse(update, f"Invalid action for the given operation type: {update.type.value} has no {update.action.value}")
    match update.action:
        case Action.FAIL if update.payload is not None:
            raise _refuse(update, "Cannot provide a Payload for FAIL action")
        case Action.SUCCEED if update.error is not None:
            raise _refuse(update, "Cannot provide an Error for SUCCEED action")
        case Action.RETRY if update.step_options is None:
            raise _refuse(update, "Invalid StepOptions for the given action")
        case Action.RETRY if update.error is not None and update.payload is not None:
            raise _refuse(update, "Cannot provide both error and payload to RETRY a STEP")
        case Action.START if update.type is OperationType.CHAINED_INVOKE and update.chained_invoke_options is None:
            raise _refuse(update, "Update for CHAINED_INVOKE operation requires ChainedInvokeOptions")
        case _:
            pass


def _check_repeat(batch: _Batch, update: OperationUpdate) -> None:
    earlier = batch.seen.get(update.id)
    if earlier is None:
        return
    is_end = earlier.update.action is Action.START and update.action is not Action.START
    if not (update.type in _TWICE and is_end):
        raise _refuse(update, "Cannot checkpoint multiple operations with the same ID")


def _check_parent(batch: _Batch, update: OperationUpdate) -> None:
    if update.parent_id is None:
        return
    started, before = batch.seen.get(update.parent_id), batch.state.operations.get(update.parent_id)
    kind = started.update.type if started else before.type if before else None
    if kind is not OperationType.CONTEXT:
        raise _refuse(update, f"Invalid parent operation id: {update.parent_id!r} is not a CONTEXT of this execution")


def _check_identity(batch: _Batch, update: OperationUpdate) -> None:
    """An update belongs to an operation only if all that names it agrees: a wait's record never passes for a step's."""
    earlier, before = batch.seen.get(update.id), batch.state.operations.get(update.id)
    known: Op | OperationUpdate | None = earlier.update if earlier else before
    if known is None:
        return
    pairs = (
        ("type", update.type, known.type),
        ("subtype", update.sub_type, known.sub_type),
        ("name", update.name, known.name),
        ("parent", update.parent_id, known.parent_id),
    )
    for what, said, is_so in pairs:
        if said is not None and said != is_so:
            raise _refuse(update, f"Inconsistent operation {what}: it is {is_so!r}, and this update says {said!r}")


def _check_turn(batch: _Batch, update: OperationUpdate) -> OperationStatus:
    state = batch.state
    earlier, before = batch.seen.get(update.id), state.operations.get(update.id)
    status = earlier.status if earlier else before.status if before else None
    if update.type is OperationType.EXECUTION:
        status = state.operations[state.id].status
    to = operation_turn(update.type, status, update.action)
    if isinstance(to, Refusal):
        raise _refuse(update, f"Invalid current {update.type.value} state: {to.reason}")
    return to


# ------------------------------------------------------------------------------------------------------------------------ records


def record(state: State, update: OperationUpdate, now: datetime, refused: Mapping[str, ErrorObject]) -> Recorded:
    """An update with what the server adds to it. Its instants count from ``now``, which the server's clock says."""
    due, heartbeat_due, callback_id = None, None, None
    match (update.type, update.action):
        case (OperationType.WAIT, Action.START):
            due = now + timedelta(seconds=update.wait_options.wait_seconds if update.wait_options else 1)
        case (OperationType.STEP, Action.RETRY):
            assert update.step_options is not None, "checked before"
            due = now + timedelta(seconds=update.step_options.next_attempt_delay_seconds)
        case (OperationType.CALLBACK, Action.START):
            callback_id = str(CallbackName(state.id, update.id, callback_secret(state, update.id)))
            if options := update.callback_options:
                due = _after(now, options.timeout_seconds)
                heartbeat_due = _after(now, options.heartbeat_timeout_seconds)
        case _:
            pass
    target = update.chained_invoke_options
    problem = refused.get(target.function_name) if target is not None else None
    if problem is not None:  # it was never asked anything, so its input is nobody's
        update = update.model_copy(update={"payload": None})
    return Recorded(update=update, due=due, heartbeat_due=heartbeat_due, callback_id=callback_id, refused=problem)


def _after(now: datetime, seconds: int) -> datetime | None:
    return now + timedelta(seconds=seconds) if seconds else None


def callback_secret(state: State, operation_id: str) -> str:
    """Follows from the execution's own random secret, so that the same history makes the same ids."""
    return hashlib.sha256(f"{state.started.secret} {operation_id}".encode()).hexdigest()[:32]
