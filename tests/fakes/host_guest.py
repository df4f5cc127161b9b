"""Commands of a workspace as processes of this host, for what only needs to start some: no agent, no machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping

from perdure.core.errors import AlreadyExists, Conflict, NotFound
from perdure.core.ids import ExecId
from perdure.wire import node
from perdure.wire.node import ExecEnd
from tests.fakes.memory_files import MOMENT


class HostCommand:
    """One process with what it has written, for handles that come later."""

    def __init__(self, spec: node.ExecSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.process = process
        self.output = {"stdout": bytearray(), "stderr": bytearray()}
        self.exited: node.ExecExited | None = None
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        await asyncio.gather(self._read("stdout", self.process.stdout), self._read("stderr", self.process.stderr))
        code = await self.process.wait()
        number = -code if code < 0 else None
        end = ExecEnd.SIGNALED if number else ExecEnd.EXITED
        self.exited = node.ExecExited(self.spec.exec_id, end, 128 + number if number else code, number)
        self._tell()

    async def _read(self, name: str, pipe: asyncio.StreamReader | None) -> None:
        assert pipe is not None
        while data := await pipe.read(65536):
            self.output[name] += data
            self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class HostHandle:
    """An attachment."""

    def __init__(self, command: HostCommand, offsets: dict[str, int]) -> None:
        self.exec_id = command.spec.exec_id
        self._command = command
        self._offsets = offsets

    async def events(self) -> AsyncIterator[node.ExecEvent]:
        command = self._command
        yield node.ExecStarted(self.exec_id, command.process.pid)
        while True:
            changed, exited = command.changed, command.exited
            for name in ("stdout", "stderr"):
                while data := bytes(command.output[name][self._offsets[name] :][:65536]):
                    yield node.ExecOutput(name, self._offsets[name], data)  # type: ignore[arg-type]
                    self._offsets[name] += len(data)
            if exited is not None:
                yield exited
                return
            await changed.wait()

    async def write_stdin(self, data: bytes) -> None:
        assert self._command.process.stdin is not None
        self._command.process.stdin.write(data)

    async def close_stdin(self) -> None:
        assert self._command.process.stdin is not None
        self._command.process.stdin.close()

    async def close(self) -> None:
        pass


class HostGuest:
    """``start_exec`` and what goes with it. ``python3`` is the interpreter of this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {**os.environ, **environment}
        self.commands: dict[str, HostCommand] = {}

    async def start_exec(self, spec: node.ExecSpec) -> HostHandle:
        known = self.commands.get(spec.exec_id)
        if known is not None:
            raise AlreadyExists("It exists.") if known.spec == spec else Conflict("The id is that of another command.")
        assert spec.argv is not None and spec.argv[0] == "python3"
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *spec.argv[1:]), stdin=pipe, stdout=pipe, stderr=pipe, env={**self.environment, **spec.env}
        )
        self.commands[spec.exec_id] = HostCommand(spec, process)
        return HostHandle(self.commands[spec.exec_id], {"stdout": 0, "stderr": 0})

    async def attach_exec(self, exec_id: ExecId, stdout_offset: int = 0, stderr_offset: int = 0) -> HostHandle:
        if exec_id not in self.commands:
            raise NotFound(f"There is no command {exec_id}.")
        return HostHandle(self.commands[exec_id], {"stdout": stdout_offset, "stderr": stderr_offset})

    async def list_execs(self) -> tuple[node.ExecInfo, ...]:
        return tuple(
            node.ExecInfo(
                one.spec.exec_id, one.process.pid, "", MOMENT, one.exited, len(one.output["stdout"]), len(one.output["stderr"])
            )
            for one in self.commands.values()
        )

    async def kill_exec(self, exec_id: ExecId) -> None:
        self.commands[exec_id].process.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        for command in self.commands.values():
            if command.exited is None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and its task has not seen that yet
                    command.process.kill()
            await command.task
