"""All commands that the agent knows, and the streams that act on them."""

from __future__ import annotations

import json
from collections import OrderedDict

from perdure.guest.execs import Attachment, Command
from perdure.wire.guest.ops import EXECS_MAX, FINISHED_BYTES, FINISHED_MAX, SPOOL_BYTES, Code, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from perdure.guest.loop import Loop
    from perdure.guest.world import Group, World
    from perdure.wire.guest.mux import Mux

_LOST = {"ev": "exited", "end": "lost", "code": None, "signal": None, "run_ms": 0}
_LOST_DETAIL = "The agent that watched it ended; whether the command did its work is unknown."


def _kind(spec: dict[str, Any]) -> type[Command]:
    if spec["op"] != Op.PTY:
        return Command
    from perdure.guest.terminal import Terminal  # few workspaces ever have one

    return Terminal


class ExecTable:
    """Running and remembered commands by id. An id is used once, so that a start that is tried again never runs twice."""

    def __init__(self, loop: Loop, world: World, mux: Mux, ended: Callable[[str], None]) -> None:
        self._loop = loop
        self._world = world
        self._mux = mux
        self._note_ended = ended
        self._running: dict[str, Command] = {}
        self._finished: OrderedDict[str, Command] = OrderedDict()
        self._lost: dict[str, Group] = {}
        self._leftovers: list[Group] = []
        self._by_stream: dict[int, Command] = {}
        self.environment: dict[str, str] = {}

    def adopt_lost(self, names: list[str]) -> None:
        """Commands of an agent before this one: their processes go on, their outcome is unknown."""
        for name in names:
            group = self._world.group(name)
            if not group.remove():
                self._lost[name] = group

    def running_ids(self) -> list[str]:
        return list(self._running)

    def at_prompt(self) -> list[str]:
        """Shells on terminals where nobody is and nothing runs: no reason to keep the workspace awake."""
        return [exec_id for exec_id, command in self._running.items() if command.is_at_prompt]

    def lost_ids(self) -> list[str]:
        return list(self._lost)

    # ---------------------------------------------------------------------------------------------------- streams

    def open(self, stream: int, request: dict[str, Any]) -> None:
        """Serve a stream whose operation is about commands."""
        op = request["op"]
        if op == Op.LIST_EXECS:
            self._list(stream)
            return
        exec_id = request.get("exec_id")
        if not isinstance(exec_id, str) or not exec_id.replace("_", "").replace("-", "").isalnum():
            self._mux.reset(stream, Code.INVALID, "A command's id has letters, digits, dashes and underscores.")
        elif op in (Op.EXEC, Op.PTY):
            self._exec(stream, exec_id, request)
        elif exec_id not in self._running and exec_id not in self._finished and exec_id not in self._lost:
            self._mux.reset(
                stream, Code.NOT_FOUND, f"There is no command {exec_id}; only the last {FINISHED_MAX} are remembered."
            )
        elif op == Op.ATTACH:
            self._attach(stream, exec_id, (int(request.get("stdout") or 0), int(request.get("stderr") or 0)))
        else:
            self._act(stream, exec_id, request)

    def _exec(self, stream: int, exec_id: str, spec: dict[str, Any]) -> None:
        known = self._running.get(exec_id) or self._finished.get(exec_id)
        if known is not None and not known.is_of(spec):
            self._mux.reset(stream, Code.CONFLICT, f"The id {exec_id} is that of another command.")
            return
        if known is not None or exec_id in self._lost:
            self._mux.reset(stream, Code.EXISTS, f"The command {exec_id} exists already; attach to it instead.")
            return
        if len(self._running) >= EXECS_MAX:
            self._mux.reset(stream, Code.BUSY, f"{EXECS_MAX} commands are running; wait for one of them or kill one.")
            return
        try:
            command = _kind(spec)(self._loop, self._world, spec, self._on_ended)
            command.start(self.environment, self._mux.consumed)
        except ValueError as error:
            self._mux.reset(stream, Code.INVALID, str(error))
            return
        except OSError as error:
            self._mux.reset(stream, Code.FAILED, f"The command cannot be started: {error}.")
            return
        self._running[exec_id] = command
        self._attach(stream, exec_id, (0, 0))

    def run(self, spec: dict[str, Any], ended: Callable[[Command], None]) -> None:
        """Run a command that no stream watches (warm-up, hooks)."""

        def done(command: Command) -> None:
            self._retire(command)
            ended(command)

        Command(self._loop, self._world, spec, done).start(self.environment, self._mux.consumed)

    def _attach(self, stream: int, exec_id: str, offsets: tuple[int, int]) -> None:
        self._mux.accept(stream)
        if exec_id in self._lost:
            self._mux.message(stream, {**_LOST, "detail": _LOST_DETAIL})
            self._mux.eof(stream)
            return
        command = self._running.get(exec_id) or self._finished[exec_id]
        self._by_stream[stream] = command
        command.attach(Attachment(self._mux, stream, offsets, lambda: self._by_stream.pop(stream, None)))

    def _act(self, stream: int, exec_id: str, request: dict[str, Any]) -> None:
        command = self._running.get(exec_id) or self._finished.get(exec_id)
        if request["op"] == Op.SIGNAL:
            number = request.get("signal")
            if not isinstance(number, int) or not 1 <= number <= 64:
                self._mux.reset(stream, Code.INVALID, f"{number!r} is not a signal number (1 to 64).")
                return
            if command is not None:
                command.signal(number)
        elif request["op"] == Op.RESIZE:
            if not self._resize(stream, command, request):
                return
        elif command is not None:
            command.kill("killed")
        else:
            self._lost[exec_id].kill()
        self._mux.accept(stream)
        self._mux.eof(stream)

    def _resize(self, stream: int, command: Command | None, request: dict[str, Any]) -> bool:
        try:
            if command is None or not command.resize(request.get("rows"), request.get("cols")):
                self._mux.reset(stream, Code.CONFLICT, f"The command {request['exec_id']} has no terminal.")
                return False
        except ValueError as error:
            self._mux.reset(stream, Code.INVALID, str(error))
            return False
        return True

    def _list(self, stream: int) -> None:
        infos = [command.info() for command in (*self._finished.values(), *self._running.values())]
        self._mux.accept(stream)
        self._mux.send(stream, json.dumps(infos).encode())
        self._mux.eof(stream)

    def owns(self, stream: int) -> bool:
        return stream in self._by_stream

    def on_data(self, stream: int, data: bytes) -> None:
        command = self._by_stream.get(stream)
        if command is None:
            self._mux.consumed(stream, len(data))
        else:
            command.write_stdin(stream, data)

    def on_message(self, stream: int, message: dict[str, Any]) -> None:
        command = self._by_stream.get(stream)
        if command is None:
            return
        if message.get("ev") == "stdin_end":
            command.end_stdin()
        elif message.get("ev") == "detach":
            self.on_gone(stream)
            self._mux.reset(stream, Code.STALE, "detached")

    def on_room(self, stream: int) -> None:
        command = self._by_stream.get(stream)
        if command is not None:
            command.pump()

    def on_gone(self, stream: int) -> None:
        """The stream ended or broke; the command goes on."""
        command = self._by_stream.pop(stream, None)
        if command is not None:
            command.detach(stream)

    def cut_off_all(self) -> None:
        """The channel broke, or is another's now."""
        by_stream, self._by_stream = self._by_stream, {}
        for stream, command in by_stream.items():
            command.cut_off(stream)

    # -------------------------------------------------------------------------------------------------------- end

    def _on_ended(self, command: Command) -> None:
        if self._running.pop(command.exec_id, None) is not None:
            self._finished[command.exec_id] = command
            self._note_ended(command.exec_id)
        self._retire(command)
        self._forget_old()

    def _retire(self, command: Command) -> None:
        self._leftovers.append(command.group)
        self._leftovers = [group for group in self._leftovers if not group.remove()]

    def _forget_old(self) -> None:
        while len(self._finished) > FINISHED_MAX:
            self._finished.popitem(last=False)
        held = 0
        for command in reversed(self._finished.values()):
            for spool in command.spools.values():
                spool.trim(max(0, min(SPOOL_BYTES, FINISHED_BYTES - held)))
                held += spool.held
