"""What the workspace service takes and returns. Frozen values; the API renders them, tests build them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Literal, Protocol

from perdure.core.errors import PerdureError
from perdure.core.ids import DEFAULT_TENANT, ExecId, RequestId, SnapshotId, TenantId, WorkspaceId
from perdure.core.paging import WHOLE, Page
from perdure.wire.node import Confinement, Damage, Fetching, Guest, HookRun, MachineSize, MemoryFate, Reading, StoredSizes, Trial
from perdure.workspaces.hibernation import Reason


@dataclass(frozen=True, slots=True)
class Context:
    """Who calls, for which tenant, in which request. Passed to every service call."""

    principal: str
    request_id: RequestId
    tenant_id: TenantId = DEFAULT_TENANT


class WorkspaceState(StrEnum):
    """See ``lifecycle`` for the transition table."""

    CREATING = "creating"
    RUNNING = "running"
    HIBERNATING = "hibernating"
    HIBERNATED = "hibernated"
    WAKING = "waking"
    FAILED = "failed"
    DELETED = "deleted"


class WorkspaceKind(StrEnum):
    WORKSPACE = "workspace"
    BRANCH = "branch"  # made by fork, or what a rewind or a promotion has kept
    LOST = "lost"  # disk-only remains of a lost VM, NAME@lost-TIME, expires


class AsleepAction(StrEnum):
    """What becomes of a workspace that has been asleep for so many days; see ``longsleep``."""

    KEEP = "keep"
    ARCHIVE = "archive"  # only the object store has it from then on; its next wake fetches it
    DELETE = "delete"  # announced in its thread a day before


@dataclass(frozen=True, slots=True)
class CreateWorkspace:
    """None means the image's default (size, disk) or the server's setting (idle and checkpoint times)."""

    name: str
    image: str = "base"
    memory_mib: int | None = None
    vcpus: int | None = None
    disk_gib: int | None = None
    idle_timeout_s: float | None = None  # 0: never
    checkpoint_interval_s: float | None = None  # 0: off
    keep_snapshots: int | None = None  # see ``Workspace``
    asleep_after_days: float | None = None
    asleep_action: AsleepAction = AsleepAction.KEEP
    egress_allow: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    request_key: str | None = None


@dataclass(frozen=True, slots=True)
class Configuration:
    """What may be changed of a workspace at any time; None leaves it as it is."""

    keep_snapshots: int | Literal["default"] | None = None
    idle_timeout_s: float | None = None
    checkpoint_interval_s: float | None = None
    asleep_after_days: float | None = None
    asleep_action: AsleepAction | None = None

    def given(self) -> dict[str, Any]:
        """Every field by its name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Idleness:
    """Of an awake workspace: for how long nobody has used it, what keeps it awake, and in how many seconds it falls asleep if
    nothing happens (None: nobody knows)."""

    unused_s: float
    reasons: tuple[Reason, ...]
    sleeps_in_s: float | None


