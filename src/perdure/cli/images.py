"""``perdure image``: build through the server when one runs, in this process otherwise."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.output import JsonFlag, ago, dump, markup, note, say, size, table, wants_json
from perdure.cli.progress import Bar
from perdure.core.config import Settings
from perdure.core.errors import InvalidRequest, PerdureError
from perdure.sdk import Client, ServerUnreachable, _core
from perdure.wire import public

Ref = Annotated[str, typer.Argument(metavar="IMAGE", help="Name or digest.", show_default=False)]
#: Bytes of all the files together that one recipe names; with base64 they must fit into one request (4 MiB).
SOURCES_MAX = 2 << 20
Sink = Callable[[public.BuildEvent], None]


def build(
    ctx: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A TOML file, or a shipped recipe's name; default: base.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the image; default: the recipe's.")] = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Do nothing if it is built already.")] = False,
    json: JsonFlag = False,
) -> None:
    """Build an image. With --json: one line per step, the last one with the image."""
    as_json = wants_json(ctx, json)
    spec = _Wanted(*_recipe(recipe), name=name, if_missing=if_missing)
    if as_json:
        dump(public.BuildEvent(type="done", image=_build(spec, _json_lines)))
        return
    with _Bars() as bars:
        image = _build(spec, bars.show)
    say(f"[bold]{markup(image.name)}[/] {image.digest[:12]} is ready")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What to build: a recipe's text with the files it names, or a shipped recipe, or neither for the default."""

    recipe: str | None
    shipped: str | None
    sources: Mapping[str, bytes]
    name: str | None
    if_missing: bool

    @property
    def body(self) -> public.BuildImage:
        options: dict[str, Any] = {"shipped": self.shipped, "name": self.name, "if_missing": self.if_missing}
        return _core.build_image(self.recipe, self.sources, **options)


def _recipe(reference: str | None) -> tuple[str | None, str | None, Mapping[str, bytes]]:
    """The text of a recipe file, or a shipped recipe's name; and what the text's ``source`` lines name."""
    if reference is None or ("/" not in reference and not reference.endswith(".toml")):
        return None, reference, {}
    path = Path(reference)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = "Check the path. A recipe that comes with Perdure is given by its name alone: perdure image build dev."
        raise InvalidRequest(f"The recipe {reference!r} cannot be read: {reason}.", hint=hint) from error
    return text, None, _sources(text, path.parent)


def _sources(text: str, beside: Path) -> dict[str, bytes]:
    """Read what a recipe's ``source`` lines name. Whatever else may be wrong with the recipe is for the server to say."""
    try:
        files = tomllib.loads(text).get("files")
    except tomllib.TOMLDecodeError:
        return {}
    found: dict[str, bytes] = {}
    for target, entry in files.items() if isinstance(files, dict) else ():
        name = entry.get("source") if isinstance(entry, dict) else None
        if isinstance(name, str):
            found[name] = _source(target, name, beside, SOURCES_MAX - sum(map(len, found.values())))
    return found


def _source(target: str, name: str, beside: Path, room: int) -> bytes:
    path = beside / name
    what = f"The source {name!r} of the file {target}"
    try:
        if path.exists() and not path.is_file():
            raise InvalidRequest(f"{what} is not a file.", hint="Name a file; a directory goes in with perdure cp.")
        with path.open("rb") as source:
            content = source.read(room + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else "that is no file name"
        raise InvalidRequest(f"{what} cannot be read: {reason}.", hint="Paths are relative to the recipe file.") from error
    if len(content) > room:
        raise InvalidRequest(
            f"{what} is too large: all sources of a recipe together may have {SOURCES_MAX >> 20} MiB.",
            hint="Fetch large files in one of the recipe's commands, or copy them into a workspace with perdure cp.",
        )
    return content


def _build(spec: _Wanted, show: Sink) -> public.ImageInfo:
    with Client() as client:
        try:
            client.health()
        except ServerUnreachable:
            if client.target.socket is None:
                raise
            from perdure import wiring

            image: public.ImageInfo = asyncio.run(wiring.build_image(Settings(), spec.body, show))
            return image
        events = client.build_image(
            spec.recipe, shipped=spec.shipped, sources=spec.sources, name=spec.name, if_missing=spec.if_missing
        )
        for event in events:
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
        self._bar = Bar()
        self._step = ""

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__(None, None, None)

    def show(self, event: public.BuildEvent) -> None:
        """Draw one event."""
        if event.type == "step":
            self._step = markup(f"{event.step}: {event.detail}" if event.detail else event.step)
            if not self._bar.is_shown:
                note(self._step)
        subtitle = f" [dim]{markup(event.detail[-60:])}[/]" if event.type == "log" else ""
        self._bar.show(self._step + subtitle, event.done, event.total)


def ls(ctx: typer.Context, json: JsonFlag = False) -> None:
    """List images, and the recipes that are not built yet."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        listed = client.fetch(_core.get("/v1/images"), public.ImageList)
    found, missing = listed.images, [recipe for recipe in listed.recipes if not recipe.built]
    if as_json:
        dump(listed)
        return
    if not found:
        say(f"No images. Build one with 'perdure image build NAME': {', '.join(recipe.name for recipe in missing)}.")
        return
    rows = [
        (
            f"[bold]{markup(one.name)}[/]" if one.current else f"[dim]{markup(one.name)} (old)[/]",
            one.digest[:12],
            f"{one.memory_mib} MiB",
            f"{one.disk_gib} GiB",
            size(one.stored_bytes) if one.stored_bytes is not None else "?",
            ago(one.created_at),
        )
        for one in found
    ]
    rows += [
        (f"[dim]{markup(one.name)}[/]", "[dim]not built[/]", f"{one.memory_mib} MiB", f"{one.disk_gib} GiB", "", "")
        for one in missing
    ]
    table(("NAME", "DIGEST", "MEMORY", "DISK", "STORED", "BUILT"), rows, right=("MEMORY", "DISK", "STORED"))
    if missing:
        note(f"[dim]'perdure image build {markup(missing[0].name)}' builds what is not built yet.[/]")
    if any(not one.current for one in found):
        note("[dim]Old ones serve the workspaces made of them; 'perdure image prune' removes those that none needs.[/]")


def rm(ctx: typer.Context, image: Ref, json: JsonFlag = False) -> None:
    """Remove an image that no workspace uses."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        client.remove_image(image)
    if as_json:
        dump({"removed": image})
    else:
        say(f"{markup(image)} is removed")


def prune(ctx: typer.Context, json: JsonFlag = False) -> None:
    """Remove old images: those that no name points to any more and no workspace of this server uses."""
    as_json = wants_json(ctx, json)
    with Client() as client:
        done = client.prune_images()
    if as_json:
        dump(done)
        return
    for one in done.removed:
        say(f"{markup(one.name)} {one.digest[:12]} is removed")
    for one in done.kept:
        say(f"[dim]{markup(one.name)} {one.digest[:12]} stays: workspaces use it[/]")
    say(f"{size(done.freed_bytes)} are free again" if done.removed else "There is nothing to remove.")
