"""Rounds in which a process is killed by SIGKILL: a server or a machine at a named point, a server or the database at any time;
or a clock is set back.

One round is two lives of a server over the same home and database: in the first the fault happens under load, the second recovers
and checks everything. Lives are forked by ``life``; the database is real.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.core.crashpoints import CrashPoint
from tests.torture.cluster import Cluster
from tests.torture.life import Order
from tests.torture.model import Outcome, told_by
from tests.torture.registry import Place
from tests.torture.story import clear

ROOT = Path(__file__).resolve().parent.parent.parent
LIFE_DEADLINE_S = 60.0  # of a life that hangs; one takes about a second
TELLS_S = 2.0  # what it waits for
STEPS = 40
RANDOM_DELAY_S = 0.6
FURTHER_S = 5.0  # after that none follows: a round shall take 10 seconds
#: Points that have a machine, which can be the victim there.
WITH_MACHINE = (
    *(CrashPoint.START_CLAIMED, CrashPoint.START_RESTORED, CrashPoint.START_RUNNING, CrashPoint.START_AWAKE),
    *(CrashPoint.CAPTURE_READY, CrashPoint.CAPTURE_PAUSED, CrashPoint.CAPTURE_COPIED, CrashPoint.CAPTURE_PUBLISHED),
    *(CrashPoint.LAYERS_MERGED, CrashPoint.LAYERS_RECORDED),
)


@dataclass
class _House:
    """A home and a database that several rounds go on with."""

    order: Order
    home: Path
    database: str
    rounds: int = 0


@dataclass(frozen=True)
class _Lived:
    """How a life went. ``code`` is that of its process, negative for a signal."""

    lines: tuple[str, ...]
    code: int

    @property
    def violations(self) -> tuple[str, ...]:
        return tuple(line.removeprefix("violation ") for line in self.lines if line.startswith("violation "))


@dataclass(frozen=True)
class Lived:
    """Which lives are killed: ``module`` forks them, and is run as a program; ``home`` begins the names of their homes and
    databases; ``kill`` those of the points that lie at no place. ``faults``: in one round, if time permits.
    ``rounds``: that go on with one home."""

    module: str = "tests.torture.life"
    home: str = "house"
    kill: str = "kill"
    faults: int = 4
    rounds: int = 5


WORKSPACES = Lived()


class Kills:
    """Points are ``CRASHPOINT server``, ``… vmm``, ``… agent`` and ``… database``, ``kill.*`` at any time, and ``clock.back``."""

    def __init__(self, place: Place, named: Set[CrashPoint] = frozenset(CrashPoint), lived: Lived = WORKSPACES) -> None:
        self.points = (
            *(f"{point.value} server" for point in CrashPoint if point in named),
            *(f"{point.value} vmm" for point in WITH_MACHINE if point in named),
            *(f"{point.value} agent" for point in WITH_MACHINE if point in named),
            *(f"{point.value} database" for point in CrashPoint if point in named),
            *(f"{lived.kill}.{when}" for when in ("working", "recovering", "database")),
            *(("clock.back",) if lived is WORKSPACES else ()),
        )
        self._lived = lived
        self._place = place
        self._tried: Counter[str] = Counter()
        self._scratch = scratch = place.scratch
        self._image = place.image
        self._random = place.random
        self._defect = place.defect
        self._keep = place.keep
        self._house: _House | None = None
        self._forker: asyncio.subprocess.Process | None = None
        self._houses = 0
        self._pid = 0  # of the life that was born last
        cluster = scratch / f"pg-{lived.home}"
        cluster.mkdir(mode=0o711)
        self._cluster = Cluster(cluster)

    async def close(self) -> None:
        if self._forker is not None and self._forker.stdin is not None:
            self._forker.stdin.close()
            await self._forker.wait()
        await self._leave()
        await self._cluster.stop()

    async def round(self, point: str) -> Outcome:
        """A fault, then others at named points; each life recovers from the one before, and the last from them all."""
        house = await self._enter()
        house.rounds += 1
        outcome = await self._faults(house.order, [point, *self._rarest(point)])
        if outcome.violations:
            if self._keep is not None:
                kept = self._keep / f"{house.database}-{point.replace(' ', '-')}-{house.rounds}"
                shutil.copytree(house.home, kept, symlinks=True)
                shutil.copy(self._scratch / "lives.log", kept)
            await self._leave()  # what one round has broken must not be found again by the next
        return outcome

    def _rarest(self, point: str) -> list[str]:
        others = [one for one in self._place.with_it(point, self.points)[1:] if " " in one]
        self._random.shuffle(others)
        return sorted(others, key=lambda one: self._tried[one])[: self._lived.faults - 1]

    async def _faults(self, order: Order, points: Sequence[str]) -> Outcome:
        fired, violations, detail = set[str](), list[str](), list[str]()
        try:
            begun = time.monotonic()
            for number, point in enumerate(points):
                if number and time.monotonic() - begun > FURTHER_S:
                    break
                self._tried[point] += 1
                order = replace(order, seed=self._random.randrange(1 << 30), checks=number > 0)
                detail.append(f"{point} with seed {order.seed}")
                lived = await self._break(order, point)
                fired |= {point} if _has_fired(lived) else set()
                # While the database is away, a life cannot see that all is well.
                violations += () if point == f"{self._lived.kill}.database" else lived.violations
                if violations:
                    break
            last = await self._live(replace(order, steps=0, checks=True))
            violations += last.violations
            if last.code not in (0, 1) or (last.code == 1 and not violations):
                violations.append(f"a recovery ended with {last.code}: {last.lines[-3:]}")
        except Exception as error:
            violations += told_by(error)
        also = tuple(one for one in points[1:] if one in fired)
        return Outcome(points[0], points[0] in fired, tuple(violations), ", then ".join(detail), also)

    async def _break(self, order: Order, point: str) -> _Lived:
        kill = self._lived.kill
        if point == f"{kill}.working":
            return await self._live(order, kill_after="working")
        if point == f"{kill}.recovering":
            await self._live(order, kill_after="working")
            return await self._live(replace(order, steps=0, checks=True), kill_after="born")
        if point == f"{kill}.database":
            return await self._live(order, kill_after="working", before=self._cluster.kill)
        if point == "clock.back":
            return await self._live(replace(order, clock_back=True))
        name, victim = point.split()
        hit = self._random.choice((1, 1, 2))
        if victim == "database":  # somebody starts it again, and the server goes on
            async with self._cluster.kept_up(lambda: _signal(self._pid, signal.SIGUSR2)) as postmaster:
                return await self._live(replace(order, crash=f"{name} server {hit}", kills=postmaster))
        if victim == "agent":
            return await self._live(replace(order, crash=f"{name} vmm {hit}", kills_agent=True))
        return await self._live(replace(order, crash=f"{name} {victim} {hit}"))

    # --------------------------------------------------------------------------------------------------------------- lives

    async def _live(
        self, order: Order, *, kill_after: str | None = None, before: Callable[[], Awaitable[object]] | None = None
    ) -> _Lived:
        """One life; with ``kill_after`` it is killed some time after it has said that word, and ``before`` that, this is done."""
        forker = await self._fork_server()
        assert forker.stdin is not None and forker.stdout is not None
        forker.stdin.write(order.to_line())
        lines: list[str] = []
        pid = 0
        limit_s, is_killing = LIFE_DEADLINE_S, False
        while True:
            try:
                line = (await asyncio.wait_for(forker.stdout.readline(), limit_s)).decode().strip()
            except TimeoutError:
                if is_killing and before is not None:
                    await before()
                    before, limit_s = None, self._random.random() * RANDOM_DELAY_S
                    continue
                if is_killing:
                    is_killing, limit_s = False, LIFE_DEADLINE_S
                    _kill(pid)
                    continue
                _signal(pid, signal.SIGUSR1)  # it writes to its log what it waits for
                with suppress(TimeoutError):
                    await asyncio.wait_for(forker.stdout.readline(), TELLS_S)
                _kill(pid)
                raise TimeoutError(f"a life did not end within {LIFE_DEADLINE_S:g} s: {lines[-3:]}") from None
            word, _, rest = line.partition(" ")
            if word == "ended":
                return _Lived(tuple(lines), int(rest))
            if not word:
                self._forker = None
                raise RuntimeError("the process that forks servers has ended")
            if word == "born":
                pid = self._pid = int(rest)
            if word == kill_after:
                limit_s, is_killing = self._random.random() * RANDOM_DELAY_S, True
            lines.append(line)

    async def _fork_server(self) -> asyncio.subprocess.Process:
        if self._forker is None:
            with (self._scratch / "lives.log").open("ab") as log:
                self._forker = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", self._lived.module),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    cwd=ROOT,
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
        return self._forker

    async def _enter(self) -> _House:
        if self._house is not None and self._house.rounds >= self._lived.rounds:
            await self._leave()
        if self._house is None:
            self._houses += 1
            database = f"{self._lived.home}{self._houses}"
            home = self._scratch / database
            home.mkdir()
            url = await self._cluster.url(database)
            order = Order(str(home), str(self._image), url, f"nod_{database}", 0, STEPS, False, defect=self._defect)
            self._house = _House(order, home, database)
        return self._house

    async def _leave(self) -> None:
        house, self._house = self._house, None
        if house is not None:
            await self._cluster.drop(house.database)
            clear(house.home)


def _has_fired(lived: _Lived) -> bool:
    return lived.code == -signal.SIGKILL or "fired" in lived.lines


def _kill(pid: int) -> None:
    _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
