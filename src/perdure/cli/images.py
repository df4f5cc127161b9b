"""``perdure image``: build through the server when one runs, in this process otherwise."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from perdure.cli.output import JsonFlag, ago, console, dump, markup, say, size, table, wants_json
from perdure.core.config import Settings
from perdure.core.errors import InvalidRequest, PerdureError
from perdure.sdk import Client, ServerUnreachable
from perdure.wire import public

Ref = Annotated[str, typer.Argument(metavar="IMAGE", help="Name or digest.", show_default=False)]
Sink = Callable[[public.BuildEvent], None]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    image = typer.Typer(help="Images that workspaces start from.", no_args_is_help=True)
    for name, function in (("build", build), ("ls", ls), ("rm", rm)):
        image.command(name)(function)
    app.add_typer(image, name="image")


def build(
    ctx: typer.Context,
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="TOML file; default: the image 'base'.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the image; default: the recipe's.")] = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Do nothing if it is built already.")] = False,
    json: JsonFlag = False,
) -> None:
    """Build an image. With --json: one line per step, the last one with the image."""
    as_json = wants_json(ctx, json)
    spec = public.BuildImage(recipe=_recipe(recipe), name=name, if_missing=if_missing)
    if as_json:
        dump(public.BuildEvent(type="done", image=_build(spec, _json_lines)))
        return
    with _Bars() as bars:
        image = _build(spec, bars.show)
    say(f"[bold]{markup(image.name)}[/] {image.digest[:12]} is ready")


def _recipe(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidRequest(f"The recipe {str(path)!r} cannot be read: {reason}.", hint="Check the path.") from error


def _build(spec: public.BuildImage, show: Sink) -> public.ImageInfo:
    with Client() as client:
        try:
            client.health()
        except ServerUnreachable:
            if client.target.socket is None:
                raise
            from perdure import wiring

            image: public.ImageInfo = asyncio.run(wiring.build_image(Settings(), spec, show))
            return image
        for event in client.build_image(spec.recipe, name=spec.name, if_missing=spec.if_missing):
            if event.image is not None:
                return event.image
            show(event)
    raise PerdureError("The server ended the build without a result.", hint="See the server's log.")


def _json_lines(event: public.BuildEvent) -> None:
    if event.type not in {"heartbeat", "done"}:  # the last line is printed by the caller
        dump(event.model_dump(mode="json", exclude_unset=True))


class _Bars:
    """One bar that moves from step to step; a log line is its subtitle. Without a terminal: one line per step."""

    def __init__(self) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._plain = not sys.stderr.isatty()
        self._progress = Progress(*columns, console=console(stderr=True), transient=True, disable=self._plain)
        self._task: TaskID | None = None
        self._step = ""

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: public.BuildEvent) -> None:
        """Draw one event."""
        if event.type == "step":
            self._step = markup(f"{event.step}: {event.detail}" if event.detail else event.step)
            if self._plain:
                console(stderr=True).print(self._step)
        if self._task is None:
            self._task = self._progress.add_task(self._step, total=None)
        subtitle = f" [dim]{markup(event.detail[-60:])}[/]" if event.type == "log" else ""
        self._progress.update(self._task, description=self._step + subtitle, total=event.total, completed=event.done)


def ls(ctx: typer.Context, json: JsonFlag = False) -> None:
    """List images."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        found = client.images()
    if as_json:
        dump({"images": found})
        return
    if not found:
        say("No images. Build one with 'perdure image build'.")
        return
    rows = [
        (
            f"[bold]{markup(one.name)}[/]",
            one.digest[:12],
            f"{one.memory_mib} MiB",
            f"{one.disk_gib} GiB",
            size(one.stored_bytes) if one.stored_bytes is not None else "?",
            ago(one.created_at),
        )
        for one in found
    ]
    table(("NAME", "DIGEST", "MEMORY", "DISK", "STORED", "BUILT"), rows, right=("MEMORY", "DISK", "STORED"))


def rm(ctx: typer.Context, image: Ref, json: JsonFlag = False) -> None:
    """Remove an image that no workspace uses."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        client.remove_image(image)
    if as_json:
        dump({"removed": image})
    else:
        say(f"{markup(image)} is removed")
