"""One run of a machine, from its start to its end: restore what a snapshot holds, capture what the guest did.

A capture has three parts. ``ready`` does before the pause what can be done before. ``capture`` is what must happen while the
machine stands still, as short as possible: device state, the next disk layer, a copy of the written pages. ``commit`` does the
rest after the machine goes on (or, for a hibernation, while it stays paused, and is killed only when this has succeeded):
compare, append, index, fsync, manifest. A snapshot exists when ``commit`` returns and not before; when it raises, nothing was
lost and the next capture holds all of it. A capture that does not follow its ``ready`` is undone by ``discard``.

Memory and device state are read at the same time and must agree: between pause and resume nobody may send to the machine's
channels, for QEMU would move the bytes into guest memory although the vCPUs are stopped.

Order of a restore: disk and memory first, device state last; loading checks the queues in memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from perdure.core import tracing
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import Conflict, CorruptSnapshot, PerdureError
from perdure.core.files import DISK, Disk, create_file, stored_bytes
from perdure.core.ids import BaseId, DiskId, SegmentId, SnapshotId, TenantId, WorkspaceId, mint
from perdure.machines.driver import DiskChain, Machine, Pages
from perdure.snapshots import copying
from perdure.snapshots import layers as disk_layers
from perdure.snapshots.alive import process_started
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.frozen import until_enough
from perdure.snapshots.layers import layer
from perdure.snapshots.manifest import (
    DEVICES,
    INDEX,
    BaseRef,
    DiskFact,
    FileFact,
    LiveRecord,
    Manifest,
    MemoryFacts,
    base_file,
)
from perdure.snapshots.pageindex import PageIndex
from perdure.snapshots.pagelog import Recorded, record
from perdure.snapshots.pins import Pins
from perdure.snapshots.segments import SegmentWriter, segment_file
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import MachineSize, SnapshotFacts

#: A segment is closed when it has grown past this, so that what is no longer needed can go while the machine runs.
SEGMENT_BYTES_MAX = 16 << 20
#: A checkpoint writes anew what it still needs of a segment of which less than this share is needed: a long wake must not grow.
LIVE_SHARE = 0.5
#: Garbage below this is not worth a rewrite.
GARBAGE_BYTES_MIN = 1 << 20


@dataclass(frozen=True, slots=True)
class Base:
    """What the workspace's own state lies on. ``disks`` are the frozen layers below its own."""

    ram: BaseRam
    ram_ref: BaseRef
    disks: DiskChain
    disk_ref: BaseRef


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One start. ``fingerprint`` is of the machine that will run; snapshots made in the run carry it."""

    workspace_id: WorkspaceId
    tenant_id: TenantId
    generation: int
    image: str
    size: MachineSize
    disk_gib: int
    base: Base
    fingerprint: str
    fingerprint_parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """``goes_on``: the machine will be resumed (checkpoint), so it needs a new layer; without it, it will be killed."""

    snapshot_id: SnapshotId
    created_at: datetime
    quiesced: bool
    goes_on: bool = True


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture has; ``memory`` is held until ``commit``, but for the pages of a hibernation, which are read then.
    ``timings_ms``: devices, overlay, memory, in milliseconds."""

    request: CaptureRequest
    directory: Path
    layers: tuple[DiskId, ...]
    memory: copying.Copied
    timings_ms: Mapping[str, float]


