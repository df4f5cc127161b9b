"""``perdure key``: who may use a tenant, and for what."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from perdure.cli.output import JsonFlag, ago, dump, markup, note, say, table, wants_json
from perdure.core.errors import InvalidRequest
from perdure.core.scopes import KeyScope, KeyState
from perdure.sdk import Client
from perdure.wire import public

Tenant = Annotated[str | None, typer.Option(help="Another tenant, by id or name; for the operator.", metavar="TENANT")]
STATES = {KeyState.ACTIVE: "green", KeyState.EXPIRED: "yellow", KeyState.REVOKED: "red"}
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})")


def seconds(text: str) -> float:
    """A duration with its unit, such as 30d."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{text!r} is not a duration.", hint=f"Write a number and one of {', '.join(_UNITS)}, such as 30d.")
    return float(match[1]) * _UNITS[match[2]]


def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is for: letters, digits, dashes.", show_default=False)],
    scope: Annotated[list[KeyScope], typer.Option(help="What it may do; repeatable.", show_default=False)],
    expires: Annotated[str | None, typer.Option(help="When it ends, such as 12h or 30d; default: never.", metavar="TIME")] = None,
    tenant: Tenant = None,
    json: JsonFlag = False,
) -> None:
    """Make an API key and print its secret, this once.

    read: look at records. invoke: run commands and use files and ports, too. operate: make, fork and delete workspaces, too.
    approve: vote, and read. admin: all of these, and keys.
    """
    as_json = wants_json(ctx, json)
    expires_s = None if expires is None else seconds(expires)
    with Client() as client:
        made = client.create_key(name, scope, expires_s=expires_s, tenant=tenant)
    if as_json:
        dump(made)
        return
    say(made.secret)
    until = f"until {made.key.expires_at:%Y-%m-%d %H:%M} UTC" if made.key.expires_at else "until it is revoked"
    note(f"[dim]Key {markup(made.key.name)} ({made.key.id}) counts {until}. Keep the secret: nobody can show it again.[/]")
    pair = f"AWS_ACCESS_KEY_ID={made.aws_access_key_id} AWS_SECRET_ACCESS_KEY={made.aws_secret_access_key}"
    note(f"[dim]For AWS clients: {markup(pair)}[/]")


def aws(ctx: typer.Context, json: JsonFlag = False) -> None:
    """Print what AWS's clients are configured with, as lines for a shell.

    eval "$(perdure key aws)" lets boto3 and AWS's durable SDKs call this server with the rights of the key that this command
    uses. The region may be any. Whoever sees the secret can use it.
    """
    as_json = wants_json(ctx, json)
    with Client() as client:
        pair = client.aws_access()
        url = client.target.base_url if client.target.socket is None else f"http://127.0.0.1:{pair.port}"
    if as_json:
        dump({**pair.model_dump(mode="json"), "endpoint_url": url})
        return
    for name, value in (
        ("AWS_ACCESS_KEY_ID", pair.aws_access_key_id),
        ("AWS_SECRET_ACCESS_KEY", pair.aws_secret_access_key),
        ("AWS_ENDPOINT_URL_LAMBDA", url),
        ("AWS_ENDPOINT_URL_SFN", url),
        ("AWS_REGION", "us-east-1"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        say(f"export {name}={markup(value)}")


def ls(
    ctx: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Revoked and expired ones too.")] = False,
    tenant: Tenant = None,
    json: JsonFlag = False,
) -> None:
    """List API keys. Revoked and expired ones with --all.

    The key in the server's key file is not among them: it is the operator's, and ends with that file.
    """
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = client.keys(tenant=tenant)
    shown = [one for one in found if everything or one.state is KeyState.ACTIVE]
    if as_json:
        dump({"keys": shown})
        return
    if not shown:
        say("No keys. Make one with 'perdure key create NAME --scope SCOPE'.")
        return
    table(("NAME", "ID", "BEGINS", "SCOPES", "STATE", "MADE", "USED", "EXPIRES"), [_row(one) for one in shown])


def _row(one: public.KeyInfo) -> tuple[str, ...]:
    return (
        f"[bold]{markup(one.name)}[/]",
        one.id,
        markup(one.prefix),
        ", ".join(one.scopes),
        f"[{STATES[one.state]}]{one.state}[/]",
        ago(one.created_at),
        ago(one.last_used_at) if one.last_used_at else "never",
        f"{one.expires_at:%Y-%m-%d %H:%M}" if one.expires_at else "never",
    )


def revoke(
    ctx: typer.Context,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Names or ids.", show_default=False)],
    tenant: Tenant = None,
    json: JsonFlag = False,
) -> None:
    """Revoke API keys. What begins after that is refused; this cannot be undone."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        revoked = [client.revoke_key(ref, tenant=tenant) for ref in keys]
    if as_json:
        dump({"keys": revoked})
        return
    for one in revoked:
        say(f"[bold]{markup(one.name)}[/] ({one.id}) is revoked")
