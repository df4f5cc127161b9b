"""Webhooks: where a tenant's events are sent to, what is still to be delivered, and what was given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from perdure.sdk import _core
from perdure.sdk._core import Call
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._async.client import AsyncClient


class AsyncWebhooks:
    """The part of ``AsyncClient`` that is about webhooks.

    >>> await client.webhooks()
    []
    """

    @property
    def _client(self) -> AsyncClient:
        return cast("AsyncClient", self)

    async def create_webhook(self, url: str, events: Sequence[str] = ()) -> public.CreatedWebhook:
        """Send the tenant's events (of these kinds; none: all) to a URL from now on, signed by the scheme of Standard Webhooks.
        No other answer ever has the ``secret``.

        >>> created = await client.create_webhook("https://example.com/hook", ["hibernated", "failed"])
        >>> created.secret
        'whsec_...'
        """
        body = _core.checked(public.CreateWebhook, url=url, events=list(events))
        return await self._client.fetch(_core.post("/v1/webhooks", body.model_dump(mode="json")), public.CreatedWebhook)

    async def webhooks(self) -> list[public.WebhookInfo]:
        """Oldest first, with what is still to be delivered and what was given up.

        >>> created = await client.create_webhook("https://example.com/hook")
        >>> [(one.url, one.pending) for one in await client.webhooks()]
        [('https://example.com/hook', 0)]
        """
        return (await self._client.fetch(_core.get("/v1/webhooks"), public.WebhookList)).webhooks

    async def remove_webhook(self, webhook_id: str) -> None:
        """What was still to be delivered is not any more.

        >>> created = await client.create_webhook("https://example.com/hook")
        >>> await client.remove_webhook(created.webhook.id)
        """
        await self._client.request(Call("DELETE", _path(webhook_id)))

    async def test_webhook(self, webhook_id: str) -> public.WebhookTested:
        """Have an event of the kind ``test`` sent now, once, and say what became of it.

        >>> created = await client.create_webhook("https://example.com/hook")
        >>> (await client.test_webhook(created.webhook.id)).delivered
        True
        """
        return await self._client.fetch(_core.post(_path(webhook_id, "/test")), public.WebhookTested)

    async def deliveries(self, webhook_id: str) -> list[public.DeliveryInfo]:
        """Events that are still to be delivered to it and those that were given up, by their numbers.

        >>> created = await client.create_webhook("https://example.com/hook")
        >>> await client.deliveries(created.webhook.id)
        []
        """
        call = _core.get(_path(webhook_id, "/deliveries"), limit=_core.PAGE)
        pages = self._client.pages(call, public.DeliveryList)
        return [one async for page in pages for one in page.deliveries]

    async def redeliver(self, webhook_id: str, events: Sequence[int] = ()) -> list[int]:
        """Send events that were given up (of these numbers; none: all) once more, for another day, and return their numbers.
        Raises NotFound, and sends nothing, when one of them was not given up.

        >>> created = await client.create_webhook("https://example.com/hook")
        >>> await client.redeliver(created.webhook.id)
        []
        """
        body = _core.checked(public.Redeliver, events=list(events))
        call = _core.post(_path(webhook_id, "/redeliver"), body.model_dump(mode="json"))
        return (await self._client.fetch(call, public.Redelivered)).events


def _path(webhook_id: str, part: str = "") -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}{part}"
