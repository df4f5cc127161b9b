"""What a control plane may ask of a node, and a node of its control plane."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Protocol

from perdure.core.ids import NodeId, SnapshotId, WorkspaceId
from perdure.wire.node.guest import Guest
from perdure.wire.node.machines import StartReport, StartSpec
from perdure.wire.node.objects import SecondHome
from perdure.wire.node.snapshots import (
    Activity,
    CaptureSpec,
    Checking,
    Inventory,
    NodeEvent,
    NodeUsage,
    Reading,
    SnapshotFacts,
    StoredSizes,
    Verdict,
)


class LeaseAuthority(Protocol):
    """The control plane's side of a node's lease (DESIGN D11)."""

    async def renew(self, node_id: NodeId) -> float:
        """Extend the lease; returns its length in seconds, to be counted from *before* the call. Raises when refused."""
        ...


class Node(Protocol):
    """A machine that runs workspaces."""

    node_id: NodeId

    @property
    def second_home(self) -> SecondHome | None:
        """The object store as this node reaches it; None where none is configured."""
        ...

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

    def reading(self, workspace_id: WorkspaceId, generation: int) -> Reading:
        """What its meters say now; cheap enough for every capture. Raises when the machine is gone."""
        ...

    def activity(self, workspace_id: WorkspaceId, generation: int) -> Activity: ...

    def guest(self, workspace_id: WorkspaceId, generation: int) -> Guest: ...

    def events(self) -> AsyncIterator[NodeEvent]:
        """What happened by itself. One consumer; never ends until ``close``."""
        ...
