"""The feed: what happened to all of a tenant's workspaces, in one order, from a number on, and as it happens.

An entry of the journal gets its number after it is committed (``number``), by one numbering at a time in the whole installation.
So numbers have no holes, entries of one thread keep their order, and whoever has read up to n has everything up to n: a row that
commits late gets a late number, never one that a reader has passed. What is read here is at least what there is; reading again
from an older number gives the same again.

New entries are looked for twice a second while anybody listens or a webhook waits; a notification for each would take a lock of
the whole database.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from perdure.core.errors import NotFound, PerdureError
from perdure.core.ids import TenantId, WorkspaceId
from perdure.db.database import Database

log = logging.getLogger(__name__)

#: How often entries are numbered while somebody waits for them, and while nobody does.
WATCHED_S = 0.5
UNWATCHED_S = 30.0
PAGE = 500


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """An entry of a thread with its number in the feed. ``workspace_id`` None: it is about the tenant as a whole."""

    seq: int
    at: datetime
    kind: str
    generation: int
    body: Mapping[str, Any]
    workspace_id: WorkspaceId | None
    workspace: str | None  # its name
    entry_seq: int  # in its thread


@dataclass(frozen=True, slots=True)
class Wanted:
    """``after``: what was read last; ``last``: begin so many before the end; neither: at the beginning, or, to follow, now.
    ``workspace`` is an id or a name, of a deleted one too."""

    tenant_id: TenantId
    after: int | None = None
    last: int | None = None
    workspace: str | None = None
    kinds: tuple[str, ...] = ()
    follow: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """Where a reading begins: after this number."""

    tenant_id: TenantId
    after: int
    workspaces: tuple[str, ...]
    kinds: tuple[str, ...]
    follow: bool


def event_of(row: Mapping[str, Any], tenant_id: TenantId) -> FeedEvent:
    """Of a row with the columns of ``events.read``."""
    thread = row["workspace_id"]
    return FeedEvent(
        seq=row["seq"],
        at=row["at"],
        kind=row["kind"],
        generation=row["generation"],
        body=json.loads(row["body"]),
        workspace_id=None if thread == tenant_id else WorkspaceId(thread),
        workspace=row["name"],
        entry_seq=row["entry_seq"],
    )


@dataclass(slots=True)
class _Watch:
    """Who follows, by tenant, and the last number that is known of each; ``moved`` is set, and replaced, when one has grown."""

    followers: Counter[TenantId] = field(default_factory=Counter)
    heads: dict[TenantId, int] = field(default_factory=dict)
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class Feed:
    """``start`` before somebody follows, ``close`` after."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watch = _Watch()
        self._soon = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.has_webhooks = False  # as of the last numbering
        self.offered = asyncio.Event()  # set when something was put before a webhook; whoever delivers clears it

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="feed")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def soon(self) -> None:
        """Look now, and look often: somebody has begun to listen."""
        self._soon.set()

    async def _run(self) -> None:
        while True:
            self._soon.clear()
            try:
                await self.number()
                await self._look()
            except PerdureError as error:  # the next pass finds what this one did not
                log.warning("the feed could not be read: %s (%s)", error.message, error.internal)
            except Exception:
                log.exception("the feed failed in a way nobody foresaw")
            is_watched = self.has_webhooks or self._watch.followers.total() > 0
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCHED_S if is_watched else UNWATCHED_S):
                    await self._soon.wait()

    async def number(self) -> None:
        """Give numbers to what has none."""
        async with self._database.transaction() as tx:
            turn = await tx.one("events.turn")
            assert turn is not None, "a select without from gives a row"
            self.has_webhooks = turn["has_webhooks"]
            row = await tx.one("events.number")
        if row is not None and row["offered"]:
            self.offered.set()

    async def _look(self) -> None:
        """Wake those whose tenant has something new, whichever server has numbered it."""
        watch = self._watch
        tenants = list(watch.followers)
        if not tenants:
            return
        heads = await self._heads(tenants)
        if heads != watch.heads:
            watch.heads = heads
            watch.moved.set()
            watch.moved = asyncio.Event()

    async def _heads(self, tenants: list[TenantId]) -> dict[TenantId, int]:
        rows = await self._database.all("events.heads", tenants=tenants)
        return {TenantId(row["tenant_id"]): row["seq"] for row in rows}

    # ---------------------------------------------------------------------------------------------------------------- readers

    async def begin(self, wanted: Wanted) -> Reading:
        """Decide where to begin; all that is committed now has a number. Raises NotFound for a workspace that never was."""
        workspaces: tuple[str, ...] = ()
        if wanted.workspace is not None:
            rows = await self._database.all("events.workspaces", tenant_id=wanted.tenant_id, ref=wanted.workspace)
            workspaces = tuple(row["id"] for row in rows)
            if not workspaces:
                raise NotFound(f"There is and was no workspace {wanted.workspace!r}.", hint="'perdure ls' shows those there are.")
        await self.number()
        after = wanted.after
        if after is None:
            after = await self._from(wanted, workspaces)
        return Reading(wanted.tenant_id, after, workspaces, wanted.kinds, wanted.follow)

    async def _from(self, wanted: Wanted, workspaces: tuple[str, ...]) -> int:
        head = (await self._heads([wanted.tenant_id])).get(wanted.tenant_id, 0)
        if wanted.last is None:
            return head if wanted.follow else 0
        if wanted.last == 0:
            return head
        row = await self._database.one(
            "events.tail",
            **{"tenant_id": wanted.tenant_id, "head": head, "last": wanted.last},
            **{"workspaces": list(workspaces), "kinds": list(wanted.kinds)},
        )
        return head if row is None or row["seq"] is None else row["seq"] - 1

    async def read(self, reading: Reading) -> AsyncGenerator[FeedEvent, None]:
        """In order; ends at the end of what there is, or never, when it follows."""
        tenant_id, after = reading.tenant_id, reading.after
        self._watch.followers[tenant_id] += 1
        try:
            self.soon()
            while True:
                moved = self._watch.moved  # taken before the look: what comes after it is not missed
                head = (await self._heads([tenant_id])).get(tenant_id, 0)
                while after < head:
                    rows = await self._page(reading, after, head)
                    for row in rows:
                        yield event_of(row, tenant_id)
                    after = head if len(rows) < PAGE else rows[-1]["seq"]
                if not reading.follow:
                    return
                await moved.wait()
        finally:
            self._watch.followers[tenant_id] -= 1
            if not self._watch.followers[tenant_id]:
                del self._watch.followers[tenant_id]

    async def _page(self, reading: Reading, after: int, head: int) -> list[dict[str, Any]]:
        return await self._database.all(
            "events.read",
            **{"tenant_id": reading.tenant_id, "after": after, "head": head, "limit": PAGE},
            **{"workspaces": list(reading.workspaces), "kinds": list(reading.kinds)},
        )
