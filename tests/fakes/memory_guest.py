"""A ``wire.node.Guest`` in memory, for tests of what stands above it: a tree of files and a handful of commands.

Commands: ``true``, ``false``, ``exit N``, ``echo …``, ``warn …`` (stderr), ``env NAME``, ``pwd``, ``whoami``, ``cat`` (stdin to
stdout), ``bytes HEX``, ``spew N`` (N bytes), ``size`` (of its terminal), ``hang`` and ``sleep`` (until they are ended). A shell
string is split into words; several commands are joined by ``;``. On a terminal without a command there is a ``FakeShell``, and
``python3`` is a ``FakePython``.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections.abc import AsyncIterator, Callable

from perdure.core import tracing
from perdure.core.errors import AlreadyExists, Conflict, InvalidRequest, MachineFailed, NotFound, PerdureError, StaleGeneration
from perdure.core.ids import ExecId
from perdure.guest.progfile import understand
from perdure.machines.guestlink_program import ping_over, status_of
from perdure.machines.guestlink_stream import Moved
from perdure.wire import node
from perdure.wire.guest.ops import PROGRAM_FILE
from perdure.wire.node import (
    PROGRAM_PORT,
    ExecEnd,
    FileKind,
    LogChunk,
    LogRequest,
    ProgramAct,
    ProgramPing,
    ProgramSpec,
    ProgramStatus,
)
from tests.fakes.memory_files import MOMENT, Disk, MemoryFiles, Node
from tests.fakes.memory_terminal import FakeShell
from tests.fakes.program import FakeProgram
from tests.fakes.python import FakePython


class Command:
    """One execution: its output so far, its stdin, its end. Survives attachments and, with the workspace, generations."""

    def __init__(self, spec: node.ExecSpec, pid: int) -> None:
        self.spec = spec
        self.pid = pid
        self.output = {"stdout": bytearray(), "stderr": bytearray()}
        self.stdin: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.exited: node.ExecExited | None = None
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.signals: list[int] = []
        self.size = spec.pty
        self.watchers = 0
        self.at_prompt = False  # a shell on a terminal, where nothing runs

    @property
    def has_stdin(self) -> bool:
        return self.spec.stdin or self.spec.pty is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it is a shell that only waits for somebody to come."""
        return self.at_prompt and not self.watchers

    def put(self, stream: str, data: bytes) -> None:
        if self.spec.pty is not None:
            stream, data = "stdout", data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        self.output[stream] += data
        self._tell()

    def end(self, end: ExecEnd, code: int | None, signal: int | None = None, detail: str = "") -> None:
        if self.exited is None:
            self.exited = node.ExecExited(self.spec.exec_id, end, code, signal, detail, 0.25)
            self._tell()
            if self.task is not None and self.task is not asyncio.current_task():
                self.task.cancel()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class ProgramCommand(Command):
    """The workspace's program: what it writes is kept in its log."""

    def __init__(self, spec: node.ExecSpec, pid: int, program: FakeProgram) -> None:
        super().__init__(spec, pid)
        self._program = program

    def put(self, stream: str, data: bytes) -> None:
        self._program.write(data)


