"""The gauges of ``GET /metrics``: read from rows and live objects when somebody asks, so that nothing has to be kept up to date.

Rows are those of this server's node, so that the sum over servers of one database counts nothing twice; what is stored counts for
the whole installation.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.core.errors import PerdureError
from perdure.core.metrics import Gauge, Labels
from perdure.db.database import Database
from perdure.node.supervisor import NodeSupervisor
from perdure.workspaces.lifecycle import WITH_MACHINE
from perdure.workspaces.model import WorkspaceState
from perdure.workspaces.service import WorkspaceService


class ServerGauges:
    """``read`` is what the API asks."""

    def __init__(self, database: Database, workspaces: WorkspaceService, node: NodeSupervisor) -> None:
        self._database = database
        self._workspaces = workspaces
        self._node = node

    async def read(self) -> Sequence[Gauge]:
        """Those of the rows are left out while the database does not answer, and ``perdure_database_up`` says so."""
        try:
            rows = await self._of_rows()
        except PerdureError:
            rows = []
        return [
            Gauge("perdure_database_up", "Whether the database answers.", {(): float(bool(rows))}),
            *rows,
            *self._live(),
        ]

    async def _of_rows(self) -> list[Gauge]:
        node_id = self._node.node_id
        rows = await self._database.all("metrics.workspaces", node_id=node_id)
        states: dict[Labels, float] = {(state.value,): 0.0 for state in WorkspaceState if state is not WorkspaceState.DELETED}
        states |= {(row["state"],): float(row["count"]) for row in rows}
        awake_mib = sum(row["memory_mib"] for row in rows if WorkspaceState(row["state"]) in WITH_MACHINE)
        stored: dict[Labels, float] = {("node",): 0.0, ("store",): 0.0}
        stored |= {(row["place"],): float(row["bytes"]) for row in await self._database.all("metrics.stored")}
        made = [
            Gauge("perdure_workspaces", "Workspaces of this node by state.", states, ("state",)),
            Gauge("perdure_awake_memory_bytes", "Memory of the machines of this node's workspaces.", {(): awake_mib * 2.0**20}),
            Gauge(
                "perdure_stored_bytes", "Stored snapshots of all tenants, on nodes and in the object store.", stored, ("place",)
            ),
        ]
        if self._node.second_home is not None:
            row = await self._database.one("metrics.backlog", node_id=node_id)
            assert row is not None, "an aggregate gives a row"
            made.append(Gauge("perdure_upload_backlog", "Snapshots that the object store does not have yet.", {(): row["count"]}))
            made.append(Gauge("perdure_upload_backlog_bytes", "What these have added.", {(): row["bytes"]}))
        return made

    def _live(self) -> list[Gauge]:
        size, used, waiting = self._database.occupancy
        connections: dict[Labels, float] = {("used",): float(used), ("idle",): float(size - used)}
        return [
            Gauge(
                "perdure_callers_waiting", "Calls that wait for a workspace to be awake.", {(): self._workspaces.upkeep.callers}
            ),
            Gauge("perdure_pool_machines", "Warm machines that wait for a workspace.", {(): len(self._node.pool_pids())}),
            Gauge("perdure_machines", "Machines whose guest can run.", {(): len(self._node.pids())}),
            Gauge("perdure_database_connections", "Connections to the database.", connections, ("state",)),
            Gauge("perdure_database_callers_waiting", "Calls that wait for a connection.", {(): waiting}),
        ]
