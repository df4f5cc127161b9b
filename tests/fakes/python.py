"""A workspace's Python as ``inside.cell`` and ``inside.keeper`` show it, in this process: for guests in memory.

Cells may say ``display({mime: value})``, await at the top, and leave with an exception. What awaits is what can be interrupted.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import copy
import inspect
import io
import json
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perdure.api.kernels.inside.cell import ABSENT
from perdure.api.kernels.inside.runs import line_of
from perdure.api.kernels.talk import RUN_DIR

if TYPE_CHECKING:
    from tests.fakes.memory_guest import Command


@dataclass
class FakeKernel:
    """Variables, and one cell at a time."""

    number: int
    news: str
    names: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    task: asyncio.Task[None] | None = None
    death: asyncio.Event = field(default_factory=asyncio.Event)
    detail: str = ""


class FakePython:
    """Survives generations. ``has_ipykernel`` and ``exists`` may be changed."""

    def __init__(self) -> None:
        self.exists = self.has_ipykernel = True
        self.kernels: dict[str, FakeKernel] = {}
        self._ended: dict[str, tuple[int, str]] = {}
        self._started = asyncio.Event()

    def kill(self, context: str = "default", detail: str = "It was killed by signal 9.") -> None:
        """End a kernel, whatever runs in it."""
        kernel = self.kernels.pop(context)
        self._ended[context] = (kernel.number, detail)
        kernel.detail = detail
        kernel.death.set()

    def fork(self) -> FakePython:
        """What a fork of the workspace has: the same variables, of its own where they can be copied."""
        child = FakePython()
        child.exists, child.has_ipykernel, child._ended = self.exists, self.has_ipykernel, dict(self._ended)
        for context, kernel in self.kernels.items():
            names = {name: _copied(value) for name, value in kernel.names.items() if name not in {"display", "__builtins__"}}
            child.kernels[context] = FakeKernel(kernel.number, kernel.news, names, kernel.count)
        return child

    async def run(self, command: Command, words: list[str]) -> int:
        """A command that begins with ``python3``."""
        if not self.exists:
            raise FileNotFoundError("there is no command 'python3'")
        stdin = _Stdin(command)
        await stdin.read(int(await stdin.line()))
        if "-I" not in words:
            command.put("stdout", line_of(self._start(json.loads(await stdin.line()))))
            return 0
        path, request = (await stdin.line()).decode().strip(), json.loads(await stdin.line())
        context = path.removeprefix(f"{RUN_DIR}/").partition("/")[0]
        while (kernel := self.kernels.get(context)) is None:
            command.put("stdout", ABSENT)
            if not await self._wait(stdin):
                return 0
        await self._serve(command, context, kernel, request)
        return 0

    async def _wait(self, stdin: _Stdin) -> bool:
        """Until something has been started; False: nothing will be."""
        tasks = {asyncio.create_task(stdin.line()), asyncio.create_task(self._started.wait())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return any(task.result() for task in done)
        finally:
            for task in tasks:
                task.cancel()

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        context = request["context"]
        if not self.has_ipykernel:
            return {"type": "missing", "detail": "No module named 'ipykernel'"}
        is_new = context not in self.kernels
        if is_new:
            number, ended = self._ended.get(context, (0, ""))
            self.kernels[context] = FakeKernel(number + 1, ended)
            self._started.set()
            self._started = asyncio.Event()
        kernel = self.kernels[context]
        return {"type": "ready", "kernel": kernel.number, "restarted": is_new and bool(kernel.news), "reason": kernel.news}

    async def _serve(self, command: Command, context: str, kernel: FakeKernel, request: dict[str, Any]) -> None:
        def say(**event: Any) -> None:
            command.put("stdout", line_of(event))

        if request["op"] == "interrupt":
            task = kernel.task
            if task is not None:
                task.cancel()
            say(type="interrupted", running=task is not None)
            return
        if request["op"] == "stop":
            self.kill(context, "It was restarted on request.")
            say(type="stopped")
            return
        if kernel.turn.locked():
            kernel.waiting += 1
            say(type="queued", ahead=kernel.waiting)
        async with kernel.turn:
            kernel.waiting = max(0, kernel.waiting - 1)
            say(type="started", kernel=kernel.number, restarted=bool(kernel.news), reason=kernel.news)
            kernel.news = ""
            kernel.count += 1
            await self._cell(kernel, request, say)

    async def _cell(self, kernel: FakeKernel, request: dict[str, Any], say: Any) -> None:
        task = kernel.task = asyncio.create_task(_execute(kernel, request["code"], say))
        death = asyncio.create_task(kernel.death.wait())
        done, _ = await asyncio.wait({task, death}, timeout=request["timeout_s"], return_when=asyncio.FIRST_COMPLETED)
        kernel.task = None
        status = "ok"
        if death in done:
            say(type="died", detail=kernel.detail, oom=False)
            task.cancel()
            return
        death.cancel()
        if task not in done:
            task.cancel()
            await asyncio.wait({task})
            status = "timeout"
        if task.cancelled():
            say(type="error", name="KeyboardInterrupt", value="", traceback="KeyboardInterrupt: ")
            status = "interrupted" if status == "ok" else status
        elif task.exception() is not None:
            error = task.exception()
            assert error is not None
            text = "".join(traceback.format_exception_only(error))
            say(type="error", name=type(error).__name__, value=str(error), traceback=text)
            status = "error"
        say(type="done", status=status, execution_count=kernel.count, truncated=False)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except TypeError:  # a module, for instance
        return value


async def _execute(kernel: FakeKernel, code: str, say: Any) -> None:
    def display(data: dict[str, Any]) -> None:
        say(type="display_data", data=data)

    class Stream(io.StringIO):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.stream = name

        def write(self, text: str) -> int:
            say(type="stream", stream=self.stream, text=text)
            return len(text)

    kernel.names["display"] = display
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with contextlib.redirect_stdout(Stream("stdout")), contextlib.redirect_stderr(Stream("stderr")):
        running = eval(compile(tree, "<cell>", "exec", flags), kernel.names)
        if inspect.iscoroutine(running):
            await running
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval", flags), kernel.names)
            value = await value if inspect.iscoroutine(value) else value
            if value is not None:
                say(type="execute_result", data={"text/plain": repr(value)})


class _Stdin:
    """Lines and bytes of a command's stdin."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._buffer = b""

    async def _more(self) -> bool:
        data = await self._command.stdin.get()
        self._buffer += data or b""
        return data is not None

    async def line(self) -> bytes:
        while b"\n" not in self._buffer and await self._more():
            pass
        line, end, self._buffer = self._buffer.partition(b"\n")
        return line + end

    async def read(self, size: int) -> bytes:
        while len(self._buffer) < size and await self._more():
            pass
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data
