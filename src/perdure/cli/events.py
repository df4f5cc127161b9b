"""``perdure events`` and ``perdure webhook``: what happens to a tenant's workspaces, here and elsewhere."""

from __future__ import annotations

from datetime import UTC
from typing import Annotated

import typer

from perdure.cli import thread
from perdure.cli.output import JsonFlag, Status, ago, dump, duration, markup, note, say, table, wants_json
from perdure.sdk import Client
from perdure.wire import public

LAST = 20
Kinds = Annotated[list[str] | None, typer.Option("--kind", help="Only of this kind, as in a thread; repeatable.", metavar="KIND")]
WebhookId = Annotated[str, typer.Argument(metavar="ID", help="As 'perdure webhook ls' shows it.", show_default=False)]


def events(
    ctx: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens, until Ctrl-C.")] = False,
    workspace: Annotated[str | None, typer.Option(help="Only of this one, by name or id.", metavar="NAME")] = None,
    kind: Kinds = None,
    after: Annotated[int | None, typer.Option(help="Only events after this number; 0: all.", min=0, metavar="SEQ")] = None,
    last: Annotated[int, typer.Option(help="Without --after: begin so many before the end.", min=0, max=10_000)] = LAST,
    json: JsonFlag = False,
) -> None:
    """Show what happens to all workspaces, in one order. With --json: one event per line.

    Each event has a number, and numbers have no holes: whoever has read one goes on with --after.
    """
    as_json = wants_json(ctx, json)
    tail = last if after is None else None
    with Client() as client:
        found = client.events(after=after, last=tail, workspace=workspace, kinds=kind or (), follow=follow)
        for one in found:
            if as_json:
                dump(one)
            else:
                _show(one)


def _show(one: public.FeedEvent) -> None:
    entry = public.LogEntry(seq=one.seq, at=one.at, kind=one.kind, generation=one.generation, body=one.body, hash="")
    what, detail = thread.line(entry)
    moment = one.at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    say(f"{one.seq:>6}  [dim]{moment}[/]  {markup(one.workspace or '-')}  [bold]{markup(what)}[/]  {markup(detail)}".rstrip())


# ---------------------------------------------------------------------------------------------------------------- webhooks


def create(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to, such as https://example.org/hook.", show_default=False)],
    events: Annotated[
        str, typer.Option(help="Kinds of events, comma-separated, such as hibernated,failed; default: all.", metavar="KINDS")
    ] = "",
    json: JsonFlag = False,
) -> None:
    """Send events to a URL from now on, and print the secret that signs them, this once."""
    as_json = wants_json(ctx, json)
    kinds = [part.strip() for part in events.split(",") if part.strip()]
    with Client() as client:
        made = client.create_webhook(url, kinds)
    if as_json:
        dump(made)
        return
    say(made.secret)
    sent = f"events: {_kinds(made.webhook)}"
    note(f"[dim]Webhook {made.webhook.id}, {sent}. Check signatures with this secret (Standard Webhooks).[/]")


def ls(ctx: typer.Context, json: JsonFlag = False) -> None:
    """List webhooks, with what is still to be delivered."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = client.webhooks()
    if as_json:
        dump({"webhooks": found})
        return
    if not found:
        say("No webhooks. Make one with 'perdure webhook create URL'.")
        return
    headers = ("ID", "URL", "EVENTS", "STATE", "DELIVERED", "PENDING", "GIVEN UP", "LAST", "ERROR")
    table(headers, [_row(one) for one in found], right=("DELIVERED", "PENDING", "GIVEN UP"))


def _row(one: public.WebhookInfo) -> tuple[str, ...]:
    colour = "green" if one.state == "active" else "red"
    return (
        f"[bold]{one.id}[/]",
        markup(one.url),
        _kinds(one),
        f"[{colour}]{one.state}[/]",
        str(one.delivered),
        str(one.pending),
        str(one.failed),
        ago(one.delivered_at) if one.delivered_at else "never",
        markup(one.last_error),
    )


def _kinds(one: public.WebhookInfo) -> str:
    return ", ".join(map(markup, one.events)) or "all"


def show(ctx: typer.Context, webhook: WebhookId, json: JsonFlag = False) -> None:
    """Show what is still to be delivered to a webhook, and what was given up."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = client.deliveries(webhook)
    if as_json:
        dump({"deliveries": found})
        return
    if not found:
        say("Everything was delivered.")
        return
    rows = [
        (
            str(one.seq),
            f"{one.at.astimezone(UTC):%Y-%m-%d %H:%M:%S}",
            markup(one.workspace or "-"),
            markup(one.kind),
            "[red]given up[/]" if one.due_at is None else one.state,
            str(one.attempts),
            markup(one.last_error),
        )
        for one in found
    ]
    table(("EVENT", "AT", "WORKSPACE", "KIND", "STATE", "ATTEMPTS", "ERROR"), rows, right=("EVENT", "ATTEMPTS"))


def redeliver(
    ctx: typer.Context,
    webhook: WebhookId,
    events: Annotated[
        list[int] | None, typer.Argument(metavar="[EVENT...]", help="Numbers, as 'perdure webhook show' shows them.", min=1)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Send events that were given up once more, for another day: those of these numbers, or all."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        sent = client.redeliver(webhook, events or ())
    if as_json:
        dump({"events": sent})
    elif not sent:
        say("Nothing was given up, so nothing is sent again.")
    else:
        say(f"{len(sent)} {'event is' if len(sent) == 1 else 'events are'} sent again.")


def rm(
    ctx: typer.Context,
    webhooks: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids.", show_default=False)],
    json: JsonFlag = False,
) -> None:
    """Remove webhooks. What was still to be delivered to them is not any more."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        for webhook_id in webhooks:
            client.remove_webhook(webhook_id)
    if as_json:
        dump({"removed": webhooks})
        return
    for webhook_id in webhooks:
        say(f"[bold]{markup(webhook_id)}[/] is removed")


def test(ctx: typer.Context, webhook: WebhookId, json: JsonFlag = False) -> Status | None:
    """Send a webhook an event of the kind 'test' now. Exits 1 when it was not delivered."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        tried = client.test_webhook(webhook)
    if as_json:
        dump(tried)
    elif tried.delivered:
        say(f"Delivered: HTTP status {tried.status} after {duration(tried.seconds)}")
    else:
        say(f"[red]Not delivered:[/] {markup(tried.error)}")
    return None if tried.delivered else Status(1)
