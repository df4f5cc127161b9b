"""What the webhook service takes and returns. Frozen values; the API renders them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from perdure.core.ids import TenantId, WebhookId, WorkspaceId


class WebhookState(StrEnum):
    """``failing``: an event was given up after a day, and none has been delivered since."""

    ACTIVE = "active"
    FAILING = "failing"


class DeliveryState(StrEnum):
    """``failed``: given up. One that was delivered is not there any more."""

    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event that is still to be delivered, or was given up. ``workspace_id`` None: it is about the tenant as a whole.
    ``due_at``: of the next attempt, None where there is none; ``attempts``: those that were begun."""

    seq: int
    at: datetime
    kind: str
    workspace_id: WorkspaceId | None
    workspace: str | None  # its name
    state: DeliveryState
    attempts: int
    due_at: datetime | None
    last_error: str


@dataclass(frozen=True, slots=True)
class Webhook:
    """One row of ``webhooks``. ``kinds``: of which events; none means all. ``pending`` and ``failed`` count events."""

    id: WebhookId
    tenant_id: TenantId
    url: str
    kinds: tuple[str, ...]
    state: WebhookState
    created_at: datetime
    created_by: str
    pending: int
    failed: int
    delivered: int
    delivered_at: datetime | None
    failed_at: datetime | None
    last_error: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of sending something once. ``status``: what the receiver answered, None where it did not."""

    status: int | None
    error: str  # "" where it was delivered
    seconds: float

    @property
    def is_delivered(self) -> bool:
        return not self.error


class Webhooks(Protocol):
    """The commands. ``webhook_id`` of another tenant is NotFound."""

    async def create(self, tenant_id: TenantId, url: str, kinds: tuple[str, ...], by: str) -> tuple[Webhook, str]:
        """The webhook and the secret that receivers check signatures with. Raises InvalidRequest for what is no URL of http or
        https, or leads where nobody may go."""
        ...

    async def of(self, tenant_id: TenantId) -> list[Webhook]:
        """Oldest first."""
        ...

    async def remove(self, tenant_id: TenantId, webhook_id: str) -> None:
        """What was to be delivered is not any more."""
        ...

    async def test(self, tenant_id: TenantId, webhook_id: str) -> Attempt:
        """Send an event of the kind ``test`` now, once."""
        ...

    async def deliveries(self, tenant_id: TenantId, webhook_id: str, after: int, limit: int) -> list[Delivery]:
        """What is still to be delivered and what was given up, by the events' numbers, from behind ``after``."""
        ...

    async def redeliver(self, tenant_id: TenantId, webhook_id: str, seqs: tuple[int, ...] = ()) -> list[int]:
        """Send what was given up once more, for another day: the events of these numbers, or all. Returns their numbers, the
        lowest first. Raises NotFound, and sends nothing, when one of ``seqs`` was not given up."""
        ...