@dataclass(frozen=True, slots=True)
class Workspace:
    """One row of ``workspaces``."""

    id: WorkspaceId
    tenant_id: TenantId
    name: str
    kind: WorkspaceKind
    state: WorkspaceState
    state_detail: str  # why, in a sentence, when failed or after a loss
    generation: int
    image: str  # digest
    image_name: str
    size: MachineSize
    disk_gib: int
    head_snapshot_id: SnapshotId | None
    parent_id: WorkspaceId | None
    forked_from: SnapshotId | None
    hostname: str
    machine_id: str
    idle_timeout_s: float
    checkpoint_interval_s: float
    egress_allow: tuple[str, ...]
    environment: Mapping[str, str]
    metadata: Mapping[str, str]
    confinement: Confinement | None  # as of the last start
    keep_awake_until: datetime | None
    created_at: datetime
    state_changed_at: datetime
    last_active_at: datetime
    expires_at: datetime | None
    #: Of the snapshots that nobody asked for, how many of the newest are kept, asleep too. None: the server's setting while it is
    #: awake, and only the head while it sleeps.
    keep_snapshots: int | None = None
    fetching: Fetching | None = None  # while its wake waits for the object store
    wake_at: datetime | None = None  # when it wakes by itself, once
    asleep_after_days: float | None = None
    asleep_action: AsleepAction = AsleepAction.KEEP
    asleep_noted: int | None = None  # the generation in whose sleep it was archived, or its deletion announced,
    asleep_noted_at: datetime | None = None  # and when
    idleness: Idleness | None = None  # of one that this process has awake


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which workspaces, of those that are not deleted: in any of the states (none: all), with all of the metadata, of an image
    (by name or digest), with a name that begins so."""

    states: tuple[WorkspaceState, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    name_prefix: str | None = None


ANY = Wanted()


class SnapshotReason(StrEnum):
    REQUESTED = "requested"
    AUTOMATIC = "automatic"
    HIBERNATE = "hibernate"
    FORK = "fork"
    SALVAGED = "salvaged"  # disk-only


class UploadState(StrEnum):
    WAITING = "waiting"
    UPLOADING = "uploading"
    FAILED = "failed"  # it is tried again


@dataclass(frozen=True, slots=True)
class Upload:
    """How far a snapshot is on its way to the object store: ``read_bytes`` of about ``total_bytes`` (of more with an image that
    is not there yet) were looked at, ``sent_bytes`` were missing. After a failure: what it was, and when it is tried again."""

    state: UploadState
    read_bytes: int = 0
    sent_bytes: int = 0
    total_bytes: int = 0
    error: str = ""
    retry_s: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One row of ``snapshots``; sizes in bytes, ``pause_s`` in seconds. ``upload`` is None for one that the store has, and where
    there is no store."""

    id: SnapshotId
    workspace_id: WorkspaceId
    parent_id: SnapshotId | None
    name: str | None
    reason: SnapshotReason
    generation: int
    has_memory: bool
    quiesced: bool
    memory_bytes: int
    memory_total_bytes: int
    disk_bytes: int
    disk_total_bytes: int
    pause_s: float
    created_at: datetime
    disk_gib: int | None = None  # the disk's size in it
    stored_at: datetime | None = None  # since when it is durable(store)
    upload: Upload | None = None


class Kept(StrEnum):
    """Why a snapshot stays; ``retention`` says what each means."""

    HEAD = "head"
    REFERENCED = "referenced"
    NAMED = "named"
    REQUESTED = "requested"
    ORIGIN = "origin"
    RECENT = "recent"


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """A snapshot in its tree. Its ``parent_id`` here is the closest ancestor that is still there."""

    snapshot: Snapshot
    is_head: bool
    kept: tuple[Kept, ...]  # empty: it is about to go
    branches: tuple[str, ...]  # names of other workspaces that were forked from it or wake from it
    references: tuple[str, ...]  # what else needs it, as in "execution exe_01k…"
    sizes: StoredSizes | None  # None when the node does not have it, or cannot be asked


class DiskFate(StrEnum):
    NEW = "new"
    KEPT = "kept"
    REWOUND = "rewound"  # to the last snapshot; what was newer is in ``lost_branch``


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """DESIGN D8: what a wake kept and what it did not. Never None after a wake."""

    workspace_id: WorkspaceId
    generation: int
    snapshot_id: SnapshotId | None
    memory: MemoryFate
    memory_reason: str
    disk: DiskFate
    asleep_s: float
    clock_step_s: float
    connections_dropped: int
    execs_running: tuple[ExecId, ...]
    execs_lost: tuple[ExecId, ...]
    lost_branch: str | None
    confinement: Confinement
    pooled: bool
    timings_ms: Mapping[str, float]
    at: datetime
    problems: tuple[str, ...] = ()  # what the guest could not repair (its clock, randomness, identity, disk), a sentence each
    hooks: tuple[HookRun, ...] = ()  # the workspace's own programs that the wake ran before all others went on
    kept_branch: str | None = None  # after a rewind or a promotion: the branch that holds what the workspace was before
    restored_from: Literal["node", "store"] = "node"  # store: its files were not on this node and had to be fetched
    fetched_bytes: int = 0
    wake_at: datetime | None = None  # the time it was to wake at by itself, if that had come,
    late_s: float = 0.0  # and how long before the wake began


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A workspace in the tree of what was forked from what; sizes in bytes. ``depth`` is 0 for the root."""

    workspace: Workspace
    depth: int
    forked_name: str | None  # of the snapshot it was forked from, while that has a name
    forked_at: datetime | None  # when that snapshot was taken; None when it is gone
    own_bytes: int  # what its own snapshots added
    total_bytes: int  # what its head refers to besides the image, shared content included


@dataclass(frozen=True, slots=True)
class Verifying:
    """Progress of a verification: these bytes of this file were read since the last one. ``done`` of ``count`` snapshots."""

    workspace: Workspace
    snapshot: Snapshot
    file: str
    read_bytes: int
    done: int
    count: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verification found of one snapshot. ``ancestor``: of a damaged one, the newest intact one before it. ``read_from``:
    the store when the node does not have it."""

    workspace: Workspace
    snapshot: Snapshot
    damage: tuple[Damage, ...]
    trial: Trial | None
    ancestor: SnapshotId | None
    disk_intact: bool
    read_from: Literal["node", "store"] = "node"

    @property
    def intact(self) -> bool:
        return not self.damage and (self.trial is None or not self.trial.problem)


