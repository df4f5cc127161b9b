"""``perdure top``: a live view of workspaces. A sample and the one before it make a frame, or a document."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import interrupts
from perdure.cli.output import JsonFlag, console, dump, duration, markup, size, wants_json
from perdure.cli.workspaces import state_text
from perdure.core.errors import PerdureError
from perdure.sdk import Client, Workspace
from perdure.wire import public

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

#: Lines of a frame besides the table's rows.
FRAME_LINES = 6
QUITS = frozenset("qQ\x04")
HEADERS = ("NAME", "STATE", "MEMORY", "CPU", "IDLE", "OUT", "IN", "AWAKE BECAUSE")
RIGHT = frozenset({"MEMORY", "CPU", "IDLE", "OUT", "IN"})


@dataclass(frozen=True, slots=True)
class Sample:
    """All workspaces at one instant of the server's clock, and the meters of those that are awake."""

    at: datetime
    workspaces: tuple[public.WorkspaceInfo, ...]
    meters: dict[str, public.Meters]


def take(client: Client) -> Sample:
    read = client.meters()
    infos = tuple(one.info for one in Workspace.iterate(client=client))
    return Sample(read.at, infos, {one.workspace_id: one for one in read.meters})


@dataclass(frozen=True, slots=True)
class Row:
    """A workspace in a frame. Rates are those since the sample before, or since it woke: percent of one processor, bytes per
    second; None for one that has no machine."""

    info: public.WorkspaceInfo
    meters: public.Meters | None
    cpu_percent: float | None
    sent_bytes_s: float | None
    received_bytes_s: float | None
    idle_s: float
    why: tuple[str, ...]  # it is awake

    def document(self) -> dict[str, Any]:
        info, meters = self.info, self.meters
        return {
            "id": info.id,
            "name": info.name,
            "state": info.state.value,
            "generation": info.generation,
            "memory_mib": info.memory_mib if meters else 0,
            "cpu_s": meters.cpu_s if meters else None,
            "cpu_percent": self.cpu_percent,
            "sent_bytes": meters.sent_bytes if meters else None,
            "received_bytes": meters.received_bytes if meters else None,
            "idle_s": self.idle_s,
            "awake_because": list(self.why),
        }


def rows(sample: Sample, before: Sample | None) -> list[Row]:
    """The busiest first; what sleeps comes last, in the order in which it was used."""
    made = [_row(info, sample, before) for info in sample.workspaces]
    return sorted(made, key=lambda row: (row.meters is None, -(row.cpu_percent or 0.0), row.idle_s, row.info.name))


def _row(info: public.WorkspaceInfo, sample: Sample, before: Sample | None) -> Row:
    now, then = sample.meters.get(info.id), before.meters.get(info.id) if before else None
    idle_s = max(0.0, (sample.at - info.last_active_at).total_seconds())
    if now is None:
        return Row(info, None, None, None, None, idle_s, ())
    is_same = before is not None and then is not None and then.generation == now.generation and sample.at > before.at
    since = before.at if is_same and before else info.state_changed_at
    base = then if is_same and then else now.model_copy(update={"cpu_s": 0.0})
    seconds = max(0.001, (sample.at - since).total_seconds())
    return Row(
        info,
        now,
        100 * max(0.0, now.cpu_s - base.cpu_s) / seconds,
        max(0, now.sent_bytes - base.sent_bytes) / seconds,
        max(0, now.received_bytes - base.received_bytes) / seconds,
        idle_s,
        reasons(info, sample.at),
    )


def reasons(info: public.WorkspaceInfo, at: datetime) -> tuple[str, ...]:
    """Why it does not sleep, in a few words each."""
    found = []
    if info.keep_awake_until is not None and info.keep_awake_until > at:
        found.append(f"keep-awake, {duration((info.keep_awake_until - at).total_seconds())} left")
    if not info.idle_timeout_s:
        found.append("it never sleeps")
    return tuple(found)


def document(sample: Sample, before: Sample | None) -> dict[str, Any]:
    """For ``--json``."""
    shown = rows(sample, before)
    return {
        "at": sample.at.isoformat(),
        "states": _states(sample),
        "awake_memory_mib": _memory_mib(shown),
        "cpu_percent": _sum(row.cpu_percent for row in shown),
        "workspaces": [row.document() for row in shown],
    }


def _states(sample: Sample) -> dict[str, int]:
    counts = Counter(info.state for info in sample.workspaces)
    return {state.value: counts[state] for state in public.WorkspaceState if counts[state]}


def _memory_mib(shown: list[Row]) -> int:
    return sum(row.info.memory_mib for row in shown if row.meters)


def _sum(values: Iterator[float | None]) -> float:
    return sum(value or 0.0 for value in values)


# ----------------------------------------------------------------------------------------------------------------- drawing


