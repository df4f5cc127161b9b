"""Terminals in a workspace."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from perdure.core.errors import PerdureError
from perdure.sdk import _core
from perdure.sdk._acompat import acall, apause
from perdure.sdk._core import PtyFollower
from perdure.sdk._options import RunOptions
from perdure.sdk.errors import ConnectionLost
from perdure.wire import public

if TYPE_CHECKING:
    from perdure.sdk._async.workspace import AsyncWorkspace
    from perdure.sdk._sockets import AsyncSocket


class AsyncPty:
    """One terminal, attached to. Iterate over it for what it shows, as bytes; ``send`` types into it. Leaving it does not end it:
    ``connect`` to its id again, from anywhere, after a sleep too.

    A connection that is lost is taken up by the iteration, where it broke. What was being sent just then may have arrived.

    >>> pty = await ws.pty.create()  # doctest: +SKIP
    """

    def __init__(self, workspace: AsyncWorkspace, exec_id: str, offset: int = 0) -> None:
        self._workspace = workspace
        self._follower = PtyFollower(workspace.id, exec_id, offset)
        self._socket: AsyncSocket | None = None
        self._left = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.detach()

    @property
    def exec_id(self) -> str:
        return self._follower.exec_id

    @property
    def outcome(self) -> public.ExecOutcome | None:
        """How it ended, once an iteration or ``wait`` has seen it."""
        return self._follower.outcome

    @property
    def lost(self) -> int:
        """Bytes that this client was too late for: the oldest that a terminal has shown are not kept for ever."""
        return self._follower.lost

    async def open(self) -> None:
        """Connect, if it is not. Raises NotFound, StaleGeneration when the workspace has slept since, or ServerUnreachable.

        >>> await pty.open()  # doctest: +SKIP
        """
        if self._socket is None:
            from perdure.sdk._sockets import AsyncSocket  # it brings the WebSockets, which nothing else needs

            self._socket = await AsyncSocket.open(self._workspace.client.target, self._follower.path())
            self._follower.opened(self._socket.headers)
            self._workspace.note(self._socket.headers)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async with aclosing(self.follow()) as shown:
            async for data in shown:
                yield data

    async def follow(self) -> AsyncGenerator[bytes]:
        """What it shows, until it ends or this client leaves: first what was shown before, as far as it is kept.

        >>> shown = [output async for output in pty.follow()]  # doctest: +SKIP
        """
        while self._follower.outcome is None and not self._left:
            try:
                await self.open()
                assert self._socket is not None
                data = self._follower.take(await self._socket.receive())
            except PerdureError as error:
                socket, self._socket = self._socket, None
                if socket is not None:
                    await socket.aclose()
                if self._left:
                    return
                await apause(self._follower.broke(error))
                continue
            if data:
                yield data

    async def send(self, data: str | bytes) -> None:
        """Type. Raises ConnectionLost while the connection is broken.

        >>> await pty.send("ls\\n")  # doctest: +SKIP
        """
        await self._tell(data.encode() if isinstance(data, str) else data)

    async def resize(self, rows: int, cols: int) -> None:
        """Tell it the size of what shows it. The same size again has full-screen programs draw anew.

        >>> await pty.resize(40, 120)  # doctest: +SKIP
        """
        size = _core.checked(public.ExecInput, type="resize", rows=rows, cols=cols)
        await self._tell(size.model_dump_json(exclude_none=True))

    async def send_signal(self, signal: int) -> None:
        """Send a signal to what runs in its foreground.

        >>> await pty.send_signal(2)  # doctest: +SKIP
        """
        told = _core.checked(public.ExecInput, type="signal", signal=signal)
        await self._tell(told.model_dump_json(exclude_none=True))

    async def _tell(self, message: str | bytes) -> None:
        if self._socket is None:
            raise ConnectionLost("The terminal is not connected.", hint="Iterate over it: that connects again.")
        await self._socket.send(message)

    async def wait(self, *, on_data: Any = None) -> public.ExecOutcome:
        """Wait for its end; ``on_data`` is called with the bytes that it shows meanwhile.

        >>> outcome = await pty.wait()  # doctest: +SKIP
        """
        async with aclosing(self.follow()) as shown:
            async for data in shown:
                await acall(on_data, data)
        if self._follower.outcome is None:
            raise ConnectionLost("The terminal was left before it ended; it goes on.", hint="Connect to it again.")
        return self._follower.outcome

    async def detach(self) -> None:
        """Leave it; it goes on. Safe twice.

        >>> await pty.detach()  # doctest: +SKIP
        """
        self._left = True
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.aclose()

    async def kill(self) -> None:
        """End it and everything that was started in it.

        >>> await pty.kill()  # doctest: +SKIP
        """
        await self._workspace.commands.kill(self.exec_id)


class AsyncPtys:
    """``workspace.pty``."""

    def __init__(self, workspace: AsyncWorkspace) -> None:
        self._workspace = workspace

    async def create(
        self,
        rows: int = 24,
        cols: int = 80,
        *,
        cmd: str | Sequence[str] | None = None,
        **options: Unpack[RunOptions],
    ) -> AsyncPty:
        """A new terminal of that size, attached to: with the user's login shell, or with a command instead. It lives until its
        process ends, or somebody kills it; where nobody is attached and its shell waits, the workspace may sleep, which it
        survives.

        >>> pty = await ws.pty.create(rows=40, cols=120)  # doctest: +SKIP
        """
        size = _core.checked(public.PtySize, rows=rows, cols=cols)
        info = await self._workspace.commands.start_pty(size, cmd, options)
        return await self._attached(AsyncPty(self._workspace, info.exec_id))

    async def connect(self, exec_id: str, *, offset: int = 0) -> AsyncPty:
        """Attach to a terminal that anybody made: what it has shown comes first, as far as it is kept, or from ``offset`` on.

        >>> pty = await ws.pty.connect(exec_id)  # doctest: +SKIP
        """
        return await self._attached(AsyncPty(self._workspace, exec_id, offset))

    async def _attached(self, pty: AsyncPty) -> AsyncPty:
        await pty.open()
        return pty

    async def list(self) -> builtins.list[public.ExecInfo]:
        """Terminals that run, and recent ones that have ended.

        >>> terminals = await ws.pty.list()  # doctest: +SKIP
        """
        return [info for info in await self._workspace.commands.list() if info.pty is not None]

    async def resize(self, exec_id: str, rows: int, cols: int) -> None:
        """Tell a terminal a new size.

        >>> await ws.pty.resize(exec_id, rows=40, cols=120)  # doctest: +SKIP
        """
        await self._workspace.commands.resize(exec_id, rows, cols)

    async def kill(self, exec_id: str) -> None:
        """End a terminal and everything that was started in it.

        >>> await ws.pty.kill(exec_id)  # doctest: +SKIP
        """
        await self._workspace.commands.kill(exec_id)
