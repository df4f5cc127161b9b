"""What a build tells while it works, as plain values: the CLI draws them, the API sends them as lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Step(StrEnum):
    """The steps of a build in their order; a step whose result is in the cache is not told."""

    WAITING = "waiting"
    AGENT_PACKAGES = "agent-packages"
    AGENT_DISK = "agent-disk"
    PACKAGES = "packages"
    COMMAND = "command"
    DISK = "disk"
    STORE = "store"
    GOLDEN_BOOT = "golden-boot"
    GOLDEN_WARM_UP = "golden-warm-up"
    GOLDEN_CAPTURE = "golden-capture"


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` steps have ended; ``log`` marks a line of output rather than the start of a step."""

    step: Step
    detail: str
    done: int = 0
    total: int = 0
    log: bool = False


ProgressSink = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """A sink for those who do not care."""
