"""``perdure backup`` and ``restore``: through the server when one runs, in this process otherwise."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.output import JsonFlag, Status, dump, markup, note, say, size, wants_json
from perdure.cli.progress import Bar
from perdure.core.config import Settings
from perdure.core.errors import InvalidRequest, PerdureError
from perdure.sdk import Client, ServerUnreachable
from perdure.wire import public

Show = Callable[[public.BackupEvent], None]
#: Exit code of a backup or a restore that is complete but for what it was told to skip.
LEFT_OUT = 3
PlaceOf = Annotated[
    str,
    typer.Argument(
        metavar="DIR|URL", help="A directory of its own, or s3://, gs:// or az:// with a prefix of its own.", show_default=False
    ),
]


def backup(
    ctx: typer.Context,
    place: PlaceOf,
    with_master_key: Annotated[
        bool,
        typer.Option(
            "--with-master-key",
            help="Put the master key in, too: whoever can read the backup can then open and sign everything it protects.",
        ),
    ] = False,
    skip_damaged: Annotated[
        bool,
        typer.Option("--skip-damaged", help="Leave damaged snapshots out and name them, instead of ending at the first one."),
    ] = False,
    json: JsonFlag = False,
) -> Status:
    """Back up everything: database, snapshots and the images they lie on. The server goes on working.

    A second backup into the same place sends only what is new. Workspaces that are awake are in it as of their last snapshot.
    With --json: one line per step, the last one with the backup. Ends with code 3 when damaged snapshots were left out.
    """
    as_json = wants_json(ctx, json)
    with _Progress(quiet=as_json) as progress:
        made = _backup(place, progress.show, with_master_key=with_master_key, skip_damaged=skip_damaged)
    if as_json:
        dump(public.BackupEvent(type="done", backup=made))
    else:
        _tell_backup(made)
    return Status(LEFT_OUT if made.left_out else 0)


def _tell_backup(made: public.BackupInfo) -> None:
    say(
        f"Backup [bold]{made.id}[/] is complete: {_count(made.workspaces, 'workspace')}, {_count(made.snapshots, 'snapshot')}, "
        f"{_count(made.images, 'image')}; {size(made.sent_bytes)} were sent"
    )
    if made.awake:
        say(f"[dim]{markup(', '.join(made.awake))} ran: in the backup as of the last snapshot[/]")
    if made.has_master_key:
        note("[yellow]![/] The backup holds the master key. Whoever can read it can open and sign everything: guard it so.")
    else:
        note("[dim]The master key is not in it. Keep a copy of HOME/master.key somewhere else, or use --with-master-key.[/]")
    for one in made.left_out:
        what = f"snapshot {one.snapshot} of {one.workspace}" if one.snapshot else f"the image of {one.workspace}"
        kept = "in it without its memory" if one.has_disk else "not in it"
        say(f"[yellow]![/] {markup(what)} is {kept}: {markup(one.why)}")


def _backup(place: str, show: Show, *, with_master_key: bool, skip_damaged: bool) -> public.BackupInfo:
    with Client() as client:
        try:
            client.health()
        except ServerUnreachable:
            if client.target.socket is None:
                raise
            from perdure import wiring

            spec = public.MakeBackup(to=_absolute(place), with_master_key=with_master_key, skip_damaged=skip_damaged)
            made: public.BackupInfo = wiring.back_up(Settings(), spec, show)
            return made
        if client.target.socket is not None:
            place = _absolute(place)
        elif "://" not in place and not Path(place).is_absolute():
            raise InvalidRequest(
                f"{place!r} is a place on the server's machine, which is another one.", hint="Give an absolute path, or a URL."
            )
        for event in client.backup(place, with_master_key=with_master_key, skip_damaged=skip_damaged):
            if event.backup is not None:
                return event.backup
            show(event)
    raise PerdureError("The server ended the backup without a result.", hint="See the server's log, and back up again.")


def _absolute(place: str) -> str:
    """The server works elsewhere than we do."""
    return place if "://" in place or not place.strip() else str(Path(place).absolute())


def restore(
    ctx: typer.Context,
    place: PlaceOf,
    backup_id: Annotated[
        str | None, typer.Option("--backup", metavar="ID", help="Which one; default: the newest that is complete.")
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Go on without snapshots that are damaged in the place, and name them.")
    ] = False,
    json: JsonFlag = False,
) -> Status:
    """Bring a backup back into an empty home (PERDURE_HOME). No server may run there; start it afterwards with 'perdure up'.

    Every workspace comes back asleep at its last snapshot in the backup, in a new generation. Interrupted, run it again. Ends
    with code 3 when something was skipped.
    """
    as_json = wants_json(ctx, json)
    from perdure import wiring

    with _Progress(quiet=as_json) as progress:
        done: public.RestoredInfo = wiring.restore(Settings(), place, backup_id, progress.show, skip_damaged=skip_damaged)
    if as_json:
        dump({"type": "done", "restored": done})
    else:
        _tell_restored(done)
    return Status(LEFT_OUT if done.skipped else 0)


def _tell_restored(done: public.RestoredInfo) -> None:
    say(
        f"Backup [bold]{done.backup}[/] of {done.of:%Y-%m-%d %H:%M} UTC is restored: {_count(done.workspaces, 'workspace')}, "
        f"{_count(done.snapshots, 'snapshot')}. Start the server with 'perdure up'."
    )
    saved = [name for name in done.set_back if name not in done.unsaved]
    if saved:
        say(f"[yellow]![/] {markup(', '.join(saved))} ran when the backup was made: asleep at the last snapshot before it")
    if done.unsaved:
        say(f"[yellow]![/] {markup(', '.join(done.unsaved))} had no snapshot yet: only the settings are in the backup")
    for sentence in done.lost:
        say(f"[yellow]![/] {markup(sentence)}")


def recover_from_store(*, as_json: bool) -> None:
    """``perdure recover --from-store``."""
    from perdure import wiring

    with _Progress(quiet=as_json) as progress:
        done: public.RecoveredInfo = wiring.recover_from_store(Settings(), progress.show)
    if as_json:
        dump({"type": "done", "recovered": done})
        return
    say(
        f"{_count(len(done.workspaces), 'workspace')} and {_count(done.snapshots, 'snapshot')} are in the catalogue again. Start "
        "the server with 'perdure up'; a workspace is fetched when it wakes."
    )
    if done.only_here:
        say(f"[dim]{_count(done.only_here, 'snapshot')} of these: on this node only, until the server has uploaded them[/]")
    for name in done.nameless:
        say(f"[yellow]![/] {markup(name)} has a name of ours: its own is not in the store, or a newer workspace has it")
    for name in done.incomplete:
        say(f"[yellow]![/] {markup(name)} is left out: parts of it are missing from the store")
    for name, why in sorted(done.damaged.items()):
        say(f"[yellow]![/] {markup(name)}: {markup(why)}")
    if done.kept_until is not None:
        until = f"{done.kept_until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        say(
            f"[yellow]![/] Until {until} what was left out stays in the object store; then it is collected. Bring back what is "
            "missing before (an earlier version of an object, the keys), and recover again into an empty home. "
            "PERDURE_STORE_COLLECT_S=0 keeps it for longer."
        )


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


class _Progress:
    """A bar on a terminal; one line per step without; one document per step with --json."""

    def __init__(self, *, quiet: bool) -> None:
        self._as_json = quiet
        self._bar = Bar(quiet=quiet)
        self._told: set[str | None] = set()

    def __enter__(self) -> _Progress:
        self._bar.show("Beginning")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__(None, None, None)

    def show(self, event: public.BackupEvent) -> None:
        """Draw one event."""
        if event.type != "progress":
            return
        if self._as_json:
            dump(event.model_dump(mode="json", exclude_unset=True))
            return
        sent = f", {size(event.sent_bytes)} sent" if event.sent_bytes else ""
        words = f"{event.what}: {event.done} of {event.count}{sent} [dim]{markup(event.name)}[/]"
        if self._bar.is_shown:
            self._bar.show(words, event.done, event.count)
        elif event.what not in self._told:
            self._told.add(event.what)
            note(f"{event.what}: {event.count}")
