"""The node: implements ``wire.node.Node`` over machines, snapshots and gateway. One resident per awake workspace.

What runs is in ``_residents``, what may run is in the store's live records; after a crash only the second is left, and ``open``
kills whatever an earlier process left running before it reads them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from perdure.core import logs, tracing
from perdure.core.clock import Clock
from perdure.core.config import Settings
from perdure.core.errors import Busy, Conflict, CorruptSnapshot, NotFound, PerdureError, StaleGeneration
from perdure.core.ids import NodeId, SnapshotId, WorkspaceId
from perdure.gateway.egress import EgressGateway
from perdure.gateway.ingress import GuestPorts
from perdure.gateway.rules import EgressRules
from perdure.gateway.selfservice import SelfService
from perdure.images.moving import ImageMover
from perdure.images.registry import ImageStore
from perdure.machines import qemu_leftovers
from perdure.machines.driver import Accelerator, Machine, MachineDriver, MachineState
from perdure.machines.guestlink_hooks import HookLimits
from perdure.machines.guestlink_stream import LinkStream
from perdure.node.compaction import Compaction
from perdure.node.goldens import Goldens, Origin
from perdure.node.pool import WarmPool
from perdure.node.resident import Resident
from perdure.node.secondhome import NodeSecondHome, ObjectParts, Starts
from perdure.node.shared import SharedFile, SharedFiles, below, private_base
from perdure.node.sinceboot import SinceBoot
from perdure.node.starting import PoolKey, Starter
from perdure.node.verifying import Verification
from perdure.snapshots.alive import is_alive
from perdure.snapshots.baseram import BaseRam
from perdure.snapshots.manifest import Manifest
from perdure.snapshots.objects.download import Downloader
from perdure.snapshots.objects.upload import Uploader
from perdure.snapshots.store import SnapshotStore
from perdure.snapshots.weight import weigh
from perdure.wire.node import (
    Activity,
    CaptureMode,
    CaptureSpec,
    Checking,
    FromGolden,
    FromSnapshot,
    Guest,
    Identity,
    Inventory,
    LiveMachine,
    MachineSize,
    NodeEvent,
    NodeEventKind,
    NodeUsage,
    Reading,
    SecondHome,
    SnapshotFacts,
    StartReport,
    StartSpec,
    StoredSizes,
    Verdict,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a node is made of; built by ``wiring`` or a test."""

    node_id: NodeId
    settings: Settings
    clock: Clock
    driver: MachineDriver
    accelerator: Accelerator
    images: ImageStore
    egress: EgressGateway
    selfservice: SelfService
    objects: ObjectParts | None = None
    ports: GuestPorts | None = None

    @property
    def run_root(self) -> Path:
        return self.settings.machines_dir


