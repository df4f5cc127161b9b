"""An older embedded cluster on its way to ours, killed at each named point of that: rounds of their own.

Each life of the server goes on where the one before was killed. The last one serves everything that the older cluster held, and
neither a half made cluster nor a process of it is left.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

from perdure.core.crashpoints import CrashPoint
from perdure.db.embedded import EmbeddedPostgres
from perdure.db.programs import last_line, processes_in
from tests.integration.db.older import WHEEL, holds_all, make_older
from tests.torture.model import Outcome, Violation, told_by
from tests.torture.registry import Kind, Place
from tests.torture.story import clear

ROOT = Path(__file__).resolve().parent.parent.parent
#: In the order of an upgrade.
NAMED = tuple(point for point in CrashPoint if point.value.startswith("upgrade."))
CLUSTERS = ("data", "data.before", "data.upgrade")
KEPT = {"data", "socket", "postgres.log", "upgrade.log"}
LIFE_DEADLINE_S = 120.0
FURTHER_S = 4.0  # after that none follows for which the upgrade must be made anew, which takes some seconds


class Upgrades:
    """Points are ``upgrade.* server``. The older cluster is made once, and copied for each round."""

    points = tuple(f"{point.value} server" for point in NAMED)
    _quick = points[NAMED.index(CrashPoint.UPGRADE_SET_ASIDE) :]  # what comes after these takes no second upgrade

    def __init__(self, place: Place) -> None:
        self._place = place
        self._scratch = place.scratch / "upgrades"
        self._scratch.mkdir(mode=0o711)
        self._older = self._scratch / "older"
        self._rounds = 0

    async def close(self) -> None:
        clear(self._scratch)

    async def round(self, point: str) -> Outcome:
        home = await self._begin()
        fired, violations = list[str](), tuple[str, ...]()
        later = [one for one in self._place.with_it(point, self.points) if self.points.index(one) >= self.points.index(point)]
        try:
            until = time.monotonic() + FURTHER_S
            for one in sorted(later, key=self.points.index):
                if one == point or time.monotonic() < until or (fired and fired[-1] in self._quick):
                    fired += [one] if await self._dies(home, one.split()[0]) else []
            await self._check(home)
        except Exception as error:
            violations = told_by(error)
        await EmbeddedPostgres(home).stop()
        clear(home)
        also = tuple(one for one in fired if one != point)
        return Outcome(point, point in fired, violations, f"then {', '.join(also)}" if also else "", also)

    async def _begin(self) -> Path:
        """A home that an older release has left."""
        if not self._older.exists():
            self._older.mkdir(mode=0o711)
            await (await make_older(self._older, WHEEL)).stop()
        self._rounds += 1
        home = self._scratch / f"h{self._rounds}"
        copying = await asyncio.create_subprocess_exec("cp", "-a", str(self._older), str(home))  # with whom its files belong to
        if await copying.wait() != 0:
            raise OSError(f"{self._older} could not be copied")
        return home

    async def _dies(self, home: Path, name: str) -> bool:
        """Whether a server that starts was killed at the point. It may be past it."""
        command = (sys.executable, "-m", "tests.integration.db.dying", str(home), name)
        said, into = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        server = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=said, stderr=into)
        told, _ = await asyncio.wait_for(server.communicate(), LIFE_DEADLINE_S)
        code = server.returncode
        if code not in (0, -signal.SIGKILL):
            raise Violation(f"a start after a crash ended with {code}: {last_line(told.decode(errors='replace'))}")
        if not any((home / "db" / cluster / "PG_VERSION").exists() for cluster in CLUSTERS):
            raise Violation(f"no cluster is left after a crash at {name}")
        return code == -signal.SIGKILL

    async def _check(self, home: Path) -> None:
        postgres = EmbeddedPostgres(home, settings={"fsync": "off"})
        url = await postgres.start()
        await asyncio.to_thread(holds_all, url)
        if left := {path.name for path in (home / "db").iterdir()} - KEPT:
            raise Violation(f"{sorted(left)} is left of an upgrade that is over")
        await postgres.stop()
        if running := [pid for path in (home / "db").rglob("*") if path.is_dir() for pid in processes_in(path)]:
            raise Violation(f"{len(running)} processes of an upgrade that is over are left")


KINDS = (Kind("upgrade", Upgrades, kills_at=frozenset(NAMED)),)
