"""A small asyncio client for QMP, QEMU's control protocol (docs/interop/qmp-spec in QEMU's source).

JSON objects, one per line, over a connected Unix socket. One command is in flight at a time: QEMU executes them in order
anyway, and a descriptor sent along (SCM_RIGHTS) belongs to the command that is read with it. Events go to one callback in
the order in which they arrive.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from perdure.core.errors import MachineDied, MachineFailed

#: Longest line accepted from the VMM, in bytes; an answer of this client's commands has a few kilobytes.
LINE_MAX = 4 << 20
#: Seconds a command may take. None that we send waits for the guest, but some wait for the host's disk, and the freeze watchdog
#: may stop the VMM meanwhile. Too late is final, so a slow host must not get here; whoever gives a machine up kills it without
#: asking it anything.
COMMAND_DEADLINE_S = 300.0

Event = dict[str, Any]


class QmpError(MachineFailed):
    """QEMU refused a command. ``error_class`` and ``description`` are QEMU's words."""

    def __init__(self, command: str, error_class: str, description: str) -> None:
        super().__init__(f"The virtual machine monitor refused {command!r}: {description}")
        self.error_class = error_class
        self.description = description


class QmpClient:
    """Owns one end of a connected socket. ``on_event`` must not block.

    ``on_lost`` is called once when the VMM may live but can no longer be spoken to: whoever owns it should end it.
    """

    def __init__(
        self, sock: socket.socket, on_event: Callable[[Event], None], on_lost: Callable[[], None] = lambda: None
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_event = on_event
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._lock = asyncio.Lock()
        self._greeting: asyncio.Future[Event] = self._loop.create_future()
        self._answer: asyncio.Future[Event] | None = None
        self._serial = 0
        self._open = True
        self._loop.add_reader(sock.fileno(), self._on_readable)

    @property
    def is_open(self) -> bool:
        return self._open

    async def start(self, deadline_s: float = COMMAND_DEADLINE_S) -> None:
        """Wait for the greeting and leave capability negotiation. Raises MachineDied, also when nothing comes in time."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._greeting
        except TimeoutError:
            raise MachineDied(f"The virtual machine monitor said nothing for {deadline_s:g} seconds after its start.") from None
        await self.execute("qmp_capabilities")

    async def execute(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        fd: int | None = None,
        deadline_s: float = COMMAND_DEADLINE_S,
    ) -> Any:
        """Run one command and return its answer. Raises QmpError or MachineDied; ``fd`` stays the caller's to close.

        A cancelled caller leaves at once, the command runs to its end: a second one sent into its middle could be given its
        descriptor.
        """
        own_fd = os.dup(fd) if fd is not None else None
        running = self._loop.create_task(self._run(command, arguments, own_fd, deadline_s))
        running.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return await asyncio.shield(running)

    async def _run(self, command: str, arguments: dict[str, Any] | None, own_fd: int | None, deadline_s: float) -> Any:
        try:
            async with self._lock:
                answer = await self._exchange(command, arguments, own_fd, deadline_s)
        finally:
            if own_fd is not None:
                os.close(own_fd)
        if "error" in answer:
            error = answer["error"]
            raise QmpError(command, str(error.get("class")), str(error.get("desc")))
        return answer.get("return")

    async def _exchange(self, command: str, arguments: dict[str, Any] | None, fd: int | None, deadline_s: float) -> Event:
        if not self._open:
            raise MachineDied("The virtual machine monitor has ended.")
        self._serial += 1
        message: dict[str, Any] = {"execute": command, "id": self._serial}
        if arguments:
            message["arguments"] = arguments
        self._answer = self._loop.create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(json.dumps(message, separators=(",", ":")).encode() + b"\n", fd)
                return await self._answer
        except TimeoutError:
            # The stream cannot be trusted any more: a late answer would be taken for the next command's.
            self._lose("it did not answer in time")
            raise MachineDied(f"The virtual machine monitor did not answer {command!r} in {deadline_s:g} seconds.") from None
        finally:
            if self._answer.done() and not self._answer.cancelled():
                self._answer.exception()  # the sending may have failed too, and is what the caller is told
            self._answer = None

    def close(self) -> None:
        """Drop the connection; waiting commands fail with MachineDied. Safe twice."""
        self._fail("it was stopped")

    async def _send(self, data: bytes, fd: int | None) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        try:
            sent = self._sock.sendmsg([data], ancillary)
        except BlockingIOError:
            await self._writable()
            return await self._send(data, fd)
        except OSError as error:
            self._fail(str(error))
            raise MachineDied("The virtual machine monitor has ended.", internal=str(error)) from None
        if sent < len(data):
            await self._writable()
            await self._send(data[sent:], None)
        return None

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._sock.fileno(), lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            self._loop.remove_writer(self._sock.fileno())

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(str(error))
            return
        if not data:
            self._fail("it closed its control socket")
            return
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            if line.strip():
                self._on_line(line)
        if len(self._buffer) > LINE_MAX:
            self._lose("it sent a line without end")

    def _on_line(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            self._lose("it sent something that is not JSON")
            return
        if "QMP" in message:
            if not self._greeting.done():
                self._greeting.set_result(message)
        elif "event" in message:
            self._on_event(message)
        elif self._answer is not None and not self._answer.done() and message.get("id") == self._serial:
            self._answer.set_result(message)

    def _lose(self, why: str) -> None:
        if self._open:
            self._fail(why)
            self._on_lost()

    def _fail(self, why: str) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for waiting in (self._greeting, self._answer):
            if waiting is not None and not waiting.done():
                waiting.set_exception(MachineDied("The virtual machine monitor has ended.", internal=why))
        # A greeting nobody waits for is no unhandled error.
        if self._greeting.done() and not self._greeting.cancelled():
            self._greeting.exception()
