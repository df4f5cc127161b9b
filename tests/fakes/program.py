"""A workspace's program in memory: supervised as a guest does it, with short waits. Its commands are the fake guest's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from perdure.core.ids import ExecId
from perdure.wire.node import (
    ExecSpec,
    LogChunk,
    LogRequest,
    ProgramEnd,
    ProgramSpec,
    ProgramState,
    ProgramStatus,
    Restart,
)

if TYPE_CHECKING:
    from tests.fakes.memory_guest import Command

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
FIRST_WAIT_S = 0.01
#: The end of the output that is kept.
LOG_BYTES = 1024 * 1024

Run = Callable[["Command"], Awaitable[None]]
Make = Callable[[ExecSpec, int], "Command"]


class FakeProgram:
    """Survives generations, as a program does. ``make`` and ``run`` come from the guest of the moment."""

    def __init__(self) -> None:
        self.spec: ProgramSpec | None = None
        self.problem = ""
        self.log = bytearray()
        self.log_start = 0
        self.command: Command | None = None
        self.restarts = self.failures = 0
        self.last: ProgramEnd | None = None
        self._is_wanted = True
        self._is_waiting = False
        self._pid = 500
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def write(self, data: bytes) -> None:
        """What it says."""
        self.log += data
        surplus = len(self.log) - LOG_BYTES
        if surplus > 0:
            del self.log[:surplus]
            self.log_start += surplus
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def state(self) -> ProgramState:
        if self.command is not None:
            return ProgramState.RUNNING
        if self.spec is None:
            return ProgramState.NONE
        if not self._is_wanted:
            return ProgramState.STOPPED
        return ProgramState.BACKING_OFF if self._is_waiting else ProgramState.ENDED

    def status(self) -> ProgramStatus:
        is_up = self.command is not None
        return ProgramStatus(
            spec=self.spec,
            state=self.state,
            pid=self._pid if is_up else None,
            started_at=MOMENT if is_up else None,
            restarts=self.restarts,
            failures=self.failures,
            retry_in_s=self._wait_s if self._is_waiting else None,
            last=self.last,
            problem=self.problem,
            log_start=self.log_start,
            log_end=self.log_start + len(self.log),
        )

    @property
    def _wait_s(self) -> float:
        return float(min(60.0, FIRST_WAIT_S * 2 ** max(0, self.failures - 1)))

    def kill(self) -> None:
        """Its machine is gone."""
        for task in (self._task, self.command.task if self.command else None):
            if task is not None:
                task.cancel()

    async def start(self, make: Make, run: Run) -> None:
        self._is_wanted = True
        if self.command is None:
            await self._end()
            self.failures = 0
            if self.spec is not None:
                began = asyncio.Event()
                self._task = asyncio.create_task(self._supervise(self.spec, make, run, began))
                await began.wait()

    async def stop(self) -> None:
        self._is_wanted = False
        await self._end()

    async def _end(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self.command is not None:
            if self.command.task is not None:
                self.command.task.cancel()
            self.last = ProgramEnd(143, 15, "", 0.25)
            self.command = None
        self._is_waiting = False
        self._tell()

    async def _supervise(self, spec: ProgramSpec, make: Make, run: Run, began: asyncio.Event) -> None:
        shell = spec.argv[2] if spec.argv[:2] == ("/bin/sh", "-c") else None
        argv = None if shell is not None else spec.argv
        env = {"PORT": str(spec.port), **spec.env}
        while True:
            self._pid += 1
            asked = ExecSpec(ExecId("program"), argv=argv, shell=shell, env=env, cwd=spec.cwd, user=spec.user)
            command = self.command = make(asked, self._pid)
            command.task = asyncio.ensure_future(run(command))
            for _ in range(2):
                await asyncio.sleep(0)
            began.set()
            await asyncio.wait({command.task})
            self.command = None
            exited = command.exited
            code = exited.exit_code if exited else None
            self.last = ProgramEnd(code, exited.signal if exited else None, exited.detail if exited else "", 0.25)
            if spec.restart is Restart.NEVER or (spec.restart is Restart.ON_FAILURE and code == 0):
                self._tell()
                return
            self.failures += 1
            self.restarts += 1
            self._is_waiting = True
            self._tell()
            await asyncio.sleep(self._wait_s)
            self._is_waiting = False

    async def read(self, request: LogRequest, broken: asyncio.Event) -> AsyncIterator[LogChunk]:
        end = self.log_start + len(self.log)
        offset = self.log_start if request.offset is None else request.offset if request.offset <= end else 0
        if request.tail is not None:
            lines = bytes(self.log).splitlines(keepends=True)
            offset = end - sum(map(len, lines[-request.tail :] if request.tail else []))
        while True:
            changed = self._changed
            gap = max(0, self.log_start - offset)
            offset += gap
            data = bytes(self.log[offset - self.log_start :])
            if data or gap:
                yield LogChunk(offset, data, gap)
                offset += len(data)
            if not request.follow or broken.is_set():
                return
            waits = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(broken.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
