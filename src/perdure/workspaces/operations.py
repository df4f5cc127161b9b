"""What is done to one workspace, step by step: start, capture, settle after a loss, free.

Every operation runs in its workspace's owner, records its intent before it asks the node, and commits the outcome after. A crash
between the two leaves a state that ``Reconciler`` takes further. Neighbours: ``store`` (the database), ``wire.node`` (the node).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from perdure.access.limits import Ask
from perdure.core import metrics
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import (
    CorruptData,
    HostUnfit,
    InvalidRequest,
    MachineDied,
    MachineFailed,
    NotFound,
    PerdureError,
    StaleGeneration,
    Unavailable,
)
from perdure.core.ids import SnapshotId
from perdure.core.metrics import Stopwatch
from perdure.wire.node import (
    CaptureMode,
    CaptureSpec,
    Fetched,
    FromDisk,
    FromGolden,
    FromSnapshot,
    Identity,
    StartReport,
    StartSource,
    StartSpec,
    Told,
)
from perdure.workspaces.facts import RECOVERED, RESTORED
from perdure.workspaces.homes import NODE_GONE, Homes
from perdure.workspaces.integrity import Integrity
from perdure.workspaces.lifecycle import WITH_MACHINE, Event
from perdure.workspaces.losses import Losses, commit_capture
from perdure.workspaces.measured import measured, started
from perdure.workspaces.model import DiskFate, ResumeReport, Snapshot, SnapshotReason, WorkspaceKind, WorkspaceState
from perdure.workspaces.observe import idled, spent, unused_s
from perdure.workspaces.owner import Owner
from perdure.workspaces.rows import Point, Record
from perdure.workspaces.store import Change
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)

START_LIMIT_S = 900.0  # a size without a golden snapshot boots once and is captured, under emulation, on a loaded host


@dataclass(frozen=True, slots=True)
class Plan:
    """One start, and what its report will say beside what the node finds out."""

    source: StartSource
    disk_gib: int
    new_identity: bool
    disk: DiskFate = DiskFate.KEPT
    memory_lost: str = ""  # reason, when the source holds no memory of this workspace at all
    asleep_s: float = 0.0
    take_over_generation: int | None = None


class Operations:
    def __init__(self, tools: Tools, losses: Losses) -> None:
        self._tools = tools
        self._store = tools.store
        self._losses = losses
        self._integrity = Integrity(tools)
        self._homes = Homes(tools)
        self._starts = asyncio.Semaphore(tools.settings.parallel_starts)

    # ----------------------------------------------------------------------------------------------------------------- starts

    async def plan_wake(self, at: Record, point: Point | None = None) -> Plan:
        """How a sleeping workspace starts again: from its head, or from ``point``."""
        workspace = at.workspace
        asleep_s = await self._asleep_s(at)
        is_rewound = at.lost_branch or point is not None or at.rewound.startswith((NODE_GONE, RESTORED, RECOVERED))
        disk = DiskFate.REWOUND if is_rewound else DiskFate.KEPT
        point = point or at.head
        if point is None:
            image = await self._tools.images.find(workspace.image)
            plan = self.plan_new(workspace.disk_gib, image.disk_gib)
            lost = "lost before its first snapshot" if at.report is not None else ""
            fate = DiskFate.REWOUND if lost else DiskFate.NEW
            return replace(plan, disk=fate, memory_lost=lost, asleep_s=asleep_s)
        foreign = _is_foreign(at, point)
        if point.has_memory and (point.quiesced or not foreign):
            return Plan(FromSnapshot(point.id), point.disk_gib, foreign, disk=disk, asleep_s=asleep_s)
        reason = "not-quiesced" if point.has_memory else "no-memory-in-snapshot"
        return Plan(FromDisk(point.id, reason), workspace.disk_gib, foreign, disk=disk, asleep_s=asleep_s)

    async def plan_disk_boot(self, at: Record, reason: str, *, checked: bool = True) -> Plan:
        """A cold boot of the head's disk; the wanted disk size takes effect. Not ``checked``, damage does not stop it."""
        point = at.head
        disk = DiskFate.REWOUND if at.lost_branch else DiskFate.KEPT
        foreign = point is None or _is_foreign(at, point)
        source = FromDisk(point.id if point else None, reason if checked else f"{reason}; its disk was not checked", checked)
        return Plan(source, at.workspace.disk_gib, foreign, disk=disk, asleep_s=await self._asleep_s(at))

    async def _asleep_s(self, at: Record) -> float:
        """Since it stopped being awake. What failed since then has changed its state again, and only its thread knows how long
        ago that was; it is not read for a wake after a sleep without mishap."""
        since, report = at.workspace.state_changed_at, at.report
        has_tried = report is None or report.generation != at.generation or at.state is WorkspaceState.FAILED
        if has_tried and at.state is not WorkspaceState.CREATING:
            since = await self._store.asleep_since(at)
        return max(0.0, (at.now - since).total_seconds())

    async def wake(self, owner: Owner, at: Record, event: Event, plan: Plan, change: Change | None = None) -> Record:
        """hibernated or failed → waking (a new generation) → running."""
        if event is Event.GUEST_REBOOTED:  # it has its memory
            at = await self._store.move(at, event, change)
        else:
            async with self._store.quotas.admitted(at.workspace.tenant_id, to_wake(at)) as tx:
                at = await self._store.move(at, event, change, tx)
        crashpoint(CrashPoint.WAKE_RECORDED)
        return await self.start(owner, at, plan)

    async def reboot(self, owner: Owner, at: Record) -> Record:
        """The guest rebooted: a supervised disk boot of the overlay it was writing, at a new generation."""
        owner.live = None
        plan = await self.plan_disk_boot(at, "guest-reboot")
        plan = replace(plan, new_identity=False, disk=DiskFate.KEPT, asleep_s=0.0, take_over_generation=at.generation)
        change = Change(body={"reason": "guest-reboot", **spent(self._tools, at)})
        return await self.wake(owner, at, Event.GUEST_REBOOTED, plan, change)

    @staticmethod
    def plan_new(disk_gib: int, image_disk_gib: int) -> Plan:
        """A new workspace: the golden snapshot, or a first boot where the disk is larger than the golden one knows."""
        source = FromGolden() if disk_gib == image_disk_gib else FromDisk(None, "disk-size")
        return Plan(source, disk_gib, new_identity=True, disk=DiskFate.NEW)

    async def start(self, owner: Owner, at: Record, plan: Plan) -> Record:
        """creating or waking → running. On failure the workspace is back where it can be woken from, or ``failed`` with exits,
        and the node's error is raised."""
        is_new, watch = at.state is WorkspaceState.CREATING, Stopwatch()
        with measured("create" if is_new else "wake", at):
            record, report = await self._start(owner, at, plan)
        started(report, watch.seconds, is_new=is_new)
        return record

    async def _start(self, owner: Owner, at: Record, plan: Plan) -> tuple[Record, ResumeReport]:
        owner.starting = at
        try:
            fetched, facts = await self._start_on_node(at, plan)
        except TimeoutError:
            await self._not_started(owner, at, plan, MachineFailed(f"The machine was not up after {START_LIMIT_S:.0f} seconds."))
        except PerdureError as error:
            await self._not_started(owner, at, plan, error)
        finally:
            owner.starting = None
        crashpoint(CrashPoint.START_REPORTED)
        report = _resume_report(at, plan, facts, fetched)
        try:
            record = await self._store.started(at, report)
        except StaleGeneration:
            # Somebody else moved the row on while we started: this machine has no right to exist.
            with suppress(StaleGeneration, NotFound):
                await self._tools.node(at).stop(at.id, at.generation)
            raise
        crashpoint(CrashPoint.START_COMMITTED)
        owner.woke(record)
        return record, report

    async def _start_on_node(self, at: Record, plan: Plan) -> tuple[Fetched, StartReport]:
        """With its snapshot fetched before, where it is not there, and once more when it turns out not to be whole. A fetch takes
        as long as it takes, and no other start waits for it."""
        source = None if isinstance(plan.source, FromGolden) else plan.source.snapshot_id
        fetched = await self._homes.bring(at, source)
        try:
            return fetched, await self._limited(at, plan, fetched)
        except (CorruptData, NotFound) as error:
            if fetched.is_fetched or plan.take_over_generation is not None:
                raise
            fetched = await self._homes.mend(at, source, error)
        return fetched, await self._limited(at, plan, fetched)

    async def _limited(self, at: Record, plan: Plan, fetched: Fetched) -> StartReport:
        async with self._starts, asyncio.timeout(START_LIMIT_S):
            return await self._tools.node(at).start(_start_spec(at, plan, fetched))

    async def _not_started(self, owner: Owner, at: Record, plan: Plan, error: PerdureError) -> None:
        """Record what a failed start means, then raise its error."""
        if plan.take_over_generation is None and not isinstance(plan.source, FromGolden):
            error = await self._integrity.offer(at, plan.source.snapshot_id, error)
        if at.state is WorkspaceState.CREATING:
            refused = isinstance(error, (Unavailable, HostUnfit, InvalidRequest))
            event = Event.START_REFUSED if refused else Event.START_FAILED
            await self._losses.free(owner, at, event, Change(detail=f"It was not created: {error.message}"))
        elif plan.take_over_generation is not None or isinstance(error, MachineDied):
            await self._losses.settle(owner, at, Event.MACHINE_LOST, f"Lost while it started: {error.message}")
        elif isinstance(error, (Unavailable, HostUnfit)):
            await self._store.move(at, Event.START_REFUSED, Change(detail=error.message))
        else:
            await self._losses.settle(owner, at, Event.START_FAILED, _failed_detail(error))
        raise error

    # --------------------------------------------------------------------------------------------------------------- captures

    async def checkpoint(
        self, owner: Owner, at: Record, reason: SnapshotReason, name: str | None = None, by: str | None = None
    ) -> tuple[Record, Snapshot]:
        """A snapshot of a running workspace, which goes on."""
        with measured("checkpoint", at, metrics.CHECKPOINT_SECONDS):
            record, snapshot = await self._checkpoint(owner, at, reason, name, by)
        metrics.CHECKPOINT_PAUSE_SECONDS.observe(snapshot.pause_s)
        return record, snapshot

    async def _checkpoint(
        self, owner: Owner, at: Record, reason: SnapshotReason, name: str | None, by: str | None
    ) -> tuple[Record, Snapshot]:
        snapshot_id = self._tools.mint_snapshot()
        await self._store.intend(at, snapshot_id, reason, name)
        crashpoint(CrashPoint.CHECKPOINT_RECORDED)
        spec = CaptureSpec(at.id, at.generation, snapshot_id, CaptureMode.CHECKPOINT)
        try:
            facts = await self._tools.node(at).capture(spec)
        except PerdureError as error:
            if await self._is_alive(at):
                await self._store.forget(snapshot_id)
            else:
                await self._losses.settle(owner, at, Event.MACHINE_LOST, f"Lost during a checkpoint: {error.message}")
            raise
        crashpoint(CrashPoint.CAPTURE_REPORTED)
        record, snapshot = await commit_capture(self._tools, at, facts, Event.CHECKPOINTED, by=by)
        crashpoint(CrashPoint.CAPTURE_COMMITTED)
        owner.captured(record)
        return record, snapshot

    async def hibernate(
        self, owner: Owner, at: Record, cause: str, *, spare: SnapshotId | None = None
    ) -> tuple[Record, Snapshot]:
        """running → hibernating → hibernated. Retention leaves ``spare`` alone this time."""
        with measured("hibernate", at, metrics.HIBERNATE_SECONDS):
            return await self._hibernate(owner, at, cause, spare)

    async def _hibernate(self, owner: Owner, at: Record, cause: str, spare: SnapshotId | None) -> tuple[Record, Snapshot]:
        snapshot_id = self._tools.mint_snapshot()
        idle_s = unused_s(self._tools, owner)
        was, owner.live = owner.live, None  # from here on a caller queues for the next wake
        try:
            async with self._store.database.transaction() as tx:
                await self._store.intend_in(tx, at, snapshot_id, SnapshotReason.HIBERNATE, None)
                body = {"cause": cause, "snapshot_id": snapshot_id, **idled(at, idle_s), **spent(self._tools, at)}
                change = Change(unused_s=idle_s, body=body)
                going = await self._store.move(at, Event.HIBERNATE, change, tx)
        except PerdureError as error:
            if not error.ambiguous:
                owner.live = was
            raise
        crashpoint(CrashPoint.HIBERNATE_RECORDED)
        spec = CaptureSpec(at.id, at.generation, snapshot_id, CaptureMode.HIBERNATE)
        try:
            facts = await self._tools.node(at).capture(spec)
        except PerdureError as error:
            if await self._is_alive(at):
                record = await self._store.move(going, Event.CAPTURE_FAILED, Change(body={"error": error.message}))
                await self._store.forget(snapshot_id)
                if was is not None:
                    was.record = record
                    owner.live = was
                raise
            record = await self._losses.settle(owner, going, Event.MACHINE_LOST, f"Lost going to sleep: {error.message}")
            if record.workspace.head_snapshot_id != snapshot_id:
                raise
            return record, await self._store.snapshot(record, snapshot_id)
        crashpoint(CrashPoint.CAPTURE_REPORTED)
        captured = await commit_capture(self._tools, going, facts, Event.CAPTURED, spare)
        crashpoint(CrashPoint.CAPTURE_COMMITTED)
        return captured

    async def _is_alive(self, at: Record) -> bool:
        """Whether the node still runs this generation."""
        try:
            await self._tools.node(at).usage(at.id, at.generation)
        except PerdureError:
            return False
        return True


