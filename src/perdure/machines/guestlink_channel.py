"""The host end of one guest channel: a connection, its mux, and what waits on it.

A channel connects, resynchronises (DESIGN D3), and then runs two tasks: one reads and hands out what arrives, one writes what
the mux has. When the bytes stop making sense or the guest's agent starts anew, everything that waits fails, and ``broken`` says
so once; whoever owns the channel decides whether to connect again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

from perdure.core.errors import GuestUnresponsive, InvalidRequest, MachineDied, PerdureError
from perdure.machines.guestlink_stream import LinkStream, error_of
from perdure.wire.guest import NONCE_BYTES, Event, EventKind, Mux, Role
from perdure.wire.guest.mux import payload_fits

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

_READ_BYTES = 256 * 1024
_WRITE_BYTES = 256 * 1024


class Channel:
    """One channel of one machine. Callbacks run in the reading task: they must not block."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        *,
        on_open: Callable[[LinkStream, dict[str, Any]], None],
        on_note: Callable[[dict[str, Any]], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self.name = name
        self._connect = connect
        self._on_open = on_open
        self._on_note = on_note
        self._on_broken = on_broken
        self._mux = Mux(Role.HOST)
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._output = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_write = asyncio.Event()
        self.release()
        self._synced: asyncio.Future[None] | None = None
        self._streams: dict[int, LinkStream] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.is_broken = False  # since it was opened

    # ------------------------------------------------------------------------------------------------- connection

    async def open(self) -> None:
        """Connect and resynchronise; the caller sets the deadline. Whatever waited on an earlier connection has failed."""
        await self.close("the channel is opened anew")
        self._mux = Mux(Role.HOST)
        reader, self._writer = await self._connect()
        self.is_broken = False
        self._mux.begin(os.urandom(NONCE_BYTES))
        self._synced = asyncio.get_running_loop().create_future()
        self._output.set()
        self._tasks = [
            asyncio.create_task(self._read(reader), name=f"{self.name} reader"),
            asyncio.create_task(self._write(self._writer), name=f"{self.name} writer"),
        ]
        await self._synced

    async def close(self, why: str) -> None:
        """Drop the connection; everything that waits on it fails. Safe to call twice."""
        tasks, self._tasks = self._tasks, []
        writer, self._writer = self._writer, None
        for task in tasks:
            task.cancel()
        self.release()
        self._fail(MachineDied(f"The connection to the workspace ended: {why}.", ambiguous=True))
        if writer is not None:
            writer.transport.abort()
        current = asyncio.current_task()
        await asyncio.gather(*(task for task in tasks if task is not current), return_exceptions=True)

    def _fail(self, error: PerdureError) -> None:
        if self._synced is not None and not self._synced.done():
            self._synced.set_exception(error)
            self._synced.exception()  # whoever waits gets it; when nobody does any more, it is no news
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(error)
                call.exception()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "the machine closed it"
        try:
            while data := await reader.read(_READ_BYTES):
                await self._may_read.wait()
                for event in self._mux.receive(data):
                    self._on_event(event)
                if self._mux.has_output:
                    self._output.set()
        except OSError as error:
            why = str(error)
        self._break(why)

    def _break(self, why: str) -> None:
        self.is_broken = True
        self._fail(MachineDied(f"The connection to the workspace broke: {why}.", ambiguous=True))
        self._on_broken(why)

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._output.wait()
                self._output.clear()
                while self._mux.has_output:
                    await self._may_write.wait()
                    writer.write(self._mux.pull(_WRITE_BYTES))
                    await writer.drain()
        except OSError:
            return  # the reading task sees the same and says it

    # ------------------------------------------------------------------------------------------------------- hold

    async def hold(self, fence: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Let nothing pass in either direction until ``release``; returns when the guest has read all that was sent.

        ``fence`` is the last call before; its reply is returned. Bytes that QEMU still moves would change guest memory while it
        is copied, although the vCPUs stand still.
        """
        writer = self._writer
        if writer is None:
            raise MachineDied("There is no connection to the workspace.")
        self._may_write.clear()
        asking = asyncio.create_task(self.call(fence, deadline_s))
        try:
            await asyncio.sleep(0)  # the call is queued now
            writer.write(self._mux.pull_urgent())
            reply = await asking
        except BaseException:
            asking.cancel()
            self.release()
            raise
        self._may_read.clear()
        cast("asyncio.ReadTransport", writer.transport).pause_reading()
        return reply

    def release(self) -> None:
        """Let bytes pass again. Safe when nothing is held."""
        if not self._may_read.is_set() and self._writer is not None and not self._writer.is_closing():
            cast("asyncio.ReadTransport", self._writer.transport).resume_reading()
        self._may_read.set()
        self._may_write.set()

    # ----------------------------------------------------------------------------------------------------- events

    def _on_event(self, event: Event) -> None:
        kind = event.kind
        if kind == EventKind.SYNC:
            if self._synced is not None and not self._synced.done():
                self._synced.set_result(None)
        elif kind == EventKind.BROKEN:
            self._break(str(event.value))
        elif kind == EventKind.REPLY:
            call = self._calls.pop(event.stream, None)
            if call is not None and not call.done():
                call.set_result(event.value)
        elif kind == EventKind.NOTE:
            self._on_note(event.value)
        elif kind == EventKind.OPEN:
            self._on_open(self._stream(event.stream), event.value)
        elif kind != EventKind.CALL:
            self._on_stream_event(event)

    def _on_stream_event(self, event: Event) -> None:
        stream = self._streams.get(event.stream)
        if stream is not None:
            stream.on_event(event)

    # ------------------------------------------------------------------------------------------------------ calls

    async def call(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Ask and wait. Raises GuestUnresponsive at the deadline, or what the guest's refusal means."""
        if self._writer is None:
            raise MachineDied("There is no connection to the workspace.")
        call_id = self._mux.call(request)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._output.set()
        try:
            async with asyncio.timeout(deadline_s):
                reply = await future
        except TimeoutError as error:
            raise GuestUnresponsive(
                f"The workspace did not answer {request.get('op')!r} within {deadline_s:g} s.",
                hint="Try again; if it stays silent, wake it from its last snapshot.",
                ambiguous=True,
            ) from error
        finally:
            self._calls.pop(call_id, None)
        if reply.get("ok") is not True:
            raise error_of(reply)
        return reply

    def open_stream(self, request: dict[str, Any]) -> LinkStream:
        """Open a stream; ``await stream.accepted(...)`` next."""
        if self._writer is None or not self._mux.synced:
            raise MachineDied("There is no connection to the workspace.")
        if not payload_fits(request):
            raise InvalidRequest(
                "The request is longer than 64 KiB, too long for the workspace's channel.", hint="Put it into a file."
            )
        stream_id = self._mux.open(request)
        self._output.set()
        return self._stream(stream_id)

    def _stream(self, stream_id: int) -> LinkStream:
        stream = LinkStream(self._mux, stream_id, self._output.set)
        self._streams[stream_id] = stream
        stream.on_over.append(lambda: self._streams.pop(stream_id, None))
        return stream
