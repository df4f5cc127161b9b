"""``decide``: what a command makes of an execution. Pure: no clock, no chance, nothing outside its arguments.

A refused command raises an error of ``core/errors.py`` and changes nothing. Whoever calls appends ``Decision.entries`` in one
transaction that also holds the execution's row and names the ``seq`` it has decided on, so that of two deciders one has to decide
again; then does what is ``todo``, which may be done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from perdure.core.errors import (
    CallbackClosed,
    CodeChanged,
    Conflict,
    InvalidRequest,
    NotDue,
    NotFound,
    StaleInvocation,
)
from perdure.runs.engine import facts
from perdure.runs.engine.batch import check_size
from perdure.runs.engine.checkpoint import checkpoint, current_token
from perdure.runs.engine.commands import (
    Answer,
    Checkpoint,
    Command,
    CompleteCallback,
    CompleteInvoke,
    Decision,
    Delete,
    Fail,
    Heartbeat,
    Invoke,
    Notice,
    Pause,
    Reply,
    Resume,
    Start,
    Stop,
    Tick,
)
from perdure.runs.engine.deciding import Draft, is_open, require_room, require_running
from perdure.runs.engine.facts import CodeRule, Entry, Failure, PauseCause
from perdure.runs.engine.fold import fold
from perdure.runs.engine.rules import HOPELESS, Rules, backoff
from perdure.runs.engine.state import Invocation, Op, State, standing
from perdure.runs.engine.tables import Refusal, Turn, execution_turn
from perdure.runs.protocol import ErrorObject, ExecutionStatus, InvocationStatus, OperationStatus, parse_callback_id

_DEFAULT_RULES = Rules()
#: What the SDKs call an answer that says: this replay does not fit this code.
_NONDETERMINISTIC = "NonDeterministicExecutionError"


def start(command: Start, now: datetime, rules: Rules = _DEFAULT_RULES) -> Decision:
    """A new execution's first entry. Raises PayloadTooLarge."""
    check_size(command.input, None, rules, f"execution {command.name!r}")
    fact = facts.Started(
        execution_id=command.execution_id,
        arn=command.arn,
        name=command.name,
        function=command.function,
        secret=command.secret,
        input=command.input,
        timeout_s=command.timeout_s,
        deadline=None if command.timeout_s is None else now + timedelta(seconds=command.timeout_s),
        digest=command.digest,
        code=command.code,
        parent=command.parent,
    )
    entry = Entry(1, now, fact)
    state = fold([entry])
    return Decision(state, standing(state), (entry,))


def decide(state: State, command: Command, now: datetime, rules: Rules = _DEFAULT_RULES) -> Decision:
    """What the command makes of the execution. ``state`` is left as it is."""
    draft = Draft(state.copy(), now, rules)
    _HANDLERS[type(command)](draft, command)
    return draft.done()


# -------------------------------------------------------------------------------------------------------------------- invocations


def _invoke(draft: Draft, command: Invoke) -> None:
    """Raises NotDue while one is in flight, and while nothing asks for one; CodeChanged where the code is bound."""
    draft.fire()
    state = draft.state
    require_running(state)
    if state.invocation is not None:
        raise NotDue(f"Invocation {state.invocation.number} of it is in flight.")
    if state.is_paused or not state.owed or (state.not_before is not None and state.not_before > draft.now):
        raise NotDue("Nothing asks for an invocation of it now.")
    if state.running_deadline is not None and state.running_deadline <= draft.now:
        raise NotDue("Its time is over, and that is about to be recorded.")
    _check_code(draft, command.digest)
    changed = state.touched_since(state.known)
    draft.add(facts.Invoked(invocation=state.invocations + 1, request_id=command.request_id, digest=command.digest))
    draft.reply = Reply(
        token=current_token(state),
        operations=tuple(state.operations.values()),
        updated_ids=tuple(op.id for op in changed),
    )


def _check_code(draft: Draft, digest: str | None) -> None:
    """Other code than before is told; an execution that is bound to its code refuses it, and a worker that names none."""
    state = draft.state
    is_bound = state.code is CodeRule.EXACT
    known = state.born if is_bound else state.digest
    if known is None or digest == known:
        return
    name = state.started.name
    if is_bound:
        problem = CodeChanged(f"Execution {name!r} is bound to the code it began with, which is not this worker's.")
        problem.details = {"expected": known, "found": digest or ""}
        raise problem
    if digest is not None:
        draft.warn(Notice.CODE_CHANGED, f"Execution {name!r} goes on with other code: {known}, now {digest}.")


def _in_flight(state: State, number: int) -> Invocation:
    """The invocation in flight, if it has that number. Raises StaleInvocation: whoever was fenced off says nothing any more."""
    invocation = state.invocation
    if invocation is None or invocation.number != number:
        raise StaleInvocation(f"Invocation {number} is over.", hint="Its answer is not needed: another one has begun, or will.")
    return invocation


