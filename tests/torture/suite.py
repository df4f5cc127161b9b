"""The suite: chooses the next point by what has fired least, and runs it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from perdure.core.config import Settings
from perdure.core.crashpoints import CrashPoint
from perdure.core.errors import InvalidRequest
from tests.torture.damage_rounds import Damage, LateCommands
from tests.torture.defects import switched_on
from tests.torture.disk_rounds import FullDisks, PowerCuts
from tests.torture.kill_rounds import Kills
from tests.torture.life import BIRTH, STEPS
from tests.torture.model import GOAL, TRIES_MAX, Outcome, Source, Table, told_by
from tests.torture.node import make_image, small_thresholds
from tests.torture.registry import Kind, Place, kinds, works
from tests.torture.story import clear
from tests.torture.vm_rounds import VirtualMachines


@dataclass(frozen=True)
class Plan:
    """``kinds``: names of sources. ``points``: only these of theirs. ``until_violation`` ends with the first."""

    rounds: int
    seed: int
    defect: str | None = None
    kinds: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    until_violation: bool = False
    keep: Path | None = None  # a directory for the homes of servers of which something was violated


Show = Callable[[Outcome, float], None]  # is told of each round and how many seconds it took
ADDED = tuple(kinds())
#: Named points of the product at which added rounds kill; ``kills`` does so at all others.
ELSEWHERE = frozenset[CrashPoint]().union(*(kind.kills_at for kind in ADDED))
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("cuts", PowerCuts),
        Kind("full", FullDisks),
        Kind("damage", Damage),
        Kind("late", LateCommands),
        Kind("kills", lambda place: Kills(place, frozenset(CrashPoint) - ELSEWHERE), frozenset(CrashPoint) - ELSEWHERE),
        *ADDED,
        Kind("machines", lambda place: VirtualMachines(Settings().images, place.random), is_usual=False),
    )
}
#: All but virtual machines.
USUAL = tuple(kind.name for kind in KINDS.values() if kind.is_usual)


def unreachable() -> list[CrashPoint]:
    """Named points of the product that no round can reach: nobody kills there on their own account, and no step of a life passes
    them."""
    passed = (*BIRTH, *(begin for step in (*STEPS, *works()) for begin in step.passes))
    return [point for point in CrashPoint if point not in ELSEWHERE and not point.value.startswith(passed)]


async def run(plan: Plan, show: Show = lambda *_: None) -> Table:
    """All rounds of a plan. Leaves no file and no process."""
    if "kills" in (plan.kinds or USUAL) and not plan.points and (missed := unreachable()):
        names = ", ".join(point.value for point in missed)
        raise InvalidRequest(f"No round can reach {names}.", hint="docs/torture.md says how a round is added.")
    scratch = Path(tempfile.mkdtemp(prefix="perdure-torture-", dir="/tmp"))
    scratch.chmod(0o711)
    sources: list[Source] = []
    try:
        make_image(scratch / "image")
        random = Random(plan.seed)
        for kind in plan.kinds or USUAL:
            place = Place(scratch, scratch / "image", Random(random.random()), plan.defect, plan.keep, plan.points)
            sources.append(KINDS[kind].make(place))
        with small_thresholds(), switched_on(plan.defect):
            return await _rounds(plan, sources, random, show)
    finally:
        for source in sources:
            await source.close()
        clear(scratch)


async def _rounds(plan: Plan, sources: Sequence[Source], random: Random, show: Show) -> Table:
    of_point = {point: source for source in sources for point in source.points if not plan.points or point in plan.points}
    if unknown := set(plan.points) - set(of_point):
        raise InvalidRequest(f"There is no point {min(unknown)!r} in these rounds.", hint="The table of a run lists the points.")
    table = Table(plan.seed, _shuffled(of_point, random))
    for _ in range(plan.rounds):
        point, begun = _next(table, random), time.monotonic()
        try:
            outcome = await of_point[point].round(point)
        except asyncio.CancelledError:
            table.is_cut_off = True
            break
        except Exception as error:
            outcome = Outcome(point, False, told_by(error))
        seconds = time.monotonic() - begun
        table.add(outcome, seconds)
        show(outcome, seconds)
        if plan.until_violation and table.violations:
            break
    table.points = tuple(of_point)
    return table


def _shuffled(points: Iterable[str], random: Random) -> list[str]:
    order = list(points)
    random.shuffle(order)
    return order


def _next(table: Table, random: Random) -> str:
    """What has not fired often enough comes first; then chance decides."""
    waiting = [point for point in table.rarest(GOAL) if table.tried[point] < TRIES_MAX]
    return waiting[0] if waiting else random.choice(list(table.points))
