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

from perdure.wire.node.guest import (
    ByteStream,
    ExecEnd,
    ExecEvent,
    ExecExited,
    ExecHandle,
    ExecInfo,
    ExecOutput,
    ExecSpec,
    ExecStarted,
    FileInfo,
    FileKind,
    FileWritten,
    Guest,
)
from perdure.wire.node.machines import (
    Confinement,
    FromDisk,
    FromGolden,
    FromSnapshot,
    HookOutcome,
    HookRun,
    Identity,
    Isolation,
    MachineSize,
    MemoryFate,
    StartReport,
    StartSource,
    StartSpec,
    Told,
)
from perdure.wire.node.objects import (
    Fetched,
    Fetching,
    Reclaimed,
    SecondHome,
    Sent,
)
from perdure.wire.node.ports import (
    Headers,
    PortAnswer,
    PortLimits,
    PortPhase,
    PortPlace,
    PortRequest,
    Ports,
    PortSocket,
    SocketClosed,
)
from perdure.wire.node.protocol import (
    LeaseAuthority,
    Node,
)
from perdure.wire.node.snapshots import (
    Activity,
    CaptureMode,
    CaptureSpec,
    Checking,
    Damage,
    Inventory,
    LiveMachine,
    NodeEvent,
    NodeEventKind,
    NodeUsage,
    Reading,
    SnapshotFacts,
    StoredSizes,
    Trial,
    TrialKind,
    Verdict,
)

__all__ = [
    "Activity",
    "ByteStream",
    "CaptureMode",
    "CaptureSpec",
    "Checking",
    "Confinement",
    "Damage",
    "ExecEnd",
    "ExecEvent",
    "ExecExited",
    "ExecHandle",
    "ExecInfo",
    "ExecOutput",
    "ExecSpec",
    "ExecStarted",
    "Fetched",
    "Fetching",
    "FileInfo",
    "FileKind",
    "FileWritten",
    "FromDisk",
    "FromGolden",
    "FromSnapshot",
    "Guest",
    "Headers",
    "HookOutcome",
    "HookRun",
    "Identity",
    "Inventory",
    "Isolation",
    "LeaseAuthority",
    "LiveMachine",
    "MachineSize",
    "MemoryFate",
    "Node",
    "NodeEvent",
    "NodeEventKind",
    "NodeUsage",
    "PortAnswer",
    "PortLimits",
    "PortPhase",
    "PortPlace",
    "PortRequest",
    "PortSocket",
    "Ports",
    "Reading",
    "Reclaimed",
    "SecondHome",
    "Sent",
    "SnapshotFacts",
    "SocketClosed",
    "StartReport",
    "StartSource",
    "StartSpec",
    "StoredSizes",
    "Told",
    "Trial",
    "TrialKind",
    "Verdict",
]