def _answer(draft: Draft, command: Answer) -> None:
    state, output = draft.state, command.output
    invocation = _in_flight(state, command.invocation)
    if state.has_ended:  # it was stopped meanwhile, has timed out, or said its result by a checkpoint
        draft.add(facts.Answered(invocation=invocation.number, status=output.status))
        return
    if output.status is InvocationStatus.PENDING:
        _pending(draft, invocation)
        return
    if output.status is InvocationStatus.FAILED:
        draft.add(facts.Answered(invocation=invocation.number, status=output.status, error=output.error))
        _failed(draft, output.error)
        return
    try:
        check_size(output.result, None, draft.rules, "the execution's result")
    except InvalidRequest as problem:
        error = ErrorObject(error_type="InvalidParameterValueException", error_message=problem.message)
        _give_up(draft, invocation, Failure.INVALID, error)
        return
    draft.add(facts.Answered(invocation=invocation.number, status=output.status))
    draft.end(ExecutionStatus.SUCCEEDED, result=output.result)


def _failed(draft: Draft, error: ErrorObject | None) -> None:
    """A handler's FAILED is the execution's end, but for a replay that does not fit because the code was changed under it: that
    waits for somebody, since the code that fits may still come back."""
    state = draft.state
    said = (error.error_type if error else None) or ""
    if said.endswith(_NONDETERMINISTIC) and state.code_has_changed:
        if not state.is_paused:
            reason = (
                f"Its replay does not fit the code, which has changed since it began: {(error and error.error_message) or said}"
            )
            draft.add(facts.Paused(cause=PauseCause.CODE, reason=reason, timeout_paused=False))
            draft.warn(Notice.CODE_CHANGED, f"Execution {state.started.name!r} is paused. {reason}")
        return
    draft.end(ExecutionStatus.FAILED, error=error)


def _pending(draft: Draft, invocation: Invocation) -> None:
    """It waits. What the world did meanwhile is offered again: at once if nothing shows that it was read, and in a while if it
    was read and may still have been overlooked, for a function may decide to wait in the moment in which it is told."""
    state = draft.state
    has_moved = state.moved > invocation.input_seq
    if not (state.waiting or has_moved or invocation.is_withheld):
        error = ErrorObject(
            error_type="InvalidParameterValueException", error_message="Cannot return PENDING status with no pending operations."
        )
        _give_up(draft, invocation, Failure.EMPTY, error)
        return
    is_read = has_moved and state.moved <= invocation.acked
    recheck_at = draft.now + timedelta(seconds=draft.rules.recheck_s) if is_read else None
    draft.add(facts.Answered(invocation=invocation.number, status=InvocationStatus.PENDING, recheck_at=recheck_at))
    draft.fire()


def _fail(draft: Draft, command: Fail) -> None:
    invocation = _in_flight(draft.state, command.invocation)
    _give_up(draft, invocation, command.failure, command.error)


def _give_up(draft: Draft, invocation: Invocation, failure: Failure, error: ErrorObject | None) -> None:
    """An invocation is lost: another one after a while, or the end if too many were lost in a row."""
    state, rules = draft.state, draft.rules
    earlier = {} if invocation.has_recorded else state.failures
    in_a_row = sum(count for kind, count in earlier.items() if kind in rules.attempts) + 1
    retry_at = None if failure is Failure.RETURNED else draft.now + backoff(state.id, in_a_row, rules)
    draft.add(facts.Failed(invocation=invocation.number, failure=failure, error=error, retry_at=retry_at))
    if state.has_ended:
        return
    count, most = state.failures[failure], rules.attempts.get(failure)
    if failure not in HOPELESS and (most is None or count < most):
        return
    draft.end(ExecutionStatus.FAILED, error=error or ErrorObject(error_type=f"Invocation.{failure.value}"))
    times = "" if failure in HOPELESS else f", {count} times in a row"
    message = f"Execution {state.started.name!r} is given up: its invocation ended as {failure.value}{times}."
    draft.warn(Notice.GIVEN_UP, message)


# -------------------------------------------------------------------------------------------------------------------------- world


def _tick(draft: Draft, _: Tick) -> None:
    state = draft.state
    if state.has_ended:
        return
    deadline = state.running_deadline
    if deadline is not None and deadline <= draft.now:
        seconds = state.started.timeout_s
        error = ErrorObject(error_type="Execution.Timeout", error_message=f"Execution timed out after {seconds} seconds.")
        draft.end(ExecutionStatus.TIMED_OUT, error=error)
        return
    draft.fire()


