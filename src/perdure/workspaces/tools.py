"""What operations, losses, reconciler and service share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from perdure.core.clock import Clock, epoch_ms
from perdure.core.config import Settings
from perdure.core.ids import SnapshotId, WorkspaceId, mint
from perdure.fleet.placement import Placement
from perdure.wire.node import Node
from perdure.workspaces.catalog import ImageCatalog
from perdure.workspaces.rows import Record
from perdure.workspaces.store import WorkspaceStore


@dataclass(frozen=True, slots=True)
class Tools:
    store: WorkspaceStore
    placement: Placement
    images: ImageCatalog
    settings: Settings
    clock: Clock
    check_egress: Callable[[Iterable[str]], object]  # raises InvalidRequest for an entry that the node's gateway would refuse

    def mint_snapshot(self) -> SnapshotId:
        return SnapshotId(mint("snp", now_ms=epoch_ms(self.clock)))

    def mint_workspace(self) -> WorkspaceId:
        return WorkspaceId(mint("ws", now_ms=epoch_ms(self.clock)))

    def node(self, record: Record) -> Node:
        """The node that holds a workspace. Raises Unavailable when it is not connected."""
        return self.placement.node(record.node_id)
