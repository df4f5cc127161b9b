"""The commands of ``model.Workspaces``: each finds the workspace, queues a job with its owner, and waits for the outcome.

Neighbours: ``operations`` and ``losses`` do the work inside an owner, ``upkeep`` runs what happens by itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from perdure.access.limits import Ask
from perdure.core import logs, tracing
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import (
    AlreadyExists,
    Busy,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PerdureError,
    StaleGeneration,
    Unavailable,
)
from perdure.core.ids import TenantId, WorkspaceId, check_name
from perdure.core.paging import WHOLE, Page
from perdure.core.stop import StopReport
from perdure.journal.entries import Journal
from perdure.wire.node import MachineSize
from perdure.workspaces import checks
from perdure.workspaces.branches import Branches
from perdure.workspaces.homes import Homes
from perdure.workspaces.integrity import Integrity
from perdure.workspaces.keeping import Keeping
from perdure.workspaces.lifecycle import RECOVERABLE, Event
from perdure.workspaces.model import (
    ANY,
    AsleepAction,
    Awake,
    Configuration,
    Context,
    CreateWorkspace,
    JournalEntry,
    Metered,
    Recovery,
    ResumeReport,
    ShreddedTenant,
    Snapshot,
    SnapshotPlace,
    SnapshotReason,
    TreeNode,
    Verified,
    Verifying,
    Wanted,
    Workspace,
    WorkspaceKind,
    WorkspaceState,
)
from perdure.workspaces.owner import CALLERS_LIMIT, Owner
from perdure.workspaces.rows import Record
from perdure.workspaces.shutdown import StopOrder
from perdure.workspaces.store import Change, NewWorkspace
from perdure.workspaces.tools import Tools
from perdure.workspaces.upkeep import Upkeep


class WorkspaceService:
    """Implements ``model.Workspaces``. ``start`` before use, ``shutdown`` after."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._store = tools.store
        self._journal = Journal(tools.store.database)
        self._upkeep = Upkeep(tools)
        self._operations = self._upkeep.operations
        self._losses = self._upkeep.losses
        self._branches = Branches(tools, self._upkeep)
        self._integrity = Integrity(tools)
        self._keeping = Keeping(tools, self._upkeep)
        self._homes = Homes(tools)
        self._node = tools.placement.place(MachineSize(0, 0))

    async def start(self) -> None:
        """Repair what an earlier process left, then begin to watch over what is awake."""
        await self._upkeep.start()

    async def shutdown(self, order: StopOrder) -> StopReport:
        """Hibernate everything that is awake; returns what became of it. Who was given up is repaired at the next start."""
        return await self._upkeep.shutdown(order)

    @property
    def upkeep(self) -> Upkeep:
        """What runs by itself; tests drive it by hand."""
        return self._upkeep

    # ------------------------------------------------------------------------------------------------------------------ create

    async def create(self, ctx: Context, spec: CreateWorkspace) -> tuple[Workspace, ResumeReport]:
        self._upkeep.check_open()
        check_name(spec.name)
        image = await self._tools.images.find(spec.image)
        self._upkeep.check_open()  # again: nobody would put to sleep what begins once the server has begun to stop
        new = self._new_workspace(ctx, spec, image)
        checks.check_new(new, image)
        if new.asleep_action is AsleepAction.ARCHIVE:
            self._upkeep.uploads.home()
        self._tools.check_egress(new.egress_allow)
        plan = self._operations.plan_new(new.disk_gib, image.disk_gib)
        owner = self._upkeep.newborn(new.id)

        async def job() -> Record:
            try:
                ask = Ask(workspaces=1, memory_mib=new.memory_mib)
                async with self._store.quotas.admitted(ctx.tenant_id, ask) as tx:
                    record = await self._store.insert(new, {"image": image.name, "by": ctx.principal}, tx)
                crashpoint(CrashPoint.CREATE_RECORDED)
                return await self._operations.start(owner, record, plan)
            finally:
                owner.is_newborn = False

        try:
            record = await owner.run(job)
        except AlreadyExists:
            if (made := await self._made_by(ctx, spec)) is None:
                raise
            return await self.wake(ctx, made.id)
        return record.workspace, _reported(record)

    async def _made_by(self, ctx: Context, spec: CreateWorkspace) -> Record | None:
        """What this request has made before: its caller has not seen the answer. Raises Conflict when it asks for another one."""
        made = None if spec.request_key is None else await self._store.by_request(ctx.tenant_id, spec.request_key)
        if made is not None and made.workspace.name != spec.name:
            raise Conflict(
                f"The request of this key has made {made.workspace.name!r}, not {spec.name!r}.",
                hint="Give each request a key of its own.",
            )
        return made

    def _new_workspace(self, ctx: Context, spec: CreateWorkspace, image: checks.ImageFacts) -> NewWorkspace:
        settings = self._tools.settings
        idle_s, interval_s = spec.idle_timeout_s, spec.checkpoint_interval_s
        memory_mib = image.default_size.memory_mib if spec.memory_mib is None else spec.memory_mib
        vcpus = image.default_size.vcpus if spec.vcpus is None else spec.vcpus
        return NewWorkspace(
            id=self._tools.mint_workspace(),
            tenant_id=ctx.tenant_id,
            name=spec.name,
            kind=WorkspaceKind.WORKSPACE,
            node_id=self._tools.placement.place(image.default_size).node_id,
            image=image.digest,
            image_name=image.name,
            memory_mib=memory_mib,
            vcpus=vcpus,
            disk_gib=image.disk_gib if spec.disk_gib is None else spec.disk_gib,
            hostname=spec.name,
            machine_id=secrets.token_hex(16),
            idle_timeout_s=settings.idle_timeout_s if idle_s is None else idle_s,
            checkpoint_interval_s=settings.checkpoint_interval_s if interval_s is None else interval_s,
            keep_snapshots=spec.keep_snapshots,
            asleep_after_days=spec.asleep_after_days,
            asleep_action=spec.asleep_action,
            egress_allow=tuple(dict.fromkeys((*image.egress_allow, *spec.egress_allow))),
            environment={**image.environment, **spec.environment},
            metadata=spec.metadata,
            request_key=spec.request_key,
        )

    # ------------------------------------------------------------------------------------------------------------------- reads

    async def get(self, ctx: Context, ref: str) -> Workspace:
        return self._upkeep.shown(await self._find(ctx, ref))

    async def find(self, ctx: Context, wanted: Wanted = ANY, page: Page = WHOLE) -> list[Workspace]:
        return [self._upkeep.shown(record) for record in await self._store.find(ctx.tenant_id, wanted, page)]

    async def meters(self, ctx: Context) -> list[Metered]:
        return self._upkeep.meters(ctx.tenant_id)

    async def snapshots(self, ctx: Context, ref: str) -> list[Snapshot]:
        found = await self._store.snapshots((await self._find(ctx, ref)).id)
        return [self._upkeep.uploads.shown(snapshot) for snapshot in found]

    async def verify(
        self, ctx: Context, ref: str | None, *, snapshot: str | None = None, trial: bool = False
    ) -> AsyncGenerator[Verifying | Verified, None]:
        if ref is None and snapshot is not None:
            raise InvalidRequest(f"Snapshot {snapshot!r} of which workspace?", hint="Name the workspace too.")
        records = [await self._find(ctx, ref)] if ref is not None else await self._store.find(ctx.tenant_id)
        async with aclosing(self._integrity.verify(records, snapshot, trial=trial)) as events:
            async for event in events:
                shown = self._upkeep.uploads.shown(event.snapshot)
                yield replace(event, snapshot=shown) if isinstance(event, Verified) else event

    async def report(self, ctx: Context, ref: str) -> ResumeReport | None:
        return (await self._find(ctx, ref)).report

    async def log(self, ctx: Context, ref: str, *, after_seq: int = 0, limit: int = 1000) -> list[JournalEntry]:
        # What was done to a tenant as a whole is under its own id. A deleted workspace's thread can still be read, by its id.
        is_tenant = ref == ctx.tenant_id
        thread = WorkspaceId(ref) if is_tenant else (await self._store.by_ref(ctx.tenant_id, ref)).id
        entries = await self._journal.read(ctx.tenant_id, thread, after_seq=after_seq, limit=limit)
        return [JournalEntry(entry.seq, entry.at, entry.kind, entry.generation, entry.body, entry.hash) for entry in entries]

    async def _find(self, ctx: Context, ref: str) -> Record:
        record = await self._store.by_ref(ctx.tenant_id, ref)
        if record.state is WorkspaceState.DELETED:
            raise NotFound(f"Workspace {record.workspace.name!r} is deleted.")
        logs.note(workspace=record.id, generation=record.generation)
        return record

    async def _find_here(self, ctx: Context, ref: str) -> Record:
        """For what needs its node: a workspace whose node is gone moves to this one."""
        return await self._homes.here(await self._find(ctx, ref), self._node)

    # -------------------------------------------------------------------------------------------------------------------- wake

    async def wake(self, ctx: Context, ref: str, *, deadline_s: float | None = None) -> tuple[Workspace, ResumeReport]:
        record = await self._find_here(ctx, ref)
        async with self._within(record, deadline_s):
            record, _ = await self._awake(ctx, self._upkeep.owner(record.id), record)
        return self._upkeep.shown(record), _reported(record)

    @asynccontextmanager
    async def awake(self, ctx: Context, ref: str, *, deadline_s: float | None = None) -> AsyncIterator[Awake]:
        record = await self._find_here(ctx, ref)
        owner = self._upkeep.owner(record.id)
        owner.hold()  # before it is awake, so that no idle timer comes between
        try:
            async with self._within(record, deadline_s):
                awake = await self._reach(ctx, owner, record)
            yield awake
        finally:
            owner.release()

    async def _reach(self, ctx: Context, owner: Owner, seen: Record) -> Awake:
        """The guest of the awake workspace. One that went to sleep or was lost between its wake and our turn is woken again."""
        report: ResumeReport | None = None
        while True:
            record, woken = await self._awake(ctx, owner, seen)
            report = woken or report
            with suppress(NotFound, StaleGeneration):
                return Awake(record.workspace, self._tools.node(record).guest(record.id, record.generation), report)
            await self._upkeep.repair(owner)
            seen = await self._find(ctx, record.id)

    @asynccontextmanager
    async def _within(self, seen: Record, deadline_s: float | None) -> AsyncIterator[None]:
        """A caller's patience; what it waits for goes on without it."""
        limit_s = self._tools.settings.wake_deadline_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"Workspace {seen.workspace.name!r} was not awake after {limit_s:g} seconds; it goes on waking.",
                hint="Try again.",
            ) from None

    async def _awake(self, ctx: Context, owner: Owner, seen: Record) -> tuple[Record, ResumeReport | None]:
        """The awake workspace; the report too when this call waited for its wake. One wake serves all callers, and its entry in
        the thread names the first."""
        self._upkeep.check_open()
        if owner.live is not None:
            return owner.live.record, None
        if owner.callers >= CALLERS_LIMIT:
            raise Busy(f"Too many callers wait for this workspace to wake (limit {CALLERS_LIMIT}).")
        owner.callers += 1
        try:
            with tracing.span("workspace.await", perdure__workspace=owner.id):
                if owner.waking is None:  # a wake is a part of what the first caller waits for
                    owner.waking = asyncio.create_task(
                        owner.run(partial(self._wake_job, owner, seen, ctx.principal), urgent=True)
                    )
                    owner.waking.add_done_callback(partial(_woken, owner))
                record = await asyncio.shield(owner.waking)
        finally:
            owner.callers -= 1
        logs.note(generation=record.generation)
        return record, record.report

    async def _wake_job(self, owner: Owner, seen: Record, by: str) -> Record:
        if owner.live is not None:
            return owner.live.record
        change = Change(body={"by": by})
        if seen.state is WorkspaceState.HIBERNATED:
            try:
                return await self._operations.wake(owner, seen, Event.WAKE, await self._operations.plan_wake(seen), change)
            except StaleGeneration:
                pass  # it moved on between the caller's read and our turn: look again
        at = await self._upkeep.current(owner)
        if owner.live is not None:
            return owner.live.record
        if at.state is WorkspaceState.FAILED:
            raise await self._integrity.failure(at)
        return await self._operations.wake(owner, at, Event.WAKE, await self._operations.plan_wake(at), change)

    # ---------------------------------------------------------------------------------------------------------------- captures

    async def sleep(self, ctx: Context, ref: str) -> tuple[Workspace, Snapshot]:
        record = await self._find_here(ctx, ref)
        owner = self._upkeep.owner(record.id)
        record, snapshot = await owner.run(partial(self._sleep_job, owner, ctx.principal))
        self._upkeep.clean_soon()
        return record.workspace, snapshot

    async def _sleep_job(self, owner: Owner, by: str) -> tuple[Record, Snapshot]:
        at = await self._upkeep.current(owner)
        head = at.workspace.head_snapshot_id
        if at.state is WorkspaceState.HIBERNATED and head is not None:
            return at, await self._store.snapshot(at, head)
        return await self._operations.hibernate(owner, at, f"requested by {by}")

    async def checkpoint(self, ctx: Context, ref: str, *, name: str | None = None) -> Snapshot:
        if name is not None:
            checks.check_snapshot_name(name)
        await self._store.quotas.check(ctx.tenant_id, Ask())
        async with self.awake(ctx, ref) as awake:
            owner = self._upkeep.owner(awake.workspace.id)
            snapshot = await owner.run(partial(self._checkpoint_job, owner, name, ctx.principal))
        self._upkeep.clean_soon()
        return snapshot

    async def _checkpoint_job(self, owner: Owner, name: str | None, by: str) -> Snapshot:
        at = await self._upkeep.current(owner)
        if owner.live is None:
            raise Unavailable(f"Workspace {at.workspace.name!r} went to sleep before its turn came.", hint="Try again.")
        _, snapshot = await self._operations.checkpoint(owner, at, SnapshotReason.REQUESTED, name, by)
        return snapshot

    # ---------------------------------------------------------------------------------------------------------------- branches

    async def fork(
        self, ctx: Context, ref: str, count: int, *, snapshot: str | None = None, names: tuple[str, ...] = ()
    ) -> list[Workspace | PerdureError]:
        self._upkeep.check_open()
        checks.check_fork(count, names)
        return await self._branches.fork(ctx, await self._find_here(ctx, ref), count, snapshot, names)

    async def rewind(self, ctx: Context, ref: str, snapshot: str) -> tuple[Workspace, ResumeReport]:
        self._upkeep.check_open()
        record = await self._branches.rewind(ctx, await self._find_here(ctx, ref), snapshot)
        return record.workspace, _reported(record)

    async def promote(self, ctx: Context, ref: str) -> tuple[Workspace, ResumeReport]:
        self._upkeep.check_open()
        record = await self._branches.promote(ctx, await self._find_here(ctx, ref))
        return record.workspace, _reported(record)

    async def discard(self, ctx: Context, ref: str) -> None:
        await self._branches.discard(ctx, await self._store.by_ref(ctx.tenant_id, ref))

    async def tree(self, ctx: Context, ref: str) -> list[TreeNode]:
        return await self._branches.tree(await self._store.by_ref(ctx.tenant_id, ref))

    # ----------------------------------------------------------------------------------------------------------------- keeping

    async def lineage(self, ctx: Context, ref: str, page: Page = WHOLE) -> list[SnapshotPlace]:
        places = await self._keeping.lineage(await self._find(ctx, ref), page)
        return [replace(place, snapshot=self._upkeep.uploads.shown(place.snapshot)) for place in places]

    async def configure(self, ctx: Context, ref: str, change: Configuration) -> Workspace:
        return await self._keeping.configure(ctx, await self._find(ctx, ref), change)

    async def name_snapshot(self, ctx: Context, ref: str, snapshot: str, name: str | None) -> Snapshot:
        return await self._keeping.name_snapshot(ctx, await self._find(ctx, ref), snapshot, name)

    async def push_snapshot(self, ctx: Context, ref: str, snapshot: str | None, *, deadline_s: float | None = None) -> Snapshot:
        at = await self._find(ctx, ref)
        wanted = snapshot or at.workspace.head_snapshot_id
        if wanted is None:
            raise Conflict(f"Workspace {at.workspace.name!r} has no snapshot yet.", hint="Put it to sleep, or take a checkpoint.")
        found = await self._store.snapshot(at, wanted)
        limit_s = self._tools.settings.wake_deadline_s if deadline_s is None else deadline_s
        await self._upkeep.uploads.push(found, limit_s)
        return await self._store.snapshot(at, found.id)

    async def remove_snapshot(self, ctx: Context, ref: str, snapshot: str) -> Snapshot:
        return await self._keeping.remove_snapshot(ctx, await self._find(ctx, ref), snapshot)

    # ------------------------------------------------------------------------------------------------------------------ others

    async def resize(self, ctx: Context, ref: str, disk_gib: int) -> Workspace:
        checks.check_disk(disk_gib)
        record = await self._find(ctx, ref)
        owner = self._upkeep.owner(record.id)

        async def job() -> Record:
            at = await self._upkeep.current(owner)
            resized = await self._store.resize(at, disk_gib, ctx.principal)
            if resized is None:
                raise InvalidRequest(
                    f"The disk of {at.workspace.name!r} has {at.workspace.disk_gib} GiB and can only grow.",
                    hint=f"Ask for {at.workspace.disk_gib} GiB or more; a smaller one needs a new workspace.",
                )
            if owner.live is not None:
                owner.live.record = resized
            return resized

        return (await owner.run(job)).workspace

    async def recover(self, ctx: Context, ref: str, how: Recovery) -> tuple[Workspace, ResumeReport]:
        self._upkeep.check_open()
        record = await self._find_here(ctx, ref)
        owner = self._upkeep.owner(record.id)
        record = await owner.run(partial(self._recover_job, owner, how, ctx.principal))
        return record.workspace, _reported(record)

    async def _recover_job(self, owner: Owner, how: Recovery, by: str) -> Record:
        at = await self._upkeep.current(owner)
        if at.state not in RECOVERABLE:
            raise Conflict(
                f"Workspace {at.workspace.name!r} is {at.state.value}: only a failed or sleeping one can be recovered.",
                hint="Put it to sleep first.",
            )
        # Nothing of the failed machine may be left: its newer disk is kept as a branch before another machine starts.
        at = await self._losses.settle(owner, at, Event.SALVAGED, at.workspace.state_detail)
        if how is Recovery.REWIND:
            return await self._branches.recover_before(owner, at, by)
        if how is Recovery.RETRY:
            plan = await self._operations.plan_wake(at)
        else:
            plan = await self._operations.plan_disk_boot(at, "requested", checked=how is Recovery.DISK_BOOT)
        return await self._operations.wake(owner, at, Event.RECOVER, plan, Change(body={"how": how.value, "by": by}))

    def running_execs(self, tenant_id: TenantId) -> int:
        return self._upkeep.running_execs(tenant_id)

    async def keep_awake(self, ctx: Context, ref: str, seconds: float) -> Workspace:
        checks.check_keep_awake(seconds)
        record = await self._find(ctx, ref)
        owner = self._upkeep.owner(record.id)

        async def job() -> Record:
            at = await self._store.keep_awake(await self._upkeep.current(owner), seconds, ctx.principal)
            owner.keep_awake(at, seconds)
            return at

        return self._upkeep.shown(await owner.run(job))

    async def wake_at(self, ctx: Context, ref: str, when: datetime | timedelta | None) -> Workspace:
        return self._upkeep.shown(await self._upkeep.alarms.set(ctx, await self._find(ctx, ref), when))

    async def delete(self, ctx: Context, ref: str) -> None:
        record = await self._store.by_ref(ctx.tenant_id, ref)
        owner = self._upkeep.owner(record.id)
        await owner.run(partial(self._upkeep.delete_job, owner, f"requested by {ctx.principal}"), urgent=True)
        self._upkeep.clean_soon()

    # ------------------------------------------------------------------------------------------------------------------ tenants

    async def shred_tenant(self, ctx: Context, tenant_id: TenantId, *, with_workspaces: bool = False) -> ShreddedTenant:
        self._upkeep.check_open()
        done = await self._upkeep.shredding.shred(ctx, tenant_id, with_workspaces=with_workspaces)
        self._upkeep.clean_soon()
        return done


def _woken(owner: Owner, task: asyncio.Task[Record]) -> None:
    owner.waking = None
    if not task.cancelled():
        task.exception()  # every caller may have gone; asyncio must not complain that nobody read it


def _reported(record: Record) -> ResumeReport:
    assert record.report is not None, "a workspace that has been awake has a report"
    return record.report
