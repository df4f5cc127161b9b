"""``perdure share``: let others reach a port of a workspace."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure.cli.keys import seconds
from perdure.cli.output import JsonFlag, ago, dump, markup, note, say, table, wants_json
from perdure.cli.workspaces import Name, find
from perdure.core.errors import InvalidRequest
from perdure.wire import public

DEFAULT_EXPIRES = "1h"
Port = Annotated[int, typer.Argument(metavar="PORT", help="Of the program in the workspace.", show_default=False)]


def share(
    ctx: typer.Context,
    name: Name,
    port: Annotated[int | None, typer.Argument(metavar="[PORT]", help="Of the program in the workspace.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="When the link ends, such as 30min or 7d; default: 1h.", metavar="TIME")
    ] = None,
    is_public: Annotated[bool, typer.Option("--public", help="Let in everybody, without a link, until 'unshare'.")] = False,
    json: JsonFlag = False,
) -> None:
    """Make a link that lets whoever has it reach a port of a workspace; without PORT: list what is shared.

    A request by the link wakes the workspace. Links that were made before go on to count.
    """
    as_json = wants_json(ctx, json)
    if expires is not None and (is_public or port is None):
        raise InvalidRequest("--expires is for a link.", hint="Give a PORT, and leave --public out.")
    if is_public and port is None:
        raise InvalidRequest("Which port is to be public?", hint="Write 'perdure share NAME PORT --public'.")
    if port is None:
        _list(find(name).ports.shares(), as_json=as_json)
        return
    expires_s = seconds(expires or DEFAULT_EXPIRES)
    made = find(name).ports.share(port, expires_s=expires_s, is_public=is_public)
    if as_json:
        dump(made)
        return
    say(markup(made.url))
    if made.expires_at is None:
        note(f"[yellow]Everybody who can reach this server may go in, until 'perdure unshare {markup(name)} {port}'.[/]")
    else:
        note(f"[dim]Whoever has this link may go in until {made.expires_at:%Y-%m-%d %H:%M} UTC.[/]")


def _list(shares: list[public.ShareInfo], *, as_json: bool) -> None:
    if as_json:
        dump({"shares": shares})
        return
    if not shares:
        say("No port is shared. Share one with 'perdure share NAME PORT'.")
        return
    rows = [
        (
            str(one.port),
            "[yellow]everybody[/]" if one.public else "by link",
            f"{one.links_until:%Y-%m-%d %H:%M}" if one.links_until else "-",
            ago(one.shared_at),
            markup(one.shared_by),
            markup(one.url),
        )
        for one in shares
    ]
    table(("PORT", "WHO", "LINKS UNTIL", "SHARED", "BY", "URL"), rows, right=("PORT",))


def unshare(ctx: typer.Context, name: Name, port: Port, json: JsonFlag = False) -> None:
    """Take back every link of a port of a workspace, and that it is public."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    workspace.ports.unshare(port)
    if as_json:
        dump({"workspace": workspace.info.id, "port": port})
    else:
        say(f"Port {port} of [bold]{markup(workspace.name)}[/] is private again")
