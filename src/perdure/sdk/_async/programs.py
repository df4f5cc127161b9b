"""The workspace's program, and invocations of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Unpack

from perdure.core.errors import PerdureError
from perdure.sdk import _core
from perdure.sdk._acompat import apause
from perdure.sdk._core import Call, Output
from perdure.sdk._invoke import SSE, EventReader, InvokeEvent, InvokeResult
from perdure.sdk._options import ProgramOptions, program_fields
from perdure.sdk.errors import ConnectionLost, rebuild
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._async.workspace import AsyncWorkspace


#: What following a log outlives once it has begun.
_PASSING = frozenset({"unavailable", "server_unreachable", "busy"})


class AsyncInvocation:
    """An invocation that has not been sent yet: iterating over it sends it and gives the answer's events as they come.

    Leaving the loop ends the connection, and with it perhaps what the program does. ``status`` and ``content_type`` are known
    once the answer has begun.

    >>> async for event in await ws.invoke({"question": "why"}, stream=True):  # doctest: +SKIP
    ...     print(event.data)
    """

    def __init__(self, workspace: AsyncWorkspace, call: Call, timeout_s: float | None) -> None:
        self._workspace = workspace
        self._call = call
        self._timeout_s = timeout_s
        self.status: int | None = None
        self.content_type = ""

    async def __aiter__(self) -> AsyncIterator[InvokeEvent]:
        reader: EventReader | None = None
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if reader is None:
                    reader = EventReader(self.content_type.partition(";")[0].strip().lower() == SSE)
                for event in reader.feed(piece):
                    yield event
        for event in reader.end() if reader is not None else ():
            yield event

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The answer's bytes as they come.

        >>> call = await ws.invoke({"question": "why"}, stream=True)
        >>> body = b"".join([piece async for piece in call.pieces()])  # doctest: +SKIP
        """
        limit_s = self._timeout_s
        async with self._workspace.client.stream(self._call, silence_s=limit_s, timeout_s=limit_s) as response:
            self._workspace.note(response.headers)
            self.status, self.content_type = response.status_code, response.headers.get("content-type", "")
            async for piece in response.aiter_raw():
                yield piece

    async def result(self) -> InvokeResult:
        """The whole answer.

        >>> call = await ws.invoke({"question": "why"}, stream=True)
        >>> (await call.result()).status  # doctest: +SKIP
        200
        """
        content = bytearray()
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                content += piece
        return InvokeResult(self.status or 0, self.content_type, bytes(content))


class AsyncProgram:
    """``workspace.program``: what the workspace keeps running. All of it wakes the workspace.

    >>> info = await ws.program.set(["sleep", "1000"])
    """

    def __init__(self, workspace: AsyncWorkspace) -> None:
        self._workspace = workspace

    async def show(self) -> public.ProgramInfo:
        """What it is and how it does.

        >>> info = await ws.program.show()
        """
        return await self._workspace.fetch(_core.get(self._path()), public.ProgramInfo)

    async def set(self, argv: Sequence[str], **options: Unpack[ProgramOptions]) -> public.ProgramInfo:
        """Name it and start it, in place of the one before; sleeps, forks and boots from disk keep it. ``restart``: ``always``,
        ``on-failure`` or ``never``. It answers invocations on ``port``, which it finds in its variable ``PORT``.

        >>> info = await ws.program.set(["sleep", "1000"])
        """
        body = _core.checked(public.SetProgram, argv=list(argv), **program_fields(options))
        call = Call("PUT", self._path(), body=body.model_dump(mode="json"), repeatable=True)
        return await self._workspace.fetch(call, public.ProgramInfo)

    async def unset(self) -> public.ProgramInfo:
        """End it and forget it. Succeeds where there is none.

        >>> info = await ws.program.set(["sleep", "1000"])
        >>> info = await ws.program.unset()
        """
        return await self._workspace.fetch(Call("DELETE", self._path(), repeatable=True), public.ProgramInfo)

    async def start(self) -> public.ProgramInfo:
        """Start it, now if it backs off.

        >>> info = await ws.program.set(["sleep", "1000"])
        >>> info = await ws.program.start()
        """
        return await self._act("start", repeatable=True)

    async def stop(self) -> public.ProgramInfo:
        """SIGTERM, and SIGKILL after its grace. It stays stopped until it is started, or its machine boots from disk.

        >>> info = await ws.program.set(["sleep", "1000"])
        >>> info = await ws.program.stop()
        """
        return await self._act("stop", repeatable=True)

    async def restart(self) -> public.ProgramInfo:
        """End it and start it anew, as its file is now.

        >>> info = await ws.program.set(["sleep", "1000"])
        >>> info = await ws.program.restart()
        """
        return await self._act("restart", repeatable=False)

    async def _act(self, act: str, *, repeatable: bool) -> public.ProgramInfo:
        return await self._workspace.fetch(_core.post(self._path(act), repeatable=repeatable), public.ProgramInfo)

    async def logs(self, *, tail: int | None = None, offset: int | None = None, follow: bool = False) -> AsyncGenerator[Output]:
        """What it wrote to stdout and stderr, in its order: all that is kept, the last ``tail`` lines, or from a byte offset on;
        with ``follow`` also what comes, over broken connections too. Following keeps the workspace awake.

        >>> info = await ws.program.set(["sleep", "1000"])
        >>> lines = [output.text async for output in ws.program.logs(tail=10)]
        """
        breaks = 0
        while True:
            try:
                call = _core.get(self._path("logs"), tail=None if offset is not None else tail, offset=offset, follow=follow)
                async for line in self._workspace.client.ndjson(call):
                    chunk = _chunk(line)
                    breaks = 0
                    if chunk is not None:
                        offset = chunk.offset + len(chunk.data)
                        yield chunk
            except PerdureError as error:
                breaks += 1
                again = isinstance(error, ConnectionLost) or (offset is not None and error.code in _PASSING)
                if not follow or not again or breaks > _core.RECONNECTS:
                    raise
                await apause(_core.delay_s(breaks))
            else:
                if not follow:
                    return

    def _path(self, *rest: str) -> str:
        return _core.workspace_path(self._workspace.id, "program", *rest)


def _chunk(line: bytes) -> Output | None:
    """One line of the stream; raises the error that ended it."""
    chunk = public.LogChunk.model_validate_json(line)
    if chunk.type == "error":
        raise rebuild({"error": chunk.error.model_dump() if chunk.error else None}, 500)
    return Output("output", chunk.payload, chunk.offset, chunk.gap) if chunk.type == "output" else None
