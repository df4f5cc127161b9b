"""Every history of the installation, verified: the threads of workspaces, what executions have written, and signed heads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from perdure.db.database import Database
from perdure.journal.entries import Journal
from perdure.runs.service import verify
from perdure.runs.service.heads import Head, Signed, SignedHeads


class Of(StrEnum):
    WORKSPACE = "workspace"
    EXECUTION = "execution"
    HEADS = "heads"  # what was signed of all of them


@dataclass(frozen=True, slots=True)
class History:
    """One that was read. ``wrong``: its first entry that does not hold, 0 for the row beside it, None for none; ``reason`` is a
    sentence then."""

    of: Of
    id: str
    entries: int
    wrong: int | None = None
    reason: str = ""


class Histories(Protocol):
    def verify(self) -> AsyncGenerator[History]:
        """All of all tenants, one by one. Whatever they tell of may go on meanwhile."""
        ...


class StoredHistories:
    """Implements ``Histories`` over the database and the heads that were signed."""

    def __init__(self, database: Database, heads: SignedHeads) -> None:
        self._database = database
        self._heads = heads

    async def verify(self) -> AsyncGenerator[History]:
        signed = await self._heads.read()  # first: what is read after it can only be longer
        for name, reason in signed.wrong.items():
            yield History(Of.HEADS, name, 0, 0, reason)
        async with aclosing(Journal(self._database).checks()) as threads:
            async for workspace_id, links, breaks in threads:
                first = min(breaks, key=lambda one: one.seq, default=None)
                found = (first.seq, first.reason) if first else None
                yield _history(Of.WORKSPACE, workspace_id, [one.hash for one in links], found, signed)
        async with aclosing(verify.checks(self._database)) as executions:
            async for one in executions:
                found = (one.problem.seq, one.problem.reason) if one.problem else None
                yield _history(Of.EXECUTION, one.execution_id, one.hashes, found, signed)
        for (kind, history), head in signed.heads.items():
            yield History(Of(kind), history, 0, 1, f"The history is gone; it had {head.seq} entries, signed at {head.at}.")


def _history(of: Of, history: str, hashes: Sequence[str], found: tuple[int, str] | None, signed: Signed) -> History:
    """With what is wrong with its entries, or with its end. Takes its head away."""
    head = signed.heads.pop((of.value, history), None)
    wrong, reason = found or (_beside(hashes, head) if head else (None, ""))
    return History(of, history, len(hashes), wrong, reason)


def _beside(hashes: Sequence[str], head: Head) -> tuple[int | None, str]:
    if len(hashes) < head.seq:
        return len(hashes) + 1, f"The history ends at entry {len(hashes)}, and {head.seq} were signed at {head.at}."
    if hashes[head.seq - 1] != head.hash:
        return head.seq, f"The entry is another one than was signed at {head.at}."
    return None, ""
