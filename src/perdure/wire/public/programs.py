"""A workspace's program: what names it, how it does, and what it wrote."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from perdure.wire.node import PROGRAM_PORT, PROGRAM_STOP_GRACE_S, PingStatus, ProgramState, Restart
from perdure.wire.public.common import Answer, Body, EnvName, ErrorInfo, Text

#: Headers of the container contract: what of an invocation's headers reaches the program, and what it is told of each.
RUNTIME_PREFIX = "x-amzn-bedrock-agentcore-runtime-"
SESSION_HEADER = f"{RUNTIME_PREFIX}session-id"
RUNTIME_REQUEST_HEADER = f"{RUNTIME_PREFIX}request-id"
CUSTOM_PREFIX = f"{RUNTIME_PREFIX}custom-"

_Word = Annotated[str, Field(max_length=1 << 14)]


class SetProgram(Body):
    """A program that the workspace keeps running. ``env`` is added to the workspace's environment; ``PORT`` is in it anyway."""

    argv: Annotated[list[_Word], Field(min_length=1, max_length=1000)]
    env: dict[EnvName, _Word] = Field(default_factory=dict, max_length=1000)
    cwd: Text | None = Field(default=None, description="Default: the user's home.")
    user: Text | None = Field(default=None, description="Name or uid[:gid] in the workspace; default root.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(default=PROGRAM_PORT, description="Where it answers invocations.")
    restart: Restart = Field(default=Restart.ALWAYS, strict=False, description="What happens when it ends by itself.")
    stop_grace_s: Annotated[float, Field(ge=0, le=3600)] = Field(default=PROGRAM_STOP_GRACE_S, description="SIGTERM to SIGKILL.")


class ProgramSpecInfo(Answer):
    argv: list[str]
    env: dict[str, str]
    cwd: str | None
    user: str | None
    port: int
    restart: Restart
    stop_grace_s: float


class ProgramEndInfo(Answer):
    """``exit_code``: 128+n for signals, 126/127 when it could not be started, None when nobody knows."""

    exit_code: int | None
    signal: int | None
    detail: str
    run_s: float


class ProgramInfo(Answer):
    """``failures`` are ends in a row that came too soon; offsets are bytes of its output since the machine booted."""

    program: ProgramSpecInfo | None
    state: ProgramState
    pid: int | None
    started_at: datetime | None
    restarts: int
    failures: int
    retry_in_s: float | None = Field(description="While it backs off.")
    last: ProgramEndInfo | None = Field(description="How it ended the last time.")
    problem: str = Field(description="Why what names it in the workspace is not taken for a program.")
    log_start: int
    log_end: int
    ping: PingStatus | None = Field(default=None, description="What it answers to GET /ping, asked when it is looked at.")
    generation: int


class LogChunk(Answer):
    """One line of a log's stream: ``output`` (offset, data, gap), ``heartbeat``, and last perhaps ``error``."""

    type: Literal["output", "heartbeat", "error"]
    offset: int = 0
    data: str = Field(default="", description="base64")
    gap: int = Field(default=0, description="Bytes lost just before ``offset``: they are not kept any more.")
    error: ErrorInfo | None = None

    @property
    def payload(self) -> bytes:
        return base64.b64decode(self.data)
