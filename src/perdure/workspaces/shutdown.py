"""The end of a server: everything awake is put to sleep, however long a slow host needs for it (ADR 34).

A hibernation under way is never cut short, and one that fails is tried again. A workspace is given up

* when its machine keeps failing, and no other workspace has fallen asleep for as long as the operator's patience;
* when nothing has moved for ``STUCK_S``, whatever the reason: room on a full disk, or a database, may come back until then;
* when the operator insists.

Whoever is given up is named with the reason, and whoever makes trouble is while the operator can still do something.

A start under way is waited for like a hibernation, but only as long as the patience: to drop it loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from perdure.core.errors import PerdureError, Unavailable
from perdure.core.ids import WorkspaceId
from perdure.core.stop import Left, StopReport
from perdure.workspaces.model import WorkspaceState
from perdure.workspaces.operations import Operations
from perdure.workspaces.owner import Live, Owner
from perdure.workspaces.reconcile import Reconciler
from perdure.workspaces.rows import Record
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)

#: Nothing that is still worth waiting for takes longer without one workspace falling asleep meanwhile.
STUCK_S = 900.0
#: Between attempts at a workspace that did not go to sleep.
RETRY_S = 0.5
#: How often deadlines are looked at, and whoever waits for us is told that we are still at it.
LOOK_S = 1.0

INSISTED = "The server was told not to wait for it."
NOT_STARTED = "It was still starting; nothing of it is lost."


@dataclass(frozen=True, slots=True)
class StopOrder:
    """How to stop. ``patience_s``: see the module. ``now`` is set when the operator insists. ``tell`` hears how it goes, at least
    every ``LOOK_S``."""

    patience_s: float
    now: asyncio.Event
    tell: Callable[[StopReport], None] = lambda _report: None


class Shutdown:
    """One stop. ``owners`` gives all owners there are; new ones may appear while it runs."""

    def __init__(
        self,
        tools: Tools,
        operations: Operations,
        reconciler: Reconciler,
        owners: Callable[[], Iterable[Owner]],
        order: StopOrder,
    ) -> None:
        self._tools = tools
        self._operations = operations
        self._reconciler = reconciler
        self._owners = owners
        self._order = order
        self._slots = asyncio.Semaphore(max(2, tools.settings.parallel_starts))
        self._tasks: dict[WorkspaceId, asyncio.Task[None]] = {}
        self._begun: dict[WorkspaceId, Live] = {}  # awake machines that an attempt has been made at
        self._names: dict[WorkspaceId, str] = {}
        self._troubles: dict[WorkspaceId, str] = {}  # why the last attempt failed
        self._asleep: list[str] = []
        self._left: dict[WorkspaceId, Left] = {}
        self._moved_at = tools.clock.monotonic()

    async def run(self, look_again: Callable[[], Coroutine[Any, Any, None]]) -> StopReport:
        """Returns when nothing is awake that has not been given up. ``look_again`` compares with the node once more, for what
        an operation that failed before has left awake without an owner that knows of it."""
        insisted = asyncio.create_task(self._order.now.wait())
        try:
            await self._until_quiet(insisted)
            if not insisted.done():
                await self._compare(asyncio.create_task(look_again()), insisted)
                await self._until_quiet(insisted)
        finally:
            insisted.cancel()
        for left in self._left.values():
            say = _log.error if left.lost else _log.warning
            say("workspace %s (%s) was not put to sleep%s: %s", left.name, left.workspace_id, _cost(left), left.why)
        return self._report()

    async def _until_quiet(self, insisted: asyncio.Task[bool]) -> None:
        """Take up whoever is awake or at work until nobody is."""
        self._take_up()
        while self._tasks and not insisted.done():
            self._order.tell(self._report())
            await asyncio.wait({*self._tasks.values(), insisted}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            self._judge()
            self._harvest()
            self._take_up()
        if insisted.done():
            await self._insist()
        self._order.tell(self._report())

    async def _compare(self, repair: asyncio.Task[None], insisted: asyncio.Task[bool]) -> None:
        while not (repair.done() or insisted.done()):
            self._order.tell(self._report())
            await asyncio.wait({repair, insisted}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        repair.cancel()

    def _take_up(self) -> None:
        for owner in list(self._owners()):
            at_work = owner.live is not None or owner.is_busy or owner.waking is not None
            if at_work and owner.id not in self._tasks and owner.id not in self._left:
                self._note_name(owner)
                self._tasks[owner.id] = asyncio.create_task(self._see_to(owner), name=f"stop-{owner.id}")

    def _note_name(self, owner: Owner) -> None:
        record = owner.live.record if owner.live is not None else owner.starting
        if record is not None:
            self._names[owner.id] = record.workspace.name

    def _name(self, workspace_id: WorkspaceId) -> str:
        return self._names.get(workspace_id, workspace_id)

    def _report(self) -> StopReport:
        return StopReport(
            asleep=tuple(self._asleep),
            waiting=tuple(map(self._name, self._tasks)),
            troubles=tuple(f"{self._name(one)}: {why}" for one, why in self._troubles.items() if one in self._tasks),
            left=tuple(self._left.values()),
        )

    # --------------------------------------------------------------------------------------------------------- one workspace

    async def _see_to(self, owner: Owner) -> None:
        """Until it sleeps or is given up."""
        while True:
            try:
                asleep = await owner.run(partial(self._attempt, owner), urgent=True)
            except PerdureError as error:
                if self._silent_s() >= (STUCK_S if isinstance(error, Unavailable) else self._order.patience_s):
                    self._give_up(owner, error.message)
                    return
                if self._troubles.get(owner.id) != error.message:
                    _log.warning("workspace %s did not go to sleep and is tried again: %s", self._name(owner.id), error.message)
                self._troubles[owner.id] = error.message
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._order.now.wait()
                continue
            if asleep is not None:
                self._fell_asleep(owner, asleep)
            return

    def _fell_asleep(self, owner: Owner, at: Record) -> None:
        self._names[owner.id] = at.workspace.name
        if at.state is WorkspaceState.HIBERNATED and not at.rewound:
            self._moved_at = self._tools.clock.monotonic()
            self._asleep.append(at.workspace.name)
        elif at.state is not WorkspaceState.DELETED:
            self._give_up(owner, at.rewound or at.workspace.state_detail)

    async def _attempt(self, owner: Owner) -> Record | None:
        """In the workspace's turn. None when it is not awake, and was not when this stop came to it first."""
        self._note_name(owner)
        if owner.live is None and owner.id not in self._begun:
            return None
        async with self._slots:
            if owner.id in self._begun:
                at = await self._standing(owner)
                if owner.live is None:
                    return at
            live = owner.live
            assert live is not None, "only the workspace's own turn takes it away"
            self._begun[owner.id] = live
            at, _ = await self._operations.hibernate(owner, live.record, "shutdown")
            del self._begun[owner.id]
            return at

    async def _standing(self, owner: Owner) -> Record:
        """Where it stands after an attempt that failed. Its machine is believed to be ours still: a slow guest that does not
        answer is not a lost one."""
        owner.live = owner.live or self._begun[owner.id]
        return await self._reconciler.workspace(owner, await self._tools.store.by_id(owner.id))

    # --------------------------------------------------------------------------------------------------------------- giving up

    def _silent_s(self) -> float:
        return self._tools.clock.monotonic() - self._moved_at

    def _judge(self) -> None:
        """Drop what is not worth waiting for any longer."""
        silent_s = self._silent_s()
        for owner in list(self._owners()):
            if owner.id not in self._tasks or self._tasks[owner.id].done():
                continue
            if owner.starting is not None and silent_s >= self._order.patience_s:
                self._drop(owner, NOT_STARTED)
            elif silent_s >= STUCK_S:
                self._drop(owner, self._troubles.get(owner.id, f"Nothing has moved for {STUCK_S / 60:.0f} minutes."))

    def _harvest(self) -> None:
        for workspace_id, task in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[workspace_id]
            error = None if task.cancelled() else task.exception()
            if error is not None:
                _log.error("putting workspace %s to sleep failed in a way nobody foresaw", workspace_id, exc_info=error)
            if (task.cancelled() or error is not None) and workspace_id not in self._left:
                self._left[workspace_id] = Left(workspace_id, self._name(workspace_id), "Its work was broken off.", lost=True)

    def _give_up(self, owner: Owner, why: str) -> None:
        self._left[owner.id] = Left(owner.id, self._name(owner.id), why, lost=True)

    def _drop(self, owner: Owner, why: str) -> None:
        """Break off whatever is under way. What was being started has nothing that its last snapshot does not have."""
        self._note_name(owner)
        is_awake = owner.live is not None or owner.id in self._begun or owner.starting is None
        self._left[owner.id] = Left(owner.id, self._name(owner.id), why, lost=is_awake)
        owner.stop()
        self._tasks[owner.id].cancel()

    async def _insist(self) -> None:
        self._harvest()
        for owner in list(self._owners()):
            if owner.id in self._tasks:
                self._drop(owner, INSISTED)
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()))  # they are cancelled
        self._harvest()


def _cost(left: Left) -> str:
    return "; what its memory held since its last snapshot is lost" if left.lost else ""
