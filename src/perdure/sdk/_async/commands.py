"""Commands in a workspace."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from perdure.core import ids
from perdure.core.clock import SystemClock, epoch_ms
from perdure.core.errors import Conflict, InvalidRequest, NotFound, PerdureError
from perdure.sdk import _answers, _core
from perdure.sdk._acompat import AsyncBackground, AsyncData, AsyncHashing, acall, apause
from perdure.sdk._core import Call, Collector, CommandResult, Follower, Output
from perdure.sdk._options import OUTPUT_LIMIT_BYTES, RunOptions, run_fields
from perdure.sdk.errors import ConnectionLost, StillRunning
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._async.workspace import AsyncWorkspace

OnText = Callable[[str], Any]


class AsyncCommandHandle:
    """A command that was started. Iterate over it for its output as bytes, ``wait`` for its end; leaving it does not stop it.

    >>> handle = await ws.commands.run("echo one; echo two", background=True)
    >>> async for output in handle:
    ...     print(output.stream, output.text)
    stdout one
    two
    """

    def __init__(self, workspace: AsyncWorkspace, follower: Follower, output_limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._workspace = workspace
        self._client = workspace.client
        self._follower = follower
        self._limit = output_limit_bytes

    @property
    def exec_id(self) -> str:
        return self._follower.exec_id

    @property
    def pid(self) -> int | None:
        """As the workspace's processes see it; None before the first event."""
        return self._follower.pid

    @property
    def outcome(self) -> public.ExecOutcome | None:
        """How it ended, once an iteration or ``wait`` has seen it."""
        return self._follower.outcome

    @property
    def offsets(self) -> dict[str, int]:
        """Bytes of each stream that an iteration or ``wait`` has seen."""
        return self._follower.offsets

    async def __aiter__(self) -> AsyncIterator[Output]:
        async with aclosing(self.follow(None)) as outputs:
            async for output in outputs:
                yield output

    async def follow(self, timeout: float | None) -> AsyncGenerator[Output]:
        """Output until the command or the wait (seconds) ends; a broken connection is taken up where it broke.

        >>> handle = ws.commands.stream("echo hello")
        >>> [output.text async for output in handle.follow(timeout=60)]
        ['hello\\n']
        """
        follower = self._follower
        follower.detached = False
        while not follower.finished:
            try:
                async with self._client.stream(follower.next_call(timeout)) as response:
                    follower.opened(response.headers)
                    self._workspace.note(response.headers)
                    buffer = bytearray()
                    async for chunk in response.aiter_raw():
                        for line in _core.lines(buffer, chunk):
                            output = follower.feed(line)
                            if output is not None:
                                yield output
                if not follower.finished:
                    raise ConnectionLost("The server ended the stream before the command ended.")
            except PerdureError as error:
                await apause(follower.broke(error))

    def still_running(self, timeout: float | None) -> StillRunning:
        """The error for a wait that ended first."""
        return self._follower.still_running(timeout)

    async def wait(
        self, timeout: float | None = None, *, on_stdout: OnText | None = None, on_stderr: OnText | None = None
    ) -> CommandResult:
        """Wait for the end and return it with the output. Raises StillRunning after ``timeout`` seconds; the command goes on.

        >>> handle = await ws.commands.run("echo hello", background=True)
        >>> result = await handle.wait(60, on_stdout=print)
        hello
        <BLANKLINE>
        >>> result.exit_code
        0
        """
        collector = Collector(self._limit)
        callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        async with aclosing(self.follow(timeout)) as outputs:
            async for output in outputs:
                await acall(callbacks[output.stream], collector.add(output))
        for stream, callback in callbacks.items():
            await acall(callback, collector.rest(stream))
        if self._follower.outcome is None:
            raise self.still_running(timeout)
        return collector.result(self._follower.outcome)

    async def kill(self) -> None:
        """End the command and everything it started.

        >>> handle = await ws.commands.run("sleep 1000", background=True)
        >>> await handle.kill()
        >>> (await handle.wait()).end
        'killed'
        """
        await self._workspace.commands.kill(self.exec_id)

    async def send_signal(self, signal: int) -> None:
        """Send a signal to the command, by its number.

        >>> handle = await ws.commands.run("sleep 1000", background=True)
        >>> await handle.send_signal(15)
        """
        await self._workspace.commands.send_signal(self.exec_id, signal)

    async def send_stdin(self, data: AsyncData, *, eof: bool = False) -> None:
        """Write to the command's stdin (started with ``stdin=True``); with ``eof`` close it afterwards.

        >>> handle = await ws.commands.run(["cat"], background=True, stdin=True)
        >>> await handle.send_stdin("hello", eof=True)
        >>> (await handle.wait()).stdout
        'hello'
        """
        await self._workspace.commands.send_stdin(self.exec_id, data, eof=eof)


