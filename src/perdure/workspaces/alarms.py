"""Workspaces that wake by themselves, each once, at a time that somebody gave (``wake_at``).

The time is a column, counted by the database's clock like all others: a restart forgets none, and one that passed while no server
ran is met late and says so. One timer per server waits for the earliest: of its own node and, where there is an object store, of
sleepers whose node is gone. The statement that makes a workspace running also says that its time has been met; until then it is
due, so a crash or a start that was refused only delays it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from perdure.core.errors import PerdureError, StaleGeneration, Unavailable
from perdure.core.ids import WorkspaceId
from perdure.journal.entries import canonical
from perdure.wire.node import Node
from perdure.workspaces import checks
from perdure.workspaces.homes import Homes
from perdure.workspaces.lifecycle import Event
from perdure.workspaces.model import Context, WorkspaceState
from perdure.workspaces.operations import Operations, in_utc, late_s
from perdure.workspaces.owner import Owner
from perdure.workspaces.rows import Record
from perdure.workspaces.store import Change
from perdure.workspaces.tools import Tools

_log = logging.getLogger(__name__)

#: How often rows are read without a reason: another server may have written one, and the database's clock may have been set.
POLL_S = 10.0
#: After the first wake that failed; doubled with each that follows.
BACKOFF_S = 5.0
BACKOFF_MAX_S = 600.0
#: Times that one look at the rows takes; the next follows as soon as one of them has been met.
ROWS = 100


@dataclass(frozen=True, slots=True)
class Turns:
    """What an alarm needs of those who hold the workspaces."""

    owner_of: Callable[[WorkspaceId], Owner]
    current: Callable[[Owner], Awaitable[Record]]
    check_open: Callable[[], None]
    spawn: Callable[[Coroutine[Any, Any, None]], object]


@dataclass(slots=True)
class _Failure:
    count: int
    again_at: float  # on the monotonic clock


class Alarms:
    """``look`` is to be called every ``POLL_S``, and whenever ``due`` is set."""

    def __init__(self, tools: Tools, node: Node, operations: Operations, turns: Turns) -> None:
        self._tools = tools
        self._homes = Homes(tools)
        self._store = tools.store
        self._database = tools.store.database
        self._node = node
        self._operations = operations
        self._turns = turns
        self.due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ringing: set[WorkspaceId] = set()
        self._failures: dict[WorkspaceId, _Failure] = {}

    # ---------------------------------------------------------------------------------------------------------------- setting

    async def set(self, ctx: Context, record: Record, when: datetime | timedelta | None) -> Record:
        """See ``model.Workspaces.wake_at``."""
        checks.check_alarm(when, self._tools.clock.now())
        owner = self._turns.owner_of(record.id)

        async def job() -> Record:
            at = await self._turns.current(owner)
            wake_at = at.now + when if isinstance(when, timedelta) else when
            if wake_at is not None:  # of the past one moment is as good as another, but not all can be written in UTC
                wake_at = max(wake_at, at.now - checks.ALARM_LIMIT)
            body = canonical({"at": None if wake_at is None else in_utc(wake_at), "by": ctx.principal})
            if await self._database.one("alarms.set", id=at.id, wake_at=wake_at, body=body) is None:
                raise checks.is_deleted(at.workspace)
            changed = await self._store.by_id(at.id)
            if owner.live is not None:
                owner.live.record = changed
            return changed

        changed = await owner.run(job)
        self._failures.pop(record.id, None)
        self.due.set()
        return changed

    # ---------------------------------------------------------------------------------------------------------------- waiting

    async def look(self) -> None:
        """Wake whatever is due, and have the next look when the earliest of the others is."""
        self.due.clear()
        self.stop()
        now = self._tools.clock.monotonic()
        waiting = {key for key, failure in self._failures.items() if failure.again_at > now}
        rows = await self._database.all(
            "alarms.next",
            **{"node_id": self._node.node_id, "has_store": self._node.second_home is not None},
            **{"skip": [*self._ringing | waiting], "limit": ROWS},
        )
        for row in rows:
            if row["left_s"] > 0:
                self._timer = asyncio.get_running_loop().call_later(row["left_s"], self.due.set)
                break
            workspace_id = WorkspaceId(row["id"])
            self._ringing.add(workspace_id)
            self._turns.spawn(self._ring(workspace_id))

    def stop(self) -> None:
        """No look but those that are asked for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _ring(self, workspace_id: WorkspaceId) -> None:
        owner = self._turns.owner_of(workspace_id)
        try:
            await owner.run(partial(self._wake, owner), urgent=True)
        except StaleGeneration as error:  # somebody else has moved it, and that may have been this very wake: look again later
            self._failed(workspace_id, error, 0)
        except PerdureError as error:
            before = self._failures.get(workspace_id)
            self._failed(workspace_id, error, before.count if before else 0)
        else:
            self._failures.pop(workspace_id, None)
        finally:
            self._ringing.discard(workspace_id)
            self.due.set()

    def _failed(self, workspace_id: WorkspaceId, error: PerdureError, count: int) -> None:
        wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(count, 16))
        self._failures[workspace_id] = _Failure(count + 1, self._tools.clock.monotonic() + wait_s)
        what = "workspace %s was to wake by itself and did not: %s It is tried again in %.0f s. (%s)"
        _log.warning(what, workspace_id, error.message, wait_s, error.internal)

    async def _wake(self, owner: Owner) -> None:
        """In the workspace's turn."""
        self._turns.check_open()
        at = await self._store.by_id(owner.id)
        if at.node_id != self._node.node_id:
            if at.state is not WorkspaceState.HIBERNATED:
                return  # its own server is back, and meets the time
            await self._homes.here(at, self._node)
        at = await self._turns.current(owner)
        if at.alarm is None or at.state in {WorkspaceState.FAILED, WorkspaceState.DELETED}:
            return  # it was put off, met, or there is nobody to wake any more
        body = {"by": "wake-at", "wake_at": in_utc(at.alarm), "late_s": round(late_s(at), 1)}
        if at.state is WorkspaceState.HIBERNATED:
            await self._operations.wake(owner, at, Event.WAKE, await self._operations.plan_wake(at), Change(body=body))
        elif at.state is WorkspaceState.RUNNING and owner.live is not None:
            await self._met(owner, at, body)
        else:
            raise Unavailable(f"Workspace {at.workspace.name!r} is {at.state.value}.", hint="It is tried again.")

    async def _met(self, owner: Owner, at: Record, body: dict[str, Any]) -> None:
        """It is awake already, and stays so for as long as one that was just used."""
        names = {"id": at.id, "generation": at.generation, "wake_at": at.alarm}
        await self._database.one("alarms.met", **names, body=canonical(body))
        if owner.live is not None:
            owner.live.record = await self._store.by_id(at.id)
        owner.touch()
