"""A complete ``Workspaces`` in memory, and ``Services`` around it: the API is tested against them without node or database."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from perdure.access.model import Access
from perdure.api.services import Services
from perdure.core import ids
from perdure.core.clock import SystemClock
from perdure.core.config import Settings
from perdure.core.errors import (
    AlreadyExists,
    Conflict,
    InvalidRequest,
    NotFound,
    PerdureError,
    Unavailable,
)
from perdure.core.ids import WorkspaceId
from perdure.core.paging import WHOLE, Page, Place
from perdure.gateway.addresses import IPAddress
from perdure.gateway.egress import Dialer
from perdure.gateway.ingress import GuestPorts
from perdure.wire import node
from perdure.wire.node import Confinement, Isolation, MachineSize, MemoryFate
from perdure.workspaces import checks
from perdure.workspaces.model import (
    ANY,
    Awake,
    Context,
    CreateWorkspace,
    DiskFate,
    Idleness,
    JournalEntry,
    Metered,
    Recovery,
    ResumeReport,
    Snapshot,
    SnapshotReason,
    TreeNode,
    Wanted,
    Workspace,
    WorkspaceKind,
    WorkspaceState,
)
from tests.fakes.access import FakeAccess
from tests.fakes.audit import FakeAudit
from tests.fakes.backups import FakeBackups
from tests.fakes.doctor import doctor
from tests.fakes.events import FakeFeed, FakeWebhooks
from tests.fakes.exec_keys import fake_keyed_execs
from tests.fakes.histories import FakeHistories
from tests.fakes.images import IMAGE, FakeImages
from tests.fakes.memory_executions import MemoryExecutions
from tests.fakes.memory_guest import MOMENT, MemoryGuest, World
from tests.fakes.metering import FakeMetering, no_gauges
from tests.fakes.quotas import FakeQuotas
from tests.fakes.shares import FakeShares
from tests.fakes.snapshots import FakeSnapshots
from tests.fakes.tenants import FakeTenants
from tests.fakes.timers import FakeTimers

CONFINEMENT = Confinement(Isolation.VM_EMULATED, True, True, True, True, True, True, False, {"readonly_base": "QEMU before 8.2"})
KEY = "pdk_test-key"
IDLE = Idleness(180.0, (), 720.0)  # of every one that is awake


def _is_wanted(row: Workspace, wanted: Wanted) -> bool:
    return (
        (not wanted.states or row.state in wanted.states)
        and all(row.metadata.get(key) == value for key, value in wanted.metadata.items())
        and wanted.image in {None, row.image, row.image_name}
        and row.name.startswith(wanted.name_prefix or "")
    )


class FakeWorkspaces(FakeSnapshots, FakeTenants, FakeTimers):
    """Commands of ``workspaces.model.Workspaces`` over worlds in memory. ``wakes`` counts wakes per name."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds: dict[WorkspaceId, World] = {}
        self.guests: dict[WorkspaceId, MemoryGuest] = {}
        self.journal: dict[WorkspaceId, list[JournalEntry]] = {}
        self.reports: dict[WorkspaceId, ResumeReport] = {}
        self.held: dict[WorkspaceId, int] = {}
        self.readings: dict[str, node.Reading] = {}  # by name
        self.wakes: dict[str, int] = {}
        self.requests: dict[str, str] = {}  # key of the request -> name of what it has made
        self.calls: list[Context] = []
        self.fail_fork: set[str] = set()
        self.refuse: PerdureError | None = None  # raised by the next create
        self.hold: asyncio.Event | None = None  # what a wake waits for, or a create before it is refused or when it is accepted
        self.lookups = 0
        self._count = 0

    def _mint(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}_{self._count:026d}"

    def find_row(self, ref: str) -> Workspace:
        for row in self.rows.values():
            if ref in {row.id, row.name}:
                return row
        raise NotFound(f"There is no workspace {ref!r}.", hint="List them with 'perdure ls'.")

    def world(self, ref: str) -> World:
        return self.worlds[self.find_row(ref).id]

    def _note(self, row: Workspace, kind: str, **body: Any) -> None:
        entries = self.journal.setdefault(row.id, [])
        digest = hashlib.sha256((entries[-1].hash if entries else "" + kind).encode()).hexdigest()
        entries.append(JournalEntry(len(entries) + 1, MOMENT, kind, row.generation, body, digest))

    def _put(self, row: Workspace, **changes: Any) -> Workspace:
        self.rows[row.id] = replace(row, **changes)
        return self.rows[row.id]

    def _start(self, row: Workspace, memory: MemoryFate, **report: Any) -> tuple[Workspace, ResumeReport]:
        changes = {"state": WorkspaceState.RUNNING, "fetching": None, "idleness": IDLE, "confinement": CONFINEMENT}
        row = self._put(row, **changes, generation=row.generation + 1)
        self.guests[row.id] = MemoryGuest(self.worlds[row.id], row.generation)
        self.reports[row.id] = ResumeReport(
            workspace_id=row.id,
            generation=row.generation,
            snapshot_id=row.head_snapshot_id,
            memory=memory,
            disk=DiskFate.NEW if memory is MemoryFate.NEW else DiskFate.KEPT,
            connections_dropped=0,
            execs_running=(),
            execs_lost=(),
            confinement=CONFINEMENT,
            pooled=True,
            timings_ms={"running": 31.0},
            at=MOMENT,
            **{"memory_reason": "", "asleep_s": 0.0, "clock_step_s": 0.0, "lost_branch": None, **report},
        )
        self.wakes[row.name] = self.wakes.get(row.name, 0) + 1
        self._note(row, "awake", memory=memory.value)
        return row, self.reports[row.id]

    async def create(self, ctx: Context, spec: CreateWorkspace) -> tuple[Workspace, ResumeReport]:
        self.calls.append(ctx)
        ids.check_name(spec.name)
        if self.refuse:
            await self._held_up()
            error, self.refuse = self.refuse, None
            raise error
        if spec.image != "base":
            raise NotFound(f"There is no image {spec.image!r}.", hint="Images: base.")
        if any(row.name == spec.name for row in self.rows.values()):
            if spec.request_key is not None and self.requests.get(spec.request_key) == spec.name:
                return await self.wake(ctx, spec.name)
            raise AlreadyExists(f"A workspace named {spec.name!r} exists already.", hint="Choose another name.")
        checks.check_long_sleep(spec.asleep_after_days, spec.asleep_action)
        if spec.memory_mib is not None and spec.memory_mib < 256:
            raise InvalidRequest(f"{spec.memory_mib} MiB are too little for the image 'base'.", hint="It needs 256 MiB.")
        row = self._row(WorkspaceId(self._mint("ws")), spec)
        self.rows[row.id] = row
        self.requests[spec.request_key or ""] = spec.name
        self.worlds[row.id] = World()
        self.worlds[row.id].environment = dict(spec.environment)
        await self._held_up()
        return self._start(row, MemoryFate.NEW)

    async def _held_up(self) -> None:
        if self.hold is not None:
            await self.hold.wait()

    def _row(self, workspace_id: WorkspaceId, spec: CreateWorkspace) -> Workspace:
        return Workspace(
            id=workspace_id,
            tenant_id=ids.DEFAULT_TENANT,
            name=spec.name,
            kind=WorkspaceKind.WORKSPACE,
            state=WorkspaceState.CREATING,
            state_detail="",
            generation=0,
            image=IMAGE.digest,
            image_name=spec.image,
            size=MachineSize(spec.memory_mib or 512, spec.vcpus or 1),
            disk_gib=spec.disk_gib or 8,
            head_snapshot_id=None,
            parent_id=None,
            forked_from=None,
            hostname=spec.name,
            machine_id="0" * 32,
            idle_timeout_s=900.0 if spec.idle_timeout_s is None else spec.idle_timeout_s,
            checkpoint_interval_s=60.0 if spec.checkpoint_interval_s is None else spec.checkpoint_interval_s,
            keep_snapshots=spec.keep_snapshots,
            asleep_after_days=spec.asleep_after_days,
            asleep_action=spec.asleep_action,
            egress_allow=spec.egress_allow,
            environment=spec.environment,
            metadata=spec.metadata,
            confinement=None,
            keep_awake_until=None,
            created_at=MOMENT,
            state_changed_at=MOMENT,
            last_active_at=MOMENT,
            expires_at=None,
        )

    async def get(self, ctx: Context, ref: str) -> Workspace:
        self.lookups += 1
        return self.find_row(ref)

    async def find(self, ctx: Context, wanted: Wanted = ANY, page: Page = WHOLE) -> list[Workspace]:
        found = [row for row in self.rows.values() if _is_wanted(row, wanted) and page.holds(Place(row.created_at, row.id))]
        return sorted(found, key=lambda row: (row.created_at, row.id))[: page.sought]

    async def meters(self, ctx: Context) -> list[Metered]:
        awake = sorted((row for row in self.rows.values() if row.id in self.guests), key=lambda row: row.name)
        return [Metered(row, self.readings.get(row.name, node.Reading(0.0, 0, 0, "fake"))) for row in awake]

    async def wake(self, ctx: Context, ref: str, *, deadline_s: float | None = None) -> tuple[Workspace, ResumeReport]:
        row = self.find_row(ref)
        if row.state is WorkspaceState.FAILED:
            raise Unavailable(f"The workspace {row.name!r} has failed.", hint="Recover it with 'perdure recover'.")
        if row.state is WorkspaceState.RUNNING:
            return row, self.reports[row.id]
        await self._held_up()
        return self._start(row, MemoryFate.KEPT, asleep_s=3600.0)

    async def sleep(self, ctx: Context, ref: str) -> tuple[Workspace, Snapshot]:
        row = self.find_row(ref)
        if row.state is WorkspaceState.HIBERNATED:
            return row, self.history[row.id][-1]
        snapshot = self._snapshot(row, SnapshotReason.HIBERNATE, None)
        self.guests.pop(row.id).broken.set()
        row = self._put(row, state=WorkspaceState.HIBERNATED, head_snapshot_id=snapshot.id, idleness=None)
        self._note(row, "hibernated", snapshot=snapshot.id)
        return row, snapshot

    async def fork(
        self, ctx: Context, ref: str, count: int, *, snapshot: str | None = None, names: tuple[str, ...] = ()
    ) -> list[Workspace | PerdureError]:
        parent = self.find_row(ref)
        source = self._snapshot(parent, SnapshotReason.FORK, None)
        made: list[Workspace | PerdureError] = []
        for index in range(count):
            name = names[index] if names else f"{parent.name}-{index + 1}"
            if name in self.fail_fork:
                made.append(Unavailable(f"The branch {name!r} could not be started."))
                continue
            child_id = WorkspaceId(self._mint("ws"))
            self.worlds[child_id] = World()
            self.worlds[child_id].files = copy.deepcopy(self.worlds[parent.id].files)
            self.worlds[child_id].python = self.worlds[parent.id].python.fork()
            row = replace(parent, id=child_id, name=name, kind=WorkspaceKind.BRANCH, parent_id=parent.id, forked_from=source.id)
            self.rows[child_id] = row
            made.append(self._start(row, MemoryFate.KEPT)[0])
            await self.guests[child_id].begin_program()
        return made

    async def rewind(self, ctx: Context, ref: str, snapshot: str) -> tuple[Workspace, ResumeReport]:
        row = self.find_row(ref)
        target = next((one for one in self.history.get(row.id, []) if snapshot in {one.id, one.name}), None)
        if target is None:
            raise NotFound(
                f"Workspace {row.name!r} has no snapshot {snapshot!r}.", hint="'perdure snapshot ls' shows those it has."
            )
        kept = self._keep(row)
        row = self._put(row, head_snapshot_id=target.id)
        return self._start(row, MemoryFate.KEPT, kept_branch=kept, memory_reason=f"rewound: on request, to snapshot {snapshot}")

    def _keep(self, row: Workspace) -> str:
        """What a workspace is now, as a sleeping branch."""
        child_id, name = WorkspaceId(self._mint("ws")), f"{row.name}@before-{self._count}"
        fields = {"kind": WorkspaceKind.BRANCH, "parent_id": row.id, "state": WorkspaceState.HIBERNATED}
        self.rows[child_id] = replace(row, id=child_id, name=name, forked_from=row.head_snapshot_id, **fields)
        self.worlds[child_id] = World()
        self.worlds[child_id].files = copy.deepcopy(self.worlds[row.id].files)
        return name

    async def promote(self, ctx: Context, ref: str) -> tuple[Workspace, ResumeReport]:
        branch = self.find_row(ref)
        if branch.kind is WorkspaceKind.WORKSPACE or branch.parent_id is None:
            raise Conflict(f"{branch.name!r} is a workspace, not a branch: there is nothing to promote it into.", hint="Fork it.")
        parent = self.rows[branch.parent_id]
        kept = self._keep(parent)
        self.worlds[parent.id].files = self.worlds[branch.id].files
        await self.delete(ctx, branch.id)
        return self._start(
            parent, MemoryFate.KEPT, kept_branch=kept, memory_reason=f"rewound: to what branch {branch.name} became"
        )

    async def discard(self, ctx: Context, ref: str) -> None:
        row = self.find_row(ref)
        if row.kind is WorkspaceKind.WORKSPACE:
            raise Conflict(f"{row.name!r} is a workspace, not a branch.", hint="'perdure rm NAME' deletes a workspace.")
        await self.delete(ctx, ref)

    async def tree(self, ctx: Context, ref: str) -> list[TreeNode]:
        at = self.find_row(ref)
        while at.parent_id in self.rows:
            at = self.rows[at.parent_id]

        def below(row: Workspace, depth: int) -> list[TreeNode]:
            made = [TreeNode(row, depth, None, MOMENT if row.forked_from else None, 3 << 20, 7 << 20)]
            return made + [node for one in self.rows.values() if one.parent_id == row.id for node in below(one, depth + 1)]

        return below(at, 0)

    async def resize(self, ctx: Context, ref: str, disk_gib: int) -> Workspace:
        row = self.find_row(ref)
        if disk_gib < row.disk_gib:
            raise InvalidRequest("A disk can only grow.", hint=f"Give at least {row.disk_gib} GiB.")
        return self._put(row, disk_gib=disk_gib)

    async def recover(self, ctx: Context, ref: str, how: Recovery) -> tuple[Workspace, ResumeReport]:
        fate = MemoryFate.LOST if how in (Recovery.DISK_BOOT, Recovery.DAMAGED_DISK) else MemoryFate.KEPT
        return self._start(self.find_row(ref), fate, memory_reason="requested" if fate is MemoryFate.LOST else "")

    async def delete(self, ctx: Context, ref: str) -> None:
        row = self.find_row(ref)
        if guest := self.guests.pop(row.id, None):
            guest.broken.set()
        self.worlds.pop(row.id).end()
        del self.rows[row.id]

    async def report(self, ctx: Context, ref: str) -> ResumeReport | None:
        return self.reports.get(self.find_row(ref).id)

    async def log(self, ctx: Context, ref: str, *, after_seq: int = 0, limit: int = 1000) -> list[JournalEntry]:
        at = WorkspaceId(ref) if ref in self.journal else self.find_row(ref).id  # a deleted one's too, by its id
        return [one for one in self.journal[at] if one.seq > after_seq][:limit]

    @asynccontextmanager
    async def awake(self, ctx: Context, ref: str, *, deadline_s: float | None = None) -> AsyncIterator[Awake]:
        slept = self.find_row(ref).state is WorkspaceState.HIBERNATED
        row, report = await self.wake(ctx, ref)
        self.held[row.id] = self.held.get(row.id, 0) + 1
        try:
            yield Awake(row, self.guests[row.id], report if slept else None)
        finally:
            self.held[row.id] -= 1


def fake_services(settings: Settings, access: Access | None = None) -> tuple[Services, FakeWorkspaces]:
    """Services whose operator's key is ``KEY``."""
    workspaces, keyed = FakeWorkspaces(), fake_keyed_execs()
    dialer, metering = Dialer(resolver=_nobody), FakeMetering(lambda: workspaces.rows)
    clock = SystemClock()
    rest = (access or FakeAccess(KEY), settings, clock, GuestPorts(), FakeShares(lambda: workspaces.rows, clock), no_gauges)
    records = (FakeQuotas(lambda: workspaces.rows), FakeAudit(), FakeFeed(), FakeWebhooks(), MemoryExecutions())
    parts = (workspaces, keyed, FakeImages(), FakeBackups(), metering, doctor, dialer.foresee)
    return Services(*parts, *rest, *records, CONFINEMENT, FakeHistories()), workspaces


async def _nobody(_name: str) -> list[IPAddress]:
    return []
