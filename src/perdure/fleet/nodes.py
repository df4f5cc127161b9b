"""Registry of nodes and the control plane's side of their leases (DESIGN D11).

A node freezes its machines before its lease can have run out, counting from before the last successful renewal; so a lease
that has run out here proves that nothing of that node runs. Registering raises the node's generation, and renewals name it: a
process that was replaced is refused and keeps its machines frozen. (Taking a silent node's workspaces over comes with many
nodes.)
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from perdure.core.errors import StaleGeneration
from perdure.core.ids import DEFAULT_TENANT, NodeId
from perdure.db.database import Database


@dataclass(frozen=True, slots=True)
class NodeLease:
    """One row of ``nodes``."""

    node_id: NodeId
    state: str
    generation: int
    lease_until: datetime
    is_leased: bool


class NodeRegistry:
    """Implements ``wire.node.LeaseAuthority`` for the nodes that registered through it."""

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database = database
        self._lease_s = lease_s
        self._generations: dict[NodeId, int] = {}

    async def register(self, node_id: NodeId) -> int:
        """Bring a node up with a fresh lease; returns its generation."""
        row = await self._database.one("nodes.register", id=node_id, tenant_id=DEFAULT_TENANT, lease_s=self._lease_s)
        assert row is not None, "an upsert returns its row"
        self._generations[node_id] = int(row["generation"])
        return self._generations[node_id]

    async def renew(self, node_id: NodeId) -> float:
        """Extend the lease; returns its length in seconds. Raises StaleGeneration when the node has been replaced."""
        generation = self._generations.get(node_id, 0)
        row = await self._database.one("nodes.renew", id=node_id, generation=generation, lease_s=self._lease_s)
        if row is None:
            raise StaleGeneration(
                f"Node {node_id} holds no lease any more: another process of it has registered, or it was taken down.",
                hint="Stop this process; its machines stay frozen until then.",
            )
        return self._lease_s

    async def release(self, node_id: NodeId) -> None:
        """Give the lease back at an orderly end."""
        generation = self._generations.pop(node_id, 0)
        await self._database.run("nodes.release", id=node_id, generation=generation)

    async def leases(self) -> list[NodeLease]:
        return [
            NodeLease(NodeId(row["id"]), row["state"], row["generation"], row["lease_until"], row["is_leased"])
            for row in await self._database.all("nodes.all")
        ]
