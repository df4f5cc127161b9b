"""``perdure forward``: local ports that lead into a workspace."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Annotated

import typer

from perdure.cli.output import JsonFlag, dump, markup, note, say, wants_json
from perdure.cli.workspaces import Name, find
from perdure.core.errors import InvalidRequest, PerdureError
from perdure.sdk._forward import AsyncForward


def parse_ports(text: str) -> tuple[int, int]:
    """``LOCAL:REMOTE``, or one port for both ends."""
    local, _, remote = text.partition(":")
    try:
        ports = int(local or 0), int(remote or local)
    except ValueError:
        ports = -1, -1
    if not (0 <= ports[0] < 65536 and 0 < ports[1] < 65536):
        raise InvalidRequest(
            f"{text!r} is not a pair of ports.", hint="Write LOCAL:REMOTE, such as 8080:80; LOCAL 0 is any free one."
        )
    return ports


def forward(
    ctx: typer.Context,
    name: Name,
    ports: Annotated[list[str], typer.Argument(metavar="LOCAL:REMOTE...", help="Or one port for both.", show_default=False)],
    host: Annotated[str, typer.Option(help="Local address to listen on.")] = "127.0.0.1",
    json: JsonFlag = False,
) -> None:
    """Open local ports that lead to ports in a workspace, until Ctrl-C. A connection wakes it."""
    as_json = wants_json(ctx, json)
    workspace = find(name)
    tunnels = []
    for local, remote in map(parse_ports, ports):
        tunnel = AsyncForward(workspace.client.target, workspace.id, remote, (host, local))
        tunnel.on_error = _tell
        tunnels.append((tunnel, remote))
    try:
        asyncio.run(_serve(tunnels, workspace.name, as_json=as_json))
    except KeyboardInterrupt:
        note("Closed.")


async def _serve(tunnels: list[tuple[AsyncForward, int]], name: str, *, as_json: bool) -> None:
    async with AsyncExitStack() as stack:
        for tunnel, _ in tunnels:
            await stack.enter_async_context(tunnel)
        if as_json:
            dump({"forwards": [{"url": tunnel.url, "local_port": tunnel.local_port, "port": port} for tunnel, port in tunnels]})
        else:
            for tunnel, port in tunnels:
                say(f"{tunnel.url} → {markup(name)}:{port}")
        await asyncio.Event().wait()


def _tell(error: PerdureError) -> None:
    note(f"[yellow]{markup(error.message)}[/]")
