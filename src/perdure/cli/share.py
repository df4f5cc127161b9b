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


def share(
    ctx: typer.Context,
    name: Name,
    port: Annotated[int | None, typer.Argument(metavar="[PORT]", help="Of the program in the workspace.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="When the link ends, such as 30min or 7d; default: 1h.", metavar="TIME")
    ] = None,
    is_public: Annotated[bool, typer.Option("--public", help="Let in everybody, without a link, until 'unshare'.")] = False,
    links: Annotated[bool, typer.Option("--links", help="List the links that count, of PORT or of all ports.")] = False,
    json: JsonFlag = False,
) -> None:
    """Make a link that lets whoever has it reach a port of a workspace; without PORT: list what is shared.

    A request by the link wakes the workspace. Links that were made before go on to count.
    """
    as_json = wants_json(ctx, json)
    if links and (expires is not None or is_public):
        raise InvalidRequest("--links lists what there is.", hint="Leave --expires and --public out.")
    if links:
        _links(find(name).ports.links(port), as_json=as_json)
        return
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
        note(f"[dim]Whoever has this link ({made.link_id}) may go in until {made.expires_at:%Y-%m-%d %H:%M} UTC.[/]")


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


def _links(links: list[public.LinkInfo], *, as_json: bool) -> None:
    if as_json:
        dump({"links": links})
        return
    if not links:
        say("No link counts. Make one with 'perdure share NAME PORT'.")
        return
    rows = [
        (f"[bold]{one.id}[/]", str(one.port), f"{one.expires_at:%Y-%m-%d %H:%M}", ago(one.made_at), markup(one.made_by))
        for one in links
    ]
    table(("LINK", "PORT", "UNTIL", "MADE", "BY"), rows, right=("PORT",))


def unshare(
    ctx: typer.Context,
    name: Name,
    port: Annotated[int | None, typer.Argument(metavar="[PORT]", help="Of the program in the workspace.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Take back this one only, as 'share NAME --links' shows it.", metavar="ID")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Take back every link of a port of a workspace, and that it is public; or one link."""
    as_json = wants_json(ctx, json)
    if (port is None) == (link is None):
        raise InvalidRequest(
            "What is to be taken back: a port or one link?",
            hint="Write 'perdure unshare NAME PORT', or 'unshare NAME --link ID'.",
        )
    workspace = find(name)
    done: dict[str, str | int]
    if link is not None:
        workspace.ports.revoke_link(link)
        done, told = {"link": link}, f"The link {markup(link)} of [bold]{markup(workspace.name)}[/] counts no more"
    else:
        assert port is not None, "one of them is given"
        workspace.ports.unshare(port)
        done, told = {"port": port}, f"Port {port} of [bold]{markup(workspace.name)}[/] is private again"
    if as_json:
        dump({"workspace": workspace.info.id, **done})
    else:
        say(told)
