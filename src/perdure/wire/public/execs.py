"""Commands and their streams."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from perdure.wire.node import ExecEnd
from perdure.wire.public.common import Answer, Body, ErrorInfo, Seconds, Text


class StartExec(Body):
    """A command. ``wait_s`` is how long the call waits (the command goes on afterwards); the limits end the command.

    ``exec_id`` is chosen by the client (``exe_…``): a start repeated with the same id attaches to the command instead of
    running it again, so that a lost connection never runs anything twice.
    """

    exec_id: Annotated[str, Field(pattern=r"^exe_[0-9a-z]{8,40}$")] | None = None
    argv: Annotated[list[Annotated[str, Field(max_length=1 << 17)]], Field(min_length=1, max_length=10000)] | None = None
    shell: Annotated[str, Field(max_length=1 << 20)] | None = None
    env: dict[Text, Annotated[str, Field(max_length=1 << 17)]] = Field(default_factory=dict, max_length=1000)
    cwd: Text | None = None
    user: Text | None = None
    stdin: bool = False
    background: bool = False
    wait_s: Seconds | None = None
    run_limit_s: Seconds | None = None
    idle_limit_s: Seconds | None = None
    kill_grace_s: Annotated[float, Field(ge=0, le=3600)] = 2.0

    @model_validator(mode="after")
    def _one_command(self) -> StartExec:
        if (self.argv is None) == (self.shell is None):
            raise ValueError("give exactly one of 'argv' and 'shell'")
        if self.argv is not None and not self.argv[0]:
            raise ValueError("the command's first word is empty")
        if any("\0" in word for word in [*(self.argv or [self.shell or ""]), *self.env, *self.env.values()]):
            raise ValueError("a command and its environment cannot contain NUL")
        return self


class ExecOutcome(Answer):
    """How a command ended. ``exit_code``: 128+n for signals, 126/127 when not started, None when the outcome is unknown."""

    exec_id: str
    end: ExecEnd
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    run_s: float = 0.0


class ExecInfo(Answer):
    exec_id: str
    pid: int
    command: str
    started_at: datetime
    outcome: ExecOutcome | None
    stdout_bytes: int
    stderr_bytes: int
    generation: int


class ExecList(Answer):
    execs: list[ExecInfo]


class ExecEvent(Answer):
    """One line of an exec's stream.

    ``started`` (exec_id, pid), ``output`` (stream, offset, data, gap), ``heartbeat``; the last line is one of ``exited``
    (outcome), ``detached`` (the wait ended before the command) and ``error`` (the server cannot tell more).
    """

    type: Literal["started", "output", "exited", "detached", "error", "heartbeat"]
    exec_id: str | None = None
    pid: int | None = None
    stream: Literal["stdout", "stderr"] | None = None
    offset: int = 0
    data: str = Field(default="", description="base64")
    gap: int = Field(default=0, description="Bytes lost just before ``offset`` because nobody read them in time.")
    outcome: ExecOutcome | None = None
    error: ErrorInfo | None = None

    @property
    def payload(self) -> bytes:
        return base64.b64decode(self.data)


class SignalExec(Body):
    signal: Annotated[int, Field(ge=1, le=64)]


class StdinWritten(Answer):
    bytes: int
    eof: bool