class NodeSupervisor:
    """``open`` before use, ``close`` after; a machine that still runs at ``close`` is killed and its live record kept."""

    def __init__(self, parts: NodeParts) -> None:
        self.node_id = parts.node_id
        self._parts = parts
        self._store = SnapshotStore(parts.settings.store)
        self._goldens = Goldens(parts.images, parts.driver, parts.accelerator, parts.run_root)
        self._pool: WarmPool[PoolKey] = WarmPool(self._prepare, parts.settings.pool_size)
        settings = parts.settings
        hooks = HookLimits(settings.hook_limit_s, settings.hooks_limit_s)
        self._starts = Starts()
        self._shared = SharedFiles(self._starts, self._retire_damaged, SinceBoot(parts.images.root / "since-boot.json"))
        self._starter = Starter(self._goldens, self._store, self._pool, self._shared, settings.unresponsive_s, hooks)
        self._compaction = Compaction(self._store, self._whole_base_of, settings.rebase_mib, self._rebased)
        self._verification = Verification(self._store, self._goldens, self._starter, parts.clock)
        self._home = None if parts.objects is None else self._second_home(parts.objects)
        self.second_home: SecondHome | None = self._home
        self._residents: dict[WorkspaceId, Resident] = {}
        self._starting: dict[WorkspaceId, Machine | None] = {}  # None before its guest can run
        self._frozen = False
        self._events: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self._streams: set[asyncio.Task[None]] = set()
        self._debris: tuple[str, ...] = ()
        self._counter = secrets.token_hex(8)  # of this process's counts of egress, which begin at 0 with it

    async def open(self) -> None:
        """Kill what an earlier process left, take the store. Raises Conflict when another process has it."""
        swept = await qemu_leftovers.sweep(self._parts.run_root)
        report = await asyncio.to_thread(self._store.open)
        images = await asyncio.to_thread(self._parts.images.sweep)
        self._debris = (*swept.killed, *report.debris, *images)
        if self._debris:
            log.info("removed what an earlier process left", things=len(self._debris))
        self._compaction.start()
        self._shared.start(lambda: below(self._store, self._parts.images, self._shared))

    async def close(self) -> None:
        await self._verification.close()
        await self._shared.close()
        await self._compaction.close()
        await self._pool.close()
        for resident in list(self._residents.values()):
            await self._forget(resident, keep_layers=True)
        for task in self._streams:
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        if self._home is not None:
            await self._home.close()
        await self._starter.warming.close()
        await asyncio.to_thread(self._store.close)

    @property
    def snapshot_store(self) -> SnapshotStore:
        """What is complete here, for a backup to read."""
        return self._store

    async def warm(self, image: str, size: MachineSize) -> None:
        """Fill the pool for what will probably be asked next."""
        origin = await self._origin(image, size)
        self._pool.refill(origin.key)
        self._starter.look_ahead(origin)

    async def retire(self, image: str) -> None:
        """An image is gone or another one has its name: no warm machine waits for it any more."""
        for key in self._goldens.forget(image):
            await self._pool.drop(key)

    async def _retire_damaged(self, file: SharedFile) -> None:
        """What waits in the pool has mapped the file, and would have it still when another is in its place."""
        for digest in self._goldens.lying_on(file.path):
            await self.retire(digest)

    async def _origin(self, image: str, size: MachineSize) -> Origin:
        """Where a start begins; warm machines of another VMM build or golden of the same image and size are dropped."""
        origin = await self._goldens.origin(image, size)
        for key in self._goldens.superseded(origin):
            await self._pool.drop(key)
        return origin

    def pids(self) -> list[int]:
        """VMM processes whose guest can run, awake or on its way there: what the freeze watchdog stops. Any thread may ask."""
        # The copies are each made in one step; to walk the tables themselves would fail when a workspace comes or goes.
        machines = [
            *(resident.machine for resident in list(self._residents.values())),
            *list(self._starting.values()),
            *list(self._verification.machines),
        ]
        return [machine.pid for machine in machines if machine is not None and machine.state is not MachineState.DEAD]

    def pool_pids(self) -> list[int]:
        return self._pool.pids()

    def lease_changed(self, frozen: bool) -> None:
        """The watchdog has stopped or continued every machine."""
        self._frozen = frozen
        kind = NodeEventKind.FROZEN if frozen else NodeEventKind.THAWED
        for resident in self._residents.values():
            (resident.freeze if frozen else resident.thaw)()
            self._events.put_nowait(NodeEvent(kind, resident.identity.workspace_id, resident.generation))

    # ------------------------------------------------------------------------------------------------------------- starts

    def _second_home(self, parts: ObjectParts) -> NodeSecondHome:
        def images(uploader: Uploader, downloader: Downloader) -> ImageMover:
            return ImageMover(self._parts.images, uploader, downloader)

        return NodeSecondHome(parts, self._store, images, self._goldens.ram_of, self._starts, self.retire)

    async def start(self, spec: StartSpec) -> StartReport:
        identity, source = spec.identity, None if isinstance(spec.source, FromGolden) else spec.source.snapshot_id
        told = {"perdure__workspace": identity.workspace_id, "perdure__generation": identity.generation}
        with self._starts.one(source), tracing.span("node.start", **told):
            return await self._start(spec)

    async def _start(self, spec: StartSpec) -> StartReport:
        workspace_id = spec.identity.workspace_id
        await self._make_way(spec)
        if workspace_id in self._starting:
            raise Conflict(f"Workspace {workspace_id} is being started already.")
        self._starting[workspace_id] = None
        is_fork, undone = False, None  # a snapshot that was to be compacted and sleeps on
        try:
            if isinstance(spec.source, FromSnapshot) and self._compaction.out_of_the_way(spec.source.snapshot_id):
                undone = spec.source.snapshot_id
                is_fork = self._store.manifest(undone).workspace_id != workspace_id
            origin = await self._origin(spec.image, spec.size)
            allowed = EgressRules.parse((*origin.image.egress_allow, *spec.egress_allow))
            parts, report = await self._starter.start(
                spec, self._serve_stream(spec.identity), lambda machine: self._register(spec.identity, allowed, machine)
            )
            undone = undone if is_fork else None
        except BaseException:
            await self._unregister(spec.identity)
            raise
        finally:
            del self._starting[workspace_id]
            if undone is not None:
                self._compaction.sleeps(undone)
        settings = self._parts.settings
        cache_max_bytes = settings.guest_cache_mib << 20 if settings.guest_cache_mib else None
        resident = Resident(parts, self._parts.clock, settings.unresponsive_s, self._events.put_nowait, cache_max_bytes)
        self._residents[workspace_id] = resident
        if self._frozen:
            resident.freeze()
        resident.watch()
        return report

    async def _make_way(self, spec: StartSpec) -> None:
        """Refuse a start of a generation that is not newer; a reboot takes over from a machine that is dead."""
        resident = self._residents.get(spec.identity.workspace_id)
        if resident is None:
            return
        if resident.generation >= spec.identity.generation:
            raise _stale(spec.identity.workspace_id, spec.identity.generation, resident.generation)
        if resident.generation != spec.take_over_generation:
            raise Conflict(
                f"Workspace {spec.identity.workspace_id} still runs generation {resident.generation} on this node.",
                hint="Stop it first.",
            )
        await self._forget(resident, keep_layers=True)

    async def _prepare(self, key: PoolKey) -> Machine:
        """Of the VMM that the key's golden is for: under its key nobody would look at which one it is."""
        origin = self._goldens.by_key(key)
        machine = await self._parts.driver.prepare(self._goldens.launch(origin, "warm"))
        try:
            if await self._parts.driver.identity(self._parts.accelerator) != origin.vmm:
                raise Busy("The virtual machine monitor was replaced while a machine was being started.")
        except BaseException:
            await machine.kill()
            raise
        return machine

    def _register(self, identity: Identity, rules: EgressRules, machine: Machine) -> None:
        self._starting[identity.workspace_id] = machine
        self._parts.egress.register(identity, rules)
        self._parts.selfservice.register(identity)

    async def _unregister(self, identity: Identity) -> None:
        await self._parts.egress.drop(identity.workspace_id, identity.generation)
        await self._parts.selfservice.drop(identity.workspace_id, identity.generation)

    def _serve_stream(self, identity: Identity) -> Any:
        """What the guest opens goes to the gateway, with the identity that the host knows."""

        def serve(kind: Literal["egress", "api"], info: dict[str, Any], stream: LinkStream) -> None:
            # Whatever woke the machine has nothing to do with what its programs ask for.
            facts = {"tenant": identity.tenant_id, "workspace": identity.workspace_id, "generation": identity.generation}
            with logs.exactly(facts):
                task = asyncio.create_task(self._serve_one(identity, kind, info, stream))
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)

        return serve

    async def _serve_one(self, identity: Identity, kind: str, info: dict[str, Any], stream: LinkStream) -> None:
        try:
            if kind == "egress":
                await self._parts.egress.serve(identity, info["host"], info["port"], stream)
            else:
                await self._parts.selfservice.serve(identity, await stream.accept())
        except PerdureError as error:  # the machine ended before the answer
            log.info("a guest's stream ended early", workspace=identity.workspace_id, kind=kind, reason=error.message)

    # ---------------------------------------------------------------------------------------------------- one workspace

    def _resident(self, workspace_id: WorkspaceId, generation: int) -> Resident:
        resident = self._residents.get(workspace_id)
        if resident is None:
            raise NotFound(f"Workspace {workspace_id} does not run on this node.")
        if resident.generation != generation:
            raise _stale(workspace_id, generation, resident.generation)
        return resident

    async def capture(self, spec: CaptureSpec) -> SnapshotFacts:
        resident = self._resident(spec.workspace_id, spec.generation)
        if spec.mode is CaptureMode.HIBERNATE and self._parts.ports is not None:
            await self._parts.ports.drop(spec.workspace_id, spec.generation)
        facts = await resident.capture(spec)
        self._starter.warming.captured(spec.workspace_id, facts.snapshot_id)
        if resident.is_ended:
            await self._forget(resident, keep_layers=False)
            self._compaction.sleeps(facts.snapshot_id)
        return facts

    async def stop(self, workspace_id: WorkspaceId, generation: int, *, keep_overlay: bool = False) -> None:
        resident = self._residents.get(workspace_id)
        if resident is not None:
            if resident.generation != generation:
                raise _stale(workspace_id, generation, resident.generation)
            await self._forget(resident, keep_layers=keep_overlay)
        elif not keep_overlay:
            await asyncio.to_thread(self._store.forget, workspace_id, generation)

    async def _forget(self, resident: Resident, *, keep_layers: bool) -> None:
        """End a resident and everything that is served in its name."""
        self._starter.warming.ended(resident.identity.workspace_id)
        await resident.stop(keep_layers=keep_layers)
        await self._unregister(resident.identity)
        if self._residents.get(resident.identity.workspace_id) is resident:
            del self._residents[resident.identity.workspace_id]

    async def salvage(self, workspace_id: WorkspaceId, generation: int, snapshot_id: SnapshotId) -> SnapshotFacts | None:
        resident = self._residents.get(workspace_id)
        if resident is not None and resident.machine.state is not MachineState.DEAD:
            raise Conflict(f"Workspace {workspace_id} still runs.", hint="Stop it first, keeping its overlay.")
        if resident is not None:
            await self._forget(resident, keep_layers=True)
        now = self._parts.clock.now()
        return await asyncio.to_thread(self._store.salvage, workspace_id, generation, snapshot_id, now)

    async def usage(self, workspace_id: WorkspaceId, generation: int) -> NodeUsage:
        return await self._resident(workspace_id, generation).usage()

    def reading(self, workspace_id: WorkspaceId, generation: int) -> Reading:
        resident = self._resident(workspace_id, generation)
        egress, moved = self._parts.egress.usage(workspace_id), resident.link.moved
        moved_bytes = (egress.sent_bytes, egress.received_bytes, self._counter, moved.inward, moved.outward)
        return Reading(resident.machine.cpu_s(), *moved_bytes)

    def activity(self, workspace_id: WorkspaceId, generation: int) -> Activity:
        resident = self._resident(workspace_id, generation)
        return resident.activity(self._parts.egress.open_streams(workspace_id, generation))

    def guest(self, workspace_id: WorkspaceId, generation: int) -> Guest:
        return self._resident(workspace_id, generation).link

    # ---------------------------------------------------------------------------------------------------------- snapshots

    async def snapshot(self, snapshot_id: SnapshotId) -> SnapshotFacts:
        base = await self._base_of(self._store.manifest(snapshot_id))
        return (await asyncio.to_thread(self._store.verify, snapshot_id, base)).facts()

    async def verify(
        self, snapshot_ids: tuple[SnapshotId, ...], *, trial: bool = False
    ) -> AsyncGenerator[Checking | Verdict, None]:
        async with aclosing(self._verification.run(snapshot_ids, trial=trial)) as events:
            async for event in events:
                yield event

    async def _base_of(self, manifest: Manifest) -> BaseRam | None:
        """The RAM that a snapshot's memory lies on; None for a disk-only one."""
        if manifest.memory is None or manifest.memory.base.golden is None:
            return await asyncio.to_thread(self._store.own_base, manifest)
        origin = await self._goldens.origin(manifest.image, manifest.size)
        return self._goldens.base(self._goldens.at(origin, manifest.memory.base.golden), manifest).ram

    async def _whole_base_of(self, manifest: Manifest) -> BaseRam | None:
        """The same for who writes the memory anew: over a damaged base that would spoil it, or look intact."""
        base = await self._base_of(manifest)
        if base is not None and manifest.private_base is None:
            await self._shared.whole(self._shared.of([base.path]))
        return base

    def _rebased(self, snapshot_id: SnapshotId) -> None:
        """Its next wake need not wait until somebody has read what was written a moment ago."""
        with suppress(NotFound, CorruptSnapshot):
            fact = self._store.manifest(snapshot_id).private_base
            if fact is not None:
                self._shared.written(private_base(self._store, fact))

    async def delete_snapshots(self, snapshot_ids: tuple[SnapshotId, ...]) -> int:
        return await asyncio.to_thread(self._store.delete, snapshot_ids)

    async def stored_sizes(self, snapshot_ids: tuple[SnapshotId, ...]) -> Mapping[SnapshotId, StoredSizes]:
        return await asyncio.to_thread(weigh, self._store, snapshot_ids)

    async def inventory(self) -> Inventory:
        snapshots = await asyncio.to_thread(self._store.complete)
        debris, self._debris = self._debris, ()
        machines = []
        for record in self._store.live():
            resident = self._residents.get(record.workspace_id)
            mine = resident is not None and resident.generation == record.generation
            alive = is_alive(record) and mine
            pid = resident.machine.pid if resident is not None and alive else None
            disk_id = record.layers[-1] if record.layers else None
            machines.append(LiveMachine(record.workspace_id, record.generation, alive, pid, disk_id))
        return Inventory(tuple(machines), snapshots, debris)

    async def events(self) -> AsyncIterator[NodeEvent]:
        while True:
            yield await self._events.get()


def _stale(workspace_id: WorkspaceId, asked: int, found: int) -> StaleGeneration:
    return StaleGeneration(f"Workspace {workspace_id} is at generation {found} on this node, not {asked}.")
