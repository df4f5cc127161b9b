"""Commands and ports of a guest, beside its files: the operations of wire.node.Guest that go over the data channel."""

from __future__ import annotations

import signal as signals
from abc import abstractmethod
from typing import Any

from perdure.core.errors import InvalidRequest, PerdureError
from perdure.core.ids import ExecId
from perdure.machines.guestlink_exec import LinkExec, info_of
from perdure.machines.guestlink_fileops import LinkFiles, rows_of
from perdure.machines.guestlink_stream import LinkStream
from perdure.wire.guest.ops import Op
from perdure.wire.node import ExecInfo, ExecSpec, PtySize


class GuestFiles(LinkFiles):
    """The data channel's half of a link."""

    @abstractmethod
    def _note_started(self, exec_id: ExecId) -> bool:
        """A command runs from now on. False when it was known to run."""

    @abstractmethod
    def _note_ended(self, exec_id: ExecId) -> None:
        """A command does not run any more. Safe twice."""

    @abstractmethod
    def _note_watched(self, exec_id: ExecId) -> None:
        """Somebody is about to attach to it: whatever was known of a shell that only waited holds no more."""

    # --------------------------------------------------------------------------------------------------- commands

    async def start_exec(self, spec: ExecSpec) -> LinkExec:
        """Start a command. Raises AlreadyExists for an id that the guest knows: attach instead, and nothing runs twice."""
        # Noted before it is asked for: a short command's end is told on the other channel and may overtake the answer.
        request, is_new = _exec_request(spec), self._note_started(spec.exec_id)
        try:
            stream, _ = await self._ask(request, "exec")
        except PerdureError:
            if is_new:
                self._note_ended(spec.exec_id)
            raise
        return self._handle(spec.exec_id, stream, (0, 0), takes_stdin=spec.stdin or spec.pty is not None)

    async def attach_exec(self, exec_id: ExecId, stdout_offset: int = 0, stderr_offset: int = 0) -> LinkExec:
        stream = await self._attach(exec_id, stdout_offset, stderr_offset)
        return self._handle(exec_id, stream, (stdout_offset, stderr_offset))

    async def _attach(self, exec_id: ExecId, stdout_offset: int, stderr_offset: int) -> LinkStream:
        if stdout_offset < 0 or stderr_offset < 0:
            raise InvalidRequest("An output offset is not negative.")
        request = {"op": Op.ATTACH, "exec_id": exec_id, "stdout": stdout_offset, "stderr": stderr_offset}
        self._note_watched(exec_id)
        return (await self._ask(request, "exec"))[0]

    def _handle(self, exec_id: ExecId, stream: LinkStream, offsets: tuple[int, int], *, takes_stdin: bool = True) -> LinkExec:
        return LinkExec(
            exec_id,
            stream,
            offsets,
            lambda out, err: self._attach(exec_id, out, err),
            takes_stdin=takes_stdin,
            on_exited=lambda: self._note_ended(exec_id),
        )

    async def signal_exec(self, exec_id: ExecId, signal: int) -> None:
        if signal not in signals.valid_signals():
            raise InvalidRequest(f"{signal} is not a signal number.")
        await self._do({"op": Op.SIGNAL, "exec_id": exec_id, "signal": int(signal)})

    async def resize_exec(self, exec_id: ExecId, size: PtySize) -> None:
        await self._do({"op": Op.RESIZE, "exec_id": exec_id, "rows": size.rows, "cols": size.cols})

    async def kill_exec(self, exec_id: ExecId) -> None:
        await self._do({"op": Op.KILL, "exec_id": exec_id})

    async def list_execs(self) -> tuple[ExecInfo, ...]:
        return tuple([info_of(row) for row in rows_of(await self._collect({"op": Op.LIST_EXECS}))])

    # ------------------------------------------------------------------------------------------------------ ports

    async def open_tcp(self, port: int) -> LinkStream:
        if not 1 <= port <= 65535:
            raise InvalidRequest(f"{port} is not a port number (1 to 65535).")
        return (await self._ask({"op": Op.TCP, "port": port}))[0]


def _exec_request(spec: ExecSpec) -> dict[str, Any]:
    commands = (spec.argv is not None) + (spec.shell is not None)
    if commands > 1 or (commands == 0 and spec.pty is None) or spec.argv == ():
        raise InvalidRequest("A command is either argv, with at least the program, or shell.")
    texts = [*(spec.argv or ()), spec.shell or "", *spec.env.values(), *spec.env]
    if any("\0" in text for text in texts) or any("=" in name or not name for name in spec.env):
        raise InvalidRequest("A command's words hold no NUL, and a variable's name neither '=' nor nothing.")
    for limit in (spec.run_limit_s, spec.idle_limit_s):
        if limit is not None and limit <= 0:
            raise InvalidRequest("A limit is a positive number of seconds.")
    size = {} if spec.pty is None else {"rows": spec.pty.rows, "cols": spec.pty.cols}
    return {
        "op": Op.EXEC if spec.pty is None else Op.PTY,
        **size,
        "exec_id": spec.exec_id,
        "argv": None if spec.argv is None else list(spec.argv),
        "shell": spec.shell,
        "env": dict(spec.env),
        "cwd": spec.cwd,
        "user": spec.user,
        "stdin": spec.stdin,
        "run_limit_s": spec.run_limit_s,
        "idle_limit_s": spec.idle_limit_s,
        "kill_grace_s": spec.kill_grace_s,
    }
