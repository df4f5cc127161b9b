"""What a wake tells the workspace beside its repairs: the report for resume.json, and the hooks that it lets run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from perdure.machines.guestlink_exec import integer
from perdure.machines.guestlink_stream import clean
from perdure.wire.guest.ops import HOOK_OUTPUT_BYTES, HOOKS_MAX
from perdure.wire.node import HookOutcome, HookRun

#: What looking for hooks and killing one may take beyond their limits.
KILLING_S = 5.0
_NAME_MAX = 64


@dataclass(frozen=True, slots=True)
class HookLimits:
    """Seconds that one hook may take, and that all of a wake may take together."""

    each_s: float = 20.0
    all_s: float = 40.0


def telling(report: Mapping[str, Any] | None, limits: HookLimits) -> dict[str, Any]:
    """The fields of a wake's request."""
    return {} if report is None else {"resume": dict(report), "hooks": asdict(limits)}


def silence(told: dict[str, Any], reply: Mapping[str, Any]) -> tuple[str, ...]:
    """What is wrong when an agent answers without a word on what it was told: memory keeps an agent as old as itself."""
    if not told or "hooks" in reply:
        return ()
    return (
        "The workspace's memory holds an agent of an earlier release, which writes no resume.json and runs no hooks; a boot from "
        "disk brings the current one.",
    )


def runs(value: object) -> tuple[HookRun, ...]:
    """A guest's list of hooks. It may lie, so it is cut to size and made safe to show."""
    rows = value[:HOOKS_MAX] if isinstance(value, list) else []
    return tuple(_run(row) for row in rows if isinstance(row, dict))


def _run(row: dict[str, Any]) -> HookRun:
    code = row.get("exit_code")
    return HookRun(
        name=clean(row.get("name"))[:_NAME_MAX],
        outcome=_outcome(row.get("outcome")),
        exit_code=None if code is None else integer(code, -1),
        seconds=_seconds(row.get("ms")),
        output=_text(row.get("output")),
    )


def _outcome(value: object) -> HookOutcome:
    try:
        return HookOutcome(str(value))
    except ValueError:
        return HookOutcome.FAILED


def _seconds(ms: object) -> float:
    usable = isinstance(ms, int | float) and math.isfinite(ms) and 0 <= ms < 1e9
    return round(float(ms) / 1000, 3) if usable else 0.0  # type: ignore[arg-type]


def _text(value: object) -> str:
    """Printable, with its lines."""
    shown = value[-HOOK_OUTPUT_BYTES:] if isinstance(value, str) else ""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in shown)
