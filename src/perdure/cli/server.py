"""``perdure up``, ``down`` and ``doctor``, and the doors to ``demo`` and ``bench``."""

from __future__ import annotations

import asyncio
import shlex
import sys
from typing import Annotated

import typer

from perdure.cli import daemon
from perdure.cli.output import JsonFlag, Status, dump, markup, say, wants_json
from perdure.core.config import Settings
from perdure.core.errors import InvalidRequest
from perdure.sdk import Client, Workspace

#: What a stop may need beside hibernating everything.
DOWN_MARGIN_S = 60.0
SIGNS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}
UNIT = """\
[Unit]
Description=Perdure: persistent machines for AI agents
After=network.target

[Service]
ExecStart={command}
Environment=PERDURE_HOME={home}
Restart=on-failure
# The server hibernates every workspace on SIGTERM; its VMMs must live until it has.
KillMode=mixed
TimeoutStopSec={stop_s:.0f}
Delegate=yes

[Install]
WantedBy=multi-user.target
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for function in (up, down, doctor, demo, bench):
        app.command()(function)


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
        stop_s = settings.shutdown_deadline_s + DOWN_MARGIN_S
        unit = UNIT.format(command=shlex.join(daemon.command()), home=settings.home, stop_s=stop_s)
        dump({"unit": unit}) if as_json else sys.stdout.write(unit)
        return Status(0)
    if not detach:
        from perdure import wiring

        return Status(wiring.serve(settings))
    health = daemon.start(settings)
    if as_json:
        dump({"pid": health.pid, "socket": str(settings.api_socket), "version": health.version})
    else:
        say(f"Perdure {health.version} serves at {markup(settings.api_socket)} (process {health.pid})")
    return Status(0)


def down(ctx: typer.Context, json: JsonFlag = False) -> None:
    """Stop the server of this machine: every workspace is hibernated first."""
    as_json = wants_json(ctx, json)
    settings = Settings()
    with daemon.local(settings) as client:
        pid = client.health().pid
        awake = len(Workspace.list(states=["creating", "running", "waking"], client=client))
    daemon.end(pid, settings.shutdown_deadline_s + DOWN_MARGIN_S)
    if as_json:
        dump({"pid": pid, "hibernated": awake})
        return
    what = "1 workspace was" if awake == 1 else f"{awake} workspaces were"
    say(f"Stopped; {what} hibernated." if awake else "Stopped; no workspace was awake.")


def doctor(ctx: typer.Context, json: JsonFlag = False) -> Status:
    """Say what this host can do: QEMU, KVM, jail, cgroups, storage; and what mends the rest."""
    as_json = wants_json(ctx, json)
    settings = Settings()
    if settings.url is not None:
        with Client() as client:
            report = client.doctor()
    else:
        from perdure import wiring

        report = asyncio.run(wiring.doctor(settings))
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
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="Such as 'wake'.", show_default=False)],
    samples: Annotated[int | None, typer.Option(help="Samples per figure; default: the suite's.", min=1)] = None,
    json: JsonFlag = False,
) -> Status:
    """Measure, beside a baseline taken in the same run."""
    from perdure.cli import bench as suites

    if samples is not None and samples > 10000:
        raise InvalidRequest("More than 10000 samples would take days.", hint="Give fewer --samples.")
    return Status(suites.run(suite, as_json=wants_json(ctx, json), samples=samples))
