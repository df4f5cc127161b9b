"""The workspace's program: what names it, what the guest's supervisor says of it, what it says of itself.

The program is named by a file on the workspace's own disk (``wire.guest.ops.PROGRAM_FILE``), so that forks, rewinds and boots
from disk keep it, and what a snapshot wakes as is what its memory holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from perdure.core.errors import InvalidRequest

#: As the guest has them (``wire.guest.ops``), of which clients know nothing.
PROGRAM_PORT = 8080
PROGRAM_STOP_GRACE_S = 10.0
PROGRAM_FILE_BYTES = 20_000
STOP_GRACE_MAX_S = 3600.0


class Restart(StrEnum):
    """What happens when the program ends by itself."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"  # unless it ended with exit code 0
    NEVER = "never"


class ProgramState(StrEnum):
    NONE = "none"  # nobody has named one, or what names it cannot be understood
    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing-off"  # it ended, and is started again after a while
    STOPPING = "stopping"
    STOPPED = "stopped"  # on request
    ENDED = "ended"  # by itself, and its restart policy leaves it so


class ProgramAct(StrEnum):
    """``START`` and ``RESTART`` read the file anew."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A program that serves a workspace on ``port``. ``user`` as for commands; ``env`` is added to the workspace's."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    port: int = PROGRAM_PORT
    restart: Restart = Restart.ALWAYS
    stop_grace_s: float = PROGRAM_STOP_GRACE_S  # SIGTERM to SIGKILL

    def to_file(self) -> bytes:
        """The content of the file that names it. Raises InvalidRequest for what cannot be a program."""
        self._check()
        value: dict[str, Any] = {
            "argv": list(self.argv),
            "env": dict(self.env),
            "cwd": self.cwd,
            "user": self.user,
            "port": self.port,
            "restart": self.restart.value,
            "stop_grace_s": self.stop_grace_s,
        }
        content = json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
        if len(content) > PROGRAM_FILE_BYTES:
            raise InvalidRequest(
                f"The program's words and variables need {len(content)} bytes of {PROGRAM_FILE_BYTES}.",
                hint="Put long values into a file of the workspace.",
            )
        return content

    def _check(self) -> None:
        if not self.argv or not self.argv[0]:
            raise InvalidRequest("A program needs at least its first word.", hint='Such as argv = ["python3", "/srv/agent.py"].')
        texts = [*self.argv, *self.env, *self.env.values(), self.cwd or "", self.user or ""]
        if any("\0" in text for text in texts) or any("=" in name or not name for name in self.env):
            raise InvalidRequest(
                "A program's words hold no NUL, and a variable's name neither '=' nor nothing.", hint="Remove it."
            )
        if not 1 <= self.port <= 65535:
            raise InvalidRequest(f"{self.port} is not a TCP port.", hint="Ports are 1 to 65535.")
        if not (math.isfinite(self.stop_grace_s) and 0 <= self.stop_grace_s <= STOP_GRACE_MAX_S):
            raise InvalidRequest(
                f"stop_grace_s is {self.stop_grace_s:g}, but must be between 0 and {STOP_GRACE_MAX_S:g}.",
                hint="Choose 0 to 3600.",
            )


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How it ended the last time. ``exit_code``: 128+n for signals, 126/127 when not started, None when nobody knows."""

    exit_code: int | None
    signal: int | None
    detail: str
    run_s: float


@dataclass(frozen=True, slots=True)
class ProgramStatus:
    """What the guest's supervisor knows. Offsets are bytes of its output since the machine booted."""

    spec: ProgramSpec | None
    state: ProgramState
    pid: int | None  # as the workspace's processes see it
    started_at: datetime | None
    restarts: int  # since the machine booted
    failures: int  # ends in a row with less than a minute between them
    retry_in_s: float | None  # while it backs off
    last: ProgramEnd | None
    problem: str  # why what the file says is not taken for a program; "" when there is none
    log_start: int
    log_end: int


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Which of the kept output: from a byte offset on, or the last ``tail`` lines; neither: all. ``follow``: and what comes."""

    offset: int | None = None
    tail: int | None = None
    follow: bool = False


@dataclass(frozen=True, slots=True)
class LogChunk:
    """``offset`` bytes came before ``data``; ``gap`` bytes just before it are not kept any more."""

    offset: int
    data: bytes
    gap: int = 0


class PingStatus(StrEnum):
    """What ``GET /ping`` of the container contract answers (reference: aws.md §2.3)."""

    HEALTHY = "Healthy"
    HEALTHY_BUSY = "HealthyBusy"


@dataclass(frozen=True, slots=True)
class ProgramPing:
    """``updated_at``: the guest's word for when the status changed last; None when it gave none. ``port`` is who answered."""

    status: PingStatus
    port: int
    updated_at: datetime | None

    @property
    def is_busy(self) -> bool:
        return self.status is PingStatus.HEALTHY_BUSY
