"""What commands print: one JSON document with ``--json``, terse text otherwise. What came out of a workspace is escaped here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from perdure.core.clock import SystemClock
from perdure.core.errors import PerdureError

if TYPE_CHECKING:  # imported where something is drawn: a script that reads JSON need not wait for it
    from rich.console import Console

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.", show_default=False)]


class Status(NamedTuple):
    """What a command function returns to end with a code of its own."""

    code: int


@dataclass
class Shared:
    """Of one invocation: options that stand before the command, and what the error seam must know."""

    json: bool = False
    failure_code: int = 1  # exec uses 125, since its other codes are the command's


def wants_json(ctx: typer.Context, flag: bool) -> bool:
    """``--json`` before or after the command."""
    shared = ctx.find_root().obj
    shared.json = shared.json or flag
    return bool(shared.json)


def safe(text: object) -> str:
    """Text from a workspace for a terminal: control characters, bidirectional overrides and stray bytes become escapes."""
    return "".join(char if char.isprintable() else _escaped(char) for char in str(text))


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def markup(text: object) -> str:
    """``safe`` text that rich takes literally."""
    from rich.markup import escape

    return escape(safe(text))


def dump(value: object) -> None:
    """One JSON document on one line; everything that is not ASCII is escaped."""
    sys.stdout.write(json.dumps(plain(value), ensure_ascii=True) + "\n")
    sys.stdout.flush()


def plain(value: object) -> Any:
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """A line of human output, in rich markup."""
    console().print(text)


def note(text: str) -> None:
    """A remark beside the output, on stderr, in rich markup."""
    console(stderr=True).print(text)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Columns without lines; cells are rich markup."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    for header in headers:
        made.add_column(header, justify="right" if header in right else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    out = console()
    if not out.is_terminal:
        out.width = 1000  # a pipe has no width; rich pads, so trailing blanks are cut
        with out.capture() as captured:
            out.print(made)
        sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
    else:
        out.print(made)


def complain(error: PerdureError, *, as_json: bool) -> None:
    """An error on stderr: what and why, then what to do."""
    if as_json:
        sys.stderr.write(json.dumps({"error": error.public()}) + "\n")
        return
    note(f"[red]Error:[/red] {markup(error.message)}")
    if error.hint:
        note(f"[dim]{markup(error.hint)}[/dim]")


def size(count: float) -> str:
    """Bytes for people: 1.5 MB. Decimal units, as disks and networks count."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """The largest unit that fits, for people."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def ago(moment: datetime) -> str:
    return duration(max(0.0, (SystemClock().now() - moment).total_seconds())) + " ago"


def swallow_stdout() -> None:
    """After a broken pipe: the interpreter's last flush must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
