"""What only the database knows of a snapshot, as facts that travel with its copy in an object store.

Node and manifest know tenant, workspace, parent and generation. Names, why a snapshot was taken and how its workspace was made
are rows; with them in the store a catalogue can be made again when the database is gone.
"""

from __future__ import annotations

from typing import Any

from perdure.core.ids import SnapshotId
from perdure.db.database import Database

#: How the ``rewound`` of a workspace begins that has come back with its whole installation: its disk is an earlier one, too.
RESTORED, RECOVERED = "restored from the backup", "recovered from the object store"
#: The name under which an item's facts have these.
FACT = "catalogue"


async def facts_of(database: Database, snapshot_id: SnapshotId) -> dict[str, Any]:
    """The facts to upload a snapshot with; none when its row is gone."""
    row = await database.one("catalogue.facts", id=snapshot_id)
    return {} if row is None else {FACT: row["facts"]}
