"""What workspaces used: for people in the units that bills have, for programs in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Literal

import typer

from perdure.cli.output import JsonFlag, dump, markup, say, table, wants_json
from perdure.core.errors import InvalidRequest
from perdure.sdk import Client
from perdure.wire import public

HEADERS = ("WORKSPACE", "STATE", "AWAKE h", "PAUSED h", "ASLEEP h", "CPU s", "STORED GB·h", "MOVED MB", "LOST")
HOUR_S = 3600.0
GB = 1e9
MB = 1e6


def usage(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name or id, of deleted ones too; default: all.", show_default=False)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="As in 2026-03-01 or 2026-03-01T12:00+01:00; local without offset."),
    ] = None,
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help="Likewise; default: now.", show_default=False)] = None,
    by: Annotated[Literal["workspace", "tenant"], typer.Option(help="A line for each, or for all together.")] = "workspace",
    json: JsonFlag = False,
) -> None:
    """Say how long workspaces were awake and asleep, and what they used. Deleted ones are included."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        report = client.usage(name, since=instant(since, "--from"), until=instant(until, "--to"), by=by)
    if as_json:
        dump(report)
    elif not report.rows:
        say("No workspaces yet. Make one with 'perdure create NAME'.")
    else:
        table(HEADERS, [cells(one) for one in report.rows], right=HEADERS[2:])


def instant(text: str | None, option: str) -> datetime | None:
    """A time of an option; without an offset it is this machine's."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"{option} {text!r} is not a time.", hint="Write 2026-03-01 or 2026-03-01T12:00:00+01:00."
        ) from error


def cells(row: public.UsageRow) -> Sequence[str]:
    moved = row.sent_bytes + row.received_bytes + row.request_bytes + row.answer_bytes + row.uploaded_bytes + row.fetched_bytes
    return (
        f"[bold]{markup(row.name or row.tenant_id)}[/]",
        row.state or "-",
        *(f"{seconds / HOUR_S:.2f}" for seconds in (row.awake_s, row.paused_s, row.asleep_s)),
        f"{row.cpu_s:.1f}",
        f"{(row.local_byte_s + row.store_byte_s) / GB / HOUR_S:.3f}",
        f"{moved / MB:.1f}",
        str(row.losses) if row.losses else "-",
    )
