"""Commands and their streams."""

from __future__ import annotations

import base64
import struct
from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from perdure.wire.node import ExecEnd
from perdure.wire.public.common import Answer, Body, EnvName, ErrorInfo, LimitSeconds, Seconds, Text

#: How output travels in a WebSocket's binary messages: stream (1 stdout, 2 stderr), offset of the first byte, then the bytes.
_OUTPUT = struct.Struct(">BQ")
_STREAMS: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")


def pack_output(stream: Literal["stdout", "stderr"], offset: int, data: bytes) -> bytes:
    return _OUTPUT.pack(1 + _STREAMS.index(stream), offset) + data


def unpack_output(message: bytes) -> tuple[Literal["stdout", "stderr"], int, bytes]:
    """Raises ValueError for what is no output."""
    if len(message) < _OUTPUT.size or not 1 <= message[0] <= len(_STREAMS):
        raise ValueError("not a message with output")
    number, offset = _OUTPUT.unpack_from(message)
    return _STREAMS[number - 1], offset, message[_OUTPUT.size :]


Lines = Annotated[int, Field(ge=1, le=4096)]


class PtySize(Body):
    """Of a terminal, in characters."""

    rows: Lines = 24
    cols: Lines = 80


_Word = Annotated[str, Field(max_length=1 << 17)]


class StartExec(Body):
    """A command. ``wait_s`` is how long the call waits (the command goes on afterwards); the limits end the command.

    ``exec_id`` is chosen by the client (``exe_…``): a start repeated with the same id attaches to the command instead of
    running it again, so that a lost connection never runs anything twice. With ``pty`` it runs on a terminal of that size: what
    it writes is all stdout, it always has stdin, and without a command it is the user's login shell.
    """

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["argv"]}, {"required": ["shell"]}, {"required": ["pty"]}]}
    )

    exec_id: Annotated[str, Field(pattern=r"^exe_[0-9a-z]{8,40}$")] | None = None
    argv: Annotated[list[_Word], Field(min_length=1, max_length=10000)] | None = None
    shell: Annotated[str, Field(max_length=1 << 20)] | None = None
    env: dict[EnvName, _Word] = Field(default_factory=dict, max_length=1000)
    cwd: Text | None = None
    user: Text | None = None
    stdin: bool = False
    background: bool = False
    wait_s: Seconds | None = None
    run_limit_s: LimitSeconds | None = None
    idle_limit_s: LimitSeconds | None = None
    kill_grace_s: Annotated[float, Field(ge=0, le=3600)] = 2.0
    pty: PtySize | None = None

    @model_validator(mode="after")
    def _one_command(self) -> StartExec:
        if (self.argv is None) == (self.shell is None) and (self.argv is not None or self.pty is None):
            raise ValueError("give exactly one of 'argv' and 'shell'")
        if self.argv is not None and not self.argv[0]:
            raise ValueError("the command's first word is empty")
        if any("\0" in word for word in [*(self.argv or [self.shell or ""]), *self.env, *self.env.values()]):
            raise ValueError("a command and its environment cannot contain NUL")
        if any(not name or "=" in name for name in self.env):
            raise ValueError("an environment variable's name is not empty and has no '='")
        return self


class ExecOutcome(Answer):
    """How a command ended. ``exit_code``: 128+n for signals, 126/127 when not started, None when the outcome is unknown."""

    exec_id: str
    end: ExecEnd
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    run_s: float = 0.0


class PtyInfo(Answer):
    """The size of a terminal, in characters."""

    rows: int
    cols: int


class ExecInfo(Answer):
    exec_id: str
    pid: int
    command: str
    started_at: datetime
    outcome: ExecOutcome | None
    stdout_bytes: int
    stderr_bytes: int
    generation: int
    pty: PtyInfo | None = Field(default=None, description="Of a command on a terminal.")


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


class ExecInput(Body):
    """A text message to a WebSocket of a command; binary messages are its stdin. ``eof`` ends stdin, after what was sent."""

    type: Literal["eof", "resize", "signal", "kill"]
    rows: Lines | None = None
    cols: Lines | None = None
    signal: Annotated[int, Field(ge=1, le=64)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> ExecInput:
        if (self.type == "resize") != (self.rows is not None and self.cols is not None):
            raise ValueError("'resize' has rows and cols, and nothing else has them")
        if (self.type == "signal") != (self.signal is not None):
            raise ValueError("'signal' has a signal, and nothing else has one")
        return self


class StdinWritten(Answer):
    bytes: int
    eof: bool