@dataclass(frozen=True, slots=True)
class Metered:
    """What the meters of an awake workspace say now."""

    workspace: Workspace
    reading: Reading


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry of a workspace's thread; ``hash`` chains over the previous one."""

    seq: int
    at: datetime
    kind: str
    generation: int
    body: Mapping[str, Any]
    hash: str


class Recovery(StrEnum):
    """Exits from ``failed``."""

    RETRY = "retry"  # wake from the head snapshot again
    REWIND = "rewind"  # wake from the snapshot before the head
    DISK_BOOT = "disk-boot"  # boot the head's disk without its memory
    DAMAGED_DISK = "damaged-disk"  # the same, though what is on it may be wrong: the last way to files


@dataclass(frozen=True, slots=True)
class Awake:
    """A workspace held awake: while the context is open it counts as active."""

    workspace: Workspace
    guest: Guest
    report: ResumeReport | None  # of the wake that this call caused, None when it was awake already


@dataclass(frozen=True, slots=True)
class ShreddedTenant:
    """A tenant whose key is gone. ``deleted``: names of the workspaces that this call has deleted with it; ``left``: of those
    that are on other nodes, which delete them when they run."""

    tenant_id: TenantId
    asked_at: datetime
    deleted: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Workspaces(Protocol):
    """The commands that API, MCP and CLI share. ``ref`` is an id or a name; another tenant's is NotFound."""

    async def create(self, ctx: Context, spec: CreateWorkspace) -> tuple[Workspace, ResumeReport]:
        """Returns when the workspace is awake. A name in use raises AlreadyExists and makes nothing; by the request that has made
        it, known by its key, it is returned, awake."""
        ...

    async def get(self, ctx: Context, ref: str) -> Workspace: ...

    async def find(self, ctx: Context, wanted: Wanted = ANY, page: Page = WHOLE) -> list[Workspace]:
        """Newest last; deleted ones are absent. ``page.sought`` of them where there are so many."""
        ...

    async def meters(self, ctx: Context) -> list[Metered]:
        """Of those of its tenant that this process has awake, by name. Costs nothing worth mentioning."""
        ...

    async def wake(self, ctx: Context, ref: str, *, deadline_s: float | None = None) -> tuple[Workspace, ResumeReport]:
        """Single flight: many callers cause one wake and all get its report; an awake one returns its last report."""
        ...

    async def sleep(self, ctx: Context, ref: str) -> tuple[Workspace, Snapshot]:
        """Hibernate now. One that sleeps already returns its head."""
        ...

    async def checkpoint(self, ctx: Context, ref: str, *, name: str | None = None) -> Snapshot: ...

    async def fork(
        self, ctx: Context, ref: str, count: int, *, snapshot: str | None = None, names: tuple[str, ...] = ()
    ) -> list[Workspace | PerdureError]:
        """``count`` awake children of one checkpoint taken now (or of ``snapshot``); one that fails does not fail the others."""
        ...

    async def rewind(self, ctx: Context, ref: str, snapshot: str) -> tuple[Workspace, ResumeReport]:
        """Go on from an earlier snapshot (id or name), at a new generation. What the workspace was until now, memory and disk, is
        kept as a sleeping branch that the report names."""
        ...

    async def promote(self, ctx: Context, ref: str) -> tuple[Workspace, ResumeReport]:
        """The state of a branch becomes its parent's, at a new generation of the parent, which is returned awake. The branch
        ends, and its snapshots and its own branches are the parent's. What the parent was is a branch that the report names."""
        ...

    async def discard(self, ctx: Context, ref: str) -> None:
        """Free a branch. What is not a branch raises Conflict; discarding a discarded one succeeds."""
        ...

    async def tree(self, ctx: Context, ref: str) -> list[TreeNode]:
        """The whole tree that a workspace belongs to, parents before their branches, siblings oldest first. Deleted ones are in
        it while something that is not hangs on them."""
        ...

    async def resize(self, ctx: Context, ref: str, disk_gib: int) -> Workspace: ...

    async def recover(self, ctx: Context, ref: str, how: Recovery) -> tuple[Workspace, ResumeReport]: ...

    async def keep_awake(self, ctx: Context, ref: str, seconds: float) -> Workspace: ...

    def running_execs(self, tenant_id: TenantId) -> int:
        """Commands that run in awake workspaces of a tenant, on this server, those included that are being started."""
        ...

    async def wake_at(self, ctx: Context, ref: str, when: datetime | timedelta | None) -> Workspace:
        """Let it wake by itself, once: at a time, so much later than now on the server's clock, or (None) not any more."""
        ...

    async def delete(self, ctx: Context, ref: str) -> None:
        """Frees everything; deleting a deleted one succeeds."""
        ...

    async def shred_tenant(self, ctx: Context, tenant_id: TenantId, *, with_workspaces: bool = False) -> ShreddedTenant:
        """Throw away the key of a tenant: what it has in the object store can never be read again. Repeating it is fine.

        Raises NotFound for a tenant that nobody knows; Conflict where nothing is sealed, and while it has workspaces, unless they
        are to be deleted with it.
        """
        ...

    async def snapshots(self, ctx: Context, ref: str) -> list[Snapshot]: ...

    async def lineage(self, ctx: Context, ref: str, page: Page = WHOLE) -> list[SnapshotPlace]:
        """Its snapshots, oldest first, each with its place in the tree, what keeps it and what it weighs; ``page.sought`` of them
        where there are so many."""
        ...

    async def configure(self, ctx: Context, ref: str, change: Configuration) -> Workspace:
        """Change how much it keeps and its timers. What retention keeps no longer is on its way out when this returns."""
        ...

    async def name_snapshot(self, ctx: Context, ref: str, snapshot: str, name: str | None) -> Snapshot:
        """Give a snapshot (by id or name) a name: it is kept for as long as it has one. None takes it away."""
        ...

    async def push_snapshot(self, ctx: Context, ref: str, snapshot: str | None, *, deadline_s: float | None = None) -> Snapshot:
        """Returns when the object store has a snapshot (by id or name; None: the one that it wakes from). Raises Conflict where
        there is no store, DeadlineExceeded (the upload goes on), or why it failed (it is tried again)."""
        ...

    async def remove_snapshot(self, ctx: Context, ref: str, snapshot: str) -> Snapshot:
        """Remove a snapshot. Conflict with the reason when a workspace wakes from it or was forked from it, or it is needed."""
        ...

    def verify(
        self, ctx: Context, ref: str | None, *, snapshot: str | None = None, trial: bool = False
    ) -> AsyncGenerator[Verifying | Verified, None]:
        """Check every stored byte of a workspace's snapshots, of one of them, or (``ref`` None) of all workspaces; with ``trial``
        also start each in a throwaway machine. Wakes nothing. Closing the iterator ends it."""
        ...

    async def report(self, ctx: Context, ref: str) -> ResumeReport | None:
        """The report of the last wake."""
        ...

    async def log(self, ctx: Context, ref: str, *, after_seq: int = 0, limit: int = 1000) -> list[JournalEntry]: ...

    def awake(self, ctx: Context, ref: str, *, deadline_s: float | None = None) -> AbstractAsyncContextManager[Awake]:
        """Find the workspace awake or wake it (D10), and keep it from idling while held."""
        ...
