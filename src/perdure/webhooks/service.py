"""The commands of ``model.Webhooks``. A webhook's secret is derived from the master key and its id, and is stored nowhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from perdure.core import keys
from perdure.core.clock import Clock, epoch_ms
from perdure.core.errors import Conflict, InvalidRequest, NotFound
from perdure.core.ids import TenantId, WebhookId, WorkspaceId, is_id, mint
from perdure.db.database import Database
from perdure.journal.feed import Feed
from perdure.webhooks import messages
from perdure.webhooks.model import Attempt, Delivery, DeliveryState, Webhook, WebhookState
from perdure.webhooks.sending import Sender

#: What the master key's derivative for webhooks is for (``core.keys.derive``).
PURPOSE = "webhooks"
WEBHOOKS_MAX = 100
KINDS_MAX = 50
_KIND_LENGTH_MAX = 50


@dataclass(frozen=True, slots=True)
class WebhookParts:
    """What service and delivery are made of. ``check`` raises for a host and port where nothing may be sent to."""

    database: Database
    clock: Clock
    feed: Feed
    sender: Sender
    check: Callable[[str, int], Awaitable[None]]
    root: bytes  # the master key's derivative

    def secret(self, webhook_id: str) -> bytes:
        return keys.derive(self.root, webhook_id, length=messages.SECRET_BYTES)

    async def send(self, webhook_id: str, url: str, message_id: str, body: bytes) -> Attempt:
        """One attempt, signed as of now."""
        now_s = int(self.clock.now().timestamp())
        return await self.sender.post(
            messages.target(url), messages.headers(self.secret(webhook_id), message_id, now_s, body), body
        )


class WebhookService:
    """Implements ``model.Webhooks``."""

    def __init__(self, parts: WebhookParts) -> None:
        self._parts = parts
        self._database = parts.database

    async def create(self, tenant_id: TenantId, url: str, kinds: tuple[str, ...], by: str) -> tuple[Webhook, str]:
        target = messages.target(url)
        if len(kinds) > KINDS_MAX or not all(0 < len(kind) <= _KIND_LENGTH_MAX for kind in kinds):
            raise InvalidRequest("That are too many kinds of events, or one has no or too long a name.", hint="None means all.")
        await self._parts.check(target.host, target.port)
        webhook_id = WebhookId(mint("whk", now_ms=epoch_ms(self._parts.clock)))
        row = await self._database.one(
            "webhooks.insert",
            **{"id": webhook_id, "tenant_id": tenant_id, "url": url, "kinds": list(dict.fromkeys(kinds)), "by": by},
            most=WEBHOOKS_MAX,
        )
        if row is None:
            raise Conflict(f"There are {WEBHOOKS_MAX} webhooks already.", hint="Remove one: perdure webhook rm ID.")
        self._parts.feed.soon()
        return _webhook(row), messages.shown_secret(self._parts.secret(webhook_id))

    async def of(self, tenant_id: TenantId) -> list[Webhook]:
        return [_webhook(row) for row in await self._database.all("webhooks.of_tenant", tenant_id=tenant_id)]

    async def remove(self, tenant_id: TenantId, webhook_id: str) -> None:
        if await self._database.one("webhooks.remove", tenant_id=tenant_id, id=webhook_id) is None:
            raise _unknown(webhook_id)

    async def test(self, tenant_id: TenantId, webhook_id: str) -> Attempt:
        row = await self._find(tenant_id, webhook_id)
        now = self._parts.clock.now()
        message_id = mint("msg", now_ms=epoch_ms(self._parts.clock))
        return await self._parts.send(row["id"], row["url"], message_id, messages.test_body(now.isoformat()))

    async def deliveries(self, tenant_id: TenantId, webhook_id: str, after: int, limit: int) -> list[Delivery]:
        await self._find(tenant_id, webhook_id)
        rows = await self._database.all(
            "webhooks.deliveries", tenant_id=tenant_id, webhook_id=webhook_id, after=after, limit=limit
        )
        return [_delivery(row, tenant_id) for row in rows]

    async def redeliver(self, tenant_id: TenantId, webhook_id: str, seqs: tuple[int, ...] = ()) -> list[int]:
        await self._find(tenant_id, webhook_id)
        async with self._database.transaction() as tx:  # an error takes all of it back
            rows = await tx.all("webhooks.again", tenant_id=tenant_id, webhook_id=webhook_id, seqs=list(seqs) or None)
            found = sorted(row["seq"] for row in rows)
            if missing := sorted({*seqs} - {*found}):
                raise NotFound(
                    f"Event {missing[0]} was not given up by this webhook.",
                    hint=f"See what was: perdure webhook show {webhook_id}.",
                )
        self._parts.feed.offered.set()
        return found

    async def _find(self, tenant_id: TenantId, webhook_id: str) -> dict[str, Any]:
        row = await self._database.one("webhooks.by_id", tenant_id=tenant_id, id=webhook_id)
        if row is None:
            raise _unknown(webhook_id)
        return row


def _unknown(webhook_id: str) -> NotFound:
    shape = "" if is_id(webhook_id, "whk") else " Webhooks are named by their ids."
    return NotFound(f"There is no webhook {webhook_id!r}.{shape}", hint="List them with 'perdure webhook ls'.")


def _webhook(row: dict[str, Any]) -> Webhook:
    return Webhook(
        id=WebhookId(row["id"]),
        tenant_id=TenantId(row["tenant_id"]),
        url=row["url"],
        kinds=tuple(row["kinds"]),
        state=WebhookState(row["state"]),
        created_at=row["created_at"],
        created_by=row["created_by"],
        pending=row["pending"],
        failed=row["failed"],
        delivered=row["delivered"],
        delivered_at=row["delivered_at"],
        failed_at=row["failed_at"],
        last_error=row["last_error"],
    )


def _delivery(row: dict[str, Any], tenant_id: TenantId) -> Delivery:
    state = DeliveryState(row["state"])
    return Delivery(
        seq=row["seq"],
        at=row["at"],
        kind=row["kind"],
        workspace_id=None if row["workspace_id"] == tenant_id else WorkspaceId(row["workspace_id"]),
        workspace=row["workspace"],
        state=state,
        attempts=row["attempts"],
        due_at=row["due_at"] if state is DeliveryState.PENDING else None,
        last_error=row["last_error"],
    )
