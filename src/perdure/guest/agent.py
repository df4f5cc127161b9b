"""The agent: wires ports, commands, files and connections together, and serves the data channel.

One process, one thread. State that matters is either the kernel's (processes, cgroups, sockets) or is named lost when the agent
ends: a new agent announces itself, and the node then knows that commands it watched are of unknown outcome.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from perdure.guest.control import Control
from perdure.guest.fileops import OPERATIONS
from perdure.guest.files import FileTable
from perdure.guest.flush import Flusher
from perdure.guest.loop import Loop
from perdure.guest.net import Network
from perdure.guest.port import Port, open_port
from perdure.guest.proglog import ProgramLog
from perdure.guest.program import Supervisor
from perdure.guest.proxy import Proxy
from perdure.guest.repair import DrySystem, System
from perdure.guest.table import ExecTable
from perdure.guest.world import World
from perdure.wire.guest.mux import EventKind
from perdure.wire.guest.ops import API_PORT, CONTROL_PORT, DATA_PORT, PROXY_PORT, UNKNOWN_OPERATION, Code, Note, Op

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from perdure.wire.guest.mux import Event


_EXEC_OPS = frozenset((Op.EXEC, Op.PTY, Op.ATTACH, Op.RESIZE, Op.SIGNAL, Op.KILL, Op.LIST_EXECS))
_FILE_OPS = OPERATIONS

USAGE = """options, for tests only; a workspace needs none:
  --control-fd=N --data-fd=N   sockets instead of virtio ports; the agent ends when they do
  --root=DIR                   the users' root (default /user)
  --cgroup=DIR                 the users' cgroup (default /sys/fs/cgroup/user; empty: none)
  --run-dir=DIR                where the agent keeps pids (default /run/perdure)
  --api-port=N --proxy-port=N  loopback ports
  --dry-system=NS              share the kernel: clock off by NS nanoseconds, reseed nothing, switch nothing off
