"""Machines, and what it takes to start one and what a start reports. Frozen values; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from perdure.core.ids import ExecId, SnapshotId, TenantId, WorkspaceId


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
    checked: bool = True  # False: somebody wants the disk although its layers' checksums may not hold


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
