"""What a server tells those outside, put together for ``wiring``: spans, what its egress decides, the feed and webhooks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

import perdure
from perdure.core import keys, metrics, tracing
from perdure.core.clock import Clock
from perdure.core.config import Settings, otel_settings
from perdure.db.database import Database
from perdure.gateway.egress import Dialer, EgressDecision, EgressEvent
from perdure.gateway.outward import Outward
from perdure.gateway.rules import EgressRules
from perdure.journal.feed import Feed
from perdure.webhooks.delivery import Deliverer
from perdure.webhooks.sending import Sender
from perdure.webhooks.service import PURPOSE, WebhookParts, WebhookService

log = structlog.get_logger(__name__)


@contextmanager
def traces() -> Iterator[None]:
    """Spans are made in the block, if the environment asks for them; what is left of them is sent at its end."""
    provider = tracing.configure(otel_settings(), perdure.__version__)
    try:
        yield
    finally:
        if provider is not None:
            tracing.use(None)
            provider.shutdown()


@asynccontextmanager
async def events(settings: Settings, clock: Clock, database: Database) -> AsyncIterator[tuple[Feed, WebhookService]]:
    """The feed and the webhooks that it is sent to, at work in the block."""
    feed = Feed(database)
    outward = Outward(Dialer(EgressRules.parse(settings.webhook_private_allow), setting="PERDURE_WEBHOOK_PRIVATE_ALLOW"))
    root = keys.derive(keys.master_key(settings.master_key_file, settings.store_keys_dir), PURPOSE)
    parts = WebhookParts(database, clock, feed, Sender(outward.open), outward.check, root)
    deliverer = Deliverer(parts, keep_days=settings.webhook_keep_days)
    await feed.start()
    await deliverer.start()
    try:
        yield feed, WebhookService(parts)
    finally:
        await deliverer.close()
        await feed.close()


def audit(event: EgressEvent) -> None:
    """A line and a count for each decision of the egress gateway."""
    if event.decision is EgressDecision.ENDED:
        metrics.EGRESS_SENT.add(event.sent_bytes)
        metrics.EGRESS_RECEIVED.add(event.received_bytes)
    else:
        metrics.EGRESS.add(decision=event.decision.value)
    log.info(
        "egress",
        tenant=event.identity.tenant_id,
        workspace=event.identity.workspace_id,
        generation=event.identity.generation,
        to=f"{event.host}:{event.port}",
        decision=event.decision.value,
        reason=event.reason,
        sent_bytes=event.sent_bytes,
        received_bytes=event.received_bytes,
    )
