"""The deliverer: takes what is due, sends it, records what became of it; again later, up to a day.

    pending ──attempt──► delivered (the row goes)
       ▲          └──────► pending, due later (5 s, doubled, at most 4 h, with some chance in it)
       ├── lease over ────► failed, when the first attempt was a day ago: told in the webhook and in the tenant's thread
       └──────────────────── (somebody asks for it) ──┘ └──► the row goes, ``keep_days`` later

An attempt is claimed with a lease, so that one server makes it and a server that dies in the middle delays it by a minute: an
event may arrive twice, with the same id, and never not at all. To one webhook at most one event is under way in a process.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from perdure.core import logs, metrics
from perdure.core.errors import PerdureError
from perdure.core.ids import TenantId
from perdure.journal.entries import canonical
from perdure.journal.feed import event_of
from perdure.webhooks import messages
from perdure.webhooks.model import Attempt
from perdure.webhooks.service import WebhookParts

log = logging.getLogger(__name__)

#: Longer than an attempt can take.
LEASE_S = 60.0
PARALLEL = 8
#: How often rows are looked at without anybody saying that there is something: what is due again, what another server numbered.
WATCHED_S = 1.0
UNWATCHED_S = 30.0
#: How often it is looked for what was given up too long ago.
PRUNED_S = 3600.0
KEEP_DAYS = 30.0


@dataclass(frozen=True, slots=True)
class _Claimed:
    """A delivery of which one attempt is ours."""

    webhook_id: str
    tenant_id: TenantId
    url: str
    generation: int
    attempts: int
    age_s: float
    row: dict[str, Any]


class Deliverer:
    """``start`` and ``close``; tests call ``deliver_due``."""

    def __init__(self, parts: WebhookParts, chance: random.Random | None = None, *, keep_days: float = KEEP_DAYS) -> None:
        self._parts = parts
        self._keep_s = keep_days * 86400
        self._pruned_at: float | None = None  # on the monotonic clock
        self._database = parts.database
        self._chance = chance or random.Random()  # noqa: S311 - spreads retries
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="webhooks")

    async def close(self) -> None:
        """What is under way is cut off, and sent again after its lease."""
        tasks = [task for task in (self._task, *self._busy.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        feed = self._parts.feed
        while True:
            feed.offered.clear()
            self._ended.clear()
            try:
                await self._fill()
                await self._prune_sometimes()
            except PerdureError as error:  # the next pass finds what this one did not
                log.warning("webhooks could not be looked after: %s (%s)", error.message, error.internal)
            except Exception:
                log.exception("the delivery of webhooks failed in a way nobody foresaw")
            waits = [asyncio.ensure_future(event.wait()) for event in (feed.offered, self._ended)]
            try:
                await asyncio.wait(
                    waits, timeout=WATCHED_S if feed.has_webhooks else UNWATCHED_S, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for wait in waits:
                    wait.cancel()

    async def _prune_sometimes(self) -> None:
        now = self._parts.clock.monotonic()
        if self._pruned_at is None or now - self._pruned_at >= PRUNED_S:
            self._pruned_at = now
            await self.prune()

    async def prune(self) -> None:
        """Forget what was given up so long ago that nobody will ask for it."""
        while await self._database.run("webhooks.prune", keep_s=self._keep_s):
            pass

    async def deliver_due(self) -> None:
        """Until nothing is due any more."""
        self._ended.set()
        while self._busy or self._ended.is_set():
            if not self._ended.is_set():
                await self._ended.wait()
            self._ended.clear()  # one that ends while rows are claimed may have kept its webhook's next from being seen
            await self._fill()

    async def _fill(self) -> None:
        while len(self._busy) < PARALLEL:
            row = await self._database.one("webhooks.claim", busy=list(self._busy), lease_s=LEASE_S)
            if row is None:
                return
            claimed = _Claimed(
                row["webhook_id"],
                TenantId(row["tenant_id"]),
                row["url"],
                row["attempt_generation"],
                row["attempts"],
                row["age_s"],
                row,
            )
            task = asyncio.create_task(self._deliver(claimed), name=f"webhook-{claimed.webhook_id}")
            self._busy[claimed.webhook_id] = task
            task.add_done_callback(partial(self._over, claimed.webhook_id))

    def _over(self, webhook_id: str, _task: asyncio.Task[None]) -> None:
        del self._busy[webhook_id]
        self._ended.set()

    async def _deliver(self, claimed: _Claimed) -> None:
        with logs.exactly({"tenant": claimed.tenant_id, "webhook": claimed.webhook_id, "seq": claimed.row["seq"]}):
            event = event_of(claimed.row, claimed.tenant_id)
            message_id = messages.message_id(claimed.webhook_id, event.seq)
            attempt = await self._parts.send(claimed.webhook_id, claimed.url, message_id, messages.body(event))
            metrics.WEBHOOK_ATTEMPTS.add(outcome="delivered" if attempt.is_delivered else "failed")
            try:
                await self._record(claimed, attempt)
            except PerdureError as error:  # the lease says that nobody knows, so it is sent again
                log.warning("the outcome of a delivery was not recorded: %s (%s)", error.message, error.internal)

    async def _record(self, claimed: _Claimed, attempt: Attempt) -> None:
        which = {"webhook_id": claimed.webhook_id, "seq": claimed.row["seq"], "generation": claimed.generation}
        if attempt.is_delivered:
            await self._database.run("webhooks.delivered", **which)
            return
        wait_s = messages.next_wait_s(claimed.attempts, claimed.age_s + attempt.seconds, self._chance.random())
        if wait_s is not None:
            log.info("a delivery failed", extra={"error": attempt.error, "attempts": claimed.attempts, "again_s": round(wait_s)})
            await self._database.run("webhooks.postponed", **which, wait_s=wait_s, error=attempt.error)
            return
        log.warning("a delivery was given up", extra={"error": attempt.error, "attempts": claimed.attempts})
        async with self._database.transaction() as tx:
            row = await tx.one("webhooks.give_up", **which, error=attempt.error)
            if row is not None and row["is_news"]:
                told = {"webhook_id": claimed.webhook_id, "event_seq": claimed.row["seq"], "error": attempt.error}
                await tx.one("webhooks.tell", tenant_id=claimed.tenant_id, body=canonical(told))
        with suppress(PerdureError):
            await self._parts.feed.number()
