"""The snapshot store of one node: what is complete, what is alive, and what may go.

::

    STORE/
      lock                                    held by the process that owns the store
      snapshots/<snp>/manifest.json           makes the snapshot exist; written last
                      ram.index devices.state
      bases/<bas>.ram                         private bases, mapped by machines and shared by forks
      segments/<seg>.pages                    page content, shared by snapshots and forks
      disks/<dsk>.qcow2                       frozen and active layers, shared by forks
      hints/<snp>.hint                        what a wake touched; nothing depends on it
      live/<ws>.json                          intent of a start: which layers a machine may be writing

Segments, disks and bases live exactly as long as a manifest, a live record or a run of this process names them. ``open`` removes
everything else, unless a manifest cannot be read: then nothing is removed, for nobody knows what it named.

Synchronous: call from threads. Thread-safe.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import Conflict, CorruptSnapshot, NotFound, StaleGeneration
from perdure.core.files import DISK, Disk, is_temporary, make_dir, remove, remove_tree, stored_bytes, write_file
from perdure.core.ids import BaseId, DiskId, SnapshotId, WorkspaceId, is_id
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.bases import check_base
from perdure.snapshots.frozen import FrozenLayers
from perdure.snapshots.hints import Hints
from perdure.snapshots.layers import disk_file
from perdure.snapshots.manifest import MANIFEST, DiskFact, FileFact, LiveRecord, Manifest, base_file
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pageread import load
from perdure.snapshots.pins import Pins
from perdure.snapshots.segments import SegmentReader
from perdure.wire.node import SnapshotFacts

#: Begins the id in the live record of a throwaway machine, which is no workspace's: it does not outlive its process.
THROWAWAY = "try"


@dataclass(frozen=True, slots=True)
class OpenReport:
    """What ``open`` found: what it removed, and what exists but cannot be read. The latter stays until deleted by hand."""

    debris: tuple[str, ...]
    damaged: tuple[str, ...]


class SnapshotStore:
    """One per node. ``open`` before anything else."""

    def __init__(self, root: Path, disk: Disk = DISK) -> None:
        self.root = root
        self.disk = disk
        self.snapshots = root / "snapshots"
        self.segments = root / "segments"
        self.disks = root / "disks"
        self.bases = root / "bases"
        self.layers = FrozenLayers(self.disks)
        self._live = root / "live"
        self.hints = Hints(root / "hints", disk)
        self._manifests: dict[SnapshotId, Manifest] = {}
        self._uses: Counter[str] = Counter()  # manifests that name a file of segments/, disks/ or bases/
        self._frozen: dict[DiskId, DiskFact] = {}  # every layer that a manifest names
        self._damaged: set[str] = set()  # paths below the root
        self._records: dict[WorkspaceId, LiveRecord] = {}
        self._pins: set[Callable[[], Pins]] = set()
        self._guard = threading.RLock()
        self._lock_fd = -1

    # -------------------------------------------------------------------------------------------------- open and close

    def open(self) -> OpenReport:
        """Take the store, read what is complete and remove what is not. Raises Conflict when another process has it."""
        for directory in (self.root, self.snapshots, self.segments, self.disks, self.bases, self._live):
            make_dir(directory, mode=0o700, disk=self.disk)
        self._take_lock()
        with self._guard:
            for known in (self._manifests, self._records, self._frozen, self._damaged, self._uses):
                known.clear()
            debris = [*self._read_snapshots(), *self._read_live()]
            self.hints.open(self._manifests)
            if not self._damaged:
                debris += [name for name, _ in self._sweep()]
            return OpenReport(tuple(debris), tuple(sorted(self._damaged)))

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _take_lock(self) -> None:
        if self._lock_fd >= 0:
            return
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise Conflict(
                f"Another Perdure process uses the store {self.root}.",
                hint="Stop it (perdure down) or choose another PERDURE_HOME.",
            ) from error
        self._lock_fd = fd

    def _read_snapshots(self) -> Iterator[str]:
        for directory in sorted(self.snapshots.iterdir()):
            manifest = directory / MANIFEST
            if is_temporary(directory) or not is_id(directory.name, "snp") or not manifest.is_file():
                remove_tree(directory, disk=self.disk)
                yield f"snapshots/{directory.name}"
                continue
            snapshot_id = SnapshotId(directory.name)
            try:
                self._adopt(self._read_manifest(snapshot_id))
            except CorruptSnapshot:
                self._damaged.add(f"snapshots/{snapshot_id}")
                continue
            for path in list(directory.iterdir()):
                if not self._belongs(self._manifests[snapshot_id], path):
                    remove_tree(path, disk=self.disk)
                    yield f"snapshots/{directory.name}/{path.name}"

    def _read_live(self) -> Iterator[str]:
        for path in sorted(self._live.iterdir()):
            if is_temporary(path) or is_id(path.stem, THROWAWAY):
                remove(path, disk=self.disk)
                yield f"live/{path.name}"
                continue
            try:
                record = LiveRecord.from_bytes(path.read_bytes(), f"live/{path.name}")
            except CorruptSnapshot:
                self._damaged.add(f"live/{path.name}")
                continue
            self._records[record.workspace_id] = record

    def _adopt(self, manifest: Manifest) -> None:
        self._drop(manifest.snapshot_id)
        self._uses.update(manifest.stored_files())
        self._manifests[manifest.snapshot_id] = manifest
        self._frozen.update((fact.disk_id, fact) for fact in manifest.layers)

    def _drop(self, snapshot_id: SnapshotId) -> frozenset[str]:
        """Forget a manifest; returns the names of the segments and disks that it used."""
        before = self._manifests.pop(snapshot_id, None)
        names = before.stored_files() if before else frozenset()
        self._uses.subtract(names)
        return names

    def _read_manifest(self, snapshot_id: SnapshotId) -> Manifest:
        name = f"snapshots/{snapshot_id}/{MANIFEST}"
        manifest = Manifest.from_bytes((self.snapshots / snapshot_id / MANIFEST).read_bytes(), name)
        if manifest.snapshot_id != snapshot_id:
            raise CorruptSnapshot(f"The record {name} is damaged: it belongs to {manifest.snapshot_id}.", file=name)
        return manifest

    @staticmethod
    def _belongs(manifest: Manifest, path: Path) -> bool:
        memory = manifest.memory
        return path.name == MANIFEST or (memory is not None and path.name in (memory.index.name, memory.devices.name))

    # ------------------------------------------------------------------------------------------------------- snapshots

    def complete(self) -> tuple[SnapshotFacts, ...]:
        """Complete snapshots, oldest first."""
        with self._guard:
            return tuple(self._manifests[key].facts() for key in sorted(self._manifests))

    def manifest(self, snapshot_id: SnapshotId) -> Manifest:
        """Raises NotFound, or CorruptSnapshot when the manifest could not be read at start."""
        with self._guard:
            if snapshot_id in self._manifests:
                return self._manifests[snapshot_id]
            if f"snapshots/{snapshot_id}" in self._damaged:
                return self._read_manifest(snapshot_id)
        raise NotFound(f"There is no snapshot {snapshot_id} on this node.", hint="perdure snapshot ls NAME lists what is there.")

    def index(self, manifest: Manifest) -> PageIndex:
        """The memory index of a snapshot, verified. Raises CorruptSnapshot naming the file, NotFound without memory."""
        if manifest.memory is None:
            raise NotFound(f"Snapshot {manifest.snapshot_id} holds a disk only, no memory.", hint="Boot it: perdure recover.")
        data = self._checked(manifest, manifest.memory.index)
        return PageIndex.from_bytes(data, f"snapshots/{manifest.snapshot_id}/{manifest.memory.index.name}")

    def devices(self, manifest: Manifest) -> Path:
        """The device state of a snapshot, verified."""
        if manifest.memory is None:
            raise NotFound(f"Snapshot {manifest.snapshot_id} holds a disk only, no devices.", hint="Boot it: perdure recover.")
        self._checked(manifest, manifest.memory.devices)
        return self.snapshots / manifest.snapshot_id / manifest.memory.devices.name

    def _checked(self, manifest: Manifest, fact: FileFact) -> bytes:
        path = self.snapshots / manifest.snapshot_id / fact.name
        name = f"snapshots/{manifest.snapshot_id}/{fact.name}"
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise CorruptSnapshot(f"The stored file {name} is missing.", file=name) from error
        except OSError as error:
            raise CorruptSnapshot(f"The stored file {name} cannot be read ({error.strerror}).", file=name) from error
        if len(data) != fact.size or disk_layers.digest_of(data) != fact.checksum:
            raise CorruptSnapshot(f"The stored file {name} is damaged: its checksum does not hold.", file=name)
        return data

    def own_base(self, manifest: Manifest) -> BaseRam | None:
        """The private base of a snapshot's memory, if it has one. Raises CorruptSnapshot naming it when it is not there."""
        fact = manifest.private_base
        return None if fact is None else BaseRam(check_base(self.bases, fact))

    def check_segments(self, manifest: Manifest) -> None:
        """Header and length of every segment that a snapshot needs, before anything is started for it; what is in them is
        checked page by page while it is read. Raises CorruptSnapshot naming the segment."""
        for segment, end in (manifest.memory.segments if manifest.memory else {}).items():
            reader = SegmentReader(self.segments, segment)
            try:
                reader.check_end(end)
            finally:
                reader.close()

    def verify(self, snapshot_id: SnapshotId, base: BaseRam | None = None) -> Manifest:
        """Check everything a snapshot refers to, every page included when ``base`` is given.

        Raises NotFound, or CorruptSnapshot naming the file.
        """
        manifest = self._read_manifest(self.manifest(snapshot_id).snapshot_id)
        self.layers.check_heads(manifest.layers)
        self.layers.read_all(manifest.layers)
        if manifest.memory is not None:
            self.devices(manifest)
            if (fact := manifest.private_base) is not None:
                base = BaseRam(check_base(self.bases, fact, content=True))
            index = self.index(manifest)
            self.check_segments(manifest)
            if base is not None:
                for _ in load(self.segments, index, base):
                    pass
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Make a snapshot exist: its files are durable already. Replaces the manifest of the same snapshot."""
        directory = self.snapshots / manifest.snapshot_id
        write_file(directory / MANIFEST, manifest.to_bytes(), mode=0o600, disk=self.disk)
        with self._guard:
            self._adopt(manifest)

    def replace(self, before: Manifest, after: Manifest) -> bool:
        """Put ``after`` in the place of ``before``; False, and nothing done, when that is no longer the manifest."""
        with self._guard:
            if self._manifests.get(before.snapshot_id) is not before:
                return False
            self._put(after)
            return True

    def _put(self, manifest: Manifest) -> None:
        try:
            self.publish(manifest)
        except BaseException:
            with suppress(CorruptSnapshot, FileNotFoundError):
                if self._read_manifest(manifest.snapshot_id) == manifest:  # in place, though perhaps not for good:
                    self._damaged.add(f"snapshots/{manifest.snapshot_id}")  # nothing that either of them names may go
            raise

    def renew(self, manifest: Manifest) -> None:
        """Put a copy of a snapshot, all durable under names of its own, in the place of what is here; only then does that go."""
        directory = self.snapshots / manifest.snapshot_id
        with self._guard:
            before = self._manifests.get(manifest.snapshot_id)
            self._put(manifest)
            was_blind = bool(self._damaged)
            self._damaged.discard(f"snapshots/{manifest.snapshot_id}")
            for path in list(directory.iterdir()):
                if not self._belongs(manifest, path):
                    remove_tree(path, disk=self.disk)
            is_blind_no_more = was_blind and not self._damaged  # what went meanwhile has left its files
            self._sweep(None if is_blind_no_more else before.stored_files() if before else ())

    def users(self, name: str) -> int:
        """How many snapshots use a segment or disk."""
        with self._guard:
            return self._uses[name]

    @property
    def guard(self) -> AbstractContextManager[bool]:
        """Held while a reader looks a snapshot up and pins what it needs of it, so that no sweep comes between."""
        return self._guard

    def make_snapshot_dir(self, snapshot_id: SnapshotId) -> Path:
        """An empty directory for a snapshot in the making; what an unfinished attempt left is removed first."""
        directory = self.snapshots / snapshot_id
        with self._guard:
            if snapshot_id in self._manifests:
                raise Conflict(f"Snapshot {snapshot_id} exists already and is complete.")
        remove_tree(directory, disk=self.disk)
        make_dir(directory, mode=0o700, disk=self.disk)
        return directory

    def discard(self, snapshot_id: SnapshotId) -> None:
        """Remove a snapshot that was not finished."""
        with self._guard:
            if snapshot_id not in self._manifests:
                remove_tree(self.snapshots / snapshot_id, disk=self.disk)

    def delete(self, snapshot_ids: Iterable[SnapshotId]) -> int:
        """Delete snapshots and what only they used; unknown ones are gone already. Returns bytes freed."""
        freed, orphans, sweep_all = 0, set[str](), False
        with self._guard:
            for snapshot_id in snapshot_ids:
                directory = self.snapshots / snapshot_id
                is_there = is_id(snapshot_id, "snp") and directory.is_dir()
                if not is_there and snapshot_id not in self._manifests:  # one whose directory somebody removed is forgotten
                    continue
                freed += sum(stored_bytes(path) for path in directory.iterdir()) if is_there else 0
                # First what makes it exist, so that no crash leaves a snapshot that is there but not whole.
                remove(directory / MANIFEST, disk=self.disk)
                crashpoint(CrashPoint.REAP_UNNAMED)
                remove_tree(directory, disk=self.disk)
                orphans |= self._drop(snapshot_id)
                self.hints.drop(snapshot_id)
                was_blind = bool(self._damaged)
                self._damaged.discard(f"snapshots/{snapshot_id}")
                sweep_all |= was_blind and not self._damaged  # what went meanwhile has left its files
            return freed + sum(size for _, size in self._sweep(None if sweep_all else orphans))

    def _sweep(self, names: Iterable[str] | None = None) -> list[tuple[str, int]]:
        """Remove those of ``names`` (default: of all segments, disks and bases) that nobody uses; returns names and sizes.

        Whoever makes such a file pins it or records it first, so that looking after listing sees it.
        """
        if self._damaged:
            return []
        if names is None:
            names = [path.name for directory in (self.segments, self.disks, self.bases) for path in directory.iterdir()]
        idle = [name for name in names if self._uses[name] <= 0]
        if not idle:
            return []
        held = self.held()
        removed = []
        for name in idle:
            if name not in held:
                path = self.place_of(name)
                removed.append((str(path.relative_to(self.root)), stored_bytes(path)))
                remove(path, disk=self.disk)
                self._frozen.pop(DiskId(path.stem), None)
                self.layers.forget(DiskId(path.stem))
        return removed

    def held(self) -> set[str]:
        """Files that a machine or a reader may use, whatever manifests say. The guard is held."""
        held = {disk_file(name) for record in self._records.values() for name in record.layers}
        for pins in [pin() for pin in self._pins]:
            held |= pins.files()
        return held

    def place_of(self, name: str) -> Path:
        """Where a segment, disk or base lies, by its file name."""
        homes = {disk_file(DiskId("")): self.disks, base_file(BaseId("")): self.bases}
        return homes.get(Path(name).suffix, self.segments) / name

    def alone(self, manifest: Manifest) -> frozenset[str]:
        """Segments, disks and bases that nobody but this snapshot uses."""
        with self._guard:
            held = self.held()
            return frozenset(name for name in manifest.stored_files() if self._uses[name] == 1 and name not in held)

    def sweep(self, names: Iterable[str] | None = None) -> int:
        """Remove what nobody uses any more, of these files or of all; returns bytes freed."""
        with self._guard:
            return sum(size for _, size in self._sweep(names))

    def pin(self, pins: Callable[[], Pins]) -> None:
        with self._guard:
            self._pins.add(pins)

    def unpin(self, pins: Callable[[], Pins]) -> None:
        with self._guard:
            self._pins.discard(pins)

    # ---------------------------------------------------------------------------------------------------- live records

    def live(self) -> tuple[LiveRecord, ...]:
        """Every start of a workspace that was recorded and not ended."""
        with self._guard:
            return tuple(record for record in self._records.values() if not is_id(record.workspace_id, THROWAWAY))

    def live_record(self, workspace_id: WorkspaceId, generation: int) -> LiveRecord:
        """Raises NotFound, or StaleGeneration when another generation is recorded."""
        with self._guard:
            record = self._records.get(workspace_id)
        if record is None:
            raise NotFound(f"Workspace {workspace_id} has no machine on this node.")
        if record.generation != generation:
            raise StaleGeneration(f"Workspace {workspace_id} is at generation {record.generation}, not {generation}.")
        return record

    def record(self, record: LiveRecord) -> None:
        """Write a live record durably; the one of the same workspace is replaced."""
        write_file(self._live / f"{record.workspace_id}.json", record.to_bytes(), mode=0o600, disk=self.disk)
        with self._guard:
            self._records[record.workspace_id] = record

    def forget(self, workspace_id: WorkspaceId, generation: int) -> int:
        """End a live record: its layers go unless a snapshot names them. Returns bytes freed; one that is gone is fine."""
        with self._guard:
            record = self._records.get(workspace_id)
            if record is None or record.generation != generation:
                return 0
            remove(self._live / f"{workspace_id}.json", disk=self.disk)
            del self._records[workspace_id]
            return sum(size for _, size in self._sweep([disk_file(name) for name in record.layers]))

    def salvage(
        self, workspace_id: WorkspaceId, generation: int, snapshot_id: SnapshotId, created_at: datetime
    ) -> SnapshotFacts | None:
        """Turn the layers of a dead machine into a disk-only snapshot and end its live record.

        None when they hold nothing that a snapshot does not. Safe to repeat with the same ``snapshot_id``.
        """
        with self._guard:
            if snapshot_id in self._manifests:
                self.forget(workspace_id, generation)
                return self._manifests[snapshot_id].facts()
        record = self.live_record(workspace_id, generation)
        kept = self._layers_with_news(record)
        if not kept:
            self.forget(workspace_id, generation)
            return None
        self.make_snapshot_dir(snapshot_id)
        manifest = Manifest(
            snapshot_id=snapshot_id,
            workspace_id=workspace_id,
            tenant_id=record.tenant_id,
            generation=generation,
            parent_id=record.parent_id,
            image=record.image,
            size=record.size,
            disk_gib=record.disk_gib,
            created_at=created_at,
            quiesced=False,
            pause_s=0.0,
            disk_base=record.disk_base,
            layers=tuple(self.freeze_layer(disk_id) for disk_id in kept),
            memory=None,
        )
        self.publish(manifest)
        self.forget(workspace_id, generation)
        return manifest.facts()

    def _layers_with_news(self, record: LiveRecord) -> tuple[DiskId, ...]:
        """A record's layers up to the last one with data; empty when a snapshot names that one (above others: ``merge``)."""
        with self._guard:
            known = frozenset(self._frozen)
        usable, news = list[DiskId](), 0
        for number, disk_id in enumerate(record.layers, 1):
            try:
                facts = disk_layers.inspect(self.disks / disk_file(disk_id))
            except CorruptSnapshot:
                if disk_id in known or number < len(record.layers) - 1:  # the machine writes to one of the last two
                    raise
                break  # a prepared layer that the crash caught before it was whole
            usable.append(disk_id)
            if facts.has_data:
                news = 0 if disk_id in known else number
        return tuple(usable[:news])

    def freeze_layer(self, disk_id: DiskId) -> DiskFact:
        """Make a layer that nobody writes any more durable and take its checksum; one that a snapshot names is known."""
        with self._guard:
            if disk_id in self._frozen:
                return self._frozen[disk_id]
        self.disk.sync_file(self.disks / disk_file(disk_id))
        return self.layers.freeze(disk_id)

    def frozen(self, disk_ids: Iterable[DiskId]) -> tuple[DiskFact, ...]:
        """What is recorded of those of these layers that a snapshot names."""
        with self._guard:
            return tuple(self._frozen[disk_id] for disk_id in disk_ids if disk_id in self._frozen)

    def is_frozen(self, disk_id: DiskId) -> bool:
        """Whether a snapshot names this layer, so that nobody may write it any more."""
        with self._guard:
            return disk_id in self._frozen
