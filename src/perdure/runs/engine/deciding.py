"""The draft of a decision: facts are added one by one to a copy of the state, so that later ones see what earlier ones did."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from perdure.core.errors import ExecutionEnded, QuotaExceeded
from perdure.runs.engine import facts
from perdure.runs.engine.commands import Decision, Finish, Notice, Reply, Todo, Warn
from perdure.runs.engine.facts import Entry, Fact, PauseCause, Recorded
from perdure.runs.engine.fold import evolve
from perdure.runs.engine.rules import Rules
from perdure.runs.engine.state import Op, State, standing
from perdure.runs.engine.tables import CLOSED
from perdure.runs.protocol import ErrorObject, ExecutionStatus, OperationType

CALLBACK_TIMEOUT = "Callback.Timeout"
CALLBACK_HEARTBEAT = "Callback.Heartbeat"


@dataclass(slots=True)
class Draft:
    """``now`` is what the database's clock says. It may have been set back; entries are then dated like the one before them, and
    instants are counted from ``now`` all the same."""

    state: State
    now: datetime
    rules: Rules
    entries: list[Entry] = field(default_factory=list)
    todo: list[Todo] = field(default_factory=list)
    reply: Reply | None = None

    def add(self, fact: Fact) -> None:
        entry = Entry(self.state.seq + 1, max(self.now, self.state.at), fact)
        evolve(self.state, entry)
        self.entries.append(entry)

    def warn(self, notice: Notice, message: str) -> None:
        self.todo.append(Warn(notice, message))

    def done(self) -> Decision:
        return Decision(self.state, standing(self.state), tuple(self.entries), tuple(self.todo), self.reply)

    # --------------------------------------------------------------------------------------------------------- parts of decisions

    def end(self, status: ExecutionStatus, result: str | None = None, error: ErrorObject | None = None) -> None:
        self.add(facts.Ended(status=status, result=result, error=error))
        started = self.state.started
        self.todo.append(Finish(status, result, error, started.parent, started.timeout_s))

    def fire(self, *, told: bool = False) -> None:
        """Let every timer fire that is due. Each fires once, since an operation that has fired waits no more."""
        if ready := self.state.due(self.now):
            firings = tuple(facts.Firing(operation_id=op.id, error=timeout_of(op, self.now)) for op in ready)
            self.add(facts.Fired(firings=firings, told=told))


def timeout_of(op: Op, now: datetime) -> ErrorObject | None:
    """The error of a callback whose time is over; waits and retries have none."""
    if op.type is not OperationType.CALLBACK:
        return None
    if op.due is not None and op.due <= now:
        return ErrorObject(error_type=CALLBACK_TIMEOUT, error_message="Callback timed out.")
    return ErrorObject(error_type=CALLBACK_HEARTBEAT, error_message="Callback timed out on heartbeat.")


def require_running(state: State) -> None:
    if state.has_ended:
        raise ExecutionEnded(
            f"Execution {state.started.name!r} has ended: it is {state.status.value}.",
            hint="Start another one, under another name.",
        )


# ------------------------------------------------------------------------------------------------------------------------- limits


def over_limit(state: State, rules: Rules) -> str | None:
    """Which limit the history has passed, in a sentence; None: neither."""
    return _limit(len(state.operations) - 1, state.history_bytes, rules)


def will_pass_limit(state: State, records: tuple[Recorded, ...], rules: Rules) -> bool:
    """Whether the history will have passed one with these records. The end of an execution passes none."""
    if any(record.update.type is OperationType.EXECUTION for record in records):
        return False
    new = {record.update.id for record in records} - state.operations.keys()
    size = sum(record.update.size_bytes for record in records)
    return _limit(len(state.operations) - 1 + len(new), state.history_bytes + size, rules) is not None


def _limit(count: int, size: int, rules: Rules) -> str | None:
    if count > rules.operations_max:
        return f"It has {count:,} operations, and {rules.operations_max:,} are allowed."
    if size > rules.history_bytes_max:
        return f"Its history has {size:,} bytes, and {rules.history_bytes_max:,} are allowed."
    return None


def require_room(state: State, rules: Rules) -> None:
    """Raises QuotaExceeded for an execution that would be parked again at its next checkpoint."""
    if problem := over_limit(state, rules):
        raise QuotaExceeded(
            f"Execution {state.started.name!r} is paused at a limit. {problem}", hint="Raise the limit and resume it, or stop it."
        )


def share_used(state: State, rules: Rules) -> float:
    return max((len(state.operations) - 1) / rules.operations_max, state.history_bytes / rules.history_bytes_max)


def watch_limits(draft: Draft, share_before: float) -> None:
    """Tell early that a limit is near, once, and park the execution where it has passed one. What is recorded stays recorded."""
    state, rules = draft.state, draft.rules
    share = share_used(state, rules)
    if share_before < rules.warn_share <= share:
        draft.warn(Notice.LIMIT_NEAR, f"Execution {state.started.name!r} has used {share:.0%} of its limits.")
    problem = over_limit(state, rules)
    if problem is not None and not state.is_paused and not state.has_ended:
        draft.add(facts.Paused(cause=PauseCause.LIMIT, reason=problem, timeout_paused=False))
        draft.warn(Notice.LIMIT_PASSED, f"Execution {state.started.name!r} is paused: {problem}")


def is_open(op: Op | None) -> bool:
    return op is not None and op.status not in CLOSED
