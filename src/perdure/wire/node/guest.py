"""What may be asked of an awake workspace: commands, files, streams. Frozen values and protocols; no I/O."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal, Protocol

from perdure.core.ids import ExecId
from perdure.wire.node.files import FileOperations
from perdure.wire.node.programs import LogChunk, LogRequest, ProgramAct, ProgramPing, ProgramSpec, ProgramStatus


class ByteStream(Protocol):
    """One flow-controlled, bidirectional stream. Either side may half-close."""

    async def read(self, limit: int = 65536) -> bytes:
        """Up to ``limit`` bytes; ``b""`` at end of stream. Raises MachineFailed when the peer reset it."""
        ...

    async def write(self, data: bytes) -> None:
        """Queue bytes, waiting for the peer's window."""
        ...

    async def close_write(self) -> None: ...

    async def close(self) -> None:
        """Close both directions; safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class PtySize:
    """Of a pseudo-terminal, in characters."""

    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class ExecSpec:
    """A command. Exactly one of ``argv`` and ``shell`` is set; with ``pty`` neither may be, for the user's login shell.
    Limits are seconds; None means none."""

    exec_id: ExecId
    argv: tuple[str, ...] | None = None
    shell: str | None = None  # run by /bin/sh -c (bash where present)
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None  # name or uid[:gid] in the workspace; default root
    stdin: bool = False  # False: /dev/null
    run_limit_s: float | None = None
    idle_limit_s: float | None = None  # no output for this long
    kill_grace_s: float = 2.0  # SIGTERM to SIGKILL
    pty: PtySize | None = None  # it runs on a pseudo-terminal: what it writes is all stdout, and it always has stdin


@dataclass(frozen=True, slots=True)
class ExecStarted:
    exec_id: ExecId
    pid: int  # as the workspace's processes see it


@dataclass(frozen=True, slots=True)
class ExecOutput:
    stream: Literal["stdout", "stderr"]
    offset: int  # bytes of this stream before ``data``
    data: bytes
    gap: int = 0  # bytes lost just before ``offset`` because nobody read in time


class ExecEnd(StrEnum):
    EXITED = "exited"
    SIGNALED = "signaled"
    RUN_LIMIT = "run-limit"
    IDLE_LIMIT = "idle-limit"
    KILLED = "killed"  # on request
    OOM = "oom"
    NOT_STARTED = "not-started"  # no such command, user or directory; ``detail`` says which
    LOST = "lost"  # the agent lost it (reboot, agent death); the outcome is unknown


@dataclass(frozen=True, slots=True)
class ExecExited:
    exec_id: ExecId
    end: ExecEnd
    exit_code: int | None  # 128+n for signals, 126/127 as a shell would for not-started; None when lost
    signal: int | None
    detail: str = ""
    run_s: float = 0.0


ExecEvent = ExecStarted | ExecOutput | ExecExited


class ExecHandle(Protocol):
    """One attachment to a command. Closing it detaches; the command goes on."""

    exec_id: ExecId

    def events(self) -> AsyncIterator[ExecEvent]:
        """ExecStarted, then output in order per stream, then exactly one ExecExited."""
        ...

    async def write_stdin(self, data: bytes) -> None: ...

    async def close_stdin(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExecInfo:
    exec_id: ExecId
    pid: int
    command: str
    started_at: datetime
    exited: ExecExited | None
    stdout_bytes: int
    stderr_bytes: int
    pty: PtySize | None = None


class Guest(FileOperations, Protocol):
    """An awake workspace at one generation. Paths are absolute in the workspace's own root."""

    async def start_exec(self, spec: ExecSpec) -> ExecHandle: ...

    async def attach_exec(self, exec_id: ExecId, stdout_offset: int = 0, stderr_offset: int = 0) -> ExecHandle: ...

    async def signal_exec(self, exec_id: ExecId, signal: int) -> None:
        """To its process group; on a terminal to what runs in the foreground."""
        ...

    async def resize_exec(self, exec_id: ExecId, size: PtySize) -> None:
        """Tell its terminal a new size; the same one again has programs draw anew. Raises Conflict when it has no terminal."""
        ...

    async def kill_exec(self, exec_id: ExecId) -> None:
        """SIGTERM, then SIGKILL to everything in the command's cgroup."""
        ...

    async def list_execs(self) -> tuple[ExecInfo, ...]: ...

    async def open_tcp(self, port: int) -> ByteStream:
        """A stream to 127.0.0.1:port inside; raises NotFound when nothing listens there."""
        ...

    async def program(self) -> ProgramStatus:
        """What its program does."""
        ...

    async def set_program(self, spec: ProgramSpec | None) -> ProgramStatus:
        """Name its program and start it anew, or with None end it and forget it."""
        ...

    async def act_on_program(self, act: ProgramAct) -> ProgramStatus:
        """Answers when that is done, or under way for ten seconds. Raises NotFound where no program is named."""
        ...

    def program_log(self, request: LogRequest) -> AsyncIterator[LogChunk]: ...

    async def ping_program(self, deadline_s: float) -> ProgramPing | None:
        """What its program answers to ``GET /ping``; None when it answers nothing of the kind in time. Does not count as use of
        the workspace, so that whoever asks whether it is idle does not keep it from being so."""
        ...

    async def ping(self) -> float:
        """Round trip over the control channel in seconds."""
        ...
