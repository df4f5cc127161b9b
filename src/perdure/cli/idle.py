"""When workspaces sleep and wake by themselves, in words; and the times and policies that options give."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated

import typer

from perdure.cli.keys import seconds
from perdure.cli.output import dump, duration, markup, say
from perdure.core.clock import SystemClock
from perdure.core.errors import InvalidRequest
from perdure.sdk import Workspace
from perdure.wire import public


class Asleep(StrEnum):
    KEEP = "keep"
    ARCHIVE = "archive"
    DELETE = "delete"


AsleepDays = Annotated[
    float | None, typer.Option("--asleep-after-days", help="Days asleep after which --asleep-action is done.", show_default=False)
]
AsleepAction = Annotated[
    Asleep | None,
    typer.Option("--asleep-action", help="archive: only the object store has it then. delete: announced a day before."),
]
IdleTimeout = Annotated[
    float | None, typer.Option("--idle-timeout-s", help="Idle seconds before it sleeps, at least 5; 0: never.")
]
NEVER = "never"
#: What is there once, and more often.
_USES = {
    "request": ("a request is under way", "{} requests are under way"),
    "command": ("a command runs", "{} commands run"),
    "stream": ("a stream into it is open", "{} streams into it are open"),
    "outbound": ("it is connected to the outside", "it has {} connections to the outside"),
    "program": ("its program says that it is busy", "its program says that it is busy"),
    "policy": ("it never sleeps by itself", "it never sleeps by itself"),
}


def wake_at(workspace: Workspace, when: datetime | timedelta | None, *, as_json: bool) -> None:
    """What ``perdure wake --at`` does."""
    workspace.wake_at(when)
    if as_json:
        dump(workspace.info)
    else:
        say(f"[bold]{markup(workspace.name)}[/] {wakes(workspace.info.wake_at)}")


def moment(text: str, deadline_s: float | None = None) -> datetime | timedelta | None:
    """``+2h``, a time with its offset, or ``never``."""
    if deadline_s is not None:
        raise InvalidRequest("With --at nobody waits, so --deadline means nothing.", hint="Leave one of them out.")
    if text == NEVER:
        return None
    if text.startswith("+"):
        return timedelta(seconds=seconds(text[1:]))
    hint = "Write 2026-12-24T18:00:00Z, 2026-12-24T18:00+01:00, or +2h; 'never' takes the time back."
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest(f"--at {text!r} is not a time.", hint=hint) from error
    if found.tzinfo is None:
        raise InvalidRequest(f"--at {text!r} has no offset from UTC, so it may mean any hour.", hint=hint)
    return found


def in_utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def wakes(at: datetime | None) -> str:
    """When it wakes by itself, in words."""
    if at is None:
        return "does not wake by itself"
    left_s = (at - SystemClock().now()).total_seconds()
    return f"wakes at {in_utc(at)}, {f'in {duration(left_s)}' if left_s > 0 else 'which is now'}"


def in_use(idle: public.IdleInfo | None) -> list[str]:
    """Why it is awake: a line for each reason, then how long it has been left alone, and when it sleeps."""
    if idle is None:
        return ["-"]
    lines = [_reason(one) for one in idle.reasons]
    since = "now" if idle.unused_s < 1 else f"{duration(idle.unused_s)} ago"
    sleeps = "" if idle.sleeps_in_s is None else f"; sleeps in {duration(idle.sleeps_in_s)} if nobody uses it"
    return [*lines, f"last used {since}{sleeps}"]


def _reason(one: public.AwakeReason) -> str:
    if one.use == "keep-awake":
        return f"somebody keeps it awake for another {duration(one.left_s or 0)}"
    single, several = _USES[one.use]
    return single if one.count == 1 else several.format(one.count)


def long_sleep(info: public.WorkspaceInfo) -> str:
    """What becomes of it after a long sleep."""
    if info.asleep_after_days is None or info.asleep_action == "keep":
        return "kept"
    after = f"after {info.asleep_after_days:g} days asleep it is"
    if info.asleep_action == "archive":
        done = f"; it has been since {in_utc(info.archived_at)}" if info.archived_at else ""
        return f"{after} archived{done}"
    return f"{after} deleted" + (f": not before {in_utc(info.deletes_at)}" if info.deletes_at else "")
