"""What a run holds on to in the store of snapshots, beside all that manifests name."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.core.ids import BaseId, DiskId, SegmentId
from perdure.snapshots.layers import disk_file
from perdure.snapshots.manifest import Manifest, base_file
from perdure.snapshots.segments import segment_file


@dataclass(frozen=True, slots=True)
class Pins:
    """Files that a run of this process uses and no manifest may name yet. Asked for at each sweep."""

    segments: frozenset[SegmentId]
    disks: frozenset[DiskId]
    bases: frozenset[BaseId] = frozenset()

    @staticmethod
    def of(manifest: Manifest) -> Pins:
        """All that a snapshot needs."""
        base = manifest.private_base
        segments = frozenset(manifest.memory.segments if manifest.memory else ())
        return Pins(segments, frozenset(manifest.disk_ids), frozenset(() if base is None else (base.base_id,)))

    def files(self) -> frozenset[str]:
        return frozenset((*map(segment_file, self.segments), *map(disk_file, self.disks), *map(base_file, self.bases)))
