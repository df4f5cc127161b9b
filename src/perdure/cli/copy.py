"""``perdure cp``: between here and a workspace, in both directions."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.output import JsonFlag, Status, console, dump, markup, note, say, size, wants_json
from perdure.cli.workspaces import find, tell_losses
from perdure.core.errors import InvalidRequest, NotFound
from perdure.sdk import Workspace
from perdure.sdk._local import OnBytes, Transfer
from perdure.wire.node import FileKind

_REMOTE = re.compile(r"^([A-Za-z0-9][A-Za-z0-9_@-]*):(.*)$", re.DOTALL)
HOME = "/root"
#: A system directory is full of absolute links; a terminal need not see them all.
SKIPPED_SHOWN = 20


@dataclass(frozen=True)
class Place:
    """One end of a copy: a local path, or a path in a workspace."""

    path: str
    workspace: str | None = None


def parse_place(text: str) -> Place:
    """``NAME:PATH`` is in a workspace, relative to its root user's home; ``./a:b`` is local."""
    match = _REMOTE.match(text)
    if match is None:
        return Place(text)
    return Place(posixpath.join(HOME, match[2]) if match[2] else HOME, match[1])


def cp(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="PATH, NAME:PATH, or - for stdin.", show_default=False)],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="PATH, NAME:PATH, or - for stdout.", show_default=False)],
    json: JsonFlag = False,
) -> Status:
    """Copy a file or a whole directory into a workspace or out of it.

    Into an existing directory, or a DEST that ends with '/', it is copied under its own name. What comes out of a workspace is
    not trusted: nothing is written outside DEST, and links that lead out of it and devices are skipped and named. A large file
    is gone on with where it was when the connection breaks; after Ctrl-C, too, when the same command is run again.
    """
    as_json = wants_json(ctx, json)
    here, there = parse_place(source), parse_place(destination)
    if (here.workspace is None) == (there.workspace is None):
        raise InvalidRequest("Exactly one of the two must be in a workspace.", hint="Write that one as NAME:PATH.")
    name = here.workspace or there.workspace
    assert name is not None
    workspace = find(name)
    with _bar(_size_of(workspace, here), shown=not as_json and destination != "-") as on_bytes:
        if here.workspace is not None:
            transfer = _out(workspace, here.path, there.path, on_bytes)
        else:
            transfer = _in(workspace, here.path, there.path, on_bytes)
    tell_losses(workspace)
    if as_json:
        dump(asdict(transfer))
    elif destination != "-":
        _tell(transfer)
    return Status(1 if transfer.skipped else 0)


@contextmanager
def _bar(total: int | None, *, shown: bool) -> Iterator[OnBytes]:
    """How much has been copied, on a terminal's stderr. ``total``: None for a directory, whose bytes nobody has counted."""
    if not shown or not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def _size_of(workspace: Workspace, source: Place) -> int | None:
    """What a bar counts up to, where one look tells."""
    if not sys.stderr.isatty() or source.path == "-":
        return None
    if source.workspace is None:
        path = Path(source.path)
        return path.stat().st_size if path.is_file() else None
    info = workspace.files.stat(source.path)
    return info.size or None if info.kind is FileKind.FILE else None


def _out(workspace: Workspace, remote: str, local: str, on_bytes: OnBytes) -> Transfer:
    if local == "-":
        return _print(workspace, remote)
    target = Path(local)
    if target.is_dir() or local.endswith("/"):
        target = target / (posixpath.basename(remote.rstrip("/")) or workspace.name)
    return workspace.files.download(remote, target, on_bytes=on_bytes)


def _print(workspace: Workspace, remote: str) -> Transfer:
    transfer = Transfer(files=1)
    for piece in workspace.files.stream(remote):
        sys.stdout.buffer.write(piece)
        transfer.bytes += len(piece)
    sys.stdout.buffer.flush()
    return transfer


def _in(workspace: Workspace, local: str, remote: str, on_bytes: OnBytes) -> Transfer:
    name = "" if local == "-" else Path(local).resolve().name
    if name and (remote.endswith("/") or _is_directory(workspace, remote)):
        remote = posixpath.join(remote, name)
    if local == "-":
        written = workspace.files.write(remote, sys.stdin.buffer)
        return Transfer(files=1, bytes=written.length)
    return workspace.files.upload(local, remote, on_bytes=on_bytes)


def _is_directory(workspace: Workspace, path: str) -> bool:
    try:
        info = workspace.files.stat(path)
        if info.kind is FileKind.SYMLINK:
            workspace.files.list(path)
            return True
    except (NotFound, InvalidRequest):
        return False
    return info.kind is FileKind.DIRECTORY


def _tell(transfer: Transfer) -> None:
    files = "1 file" if transfer.files == 1 else f"{transfer.files} files"
    say(f"{files} copied, {size(transfer.bytes)}")
    for one in transfer.skipped[:SKIPPED_SHOWN]:
        note(f"[yellow]skipped {markup(one.path)}: {markup(one.reason)}[/]")
    if len(transfer.skipped) > SKIPPED_SHOWN:
        note(f"[yellow]skipped {len(transfer.skipped) - SKIPPED_SHOWN} more; --json names them all[/]")