def frame(sample: Sample, before: Sample | None, *, height: int | None, note: str = "") -> RenderableType:
    """One picture; at most ``height`` lines high (None: as high as it is)."""
    from rich.console import Group
    from rich.text import Text

    shown = rows(sample, before)
    room = len(shown) if height is None else max(1, height - FRAME_LINES)
    rest = len(shown) - room
    rates = [_sum(row.sent_bytes_s for row in shown), _sum(row.received_bytes_s for row in shown)]
    states = ", ".join(f"{count} {state}" for state, count in _states(sample).items()) or "no workspaces"
    lines: list[Text] = [
        Text.from_markup(f"[bold]perdure[/] {sample.at.astimezone():%H:%M:%S}  {states}"),
        Text.from_markup(
            f"[dim]awake[/] {_memory_mib(shown)} MiB  [dim]CPU[/] {_percent(_sum(row.cpu_percent for row in shown))}  "
            f"[dim]out[/] {size(rates[0])}/s  [dim]in[/] {size(rates[1])}/s",
            overflow="ellipsis",
        ),
        Text.from_markup(f"[yellow]{markup(note)}[/]" if note else ""),
        *_lines(shown[:room]),
    ]
    if rest > 0:
        lines.append(Text.from_markup(f"[dim]and {rest} more[/]"))
    if height is not None:
        lines.append(Text.from_markup("[dim]q quits[/]"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _lines(shown: list[Row]) -> list[Text]:
    """Columns; a terminal that is too narrow cuts the last ones off, not a little of each."""
    from rich.text import Text

    cells = [[Text(name, style="dim") for name in HEADERS]]
    cells += [[Text.from_markup(cell) for cell in _cells(row)] for row in shown]
    widths = [max(row[column].cell_len for row in cells) for column in range(len(HEADERS))]
    for row in cells:
        for column, cell in enumerate(row[:-1]):
            pad = cell.pad_left if HEADERS[column] in RIGHT else cell.pad_right
            pad(widths[column] - cell.cell_len)
    return [Text("  ").join(row) for row in cells]


def _cells(row: Row) -> tuple[str, ...]:
    info, meters = row.info, row.meters
    head = (f"[bold]{markup(info.name)}[/]", state_text(info))
    if meters is None:
        why = markup(info.state_detail) if info.state is public.WorkspaceState.FAILED else ""
        return (*head, "-", "-", duration(row.idle_s), "-", "-", why)
    return (
        *head,
        f"{info.memory_mib} MiB",
        _percent(row.cpu_percent or 0.0),
        duration(row.idle_s) if row.idle_s >= 1 else "-",
        size(meters.sent_bytes),
        size(meters.received_bytes),
        markup(", ".join(row.why)),
    )


def _percent(value: float) -> str:
    return f"{value:.1f} %" if value < 10 else f"{value:.0f} %"


# ---------------------------------------------------------------------------------------------------------------- watching


def top(
    ctx: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between two pictures.", min=0.2, max=3600)] = 2.0,
    json: JsonFlag = False,
) -> None:
    """Watch workspaces: what is awake and why, memory, processor time, idle time and bytes moved. q or Ctrl-C ends it.

    CPU is in percent of one processor, since the picture before, or since it woke. OUT and IN are what the workspace has sent and
    received. With --json, or where there is no terminal, it prints one picture.
    """
    as_json = wants_json(ctx, json)
    with Client() as client:
        sample = take(client)
        if as_json:
            dump(document(sample, None))
        elif once or not console().is_terminal:
            _print(sample)
        else:
            watch(client, sample, interval_s)


def _print(sample: Sample) -> None:
    from rich.console import Console

    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = 1000  # a pipe has no width; rich pads, so trailing blanks are cut
    with out.capture() as captured:
        out.print(frame(sample, None, height=None))
    sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def watch(client: Client, sample: Sample, interval_s: float) -> None:
    """Until a key or a signal ends it. However it ends, the terminal is as it was."""
    from rich.console import Console
    from rich.live import Live

    out = Console(highlight=False)
    before: Sample | None = None
    note = ""
    live = Live(console=out, screen=True, auto_refresh=False)
    with _terminal() as quits, live, suppress(KeyboardInterrupt), interrupts.restored():
        while True:
            live.update(frame(sample, before, height=out.size.height, note=note), refresh=True)
            if quits(interval_s):
                return
            try:
                before, sample, note = sample, take(client), ""
            except PerdureError as error:  # the last picture stays; it may come back
                note = error.message


@contextmanager
def _terminal() -> Iterator[Callable[[float], bool]]:
    """Keys come one by one and unseen; gives a function that waits for so many seconds and says whether to quit."""
    handled = signal.signal(signal.SIGTERM, _terminated)
    try:
        if not sys.stdin.isatty():
            yield lambda seconds: threading.Event().wait(seconds)
            return
        descriptor = sys.stdin.fileno()
        kept = termios.tcgetattr(descriptor)
        try:
            tty.setcbreak(descriptor)
            changed = termios.tcgetattr(descriptor)
            changed[6][termios.VSUSP] = b"\0"  # stopped, it would leave the terminal as it is now
            termios.tcsetattr(descriptor, termios.TCSANOW, changed)
            with interrupts.waking() as signals:
                yield lambda seconds: _quits(descriptor, signals, seconds)
        finally:
            termios.tcsetattr(descriptor, termios.TCSANOW, kept)
    finally:
        signal.signal(signal.SIGTERM, handled)


def _terminated(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _quits(descriptor: int, signals: int, seconds: float) -> bool:
    """Any other key brings the next picture at once."""
    readable, _, _ = select.select([descriptor, signals], [], [], seconds)
    interrupts.raise_if_came()
    if descriptor not in readable:
        return False
    typed = os.read(descriptor, 64)
    return not typed or bool(QUITS & set(typed.decode("latin-1")))
