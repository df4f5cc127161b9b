"""The server is killed at every point between two commits, with its machines and without; then another starts.

Invariants (``world.Simulation.check``): no state without an exit, no machine or snapshot leaks, an acknowledged capture is never
behind what wakes, the newest acknowledged write is in the workspace or in a lost branch, generations only grow, the journal's
chain verifies. A failure names its seed.
"""

from __future__ import annotations

from random import Random

import pytest

from perdure.db.database import Database
from perdure.journal.entries import Journal
from tests.simulation.fuse import Fuse, killed_everywhere, steps
from tests.simulation.world import Simulation, kill_in, random_workload

SEEDS = range(24)


async def scenario(simulation: Simulation) -> None:
    """Every operation once, in an order in which each has something to do."""
    await simulation.create("a")
    await simulation.write("a")
    await simulation.checkpoint("a", "first")
    await simulation.write("a")
    await simulation.sleep("a")
    await simulation.wake("a")
    await simulation.write("a")
    await simulation.happen("a", "die")
    await simulation.wake("a")
    await simulation.write("a")
    await simulation.happen("a", "reboot")
    await simulation.fork("a", 2)
    await simulation.write("a-1")
    await simulation.happen("a-1", "power_off")
    await simulation.pass_time(1000)
    await simulation.wake("a")
    await simulation.delete("a")


async def branches(simulation: Simulation) -> None:
    """Rewind, promote and discard, each of what is awake and of what sleeps."""
    await simulation.create("a")
    await simulation.write("a")
    await simulation.checkpoint("a", "first")
    await simulation.write("a")
    await simulation.rewind("a", "first")
    await simulation.promote("a")  # back again: what the rewind has kept
    await simulation.sleep("a")
    await simulation.rewind("a", "first")
    await simulation.write("a")
    await simulation.fork("a", 1)
    await simulation.write("a-1")
    await simulation.write("a")
    await simulation.promote("a")  # both are awake
    await simulation.sleep("a")
    await simulation.discard("a")
    await simulation.happen("a", "die")
    await simulation.promote("a")


async def damage(simulation: Simulation) -> None:
    """The last snapshot is damaged: a wake fails and says so, and the workspace goes back to what is whole."""
    await simulation.create("a")
    for label in ("first", "second", "third"):
        await simulation.write("a")
        await simulation.checkpoint("a", label)
        await simulation.write("a")
        await simulation.sleep("a")
        await simulation.spoil("a")
        await simulation.wake("a")
        await simulation.go_back("a")
    await simulation.write("a")
    await simulation.sleep("a")
    await simulation.wake("a")


SCENARIOS = {"everything": scenario, "branches": branches, "damage": damage}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node_too", [True, False], ids=["with its machines", "alone"])
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("step", steps(12))
async def test_killed_at_every_point_of_a_scenario(database: Database, name: str, step: int, node_too: bool) -> None:
    async def kill(at: int | None) -> Fuse:
        return await kill_in(Simulation(database, f"k{at or 0}", Fuse(at)), SCENARIOS[name], node_too=node_too)

    whole, fired = await killed_everywhere(kill, step)
    assert whole.count > 100
    for point, count in sorted(fired.items()):
        print(f"{count:4} {point}")
    checked, breaks = await Journal(database).verify()
    assert breaks == []
    assert checked * step > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_random_workloads_killed_at_random_points_and_again_while_recovering(database: Database) -> None:
    for seed in SEEDS:
        random = Random(seed)
        simulation = Simulation(database, f"s{seed}", Fuse(random.randint(5, 250)))
        try:
            await simulation.begin()
            for _ in range(3):  # lives of the server
                await random_workload(simulation, random, 25)
                node_too = random.random() < 0.7
                while not await simulation.recover(node_too=node_too, fuse=Fuse(random.choice([None, random.randint(1, 40)]))):
                    node_too = True
                simulation.fuse.at = None
                await simulation.check()
                simulation.fuse.at = simulation.fuse.count + random.randint(5, 250)
            await simulation.plane.crash()
        except BaseException as error:
            error.add_note(f"seed {seed}, killed at: {simulation.fuse.blew_at}")
            raise
    _, breaks = await Journal(database).verify()
    assert breaks == []
