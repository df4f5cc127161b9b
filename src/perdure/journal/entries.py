"""Reading and appending journal entries.

Entries that tell about a state change are appended by the statement that makes the change (``journal_append`` in its RETURNING
clause, see ``db/queries/workspaces.sql``); ``Journal.append`` is for entries that stand alone.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from perdure.core.ids import TenantId, WorkspaceId
from perdure.db.database import Database, Transaction
from perdure.journal.chain import Break, Link, check

PAGE = 1000


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, its body decoded."""

    seq: int
    at: datetime
    kind: str
    generation: int
    body: Mapping[str, Any]
    hash: str


def canonical(body: Mapping[str, Any]) -> str:
    """The JSON text that is stored and hashed: keys sorted, no spaces, ASCII only, no NaN."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


class Journal:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(
        self, transaction: Transaction, workspace_id: WorkspaceId, kind: str, generation: int, body: Mapping[str, Any]
    ) -> int:
        """Append within the caller's transaction; locks the workspace's row first. Returns the entry's seq, 0 if no such row."""
        row = await transaction.one(
            "journal.append", workspace_id=workspace_id, kind=kind, generation=generation, body=canonical(body)
        )
        return int(row["seq"]) if row else 0

    async def read(self, tenant_id: TenantId, workspace_id: WorkspaceId, *, after_seq: int = 0, limit: int = PAGE) -> list[Entry]:
        rows = await self._database.all(
            "journal.read", tenant_id=tenant_id, workspace_id=workspace_id, after_seq=after_seq, limit=limit
        )
        return [
            Entry(row["seq"], row["at"], row["kind"], row["generation"], json.loads(row["body"]), row["hash"]) for row in rows
        ]

    async def verify(self) -> tuple[int, list[Break]]:
        """Recompute every chain: how many entries were checked, and every break found."""
        checked, breaks = 0, list[Break]()
        async for _, links, found in self.checks():
            checked += len(links)
            breaks += found
        return checked, breaks

    async def checks(self) -> AsyncGenerator[tuple[str, list[Link], list[Break]]]:
        """The same chain by chain: the workspace, its entries, and what is wrong with them."""
        for row in await self._database.all("journal.workspaces"):
            links = await self._links(row["workspace_id"])
            yield row["workspace_id"], links, check(links)

    async def _links(self, workspace_id: str) -> list[Link]:
        links: list[Link] = []
        while True:
            after = links[-1].seq if links else 0
            rows = await self._database.all("journal.links", workspace_id=workspace_id, after_seq=after, limit=PAGE)
            links += [Link(**row) for row in rows]
            if len(rows) < PAGE:
                return links
