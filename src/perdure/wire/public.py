"""The public HTTP API's bodies: what ``/v1`` takes and answers, and the source of ``docs/openapi.json``.

Bytes travel as base64 with the offset at which they stand in their stream; whoever shows them decodes them. Times are aware
UTC, sizes and durations have their unit in the name. Requests refuse fields they do not know; answers may grow fields, so clients
ignore unknown ones. Streams are NDJSON: one event per line, with ``heartbeat`` lines in between so that a dead peer is noticed.
"""

from __future__ import annotations

import base64
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perdure.wire.node import ExecEnd, FileKind, Isolation, MemoryFate

#: Seconds between heartbeat lines of a stream. A client may call a stream dead after a few of them are missing.
HEARTBEAT_S = 10.0
#: Answers that touched an awake workspace say in these headers what it ran on, and what a wake caused by the call kept (JSON).
GENERATION_HEADER = "perdure-generation"
ISOLATION_HEADER = "perdure-isolation"
RESUME_HEADER = "perdure-resume-report"
REQUEST_ID_HEADER = "perdure-request-id"

Seconds = Annotated[float, Field(ge=0, le=10 * 365 * 86400)]
Text = Annotated[str, Field(max_length=4096)]
Base64 = Annotated[str, Field(pattern="^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")]


class Answer(BaseModel):
    """Base of everything the server sends."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Body(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ------------------------------------------------------------------------------------------------------------------ errors


class ErrorInfo(Answer):
    """``retryable``: nothing was done; ``ambiguous``: it may have been; ``gone``: the thing will not come back."""

    code: str
    message: str
    hint: str = ""
    retryable: bool = False
    ambiguous: bool = False
    gone: bool = False


class ErrorAnswer(Answer):
    error: ErrorInfo


# ------------------------------------------------------------------------------------------------------------------ server


class Health(Answer):
    status: Literal["ok"] = "ok"
    version: str
    pid: int


class CheckStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class DoctorCheck(Answer):
    """One thing looked at: what was found, and the command that mends it."""

    name: str
    status: CheckStatus
    detail: str
    hint: str = ""


class DoctorReport(Answer):
    ok: bool
    isolation: Isolation | None = None
    host: dict[str, str] = Field(default_factory=dict)
    checks: list[DoctorCheck] = Field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------------ images


class ImageInfo(Answer):
    name: str
    digest: str
    created_at: datetime
    memory_mib: int
    vcpus: int
    disk_gib: int
    kernel_version: str
    agent_protocol: int
    packages: int
    egress_allow: list[str] = Field(default_factory=list)
    stored_bytes: int | None = None
    ready: list[str] = Field(default_factory=list, description="Sizes that need no boot: 512x1 is 512 MiB and one CPU.")
    current: bool = Field(default=True, description="Whether a name points to it. Others are kept for workspaces made of them.")


class ImageList(Answer):
    images: list[ImageInfo]


class PrunedImages(Answer):
    """``kept``: no name points to these either, but workspaces need them. ``freed_bytes`` are those of the disk."""

    removed: list[ImageInfo]
    kept: list[ImageInfo]
    freed_bytes: int


class BuildImage(Body):
    """``recipe`` is the TOML text, ``shipped`` the name of a recipe that comes with the server; without both: ``base``.
    ``sources``: the files a recipe names as ``source``, by that name. ``if_missing``: keep an image that is current already."""

    recipe: Annotated[str, Field(max_length=1 << 20)] | None = None
    shipped: Text | None = None
    sources: dict[Text, Base64] = Field(default_factory=dict, max_length=1000)
    name: Text | None = None
    if_missing: bool = False

    @model_validator(mode="after")
    def _one_recipe(self) -> BuildImage:
        if self.recipe is not None and self.shipped is not None:
            raise ValueError("give one of 'recipe' and 'shipped'")
        return self

    @property
    def source_bytes(self) -> dict[str, bytes]:
        return {name: base64.b64decode(content) for name, content in self.sources.items()}


class BuildEvent(Answer):
    """One line of a build's stream. The last one is ``done`` with the image, or ``error``."""

    type: Literal["step", "log", "done", "error", "heartbeat"]
    step: str = ""
    detail: str = ""
    done: float | None = None
    total: float | None = None
    image: ImageInfo | None = None
    error: ErrorInfo | None = None


# -------------------------------------------------------------------------------------------------------------- workspaces


