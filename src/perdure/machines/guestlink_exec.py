"""A handle on one command in a guest (wire.node.ExecHandle).

The handle outlives its stream: when the channel breaks and comes back, it attaches again where it stopped, and when the agent
that watched the command is gone it says so with ``ExecEnd.LOST``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Literal

from perdure.core.errors import Conflict, MachineDied, MachineFailed, NotFound
from perdure.core.ids import ExecId
from perdure.machines.guestlink_stream import LinkStream, clean
from perdure.wire.guest import Event, EventKind
from perdure.wire.guest.ops import Sub
from perdure.wire.node import ExecEnd, ExecEvent, ExecExited, ExecInfo, ExecOutput, ExecStarted, PtySize

#: Opens the command's stream again from (stdout, stderr) offsets, waiting for the link; raises when the link is gone for good.
Reattach = Callable[[int, int], Awaitable[LinkStream]]

LOST_DETAIL = "The agent that watched it is gone; whether the command did its work is unknown."
_STREAMS: dict[int, Literal["stdout", "stderr"]] = {Sub.STDOUT: "stdout", Sub.STDERR: "stderr"}


def integer(value: object, default: int = 0) -> int:
    """A guest's number, or the default where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else default


def exited_of(exec_id: ExecId, message: dict[str, Any]) -> ExecExited:
    """A guest's account of an end."""
    try:
        end = ExecEnd(str(message.get("end")))
    except ValueError:
        end = ExecEnd.LOST
    signal = message.get("signal")
    return ExecExited(
        exec_id=exec_id,
        end=end,
        exit_code=None if end is ExecEnd.LOST else integer(message.get("code"), -1),
        signal=None if signal is None else integer(signal),
        detail=clean(message.get("detail")),
        run_s=integer(message.get("run_ms")) / 1000,
    )


def info_of(value: dict[str, Any]) -> ExecInfo:
    """A guest's row about a command. Raises MachineFailed when it is not one."""
    exec_id, exited, pty = value.get("exec_id"), value.get("exited"), value.get("pty")
    if not isinstance(exec_id, str):
        raise MachineFailed("The workspace's agent listed something that is no command.")
    return ExecInfo(
        exec_id=ExecId(clean(exec_id)),
        pid=integer(value.get("pid")),
        command=clean(value.get("command")),
        started_at=datetime.fromtimestamp(moment_s(value.get("started_ns")), UTC),
        exited=exited_of(ExecId(exec_id), exited) if isinstance(exited, dict) else None,
        stdout_bytes=integer(value.get("stdout_bytes")),
        stderr_bytes=integer(value.get("stderr_bytes")),
        pty=PtySize(integer(pty.get("rows")), integer(pty.get("cols"))) if isinstance(pty, dict) else None,
    )


def moment_s(ns: object) -> float:
    """A guest's time in seconds since 1970, held inside what a datetime can say."""
    return min(max(integer(ns) / 1e9, 0.0), 4e9)


class LinkExec:
    """One attachment. ``events`` may be iterated once."""

    def __init__(
        self,
        exec_id: ExecId,
        stream: LinkStream,
        offsets: tuple[int, int],
        reattach: Reattach,
        *,
        takes_stdin: bool,
        on_exited: Callable[[], None],
    ) -> None:
        self.exec_id = exec_id
        self._on_exited = on_exited
        self._takes_stdin = takes_stdin
        self._stream = stream
        self._reattach = reattach
        self._offsets = {Sub.STDOUT: offsets[0], Sub.STDERR: offsets[1]}
        self._gaps = {Sub.STDOUT: 0, Sub.STDERR: 0}
        self._closed = False
        self._ended = False

    async def events(self) -> AsyncIterator[ExecEvent]:
        """ExecStarted (not for a command that could not start), output in order per stream, then one ExecExited."""
        started = False
        while True:
            event = await self._next()
            if event is None:
                yield ExecExited(self.exec_id, ExecEnd.LOST, None, None, LOST_DETAIL)
                return
            if event.kind == EventKind.DATA:
                output = self._output(event)
                if output is not None:
                    yield output
                continue
            message = event.value
            if message.get("ev") == "started" and not started:
                started = True
                yield ExecStarted(self.exec_id, integer(message.get("pid")))
            elif message.get("ev") == "gap":
                self._gap(message)
            elif message.get("ev") == "exited":
                self._ended = True
                await self._stream.close_write()
                self._on_exited()
                yield exited_of(self.exec_id, message)
                await self._stream.read()  # its end, so that the stream is forgotten on both sides
                return

    async def _next(self) -> Event | None:
        """The next event, attaching again over a broken channel; None when the command is lost."""
        while True:
            try:
                return await self._stream.next_event()
            except MachineDied:
                if self._closed:
                    raise
            try:
                self._stream = await self._reattach(self._offsets[Sub.STDOUT], self._offsets[Sub.STDERR])
            except NotFound:
                return None

    def _output(self, event: Event) -> ExecOutput | None:
        name = _STREAMS.get(event.flags)
        if name is None:
            return None  # a sub-stream that this version does not know
        offset, gap = self._offsets[event.flags], self._gaps[event.flags]
        self._offsets[event.flags] = offset + len(event.value)
        self._gaps[event.flags] = 0
        return ExecOutput(name, offset, event.value, gap)

    def _gap(self, message: dict[str, Any]) -> None:
        sub, lost = integer(message.get("sub")), integer(message.get("lost"))
        if sub in self._offsets and lost > 0:
            self._offsets[sub] += lost
            self._gaps[sub] += lost

    async def write_stdin(self, data: bytes) -> None:
        """Queue bytes for the command; what it does not read before it ends is dropped."""
        if not self._takes_stdin:
            raise Conflict("The command was started without stdin.", hint="Start it with stdin=True.")
        if not self._ended:
            await self._stream.write(data)

    async def close_stdin(self) -> None:
        if not self._ended:
            await self._stream.message({"ev": "stdin_end"})

    async def close(self) -> None:
        """Detach; the command goes on, and gets what was written before."""
        self._closed = True
        self._stream.leave({"ev": "detach"})
