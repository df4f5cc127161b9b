"""What the tests of ``perdure worker`` share: the process, its events, and executions to run."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from perdure.core.clock import SystemClock
from perdure.core.ids import DEFAULT_TENANT
from perdure.runs.engine import Rules
from perdure.runs.protocol import ExecutionInfo
from perdure.runs.service.model import NewExecution
from perdure.runs.service.service import ExecutionService
from tests.fakes.api_server import FakeServer
from tests.fakes.database import fresh_database

HANDLERS = Path(__file__).parent / "handlers"
DEADLINE_S = 90


class Started:
    """A worker. Its events are read as they come."""

    def __init__(self, words: tuple[str, ...], environment: dict[str, str], directory: Path) -> None:
        self._stderr = directory / "stderr"
        with self._stderr.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "perdure.cli.main", "worker", "--json", *words],
                env=environment,
                cwd=directory,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.seen: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._events.put(json.loads(line))
        self._events.put(None)

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next event of this kind with these fields."""
        until = time.monotonic() + DEADLINE_S
        while True:
            try:
                one = self._events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                one = None
            assert one is not None, f"no {kind} {fields}; seen: {self.seen}\n{self.stderr}"
            self.seen.append(one)
            if one["event"] == kind and fields.items() <= one.items():
                return one

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_S)

    def children(self) -> list[int]:
        """Its processes that are alive."""
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def begin(server: FakeServer, function: str, event: Any = None, **more: Any) -> str:
    """Start an execution; its id."""
    new = NewExecution(DEFAULT_TENANT, function, json.dumps(event), **more)
    return server.run(lambda: server.services.executions.begin(new)).execution_id


def ended(server: FakeServer, execution_id: str) -> ExecutionInfo:
    """What became of it."""
    told = server.run(lambda: server.services.executions.ended(DEFAULT_TENANT, execution_id, 55.0))
    assert told is not None, "it has not ended"
    return told


class RealService:
    """Puts the service over PostgreSQL into a server, in place of the one in memory, for as long as the block lasts."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self._stack = AsyncExitStack()

    def __enter__(self) -> Self:
        self.server.stop()
        self.server.run(self._open)
        self.server.start()
        return self

    async def _open(self) -> None:
        self.database = await self._stack.enter_async_context(fresh_database())
        self.service = ExecutionService(self.database, SystemClock(), Rules())
        await self.service.start()
        self._stack.push_async_callback(self.service.close)
        self.server.services = replace(self.server.services, executions=self.service)

    async def advance(self, seconds: float) -> None:
        self.database.shift_clock(seconds)
        await self.service.settled()
        await self.service.clockwork.turn()
        await self.service.settled()

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.server.run(self._stack.aclose)
        self.server.start()


def advance(server: FakeServer, seconds: float, real: RealService | None = None) -> None:
    """Move the server's clock."""
    server.run(lambda: (real or server.executions).advance(seconds))


def notes(directory: Path, name: str) -> list[str]:
    """What handlers have written down, a line each."""
    path = directory / name
    return path.read_text().splitlines() if path.exists() else []


def pids_in(directory: Path, name: str) -> set[int]:
    return {int(line.split()[-1]) for line in notes(directory, name)}
