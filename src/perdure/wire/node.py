"""What the control plane and a node say to each other. Plain frozen values and two protocols; no I/O here.

``Node`` is everything a control plane may ask of a machine that runs workspaces; ``Guest`` is everything it may ask of an awake
workspace. The real ones live in ``perdure.node``, complete fakes in ``tests/fakes``; both pass the same contract suite.

Rules that hold for every call:

* A call names (workspace, generation). An older or unknown generation raises ``StaleGeneration`` and changes nothing.
* Calls are idempotent where they can be: stopping what is stopped and deleting what is gone succeed.
* A call that returns has made its result durable on the node (files fsynced, directories too).
* Errors are from ``perdure.core.errors``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, Protocol

from perdure.core.ids import DiskId, ExecId, NodeId, SnapshotId, TenantId, WorkspaceId

# ---------------------------------------------------------------------------------------------------------------- machines


class Isolation(StrEnum):
    """The isolation grade that every workspace and API answer states."""

    VM_HARDWARE = "vm-hardware"
    VM_EMULATED = "vm-emulated"


@dataclass(frozen=True, slots=True)
class Confinement:
    """Which protections around the VMM process hold on this host; ``missing`` says why each absent one is absent."""

    isolation: Isolation
    jail: bool
    seccomp: bool
    own_user: bool
    memory_limit: bool
    cpu_limit: bool
    pids_limit: bool
    readonly_base: bool
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MachineSize:
    memory_mib: int
    vcpus: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a machine is, decided by the host and told to the guest at every wake."""

    workspace_id: WorkspaceId
    tenant_id: TenantId
    generation: int
    hostname: str
    machine_id: str  # 32 hex digits, /etc/machine-id of the workspace


# ------------------------------------------------------------------------------------------------------------------ starts


@dataclass(frozen=True, slots=True)
class FromGolden:
    """A new workspace: the image's golden memory and disk. A size without a golden snapshot is booted and captured first."""


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """Memory, disk and devices of a snapshot. A fingerprint that does not match falls back to a disk boot and says so."""

    snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class FromDisk:
    """A cold boot from a snapshot's disk, or from the image's when ``snapshot_id`` is None. Memory is lost by design."""

    snapshot_id: SnapshotId | None
    reason: str  # e.g. "guest-reboot", "requested", "resize"


StartSource = FromGolden | FromSnapshot | FromDisk


class MemoryFate(StrEnum):
    NEW = "new"  # a new workspace
    KEPT = "kept"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a wake's report before it begins: told inside the workspace, where the node and the guest add their part.
    ``facts`` are values of the public report by name; the reasons are those that only the control plane knows."""

    facts: Mapping[str, Any]
    memory_lost: str = ""  # the source holds no memory of this workspace at all
    rewound: str = ""  # the memory is kept, and is an earlier one

    def memory(self, fate: MemoryFate, reason: str) -> tuple[MemoryFate, str]:
        """Fate and reason as a report has them, of what the node decided."""
        if self.memory_lost:
            return MemoryFate.LOST, self.memory_lost
        if fate is MemoryFate.KEPT and self.rewound:
            return fate, f"rewound: {self.rewound}"
        return fate, reason


@dataclass(frozen=True, slots=True)
class StartSpec:
    """One wake. ``take_over_generation``: boot from that generation's active overlay (supervised reboot)."""

    identity: Identity
    image: str  # image digest
    size: MachineSize
    disk_gib: int
    source: StartSource
    egress_allow: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    new_identity: bool = False  # a fork or a new workspace: machine-id, hostname, RNG and ssh host keys are made anew
    take_over_generation: int | None = None
    told: Told = field(default_factory=lambda: Told({}))


class HookOutcome(StrEnum):
    """How a program in the workspace's /etc/perdure/on-wake.d ended."""

    OK = "ok"
    FAILED = "failed"  # an exit code that is not 0
    TIMEOUT = "timeout"  # it reached its limit and was killed
    NOT_STARTED = "not-started"
    REFUSED = "refused"  # others than root can change it
    SKIPPED = "skipped"  # those before it had used up the time of all


@dataclass(frozen=True, slots=True)
class HookRun:
    """A hook that a wake ran, or did not, before the workspace's programs went on."""

    name: str
    outcome: HookOutcome
    exit_code: int | None  # 128+n for signals; None when it did not end by itself
    seconds: float
    output: str  # the end of what it wrote, or a sentence that says why it did not run


@dataclass(frozen=True, slots=True)
class StartReport:
    """What a start did: the node's half of a ResumeReport (DESIGN D8)."""

    memory: MemoryFate
    memory_reason: str  # "" when kept or new; "guest-reboot", "fingerprint: …", "no-memory-in-snapshot", …
    boot_id: str
    clock_step_s: float
    connections_dropped: int
    execs_running: tuple[ExecId, ...]
    execs_lost: tuple[ExecId, ...]
    confinement: Confinement
    pooled: bool
    timings_ms: Mapping[str, float]  # claim, disk, memory, devices, running, hello, repaired — since the call began
    problems: tuple[str, ...] = ()  # what the guest could not repair, a sentence each
    hooks: tuple[HookRun, ...] = ()


