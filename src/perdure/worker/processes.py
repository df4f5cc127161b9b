"""Warm processes: of Python handlers over a socket, and what every process of a worker has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from perdure.core import programs
from perdure.wire.public.workers import FailureKind
from perdure.worker.child import HEADER
from perdure.worker.model import Answered, Failed, Job, Outcome, Served, StartFailed

#: Importing a handler may load a lot; longer than this it hangs.
START_S = 120.0
#: For what a process has written before its end, and for one that another process keeps open.
LAST_WORDS_S = 1.0
TAIL_LINES = 20
KINDS = {"raised": FailureKind.RAISED, "invalid": FailureKind.INVALID}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process finds. ``quiet_stdout``: what it prints goes to stderr, since the worker's stdout is for machines."""

    environment: Mapping[str, str] = field(repr=False)
    quiet_stdout: bool = False


class Process:
    """A program with its last words: its stderr goes on to the worker's own, as it is, and its end is remembered."""

    def __init__(self, process: asyncio.subprocess.Process, stderr: int) -> None:
        self.process = process
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._pump = asyncio.ensure_future(self._pass_on(stderr))

    @classmethod
    async def launch(cls, argv: Sequence[str], around: Surroundings, keep: Sequence[int] = ()) -> Self:
        """``keep``: descriptors that it inherits. Raises StartFailed."""
        stdout = sys.stderr.fileno() if around.quiet_stdout else None
        ours, theirs = os.pipe()  # of our own: of asyncio's, a wait for the process's end would be one for the pipe's end too
        try:
            process = await programs.start(
                *argv,
                env=dict(around.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=theirs,
                pass_fds=tuple(keep),
            )
        except BaseException as error:
            os.close(ours)
            if isinstance(error, OSError):
                raise StartFailed(f"A process of the worker cannot be started: {error.strerror}.") from error
            raise
        finally:
            os.close(theirs)
        return cls(process, ours)

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def _pass_on(self, stderr: int) -> None:
        reader, rest = asyncio.StreamReader(), b""
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(stderr, "rb", 0))
        try:
            while piece := await reader.read(1 << 16):
                sys.stderr.buffer.write(piece)
                sys.stderr.buffer.flush()
                *lines, rest = (rest + piece).split(b"\n")
                rest = rest[-1000:]
                self._tail.extend(line[-1000:] for line in lines if line.strip())
            if rest.strip():
                self._tail.append(rest)
        finally:
            transport.close()

    async def kill(self) -> None:
        await programs.end(self.process)
        await asyncio.wait({self._pump}, timeout=LAST_WORDS_S)
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)

    async def end(self) -> Failed:
        """How it died; what it has started dies too."""
        await self.process.wait()
        await self.kill()
        code = self.process.returncode or 0
        how = f"by the signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        tail = tuple(line.decode(errors="replace") for line in self._tail)
        return Failed(FailureKind.RAISED, "Runtime.ExitError", f"The handler's process ended {how} before it answered.", tail)


@dataclass(frozen=True, slots=True)
class Handlers:
    """Of Python: ``NAME=MODULE:HANDLER``, all in each process."""

    places: tuple[str, ...]
    around: Surroundings

    async def start(self) -> PythonProcess:
        """A process that has imported them. Raises StartFailed."""
        ours, theirs = socket.socketpair()
        with theirs:
            argv = (sys.executable, "-m", "perdure.worker.child", str(theirs.fileno()), *self.places)
            try:
                process = await Process.launch(argv, self.around, (theirs.fileno(),))
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        runner = PythonProcess(process, reader, writer)
        try:
            await runner.become_ready()
        except BaseException:
            await runner.kill()
            raise
        return runner


class PythonProcess:
    """A warm process with the handlers imported."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.functions: tuple[Served, ...] = ()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    async def become_ready(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                first = await self._next()
        except TimeoutError:
            raise StartFailed(f"The handlers were not imported within {START_S:.0f} s.") from None
        if first is None:
            raise StartFailed(f"A process ended while it imported the handlers. {(await self._process.end()).message}")
        if first["type"] != "ready":
            raise StartFailed(f"The handler {first['place']} cannot be loaded: {first['error']}: {first['message']}.")
        self.functions = tuple(Served(one["name"], one["digest"], one["durable"]) for one in first["functions"])

    async def run(self, job: Job) -> Outcome:
        told = {"function": job.function, "function_arn": job.function_arn, "request_id": job.request_id}
        data = json.dumps({**told, "event": job.event, "timeout_s": job.timeout_s}).encode()
        with contextlib.suppress(ConnectionError):  # it has died: that is what the next line hears
            self._writer.write(HEADER.pack(len(data)) + data)
            await self._writer.drain()
        said = await self._next()
        if said is None:
            return await self._process.end()
        if said["type"] == "answered":
            return Answered(said["body"].encode())
        return Failed(KINDS[said["type"]], said["error"], said["message"], tuple(said["stack"]))

    async def _next(self) -> dict[str, Any] | None:
        """What it says next; None when it ends first. A process of the handler's own may hold the socket open after that."""
        reading = asyncio.ensure_future(self._frame())
        ending = asyncio.ensure_future(self._process.process.wait())
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait({reading}, timeout=LAST_WORDS_S)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            ending.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)

    async def _frame(self) -> dict[str, Any] | None:
        try:
            size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
            found: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return found

    async def kill(self) -> None:
        self._writer.close()
        await self._process.kill()
