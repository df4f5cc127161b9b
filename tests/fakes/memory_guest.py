"""A ``wire.node.Guest`` in memory, for tests of what stands above it: a tree of files and a handful of commands.

Commands: ``true``, ``false``, ``exit N``, ``echo …``, ``warn …`` (stderr), ``env NAME``, ``pwd``, ``whoami``, ``cat`` (stdin to
stdout), ``bytes HEX``, ``spew N`` (N bytes), ``hang`` (until it is ended). A shell string is split into words; several commands
are joined by ``;``.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import shlex
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from perdure.core.errors import AlreadyExists, Conflict, InvalidRequest, MachineFailed, NotFound, PerdureError, StaleGeneration
from perdure.core.ids import ExecId
from perdure.guest.progfile import understand
from perdure.machines.guestlink_program import ping_over, status_of
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
from tests.fakes.program import FakeProgram

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass
class Node:
    kind: FileKind
    content: bytearray = field(default_factory=bytearray)
    mode: int = 0o644
    target: str | None = None
    declared_size: int | None = None  # what stat says, when it lies


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

    def put(self, stream: str, data: bytes) -> None:
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

    def __init__(self, command: Command, offsets: dict[str, int], broken: asyncio.Event) -> None:
        self.exec_id = command.spec.exec_id
        self.command = command
        self._offsets = offsets
        self._broken = broken
        self.closed = False

    async def events(self) -> AsyncIterator[node.ExecEvent]:
        command = self.command
        if command.exited is None or command.exited.end is not ExecEnd.NOT_STARTED:
            yield node.ExecStarted(self.exec_id, command.pid)
        while True:
            changed = command.changed
            for stream in ("stdout", "stderr"):
                data = bytes(command.output[stream][self._offsets[stream] :])[:65536]
                while data:
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
        if not self.command.spec.stdin or self.command.exited:
            raise Conflict("The command does not read stdin.")
        self.command.stdin.put_nowait(data)

    async def close_stdin(self) -> None:
        self.command.stdin.put_nowait(None)

    async def close(self) -> None:
        self.closed = True


class World:
    """What survives generations: files and processes."""

    def __init__(self) -> None:
        self.files: dict[str, Node] = {"/": Node(FileKind.DIRECTORY, mode=0o755), "/root": Node(FileKind.DIRECTORY, mode=0o755)}
        self.commands: dict[str, Command] = {}
        self.ports: set[int] = set()  # ports of this test's own servers on the host's loopback
        self.programs: dict[int, Callable[[], node.ByteStream]] = {}  # what answers a connection to a port, in this process
        self.largest_chunk = 0  # of any upload
        self.fail_write_after: int | None = None
        self.environment: dict[str, str] = {}
        self.program = FakeProgram()

    def end(self) -> None:
        """Its machine is gone for good."""
        self.program.kill()
        for command in self.commands.values():
            command.end(ExecEnd.LOST, None)


class MemoryGuest:
    """One generation of a World."""

    def __init__(self, world: World, generation: int) -> None:
        self.world = world
        self.generation = generation
        self.broken = asyncio.Event()

    def _check(self) -> None:
        if self.broken.is_set():
            raise StaleGeneration("The workspace is no longer at this generation.")

    # execs

    async def start_exec(self, spec: node.ExecSpec) -> Handle:
        self._check()
        if spec.exec_id in self.world.commands:
            raise AlreadyExists(f"The command {spec.exec_id} exists.")
        command = Command(spec, 100 + len(self.world.commands))
        self.world.commands[spec.exec_id] = command
        command.task = asyncio.create_task(self._run(command))
        await asyncio.sleep(0)  # a command that does not exist is known not to before anybody looks
        for limit, end in ((spec.run_limit_s, ExecEnd.RUN_LIMIT), (spec.idle_limit_s, ExecEnd.IDLE_LIMIT)):
            if limit is not None:
                asyncio.get_running_loop().call_later(limit, command.end, end, 143, 15, f"it ran into its limit of {limit:g} s")
        return Handle(command, {"stdout": 0, "stderr": 0}, self.broken)

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

    async def _builtin(self, command: Command, words: list[str]) -> int:
        name, *args = words
        spec = command.spec
        answers = {
            "echo": lambda: " ".join(args) + "\n",
            "env": lambda: {**self.world.environment, **spec.env}.get(args[0], "") + "\n",
            "pwd": lambda: (spec.cwd or "/root") + "\n",
            "whoami": lambda: (spec.user or "root") + "\n",
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
            while spec.stdin and (data := await command.stdin.get()) is not None:
                command.put("stdout", data)
        elif name == "hang":
            await asyncio.Event().wait()
        else:
            raise FileNotFoundError(f"there is no command {name!r}")
        return 0

    async def attach_exec(self, exec_id: ExecId, stdout_offset: int = 0, stderr_offset: int = 0) -> Handle:
        self._check()
        return Handle(self._command(exec_id), {"stdout": stdout_offset, "stderr": stderr_offset}, self.broken)

    def _command(self, exec_id: str) -> Command:
        if exec_id not in self.world.commands:
            raise NotFound(f"There is no command {exec_id!r} in this workspace.")
        return self.world.commands[exec_id]

    async def signal_exec(self, exec_id: ExecId, signal: int) -> None:
        self._check()
        self._command(exec_id).signals.append(signal)
        if signal == 15:
            self._command(exec_id).end(ExecEnd.SIGNALED, 143, 15)

    async def kill_exec(self, exec_id: ExecId) -> None:
        self._check()
        self._command(exec_id).end(ExecEnd.KILLED, 143, 15)

    async def list_execs(self) -> tuple[node.ExecInfo, ...]:
        self._check()
        return tuple(
            node.ExecInfo(
                one.spec.exec_id,
                one.pid,
                one.spec.shell or shlex.join(one.spec.argv or ()),
                MOMENT,
                one.exited,
                len(one.output["stdout"]),
                len(one.output["stderr"]),
            )
            for one in self.world.commands.values()
        )

    # files

    def _node(self, path: str) -> Node:
        self._check()
        path = posixpath.normpath(path)
        if path not in self.world.files:
            raise NotFound(f"There is no {path!r} in the workspace.")
        return self.world.files[path]

    def _info(self, path: str, found: Node) -> node.FileInfo:
        return node.FileInfo(
            path,
            posixpath.basename(path),
            found.kind,
            len(found.content) if found.declared_size is None else found.declared_size,
            found.mode,
            0,
            0,
            MOMENT,
            found.target,
        )

    async def stat(self, path: str) -> node.FileInfo:
        return self._info(posixpath.normpath(path), self._node(path))

    async def list_dir(self, path: str) -> tuple[node.FileInfo, ...]:
        if self._node(path).kind is not FileKind.DIRECTORY:
            raise InvalidRequest(f"{path!r} is not a directory.")
        root = posixpath.normpath(path)
        inside = sorted(one for one in self.world.files if one != "/" and posixpath.dirname(one) == root)
        return tuple(self._info(one, self.world.files[one]) for one in inside)

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        found = self._node(path)
        if found.kind is not FileKind.FILE and found.kind is not FileKind.SYMLINK:
            raise InvalidRequest(f"{path}: is {'a directory' if found.kind is FileKind.DIRECTORY else 'not a regular file'}.")
        end = len(found.content) if length is None else min(len(found.content), offset + length)
        for start in range(offset, end, 65536):
            yield bytes(found.content[start : min(end, start + 65536)])
            self._check()

    async def write_file(self, path: str, content: AsyncIterator[bytes], *, mode: int | None = None) -> node.FileWritten:
        path = posixpath.normpath(path)
        if self._node(posixpath.dirname(path)).kind is not FileKind.DIRECTORY:
            raise InvalidRequest("The parent is not a directory.")
        digest, crc, length, kept = hashlib.sha256(), 0, 0, bytearray()
        async for chunk in content:
            self.world.largest_chunk = max(self.world.largest_chunk, len(chunk))
            digest.update(chunk)
            crc = zlib.crc32(chunk, crc)
            length += len(chunk)
            if len(kept) < 1 << 20:  # what is larger is counted and hashed, not kept
                kept += chunk
            if self.world.fail_write_after is not None and length > self.world.fail_write_after:
                raise MachineFailed("The guest broke in the middle of a write.")
        old = self.world.files.get(path)
        self.world.files[path] = Node(FileKind.FILE, kept, mode if mode is not None else old.mode if old else 0o644)
        return node.FileWritten(path, length, crc, digest.hexdigest())

    async def make_dir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> None:
        path = posixpath.normpath(path)
        if path in self.world.files:
            if not parents or self._node(path).kind is not FileKind.DIRECTORY:
                raise AlreadyExists(f"{path!r} exists.")
            return
        if parents:
            await self.make_dir(posixpath.dirname(path))
        self._node(posixpath.dirname(path))
        self.world.files[path] = Node(FileKind.DIRECTORY, mode=mode)

    async def rename(self, source: str, destination: str) -> None:
        self._node(source)
        self.world.files[posixpath.normpath(destination)] = self.world.files.pop(posixpath.normpath(source))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        self._node(path)
        path = posixpath.normpath(path)
        inside = [one for one in self.world.files if one.startswith(path.rstrip("/") + "/")]
        if inside and not recursive:
            raise Conflict(f"{path!r} is not empty.")
        for one in [path, *inside]:
            self.world.files.pop(one, None)

    # ports

    async def open_tcp(self, port: int) -> node.ByteStream:
        self._check()
        if port in self.world.programs:
            return self.world.programs[port]()
        if port not in self.world.ports:
            raise NotFound(f"Nothing listens on port {port} in the workspace.")
        return TcpStream(*await asyncio.open_connection("127.0.0.1", port))

    async def ping(self) -> float:
        self._check()
        return 0.001

    # program

    async def program(self) -> ProgramStatus:
        self._check()
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
        self._check()
        if spec is None:
            self.world.files.pop(PROGRAM_FILE, None)
        else:
            content = bytearray(spec.to_file())
            await self.make_dir(posixpath.dirname(PROGRAM_FILE))
            self.world.files[PROGRAM_FILE] = Node(FileKind.FILE, content)
        return await self._act(ProgramAct.RESTART)

    async def act_on_program(self, act: ProgramAct) -> ProgramStatus:
        self._check()
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
        self._check()
        async for chunk in self.world.program.read(request, self.broken):
            yield chunk

    async def ping_program(self, deadline_s: float) -> ProgramPing | None:
        spec = self.world.program.spec
        port = PROGRAM_PORT if spec is None else spec.port
        try:
            async with asyncio.timeout(deadline_s):
                return await ping_over(await self.open_tcp(port), port)
        except (PerdureError, TimeoutError):
            return None


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


__all__ = ["Command", "Handle", "MemoryGuest", "Node", "PerdureError", "TcpStream", "World"]
