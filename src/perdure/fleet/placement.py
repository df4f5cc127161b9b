"""Which node runs a workspace. ``LocalPlacement`` is the default: one node, in this process."""

from __future__ import annotations

from typing import Protocol

from perdure.core.errors import Unavailable
from perdure.core.ids import NodeId
from perdure.wire.node import MachineSize, Node


class Placement(Protocol):
    def place(self, size: MachineSize) -> Node:
        """The node for a new workspace. Raises Unavailable with a reason when none fits."""
        ...

    def node(self, node_id: NodeId) -> Node:
        """The node that holds a workspace's snapshots. Raises Unavailable when it is not connected."""
        ...


class LocalPlacement:
    """Everything runs on the one node of this process."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def place(self, size: MachineSize) -> Node:
        return self._node

    def node(self, node_id: NodeId) -> Node:
        if node_id != self._node.node_id:
            raise Unavailable(
                f"Node {node_id}, which holds this workspace, is not connected; this server is {self._node.node_id}.",
                hint="Start the server with the PERDURE_HOME of that node.",
            )
        return self._node
