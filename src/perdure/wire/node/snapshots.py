"""Snapshots, what a verification finds of them, and what a node has and tells. Frozen values; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from perdure.core.ids import DiskId, SnapshotId, TenantId, WorkspaceId
from perdure.wire.node.machines import MachineSize


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
class Reading:
    """Meters of one awake machine. They only grow, so that a reading that is told twice adds nothing."""

    cpu_s: float  # of the machine's process since it began
    sent_bytes: int  # by the workspace through egress, and below what it received; all its generations
    received_bytes: int
    counter: str  # names all counts of bytes: they begin at 0 again under another name
    request_bytes: int = 0  # of this generation, by its callers: into files, stdin and ports, and below what they got out
    answer_bytes: int = 0


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
