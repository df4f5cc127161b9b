"""Webhooks over real PostgreSQL, and a process of their own that can be killed.

``python -m tests.integration.events.stage URL PORT`` delivers what is in the database at URL.
"""

from __future__ import annotations

import asyncio
import sys

import psycopg

from perdure.core.clock import Clock, SystemClock
from perdure.core.ids import DEFAULT_TENANT
from perdure.db.database import Database
from perdure.gateway.egress import Dialer
from perdure.gateway.outward import Outward
from perdure.gateway.rules import EgressRules
from perdure.journal.feed import Feed
from perdure.webhooks.delivery import Deliverer
from perdure.webhooks.sending import Sender
from perdure.webhooks.service import WebhookParts

ROOT = b"r" * 32


def parts(database: Database, port: int, *, clock: Clock | None = None, deadline_s: float = 10) -> WebhookParts:
    """Everything may be sent to one port of loopback."""
    outward = Outward(Dialer(EgressRules.parse([f"127.0.0.1:{port}"]), setting="PERDURE_WEBHOOK_PRIVATE_ALLOW"))
    sender = Sender(outward.open, deadline_s=deadline_s)
    return WebhookParts(database, clock or SystemClock(), Feed(database), sender, outward.check, ROOT)


async def append(url: str, *kinds: str, tenant: str = DEFAULT_TENANT, body: str = "{}") -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        for kind in kinds:
            await connection.execute("select journal_append(%s, 'ws_1', %s, 1, %s)", (tenant, kind, body))


async def _serve(url: str, port: int) -> None:
    database = Database(url)
    await database.open()
    deliverer = Deliverer(parts(database, port))
    await deliverer.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
