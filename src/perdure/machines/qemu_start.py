"""One start of a QEMU process: the descriptors on both sides, and the time between its spawn and its machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import DeadlineExceeded, MachineDied, MachineFailed, NotFound
from perdure.machines import cgroups, jail, qemu_leftovers
from perdure.machines.driver import ChannelName, LaunchSpec
from perdure.machines.jail import Jail, JailKind
from perdure.machines.process import Child, Tail, Watched, end_process, wait_for_exit
from perdure.machines.qemu_args import Descriptors
from perdure.machines.qemu_machine import QemuMachine
from perdure.machines.qmp import Event, QmpClient

START_DEADLINE_S = 60.0
CONSOLE_TAIL_BYTES = 32 << 10
#: Seconds a process that broke off gets to say why.
LAST_WORDS_DEADLINE_S = 2.0


class Starting:
    """A process before it is a machine: keeps what happens until the machine can take it."""

    child: Child
    qmp: QmpClient
    serial: Tail

    def __init__(self, spec: LaunchSpec, group: cgroups.Group, wrapping: Jail) -> None:
        self._spec = spec
        self._group = group
        self._wrapping = wrapping
        self._machine: QemuMachine | None = None
        self._early: list[Event] = []
        self._exited = False
        self._vmm: Watched | None = None
        self._info = self._release = -1

    def spawn(self, argv: list[str], handles: Handles) -> None:
        """Start it, inside its jail not yet let go. Closes what only the child needs."""
        self._info, info_write = os.pipe2(os.O_CLOEXEC)
        block_read, self._release = os.pipe2(os.O_CLOEXEC)
        try:
            command = jail.wrap(self._wrapping, argv, info_fd=info_write, block_fd=block_read)
            extra = [] if self._wrapping.kind is JailKind.NONE else [info_write, block_read]
            self.child = Child(command, fds=[*handles.inherited_numbers(), *extra], on_exit=self._on_exit)
        except BaseException:
            os.close(self._info)
            os.close(self._release)
            raise
        finally:
            os.close(info_write)
            os.close(block_read)
        handles.close_inherited()
        qmp_socket, serial_fd = handles.take()
        self.qmp = QmpClient(qmp_socket, self.on_event, self._on_lost)
        self.serial = Tail(serial_fd, CONSOLE_TAIL_BYTES)

    async def talk(self, *, restores: bool) -> Watched:
        """Put the VMM into its cgroup, let it go, and wait until it answers. Raises MachineDied or TimeoutError."""
        async with asyncio.timeout(START_DEADLINE_S):
            self._vmm = await self._find_vmm()
            await self.qmp.start(START_DEADLINE_S)
            if restores:
                capability = {"capability": "events", "state": True}
                await self.qmp.execute("migrate-set-capabilities", {"capabilities": [capability]})
        return self._vmm

    async def _find_vmm(self) -> Watched:
        try:
            if self._wrapping.kind is JailKind.NONE:
                self._group.add(self.child.pid)
                return self.child.watched
            answer = await _read_info(self._info)
            vmm = Watched(int(answer["child-pid"]))
            self._group.add(vmm.pid)
            os.write(self._release, b"x")
            return vmm
        except (ValueError, KeyError, ProcessLookupError, BrokenPipeError):
            raise MachineDied("The jail ended before the virtual machine monitor started.") from None
        finally:
            os.close(self._info)
            os.close(self._release)

    def on_event(self, event: Event) -> None:
        if self._machine is None:
            self._early.append(event)
        else:
            self._machine.on_qmp_event(event)

    def _on_exit(self) -> None:
        self._exited = True
        if self._machine is not None:
            self._machine.on_exit()

    def _on_lost(self) -> None:
        """A machine that nobody can pause or capture any more would run on for ever: its loss is told, and can be recovered."""
        if self._vmm is not None:
            self._vmm.kill()

    def hand_over(self, machine: QemuMachine) -> None:
        """From now on the machine hears what happens, beginning with what happened already."""
        self._machine = machine
        for event in self._early:
            machine.on_qmp_event(event)
        self._early.clear()
        if self._exited:
            machine.on_exit()

    async def end(self) -> None:
        """Kill and reap what was started."""
        self.qmp.close()
        await end_process(self.child, self._vmm)
        if self._vmm is None:
            await qemu_leftovers.kill_start(self._spec)
        self.serial.close()
        self.child.stderr.close()

    async def failed(self, error: BaseException) -> MachineDied:
        """End it; the error to raise has its last words."""
        with contextlib.suppress(DeadlineExceeded):
            await wait_for_exit(self.child.watched, LAST_WORDS_DEADLINE_S)
        await self.end()
        words = self.child.stderr.text()
        last = words.splitlines()[-1] if words else str(error) or type(error).__name__
        return MachineDied(f"The virtual machine monitor ended at its start: {last}", internal=words)


async def _read_info(fd: int) -> dict[str, int]:
    """What bwrap writes to --info-fd: one JSON object. Raises ValueError when it ends before."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[dict[str, int]] = loop.create_future()
    data = bytearray()

    def on_readable() -> None:
        part = os.read(fd, 4096)
        data.extend(part)
        if done.done():
            return
        if b"}" in data:
            done.set_result(json.loads(data))
        elif not part:
            done.set_exception(ValueError("no information"))

    loop.add_reader(fd, on_readable)
    try:
        return await done
    finally:
        loop.remove_reader(fd)


