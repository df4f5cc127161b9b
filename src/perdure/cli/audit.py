"""``perdure audit``: who did what, and what was refused to whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Annotated

import typer

from perdure.cli.keys import seconds
from perdure.cli.output import JsonFlag, dump, markup, say, table, wants_json
from perdure.cli.usage import instant
from perdure.core.clock import SystemClock
from perdure.core.errors import InvalidRequest
from perdure.sdk import Client
from perdure.wire import public

HEADERS = ("TIME", "WHO", "WHAT", "ABOUT", "OUTCOME", "FROM")
PAGE_ROWS = 1000
WAIT_S = 20.0


def audit(
    ctx: typer.Context,
    tenant: Annotated[str | None, typer.Option(help="Of one tenant, by id or name; for the operator.", metavar="TENANT")] = None,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="How long ago, as in 2h or 30d, or a time, as in 2026-03-01T12:00.")
    ] = "24h",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens from now on, until Ctrl-C.")] = False,
    json: JsonFlag = False,
) -> None:
    """Say who did what, and what was refused to whom: the last day, oldest first.

    The operator sees all tenants, an admin its own. With --json and --follow: one line for each.
    """
    as_json, start = wants_json(ctx, json), _start(since)
    with Client() as client:
        if follow:
            with suppress(KeyboardInterrupt):
                for row in _following(client, tenant, start):
                    _tell(row, as_json=as_json)
            return
        shown = list(_rows(client, tenant, start))
    if as_json:
        dump({"rows": shown})
    elif not shown:
        say("Nothing was done or refused in that time.")
    else:
        table(HEADERS, [_cells(row) for row in shown])


def _start(text: str) -> datetime:
    try:
        return SystemClock().now() - timedelta(seconds=seconds(text))
    except (InvalidRequest, OverflowError):
        found = instant(text, "--since")
    assert found is not None, "a text is a time or an error"
    return found


def _rows(client: Client, tenant: str | None, since: datetime) -> Iterator[public.AuditRow]:
    """All there are now."""
    after, count = 0, PAGE_ROWS
    while count == PAGE_ROWS:
        page = client.audit(tenant=tenant, since=since, after=after, limit=PAGE_ROWS)
        yield from page.rows
        after, count = page.next, len(page.rows)


def _following(client: Client, tenant: str | None, since: datetime) -> Iterator[public.AuditRow]:
    """All there are and will be."""
    after = 0
    while True:
        page = client.audit(tenant=tenant, since=since, after=after, limit=PAGE_ROWS, wait_s=WAIT_S)
        yield from page.rows
        after = page.next


def _tell(row: public.AuditRow, *, as_json: bool) -> None:
    if as_json:
        dump(row)
    else:
        say("  ".join(_cells(row)))


def _cells(row: public.AuditRow) -> tuple[str, ...]:
    colour = {"ok": "green", "interrupted": "yellow"}.get(row.outcome, "red")
    times = f" ×{row.repeated}" if row.repeated > 1 else ""
    return (
        f"{row.at:%Y-%m-%d %H:%M:%S}",
        markup(row.principal or "nobody"),
        markup(row.route or "-"),
        markup(row.target or "-"),
        f"[{colour}]{markup(row.outcome)}[/]{times}",
        markup(row.peer),
    )
