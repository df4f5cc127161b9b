"""Checking that histories are what was written, and that rows say what histories say."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.db.database import Database
from perdure.runs.engine import FACT, Entry, fold, head_of, op_text, standing
from perdure.runs.service.rows import entry_hash

_PAGE = 1000
#: Executions whose rows and operations are read at a time.
_EXECUTIONS = 100
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """Where a history does not hold, and why, in a sentence. ``seq`` 0: the row beside it."""

    execution_id: str
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Checked:
    """An execution whose history was read: the hashes of its entries, and the first thing that is wrong with it."""

    execution_id: str
    hashes: Sequence[str]
    problem: Problem | None


async def verify(database: Database) -> tuple[int, list[Problem]]:
    """How many executions were checked, and for each the first thing that is wrong with it."""
    found = [one async for one in checks(database)]
    return len(found), [one.problem for one in found if one.problem is not None]


async def checks(database: Database) -> AsyncGenerator[Checked]:
    """All executions, one by one. They may go on meanwhile."""
    after = ""
    while rows := await database.all("runs.verified", after=after, limit=_EXECUTIONS):
        for row in rows:
            yield await _checked(database, row)
        after = rows[-1]["id"]


async def _checked(database: Database, row: dict[str, Any]) -> Checked:
    """What does not hold is looked at again: of one that was deleted in between, facts are gone that the row had."""
    for _ in range(_LOOKS):
        entries = await _entries(database, row["id"], max(row["seq"], row["last"]))
        problem = _problem(row, entries)
        again = await database.all("runs.verified_one", id=row["id"]) if problem else []
        if not again or again == [row]:
            break
        row = again[0]
    return Checked(row["id"], [one["hash"] for one in entries], problem)


async def _entries(database: Database, execution_id: str, last: int) -> list[dict[str, Any]]:
    """Those that were there when its row was read."""
    found: list[dict[str, Any]] = []
    while True:
        after = found[-1]["seq"] if found else 0
        rows = await database.all("runs.links", id=execution_id, after=after, last=last, limit=_PAGE)
        found += rows
        if len(rows) < _PAGE:
            return found


def _problem(row: dict[str, Any], entries: list[dict[str, Any]]) -> Problem | None:
    execution_id, previous, history = row["id"], "", []
    for position, one in enumerate(entries, start=1):
        if one["seq"] != position:
            return Problem(execution_id, position, f"Entry {position} is missing.")
        if one["fact"] is not None:
            if hashlib.sha256(one["fact"].encode()).hexdigest() != one["digest"]:
                return Problem(execution_id, position, "The fact was changed after it was written.")
            history.append(Entry(position, one["at"], FACT.validate_json(one["fact"])))
        elif row["status"] != "DELETING":
            return Problem(execution_id, position, "The fact is gone.")
        if entry_hash(previous, execution_id, position, one) != one["hash"]:
            return Problem(execution_id, position, "The entry was changed after it was written.")
        previous = one["hash"]
    if (row["seq"], row["hash"]) != (len(entries), previous):
        return Problem(
            execution_id, len(entries) + 1, f"The history ends at entry {len(entries)}, and {row['seq']} were written."
        )
    return _mismatch(row, history) if len(history) == len(entries) else None


def _mismatch(row: dict[str, Any], history: list[Entry]) -> Problem | None:
    """What the row and the operations say, beside what the history folds to."""
    state = fold(history)
    stands = standing(state)
    told = (row["status"], row["reason"], row["timer_at"], row["head"], sorted(row["ops"]))
    folded = (
        state.status.value,
        stands.reason.value,
        stands.timer_at,
        head_of(state),
        sorted(map(op_text, state.operations.values())),
    )
    names = ("status", "reason to move", "timer", "head", "operations")
    wrong = [name for name, one, other in zip(names, told, folded, strict=True) if one != other]
    return Problem(row["id"], 0, f"The row does not say what the history says: {', '.join(wrong)}.") if wrong else None