def to_wake(at: Record) -> Ask:
    """What a wake adds to what its tenant has: memory, unless it is awake already, and the place of one that had failed."""
    workspace = at.workspace
    has_place = at.state is not WorkspaceState.FAILED or workspace.kind is WorkspaceKind.LOST
    return Ask(workspaces=int(not has_place), memory_mib=0 if at.state in WITH_MACHINE else workspace.size.memory_mib)


def _is_foreign(at: Record, point: Point) -> bool:
    """Whether what lies there carries somebody else's machine-id and host keys, because another workspace ran when it was taken.
    Its memory is used only if programs stood still: else they would go on as the other one before they can be told."""
    return point.origin_id != at.id or point.id == at.workspace.forked_from


def _failed_detail(error: PerdureError) -> str:
    ancestor = error.details.get("ancestor")
    return error.message + (f" The newest intact snapshot before it is {ancestor}." if ancestor else "")


def _start_spec(at: Record, plan: Plan, fetched: Fetched) -> StartSpec:
    workspace = at.workspace
    return StartSpec(
        identity=Identity(at.id, workspace.tenant_id, at.generation, workspace.hostname, workspace.machine_id),
        image=workspace.image,
        size=workspace.size,
        disk_gib=plan.disk_gib,
        source=plan.source,
        egress_allow=workspace.egress_allow,
        environment=workspace.environment,
        new_identity=plan.new_identity,
        take_over_generation=plan.take_over_generation,
        told=_told(at, plan, fetched),
    )