class WorkspaceState(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    HIBERNATING = "hibernating"
    HIBERNATED = "hibernated"
    WAKING = "waking"
    FAILED = "failed"
    DELETED = "deleted"


class WorkspaceKind(StrEnum):
    WORKSPACE = "workspace"
    BRANCH = "branch"
    LOST = "lost"


class ConfinementInfo(Answer):
    """Which protections around the VMM hold on this host; ``missing`` says why each absent one is absent."""

    isolation: Isolation
    jail: bool
    seccomp: bool
    own_user: bool
    memory_limit: bool
    cpu_limit: bool
    pids_limit: bool
    readonly_base: bool
    missing: dict[str, str] = Field(default_factory=dict)


class WorkspaceInfo(Answer):
    id: str
    name: str
    kind: WorkspaceKind
    state: WorkspaceState
    state_detail: str
    generation: int
    isolation: Isolation | None
    image: str
    image_name: str
    memory_mib: int
    vcpus: int
    disk_gib: int
    head_snapshot_id: str | None
    parent_id: str | None
    forked_from: str | None
    hostname: str
    idle_timeout_s: float
    checkpoint_interval_s: float
    egress_allow: list[str]
    environment: dict[str, str]
    metadata: dict[str, str]
    confinement: ConfinementInfo | None
    keep_awake_until: datetime | None
    created_at: datetime
    state_changed_at: datetime
    last_active_at: datetime
    expires_at: datetime | None


class WorkspaceList(Answer):
    workspaces: list[WorkspaceInfo]


class CreateWorkspace(Body):
    """None means the image's default (size, disk) or the server's setting (idle and checkpoint times; 0 turns them off)."""

    name: Text
    image: Text = "base"
    memory_mib: Annotated[int, Field(ge=16, le=1 << 20)] | None = None
    vcpus: Annotated[int, Field(ge=1, le=256)] | None = None
    disk_gib: Annotated[int, Field(ge=1, le=65536)] | None = None
    idle_timeout_s: Seconds | None = None
    checkpoint_interval_s: Seconds | None = None
    egress_allow: list[Text] = Field(default_factory=list, max_length=1000)
    environment: dict[Text, Annotated[str, Field(max_length=1 << 17)]] = Field(default_factory=dict, max_length=1000)
    metadata: dict[Text, Text] = Field(default_factory=dict, max_length=100)


class ResumeReport(Answer):
    """What a wake kept and what it did not (DESIGN D8)."""

    workspace_id: str
    generation: int
    snapshot_id: str | None
    memory: MemoryFate
    memory_reason: str
    disk: Literal["new", "kept", "rewound"]
    asleep_s: float
    clock_step_s: float
    connections_dropped: int
    execs_running: list[str]
    execs_lost: list[str]
    lost_branch: str | None
    isolation: Isolation
    confinement: ConfinementInfo
    pooled: bool
    timings_ms: dict[str, float]
    at: datetime
    problems: list[str] = Field(default_factory=list)  # what the guest could not repair, a sentence each


class SnapshotInfo(Answer):
    id: str
    workspace_id: str
    parent_id: str | None
    name: str | None
    reason: Literal["requested", "automatic", "hibernate", "fork", "salvaged"]
    generation: int
    has_memory: bool
    quiesced: bool
    memory_bytes: int
    memory_total_bytes: int
    disk_bytes: int
    disk_total_bytes: int
    pause_s: float
    created_at: datetime
    disk_gib: int | None = None


class SnapshotList(Answer):
    snapshots: list[SnapshotInfo]


class AwakeAnswer(Answer):
    """After create, wake and recover."""

    workspace: WorkspaceInfo
    report: ResumeReport


class AsleepAnswer(Answer):
    workspace: WorkspaceInfo
    snapshot: SnapshotInfo


class ReportAnswer(Answer):
    """``report`` is None for a workspace that never woke."""

    report: ResumeReport | None


class WakeWorkspace(Body):
    deadline_s: Seconds | None = None


class CheckpointWorkspace(Body):
    name: Text | None = None


class ForkWorkspace(Body):
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    snapshot: Text | None = None
    names: list[Text] = Field(default_factory=list, max_length=1000)

    @model_validator(mode="after")
    def _one_name_each(self) -> ForkWorkspace:
        if self.names and len(self.names) != self.count:
            raise ValueError(f"{self.count} forks need {self.count} names or none, not {len(self.names)}")
        return self


class ForkResult(Answer):
    """Exactly one of the two: a branch that failed does not fail the others."""

    workspace: WorkspaceInfo | None = None
    error: ErrorInfo | None = None


class ForkAnswer(Answer):
    results: list[ForkResult]


class ResizeWorkspace(Body):
    disk_gib: Annotated[int, Field(ge=1, le=65536)]


class RecoverWorkspace(Body):
    how: Literal["retry", "rewind", "disk-boot"]


class KeepAwake(Body):
    seconds: Seconds


class LogEntry(Answer):
    """One entry of the thread; ``hash`` chains over the previous one."""

    seq: int
    at: datetime
    kind: str
    generation: int
    body: dict[str, Any]
    hash: str


class Log(Answer):
    entries: list[LogEntry]


class Accepted(Answer):
    """The server will do it after this answer has left."""

    accepted: Literal[True] = True


# ------------------------------------------------------------------------------------------------------------------- execs


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


# ------------------------------------------------------------------------------------------------------------------- files


class FileInfo(Answer):
    """``name``, ``path``, ``target`` are for showing; a guest's names are bytes: ``raw_path`` has them if they are not UTF-8."""

    path: str
    name: str
    kind: FileKind
    size: int
    mode: int
    uid: int
    gid: int
    modified_at: datetime
    target: str | None = None
    raw_path: str | None = Field(default=None, description="base64 of the path's bytes when they are not UTF-8")

    @property
    def fs_path(self) -> str:
        """The exact path, bytes that are not UTF-8 as surrogate escapes (as ``os.fsdecode`` gives)."""
        return self.path if self.raw_path is None else base64.b64decode(self.raw_path).decode("utf-8", "surrogateescape")

    @property
    def fs_name(self) -> str:
        """The exact last component of ``fs_path``."""
        return self.name if self.raw_path is None else self.fs_path.rstrip("/").rpartition("/")[2]


class FileList(Answer):
    files: list[FileInfo]


class FileWritten(Answer):
    """What the workspace acknowledged; ``sha256`` is over the bytes the server received."""

    path: str
    length: int
    crc32: int
    sha256: str


class Done(Answer):
    ok: Literal[True] = True
