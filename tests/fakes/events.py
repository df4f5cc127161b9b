"""A feed and webhooks in memory: what is put into the feed is read from it in order, numbered without holes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from perdure.core.errors import NotFound
from perdure.core.ids import TenantId, WebhookId, WorkspaceId
from perdure.journal.feed import FeedEvent, Reading, Wanted
from perdure.webhooks import messages
from perdure.webhooks.model import Attempt, Delivery, DeliveryState, Webhook, WebhookState
from tests.fakes.memory_guest import MOMENT


class FakeFeed:
    """Of one tenant. ``put`` is what happens."""

    def __init__(self) -> None:
        self.events: list[FeedEvent] = []
        self.readers = 0
        self._more = asyncio.Event()

    def put(self, kind: str, workspace: str = "demo", **body: Any) -> None:
        thread = [one for one in self.events if one.workspace == workspace]
        self.events.append(
            FeedEvent(len(self.events) + 1, MOMENT, kind, 1, body, WorkspaceId(f"ws_{workspace}"), workspace, len(thread) + 1)
        )
        self._more.set()
        self._more = asyncio.Event()

    async def begin(self, wanted: Wanted) -> Reading:
        names = {one.workspace for one in self.events} | {one.workspace_id for one in self.events}
        if wanted.workspace is not None and wanted.workspace not in names:
            raise NotFound(f"There is and was no workspace {wanted.workspace!r}.", hint="'perdure ls' shows those there are.")
        reading = Reading(
            wanted.tenant_id, 0, () if wanted.workspace is None else (wanted.workspace,), wanted.kinds, wanted.follow
        )
        after = wanted.after
        if after is None and wanted.last is not None:
            found = [one.seq for one in self.events if _is_wanted(one, reading)]
            tail = found[-wanted.last :] if wanted.last else []
            after = tail[0] - 1 if tail else len(self.events)
        if after is None:
            after = len(self.events) if wanted.follow else 0
        return Reading(reading.tenant_id, after, reading.workspaces, reading.kinds, reading.follow)

    async def read(self, reading: Reading) -> AsyncGenerator[FeedEvent, None]:
        after = reading.after
        self.readers += 1
        try:
            while True:
                more = self._more
                for one in self.events[after:]:
                    after = one.seq
                    if _is_wanted(one, reading):
                        yield one
                if not reading.follow:
                    return
                await more.wait()
        finally:
            self.readers -= 1


def _is_wanted(one: FeedEvent, reading: Reading) -> bool:
    named = not reading.workspaces or one.workspace in reading.workspaces or one.workspace_id in reading.workspaces
    return named and (not reading.kinds or one.kind in reading.kinds)


class FakeWebhooks:
    """Sends nothing. ``outcome`` is what becomes of a test; ``put`` says what is to be delivered, or was given up."""

    def __init__(self) -> None:
        self.rows: dict[str, Webhook] = {}
        self.outcome = Attempt(204, "", 0.05)
        self.undelivered: dict[str, dict[int, Delivery]] = {}

    async def create(self, tenant_id: TenantId, url: str, kinds: tuple[str, ...], by: str) -> tuple[Webhook, str]:
        messages.target(url)
        webhook_id = WebhookId(f"whk_{len(self.rows) + 1:026d}")
        self.rows[webhook_id] = Webhook(
            webhook_id, tenant_id, url, kinds, WebhookState.ACTIVE, MOMENT, by, 0, 0, 0, None, None, ""
        )
        return self.rows[webhook_id], messages.shown_secret(b"s" * messages.SECRET_BYTES)

    async def of(self, tenant_id: TenantId) -> list[Webhook]:
        return [one for one in self.rows.values() if one.tenant_id == tenant_id]

    async def remove(self, tenant_id: TenantId, webhook_id: str) -> None:
        self._check(tenant_id, webhook_id)
        del self.rows[webhook_id]

    async def test(self, tenant_id: TenantId, webhook_id: str) -> Attempt:
        self._check(tenant_id, webhook_id)
        return self.outcome

    def put(self, webhook_id: str, seq: int, state: DeliveryState, error: str = "") -> None:
        due_at = MOMENT if state is DeliveryState.PENDING else None
        found = Delivery(seq, MOMENT, "hibernated", WorkspaceId("ws_demo"), "demo", state, 30, due_at, error)
        self.undelivered.setdefault(webhook_id, {})[seq] = found

    async def deliveries(self, tenant_id: TenantId, webhook_id: str, after: int, limit: int) -> list[Delivery]:
        self._check(tenant_id, webhook_id)
        found = sorted(self.undelivered.get(webhook_id, {}).items())
        return [one for seq, one in found if seq > after][:limit]

    async def redeliver(self, tenant_id: TenantId, webhook_id: str, seqs: tuple[int, ...] = ()) -> list[int]:
        self._check(tenant_id, webhook_id)
        rows = self.undelivered.get(webhook_id, {})
        failed = {seq for seq, one in rows.items() if one.state is DeliveryState.FAILED}
        if missing := sorted({*seqs} - failed):
            raise NotFound(
                f"Event {missing[0]} was not given up by this webhook.", hint=f"See what was: perdure webhook show {webhook_id}."
            )
        again = sorted({*seqs} or failed)
        for seq in again:
            rows[seq] = replace(rows[seq], state=DeliveryState.PENDING, attempts=0, due_at=MOMENT)
        return again

    def _check(self, tenant_id: TenantId, webhook_id: str) -> None:
        if webhook_id not in self.rows or self.rows[webhook_id].tenant_id != tenant_id:
            raise NotFound(f"There is no webhook {webhook_id!r}.", hint="List them with 'perdure webhook ls'.")
