"""The server is killed at every point while workspaces wake by themselves, and while policies end or archive those long asleep.

Beside the invariants of ``world`` and of both homes: a time to wake at that was acknowledged is met once, by the first life in
which it can be, and no time is met twice; nothing is deleted by a policy that nobody gave, nor without a day's announcement in
that very sleep; what is called archived is in the store.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.db.database import Database
from perdure.workspaces.model import AsleepAction, Configuration, JournalEntry, WorkspaceState
from tests.simulation.fuse import Fuse, killed_everywhere, steps
from tests.simulation.test_second_home import TwoHomes
from tests.simulation.world import kill_in

HOUR_S = 3600.0
DAY = timedelta(days=1)


class Idle(TwoHomes):
    def __init__(self, database: Database, label: str, fuse: Fuse) -> None:
        super().__init__(database, label, fuse)
        self.alarms: dict[WorkspaceId, datetime] = {}  # acknowledged, and neither put off nor taken back
        self.policies: set[WorkspaceId] = set()  # of which somebody has asked that they be deleted

    async def wake_at(self, name: str, seconds: float | None) -> None:
        async def work() -> None:
            at = await self.service.get(self.ctx, name)
            self.alarms.pop(at.id, None)  # asked for: from here on it may be another
            told = await self.service.wake_at(self.ctx, name, None if seconds is None else timedelta(seconds=seconds))
            if told.wake_at is not None:
                self.alarms[at.id] = told.wake_at

        await self.attempt(work())

    async def configure(self, name: str, days: float | None, action: AsleepAction) -> None:
        async def work() -> None:
            at = await self.service.get(self.ctx, name)
            if action is AsleepAction.DELETE:
                self.policies.add(at.id)
            change = Configuration(asleep_after_days=days, asleep_action=action)
            told = await self.service.configure(self.ctx, name, change)
            assert (told.asleep_after_days, told.asleep_action) == (days, action)

        await self.attempt(work())

    async def hours(self, hours: float) -> None:
        """So much later, all times that have come are met."""

        async def work() -> None:
            self.plane.database.shift_clock(hours * HOUR_S)
            await self.service.upkeep.alarms.look()
            await self.service.upkeep.drain()

        await self.attempt(work())

    async def days(self, days: float) -> None:
        """So much later, long sleepers are seen to. From here on those with such a policy may be gone."""

        async def work() -> None:
            self.plane.database.shift_clock(days * 24 * HOUR_S)
            self.deleted |= self.policies
            await self.service.upkeep.aging.sweep()

        await self.attempt(work())

    async def check(self) -> None:
        await self.service.upkeep.alarms.look()
        await self.service.upkeep.drain()
        found = {one.id: one for one in await self.service.find(self.ctx)}
        now = (await self.plane.database.one("clock.now") or {})["now"]
        for workspace_id in self.facts:
            thread = await self.service.log(self.ctx, workspace_id)
            met = [moment for entry in thread if (moment := _met(entry)) is not None]
            assert len(met) == len(set(met)), "a time was met twice"
            self._check_deletions(workspace_id, thread)
            self._check_archives(thread)
            wanted = self.alarms.get(workspace_id)
            if wanted is None or workspace_id not in found:
                continue
            if wanted <= now:
                assert met.count(wanted) == 1, "a time that has come was not met"
                assert found[workspace_id].state is WorkspaceState.RUNNING or wanted in met
            else:
                assert found[workspace_id].wake_at == wanted, "a time was forgotten"
        await super().check()

    def _check_deletions(self, workspace_id: WorkspaceId, thread: list[JournalEntry]) -> None:
        for entry in thread:
            if entry.kind == "deleted" and entry.body.get("by") == "policy":
                assert workspace_id in self.policies, "nobody has asked for it"
                announced = [one for one in thread if one.kind == "deletion-announced" and one.generation == entry.generation]
                assert announced and entry.at - announced[0].at >= DAY, "it was not announced"

    def _check_archives(self, thread: list[JournalEntry]) -> None:
        for entry in thread:
            if entry.kind == "archived":
                slept = [one.body.get("snapshot_id") for one in thread if one.seq < entry.seq and one.kind == "hibernated"]
                assert SnapshotId(str(slept[-1])) in self.bucket.content, "it is not in the store"


def _met(entry: JournalEntry) -> datetime | None:
    """The time that an entry says has been met."""
    told = entry.body.get("report") if entry.kind == "running" else entry.body if entry.kind == "wake-at-met" else None
    wake_at = (told or {}).get("wake_at")
    return datetime.fromisoformat(wake_at) if wake_at else None


async def scenario(simulation: Idle) -> None:
    await simulation.create("a")
    await simulation.write("a")
    await simulation.wake_at("a", 2 * HOUR_S)
    await simulation.sleep("a")
    await simulation.wake_at("a", 1 * HOUR_S)
    await simulation.hours(1.1)
    await simulation.write("a")
    await simulation.wake_at("a", 60)
    await simulation.hours(0.1)  # it is awake already
    await simulation.wake_at("a", 60)
    await simulation.wake_at("a", None)
    await simulation.sleep("a")
    await simulation.hours(1)
    await simulation.configure("a", 2, AsleepAction.DELETE)
    await simulation.days(1.5)
    await simulation.write("a")
    await simulation.sleep("a")
    await simulation.create("b")
    await simulation.write("b")
    await simulation.sleep("b")
    await simulation.upload()
    await simulation.configure("b", 1, AsleepAction.ARCHIVE)
    await simulation.days(1.5)
    await simulation.days(1.1)
    await simulation.wake_at("b", 60)
    await simulation.hours(1)
    await simulation.wake_at("b", HOUR_S)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node_too", [True, False], ids=["with its machines", "alone"])
@pytest.mark.parametrize("step", steps(11))
async def test_killed_at_every_point_of_alarms_and_long_sleeps(database: Database, step: int, node_too: bool) -> None:
    async def kill(at: int | None) -> Fuse:
        return await kill_in(Idle(database, f"i{at or 0}", Fuse(at)), scenario, node_too=node_too)

    whole, fired = await killed_everywhere(kill, step)
    points = {"after alarms.set", "after alarms.next", "after alarms.met", "after longsleep.note", "after home.evict"}
    assert points | {"before longsleep.candidates", "in transaction, before workspaces.move"} <= set(whole.passed)
    assert fired.total() * step > 100