def _told(at: Record, plan: Plan, fetched: Fetched) -> Told:
    """The report's facts that are known before the start, as the workspace reads them in its resume.json."""
    report = _known(at, plan, fetched)
    wake_at = None if at.alarm is None else in_utc(at.alarm)
    return Told({**report, "disk": plan.disk.value, "at": in_utc(at.now), "wake_at": wake_at}, plan.memory_lost, at.rewound)


def in_utc(moment: datetime) -> str:
    """As programs and entries read it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def late_s(at: Record) -> float:
    """How long ago it was to wake by itself; 0 when it was not."""
    return 0.0 if at.alarm is None else (at.now - at.alarm).total_seconds()


def _known(at: Record, plan: Plan, fetched: Fetched) -> dict[str, Any]:
    source = plan.source
    return {
        "workspace_id": at.id,
        "generation": at.generation,
        "snapshot_id": None if isinstance(source, FromGolden) else source.snapshot_id,
        "asleep_s": plan.asleep_s,
        "lost_branch": at.lost_branch,
        "kept_branch": at.kept_branch,
        "restored_from": "store" if fetched.is_fetched else "node",
        "fetched_bytes": fetched.snapshot_bytes,
        "wake_at": at.alarm,
        "late_s": late_s(at),
    }


def _resume_report(at: Record, plan: Plan, facts: StartReport, fetched: Fetched) -> ResumeReport:
    memory, reason = _told(at, plan, fetched).memory(facts.memory, facts.memory_reason)
    return ResumeReport(
        **_known(at, plan, fetched),
        memory=memory,
        memory_reason=reason,
        disk=plan.disk,
        clock_step_s=facts.clock_step_s,
        connections_dropped=facts.connections_dropped,
        execs_running=facts.execs_running,
        execs_lost=facts.execs_lost,
        confinement=facts.confinement,
        pooled=facts.pooled,
        timings_ms=facts.timings_ms,
        at=at.now,
        problems=facts.problems,
        hooks=facts.hooks,
    )
