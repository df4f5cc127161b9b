"""What happens without anybody asking: idle timers, alarms, automatic checkpoints, node events, repair, cleaning, shutdown.

Also the registry of owners. Timers read the server's clock, ``tools.clock``; tests call ``tick`` and ``reconcile`` by hand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from perdure.core.errors import PerdureError, StaleGeneration, Unavailable
from perdure.core.ids import TenantId, WorkspaceId
from perdure.core.stop import StopReport
from perdure.wire.node import MachineSize, Node, NodeEvent, NodeEventKind
from perdure.workspaces import alarms, hibernation
from perdure.workspaces.aging import Aging
from perdure.workspaces.alarms import Alarms, Turns
from perdure.workspaces.hibernation import Decision, Said, Word
from perdure.workspaces.lifecycle import WITH_MACHINE, Event
from perdure.workspaces.losses import Losses
from perdure.workspaces.model import Metered, SnapshotReason, Workspace, WorkspaceState
from perdure.workspaces.observe import as_used, observe, policy_of, running_execs
from perdure.workspaces.operations import Operations
from perdure.workspaces.owner import Live, Owner
from perdure.workspaces.reconcile import Reconciler
from perdure.workspaces.room import Room
from perdure.workspaces.rows import Record
from perdure.workspaces.shredding import Shredding
from perdure.workspaces.shutdown import Shutdown, StopOrder
from perdure.workspaces.store import Change
from perdure.workspaces.tools import Tools
from perdure.workspaces.uploads import INTERVAL_S as UPLOADS_S
from perdure.workspaces.uploads import Uploads

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: What a workspace's agent program says of itself; None: there is none, or it does not say. May raise, or never answer.
AskProgram = Callable[[Record], Awaitable[Said | None]]

TICK_S = 1.0
#: How long a program may take to say that it is busy.
PING_S = 2.0
RECONCILE_S = 60.0

_NO_SPACE = "Paused: the disk of its node is full. It goes on as soon as there is room."


class Upkeep:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._store = tools.store
        self.losses = Losses(tools)
        self.operations = Operations(tools, self.losses)
        self.reconciler = Reconciler(tools, self.losses, self._in_owner, self._awake_generation)
        self._node: Node = tools.placement.place(MachineSize(0, 0))
        self._owners: dict[WorkspaceId, Owner] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._dirty = asyncio.Event()
        self.uploads = Uploads(tools, self._node, self._stored)
        self.room = Room(tools, self._node, self.owner)
        self.shredding = Shredding(tools, self._node, self._delete)
        self.alarms = Alarms(tools, self._node, self.operations, Turns(self.owner, self.current, self.check_open, self._spawn))
        self.aging = Aging(tools, self._node, self.losses, self.room, self.owner)
        self.ask_program: AskProgram = self._ping_program
        self._is_closing = False

    # ---------------------------------------------------------------------------------------------------------------- life

    async def start(self, *, timers: bool = True) -> None:
        """Repair, then watch. ``timers=False`` leaves ticking and cleaning to the caller."""
        await self.reconcile()
        await _logged(self.shredding.go_on())
        self._loops = [asyncio.create_task(self._consume_events(), name="node-events")]
        if timers:
            self._loops += [
                asyncio.create_task(self._every(TICK_S, self.tick, None), name="tick"),
                asyncio.create_task(self._every(RECONCILE_S, self.reconcile, None), name="reconcile"),
                asyncio.create_task(self._every(RECONCILE_S, self.clean, self._dirty), name="clean"),
                asyncio.create_task(self._every(alarms.POLL_S, self.alarms.look, self.alarms.due), name="alarms"),
            ]
            self._loops += self._store_loops()
            self.clean_soon()
            self.alarms.due.set()

    def _store_loops(self) -> list[asyncio.Task[None]]:
        """What happens where there is an object store."""
        if self._node.second_home is None:
            return []
        uploads = self._every(UPLOADS_S, self.uploads.begin, self.uploads.more)
        loops = [asyncio.create_task(uploads, name="uploads")]
        loops.append(asyncio.create_task(self._every(RECONCILE_S, self.shredding.go_on, None), name="shredding"))
        if self._tools.settings.store_collect_s > 0:
            every = self._every(self._tools.settings.store_collect_s, self.room.collect, None)
            loops.append(asyncio.create_task(every, name="collect"))
        return loops

    async def shutdown(self, order: StopOrder) -> StopReport:
        """Put everything to sleep, then stop; see ``Shutdown``."""
        self._is_closing = True
        timers, events = self._loops[1:], self._loops[:1]
        await _cancel(timers)
        self.alarms.stop()
        await self.uploads.close()
        stop = Shutdown(self._tools, self.operations, self.reconciler, self._owners.values, order)
        report = await stop.run(lambda: _logged(self.reconcile()))
        if not order.now.is_set():
            await _logged(self.clean())
        await _cancel([*events, *self._tasks])
        self.stop()
        return report

    def stop(self) -> None:
        """Drop everything at once, as a crash would."""
        self._is_closing = True
        for task in (*self._loops, *self._tasks):
            task.cancel()
        self.uploads.stop()
        self.alarms.stop()
        for owner in self._owners.values():
            owner.stop()

    async def drain(self) -> None:
        """Wait until nothing that ticks or events have set off is under way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def check_open(self) -> None:
        if self._is_closing:
            raise Unavailable("The server is shutting down.", hint="Try again when it is back; the workspace is safe.")

    # -------------------------------------------------------------------------------------------------------------- owners

    def owner(self, workspace_id: WorkspaceId) -> Owner:
        """The one owner of a workspace in this process."""
        owner = self._owners.get(workspace_id)
        if owner is None:
            owner = self._owners[workspace_id] = Owner(workspace_id, self._tools.clock, self._repair_soon)
        return owner

    @property
    def callers(self) -> int:
        """Calls that wait for a workspace to be awake."""
        return sum(owner.callers for owner in self._owners.values())

    def newborn(self, workspace_id: WorkspaceId) -> Owner:
        """The owner of a workspace whose row is about to be inserted: the reconciler leaves it to its creator."""
        owner = self.owner(workspace_id)
        owner.is_newborn = True
        return owner

    async def current(self, owner: Owner) -> Record:
        """Inside a job: the row as it is now. A state that this process did not put it into is repaired first."""
        at = await self._store.by_id(owner.id)
        live = owner.live
        if at.state is WorkspaceState.RUNNING and live is not None and live.generation == at.generation:
            live.record = at
            return at
        owner.live = None
        if at.state in WITH_MACHINE:
            at = await self.reconciler.workspace(owner, at)
        return at

    def shown(self, record: Record) -> Workspace:
        """The row as a caller sees it: with when it was last used, which for an awake one is only known here, and with how much
        of its snapshot has come from the object store."""
        workspace = as_used(self._tools, self._owners.get(record.id), record)
        home, head = self._node.second_home, workspace.head_snapshot_id
        coming = None if home is None or head is None else home.fetching(head)
        return workspace if coming is None else replace(workspace, fetching=coming)

    def running_execs(self, tenant_id: TenantId) -> int:
        """Commands that run in what a tenant has awake here, watched or not."""
        lives = [owner.live for owner in self._owners.values() if owner.live is not None]
        mine = [live.record for live in lives if live.record.workspace.tenant_id == tenant_id]
        return sum(running_execs(self._tools, at) for at in mine)

    def meters(self, tenant_id: TenantId) -> list[Metered]:
        """Of a tenant's that are awake, by name."""
        live = [owner.live.record for owner in self._owners.values() if owner.live is not None]
        ours = sorted((at for at in live if at.workspace.tenant_id == tenant_id), key=lambda at: at.workspace.name)
        found = []
        for at in ours:
            with suppress(PerdureError):  # its machine has just gone
                found.append(Metered(at.workspace, self._tools.node(at).reading(at.id, at.generation)))
        return found

    async def repair(self, owner: Owner) -> None:
        """In the workspace's turn: compare it with its node, and mend what differs."""
        await self._in_owner(owner.id, self._repair)

    async def delete_job(self, owner: Owner, cause: str) -> None:
        at = await self._store.by_id(owner.id)
        if at.state is not WorkspaceState.DELETED:
            await self.losses.free(owner, at, Event.DELETE, Change(body={"cause": cause}))

    async def _delete(self, workspace_id: WorkspaceId, cause: str) -> None:
        owner = self.owner(workspace_id)
        await owner.run(partial(self.delete_job, owner, cause), urgent=True)

    async def _in_owner(self, workspace_id: WorkspaceId, job: Callable[[Owner], Awaitable[None]]) -> None:
        owner = self.owner(workspace_id)
        await owner.run(partial(job, owner), urgent=True)

    def _awake_generation(self, workspace_id: WorkspaceId) -> int | None:
        owner = self._owners.get(workspace_id)
        return owner.live.generation if owner and owner.live else None

    def _repair_soon(self, owner: Owner) -> None:
        self._spawn(self.repair(owner))

    async def _repair(self, owner: Owner) -> None:
        await self.reconciler.workspace(owner, await self._store.by_id(owner.id))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that outlives its caller and ends with the service."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _spawn(self, work: Awaitable[object]) -> None:
        self.spawn(_logged(work))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it too; asyncio must not complain where nobody does

    # -------------------------------------------------------------------------------------------------------------- timers

    async def tick(self) -> None:
        """Look at everything awake once: what is idle sleeps, what is due is checkpointed."""
        for owner in list(self._owners.values()):
            if owner.live is None:
                if owner.is_idle:
                    del self._owners[owner.id]
            elif not owner.is_ticking and not owner.is_busy and self._decide(owner, owner.live) is not Decision.KEEP:
                owner.is_ticking = True
                self._spawn(self._act(owner))

    def _decide(self, owner: Owner, live: Live, *, program_busy: bool | None = None) -> Decision:
        workspace = live.record.workspace
        try:
            activity = self._tools.node(live.record).activity(workspace.id, live.generation)
        except PerdureError:
            self._repair_soon(owner)  # the node does not know it any more and its event has not reached us
            return Decision.KEEP
        observation = observe(self._tools, owner, live, program_busy=program_busy)
        return hibernation.decide(activity, observation, policy_of(workspace))

    async def _act(self, owner: Owner) -> None:
        async def job() -> None:
            live = owner.live
            if live is None:
                return
            decision = self._decide(owner, live)  # again: somebody may have come in while this waited for its turn
            if decision is Decision.HIBERNATE:  # and again, for the same reason, when its program has answered
                word = await self._ask(live)
                decision = self._decide(owner, live, program_busy=word is Word.BUSY)
                if word is Word.AGAIN and decision is Decision.HIBERNATE:
                    return  # the next tick asks
            if decision is Decision.HIBERNATE:
                await self.operations.hibernate(owner, live.record, "idle")
            elif decision is Decision.CHECKPOINT:
                live.captured_at = self._tools.clock.monotonic()  # one that fails is tried again an interval later
                await self.operations.checkpoint(owner, live.record, SnapshotReason.AUTOMATIC)

        try:
            await owner.run(job)
        finally:
            owner.is_ticking = False
        self.clean_soon()

    async def _ping_program(self, at: Record) -> Said | None:
        ping = await self._tools.node(at).guest(at.id, at.generation).ping_program(PING_S)
        if ping is None:
            return None
        for_s = None if ping.updated_at is None else (self._tools.clock.now() - ping.updated_at).total_seconds()
        return Said(ping.is_busy, for_s)

    async def _ask(self, live: Live) -> Word:
        """Asked only when everything else says idle. One that does not answer is not busy: it would never sleep again. What it
        did between two questions counts by its own word for when it was done."""
        said = None
        try:
            async with asyncio.timeout(PING_S):
                said = await self.ask_program(live.record)
        except (PerdureError, TimeoutError) as error:
            _log.info("the program of %s does not say whether it is busy: %s", live.record.id, error)
        now = self._tools.clock.monotonic()
        word = hibernation.heard(said, None if live.fresh_at is None else now - live.fresh_at)
        live.busy_at = now if word is Word.BUSY else None
        if word is Word.AGAIN:
            live.fresh_at = now if live.fresh_at is None else live.fresh_at
        elif word is not Word.QUIET:  # one whose answers are all fresh is known by now
            live.fresh_at = None
        if word is Word.DONE and said is not None and said.for_s is not None:
            live.done_at = now - said.for_s
        return word

    async def reconcile(self) -> None:
        """One pass over the node."""
        await self.reconciler.node(self._node)

    def clean_soon(self) -> None:
        """Something was captured, or may have become unwanted."""
        self._dirty.set()
        self.uploads.soon()

    def _stored(self, workspace_id: WorkspaceId) -> None:
        if self._tools.settings.store_local_copies == "drop":
            self._dirty.set()

    async def clean(self) -> None:
        """Delete expired lost branches and every snapshot that retention keeps no longer; see to long sleepers."""
        self._dirty.clear()
        for workspace_id in await self._store.expired(self._node.node_id):
            with suppress(StaleGeneration):
                await self._delete(workspace_id, "expired")
        for workspace_id in await self._store.crowded(self._node.node_id, self._tools.settings.keep_automatic_checkpoints):
            owner = self.owner(workspace_id)
            if not owner.is_busy:  # what it is at may be about to need one of them; the next pass comes
                await owner.run(partial(self._retain, workspace_id), urgent=True)
        await self.aging.sweep()
        await self.reconciler.reap(self._node)
        if self._tools.settings.store_local_copies == "drop":
            await self.room.evict()

    async def _retain(self, workspace_id: WorkspaceId) -> None:
        async with self._store.database.transaction() as tx:
            await self._store.retain(tx, workspace_id, self._tools.settings.keep_automatic_checkpoints)

    @staticmethod
    async def _every(seconds: float, work: Callable[[], Awaitable[None]], early: asyncio.Event | None) -> None:
        """Do ``work`` every so often, or as soon as ``early`` is set."""
        due = early or asyncio.Event()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await due.wait()
            await _logged(work())

    # -------------------------------------------------------------------------------------------------------------- events

    async def _consume_events(self) -> None:
        async for event in self._node.events():
            owner = self._owners.get(event.workspace_id)
            # While we stop, a silent guest is taken for a slow one: putting it to sleep is tried all the same.
            is_moot = self._is_closing and event.kind is NodeEventKind.UNRESPONSIVE
            if owner is not None and not is_moot:
                self._spawn(owner.run(partial(self._happened, owner, event), urgent=True))

    async def _happened(self, owner: Owner, event: NodeEvent) -> None:
        """Something happened to a machine by itself. What an operation of ours has seen already is not told twice."""
        live = owner.live
        if live is None or live.generation != event.generation:
            return
        at, detail = live.record, f" ({event.detail})" if event.detail else ""
        match event.kind:
            case NodeEventKind.DIED:
                await self.losses.settle(owner, at, Event.MACHINE_LOST, f"Its machine ended by itself{detail}.")
            case NodeEventKind.GUEST_PANIC:
                await self.losses.settle(owner, at, Event.MACHINE_LOST, f"The guest's kernel panicked{detail}.")
            case NodeEventKind.GUEST_POWEROFF:
                await self.losses.settle(
                    owner, at, Event.POWERED_OFF, "The guest powered itself off; its next wake boots the disk."
                )
            case NodeEventKind.GUEST_REBOOT:
                await self.operations.reboot(owner, at)
            case NodeEventKind.UNRESPONSIVE:
                limit_s = self._tools.settings.unresponsive_s
                await self.losses.settle(owner, at, Event.UNRESPONSIVE, f"The guest did not answer for {limit_s:g} s{detail}.")
            case NodeEventKind.NO_SPACE:
                await self._store.set_detail(at, _NO_SPACE, paused=True)
            case NodeEventKind.ROOM_AGAIN:
                await self._store.set_detail(at, "", paused=False)
            case NodeEventKind.FROZEN | NodeEventKind.THAWED:
                _log.info("machine of %s: %s", owner.id, event.kind.value)


async def _logged(work: Awaitable[object]) -> None:
    """Background work: an error has been recorded where it happened, or the next pass meets it again.

    Nothing may end a loop that calls this: without it nobody would ever sleep, be checkpointed or be repaired again.
    """
    try:
        await work
    except PerdureError as error:
        _log.warning("%s (%s)", error.message, error.internal)
    except Exception:  # noqa: BLE001 - the top of every background task
        _log.exception("background work failed in a way nobody foresaw")


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
