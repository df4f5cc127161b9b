"""The feed of events, and webhooks that it is sent to."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from perdure.wire.public.common import Answer, Body, Paged, Text


class FeedEvent(Answer):
    """An entry of a workspace's thread with its number in the tenant's feed. Numbers have no holes."""

    seq: int
    at: datetime
    kind: str
    workspace_id: str | None = Field(default=None, description="null: it is about the tenant as a whole.")
    workspace: str | None = Field(default=None, description="The workspace's name.")
    entry_seq: int = Field(description="The entry's number in its own thread.")
    generation: int
    body: dict[str, Any]


class CreateWebhook(Body):
    """``events``: kinds as in a thread, such as ``hibernated`` and ``failed``; none means all."""

    url: Annotated[str, Field(max_length=2048, json_schema_extra={"pattern": "^https?://[!-~]+$"})]
    events: list[Annotated[Text, Field(json_schema_extra={"minLength": 1, "maxLength": 50})]] = Field(
        default_factory=list, max_length=50
    )


class WebhookInfo(Answer):
    """``state``: ``failing`` when an event was given up after a day and none has been delivered since. ``pending`` and ``failed``
    count events that are still to be delivered, and that were given up; ``last_error`` is empty after one was delivered."""

    id: str
    url: str
    events: list[str]
    state: str
    created_at: datetime
    created_by: str
    pending: int
    failed: int
    delivered: int
    delivered_at: datetime | None
    failed_at: datetime | None
    last_error: str


class CreatedWebhook(Answer):
    """The only answer that has the secret with which the receiver checks signatures (Standard Webhooks)."""

    webhook: WebhookInfo
    secret: str


class WebhookList(Answer):
    webhooks: list[WebhookInfo]


class DeliveryInfo(Answer):
    """An event that is still to be delivered (``pending``), or was given up (``failed``). Delivered ones are in no list."""

    seq: int = Field(description="The event's number in the feed.")
    at: datetime
    kind: str
    workspace_id: str | None = Field(default=None, description="null: it is about the tenant as a whole.")
    workspace: str | None = Field(default=None, description="The workspace's name.")
    state: str
    attempts: int = Field(description="Those that were begun, since it happened or was sent again.")
    due_at: datetime | None = Field(default=None, description="Of the next attempt; null: nobody tries any more.")
    last_error: str


class DeliveryList(Paged):
    deliveries: list[DeliveryInfo]


class Redeliver(Body):
    """``events``: numbers of events that were given up; none means all."""

    events: list[Annotated[int, Field(ge=1, le=1 << 53)]] = Field(default_factory=list, max_length=1000)


class Redelivered(Answer):
    """The numbers of the events that are sent again, the lowest first."""

    events: list[int]


class WebhookTested(Answer):
    """``status``: what the receiver answered, null where it did not; ``error`` is empty when it was delivered."""

    delivered: bool
    status: int | None
    error: str
    seconds: float
