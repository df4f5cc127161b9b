"""Checking that histories are what was written, and that rows say what histories say."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from perdure.db.database import Database
from perdure.runs.engine import FACT, Entry, fold, head_of, op_text, standing
from perdure.runs.service.rows import entry_hash

_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """Where a history does not hold, and why, in a sentence. ``seq`` 0: the row beside it."""

    execution_id: str
    seq: int
    reason: str


async def verify(database: Database) -> tuple[int, list[Problem]]:
    """How many executions were checked, and for each the first thing that is wrong with it."""
    checked, problems, after = 0, [], ""
    while True:
        rows = await database.all("runs.verified", after=after, limit=_PAGE)
        for row in rows:
            checked += 1
            problem = _problem(row, await _entries(database, row["id"]))
            problems += [problem] if problem else []
        if len(rows) < _PAGE:
            return checked, problems
        after = rows[-1]["id"]


async def _entries(database: Database, execution_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        rows = await database.all("runs.links", id=execution_id, after=found[-1]["seq"] if found else 0, limit=_PAGE)
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