"""


class Options:
    """What the command line may change."""

    def __init__(self, arguments: list[str]) -> None:
        values = {"root": "/user", "cgroup": "/sys/fs/cgroup/user", "run-dir": "/run/perdure"}
        for argument in arguments:
            name, equals, value = argument.partition("=")
            if not name.startswith("--") or not equals:
                raise SystemExit(USAGE)
            values[name[2:]] = value
        self.root = values["root"]
        self.cgroup = values["cgroup"] or None
        self.run_dir = values["run-dir"]
        self.control_fd = int(values.get("control-fd", -1))
        self.data_fd = int(values.get("data-fd", -1))
        self.ports = (int(values.get("api-port", API_PORT)), int(values.get("proxy-port", PROXY_PORT)))
        self.system = DrySystem(int(values["dry-system"])) if "dry-system" in values else System()


class Agent:
    """Everything, connected."""

    def __init__(self, options: Options) -> None:
        self.loop = Loop()
        self._system, self._root = options.system, options.root
        world = World(self.loop, options.root, options.cgroup, options.run_dir, self._halt)
        left = world.start()
        self._data = self._port(options.data_fd, DATA_PORT, self._on_data_event)
        mux = self._data.mux
        self._execs = ExecTable(self.loop, world, mux, self._on_exec_ended)
        self._execs.adopt_lost(left)
        self._files = FileTable(self.loop, world.view, mux, self._on_file_work_ended)
        self._flusher = Flusher(self.loop, world, self._files.hands)
        self._network = Network(self.loop, mux, options.ports)
        self._network.listen(Proxy(self.loop, self._network).serve)
        self._log = ProgramLog(self.loop, mux, options.run_dir)
        self._dropped = 0
        self._control_logic = Control(self.loop, world, self._execs, self._flusher, options.system, self._drop_streams)
        self._control_logic.proxy_port = options.ports[1]
        self._control_logic.problems = self._network.problems
        self._control_logic.program = Supervisor(self.loop, world, self._log)
        self._control = self._port(options.control_fd, CONTROL_PORT, self._on_control_event)

    def _halt(self, power_off: bool) -> None:
        """A program in the workspace called reboot(2): what it means for a machine of its own."""
        root = self._root
        self._system.power_off(root) if power_off else self._system.restart(root)

    def warm(self) -> None:
        """Have ready what the first request after a wake would wait for."""
        self._files.hands.warm()

    def _port(self, fd: int, name: str, on_event: Any) -> Port:
        return Port(self.loop, fd if fd >= 0 else open_port(name), on_event, ends=fd >= 0)

    # ---------------------------------------------------------------------------------------------------- control

    def _on_control_event(self, event: Event) -> None:
        if event.kind == EventKind.CALL:
            mux, call = self._control.mux, event.stream
            self._control_logic.call(event.value, lambda reply: mux.reply(call, reply))

    def _on_exec_ended(self, exec_id: str) -> None:
        self._control.mux.note({"ev": Note.EXEC_ENDED, "exec_id": exec_id})
        self._flusher.stir()

    def _on_file_work_ended(self) -> None:
        self._flusher.stir()

    # ------------------------------------------------------------------------------------------------------- data

    def _drop_streams(self) -> int:
        """Forget every stream of the connection or generation before; returns user connections dropped since the last call."""
        self._drop()
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _drop(self) -> None:
        self._dropped += self._network.drop_all()
        self._execs.cut_off_all()
        self._files.drop_all()
        self._log.drop_all()

    def _on_data_event(self, event: Event) -> None:
        kind, stream = event.kind, event.stream
        if kind == EventKind.DATA:
            self._on_data(stream, event)
        elif kind == EventKind.OPEN:
            self._open(stream, event.value)
        elif kind == EventKind.ROOM:
            for table in (self._execs, self._files, self._network, self._log):
                table.on_room(stream)
        elif kind in (EventKind.SYNC, EventKind.BROKEN):
            self._drop()
        elif kind == EventKind.CALL:
            self._data.mux.reply(stream, {"ok": True})  # a fence: the host wants to know that everything before it was read
        else:
            self._on_stream_event(kind, stream, event)

    def _on_stream_event(self, kind: str, stream: int, event: Event) -> None:
        if kind == EventKind.MESSAGE:
            self._execs.on_message(stream, event.value)
            self._files.on_message(stream, event.value)
        elif kind == EventKind.EOF:
            self._network.on_eof(stream)
        elif kind == EventKind.ACCEPT:
            self._network.on_accept(stream)
        elif kind == EventKind.RESET:
            self._execs.on_gone(stream)
            self._files.on_gone(stream)
            self._log.on_gone(stream)
            self._network.on_gone(stream, event.value)

    def _on_data(self, stream: int, event: Event) -> None:
        if self._files.owns(stream):
            self._files.on_data(stream, event.value)
        elif self._execs.owns(stream):
            self._execs.on_data(stream, bytes(event.value))  # the view holds only until the next read
        else:
            self._network.on_data(stream, bytes(event.value))

    def _open(self, stream: int, request: dict[str, Any]) -> None:
        op = request.get("op")
        self._flusher.stir()  # not yet
        if op in _EXEC_OPS:
            self._execs.open(stream, request)
        elif op in _FILE_OPS:
            self._files.open(stream, request)
        elif op == Op.TCP:
            self._network.open(stream, request)
        elif op == Op.LOGS:
            self._log.open(stream, request)
        else:
            self._data.mux.reset(stream, Code.INVALID, f"{UNKNOWN_OPERATION} {op!r}.")


def main(arguments: list[str]) -> None:
    """Run until init (or the end of a test) stops it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    agent = Agent(Options(arguments))
    sys.setswitchinterval(0.001)  # the loop waits for a hand that computes, but not long
    agent.warm()
    # What exists now lives as long as the agent: keep the collector off it, or each run would dirty (and snapshot) all of it.
    gc.collect()
    gc.freeze()
    agent.loop.run()
    sys.stderr.write("agent: the channel ended\n")
    os._exit(1)
