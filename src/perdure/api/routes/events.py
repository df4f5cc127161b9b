"""The feed of a tenant's events, and webhooks that it is sent to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query

from perdure.api import render
from perdure.api.deps import PAGE_LIMIT, PAGE_LIMIT_MAX, Call, Cursor
from perdure.api.streams import EventSource, ServerSentEvents
from perdure.core.errors import InvalidRequest
from perdure.core.paging import seq_cursor, seq_of
from perdure.journal.feed import FeedEvent, Wanted
from perdure.wire import public

router = APIRouter(tags=["events"])
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "model": public.FeedEvent | public.ErrorAnswer}
}
_SEQ_MAX = (1 << 63) - 1


@router.get("/events", response_class=ServerSentEvents, status_code=200, responses=_STREAM)
async def events(
    call: Call,
    after: Annotated[int | None, Query(ge=0, le=_SEQ_MAX, description="What was read last; 0: from the beginning.")] = None,
    last: Annotated[int | None, Query(ge=0, le=10_000, description="Begin so many events before the end.")] = None,
    workspace: Annotated[str | None, Query(description="Only of those that have, or had, this id or name.")] = None,
    kind: Annotated[list[str], Query(description="Only of these kinds; none: all.", max_length=50)] = [],  # noqa: B006
    follow: Annotated[bool, Query(description="Go on with what happens; false: end where the feed ends.")] = True,
    last_event_id: Annotated[
        str,
        Header(
            description="As ``after``, which a browser sends when it connects again.",
            json_schema_extra={"pattern": "^([0-9]{1,18})?$"},
        ),
    ] = "",
) -> ServerSentEvents:
    """What happens to the tenant's workspaces, as server-sent events: in one order, each with its number as id, none left out and
    none twice from that number on. Without ``after`` and ``last``: from now on, or the whole feed where it is not followed."""
    if last_event_id:
        after = _seq(last_event_id)
    feed = call.services.feed
    reading = await feed.begin(Wanted(call.ctx.tenant_id, after, last, workspace, tuple(kind), follow))
    source = EventSource(
        events=_rendered(feed.read(reading)),
        heartbeat=public.Done(),
        failed=lambda error: public.ErrorAnswer(error=error),
    )
    return ServerSentEvents(source, AsyncExitStack(), call.closing, first_id=reading.after)


async def _rendered(found: AsyncGenerator[FeedEvent, None]) -> AsyncGenerator[public.Answer, None]:
    async with aclosing(found):
        async for one in found:
            yield render.feed_event(one)


def _seq(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _SEQ_MAX:
        raise InvalidRequest(f"Last-Event-ID {text[:40]!r} is not the number of an event.", hint="Leave it out to read from now.")
    return int(text)


@router.post("/webhooks", status_code=201)
async def create_webhook(body: public.CreateWebhook, call: Call) -> public.CreatedWebhook:
    """Send the tenant's events to a URL from now on. No other answer ever has the secret that signs them."""
    made, secret = await call.services.webhooks.create(call.ctx.tenant_id, body.url, tuple(body.events), call.ctx.principal)
    return public.CreatedWebhook(webhook=render.webhook(made), secret=secret)


@router.get("/webhooks")
async def list_webhooks(call: Call) -> public.WebhookList:
    """Oldest first, with what is still to be delivered."""
    return public.WebhookList(webhooks=[render.webhook(one) for one in await call.services.webhooks.of(call.ctx.tenant_id)])


@router.delete("/webhooks/{ref}")
async def remove_webhook(ref: str, call: Call) -> public.Done:
    """By its id. What was still to be delivered is not any more."""
    await call.services.webhooks.remove(call.ctx.tenant_id, ref)
    return public.Done()


@router.post("/webhooks/{ref}/test")
async def test_webhook(ref: str, call: Call) -> public.WebhookTested:
    """Send an event of the kind ``test`` now, once, and say what became of it."""
    attempt = await call.services.webhooks.test(call.ctx.tenant_id, ref)
    return public.WebhookTested(
        delivered=attempt.is_delivered, status=attempt.status, error=attempt.error, seconds=round(attempt.seconds, 3)
    )


@router.get("/webhooks/{ref}/deliveries")
async def list_deliveries(
    ref: str,
    call: Call,
    limit: Annotated[int, Query(ge=1, le=PAGE_LIMIT_MAX, description="At most so many.")] = PAGE_LIMIT,
    cursor: Cursor = None,
) -> public.DeliveryList:
    """Events that are still to be delivered and those that were given up, by their numbers, in pages."""
    after = 0 if cursor is None else seq_of(cursor)
    found = await call.services.webhooks.deliveries(call.ctx.tenant_id, ref, after, limit + 1)
    shown = found[:limit]
    following = seq_cursor(shown[-1].seq) if len(found) > limit else None
    return public.DeliveryList(deliveries=[render.delivery(one) for one in shown], next_cursor=following)


@router.post("/webhooks/{ref}/redeliver")
async def redeliver_webhook(ref: str, body: public.Redeliver, call: Call) -> public.Redelivered:
    """Send events that were given up once more, with the ids that they had, for another day: those of these numbers, or all."""
    sent = await call.services.webhooks.redeliver(call.ctx.tenant_id, ref, tuple(body.events))
    return public.Redelivered(events=sent)
