"""What a server tells whoever runs it, put together for ``wiring``: spans, and what its egress decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

import perdure
from perdure.core import metrics, tracing
from perdure.core.config import otel_settings
from perdure.gateway.egress import EgressDecision, EgressEvent

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
