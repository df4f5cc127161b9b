"""Usage of random lives, and of lives in which the server is killed at every statement, adds up to the wall time exactly.

Beside the invariants of ``world``: the intervals of a workspace neither overlap nor leave a hole from its creation to its
deletion, whatever the clock did; asleep costs bytes only; nothing that is repeated counts twice (``meters.check``).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from perdure.core.errors import PerdureError
from perdure.core.ids import TenantId
from perdure.db.database import Database
from perdure.fleet.nodes import NodeRegistry
from perdure.metering.usage import Amounts, Metering
from tests.fakes.control_plane import CTX, ControlPlane, control_plane
from tests.simulation import meters
from tests.simulation.fuse import Fuse, killed_everywhere, steps
from tests.simulation.world import Simulation, kill_in

NAMES = st.sampled_from(["a", "b", "a-1"])
SECONDS = st.integers(-4000, 4000)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["create", "wake", "sleep", "checkpoint", "fork", "delete", "promote", "work"]), NAMES),
    st.tuples(st.sampled_from(["die", "reboot", "power_off", "hang", "fill", "room"]), NAMES),
    st.tuples(st.sampled_from(["restart", "crash", "reconcile", "renew"]), st.just("")),
    st.tuples(st.just("time"), SECONDS),
)


class Life:
    """One control plane to which things happen."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.registry = NodeRegistry(plane.database, lease_s=20)

    async def act(self, what: str, about: str | int) -> None:
        with suppress(PerdureError):  # of a workspace that is not there, or not so
            match what, about:
                case "time", int(seconds):
                    self.plane.database.shift_clock(seconds)
                    self.plane.clock.advance(max(0, seconds))
                case "create", str(name):
                    await self.plane.create(name.removesuffix("-1"))
                case (("restart" | "crash"), _):
                    await self._begin_again(node_too=what == "crash")
                case "reconcile", _:
                    await self.plane.service.upkeep.reconcile()
                    await self.plane.service.upkeep.reconcile()
                case "renew", _:
                    await self.registry.renew(self.plane.node.node_id)
                case "fork", str(name):
                    await self.plane.service.fork(CTX, name, 1)
                case (("die" | "reboot" | "power_off" | "hang" | "fill" | "room" | "work"), str(name)):
                    await self._happen(what, name)
                case _, str(name):
                    await getattr(self.plane.service, what)(CTX, name)

    async def _begin_again(self, *, node_too: bool) -> None:
        await self.plane.crash(node_too=node_too)
        self.plane.database.shift_clock(500)  # it was down
        await self.registry.register(self.plane.node.node_id)
        await self.plane.restart()

    async def _happen(self, what: str, name: str) -> None:
        workspace = await self.plane.service.get(CTX, name)
        machine = self.plane.node.machines.get(workspace.id)
        if machine is None or not machine.alive:
            return
        if what == "work":
            machine.cpu_s += 1.5
            sent, received = self.plane.node.moved[workspace.id]
            self.plane.node.moved[workspace.id] = (sent + 10, received + 1000)
            machine.guest.moved.inward += 300
            machine.guest.moved.outward += 7
        elif what in {"fill", "room"}:
            self.plane.node.fill_disk(workspace.id, full=what == "fill")
        else:
            getattr(self.plane.node, what)(workspace.id)
        for _ in range(5):
            await asyncio.sleep(0)
        await self.plane.service.upkeep.drain()


async def live(actions: list[tuple[str, str | int]]) -> None:
    async with control_plane() as plane:
        life = Life(plane)
        await life.registry.register(plane.node.node_id)
        await plane.restart()
        await plane.create("a")
        for what, about in actions:
            await life.act(what, about)
        await plane.service.upkeep.drain()
        for used in await Metering(plane.database).of(CTX.tenant_id, None, None, None):  # whatever time it is
            assert all(getattr(used.amounts, one.name) >= type(getattr(used.amounts, one.name))() for one in fields(Amounts))
        plane.database.shift_clock(30 * 4000)  # later than all that was written
        await meters.check(plane.database, CTX.tenant_id)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=15, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, min_size=8, max_size=30))
def test_a_random_life_adds_up_to_its_wall_time(actions: list[tuple[str, str | int]]) -> None:
    asyncio.run(live(actions))


class Metered(Simulation):
    async def check(self) -> None:
        await meters.check(self.plane.database, TenantId(self.tenant))  # as recovery left it, and as its own use of it does
        await super().check()
        await meters.check(self.plane.database, TenantId(self.tenant))


async def scenario(simulation: Metered) -> None:
    await simulation.create("a")
    await simulation.write("a")
    await simulation.checkpoint("a", "one")
    await simulation.sleep("a")
    await simulation.wake("a")
    await simulation.fork("a", 1)
    await simulation.happen("a-1", "die")
    await simulation.happen("a", "reboot")
    await simulation.promote("a")
    await simulation.happen("a", "power_off")
    await simulation.delete("a")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node_too", [True, False], ids=["with its machines", "alone"])
@pytest.mark.parametrize("step", steps(11))
async def test_killed_at_every_statement_it_still_adds_up(database: Database, step: int, node_too: bool) -> None:
    async def kill(at: int | None) -> Fuse:
        return await kill_in(Metered(database, f"m{at or 0}", Fuse(at)), scenario, node_too=node_too)

    whole, fired = await killed_everywhere(kill, step)
    assert {"after nodes.compared", "before nodes.last_sign"} & set(whole.passed)
    assert fired.total() * step > 60
