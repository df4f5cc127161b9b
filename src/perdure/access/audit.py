"""The audit: one row for every call that changes something, and for what is refused.

What changes a record of the server (workspaces, snapshots, keys, tenants, images, backups) is noted before it begins and gets
its row when it has been answered. A server that ends in between leaves the note, and its next start makes a row of it with the
outcome ``interrupted``; so nothing is done of which there is no row. What uses a workspace (wakes, commands, files,
connections) gets its row right after, before the caller has its answer, without waiting for the disk. Refusals are sampled: who
is refused all the time, or without a key, gets a few rows, and from time to time one that says how many there were.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from perdure.access.buckets import Rate, Sampler
from perdure.core.clock import Clock
from perdure.core.errors import PerdureError
from perdure.core.ids import TenantId
from perdure.core.pauses import pause
from perdure.db.database import Database

_log = logging.getLogger(__name__)

DAY_S = 86400.0
#: Refusals of one name, and of all together, that get a row of their own.
EACH = Rate(per_s=1 / 60, burst=20)
OVERALL = Rate(per_s=1 / 10, burst=500)
#: Names whose other refusals are counted apart from each other.
NAMES_MAX = 100
#: How often those that were only counted become rows, and old rows go.
PASS_S = 600.0
#: How long a follower waits at most before it looks for rows of other servers.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Act:
    """A call as the audit sees it. ``principal`` is empty for one without a key that counts."""

    tenant_id: TenantId
    principal: str
    route: str
    target: str
    request_id: str
    peer: str
    outcome: str = ""
    status: int = 0
    note: str = ""  # names the note before it, where there is one


@dataclass(frozen=True, slots=True)
class AuditRow:
    seq: int
    at: datetime
    act: Act
    repeated: int


class Audit:
    """``server`` names this process's notes among those of others on the same database. ``start`` before use, ``close`` after."""

    def __init__(self, database: Database, clock: Clock, server: str, keep_days: float) -> None:
        self._database = database
        self._clock = clock
        self._server = server
        self._keep_s = keep_days * DAY_S
        self._sampler = Sampler(EACH, OVERALL, NAMES_MAX)
        self._counted: OrderedDict[str, tuple[Act, int]] = OrderedDict()
        self._written = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make rows of what an earlier process of this server had begun."""
        await self._database.all("audit.interrupted", server=self._server)
        self._loop = asyncio.create_task(self._repeat(), name="audit")

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        with suppress(PerdureError):
            await self.write_counted()

    # ---------------------------------------------------------------------------------------------------------------- writing

    async def begin(self, act: Act, *, of_workspace: bool) -> None:
        """Note what is about to be done. Raises what the database does: what cannot be noted is not done. ``of_workspace``: the
        target begins with an id or a name of one, and the note has its id."""
        name, slash, rest = act.target.partition("/")
        found = {"workspace": name if of_workspace else None, "rest": slash + rest}
        await self._database.run("audit.begin", **_noted(act), **found, id=act.note, server=self._server)

    async def finish(self, act: Act) -> None:
        """It has been answered. An empty target leaves what was noted. One that fails leaves the note."""
        values = {"id": act.note, "target": act.target, "outcome": act.outcome, "status": act.status}
        await self._write("audit.finish", **values)

    async def append(self, act: Act, repeated: int = 1) -> None:
        """Put on record what has been done, without a note before it."""
        await self._write("audit.append", **_noted(act), outcome=act.outcome, status=act.status, repeated=repeated)

    async def refused(self, act: Act, *, has_begun: bool = False) -> None:
        """Put a refusal on record, or count it."""
        if has_begun:
            await self._write("audit.drop", id=act.note)
        name = act.principal or act.peer
        if self._sampler.is_chosen(name, self._clock.monotonic()):
            await self.append(act)
        else:
            self._count(name, act)

    def _count(self, name: str, act: Act) -> None:
        if name not in self._counted and len(self._counted) >= NAMES_MAX:
            name, act = "", replace(act, principal="", peer="many", target="", request_id="")
        _, count = self._counted.get(name, (act, 0))
        self._counted[name] = (act, count + 1)

    async def write_counted(self) -> None:
        """A row for each name whose refusals were only counted, as the last of them was."""
        counted, self._counted = self._counted, OrderedDict()
        for act, count in counted.values():
            await self.append(act, count)

    async def _write(self, query: str, **values: Any) -> None:
        """The call is over and its answer waits: a database that fails does not take it away."""
        try:
            await self._database.all(query, **values)
        except PerdureError as error:
            _log.warning("the audit could not be written: %s (%s)", error.message, values)
        self._written.set()

    # ---------------------------------------------------------------------------------------------------------------- reading

    async def page(self, tenant_id: TenantId | None, since: datetime | None, after: int, limit: int) -> list[AuditRow]:
        """Rows behind ``after``, oldest first; of all tenants for None. Whoever goes on behind the last one misses none."""
        async with self._database.transaction() as tx:
            await tx.one("audit.settle")
            rows = await tx.all("audit.page", tenant_id=tenant_id, since=since, after=after, limit=limit)
        return [_row(row) for row in rows]

    async def more(self) -> None:
        """Returns when this process has written a row, or after a moment: another one may have."""
        self._written.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._written.wait()

    # ----------------------------------------------------------------------------------------------------------------- upkeep

    async def _repeat(self) -> None:
        while True:
            try:
                await self.tend()
            except PerdureError as error:
                _log.warning("the audit could not be tended: %s", error.message)
            await pause(PASS_S)

    async def tend(self) -> None:
        """One pass: what was counted becomes rows, what is too old goes."""
        await self.write_counted()
        await self._database.all("audit.interrupted", server=None)
        while await self._database.run("audit.prune", keep_s=self._keep_s):
            pass


def _noted(act: Act) -> dict[str, Any]:
    return {
        **{"tenant_id": act.tenant_id, "principal": act.principal, "route": act.route, "target": act.target},
        **{"request_id": act.request_id, "peer": act.peer},
    }


def _row(row: dict[str, Any]) -> AuditRow:
    names = ("principal", "route", "target", "request_id", "peer", "outcome", "status")
    act = Act(tenant_id=TenantId(row["tenant_id"]), **{name: row[name] for name in names})
    return AuditRow(row["seq"], row["at"], act, row["repeated"])