class MachineRun:
    """The snapshot side of one machine. Made by ``begin``; one capture at a time (``Conflict`` otherwise)."""

    def __init__(self, store: SnapshotStore, spec: RunSpec, live: LiveRecord, index: PageIndex, devices: Path | None) -> None:
        self.store = store
        self.spec = spec
        self._live = live
        self._next: DiskId | None = None  # recorded for the next checkpoint, not yet written
        self._opened = False  # by the machine
        self._index = index
        self._marked: PageIndex | None = None  # of the capture since which the machine's memory tells what is written
        self._devices = devices
        self._parent = live.parent_id
        self._writer: SegmentWriter | None = None
        self._busy = False
        self._room: Pages | None = None  # for the next capture's copy
        self._pending: Captured | None = None  # captured, not yet committed
        self._changing = asyncio.Lock()  # the live record
        self._pins = self._pinned
        store.pin(self._pins)

    # ------------------------------------------------------------------------------------------------------------ disk

    @property
    def active_disk(self) -> DiskId:
        return self._layers[-1]

    @property
    def _layers(self) -> tuple[DiskId, ...]:
        """The workspace's own layers that the machine uses; a prepared one is not among them."""
        return self._live.layers if self._next is None else self._live.layers[:-1]

    def chain(self) -> DiskChain:
        """The whole disk, bottom first, for ``boot`` or ``attach_disk``."""
        own = (layer(self.store.disks, disk_id) for disk_id in self._layers)
        return DiskChain((*self.spec.base.disks.layers, *own))

    async def checked_chain(self) -> DiskChain:
        """The same for a boot, when its frozen layers were checked. Raises CorruptSnapshot naming the layer."""
        await self._check_layers()
        return self.chain()

    async def _check_layers(self) -> float:
        """As a start must (``frozen``). Returns the milliseconds that it took."""
        begun = time.perf_counter()
        facts = self.store.frozen(self._layers)
        await until_enough(lambda enough: self.store.layers.check(facts, enough))
        return copying.ms(begun)

    @property
    def index(self) -> PageIndex:
        """Of what was captured last, or woken from."""
        return self._index

    @property
    def _knows_writes(self) -> bool:
        """Whether what was written since the last mark is all that differs from the index."""
        return self._marked is self._index

    @property
    def layer_count(self) -> int:
        """Layers of the workspace's own; ``collapse`` brings them down."""
        return len(self._layers)

    async def started(self, pid: int) -> None:
        """Note the machine's process, durably."""
        async with self._changing:
            await self._record(replace(self._live, pid=pid, pid_started=process_started(pid)))

    async def ready(self, machine: Machine, snapshot_id: SnapshotId, *, goes_on: bool = True) -> None:
        """Before the pause: make the snapshot's directory and, for a checkpoint, room for the copy and the layer to switch to.

        Intent first: the record names the layer before it exists, so that no crash leaves one that nobody knows.
        """
        await asyncio.to_thread(self.store.make_snapshot_dir, snapshot_id)
        if not goes_on:
            return
        self._room = await asyncio.to_thread(copying.room_ahead, machine.memory, lately=self._knows_writes)
        async with self._changing:
            if self._next is None:
                disk_id = mint_disk()
                await self._record(replace(self._live, layers=(*self._live.layers, disk_id), parent_id=self._parent), disk_id)
            if not (self.store.disks / disk_layers.disk_file(self._live.layers[-1])).exists():
                await asyncio.to_thread(create_overlay, self.store, self._live.layers[-1], self.spec.disk_gib)
            if not self._opened:
                await machine.open_overlay(layer(self.store.disks, self._live.layers[-1]))
                self._opened = True

    async def _record(self, live: LiveRecord, prepared: DiskId | None = None) -> None:
        """``_live`` may name a layer that does not exist yet, never the other way round."""
        work = asyncio.create_task(asyncio.to_thread(self.store.record, live))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread goes on whoever waits for it: what it writes must not come after the end of the run.
            await asyncio.wait([work])
            raise
        self._live, self._next = live, prepared or self._next

    async def collapse(self, machine: Machine, keep_own: int) -> None:
        """Bring the disk down to the lowest ``keep_own`` own layers and the active one, while the machine runs.

        Frozen files do not change; those that no snapshot names are removed. Raises Busy when a capture interrupts it, or
        CorruptSnapshot: damage that went into the active layer would get a checksum of its own.
        """
        dropped = frozenset(self._layers[keep_own:-1])
        if not dropped:
            return
        facts = self.store.frozen(dropped)
        await until_enough(lambda enough: self.store.layers.read_all(facts, enough))
        await machine.collapse_disk(len(self.spec.base.disks.layers) + keep_own)
        crashpoint(CrashPoint.LAYERS_MERGED, machine.pid)
        async with self._changing:
            # A capture may have begun meanwhile; whatever lies above now, these are in the layer that was active.
            await self._record(replace(self._live, layers=tuple(name for name in self._live.layers if name not in dropped)))
        crashpoint(CrashPoint.LAYERS_RECORDED, machine.pid)
        await asyncio.to_thread(self.store.sweep, [disk_layers.disk_file(name) for name in dropped])

    # ---------------------------------------------------------------------------------------------------------- memory

    async def restore(self, machine: Machine) -> Mapping[str, float]:
        """PREPARED to PAUSED: attach the disk, write memory, load devices, and check the disk's layers beside all that. Returns
        milliseconds of each.

        Raises CorruptSnapshot naming the file (the machine is then worth nothing: kill it) or RestoreFailed.
        """
        if self._devices is None:
            raise Conflict("This start has no memory to restore; boot the machine instead.")
        timings: dict[str, float] = {}
        begun = time.perf_counter()
        memory = asyncio.create_task(
            asyncio.to_thread(copying.write_memory, machine.memory, self.store.segments, self._index, self.spec.base.ram)
        )
        layers = asyncio.create_task(self._check_layers())
        try:
            await machine.attach_disk(self.chain())
            timings["disk"] = copying.ms(begun)
            await memory
            timings["memory"] = copying.ms(begun)
            loading = time.perf_counter()
            await machine.load_devices(self._devices)
            timings["devices"] = copying.ms(loading)
            timings["layers"] = await layers
        except BaseException as error:
            is_of_the_machine = isinstance(error, PerdureError) and not isinstance(error, CorruptSnapshot)
            if not is_of_the_machine:
                layers.cancel()
            _, found = await asyncio.gather(memory, layers, return_exceptions=True)
            if is_of_the_machine and isinstance(found, CorruptSnapshot):
                raise found from error  # one that cannot take its disk says less than the layer that is damaged
            raise
        return timings

    def discard(self, snapshot_id: SnapshotId) -> None:
        """Undo ``ready``, when no capture follows it, or what a failed capture left."""
        self._room = None
        self.store.discard(snapshot_id)

    async def capture(self, machine: Machine, request: CaptureRequest) -> Captured:
        """PAUSED only, after ``ready``: copy all that a snapshot needs. Then the machine may go on, and ``commit`` must follow.

        Raises what the machine raises; then there is no snapshot. A cancelled call ends only when the machine has answered.
        """
        if request.goes_on and not self._opened:
            raise Conflict("A checkpoint needs the next disk layer opened before the pause.")
        with _Exclusive(self):
            work = asyncio.create_task(self._capture(machine, request))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                # Half a switch of layers would leave nobody knowing where the guest writes.
                await asyncio.wait([work])
                raise

    async def _capture(self, machine: Machine, request: CaptureRequest) -> Captured:
        directory = self.store.snapshots / request.snapshot_id
        timings: dict[str, float] = {}
        room, self._room = self._room, None
        checkpoint = partial(copying.copy_for_checkpoint, room=room, timings=timings, lately=self._knows_writes)
        copy = checkpoint if request.goes_on else copying.copy_for_hibernation
        self._marked = None
        memory = asyncio.create_task(asyncio.to_thread(copy, machine.memory))
        layers = self._layers
        try:
            begun = time.perf_counter()
            with tracing.span("snapshot.devices"):
                await machine.save_devices(directory / DEVICES)
            timings["devices"] = copying.ms(begun)
            if request.goes_on:
                begun = time.perf_counter()
                with tracing.span("snapshot.overlay"):
                    await machine.switch_overlay()
                self._next, self._opened = None, False
                timings["overlay"] = copying.ms(begun)
            with tracing.span("snapshot.memory"):
                copied = await memory
        except BaseException:
            await asyncio.wait([memory])
            self.store.discard(request.snapshot_id)
            raise
        self._pending = Captured(request, directory, layers, copied, timings)
        return self._pending

    def commit(self, captured: Captured, pause_s: float) -> SnapshotFacts:
        """Make the snapshot exist. Synchronous and heavy: call it in a thread. ``pause_s``: how long user processes stood still.

        Raises NoSpace when the disk is full; the snapshot is then gone, the machine's state is not.
        """
        with _Exclusive(self):
            is_newest = captured is self._pending
            try:
                manifest, recorded = self._write(captured, pause_s)
                crashpoint(CrashPoint.CAPTURE_WRITTEN)
                self.store.publish(manifest)
            except BaseException:
                failed = self._writer
                self._seal()  # after a failed fsync nobody knows what of the segment is on the disk
                self.store.discard(captured.request.snapshot_id)
                if failed is not None:
                    self.store.sweep([segment_file(failed.segment_id)])  # unless an earlier snapshot or this run needs it
                raise
            finally:
                self._pending = None
            left = self._index.segments() - recorded.index.segments()
            self._index, self._parent = recorded.index, captured.request.snapshot_id
            # After damage the next capture copies all pages, and so writes them anew.
            self._marked = self._index if captured.memory.is_marked and is_newest and not recorded.damaged else None
            self.store.sweep([segment_file(name) for name in left])  # the snapshots that named them may be gone already
            if self._writer is not None and self._writer.size > SEGMENT_BYTES_MAX:
                self._seal()
        return manifest.facts()

    def _write(self, captured: Captured, pause_s: float) -> tuple[Manifest, Recorded]:
        spec, request, base = self.spec, captured.request, self.spec.base
        writer = self._writer = self._writer or SegmentWriter(self.store.segments, mint_segment(), self.store.disk)
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="perdure-commit") as beside:
            disks = beside.submit(self._freeze, captured.layers)
            devices = beside.submit(_device_fact, captured.directory / DEVICES, self.store.disk)
            recorded = record(
                self.store.segments,
                self._index,
                base.ram,
                (captured.memory.pages, captured.memory.content),
                writer,
                leave=self._mostly_dead(writer) if request.goes_on else frozenset(),
            )
            synced = beside.submit(writer.sync)
            index_fact = _write_index(captured.directory / INDEX, recorded.index, self.store.disk)
            synced.result()
            memory = self._memory_facts(recorded, index_fact, devices.result())
            layers = disks.result()
        self.store.disk.sync_dir(captured.directory)
        manifest = Manifest(
            snapshot_id=request.snapshot_id,
            workspace_id=spec.workspace_id,
            tenant_id=spec.tenant_id,
            generation=spec.generation,
            parent_id=self._parent,
            image=spec.image,
            size=spec.size,
            disk_gib=spec.disk_gib,
            created_at=request.created_at,
            quiesced=request.quiesced,
            pause_s=pause_s,
            disk_base=base.disk_ref,
            layers=layers,
            memory=memory,
        )
        return manifest, recorded

    def _mostly_dead(self, writer: SegmentWriter) -> frozenset[SegmentId]:
        """Closed segments that are not worth keeping for the little that is needed of them."""
        live = {name: size for name, size in self._index.live_bytes().items() if name != writer.segment_id}
        stored = {name: stored_bytes(self.store.segments / segment_file(name)) for name in live}
        return frozenset(
            name for name, size in live.items() if size < LIVE_SHARE * stored[name] and stored[name] - size >= GARBAGE_BYTES_MIN
        )

    def _freeze(self, layers: tuple[DiskId, ...]) -> tuple[DiskFact, ...]:
        return tuple(self.store.freeze_layer(disk_id) for disk_id in layers)

    def _memory_facts(self, recorded: Recorded, index: FileFact, devices: FileFact) -> MemoryFacts:
        return MemoryFacts(
            base=self.spec.base.ram_ref,
            index=index,
            devices=devices,
            segments=recorded.index.ends(),
            pages=len(recorded.index.pages) + len(recorded.index.zeros),
            added_bytes=recorded.appended_bytes,
            total_bytes=recorded.index.stored_bytes(),
            fingerprint=self.spec.fingerprint,
            fingerprint_parts=self.spec.fingerprint_parts,
        )

    # ------------------------------------------------------------------------------------------------------------- end

    def end(self, *, keep_layers: bool = False) -> int:
        """The machine is dead: seal the segment and drop what no snapshot names. Safe twice. Returns bytes freed.

        ``keep_layers`` leaves the live record, so that ``salvage`` or a reboot (``take_over``) can have the newest layer.
        """
        writer = self._writer
        self._seal()
        self.store.unpin(self._pins)
        names = [segment_file(name) for name in self._index.segments()]
        names += [] if writer is None else [segment_file(writer.segment_id)]
        names += [base_file(base.base_id)] if (base := self.spec.base.ram_ref.private) is not None else []
        freed = 0 if keep_layers else self.store.forget(self.spec.workspace_id, self.spec.generation)
        return freed + self.store.sweep(names)

    def _seal(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _pinned(self) -> Pins:
        writer = self._writer
        current = frozenset() if writer is None else frozenset((writer.segment_id,))
        waiting = () if self._pending is None else self._pending.layers
        base = self.spec.base.ram_ref.private
        bases = () if base is None else (base.base_id,)
        return Pins(self._index.segments() | current, frozenset((*self._live.layers, *waiting)), frozenset(bases))


def create_overlay(store: SnapshotStore, disk_id: DiskId, disk_gib: int) -> None:
    disk_layers.create_layer(store.disks / disk_layers.disk_file(disk_id), disk_gib << 30, disk=store.disk)
    store.disk.sync_dir(store.disks)


def _device_fact(path: Path, disk: Disk = DISK) -> FileFact:
    disk.sync_file(path)
    data = path.read_bytes()
    return FileFact(path.name, len(data), disk_layers.digest_of(data))


def _write_index(path: Path, index: PageIndex, disk: Disk) -> FileFact:
    data = index.to_bytes()
    create_file(path, data, mode=0o600, disk=disk)
    return FileFact(path.name, len(data), disk_layers.digest_of(data))


class _Exclusive:
    """One capture, commit or collapse of a run at a time."""

    def __init__(self, run: MachineRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        if self._run._busy:
            raise Conflict(f"Workspace {self._run.spec.workspace_id} is being captured already.")
        self._run._busy = True

    def __exit__(self, *_: object) -> None:
        self._run._busy = False


def mint_disk() -> DiskId:
    return DiskId(mint("dsk", now_ms=now_ms()))


def mint_segment() -> SegmentId:
    return SegmentId(mint("seg", now_ms=now_ms()))


def mint_base() -> BaseId:
    return BaseId(mint("bas", now_ms=now_ms()))


def now_ms() -> int:
    """For ids only, which sort by creation."""
    return time.time_ns() // 1_000_000
