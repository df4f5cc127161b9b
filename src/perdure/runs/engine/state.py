"""What an execution is at a moment, and the one reason why it will move again. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from perdure.runs.engine.facts import CodeRule, Failure, PauseCause, Recorded, Started
from perdure.runs.engine.tables import CLOSED, ENDED
from perdure.runs.protocol import (
    ErrorObject,
    ExecutionStatus,
    OperationStatus,
    OperationType,
)


@dataclass(frozen=True, slots=True)
class Op:
    """An operation. ``position`` counts from 0 in order of creation, ``touched`` is the entry that changed it last.

    ``payload``: the input of an execution, the result of all others; of a condition that is polled, the state of its last poll.
    ``due``: when its timer fires; of a callback its timeout, which a heartbeat does not move, ``heartbeat_due`` it does.
    """

    id: str
    type: OperationType
    status: OperationStatus
    started_at: datetime
    position: int
    touched: int
    ended_at: datetime | None = None
    parent_id: str | None = None
    name: str | None = None
    sub_type: str | None = None
    payload: str | None = None
    error: ErrorObject | None = None
    attempt: int = 0
    due: datetime | None = None
    heartbeat_due: datetime | None = None
    heartbeat_s: int = 0
    callback_id: str | None = None
    replay_children: bool = False
    start: Recorded | None = None  # of a chained invoke: what is to be invoked, with what

    @property
    def fires_at(self) -> datetime | None:
        return min((due for due in (self.due, self.heartbeat_due) if due is not None), default=None)

    @property
    def is_closed(self) -> bool:
        return self.status in CLOSED


@dataclass(frozen=True, slots=True)
class Invocation:
    """One in flight. All numbers but the first count entries.

    The function knows what stood in the history up to ``input_seq`` from its input, and up to ``told`` from answers to its
    checkpoints. It has shown that it read them up to ``acked``: it used the token that came with them.
    """

    number: int
    at: datetime
    request_id: str
    input_seq: int
    told: int
    acked: int
    has_recorded: bool = False
    is_withheld: bool = False  # it was told to stop


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """What is needed to answer a checkpoint again whose answer was lost."""

    client_token: str | None
    invocation: int
    number: int  # of the token it came with
    since: int  # its answer had what was touched after this entry
    is_withheld: bool


@dataclass(frozen=True, slots=True)
class Pause:
    at: datetime
    cause: PauseCause
    reason: str | None
    timeout_paused: bool


@dataclass(slots=True)
class State:
    """Treat it as a value: only ``evolve`` changes one (``fold.py``), and only on a copy.

    ``moved``: the last entry by which something other than the function changed an operation. ``owed``: it wants an invocation,
    not before ``not_before``. ``waiting``: the operations whose next move is the world's.
    """

    started: Started
    at: datetime
    started_at: datetime
    seq: int = 0
    status: ExecutionStatus = ExecutionStatus.RUNNING
    operations: dict[str, Op] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    recent: dict[str, None] = field(default_factory=dict)  # ids in the order in which they were touched last
    moved: int = 0
    known: int = 0  # the last entry that the function was told of in an invocation that is over
    owed: bool = False
    not_before: datetime | None = None
    invocation: Invocation | None = None
    invocations: int = 0
    number: int = 0  # of the token that is good now
    last: LastCheckpoint | None = None
    failures: dict[Failure, int] = field(default_factory=dict)
    last_error: ErrorObject | None = None  # of the last failed invocation
    born: str | None = None  # the digest of the code it began with
    digest: str | None = None  # of the code that ran it last
    code: CodeRule = CodeRule.ANY
    deadline: datetime | None = None
    pause: Pause | None = None
    history_bytes: int = 0
    ended_at: datetime | None = None
    result: str | None = None
    error: ErrorObject | None = None

    @property
    def id(self) -> str:
        return self.started.execution_id

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def is_paused(self) -> bool:
        return self.status in {ExecutionStatus.PAUSED, ExecutionStatus.PAUSING}

    @property
    def code_has_changed(self) -> bool:
        return self.digest != self.born

    def copy(self) -> State:
        return replace(
            self,
            operations=dict(self.operations),
            waiting=set(self.waiting),
            recent=dict(self.recent),
            failures=dict(self.failures),
        )

    def touched_since(self, seq: int) -> list[Op]:
        """Operations that changed after that entry, in the order of their creation. As much work as there are such."""
        found = []
        for operation_id in reversed(self.recent):
            op = self.operations[operation_id]
            if op.touched <= seq:
                break
            found.append(op)
        return sorted(found, key=lambda op: op.position)

    def due(self, now: datetime) -> list[Op]:
        """Operations whose timers are due, in the order in which they are."""
        ready = [(at, op.position, op) for op in self._waiting() if (at := op.fires_at) is not None and at <= now]
        return [op for _, _, op in sorted(ready, key=lambda row: row[:2])]

    def next_timer(self) -> datetime | None:
        """When the next timer is due, the execution's own timeout among them; None when there is none."""
        if self.has_ended:
            return None
        times = [op.fires_at for op in self._waiting()]
        return min((at for at in (*times, self.running_deadline) if at is not None), default=None)

    @property
    def running_deadline(self) -> datetime | None:
        """The execution's timeout; None while a pause lets it stand still."""
        return None if self.pause is not None and self.pause.timeout_paused else self.deadline

    def _waiting(self) -> Iterator[Op]:
        return (self.operations[operation_id] for operation_id in self.waiting)


class Reason(StrEnum):
    """Why an execution stands where it does. Exactly one holds; ``STUCK`` is a defect and must raise an alarm."""

    ENDED = "ended"
    ANSWER = "answer"  # an invocation is in flight: its answer, or the end of its worker's lease
    OPERATOR = "operator"  # it is paused
    INVOKE = "invoke"  # it wants an invocation
    TIMER = "timer"
    WORLD = "world"  # a callback without a timeout, or a chained invoke
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class Standing:
    """``invoke_at``: with ``INVOKE``, not before then; None is now. ``timer_at``: when to ``Tick``, whatever the reason is."""

    reason: Reason
    invoke_at: datetime | None = None
    timer_at: datetime | None = None


def standing(state: State) -> Standing:
    """The one reason why this execution will move again."""
    timer_at = state.next_timer()
    if state.has_ended:
        return Standing(Reason.ENDED)
    if state.invocation is not None:
        return Standing(Reason.ANSWER, timer_at=timer_at)
    if state.is_paused:
        return Standing(Reason.OPERATOR, timer_at=timer_at)
    if state.owed:
        return Standing(Reason.INVOKE, state.not_before, timer_at)
    timed = [state.operations[operation_id].fires_at is not None for operation_id in state.waiting]
    if any(timed):
        return Standing(Reason.TIMER, timer_at=timer_at)
    return Standing(Reason.WORLD if timed else Reason.STUCK, timer_at=timer_at)
