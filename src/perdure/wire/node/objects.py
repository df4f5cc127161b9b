"""A node's way to the object store, the second home of snapshots. Frozen values and a protocol; no I/O here.

The control plane decides what is uploaded, when something is fetched and when the garbage collection runs; the node moves the
bytes. Whether something is in the store is a row (``wire.objects``), never what a node says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from perdure.core.ids import SnapshotId, TenantId
from perdure.wire.node.snapshots import Damage


@dataclass(frozen=True, slots=True)
class Sent:
    """How far an upload is: bytes of content that were read and checked, and bytes that had to be sent."""

    read_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch had to bring; nothing when all was here. ``snapshot_bytes``: what the snapshot takes on this node's disk."""

    is_fetched: bool
    snapshot_bytes: int = 0
    with_image: bool = False


@dataclass(frozen=True, slots=True)
class Fetching:
    """How far a fetch is: bytes of the store that have come, of at most so many; what is found here does not come."""

    read_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What one pass of the store's garbage collection over one scope did."""

    packs_deleted: int
    bytes_deleted: int
    strays_deleted: int
    packs_rewritten: int


class SecondHome(Protocol):
    """``Node.second_home``, None where no store is configured. Every method may raise Unavailable; then repeat it."""

    @property
    def seals(self) -> bool:
        """Whether what a tenant has in the store is encrypted with a key of its own."""
        ...

    async def claim(self) -> None:
        """Make the store ours if it is nobody's; looks each time. Raises Conflict when it belongs to another installation, or
        does not say whose it is and holds something else than we know, or is empty and should not be."""
        ...

    async def upload(self, snapshot_id: SnapshotId, facts: Mapping[str, Any], told: Callable[[Sent], None]) -> Sent:
        """Make a snapshot and its images durable in the store; ``facts`` go into its manifest there. Gives way to starts.

        Raises NotFound when it is gone, CorruptSnapshot, Conflict or StaleGeneration when it was released, NoSpace, Shredded.
        """
        ...

    def has(self, snapshot_id: SnapshotId) -> bool:
        """Whether a snapshot and its images are known to be on this node; False: ``fetch`` looks."""
        ...

    async def fetch(self, snapshot_id: SnapshotId, tenant_id: TenantId, *, afresh: bool = False) -> Fetched:
        """Have a snapshot and its images on this node. ``afresh``: what is here of it was found damaged or missing.

        Raises NotFound when the store does not have it, CorruptSnapshot naming what is damaged there, NoSpace, Shredded.
        """
        ...

    async def mend_image(self, snapshot_id: SnapshotId, tenant_id: TenantId, file: str) -> Fetched:
        """Put what the store has in the place of a damaged file of an image or golden on which a snapshot lies; ``file`` is its
        name in errors, ``images/…``. Nothing is fetched when it is no such, or all that it belongs to is missing.

        Raises NotFound when the store does not have it, CorruptSnapshot when that is damaged too, NoSpace.
        """
        ...

    def fetching(self, snapshot_id: SnapshotId) -> Fetching | None:
        """How far a fetch is that is under way; None when there is none, or it has just begun."""
        ...

    async def verify(self, snapshot_id: SnapshotId, tenant_id: TenantId) -> tuple[Damage, ...]:
        """Read every byte that the store has of a snapshot; returns what is damaged. Raises NotFound, Shredded."""
        ...

    async def evict(self, snapshot_id: SnapshotId) -> int:
        """Remove a snapshot's files from this node unless a start is reading them; returns bytes freed."""
        ...

    async def shred(self, tenant_id: TenantId) -> None:
        """Throw away this node's copy of a tenant's key; no other one is made for it. Repeating it is fine. Raises Conflict where
        nothing is sealed."""
        ...

    async def collect(self, scope: str) -> Reclaimed:
        """One pass of the garbage collection over a tenant or over the images, worn packs included. Raises Conflict when the
        store is another installation's."""
        ...
