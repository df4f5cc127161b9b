"""A server, workers and a database as processes of their own, which are killed one after the other and come back."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

from perdure.core.config import Settings
from perdure.core.crashpoints import CrashPoint
from perdure.core.errors import PerdureError
from perdure.sdk import AsyncClient
from tests.torture.cluster import Cluster

ROOT = Path(__file__).resolve().parents[3]
HANDLERS = Path(__file__).parent / "handlers"
DEADLINE_S = 60.0
#: How long a named point is waited for.
POINT_S = 3.0
WORKERS = 2
FUNCTIONS = ("witnessed:story", "witnessed:double")
T = TypeVar("T")
#: Named points that the functions here pass.
POINTS = tuple(
    CrashPoint(f"runs.{name}")
    for name in (
        *("batch-gathered", "batch-committed", "start-committed", "claim-committed", "checkpoint-committed", "answer-committed"),
        *("timer-due", "timer-fired", "callback-completed", "child-wanted", "child-started", "parent-owed", "parent-told"),
    )
)


@dataclass
class Yard:
    """``killed`` counts what was killed, by what and where."""

    home: Path
    cluster: Cluster
    url: str
    random: Random
    concurrency: int
    killed: Counter[str] = field(default_factory=Counter)
    server: int = 0
    _forker: asyncio.subprocess.Process | None = None
    _keeper: asyncio.Task[None] | None = None
    _serves: asyncio.Event = field(default_factory=asyncio.Event)
    _workers: list[asyncio.subprocess.Process] = field(default_factory=list)
    _strikes: int = 0

    @property
    def witness(self) -> Path:
        return self.home / "witness"

    def told(self) -> list[list[str]]:
        """What the functions have told, the words of each line."""
        return [line.split(" ") for line in self.witness.read_text().splitlines()]

    def lines(self) -> int:
        return self.witness.read_bytes().count(b"\n")

    # ------------------------------------------------------------------------------------------------------------- processes

    async def open(self) -> None:
        self.witness.touch()
        with (self.home / "server.log").open("ab") as log:
            self._forker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.integration.runs.serving", str(self.home), self.url),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
            )
        self._keeper = asyncio.create_task(self._keep(self._forker))
        async with asyncio.timeout(DEADLINE_S):
            await self._serves.wait()
        for _ in range(WORKERS):
            self._workers.append(await self._worker())
        async with self.client() as client, asyncio.timeout(DEADLINE_S):
            while len(await self.surely(client.executions.functions)) < len(FUNCTIONS):
                await pause(0.1)

    async def _keep(self, forker: asyncio.subprocess.Process) -> None:
        """A server that ends is started again, however it ended."""
        assert forker.stdin is not None and forker.stdout is not None
        forker.stdin.write(b"\n")
        while line := (await forker.stdout.readline()).decode():
            word, number = line.split()
            if word == "serving":
                self.server = int(number)
                self._serves.set()
            else:
                self._serves.clear()
                await pause(0.1)  # it may have ended because the database is away
                forker.stdin.write(b"\n")

    async def _worker(self) -> asyncio.subprocess.Process:
        path = os.pathsep.join(part for part in (str(HANDLERS), os.environ.get("PYTHONPATH", "")) if part)
        own = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PERDURE_"))}
        own |= {"PERDURE_HOME": str(self.home), "PYTHONPATH": path, "WITNESS": str(self.witness)}
        with (self.home / "workers.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "perdure.cli.main", "worker", "--json", "--concurrency", str(self.concurrency)),
                *FUNCTIONS,
                env=own,
                cwd=self.home,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def close(self) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._forker is not None and self._forker.stdin is not None:
            self._forker.stdin.close()
            while self._forker.returncode is None:  # it ends when no server of its is left
                _kill(self.server)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await self._forker.wait()

    async def surely(self, call: Callable[[], Awaitable[T]]) -> T:
        """As a client that repeats what was not answered."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    return await call()
                except PerdureError as error:
                    if not (error.retryable or error.status >= 500):
                        raise
                    await self._serves.wait()
                    await pause(0.05)

    def client(self) -> AsyncClient:
        return AsyncClient(settings=Settings(home=self.home, url=None, api_key=None))

    # ----------------------------------------------------------------------------------------------------------------- kills

    async def strike(self) -> None:
        """One kill of chance, which happens."""
        kinds = (self._kill_server, self._kill_at_a_point, self._kill_worker, self._kill_database)
        strikes: tuple[Callable[[], Awaitable[None]], ...] = kinds
        first = self._strikes < len(strikes)  # each of them, however few there are
        strike = strikes[self._strikes] if first else self.random.choices(strikes, (8, 6, 3, 2))[0]
        self._strikes += 1
        await strike()

    async def _kill_server(self) -> None:
        pid = await self._living()
        await pause(self.random.random() * 0.1)
        _kill(pid)
        await self._is_over(pid)
        self.killed["server"] += 1

    async def _living(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            await self._serves.wait()
        return self.server

    async def _is_over(self, pid: int) -> None:
        """Until another one serves in its place."""
        assert await holds(lambda: self.server != pid and self._serves.is_set(), DEADLINE_S), "no server comes back"

    async def _kill_at_a_point(self) -> None:
        """The server, a worker or the database, when the server passes it."""
        point, what = self.random.choice(POINTS), self.random.choice(("server", "server", "worker", "database"))
        pid, crash, victim = await self._living(), self.home / "crash", self.home / "victim"
        number = self.random.randrange(len(self._workers))
        victim.unlink(missing_ok=True)
        if what == "worker":
            victim.write_text(str(self._workers[number].pid))
        if what == "database":
            postmaster = self.cluster.pid()
            assert postmaster is not None
            victim.write_text(str(postmaster))
        crash.write_text(f"{point.value} server 1")
        if not await holds(lambda: not crash.exists(), POINT_S):
            crash.unlink(missing_ok=True)
            return
        self.killed[f"{what} at {point.value}"] += 1
        if what == "server":
            await self._is_over(pid)
        elif what == "worker":
            await self._again(number)
        else:
            await self.cluster.start()

    async def _kill_worker(self) -> None:
        number = self.random.randrange(len(self._workers))
        self._workers[number].kill()
        await self._again(number)
        self.killed["worker"] += 1

    async def _again(self, number: int) -> None:
        """Another one in the place of a worker that was killed."""
        async with asyncio.timeout(DEADLINE_S):
            code = await self._workers[number].wait()
        assert code == -signal.SIGKILL, f"a worker ended with {code} by itself"
        self._workers[number] = await self._worker()

    async def _kill_database(self) -> None:
        await self.cluster.kill()
        self.killed["database"] += 1


async def pause(seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


async def holds(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it does within so long: files and other processes tell nobody."""
    until = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > until:
            return False
        await pause(0.02)
    return True


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def yard(seed: int, concurrency: int) -> AsyncIterator[Yard]:
    """``concurrency``: processes of each worker."""
    home = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))  # short, for sockets
    home.chmod(0o711)
    (home / "pg").mkdir(mode=0o711)
    cluster = Cluster(home / "pg")
    try:
        made = Yard(home, cluster, await cluster.url("runs"), Random(seed), concurrency)
        try:
            await made.open()
            yield made
        finally:
            await made.close()
    finally:
        await cluster.stop()
        shutil.rmtree(home)
