"""Python in a workspace, cell by cell: its variables stay."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from perdure.core import ids
from perdure.core.clock import SystemClock, epoch_ms
from perdure.core.errors import PerdureError
from perdure.sdk import _core
from perdure.sdk._acompat import acall, apause
from perdure.sdk._python import CellCollector, CellFollower, PythonOutput, PythonResult
from perdure.sdk.errors import ConnectionLost
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._async.workspace import AsyncWorkspace

OnText = Callable[[str], Any]
OnOutput = Callable[[PythonOutput], Any]


class AsyncPython:
    """``workspace.python``: code that runs in a kernel whose variables stay, over sleeps, forks and checkpoints.

    The workspace needs ipykernel, which the image ``python-data`` has. A ``context`` is a kernel of its own; cells of one run
    one after the other.

    >>> result = await ws.python.run("x = 20")
    >>> (await ws.python.run("x + 1")).text
    '21'
    """

    def __init__(self, workspace: AsyncWorkspace) -> None:
        self._workspace = workspace

    async def run(
        self,
        code: str,
        *,
        context: str = public.DEFAULT_CONTEXT,
        timeout_s: float | None = None,
        on_stdout: OnText | None = None,
        on_stderr: OnText | None = None,
        on_output: OnOutput | None = None,
    ) -> PythonResult:
        """Run a cell and wait for its end. An exception in it is a result: ``error`` has it.

        After ``timeout_s`` seconds of running it is interrupted, and its kernel lives on. Who leaves meanwhile leaves it running.
        Raises PythonMissing where the workspace has no ipykernel, KernelDied when the kernel ended in the middle (the next cell
        gets a new one, and says so: ``restarted``), and CellStuck when a cell that had its time does not stop.

        >>> result = await ws.python.run("print('hello'); 6 * 7", on_stdout=print)
        hello
        <BLANKLINE>
        >>> result.text, result.stdout, result.ok
        ('42', 'hello\\n', True)
        >>> (await ws.python.run("1 / 0")).error.name
        'ZeroDivisionError'
        """
        exec_id = ids.mint("exe", now_ms=epoch_ms(SystemClock()))
        collector = CellCollector(exec_id)
        callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        cell = _core.checked(public.RunPython, code=code, context=context, timeout_s=timeout_s, exec_id=exec_id)
        async with aclosing(self._follow(CellFollower(self._workspace.id, cell))) as events:
            async for event in events:
                said = collector.add(event)
                if isinstance(said, PythonOutput):
                    await acall(on_output, said)
                elif said is not None:
                    await acall(callbacks[event.stream or "stdout"], said)
        return collector.result()

    async def stream(
        self, code: str, *, context: str = public.DEFAULT_CONTEXT, timeout_s: float | None = None
    ) -> AsyncGenerator[public.PythonEvent]:
        """The same, as events while they come; the last one is ``done``.

        >>> [event.type async for event in ws.python.stream("6 * 7")]
        ['started', 'execute_result', 'done']
        """
        exec_id = ids.mint("exe", now_ms=epoch_ms(SystemClock()))
        cell = _core.checked(public.RunPython, code=code, context=context, timeout_s=timeout_s, exec_id=exec_id)
        async with aclosing(self._follow(CellFollower(self._workspace.id, cell))) as events:
            async for event in events:
                yield event

    async def _follow(self, follower: CellFollower) -> AsyncGenerator[public.PythonEvent]:
        """A broken connection is taken up where it broke."""
        while not follower.finished:
            try:
                async with self._workspace.client.stream(follower.next_call()) as response:
                    follower.opened(response.headers.get(public.GENERATION_HEADER))
                    self._workspace.note(response.headers)
                    buffer = bytearray()
                    async for chunk in response.aiter_raw():
                        for line in _core.lines(buffer, chunk):
                            event = follower.feed(line)
                            if event is not None:
                                yield event
                if not follower.finished:
                    raise ConnectionLost("The server ended the stream before the cell ended.")
            except PerdureError as error:
                await apause(follower.broke(error))

    async def interrupt(self, context: str = public.DEFAULT_CONTEXT) -> bool:
        """Interrupt the cell that runs, as Ctrl-C does; its variables stay. False when none runs.

        >>> await ws.python.interrupt()
        False
        """
        body = _core.checked(public.PythonContext, context=context)
        answer = await self._workspace.fetch(_core.post(self._path("interrupt"), body.model_dump()), public.PythonInterrupted)
        return answer.interrupted

    async def restart(self, context: str = public.DEFAULT_CONTEXT) -> public.PythonKernel:
        """End the kernel, with what runs in it, and start a new one.

        >>> (await ws.python.restart()).context
        'default'
        """
        body = _core.checked(public.PythonContext, context=context)
        return await self._workspace.fetch(_core.post(self._path("restart"), body.model_dump()), public.PythonKernel)

    def _path(self, *rest: str) -> str:
        return _core.workspace_path(self._workspace.id, "python", *rest)