def _callback(state: State, callback_id: str, now: datetime) -> Op:
    """The callback of that id, if it is open. Raises NotFound for one that never was, CallbackClosed for one that is over."""
    name = parse_callback_id(callback_id)
    op = state.operations.get(name.operation_id)
    if op is None or op.callback_id != callback_id:
        raise NotFound("There is no such callback.", hint="Use the id that the function was given when it made the callback.")
    if state.has_ended:
        raise CallbackClosed("The execution that made this callback has ended.", hint="Nobody waits for it any more.")
    if not is_open(op):
        raise CallbackClosed(f"This callback is closed: it is {op.status.value}.", hint="It was completed before, or timed out.")
    fires_at = op.fires_at
    if fires_at is not None and fires_at <= now:
        raise CallbackClosed("This callback has timed out.", hint="Nobody waits for it any more.")
    return op


def _complete_callback(draft: Draft, command: CompleteCallback) -> None:
    op = _callback(draft.state, command.callback_id, draft.now)
    check_size(command.result, command.error, draft.rules, "the callback")
    status = OperationStatus.SUCCEEDED if command.error is None else OperationStatus.FAILED
    draft.add(facts.Completed(operation_id=op.id, status=status, result=command.result, error=command.error))


def _heartbeat(draft: Draft, command: Heartbeat) -> None:
    op = _callback(draft.state, command.callback_id, draft.now)
    if op.heartbeat_s:
        heartbeat_due = draft.now + timedelta(seconds=op.heartbeat_s)
        draft.add(facts.Beaten(operation_id=op.id, heartbeat_due=heartbeat_due))


def _complete_invoke(draft: Draft, command: CompleteInvoke) -> None:
    """Told twice, or to an execution that has ended, it means nothing: whoever tells it cannot know."""
    op = draft.state.operations.get(command.operation_id)
    if op is None:
        raise NotFound(f"There is no operation {command.operation_id!r} in it.")
    if draft.state.has_ended or not is_open(op):
        return
    if command.status not in _CHILD_ENDS:
        raise InvalidRequest(f"An execution that is {command.status.value} has not ended.")
    error = command.error
    if command.status is ExecutionStatus.TIMED_OUT:
        message = f"CHAINED_INVOKE timed out after {command.timeout_s} seconds."
        error = ErrorObject(error_type="ChainedInvoke.Timeout", error_message=message)
    elif command.status is ExecutionStatus.FAILED and error is None:
        error = ErrorObject(error_message="Chained invoke failed.")
    result = command.result if command.status is ExecutionStatus.SUCCEEDED else None
    status = OperationStatus(command.status.value)
    draft.add(facts.Completed(operation_id=op.id, status=status, result=result, error=error))


_CHILD_ENDS = frozenset({ExecutionStatus.SUCCEEDED, ExecutionStatus.FAILED, ExecutionStatus.TIMED_OUT, ExecutionStatus.STOPPED})

# ---------------------------------------------------------------------------------------------------------------------- operators


def _stop(draft: Draft, command: Stop) -> None:
    require_running(draft.state)
    draft.end(ExecutionStatus.STOPPED, error=command.error)


def _pause(draft: Draft, command: Pause) -> None:
    """Timers and completions go on; no invocation begins. Twice is once."""
    state = draft.state
    require_running(state)
    if state.is_paused:
        return
    draft.add(facts.Paused(cause=PauseCause.OPERATOR, reason=command.reason, timeout_paused=command.timeout_paused))


def _resume(draft: Draft, command: Resume) -> None:
    """Twice is once. Raises QuotaExceeded for one that stands at a limit."""
    state = draft.state
    require_running(state)
    pause = state.pause
    if pause is None:
        return
    require_room(state, draft.rules)
    deadline = state.deadline
    if deadline is not None and pause.timeout_paused:
        deadline += max(draft.now - pause.at, timedelta(0))
    code = state.code if command.code is None else command.code
    draft.add(facts.Resumed(reason=command.reason, deadline=deadline, code=code))
    draft.fire()


def _delete(draft: Draft, _: Delete) -> None:
    to = execution_turn(draft.state.status, Turn.DELETE)
    if isinstance(to, Refusal):
        if draft.state.status is ExecutionStatus.DELETING:
            return
        raise Conflict(f"Execution {draft.state.started.name!r} cannot be deleted: {to.reason}.", hint="Stop it first.")
    draft.add(facts.Deleted())


_HANDLERS: Mapping[type[Command], Callable[[Draft, Any], None]] = {
    Invoke: _invoke,
    Checkpoint: checkpoint,
    Answer: _answer,
    Fail: _fail,
    Tick: _tick,
    CompleteCallback: _complete_callback,
    Heartbeat: _heartbeat,
    CompleteInvoke: _complete_invoke,
    Stop: _stop,
    Pause: _pause,
    Resume: _resume,
    Delete: _delete,
}
