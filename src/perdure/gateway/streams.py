"""Sockets as ``ByteStream``, pumping between two streams, and keeping a generation's work together so that it ends at once."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator

from perdure.core.errors import Busy, MachineFailed, StaleGeneration
from perdure.core.ids import WorkspaceId
from perdure.wire.node import ByteStream

CHUNK_BYTES = 65536


class SocketStream:
    """A TCP connection as a ``ByteStream``: ``write`` waits while more than one chunk is unsent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=CHUNK_BYTES)

    async def read(self, limit: int = CHUNK_BYTES) -> bytes:
        try:
            return await self._reader.read(limit)
        except OSError as error:
            raise MachineFailed(f"The peer broke the connection: {error.strerror or error}.") from error

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise MachineFailed(f"The peer broke the connection: {error.strerror or error}.") from error

    async def secure(self, context: ssl.SSLContext, name: str) -> None:
        """Speak TLS from here on, with a peer whose certificate is for ``name``. Raises MachineFailed."""
        try:
            await self._writer.start_tls(context, server_hostname=name)
        except OSError as error:  # of which ssl's own is one
            raise MachineFailed(f"The peer offers no TLS that can be trusted: {error}.") from error

    async def close_write(self) -> None:
        # A peer that is gone already needs no end of stream.
        with contextlib.suppress(OSError):
            if self._writer.can_write_eof() and not self._writer.is_closing():
                self._writer.write_eof()

    async def close(self) -> None:
        # What was written still leaves, but nobody waits for it: a peer that stopped reading would never let go.
        self._writer.close()

    def abort(self) -> None:
        """Reset the connection now, unsent bytes included."""
        self._writer.transport.abort()


Count = Callable[[int], None]


async def pump(left: ByteStream, right: ByteStream, to_right: Count, to_left: Count) -> None:
    """Copy both ways until both have ended. An end in one direction is passed on and leaves the other direction open.

    Raises MachineFailed when either side resets; whoever called closes both.
    """
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(left, right, to_right))
            group.create_task(_copy(right, left, to_left))
    except* (MachineFailed, StaleGeneration) as broken:
        raise MachineFailed("The connection broke.", internal=repr(broken.exceptions)) from broken


async def _copy(source: ByteStream, sink: ByteStream, count: Count) -> None:
    while data := await source.read(CHUNK_BYTES):
        await sink.write(data)
        count(len(data))
    await sink.close_write()


class Generations:
    """The tasks that serve each registered (workspace, generation), with a limit on each. Not registered is stale."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self._tasks: dict[tuple[WorkspaceId, int], set[asyncio.Task[None]]] = {}

    def register(self, workspace_id: WorkspaceId, generation: int) -> None:
        self._tasks.setdefault((workspace_id, generation), set())

    def count(self, workspace_id: WorkspaceId, generation: int) -> int:
        return len(self._tasks.get((workspace_id, generation), ()))

    def check(self, workspace_id: WorkspaceId, generation: int) -> None:
        """Raises StaleGeneration when not registered, Busy when one more would be too many."""
        tasks = self._tasks.get((workspace_id, generation))
        if tasks is None:
            raise StaleGeneration(f"Generation {generation} of {workspace_id} is not running here.")
        if len(tasks) >= self._limit:
            raise Busy(
                f"This workspace has {self._limit} {self._what} open, which is the limit.", hint="Close some of them first."
            )

    @contextlib.contextmanager
    def hold(self, workspace_id: WorkspaceId, generation: int) -> Iterator[None]:
        """Count the running task as one of the generation's; ``drop`` cancels it. Raises like ``check``."""
        self.check(workspace_id, generation)
        task = asyncio.current_task()
        assert task is not None
        tasks = self._tasks[workspace_id, generation]
        if task in tasks:
            raise AssertionError("one task serves one stream")
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)

    async def drop(self, workspace_id: WorkspaceId, generation: int) -> int:
        """Unregister, cancel everything and wait until it is gone; returns how many there were. Safe twice."""
        tasks = self._tasks.pop((workspace_id, generation), set()) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)