# ------------------------------------------------------------------------------------------------------------- descriptors


@dataclass(slots=True)
class Handles:
    """Descriptors on both sides of a start."""

    inherited: Descriptors
    _stack: ExitStack
    _qmp: socket.socket
    _serial: socket.socket

    def inherited_numbers(self) -> list[int]:
        return [getattr(self.inherited, name) for name in self.inherited.__slots__]

    def close_inherited(self) -> None:
        """The child has its copies."""
        self._stack.close()

    def take(self) -> tuple[socket.socket, int]:
        return self._qmp, self._serial.detach()


@contextmanager
def open_handles(spec: LaunchSpec) -> Iterator[Handles]:
    """Open files and sockets for one start. Raises NotFound or MachineFailed naming the file that cannot be opened."""
    with ExitStack() as stack:
        files = {
            "ram": spec.ram.path,
            "kernel": spec.shape.kernel,
            "initrd": spec.shape.initrd,
            "agent_disk": spec.shape.agent_disk,
        }
        numbers = {role: _open(stack, path) for role, path in files.items()}
        (qmp, qmp_child), (serial, serial_child) = socket.socketpair(), socket.socketpair()
        for end in (qmp_child, serial_child):
            stack.callback(end.close)
        try:
            listeners = [_listen(stack, spec.run_dir, name) for name in (ChannelName.CONTROL, ChannelName.DATA)]
            inherited = Descriptors(
                qmp=qmp_child.fileno(), serial=serial_child.fileno(), control=listeners[0], data=listeners[1], **numbers
            )
            yield Handles(inherited, stack, qmp, serial)
        except BaseException:
            qmp.close()
            if serial.fileno() >= 0:
                serial.close()
            raise


def _open(stack: ExitStack, path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"{path.name} does not exist.", internal=str(path)) from None
    except OSError as error:
        raise MachineFailed(f"{path.name} cannot be opened: {error.strerror}.", internal=str(path)) from error
    stack.callback(os.close, fd)
    return fd


def _listen(stack: ExitStack, run_dir: Path, name: ChannelName) -> int:
    """A listening socket made by us, so that the VMM needs no directory of the host."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stack.callback(listener.close)
    directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{name.value}")
    finally:
        os.close(directory)
    (run_dir / name.value).chmod(0o600)
    listener.listen(2)
    return listener.fileno()
