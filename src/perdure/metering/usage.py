"""Usage of workspaces between two instants: how long awake, paused and asleep, processor time, bytes stored and moved.

Nothing is counted here. Times are those of the journal's entries (the view ``lifecycle_intervals``), processor time and the
bytes of egress and of requests are readings in the same entries, stored bytes are spans that triggers keep beside the rows of
snapshots and packs. So a question can be asked as often as one likes, and a reconciler that repeats itself changes no answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from perdure.core.errors import InvalidRequest, NotFound
from perdure.core.ids import TenantId, WorkspaceId
from perdure.db.database import Database


@dataclass(frozen=True, slots=True)
class Amounts:
    """``losses`` counts machines that were found dead: what they did after they were last known to run is not in here."""

    awake: timedelta = timedelta()
    paused: timedelta = timedelta()
    asleep: timedelta = timedelta()
    losses: int = 0
    cpu_s: float = 0.0
    memory_byte_s: float = 0.0  # of the machine's memory, while it had a machine
    local_byte_s: float = 0.0  # of its snapshots on their node
    store_byte_s: float = 0.0  # of its packs in the object store
    sent_bytes: int = 0  # out of the workspace, through egress
    received_bytes: int = 0
    request_bytes: int = 0  # into the workspace by its callers: files, stdin, ports, invocations
    answer_bytes: int = 0  # out of it, to them
    uploaded_bytes: int = 0  # to the object store
    fetched_bytes: int = 0  # from it


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one workspace, deleted or not."""

    workspace_id: WorkspaceId
    name: str
    state: str
    amounts: Amounts


def total(amounts: Iterable[Amounts]) -> Amounts:
    """The sum of each."""
    summed = Amounts()
    for one in amounts:
        summed = Amounts(*(getattr(summed, field.name) + getattr(one, field.name) for field in fields(Amounts)))
    return summed


class Metering:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, tenant_id: TenantId, ref: str | None, since: datetime | None, until: datetime | None) -> list[Usage]:
        """Of all workspaces of a tenant, or of those that have, or had, an id or a name, oldest first. Without a bound: from the
        first to now. Raises NotFound, and InvalidRequest for an end before the beginning."""
        if since is not None and until is not None and until < since:
            raise InvalidRequest("The end lies before the beginning.", hint="Ask for usage from an earlier to a later time.")
        found = await self._database.all("usage.workspaces", tenant_id=tenant_id, ref=ref)
        if ref is not None and not found:
            raise NotFound(f"There is and was no workspace {ref!r}.", hint="'perdure usage' shows all there were.")
        rows = await self._database.all("usage.of", ids=[row["id"] for row in found], since=since, until=until)
        names = [field.name for field in fields(Amounts)]
        return [
            Usage(WorkspaceId(row["id"]), row["name"], row["state"], Amounts(**{name: row[name] for name in names}))
            for row in rows
        ]