class Handle:
    """An attachment."""

    def __init__(self, command: Command, offsets: dict[str, int], guest: MemoryGuest) -> None:
        self.exec_id = command.spec.exec_id
        self.command = command
        self._offsets = offsets
        self._broken, self._moved = guest.broken, guest.moved
        self.closed = False

    async def events(self) -> AsyncIterator[node.ExecEvent]:
        self.command.watchers += 1
        try:
            async for event in self._events():
                yield event
        finally:
            self.command.watchers -= 1

    async def _events(self) -> AsyncIterator[node.ExecEvent]:
        command = self.command
        if command.exited is None or command.exited.end is not ExecEnd.NOT_STARTED:
            yield node.ExecStarted(self.exec_id, command.pid)
        while True:
            changed = command.changed
            for stream in ("stdout", "stderr"):
                data = bytes(command.output[stream][self._offsets[stream] :])[:65536]
                while data:
                    self._moved.outward += len(data)
                    yield node.ExecOutput(stream, self._offsets[stream], data)  # type: ignore[arg-type]
                    self._offsets[stream] += len(data)
                    data = bytes(command.output[stream][self._offsets[stream] :])[:65536]
            if command.exited is not None:
                yield command.exited
                return
            if self._broken.is_set():
                raise StaleGeneration("The workspace is no longer at this generation.")
            waits = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(self._broken.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def write_stdin(self, data: bytes) -> None:
        if not self.command.has_stdin:
            raise Conflict("The command does not read stdin.")
        self._moved.inward += len(data)
        self.command.stdin.put_nowait(data)

    async def close_stdin(self) -> None:
        self.command.stdin.put_nowait(None)

    async def close(self) -> None:
        self.closed = True


class World(Disk):
    """What survives generations: files and processes."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: dict[str, Command] = {}
        self.ports: set[int] = set()  # ports of this test's own servers on the host's loopback
        self.programs: dict[int, Callable[[], node.ByteStream]] = {}  # what answers a connection to a port, in this process
        self.environment: dict[str, str] = {}
        self.program = FakeProgram()
        self.python = FakePython()

    def end(self) -> None:
        """Its machine is gone for good."""
        self.program.kill()
        for command in self.commands.values():
            command.end(ExecEnd.LOST, None)


class MemoryGuest(MemoryFiles):
    """One generation of a World."""

    def __init__(self, world: World, generation: int) -> None:
        super().__init__(world)
        self.world = world
        self.generation = generation

    # execs

    async def start_exec(self, spec: node.ExecSpec) -> Handle:
        self.check()
        known = self.world.commands.get(spec.exec_id)
        if known is not None and known.spec != spec:
            raise Conflict(f"The id {spec.exec_id} is that of another command.")
        if known is not None:
            raise AlreadyExists(f"The command {spec.exec_id} exists.")
        command = Command(spec, 100 + len(self.world.commands))
        self.world.commands[spec.exec_id] = command
        command.task = asyncio.create_task(self._run(command))
        await asyncio.sleep(0)  # a command that does not exist is known not to before anybody looks
        for limit, end in ((spec.run_limit_s, ExecEnd.RUN_LIMIT), (spec.idle_limit_s, ExecEnd.IDLE_LIMIT)):
            if limit is not None:
                asyncio.get_running_loop().call_later(limit, command.end, end, 143, 15, f"it ran into its limit of {limit:g} s")
        return Handle(command, {"stdout": 0, "stderr": 0}, self)

    async def run_alone(self, spec: node.ExecSpec) -> Command:
        """Run a command that no table knows. One that waits for something never gets it: it is given up, with no end."""
        command = Command(spec, 1)
        command.task = asyncio.create_task(self._run(command))
        for _ in range(2):
            await asyncio.sleep(0)
        if command.exited is None:
            command.task.cancel()
        return command

    async def _run(self, command: Command) -> None:
        spec = command.spec
        code = 0
        if spec.pty is not None and spec.argv is None and spec.shell is None:
            command.end(ExecEnd.EXITED, await FakeShell(command, lambda words: self._typed(command, words)).live())
            return
        try:
            lines = [list(spec.argv)] if spec.argv is not None else [shlex.split(part) for part in (spec.shell or "").split(";")]
        except ValueError as error:
            command.put("stderr", f"syntax error: {error}\n".encode())
            command.end(ExecEnd.EXITED, 2)
            return
        for words in lines:
            if words:
                try:
                    code = await self._builtin(command, words)
                except FileNotFoundError as error:
                    command.end(ExecEnd.NOT_STARTED, 127, None, str(error))
                    return
        command.end(ExecEnd.EXITED, code)

    async def _typed(self, command: Command, words: list[str]) -> int:
        try:
            return await self._builtin(command, words)
        except FileNotFoundError as error:
            command.put("stdout", f"{error}\n".encode())
            return 127

    async def _builtin(self, command: Command, words: list[str]) -> int:
        name, *args = words
        spec, trace = command.spec, tracing.traceparent()  # of whoever started it: its task has the caller's context
        traced = {"TRACEPARENT": trace} if trace else {}
        answers = {
            "echo": lambda: " ".join(args) + "\n",
            "env": lambda: {**self.world.environment, **traced, **spec.env}.get(args[0], "") + "\n",
            "pwd": lambda: (spec.cwd or "/root") + "\n",
            "whoami": lambda: (spec.user or "root") + "\n",
            "size": lambda: f"{command.size.rows} {command.size.cols}\n" if command.size else "no terminal\n",
            "true": lambda: "",
        }
        if name in answers:
            command.put("stdout", answers[name]().encode())
        elif name == "warn":
            command.put("stderr", (" ".join(args) + "\n").encode())
        elif name in {"false", "exit"}:
            return int(args[0]) if args else 1
        elif name == "bytes":
            command.put("stdout", bytes.fromhex(args[0]))
        elif name == "spew":
            command.put("stdout", b"x" * int(args[0]))
        elif name == "cat":
            while command.has_stdin and (data := await command.stdin.get()) is not None:
                command.put("stdout", data)
        elif name == "python3":
            return await self.world.python.run(command, args)
        elif name in {"hang", "sleep"}:
            await asyncio.Event().wait()
        else:
            raise FileNotFoundError(f"there is no command {name!r}")
        return 0

    async def attach_exec(self, exec_id: ExecId, stdout_offset: int = 0, stderr_offset: int = 0) -> Handle:
        self.check()
        return Handle(self._command(exec_id), {"stdout": stdout_offset, "stderr": stderr_offset}, self)

    def _command(self, exec_id: str) -> Command:
        if exec_id not in self.world.commands:
            raise NotFound(f"There is no command {exec_id!r} in this workspace.")
        return self.world.commands[exec_id]

    async def signal_exec(self, exec_id: ExecId, signal: int) -> None:
        self.check()
        self._command(exec_id).signals.append(signal)
        if signal == 15:
            self._command(exec_id).end(ExecEnd.SIGNALED, 143, 15)

    async def resize_exec(self, exec_id: ExecId, size: node.PtySize) -> None:
        self.check()
        command = self._command(exec_id)
        if command.size is None:
            raise Conflict(f"The command {exec_id} has no terminal.")
        if not (1 <= size.rows <= 4096 and 1 <= size.cols <= 4096):
            raise InvalidRequest(f"{size.rows} by {size.cols} is not a size.")
        command.size = size

    async def kill_exec(self, exec_id: ExecId) -> None:
        self.check()
        self._command(exec_id).end(ExecEnd.KILLED, 143, 15)

    async def list_execs(self) -> tuple[node.ExecInfo, ...]:
        self.check()
        return tuple(
            node.ExecInfo(
                one.spec.exec_id,
                one.pid,
                one.spec.shell or shlex.join(one.spec.argv or ()) or "(shell)",
                MOMENT,
                one.exited,
                len(one.output["stdout"]),
                len(one.output["stderr"]),
                one.size,
            )
            for one in self.world.commands.values()
        )

    # ports

    async def open_tcp(self, port: int) -> node.ByteStream:
        return Counted(await self._connect(port), self.moved)

    async def _connect(self, port: int) -> node.ByteStream:
        self.check()
        if port in self.world.programs:
            return self.world.programs[port]()
        if port not in self.world.ports:
            raise NotFound(f"Nothing listens on port {port} in the workspace.")
        return TcpStream(*await asyncio.open_connection("127.0.0.1", port))

    async def ping(self) -> float:
        self.check()
        return 0.001

    # program

    async def program(self) -> ProgramStatus:
        self.check()
        return self.world.program.status()

    def _make(self, spec: node.ExecSpec, pid: int) -> Command:
        return ProgramCommand(spec, pid, self.world.program)

    def _read_program(self) -> None:
        """What its file names."""
        found, program = self.world.files.get(PROGRAM_FILE), self.world.program
        given, problem = (None, "") if found is None else understand(bytes(found.content))
        program.spec = status_of({"program": given}).spec
        program.problem = f"{PROGRAM_FILE}: {problem}" if problem else ""

    async def begin_program(self) -> None:
        """As the first wake of a boot does it."""
        self._read_program()
        await self.world.program.start(self._make, self._run)

    async def set_program(self, spec: ProgramSpec | None) -> ProgramStatus:
        self.check()
        if spec is None:
            self.world.files.pop(PROGRAM_FILE, None)
        else:
            content = bytearray(spec.to_file())
            await self.make_dir(posixpath.dirname(PROGRAM_FILE))
            self.world.files[PROGRAM_FILE] = Node(FileKind.FILE, content)
        return await self._act(ProgramAct.RESTART)

    async def act_on_program(self, act: ProgramAct) -> ProgramStatus:
        self.check()
        status = await self._act(act)
        if status.spec is None and not status.problem:
            raise NotFound("No program is named in this workspace.", hint="Name one: perdure program set NAME -- COMMAND …")
        return status

    async def _act(self, act: ProgramAct) -> ProgramStatus:
        program = self.world.program
        if act is not ProgramAct.START:
            await program.stop()
        if act is not ProgramAct.STOP:
            self._read_program()
            await program.start(self._make, self._run)
        return program.status()

    async def program_log(self, request: LogRequest) -> AsyncIterator[LogChunk]:
        self.check()
        async for chunk in self.world.program.read(request, self.broken):
            yield chunk

    async def ping_program(self, deadline_s: float) -> ProgramPing | None:
        spec = self.world.program.spec
        port = PROGRAM_PORT if spec is None else spec.port
        try:
            async with asyncio.timeout(deadline_s):
                return await ping_over(await self._connect(port), port)
        except (PerdureError, TimeoutError):
            return None


class Counted:
    """A ByteStream whose bytes are counted."""

    def __init__(self, stream: node.ByteStream, moved: Moved) -> None:
        self._stream, self._moved = stream, moved

    async def read(self, limit: int = 65536) -> bytes:
        data = await self._stream.read(limit)
        self._moved.outward += len(data)
        return data

    async def write(self, data: bytes) -> None:
        self._moved.inward += len(data)
        await self._stream.write(data)

    async def close_write(self) -> None:
        await self._stream.close_write()

    async def close(self) -> None:
        await self._stream.close()


class TcpStream:
    """A ByteStream over a real socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, limit: int = 65536) -> bytes:
        try:
            return await self._reader.read(limit)
        except ConnectionError as error:
            raise MachineFailed("The connection was reset.") from error

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close_write(self) -> None:
        self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()


__all__ = ["MOMENT", "Command", "Handle", "MemoryGuest", "Node", "PerdureError", "TcpStream", "World"]
