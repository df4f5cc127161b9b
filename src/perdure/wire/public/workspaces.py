"""Workspaces, their snapshots, and what a wake kept."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from perdure.wire.node import Isolation, MemoryFate
from perdure.wire.public.common import NO_ZERO, Answer, Body, ErrorInfo, Name, Paged, Seconds, SnapshotName, Text
from perdure.wire.public.idle import AsleepAction, Days, IdleInfo


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


#: Of the snapshots that nobody asked for, how many of the newest stay.
KeepSnapshots = Annotated[int, Field(ge=0, le=1000)]


#: Bounds in the description are those of the service, which says the rule where one is crossed; what is checked here is wider.
Timer = Annotated[float, Field(ge=0, le=10 * 365 * 86400, json_schema_extra={"maximum": 366 * 86400})]
_NEVER_OR_MORE: dict[str, JsonValue] = {"maximum": 366 * 86400, "anyOf": [{"const": 0}, {"minimum": 5}]}
IdleTimer = Annotated[float, Field(ge=0, le=10 * 365 * 86400, json_schema_extra=_NEVER_OR_MORE)]
_ShortText = Annotated[str, Field(max_length=1 << 17, json_schema_extra={"maxLength": 4096, **NO_ZERO})]
#: Something that no other request of the tenant has.
RequestKey = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{8,64}$")]


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


class FetchInfo(Answer):
    """How much has come from the object store, of at most so much."""

    read_bytes: int
    total_bytes: int


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
    keep_snapshots: int | None = None  # None: the server's setting while it is awake, and only the head while it sleeps
    fetching: FetchInfo | None = None  # while its wake waits for the object store
    idle: IdleInfo | None = None  # while it is awake
    wake_at: datetime | None = None  # when it wakes by itself, once
    asleep_after_days: float | None = None
    asleep_action: AsleepAction = "keep"  # what becomes of it when it has been asleep for so long
    archived_at: datetime | None = None  # since when only the object store has it
    deletes_at: datetime | None = None  # when its policy deletes it, at the earliest, if nobody uses it until then


class WorkspaceList(Paged):
    workspaces: list[WorkspaceInfo]


class CreateWorkspace(Body):
    """None means the image's default (size, disk) or the server's setting (idle and checkpoint times; 0 turns them off).

    A caller who does not know whether its request was done repeats it with the same ``request_key``: what that has made is the
    answer then."""

    name: Name
    image: Text = "base"
    memory_mib: Annotated[int, Field(ge=16, le=1 << 20, json_schema_extra={"minimum": 128})] | None = None
    vcpus: Annotated[int, Field(ge=1, le=256, json_schema_extra={"maximum": 64})] | None = None
    disk_gib: Annotated[int, Field(ge=1, le=65536, json_schema_extra={"maximum": 2048})] | None = None
    idle_timeout_s: IdleTimer | None = None
    checkpoint_interval_s: Timer | None = None
    keep_snapshots: KeepSnapshots | None = None
    asleep_after_days: Days | None = None
    asleep_action: AsleepAction = "keep"
    egress_allow: list[Text] = Field(default_factory=list, max_length=1000)
    environment: dict[Text, _ShortText] = Field(default_factory=dict, max_length=1000, json_schema_extra={"maxProperties": 100})
    metadata: dict[Text, Text] = Field(default_factory=dict, max_length=100)
    request_key: RequestKey | None = Field(
        default=None, description="Of the caller's choice: the same request makes nothing again while the workspace is there."
    )


class HookInfo(Answer):
    """A program in the workspace's /etc/perdure/on-wake.d that a wake ran, or did not, before all others went on."""

    name: str
    outcome: Literal["ok", "failed", "timeout", "not-started", "refused", "skipped"]
    exit_code: int | None  # 128+n for signals; None when it did not end by itself
    seconds: float
    output: str  # the end of what it wrote, or a sentence that says why it did not run; "" in the header of an answer


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
    kept_branch: str | None = None  # after a rewind or a promotion: the branch that holds what the workspace was before
    restored_from: Literal["node", "store"] = "node"  # store: its files had to be fetched from the object store
    fetched_bytes: int = 0
    wake_at: datetime | None = None  # the time it was to wake at by itself, if that had come,
    late_s: float = 0.0  # and how many seconds before the wake began
    hooks: list[HookInfo] = Field(default_factory=list)


class UploadState(StrEnum):
    WAITING = "waiting"
    UPLOADING = "uploading"
    FAILED = "failed"  # it is tried again


class UploadInfo(Answer):
    """How far a snapshot is on its way to the object store: ``read_bytes`` of about ``total_bytes`` were looked at,
    ``sent_bytes`` were missing. After a failure: what it was, and in how many seconds it is tried again."""

    state: UploadState
    read_bytes: int
    sent_bytes: int
    total_bytes: int
    error: str
    retry_s: float | None = None


class SnapshotInfo(Answer):
    """``durable``: local as soon as it exists, store when the object store has it and any node can wake it. ``upload`` is None
    for those, and on a server without an object store."""

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
    durable: Literal["local", "store"] = "local"
    upload: UploadInfo | None = None


class AwakeAnswer(Answer):
    """After create, wake, recover, rewind and promote."""

    workspace: WorkspaceInfo
    report: ResumeReport


class CreatedAnswer(AwakeAnswer):
    """``warnings``: what was asked for and will not work as things are, a sentence each."""

    warnings: list[str] = Field(default_factory=list)


class AsleepAnswer(Answer):
    workspace: WorkspaceInfo
    snapshot: SnapshotInfo


class ReportAnswer(Answer):
    """``report`` is None for a workspace that never woke."""

    report: ResumeReport | None


class WakeWorkspace(Body):
    deadline_s: Seconds | None = None


class CheckpointWorkspace(Body):
    name: SnapshotName | None = None


class ForkWorkspace(Body):
    count: Annotated[int, Field(ge=1, le=1000, json_schema_extra={"maximum": 64})] = 1
    snapshot: Text | None = None
    names: list[Name] = Field(default_factory=list, max_length=1000)

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


class PushSnapshot(Body):
    """How long to wait; the upload goes on after that."""

    deadline_s: Seconds | None = None


class RewindWorkspace(Body):
    snapshot: Text


class TreeNode(Answer):
    """One workspace of a tree; ``depth`` is 0 for its root. Sizes in bytes: what its own snapshots added, and what its head
    refers to besides the image, shared content included."""

    workspace: WorkspaceInfo
    depth: int
    forked_name: str | None
    forked_at: datetime | None
    own_bytes: int
    total_bytes: int


class WorkspaceTree(Answer):
    """Parents before their branches, siblings oldest first. A deleted one is shown while something that lives hangs on it."""

    nodes: list[TreeNode]


class ResizeWorkspace(Body):
    disk_gib: Annotated[int, Field(ge=1, le=65536, json_schema_extra={"maximum": 2048})]


class RecoverWorkspace(Body):
    how: Literal["retry", "rewind", "disk-boot", "damaged-disk"]


class KeepAwake(Body):
    seconds: Annotated[float, Field(ge=0, le=10 * 365 * 86400, json_schema_extra={"maximum": 30 * 86400})]


class HandleAnswer(Answer):
    """Inside a workspace: what it may hold in place of a secret. Worth nothing in another workspace or generation."""

    handle: str


class CheckHandle(Body):
    handle: Text


class LogEntry(Answer):
    """One entry of the thread; ``hash`` chains over the previous one."""

    seq: int
    at: datetime
    kind: str
    generation: int
    body: dict[str, Any]
    hash: str


class Log(Paged):
    entries: list[LogEntry]
