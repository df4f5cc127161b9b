"""A state taken apart for storage, and put together again. Pure.

An execution is stored as what it was started with, which never changes, its operations one by one, and the rest: the *head*. A
commit so writes what has changed, however many operations there are.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import TypeAdapter

from perdure.runs.engine.facts import Started
from perdure.runs.engine.state import Op, State
from perdure.runs.engine.tables import WAITING

_STATE: TypeAdapter[State] = TypeAdapter(State)
_OP: TypeAdapter[Op] = TypeAdapter(Op)
_OPS: TypeAdapter[list[Op]] = TypeAdapter(list[Op])
_OUTSIDE = {"started", "operations", "waiting", "recent"}


def head_of(state: State) -> str:
    """All of a state but its start and its operations, as JSON."""
    return _STATE.dump_json(state, exclude=_OUTSIDE, exclude_defaults=True).decode()


def op_text(op: Op) -> str:
    """An operation as JSON."""
    return _OP.dump_json(op, exclude_defaults=True).decode()


def assemble(started: Started, head: str, ops: Iterable[str]) -> State:
    """The state whose parts these are; the operations in any order."""
    operations = sorted(_OPS.validate_json(f"[{','.join(ops)}]"), key=lambda op: op.position)
    state = _STATE.validate_json(_with_start(started, head))
    state.operations = {op.id: op for op in operations}
    state.waiting = {op.id for op in operations if (op.type, op.status) in WAITING}
    state.recent = {op.id: None for op in sorted(operations, key=lambda op: (op.touched, op.position))}
    return state


def _with_start(started: Started, head: str) -> str:
    return f'{{"started":{started.model_dump_json(exclude_none=True)},{head[1:]}'
