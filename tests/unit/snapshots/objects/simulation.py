"""A simulation: several processes upload, release, collect and rewrite at once, are killed anywhere, and the network delivers
late.

Every call of the store or the catalogue is a step, and a seed decides whose step is next, who dies at it and what the network
does. After each round all that was acknowledged must read back; in the end nothing else may be left.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from perdure.core.errors import Conflict, NotFound, StaleGeneration, Unavailable
from perdure.snapshots.objects.remote import manifest_name
from perdure.wire.objects import Catalogue, ItemKey, ItemState, PackState
from tests.fakes.catalogue import FakeCatalogue
from tests.fakes.objects import FakeObjects, Fault, Killed, Turns
from tests.unit.snapshots.objects.stores import TENANT, Home, marked


def objects_of(objects: FakeObjects) -> set[str]:
    return {name for name in objects.data if name != "perdure.json"}


@dataclass
class World:
    """Many processes on one store. ``wanted`` is what was acknowledged as durable and never released."""

    random: Random
    objects: FakeObjects = field(default_factory=marked)
    catalogue: Catalogue = field(default_factory=FakeCatalogue)
    wanted: dict[str, dict[int, int]] = field(default_factory=dict)
    tried: dict[str, dict[int, int]] = field(default_factory=dict)
    names: Any = field(default_factory=lambda: itertools.count(1))
    kills: int = 0

    def fault(self, operation: str, name: str) -> Fault | None:
        if self.random.random() > 0.04:
            return None
        return self.random.choice([Fault.REFUSED, Fault.LOST, Fault.LATE])

    def should_kill(self) -> bool:
        dies = self.random.random() < 0.01
        self.kills += dies
        return dies

    def home(self, turns: Turns, process: str) -> Home:
        clock = itertools.count(self.random.getrandbits(44)).__next__
        objects, catalogue = turns.wrap(self.objects, process), turns.wrap(self.catalogue, process)
        return Home(objects, catalogue, pack_bytes=self.random.choice([700, 1500, 4000]), clock=clock)

    def seeds(self) -> dict[int, int]:
        """Content that shares much with that of others."""
        return {number: self.random.randrange(4) * 100 + number for number in range(self.random.randrange(1, 12))}

    async def upload(self, home: Home, name: str) -> None:
        seeds = self.tried.setdefault(name, self.seeds())
        item, _ = await home.upload(name, seeds)
        if item.state is ItemState.DURABLE:
            self.wanted[name] = seeds

    async def release(self, home: Home, name: str) -> None:
        self.wanted.pop(name, None)
        self.tried.pop(name, None)  # a snapshot's id is used once
        await home.catalogue.release(ItemKey(TENANT, name))

    async def read(self, home: Home, name: str) -> None:
        assert await home.has(name, self.wanted[name]), f"{name} cannot be read while it is wanted"

    def work(self, turns: Turns, process: str) -> Awaitable[Any]:
        home, dice = self.home(turns, process), self.random.random()
        unfinished = sorted(self.tried.keys() - self.wanted.keys())
        if dice < 0.2 and unfinished:
            return self.upload(home, self.random.choice(unfinished))
        if dice < 0.5:
            return self.upload(home, f"snp_{next(self.names)}")
        if dice < 0.6 and self.wanted:
            return self.release(home, self.random.choice(sorted(self.wanted)))
        if dice < 0.85:
            return home.collector.collect(TENANT)
        return home.collector.rewrite(TENANT)

    async def round(self, rng: Random) -> None:
        turns = Turns(rng)
        work = {f"p{number}": self.work(turns, f"p{number}") for number in range(rng.randrange(1, 4))}
        self.objects.faults = self.fault
        for result in (await turns.run(work, kill_if=self.should_kill)).values():
            allowed = (Killed, Unavailable, StaleGeneration, Conflict, NotFound, type(None))
            if isinstance(result, BaseException) and not isinstance(result, allowed):
                raise result
        self.objects.faults = lambda operation, name: None
        if rng.random() < 0.5:
            self.objects.deliver(rng)

    async def check_wanted(self) -> None:
        reader = Home(self.objects, self.catalogue)
        for name, seeds in sorted(self.wanted.items()):
            assert await reader.has(name, seeds), f"{name} was acknowledged and is lost"

    async def check_nothing_else(self) -> None:
        """Settle all, then let two epochs pass after the last that anything could be reached in."""
        while self.objects.late:
            self.objects.deliver(self.random)
        home = Home(self.objects, self.catalogue, clock=itertools.count(self.random.getrandbits(44)).__next__)
        await home.collect(passes=2)  # what was abandoned is let go
        await home.collect(passes=2)  # two passes, one epoch apart
        await self.check_wanted()
        items = await self.catalogue.items(TENANT)
        kept = {manifest_name(item.key, item.attempt) for item in items}
        for item in items:
            assert item.state is ItemState.DURABLE, f"{item.key} stays {item.state}"
            kept |= {f"{TENANT}/packs/{pack.pack_id}" for pack in await self.catalogue.holds(item.key)}
        assert objects_of(self.objects) == kept, "objects that nobody can reach are still there, or some are missing"
        held = {pack.pack_id for item in items for pack in await self.catalogue.holds(item.key)}
        left = await self.catalogue.packs(TENANT)
        assert {pack.pack_id for pack in left} == held, "rows leak"
        assert all(pack.state is PackState.STORED for pack in left)
        if isinstance(self.catalogue, FakeCatalogue):
            assert self.catalogue.rows.keys() == held, "rows of packs that never were whole leak"


async def simulate(seed: int, rounds: int = 25, catalogue: Catalogue | None = None) -> World:
    """Raises AssertionError when something is lost or left."""
    world = World(Random(seed), catalogue=catalogue or FakeCatalogue())
    for _ in range(rounds):
        await world.round(world.random)
        await world.check_wanted()
    await world.check_nothing_else()
    return world
