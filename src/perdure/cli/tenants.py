"""``perdure tenant``: who owns workspaces, and what is done to all that one owns."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from perdure.cli.output import JsonFlag, ago, dump, markup, note, say, table, wants_json
from perdure.core.errors import InvalidRequest
from perdure.sdk import Client
from perdure.wire import public

_QUOTAS = {
    "workspaces": "workspaces",
    "memory_awake_mib": "memory awake, MiB",
    "storage_gib": "storage, GiB",
    "execs": "commands running",
}


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


def show(
    ctx: typer.Context,
    tenant: Annotated[
        str | None, typer.Argument(metavar="[TENANT]", help="Another one's id or name; for the operator.", show_default=False)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show what a tenant may have, and has. Without a name: your own."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = client.quota(tenant)
    _show(found, as_json=as_json)


def quota(
    ctx: typer.Context,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id or name.", show_default=False)],
    workspaces: Annotated[str | None, typer.Option(metavar="NUMBER", help="Workspaces and branches; none: any number.")] = None,
    memory_awake_mib: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Memory of those that are awake, together; or none.")
    ] = None,
    storage_gib: Annotated[str | None, typer.Option(metavar="NUMBER", help="What its snapshots may take; or none.")] = None,
    execs: Annotated[str | None, typer.Option(metavar="NUMBER", help="Commands that may run at the same time; or none.")] = None,
    json: JsonFlag = False,
) -> None:
    """Limit what a tenant may have. What it has above a new limit it keeps."""
    as_json = wants_json(ctx, json)
    given = {"workspaces": workspaces, "memory_awake_mib": memory_awake_mib, "storage_gib": storage_gib, "execs": execs}
    limits = {name: _limit(name, text) for name, text in given.items() if text is not None}
    if not limits:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidRequest("No limit was given.", hint=f"Give at least one of {names}; 'perdure tenant show' shows them.")
    with Client() as client:
        found = client.set_quota(tenant, **limits)  # type: ignore[arg-type]
    _show(found, as_json=as_json)


def _limit(name: str, text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text) if name == "storage_gib" else int(text)
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is no limit.", hint="Give a number, or none.") from error


def _show(found: public.QuotaInfo, *, as_json: bool) -> None:
    if as_json:
        dump(found)
        return
    say(f"[bold]{markup(found.name or found.tenant_id)}[/] ({found.tenant_id})")
    rows = []
    for name, what in _QUOTAS.items():
        limit = getattr(found.limits, name)
        rows.append((what, f"{getattr(found.used, name):g}", "none" if limit is None else f"{limit:g}"))
    table(("", "USED", "LIMIT"), rows, right=("USED", "LIMIT"))
    if found.awake:
        say(f"Awake: {markup(', '.join(found.awake))}")


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
