"""Speaking with a workspace's Python kernels: every request is a command that hands it to the kernel's keeper.

What comes back is made in the workspace and treated as an attacker's: bounded, and checked for being what it should.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from perdure.api.kernels import programs
from perdure.core import metrics
from perdure.core.errors import (
    AlreadyExists,
    CellStuck,
    InvalidRequest,
    KernelDied,
    NotFound,
    PerdureError,
    PythonFailed,
    PythonMissing,
    QuotaExceeded,
    Unavailable,
)
from perdure.core.ids import ExecId
from perdure.wire import node, public

#: Sockets of kernels, gone after a boot; and what is known of those that were, which is not.
RUN_DIR = "/run/perdure-python"
STATE_DIR = "/var/lib/perdure/python"
#: Of one line: what a cell may show, as base64 in JSON, and some more.
LINE_BYTES_MAX = 48 << 20
_STDERR_MAX = 2000
#: How long a kernel may take to start; under emulation, on a busy host, it takes a minute.
START_S = 300.0
_SIGALRM = 14
#: What ends a cell without its having been done.
_ENDS = frozenset({"died", "stuck", "failed"})

#: As the keeper says it too.
ON_REQUEST = "It was restarted on request."

#: Makes an id for a command.
Mint = Callable[[], ExecId]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of an awake workspace. ``run_dir`` and ``state_dir`` are in it."""

    guest: node.Guest
    mint: Mint
    run_dir: str = RUN_DIR
    state_dir: str = STATE_DIR
    patience_s: float | None = None  # after which a cell that had its time is interrupted again; None: the keeper's own

    async def run(self, exec_id: ExecId, cell: public.RunPython, check_limit: Callable[[], None]) -> node.ExecHandle:
        """Hand a cell over. One that was handed over before under this id is attached to; raises Conflict for another one's."""
        request: dict[str, Any] = {"op": "run", "code": cell.code, "timeout_s": cell.timeout_s}
        try:
            check_limit()
            handle = await self._ask(exec_id, cell.context, request)
            metrics.EXECS.add()
            return handle
        except AlreadyExists:
            return await self.guest.attach_exec(exec_id)
        except QuotaExceeded:
            with suppress(NotFound):  # a call that is repeated starts nothing
                return await self.guest.attach_exec(exec_id)
            raise

    async def events(self, handle: node.ExecHandle, context: str, offset: int = 0) -> AsyncGenerator[public.PythonEvent]:
        """What a cell says from a byte offset of its command's output on, to its ``done``. Starts a kernel where there is none.

        Raises KernelDied, CellStuck, PythonMissing, PythonFailed.
        """
        reader = _Reader(handle.exec_id, offset)
        async with aclosing(_lines(handle, reader)) as lines:
            async for line in lines:
                event = reader.event(line)
                if event is None:
                    if await self._waits(handle.exec_id, reader.offset):
                        await self._start_for(handle, context)
                    continue
                yield event
                if event.type == "done":
                    return

    async def interrupt(self, context: str) -> bool:
        """Whether a cell ran that is interrupted now."""
        answer = await self._told(context, "interrupt")
        return answer is not None and bool(answer.get("running"))

    async def restart(self, context: str) -> public.PythonKernel:
        """End the kernel, with what it runs, and start another one; a cell that waited may have done so first."""
        stopped = await self._told(context, "stop")
        made = await self.start(context)
        return made if stopped is None else made.model_copy(update={"restarted": True, "reason": ON_REQUEST})

    async def start(self, context: str) -> public.PythonKernel:
        """A kernel that is ready: the one there is, or a new one. It is no part of the cell that wanted it: whoever kills that
        does not kill the kernel."""
        spec = node.ExecSpec(self.mint(), argv=("python3", "-c", programs.LOADER), stdin=True)
        handle = await self.guest.start_exec(spec)
        try:
            request: dict[str, Any] = {"dir": self.run_dir, "state": self.state_dir, "context": context}
            if self.patience_s is not None:
                request["patience_s"] = self.patience_s
            await handle.write_stdin(programs.keeper_program() + json.dumps(request).encode() + b"\n")
            try:
                async with asyncio.timeout(START_S):
                    answer = await _one_line(handle)
            except TimeoutError as error:
                raise PythonFailed(f"No Python kernel was ready within {START_S:.0f} s.", hint="Try again.") from error
        finally:
            await handle.close()
        if answer.get("type") == "missing":
            raise PythonMissing(f"The workspace's python3 has no ipykernel ({_word(answer, 'detail')}).")
        if answer.get("type") != "ready":
            raise PythonFailed(f"No Python kernel could be started: {_word(answer, 'detail') or 'it gave no reason.'}")
        number = answer.get("kernel")
        return public.PythonKernel(
            context=context,
            kernel=number if isinstance(number, int) else 0,
            restarted=bool(answer.get("restarted")),
            reason=_word(answer, "reason"),
        )

    async def _waits(self, exec_id: ExecId, offset: int) -> bool:
        """Whether it was the last thing that a cell said, that there is no kernel."""
        found = [info for info in await self.guest.list_execs() if info.exec_id == exec_id]
        return any(info.exited is None and info.stdout_bytes == offset for info in found)

    async def _start_for(self, handle: node.ExecHandle, context: str) -> None:
        """Start what a cell waits for, and let it go on; or let it end. Who leaves meanwhile leaves it waiting: it will see."""
        try:
            await self.start(context)
        except PerdureError:
            await handle.close_stdin()
            raise
        await handle.write_stdin(b"go\n")

    async def _told(self, context: str, what: str) -> dict[str, Any] | None:
        """A keeper's answer; None where there is none."""
        handle = await self._ask(self.mint(), context, {"op": what})
        try:
            answer = await _one_line(handle)
            await handle.close_stdin()
        finally:
            await handle.close()
        return None if answer.get("type") in ("absent", "died") else answer

    async def _ask(self, exec_id: ExecId, context: str, request: dict[str, Any]) -> node.ExecHandle:
        line = json.dumps(request).encode() + b"\n"
        digest = hashlib.sha256(context.encode() + line).hexdigest()  # by which the agent tells one cell from another
        argv = ("python3", "-I", "-S", "-c", programs.LOADER)
        spec = node.ExecSpec(exec_id, argv=argv, env={"PERDURE_CELL": digest}, stdin=True)
        async with AsyncExitStack() as stack:
            handle = await self.guest.start_exec(spec)
            stack.push_async_callback(handle.close)
            await handle.write_stdin(programs.cell_program() + f"{self.run_dir}/{context}/socket\n".encode() + line)
            stack.pop_all()
        return handle


