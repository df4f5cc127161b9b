"""``perdure up``, ``down`` and ``doctor``, and the doors to ``demo`` and ``bench``."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli import daemon, unit
from perdure.cli.output import JsonFlag, Status, console, dump, markup, note, say, wants_json
from perdure.core import files
from perdure.core.config import Settings
from perdure.core.errors import HostUnfit, InvalidRequest
from perdure.core.stop import StopReport
from perdure.sdk import Client

#: What a stop may need beside hibernating everything. While it hibernates, the server asks systemd for more time itself.
DOWN_MARGIN_S = 60.0
#: Words about a stop that takes longer: how many seconds apart, and how many names in one.
LOOKS_PER_WORD = 10
NAMED_MAX = 5
SIGNS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}


def up(
    ctx: typer.Context,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it serves; it goes on in the background.")] = False,
    systemd: Annotated[bool, typer.Option("--systemd", help="Print a systemd unit and do nothing else.")] = False,
    json: JsonFlag = False,
) -> Status:
    """Start the server: API, node and database in one process. Ctrl-C hibernates every workspace and stops it."""
    as_json = wants_json(ctx, json)
    settings = Settings()
    if systemd:
        printed = unit.text(settings, daemon.command(), settings.shutdown_deadline_s + DOWN_MARGIN_S)
        dump({"unit": printed}) if as_json else sys.stdout.write(printed)
        return Status(0)
    _make_home(settings)
    if not detach:
        from perdure import wiring

        return Status(wiring.serve(settings))
    health = daemon.start(settings)
    if as_json:
        dump({"pid": health.pid, "socket": str(settings.api_socket), "version": health.version})
    else:
        say(f"Perdure {health.version} serves at {markup(settings.api_socket)} (process {health.pid})")
    return Status(0)


def _make_home(settings: Settings) -> None:
    try:
        files.make_dir(settings.home)
    except OSError as error:
        raise HostUnfit(
            f"The home {settings.home} cannot be made: {error.filename}: {error.strerror}.",
            hint="Set PERDURE_HOME to a directory that you may write to.",
        ) from error


def down(
    ctx: typer.Context,
    now: Annotated[bool, typer.Option("--now", help="Do not wait: what is awake loses its memory.")] = False,
    json: JsonFlag = False,
) -> Status:
    """Stop the server of this machine: every workspace is hibernated first, however long that takes.

    Ends with code 1 when a workspace lost memory.
    """
    as_json = wants_json(ctx, json)
    settings = Settings()
    pid = daemon.running(settings)
    if pid is None:
        with daemon.local(settings) as client:
            pid = client.health().pid
    watch = _Watch(settings.stop_file, pid)
    daemon.end(pid, now=now, watch=watch.look)
    report = watch.last()
    if as_json:
        dump({"pid": pid, "hibernated": len(report.asleep), "left": [asdict(left) for left in report.left]})
    else:
        _tell(report)
    return Status(1 if any(left.lost for left in report.left) else 0)


class _Watch:
    """Says whom a stop waits for, when it takes longer."""

    def __init__(self, file: Path, pid: int) -> None:
        self._file = file
        self._pid = pid
        self._looks = 0

    def look(self) -> None:
        self._looks += 1
        told = self.last()
        waiting = told.waiting
        if waiting and self._looks % LOOKS_PER_WORD == 0:
            more = f" and {len(waiting) - NAMED_MAX} more" if len(waiting) > NAMED_MAX else ""
            note(f"Still putting to sleep: {markup(', '.join(waiting[:NAMED_MAX]))}{more}.")
            for trouble in told.troubles[:NAMED_MAX]:
                note(f"[yellow]![/] {markup(trouble)}")

    def last(self) -> StopReport:
        return StopReport.read(self._file, self._pid) or StopReport()


def _tell(report: StopReport) -> None:
    count = len(report.asleep)
    what = "1 workspace was" if count == 1 else f"{count} workspaces were"
    say(f"Stopped; {what} hibernated." if count or report.left else "Stopped; no workspace was awake.")
    for left in report.left:
        cost = "what its memory held since its last snapshot is lost" if left.lost else "nothing of it is lost"
        say(f"[yellow]![/] {markup(left.name)} was not put to sleep, {cost}: {markup(left.why)}")


def doctor(ctx: typer.Context, json: JsonFlag = False) -> Status:
    """Say what this host can do: QEMU, KVM, jail, cgroups, storage; and what mends the rest."""
    as_json = wants_json(ctx, json)
    settings = Settings()
    if settings.url is not None:
        with Client() as client:
            report = client.doctor()
    else:
        from perdure import fitness

        out = console(stderr=True)
        is_watched = not as_json and out.is_terminal  # the first time on a host, a kernel may be given ten seconds to boot
        with out.status("Trying what this host can do", spinner="line") if is_watched else nullcontext():
            report = asyncio.run(fitness.doctor(settings))
    if as_json:
        dump(report)
        return Status(0 if report.ok else 1)
    for check in report.checks:
        say(f"{SIGNS[check.status.value]} [bold]{markup(check.name)}[/] {markup(check.detail)}")
        if check.hint:
            say(f"  [dim]{markup(check.hint)}[/]")
    grade = f"workspaces here are {report.isolation.value}" if report.isolation else "no workspace can run here"
    say(f"\n{'Fit' if report.ok else 'Not fit'}: {grade}.")
    return Status(0 if report.ok else 1)


def demo(ctx: typer.Context, json: JsonFlag = False) -> Status:
    """Show the whole story in about a minute, in a temporary home that is removed afterwards."""
    from perdure.cli import demo as story

    return Status(story.run(as_json=wants_json(ctx, json)))


def bench(
    ctx: typer.Context,
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="wake, snapshots or serve.", show_default=False)],
    samples: Annotated[int | None, typer.Option(help="Samples per figure; default: the suite's.", min=1)] = None,
    json: JsonFlag = False,
) -> Status:
    """Measure, beside a baseline taken in the same run."""
    from perdure.cli import bench as suites

    if samples is not None and samples > 10000:
        raise InvalidRequest("More than 10000 samples would take days.", hint="Give fewer --samples.")
    return Status(suites.run(suite, as_json=wants_json(ctx, json), samples=samples))
