"""``perdure tenant``: who owns workspaces, and what is done to all that one owns."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from perdure.cli.output import JsonFlag, ago, dump, markup, note, say, table, wants_json
from perdure.core.errors import InvalidRequest
from perdure.sdk import Client


def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and dashes.", show_default=False)],
    json: JsonFlag = False,
) -> None:
    """Make a tenant.

    It has no keys yet: 'perdure key create NAME --scope admin --tenant TENANT' makes the first.
    """
    as_json = wants_json(ctx, json)
    with Client() as client:
        made = client.create_tenant(name)
    if as_json:
        dump(made)
        return
    say(f"[bold]{markup(made.name)}[/] is tenant {made.id}")


def ls(ctx: typer.Context, json: JsonFlag = False) -> None:
    """List tenants."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = client.tenants()
    if as_json:
        dump({"tenants": found})
        return
    table(("NAME", "ID", "MADE"), [(f"[bold]{markup(one.name)}[/]", one.id, ago(one.created_at)) for one in found])


def shred(
    ctx: typer.Context,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id or name.", show_default=False)],
    delete_workspaces: Annotated[
        bool, typer.Option("--delete-workspaces", help="Delete its workspaces too, with all their snapshots.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonFlag = False,
) -> None:
    """Throw away the key of a tenant: nothing that it has in the encrypted object store can ever be read again.

    Copies of the store are worth nothing then, too. What backups hold is lost only with them: they have the key. Run it again
    after any failure.
    """
    as_json = wants_json(ctx, json)
    if not yes:
        _confirm(tenant, delete_workspaces=delete_workspaces)
    with Client() as client:
        done = client.shred_tenant(tenant, delete_workspaces=delete_workspaces)
    if as_json:
        dump(done)
        return
    say(f"Tenant [bold]{markup(done.tenant)}[/] is shredded: what it had in the object store can never be read again")
    if done.deleted:
        say(f"Deleted with it: {markup(', '.join(done.deleted))}")
    if done.left:
        say(f"[yellow]![/] {markup(', '.join(done.left))}: on nodes that are away, which delete them when they run")
    note(
        "[dim]Other nodes throw their copy of the key away within a minute, or when they next start. Delete backups that were "
        "made with PERDURE_STORE_ENCRYPTION before this: each holds the key, sealed by the master key.[/]"
    )


def _confirm(tenant: str, *, delete_workspaces: bool) -> None:
    if not sys.stdin.isatty():
        raise InvalidRequest(
            f"Shredding tenant {tenant} needs a confirmation and there is no terminal to ask on.", hint="Add --yes."
        )
    too = "delete all its workspaces, and " if delete_workspaces else ""
    note(
        f"Shred tenant {markup(tenant)}: {too}throw away the key of all it has in the object store? Nobody can undo this. "
        "[dim]\\[y/N][/]"
    )
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise InvalidRequest("Nothing was shredded.", hint="Answer y to shred it.")