# -------------------------------------------------------------------------------------------------------------- snapshots


class CaptureMode(StrEnum):
    CHECKPOINT = "checkpoint"  # the VM pauses and goes on
    HIBERNATE = "hibernate"  # the VM is gone when the call returns


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    workspace_id: WorkspaceId
    generation: int
    snapshot_id: SnapshotId
    mode: CaptureMode


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """A complete, durable snapshot as its manifest states it."""

    snapshot_id: SnapshotId
    workspace_id: WorkspaceId
    tenant_id: TenantId
    generation: int
    parent_id: SnapshotId | None
    image: str
    size: MachineSize
    disk_gib: int
    created_at: datetime
    has_memory: bool
    quiesced: bool  # user processes were frozen; an unquiesced snapshot may wake its own workspace, never be forked
    pages: int  # pages that differ from the base
    memory_bytes: int  # bytes of page content this snapshot added to the log
    memory_total_bytes: int  # bytes of page content it refers to, shared ones included
    disk_bytes: int  # bytes of the layer this snapshot froze
    disk_total_bytes: int  # bytes of all layers above the image's
    device_bytes: int
    pause_s: float  # how long the user's processes stood still (freeze to thaw); 0 for a disk-only snapshot
    fingerprint: str


# -------------------------------------------------------------------------------------------------------------- integrity


@dataclass(frozen=True, slots=True)
class Damage:
    """A stored file that is missing or not as it was written. ``file`` is its name below the store (``segments/seg_….pages``), or
    below the image directory with ``images/`` before it; ``problem`` is a sentence."""

    file: str
    problem: str


class TrialKind(StrEnum):
    MEMORY = "memory"  # restored, as a wake would
    DISK = "disk"  # booted: the snapshot has no memory, or none that this host can wake


@dataclass(frozen=True, slots=True)
class Trial:
    """A snapshot was started in a throwaway machine, to the agent's answer. ``problem`` is empty when it came up."""

    kind: TrialKind
    reason: str  # why not with its memory: what a ResumeReport would say
    seconds: float
    problem: str


@dataclass(frozen=True, slots=True)
class Checking:
    """Progress of a verification: these bytes of this file of this snapshot were read since the last one."""

    snapshot_id: SnapshotId
    file: str
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found of one snapshot. ``missing``: the node has no such snapshot."""

    snapshot_id: SnapshotId
    damage: tuple[Damage, ...] = ()
    disk_intact: bool = True  # whether a disk boot of it reads nothing that is damaged
    trial: Trial | None = None
    missing: bool = False

    @property
    def intact(self) -> bool:
        return not self.missing and not self.damage and (self.trial is None or not self.trial.problem)


@dataclass(frozen=True, slots=True)
class StoredSizes:
    """What a snapshot weighs on its node, in bytes of disk, without the image's base. ``own_bytes`` become free when it is
    deleted; the rest it shares with other snapshots or a running machine."""

    total_bytes: int
    own_bytes: int

    @property
    def shared_bytes(self) -> int:
        return self.total_bytes - self.own_bytes


# ---------------------------------------------------------------------------------------------------------------- inventory


@dataclass(frozen=True, slots=True)
class LiveMachine:
    """A machine the node believes in: a start was recorded. ``alive`` is read from the process table, not from memory."""

    workspace_id: WorkspaceId
    generation: int
    alive: bool
    pid: int | None
    disk_id: DiskId | None  # active overlay; holds writes newer than the last snapshot


@dataclass(frozen=True, slots=True)
class Inventory:
    machines: tuple[LiveMachine, ...]
    snapshots: tuple[SnapshotFacts, ...]  # complete ones only
    debris: tuple[str, ...]  # half-made things found and removed


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Resource use of one awake machine. Seconds and bytes."""

    cpu_s: float
    rss_bytes: int
    pss_bytes: int
    private_bytes: int


@dataclass(frozen=True, slots=True)
class Activity:
    """What keeps a workspace awake (DESIGN D9), as the node sees it. Times are seconds ago."""

    open_execs: int  # commands that have not ended, watched or not: a job must not stop half-way because its client left
    open_streams: int  # inbound tunnels and transfers
    open_outbound: int  # egress streams
    idle_for_s: float  # since the last of any of these ended or a request arrived
    changed: bool  # whether anything can have changed since the last capture


class NodeEventKind(StrEnum):
    DIED = "died"  # the VMM process ended
    GUEST_REBOOT = "guest-reboot"
    GUEST_PANIC = "guest-panic"
    GUEST_POWEROFF = "guest-poweroff"
    UNRESPONSIVE = "unresponsive"
    NO_SPACE = "no-space"  # paused by the node: the host's disk is full
    ROOM_AGAIN = "room-again"
    FROZEN = "frozen"  # the lease watchdog paused every machine
    THAWED = "thawed"


