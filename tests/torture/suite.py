"""The suite: chooses the next point by what has fired least, and runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from perdure.core.config import Settings
from perdure.core.errors import InvalidRequest
from tests.torture.damage_rounds import Damage, LateCommands
from tests.torture.defects import switched_on
from tests.torture.disk_rounds import FullDisks, PowerCuts
from tests.torture.kill_rounds import Kills
from tests.torture.model import Outcome, Source, Table, told_by
from tests.torture.node import make_image, small_thresholds
from tests.torture.story import clear
from tests.torture.vm_rounds import VirtualMachines

#: Each named point fires at least so often, if there are rounds enough.
GOAL = 3
#: A point that has been tried so often and did not fire enough is left to chance.
TRIES_MAX = 12


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


Place = tuple[Path, Path, Random]  # a scratch directory, the image, and where choices come from
SOURCES: dict[str, Callable[[Place, Plan], Source]] = {
    "cuts": lambda place, _: PowerCuts(*place),
    "full": lambda place, _: FullDisks(*place),
    "damage": lambda place, _: Damage(*place),
    "late": lambda place, _: LateCommands(*place),
    "kills": lambda place, plan: Kills(*place, plan.defect, plan.keep),
    "machines": lambda place, _: VirtualMachines(Settings().images, place[2]),
}
#: All but virtual machines.
USUAL = tuple(kind for kind in SOURCES if kind != "machines")


async def run(plan: Plan, show: Callable[[Outcome], None] = lambda _: None) -> Table:
    """All rounds of a plan. Leaves no file and no process."""
    scratch = Path(tempfile.mkdtemp(prefix="perdure-torture-", dir="/tmp"))
    scratch.chmod(0o711)
    sources: list[Source] = []
    try:
        make_image(scratch / "image")
        random = Random(plan.seed)
        for kind in plan.kinds or USUAL:
            sources.append(SOURCES[kind]((scratch, scratch / "image", Random(random.random())), plan))
        with small_thresholds(), switched_on(plan.defect):
            return await _rounds(plan, sources, random, show)
    finally:
        for source in sources:
            await source.close()
        clear(scratch)


async def _rounds(plan: Plan, sources: Sequence[Source], random: Random, show: Callable[[Outcome], None]) -> Table:
    of_point = {point: source for source in sources for point in source.points if not plan.points or point in plan.points}
    if unknown := set(plan.points) - set(of_point):
        raise InvalidRequest(f"There is no point {min(unknown)!r} in these rounds.", hint="The table of a run lists the points.")
    table = Table(plan.seed, _shuffled(of_point, random))
    for _ in range(plan.rounds):
        point = _next(table, random)
        try:
            outcome = await of_point[point].round(point)
        except Exception as error:
            outcome = Outcome(point, False, told_by(error))
        table.add(outcome)
        show(outcome)
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