class AsyncCommands:
    """``workspace.commands``."""

    def __init__(self, workspace: AsyncWorkspace) -> None:
        self._workspace = workspace

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        background: Literal[False] = False,
        stdin: AsyncData | bool = False,
        timeout: float | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        **options: Unpack[RunOptions],
    ) -> CommandResult: ...

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        background: Literal[True],
        stdin: AsyncData | bool = False,
        **options: Unpack[RunOptions],
    ) -> AsyncCommandHandle: ...

    async def run(
        self,
        cmd: str | Sequence[str],
        *,
        background: bool = False,
        stdin: AsyncData | bool = False,
        timeout: float | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        **options: Unpack[RunOptions],
    ) -> CommandResult | AsyncCommandHandle:
        """Run a command: a string goes through the shell, a list does not. A nonzero exit is a result, not an exception.

        ``timeout`` is how long this call waits (then StillRunning; the command goes on); ``run_limit_s`` and ``idle_limit_s`` end
        the command. With ``background`` the call returns a handle as soon as the command runs. A command with an
        ``idempotency_key`` runs once: who asks again gets its output and outcome, as far as they are kept, or ``Forgotten``.

        >>> result = await ws.commands.run(["echo", "hello"], envs={"LANG": "C"}, cwd="/root")
        >>> result.exit_code, result.stdout
        (0, 'hello\\n')
        >>> (await ws.commands.run("false")).ok
        False
        """
        key = options.get("idempotency_key")
        start = self._start(cmd, stdin is not False, background, options)
        limit = options.get("output_limit_bytes", OUTPUT_LIMIT_BYTES)
        assert start.exec_id is not None
        if background:
            handle = await self._background(start, limit, key)
            if not isinstance(stdin, bool):
                await handle.send_stdin(stdin, eof=True)
            return handle
        if not isinstance(stdin, bool):
            return await self._fed(await self._background(start, limit, key), stdin, timeout, (on_stdout, on_stderr))
        handle = self.stream(cmd, **options)
        return await handle.wait(timeout, on_stdout=on_stdout, on_stderr=on_stderr)

    def stream(self, cmd: str | Sequence[str], *, stdin: bool = False, **options: Unpack[RunOptions]) -> AsyncCommandHandle:
        """A handle whose command starts when it is first iterated over or waited for; its output streams with the start.

        >>> async for output in ws.commands.stream("echo hello"):
        ...     print(output.data)
        b'hello\\n'
        """
        start = self._start(cmd, stdin, False, options)
        assert start.exec_id is not None
        limit = options.get("output_limit_bytes", OUTPUT_LIMIT_BYTES)
        key = options.get("idempotency_key")
        return AsyncCommandHandle(self._workspace, Follower(self._workspace.id, start.exec_id, start, key), limit)

    async def _fed(
        self, handle: AsyncCommandHandle, stdin: AsyncData, timeout: float | None, on_text: tuple[OnText | None, OnText | None]
    ) -> CommandResult:
        """Feed stdin beside reading: a command that answers while it reads must not stop both."""
        failures: list[Exception] = []

        async def feed() -> None:
            try:
                await handle.send_stdin(stdin, eof=True)
            except (Conflict, NotFound):
                pass  # the command did not want all of it
            except Exception as error:
                failures.append(error)  # before the kill, which ends the waiting and with it this
                await handle.kill()  # it must not take half of its input for all of it
                raise

        async with AsyncBackground(feed):
            result = await handle.wait(timeout, on_stdout=on_text[0], on_stderr=on_text[1])
        for failure in failures:
            raise failure
        return result

    def _start(
        self,
        cmd: str | Sequence[str] | None,
        stdin: bool,
        background: bool,
        options: RunOptions,
        pty: public.PtySize | None = None,
    ) -> public.StartExec:
        command: dict[str, Any] = {} if cmd is None else {"shell": cmd} if isinstance(cmd, str) else {"argv": list(cmd)}
        if pty is not None:
            command["pty"] = pty
        key = _core.check_key(options.get("idempotency_key"))
        if key is not None and stdin:
            raise InvalidRequest(
                "A command with an idempotency key reads no stdin: sent again, it would come twice.", hint="Put it into a file."
            )
        exec_id = ids.mint("exe", now_ms=epoch_ms(SystemClock())) if key is None else ids.keyed_exec(self._workspace.id, key)
        fields = {**command, **run_fields(options), "exec_id": exec_id, "stdin": stdin, "background": background}
        start: public.StartExec = _core.checked(public.StartExec, **fields)
        return start

    async def start_pty(self, size: public.PtySize, cmd: str | Sequence[str] | None, options: RunOptions) -> public.ExecInfo:
        """Start a command, or the login shell, on a terminal; for ``workspace.pty``."""
        start = self._start(cmd, False, True, options, pty=size)
        call = _core.start_exec(self._workspace.id, start, options.get("idempotency_key"))
        response = await self._workspace.client.request(call)
        self._workspace.note(response.headers)
        return _answers.parsed(call, public.ExecInfo, response.content)

    async def _background(self, start: public.StartExec, limit: int, key: str | None) -> AsyncCommandHandle:
        call = _core.start_exec(self._workspace.id, start.model_copy(update={"background": True}), key)
        response = await self._workspace.client.request(call)
        self._workspace.note(response.headers)
        return self._handle(_answers.parsed(call, public.ExecInfo, response.content), limit)

    def _handle(self, info: public.ExecInfo, limit: int) -> AsyncCommandHandle:
        follower = Follower(self._workspace.id, info.exec_id, None)
        follower.pid = info.pid
        return AsyncCommandHandle(self._workspace, follower, limit)

    async def list(self) -> builtins.list[public.ExecInfo]:
        """Running commands and the recent finished ones whose output is still kept.

        >>> result = await ws.commands.run("true")
        >>> [one.command for one in await ws.commands.list()]
        ['true']
        """
        return (await self._workspace.fetch(_core.get(self._path()), public.ExecList)).execs

    async def get(self, exec_id: str) -> public.ExecInfo:
        """One command, running or ended, by its id. Raises NotFound for one that is forgotten.

        >>> result = await ws.commands.run("true")
        >>> (await ws.commands.get(result.exec_id)).outcome.exit_code
        0
        """
        return await self._workspace.fetch(_core.get(self._path(exec_id)), public.ExecInfo)

    async def attach(self, exec_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0) -> AsyncCommandHandle:
        """A handle of a command that anybody started earlier; its output comes from the beginning, as far as it is kept, or from
        byte offsets on: a handle's ``offsets`` say how far it has read.

        >>> started = await ws.commands.run("echo hello", background=True)
        >>> handle = await ws.commands.attach(started.exec_id)
        >>> (await handle.wait()).stdout
        'hello\\n'
        """
        if stdout_offset < 0 or stderr_offset < 0:
            raise InvalidRequest("An output offset is not negative.")
        handle = self._handle(await self.get(exec_id), OUTPUT_LIMIT_BYTES)
        handle.offsets.update(stdout=stdout_offset, stderr=stderr_offset)
        return handle

    connect = attach

    async def kill(self, exec_id: str) -> None:
        """End the command and everything it started.

        >>> handle = await ws.commands.run("sleep 1000", background=True)
        >>> await ws.commands.kill(handle.exec_id)
        """
        await self._workspace.fetch(_core.post(self._path(exec_id, "kill"), repeatable=True), public.Done)

    async def send_signal(self, exec_id: str, signal: int) -> None:
        """Send a signal to a command, by its number.

        >>> handle = await ws.commands.run("sleep 1000", background=True)
        >>> await ws.commands.send_signal(handle.exec_id, 15)
        """
        await self._workspace.fetch(_core.post(self._path(exec_id, "signal"), {"signal": signal}), public.Done)

    async def resize(self, exec_id: str, rows: int, cols: int) -> None:
        """Tell the terminal of a command its size.

        >>> await ws.commands.resize(exec_id, rows=40, cols=120)  # doctest: +SKIP
        """
        size = _core.checked(public.PtySize, rows=rows, cols=cols)
        await self._workspace.fetch(_core.post(self._path(exec_id, "resize"), size.model_dump(), repeatable=True), public.Done)

    async def send_stdin(self, exec_id: str, data: AsyncData, *, eof: bool = False) -> None:
        """Write to a command's stdin; with ``eof`` close it afterwards.

        >>> handle = await ws.commands.run(["cat"], background=True, stdin=True)
        >>> await ws.commands.send_stdin(handle.exec_id, b"hello", eof=True)
        >>> (await handle.wait()).stdout
        'hello'
        """
        call = Call("POST", self._path(exec_id, "stdin"), _core.query_of({"eof": eof}))
        await self._workspace.client.send(call, AsyncHashing(data), public.StdinWritten)

    def _path(self, *rest: str) -> str:
        return _core.workspace_path(self._workspace.id, "execs", *rest)