@dataclass(frozen=True, slots=True)
class NodeEvent:
    kind: NodeEventKind
    workspace_id: WorkspaceId
    generation: int
    detail: str = ""


# ------------------------------------------------------------------------------------------------------------------- guest


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
class ExecSpec:
    """A command. Exactly one of ``argv`` and ``shell`` is set. Limits are seconds; None means none."""

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


class FileKind(StrEnum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """``name`` is decoded with surrogateescape: a guest's names are bytes."""

    path: str
    name: str
    kind: FileKind
    size: int
    mode: int
    uid: int
    gid: int
    modified_at: datetime
    target: str | None = None  # of a symlink


@dataclass(frozen=True, slots=True)
class FileWritten:
    path: str
    length: int
    crc32: int  # computed in the guest over what it wrote, compared with the host's by the node
    sha256: str  # computed on the host over what was sent


class Guest(Protocol):
    """An awake workspace at one generation. Paths are absolute in the workspace's own root."""

    async def start_exec(self, spec: ExecSpec) -> ExecHandle: ...

    async def attach_exec(self, exec_id: ExecId, stdout_offset: int = 0, stderr_offset: int = 0) -> ExecHandle: ...

    async def signal_exec(self, exec_id: ExecId, signal: int) -> None: ...

    async def kill_exec(self, exec_id: ExecId) -> None:
        """SIGTERM, then SIGKILL to everything in the command's cgroup."""
        ...

    async def list_execs(self) -> tuple[ExecInfo, ...]: ...

    async def stat(self, path: str) -> FileInfo: ...

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]: ...

    def read_file(self, path: str, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]: ...

    async def write_file(self, path: str, content: AsyncIterator[bytes], *, mode: int | None = None) -> FileWritten:
        """Replace atomically: the old content stays until all of the new is written and its checksum agrees."""
        ...

    async def make_dir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> None: ...

    async def rename(self, source: str, destination: str) -> None: ...

    async def remove(self, path: str, *, recursive: bool = False) -> None: ...

    async def open_tcp(self, port: int) -> ByteStream:
        """A stream to 127.0.0.1:port inside; raises NotFound when nothing listens there."""
        ...

    async def ping(self) -> float:
        """Round trip over the control channel in seconds."""
        ...


# -------------------------------------------------------------------------------------------------------------------- node


class LeaseAuthority(Protocol):
    """The control plane's side of a node's lease (DESIGN D11)."""

    async def renew(self, node_id: NodeId) -> float:
        """Extend the lease; returns its length in seconds, to be counted from *before* the call. Raises when refused."""
        ...


class Node(Protocol):
    """A machine that runs workspaces."""

    node_id: NodeId

    async def start(self, spec: StartSpec) -> StartReport:
        """Make the workspace awake: returns after this generation's handshake. On failure nothing of it remains running."""
        ...

    async def capture(self, spec: CaptureSpec) -> SnapshotFacts: ...

    async def stop(self, workspace_id: WorkspaceId, generation: int, *, keep_overlay: bool = False) -> None:
        """Kill the machine. Its active overlay is deleted unless ``keep_overlay``: then ``salvage`` can have it."""
        ...

    async def salvage(self, workspace_id: WorkspaceId, generation: int, snapshot_id: SnapshotId) -> SnapshotFacts | None:
        """Turn a dead machine's active overlay into a disk-only snapshot; None when it holds nothing new."""
        ...

    async def snapshot(self, snapshot_id: SnapshotId) -> SnapshotFacts:
        """Verify a stored snapshot's files against its checksums; raises NotFound or CorruptSnapshot naming the file."""
        ...

    def verify(self, snapshot_ids: tuple[SnapshotId, ...], *, trial: bool = False) -> AsyncGenerator[Checking | Verdict, None]:
        """Check every byte that these snapshots need, base files included, in this order; with ``trial`` also start each that is
        whole in a throwaway machine, which has no network and of which nothing stays. All damage of a snapshot is in its
        verdict; none of it raises. Closing the iterator ends the work."""
        ...

    async def delete_snapshots(self, snapshot_ids: tuple[SnapshotId, ...]) -> int:
        """Delete them and whatever only they refer to; returns bytes freed."""
        ...

    async def stored_sizes(self, snapshot_ids: tuple[SnapshotId, ...]) -> Mapping[SnapshotId, StoredSizes]:
        """What these weigh; those that the node does not have whole are absent."""
        ...

    async def inventory(self) -> Inventory: ...

    async def usage(self, workspace_id: WorkspaceId, generation: int) -> NodeUsage: ...

    def activity(self, workspace_id: WorkspaceId, generation: int) -> Activity: ...

    def guest(self, workspace_id: WorkspaceId, generation: int) -> Guest: ...

    def events(self) -> AsyncIterator[NodeEvent]:
        """What happened by itself. One consumer; never ends until ``close``."""
        ...
