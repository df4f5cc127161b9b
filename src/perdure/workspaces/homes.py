"""Where the files of a workspace are: on its node, in the object store, or on a node that is gone.

A wake that does not find its snapshot on the node has it fetched; one that finds damage has it fetched afresh. A workspace whose
node holds no lease any more moves to this one if the store has its last snapshot.
"""

from __future__ import annotations

import logging

from perdure.core.errors import CorruptData, CorruptSnapshot, NotFound, PerdureError, StaleGeneration, Unavailable
from perdure.core.ids import SnapshotId
from perdure.journal.entries import canonical
from perdure.wire.node import Fetched, Node, SecondHome
from perdure.workspaces.lifecycle import WITH_MACHINE, Event
from perdure.workspaces.model import WorkspaceState
from perdure.workspaces.rows import Record
from perdure.workspaces.store import Change
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)

HERE = Fetched(is_fetched=False)
FETCHING = "Its last snapshot is being fetched from the object store."
#: Begins the name of a file that lies below snapshots, and is no part of any.
OF_IMAGES = "images/"
#: Begins the reason for a rewind when what was newer lies on a node that is gone.
NODE_GONE = "its node"


class Homes:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._store = tools.store

    # ---------------------------------------------------------------------------------------------------------------- fetching

    async def bring(self, at: Record, snapshot_id: SnapshotId | None) -> Fetched:
        """Have a snapshot on the node before a start of it. Without a store, or without a snapshot, nothing."""
        home = self._tools.node(at).second_home
        if home is None or snapshot_id is None or home.has(snapshot_id):
            return HERE
        if await self._store.is_stored(at, snapshot_id):
            await self._store.set_detail(at, FETCHING)
        try:
            return await home.fetch(snapshot_id, at.workspace.tenant_id)
        except NotFound:
            return HERE  # in neither home: the start says what it misses, and ``mend`` that the store misses it too

    async def mend(self, at: Record, snapshot_id: SnapshotId | None, error: PerdureError) -> Fetched:
        """What a start or a check found missing or damaged is fetched afresh. Raises ``error`` when that cannot help."""
        home = self._tools.node(at).second_home
        if home is None or snapshot_id is None or not isinstance(error, CorruptData | NotFound):
            raise error
        is_below = isinstance(error, CorruptData) and error.file.startswith(OF_IMAGES)
        if is_below and (mended := await self._mend_image(home, at, snapshot_id, error)) is not None:
            return mended
        _log.warning("snapshot %s cannot be woken from what is on its node, and is fetched: %s", snapshot_id, error.message)
        try:
            fetched = await home.fetch(snapshot_id, at.workspace.tenant_id, afresh=not is_below)
        except NotFound:
            raise _in_neither(snapshot_id, error) from error
        if not fetched.is_fetched:  # the image is there by its sizes, and damaged: another copy of the snapshot mends nothing
            raise error
        return fetched

    async def _mend_image(self, home: SecondHome, at: Record, snapshot_id: SnapshotId, error: PerdureError) -> Fetched | None:
        """None when the file is no part of what is here, and may come with the snapshot."""
        assert isinstance(error, CorruptData)
        try:
            fetched = await home.mend_image(snapshot_id, at.workspace.tenant_id, error.file)
        except NotFound:
            raise error from None
        if not fetched.is_fetched:
            return None
        _log.warning("%s was damaged and has come from the object store: %s", error.file, error.message)
        return fetched

    # ------------------------------------------------------------------------------------------------------------------ moving

    async def here(self, at: Record, node: Node) -> Record:
        """The workspace on this node: as it is, or moved here because the lease of its own is over.

        Raises Unavailable while that node may still run something, or when only that node has what is needed.
        """
        if at.node_id == node.node_id:
            return at
        async with self._store.database.transaction() as tx:
            lease = await tx.one("homes.lease_of", id=at.node_id)
            if lease is not None and lease["is_leased"]:
                raise Unavailable(
                    f"Workspace {at.workspace.name!r} is on node {at.node_id}, which holds a lease; this is {node.node_id}.",
                    hint="Ask the server of that node, or try again when its lease is over.",
                )
            await self._check_can_move(at, node)
            gone = f"{NODE_GONE} {at.node_id} is gone; this is the last snapshot that the object store has"
            if at.state in WITH_MACHINE:
                change = Change(detail=f"Lost: {gone}.", rewound=gone, body={"node_id": at.node_id})
                at = await self._store.move(await self._store.not_seen(at), Event.MACHINE_LOST, change, tx)
            names = {"id": at.id, "from": at.node_id, "to": node.node_id}
            body = canonical({"from": at.node_id, "to": node.node_id})
            moved = await tx.one(
                "homes.move_workspace", **names, generation=at.generation, detail=at.workspace.state_detail, body=body
            )
            if moved is None:
                raise StaleGeneration(f"Workspace {at.workspace.name!r} has been moved or used meanwhile.", hint="Try again.")
            await tx.all("homes.move_snapshots", **names)
        _log.info("workspace %s has moved here from node %s", at.id, at.node_id)
        return await self._store.by_id(at.id)

    async def _check_can_move(self, at: Record, node: Node) -> None:
        head, name = at.workspace.head_snapshot_id, at.workspace.name
        why = None
        if node.second_home is None:
            why = "and this server has no object store to fetch it from"
        elif head is None or at.state is WorkspaceState.CREATING:
            why = "and it has no snapshot yet"
        elif not await self._store.is_stored(at, head):
            why = f"and the object store does not have its last snapshot {head}"
        if why is not None:
            raise Unavailable(
                f"Workspace {name!r} is on node {at.node_id}, which is not connected, {why}.",
                hint="Start the server with the PERDURE_HOME of that node.",
            )


def _in_neither(snapshot_id: SnapshotId, error: PerdureError) -> PerdureError:
    """The error of the node, with what the store said."""
    if isinstance(error, NotFound):
        file = f"snapshots/{snapshot_id}/manifest.json"
        return CorruptSnapshot(f"Snapshot {snapshot_id} is neither on this node nor in the object store.", file=file)
    error.message += f" The object store does not have snapshot {snapshot_id} either."
    error.args = (error.message,)
    return error
