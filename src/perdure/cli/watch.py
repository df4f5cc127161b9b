"""``perdure watch``: what changes in a directory of a workspace."""

from __future__ import annotations

import posixpath
from typing import Annotated

import typer

from perdure.cli.copy import HOME
from perdure.cli.output import JsonFlag, dump, markup, note, say, wants_json
from perdure.cli.workspaces import Name, find, tell_losses
from perdure.wire import public


def watch(
    ctx: typer.Context,
    name: Name,
    path: Annotated[str, typer.Argument(help="A directory; relative to /root.", show_default=False)] = HOME,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="And all below it.", show_default=False)] = False,
    json: JsonFlag = False,
) -> None:
    """Say what changes in a directory of a workspace, as it happens, until Ctrl-C.

    Wakes the workspace, and keeps it awake as long as it watches. Ends when the directory is gone or somebody puts the workspace
    to sleep. With --json: one line per event.
    """
    as_json = wants_json(ctx, json)
    workspace = find(name)
    try:
        for event in workspace.files.watch_dir(posixpath.normpath(posixpath.join(HOME, path)), recursive=recursive):
            if as_json:
                dump(event)
            else:
                _tell(event)
    except KeyboardInterrupt:
        return
    finally:
        tell_losses(workspace)


def _tell(event: public.WatchEvent) -> None:
    where = markup(event.path) + ("/" if event.directory and event.path != "/" else "")
    if event.type == "renamed":
        say(f"renamed     {markup(event.old_path)} → {where}")
    elif event.type == "overflow":
        note("[yellow]Events were lost: look at the directory again.[/]")
    elif event.type == "ended":
        gone = event.reason == "gone"
        note("The directory is gone." if gone else "The workspace was put to sleep; watching it again wakes it.")
    else:
        say(f"{event.type:<11} {where}")