@dataclass(slots=True)
class _Reader:
    """Makes events of lines."""

    exec_id: ExecId
    offset: int  # of the command's stdout, behind the last line
    lost: bool = False
    has_begun: bool = False
    buffer: bytearray = field(default_factory=bytearray)
    stderr: bytes = b""

    def event(self, line: bytes) -> public.PythonEvent | None:
        """None: there is no kernel yet. Raises the error that a line stands for."""
        try:
            said = from_json(line)
            kind = said["type"]
            if kind in _ENDS:
                raise _failure(kind, said)
            told: dict[str, Any] = {"exec_id": self.exec_id, "offset": self.offset, "failure": None}
            if kind == "done" and self.lost:
                told["truncated"] = True
            event = None if kind == "absent" else public.PythonEvent.model_validate({**said, **told})
        except (ValueError, TypeError, KeyError) as error:
            if self.has_begun:
                raise PythonFailed("What watches over the kernel said something that is not understood.") from error
            raise InvalidRequest(f"The command {self.exec_id} is not a Python cell.", hint="Follow it as a command.") from error
        self.has_begun = True
        return event

    def feed(self, output: node.ExecOutput) -> list[bytes]:
        """The lines that are complete. One that lost bytes, because nobody read them in time, is left out."""
        if output.stream == "stderr":
            self.stderr = (self.stderr + output.data)[-_STDERR_MAX:]
            return []
        buffer, data = self.buffer, output.data
        if output.gap:
            self.lost = True
            buffer.clear()
            data = data.partition(b"\n")[2]  # the rest of what began in the gap
        buffer += data
        if len(buffer) > LINE_BYTES_MAX:
            raise PythonFailed("What watches over the kernel sends more than a cell may show.")
        *lines, rest = buffer.split(b"\n")
        self.buffer = bytearray(rest)
        return [bytes(line) for line in lines if line]


async def _lines(handle: node.ExecHandle, reader: _Reader) -> AsyncGenerator[bytes]:
    """Lines of a cell's command. Raises what its end stands for, if it ends."""
    async for event in handle.events():
        if isinstance(event, node.ExecOutput):
            behind = event.offset + len(event.data)
            found = reader.feed(event)
            behind -= sum(len(line) + 1 for line in found) + len(reader.buffer)
            for line in found:
                behind += len(line) + 1
                reader.offset = behind
                yield line
        elif isinstance(event, node.ExecExited):
            raise _ended(event, reader)


def _failure(kind: str, said: dict[str, Any]) -> PerdureError:
    detail = _word(said, "detail") or "it gave no reason."
    if kind == "stuck":
        return CellStuck("The cell had its time, was interrupted, and does not stop; it goes on, and others wait for it.")
    if kind == "failed":
        return PythonFailed(f"The kernel refused the cell: {detail}")
    more = " Give the workspace more memory (perdure create --memory-mib)." if said.get("oom") else ""
    error = KernelDied(
        f"The Python kernel ended while the cell ran: {detail}",
        hint=f"The next cell gets a new kernel, without the variables of this one.{more}",
    )
    error.details = {"reason": "out-of-memory" if said.get("oom") else "ended"}
    return error


def _ended(exited: node.ExecExited, reader: _Reader) -> PerdureError:
    if exited.end is node.ExecEnd.NOT_STARTED:
        return PythonMissing(f"No Python can be run in this workspace: {exited.detail or 'it has no python3'}")
    if exited.end is node.ExecEnd.KILLED:
        return PythonFailed("The cell's command was killed, which interrupted the cell.", ambiguous=True)
    if exited.end is node.ExecEnd.LOST:
        return PythonFailed("The cell was lost with the machine it ran on; whether it ended is not known.", ambiguous=True)
    if exited.signal == _SIGALRM:
        return Unavailable("The cell did not reach a kernel in time; it has not run.")
    detail = reader.stderr.decode("utf-8", "replace").strip()
    error = PythonFailed("The workspace's python3 cannot pass cells to a kernel.", ambiguous=reader.has_begun)
    if detail:
        error.details = {"log": detail}
    return error


async def _one_line(handle: node.ExecHandle) -> dict[str, Any]:
    """The first line of a program of ours. Raises what its end stands for, if there is none."""
    reader = _Reader(handle.exec_id, 0)
    async with aclosing(_lines(handle, reader)) as lines:
        async for line in lines:
            try:
                answer = from_json(line)
            except ValueError:
                break
            if isinstance(answer, dict):
                return answer
            break
    raise PythonFailed("What watches over Python kernels said something that is not understood.")


def _word(answer: dict[str, Any], name: str) -> str:
    """A guest's text, made safe to show."""
    value = answer.get(name)
    text = value[:500] if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
