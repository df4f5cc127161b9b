"""Branches: fork, rewind, promote, discard, and the tree of what came from what.

A rewind, a recovery to an earlier snapshot and a promotion give a workspace another state to go on from. What it was until
then is never thrown away: it is captured if it was awake, and becomes a sleeping branch, in the same transaction that moves the
head. A promotion needs the turns of two workspaces; it takes them one after the other, never one inside the other, and its
transaction names both generations.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from perdure.access.limits import Ask
from perdure.core import metrics
from perdure.core.crashpoints import CrashPoint, crashpoint
from perdure.core.errors import Conflict, NotFound, PerdureError, StaleGeneration
from perdure.core.ids import SnapshotId, WorkspaceId, check_name
from perdure.db.database import Transaction
from perdure.workspaces import checks
from perdure.workspaces.integrity import Ancestor, Integrity
from perdure.workspaces.lifecycle import RECOVERABLE, WITH_MACHINE, Event
from perdure.workspaces.measured import measured
from perdure.workspaces.model import (
    Context,
    Recovery,
    Snapshot,
    SnapshotReason,
    TreeNode,
    Workspace,
    WorkspaceKind,
    WorkspaceState,
)
from perdure.workspaces.operations import Plan, to_wake
from perdure.workspaces.owner import Owner
from perdure.workspaces.rows import Point, Record
from perdure.workspaces.store import Change, NewWorkspace
from perdure.workspaces.tools import Tools
from perdure.workspaces.upkeep import Upkeep

BRANCHES = frozenset({WorkspaceKind.BRANCH, WorkspaceKind.LOST})


class Branches:
    def __init__(self, tools: Tools, upkeep: Upkeep) -> None:
        self._tools = tools
        self._store = tools.store
        self._upkeep = upkeep
        self._operations = upkeep.operations
        self._integrity = Integrity(tools)

    # -------------------------------------------------------------------------------------------------------------------- fork

    async def fork(
        self, ctx: Context, record: Record, count: int, ref: str | None, names: tuple[str, ...]
    ) -> list[Workspace | PerdureError]:
        """See ``model.Workspaces.fork``."""
        with measured("fork", record, metrics.FORK_SECONDS):
            return await self._fork(ctx, record, count, ref, names)

    async def _fork(
        self, ctx: Context, record: Record, count: int, ref: str | None, names: tuple[str, ...]
    ) -> list[Workspace | PerdureError]:
        owner = self._upkeep.owner(record.id)
        await self._store.quotas.check(ctx.tenant_id, _to_fork(record, count))  # before it is paused for a snapshot
        starts = await owner.run(partial(self._branch_job, owner, ctx, count, ref, names))
        started = await asyncio.gather(*map(asyncio.shield, starts), return_exceptions=True)
        self._upkeep.clean_soon()
        outcomes: list[Workspace | PerdureError] = []
        for outcome in started:
            if isinstance(outcome, BaseException) and not isinstance(outcome, PerdureError):
                raise outcome
            outcomes.append(outcome.workspace if isinstance(outcome, Record) else outcome)
        return outcomes

    async def _branch_job(
        self, owner: Owner, ctx: Context, count: int, ref: str | None, names: tuple[str, ...]
    ) -> list[asyncio.Task[Record]]:
        """Choose or make the snapshot, insert the children and set off their starts, in one turn of the parent: no retention
        comes between, and a caller that goes away leaves no child behind."""
        at, snapshot = await self._fork_point(owner, ref)
        if snapshot.has_memory and not snapshot.quiesced:
            raise Conflict(
                f"Snapshot {snapshot.id} was taken while programs were still moving; it can wake its own workspace only.",
                hint="Fork again without naming a snapshot: a new checkpoint is taken.",
            )
        wanted = names or await self._branch_names(at, count)
        branches = [self._branch(at, snapshot, name) for name in wanted]
        owners = [self._upkeep.newborn(branch.id) for branch in branches]
        crashpoint(CrashPoint.FORK_CAPTURED)
        try:
            async with self._store.database.transaction() as tx:
                await self._store.quotas.admit(tx, ctx.tenant_id, _to_fork(at, count))
                await self._store.hold(tx, snapshot.id)
                for branch in branches:
                    await self._store.insert(branch, {"by": ctx.principal}, tx)
                body = {"snapshot_id": snapshot.id, "branches": list(wanted), "by": ctx.principal}
                await self._store.note(tx, at, "forked", body)
        except PerdureError:
            for newborn in owners:
                newborn.is_newborn = False
            raise
        crashpoint(CrashPoint.FORK_RECORDED)
        return [self._upkeep.spawn(self._start_child(newborn)) for newborn in owners]

    async def _fork_point(self, owner: Owner, ref: str | None) -> tuple[Record, Snapshot]:
        at = await self._upkeep.current(owner)
        if ref is not None:
            return at, await self._store.snapshot(at, ref)
        if owner.live is not None:
            at, snapshot = await self._operations.checkpoint(owner, at, SnapshotReason.FORK)
            if not snapshot.quiesced:  # one program was in a long system call: it seldom is twice
                at, snapshot = await self._operations.checkpoint(owner, at, SnapshotReason.FORK)
            return at, snapshot
        head = at.workspace.head_snapshot_id
        if head is None or at.state in WITH_MACHINE:
            raise Conflict(f"Workspace {at.workspace.name!r} has no snapshot to fork from.", hint="Wake it first, then fork it.")
        return at, await self._store.snapshot(at, head)

    async def _branch_names(self, at: Record, count: int) -> tuple[str, ...]:
        base = at.workspace.name.split("@")[0][: checks.BRANCH_BASE_LENGTH].rstrip("-")
        taken = await self._store.names_like(at.workspace.tenant_id, f"{base}-")
        free = (name for number in range(1, len(taken) + count + 1) if (name := f"{base}-{number}") not in taken)
        return tuple(next(free) for _ in range(count))

    def _branch(self, at: Record, snapshot: Snapshot, name: str) -> NewWorkspace:
        return NewWorkspace.child(at, snapshot.id, self._tools.mint_workspace(), name=check_name(name), hostname=name)

    async def _start_child(self, owner: Owner) -> Record:
        async def job() -> Record:
            try:
                at = await self._store.by_id(owner.id)
                return await self._operations.start(owner, at, await self._operations.plan_wake(at))
            finally:
                owner.is_newborn = False

        return await owner.run(job)

    # ------------------------------------------------------------------------------------------------------------------ rewind

    async def rewind(self, ctx: Context, record: Record, ref: str) -> Record:
        """See ``model.Workspaces.rewind``."""
        owner = self._upkeep.owner(record.id)
        record = await owner.run(partial(self._rewind_job, owner, ctx, ref))
        self._upkeep.clean_soon()
        return record

    async def _rewind_job(self, owner: Owner, ctx: Context, ref: str) -> Record:
        at = await self._upkeep.current(owner)
        target = await self._store.point(at, ref)
        self._check_memory(at, target)
        _check_can_move(at, "rewound")
        await self._integrity.check(at, target.id)  # whole, before anything is given up for it
        await self._store.quotas.check(ctx.tenant_id, self._to_rewind(at, target))
        at = await self._put_down(owner, at, f"rewind to {ref}, requested by {ctx.principal}", target.id)
        crashpoint(CrashPoint.REWIND_ASLEEP)
        plan = await self._operations.plan_wake(at, None if target.id == at.workspace.head_snapshot_id else target)
        change = Change(rewound=f"on request, to snapshot {ref}", body={"by": ctx.principal})
        at, kept = await self._set_back(at, target, self._to_rewind(at, target), Event.REWIND, change)
        crashpoint(CrashPoint.REWIND_RECORDED)
        return await self._start(owner, at, plan, kept)

    async def recover_before(self, owner: Owner, at: Record, by: str) -> Record:
        """Wake one that sleeps or has failed from the newest intact snapshot that its head descends from. The head was
        acknowledged, and may well be whole (a restore can fail for other reasons), so it is kept as by a rewind."""
        head = at.workspace.head_snapshot_id
        found = await self._integrity.newest_intact(at, head) if head is not None else Ancestor(None, 0)
        point = found.point
        if point is None:
            lacks, damaged = ("no intact", f" ({found.damaged} are damaged)") if found.damaged else ("no", "")
            raise Conflict(
                f"Workspace {at.workspace.name!r} has {lacks} snapshot before its last one{damaged}.",
                hint="Retry, or boot its disk. (Automatic checkpoints go when a workspace falls asleep; others are kept.)",
            )
        plan = await self._operations.plan_wake(at, point)
        past = f", past {found.damaged} that are damaged" if found.damaged else ""
        body = {"how": Recovery.REWIND.value, "damaged": found.damaged, "by": by}
        change = Change(rewound=f"on request, to the snapshot before the last{past}", body=body)
        at, kept = await self._set_back(at, point, to_wake(at), Event.RECOVER, change)
        crashpoint(CrashPoint.WAKE_RECORDED)
        return await self._start(owner, at, plan, kept)

    async def _set_back(self, at: Record, to: Point, ask: Ask, event: Event, change: Change) -> tuple[Record, str | None]:
        """Move the head to an earlier snapshot. Returns the name of the branch that what it was is kept as, too."""
        async with self._store.database.transaction() as tx:
            await self._store.quotas.admit(tx, at.workspace.tenant_id, ask)
            await self._store.hold(tx, to.id)
            kept = await self._keep_head(tx, at, to.id)
            body = {**change.body, "snapshot_id": to.id, "kept_branch": kept}
            at = await self._store.move(at, event, replace(change, head=to.id, kept_branch=kept, body=body), tx)
        return at, kept

    async def _start(self, owner: Owner, at: Record, plan: Plan, kept: str | None) -> Record:
        """From the other state. If it does not come up, the error says where what it was is."""
        try:
            return await self._operations.start(owner, at, plan)
        except PerdureError as error:
            if kept is not None:
                error.hint += f" What {at.workspace.name!r} was is kept: 'perdure branch promote {kept}' goes back to it."
                error.hint = error.hint.strip()
            raise

    async def _put_down(self, owner: Owner, at: Record, cause: str, spare: SnapshotId | None = None) -> Record:
        """Asleep, with everything it was in its head; of a failed one, whose newer disk is kept first, what its head has."""
        if at.state is WorkspaceState.RUNNING:
            at, _ = await self._operations.hibernate(owner, at, cause, spare=spare)
            return at
        return await self._upkeep.losses.settle(owner, at, Event.SALVAGED, at.workspace.state_detail)

    async def _keep_head(self, tx: Transaction, at: Record, target: SnapshotId) -> str | None:
        """The head as a sleeping branch until that is discarded; returns its name. None, and nothing is left behind, when
        there is no head or it is where the workspace goes."""
        head = at.head
        if head is None or head.id == target:
            return None
        was = at.workspace
        base = f"{was.name.split('@')[0]}@before-{self._tools.clock.now():%Y%m%dt%H%M%Sz}"
        taken = await self._store.names_like(was.tenant_id, base)
        numbered = (base, *(f"{base}-{number}" for number in range(2, len(taken) + 2)))
        name = next(one for one in numbered if one not in taken)
        detail = f"What {was.name!r} was up to generation {at.generation}."
        if head.has_memory and not head.quiesced:
            detail += " Programs were moving when it was captured: promote it to have its memory; a wake here boots its disk."
        hostname = f"{was.hostname[:55]}-before"
        child = NewWorkspace.child(at, head.id, self._tools.mint_workspace(), name=name, hostname=hostname)
        new = replace(child, state=WorkspaceState.HIBERNATED, detail=detail)
        await self._store.insert(new, {"snapshot_id": head.id, "parent_id": at.id}, tx)
        return name

    @staticmethod
    def _to_rewind(at: Record, target: Point) -> Ask:
        """Besides its wake: a place for what it was, which becomes a branch."""
        ask = to_wake(at)
        keeps_head = at.state in WITH_MACHINE or (at.head is not None and at.head.id != target.id)
        return replace(ask, workspaces=ask.workspaces + int(keeps_head))

    @staticmethod
    def _check_memory(at: Record, point: Point) -> None:
        if point.has_memory and not point.quiesced and point.origin_id != at.id:
            raise Conflict(
                f"Snapshot {point.id} was taken while programs were still moving, in another workspace than "
                f"{at.workspace.name!r}; only that one can wake it.",
                hint="Wake that one, let its programs come to rest and put it to sleep again; or choose another snapshot.",
            )

    # ----------------------------------------------------------------------------------------------------------------- promote

    async def promote(self, ctx: Context, record: Record) -> Record:
        """See ``model.Workspaces.promote``."""
        parent = await self._parent(record)
        await self._store.quotas.check(ctx.tenant_id, Ask())  # above storage nothing is woken: before anything is put to sleep
        # A caller that goes away between the two turns must not leave it half way.
        promoted = await asyncio.shield(self._upkeep.spawn(self._promote(record, parent, ctx)))
        self._upkeep.clean_soon()
        return promoted

    async def _promote(self, record: Record, parent: Record, ctx: Context) -> Record:
        branch_owner, owner = self._upkeep.owner(record.id), self._upkeep.owner(parent.id)
        branch = await branch_owner.run(partial(self._ready_job, branch_owner, parent, ctx))
        crashpoint(CrashPoint.PROMOTE_ASLEEP)
        return await owner.run(partial(self._promote_job, owner, branch, ctx))

    async def _parent(self, record: Record) -> Record:
        name = record.workspace.name
        if record.workspace.kind not in BRANCHES or record.workspace.parent_id is None:
            raise Conflict(
                f"{name!r} is a workspace, not a branch: there is nothing to promote it into.",
                hint="'perdure branch ls NAME' shows the branches of a workspace.",
            )
        parent = await self._store.by_id(record.workspace.parent_id)
        if parent.state is WorkspaceState.DELETED:
            raise Conflict(
                f"The workspace that {name!r} was forked from ({parent.workspace.name!r}) is deleted.",
                hint=f"Go on with {name!r} itself: it is complete without it.",
            )
        return parent

    async def _ready_job(self, owner: Owner, parent: Record, ctx: Context) -> Record:
        """In the branch's turn: it sleeps, and its head can be its parent's."""
        at = await self._upkeep.current(owner)
        if at.state is WorkspaceState.RUNNING:
            cause = f"promoted into {parent.workspace.name}, requested by {ctx.principal}"
            at, _ = await self._operations.hibernate(owner, at, cause)
        if at.state is not WorkspaceState.HIBERNATED:
            raise Conflict(
                f"Branch {at.workspace.name!r} is {at.state.value}: only one that is awake or asleep can be promoted.",
                hint="Recover it first ('perdure recover'), or promote another.",
            )
        if at.head is None:
            raise Conflict(
                f"Branch {at.workspace.name!r} has no snapshot: there is nothing to promote.", hint="Wake it and try again."
            )
        self._check_memory(parent, at.head)
        return at

    async def _promote_job(self, owner: Owner, branch: Record, ctx: Context) -> Record:
        at = await self._upkeep.current(owner)
        head, name = branch.head, branch.workspace.name
        assert head is not None, "a branch that is ready has a head"
        _check_can_move(at, "given the state of a branch")
        await self._integrity.check(branch, head.id)  # whole, before anything is given up for it
        at = await self._put_down(owner, at, f"promotion of {name}, requested by {ctx.principal}")
        crashpoint(CrashPoint.PROMOTE_PARENT_ASLEEP)
        plan = await self._operations.plan_wake(at, head)
        plan = replace(plan, disk_gib=max(plan.disk_gib, head.disk_gib))
        async with self._store.database.transaction() as tx:
            await self._store.quotas.admit(tx, at.workspace.tenant_id, to_wake(at))
            await self._end_branch(tx, branch, at, ctx)
            await self._store.hold(tx, head.id)
            kept = await self._keep_head(tx, at, head.id)
            await self._store.hand_over(tx, branch.id, at.id)
            disk_gib = max(branch.workspace.disk_gib, head.disk_gib)
            if disk_gib > at.workspace.disk_gib:  # the branch's disk was grown; no disk boot may shrink it
                await self._store.resize(at, disk_gib, ctx.principal, tx)
            change = Change(
                head=head.id,
                kept_branch=kept,
                lost_branch="" if at.lost_branch == name else None,  # nobody need be told any more where to find it
                rewound=f"to what branch {name} became",
                body={"branch": name, "branch_id": branch.id, "snapshot_id": head.id, "kept_branch": kept, "by": ctx.principal},
            )
            at = await self._store.move(at, Event.PROMOTE, change, tx)
        crashpoint(CrashPoint.PROMOTE_RECORDED)
        return await self._start(owner, at, plan, kept)

    async def _end_branch(self, tx: Transaction, branch: Record, at: Record, ctx: Context) -> None:
        """Refused when the branch has moved since its turn: a call may have woken it."""
        name = at.workspace.name
        change = Change(detail=f"Promoted: it goes on as {name!r}.", body={"into": at.id, "by": ctx.principal})
        try:
            await self._store.move(branch, Event.PROMOTED, change, tx)
        except StaleGeneration as error:
            raise Conflict(
                f"Branch {branch.workspace.name!r} was used while it was being promoted into {name!r}; nothing was changed.",
                hint="Promote it again.",
            ) from error

    # ------------------------------------------------------------------------------------------------------- discard and tree

    async def discard(self, ctx: Context, record: Record) -> None:
        """See ``model.Workspaces.discard``."""
        if record.workspace.kind not in BRANCHES:
            raise Conflict(
                f"{record.workspace.name!r} is a workspace, not a branch.", hint="'perdure rm NAME' deletes a workspace."
            )
        owner = self._upkeep.owner(record.id)
        await owner.run(partial(self._upkeep.delete_job, owner, f"discarded by {ctx.principal}"), urgent=True)
        self._upkeep.clean_soon()

    async def tree(self, record: Record) -> list[TreeNode]:
        """See ``model.Workspaces.tree``."""
        nodes = await self._store.tree(record)
        carrying: set[WorkspaceId] = set()  # deleted ones that something living hangs on
        shown: list[TreeNode] = []
        for node in reversed(nodes):  # branches come before what they hang on
            workspace = node.workspace
            if workspace.state is WorkspaceState.DELETED and workspace.id not in carrying:
                continue
            if workspace.parent_id is not None:
                carrying.add(workspace.parent_id)
            shown.append(node)
        if not shown:
            raise NotFound(f"Workspace {record.workspace.name!r} is deleted, and so is all that came from it.")
        return shown[::-1]


def _to_fork(at: Record, count: int) -> Ask:
    return Ask(workspaces=count, memory_mib=count * at.workspace.size.memory_mib)


def _check_can_move(at: Record, done: str) -> None:
    if at.state is not WorkspaceState.RUNNING and at.state not in RECOVERABLE:
        raise Conflict(
            f"Workspace {at.workspace.name!r} is {at.state.value}: it cannot be {done} now.",
            hint="Wait until it is awake or asleep."
            if at.state is not WorkspaceState.DELETED
            else "It was deleted or promoted meanwhile: 'perdure branch ls NAME' shows what there is.",
        )
