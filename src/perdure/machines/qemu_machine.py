"""One QEMU process as a ``Machine``: states, commands over QMP, and what happens by itself turned into events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.core.errors import AlreadyExists, Conflict, DeadlineExceeded, MachineDied, MachineFailed, NoSpace, RestoreFailed
from perdure.machines import qemu_leftovers
from perdure.machines.cgroups import Group
from perdure.machines.driver import (
    PAGE_SIZE,
    ChannelName,
    DiskChain,
    DiskLayer,
    EventKind,
    LaunchSpec,
    MachineEvent,
    MachineState,
)
from perdure.machines.memory import ProcessMemory
from perdure.machines.process import Child, Tail, Watched, end_process, wait_for_exit
from perdure.machines.qemu_disk import RootDisk
from perdure.machines.qmp import Event, QmpClient, QmpError
from perdure.wire.node import Confinement, NodeUsage

#: Seconds for a device state to load; it is a hundred kilobytes.
LOAD_DEADLINE_S = 30.0
CONNECT_DEADLINE_S = 10.0
#: Bytes a channel's reader buffers before it stops reading.
CHANNEL_BUFFER = 256 << 10
#: Events kept for a slow consumer. A guest cannot make many: each of them stops or ends its machine.
EVENTS_MAX = 256
PANIC_WORDS = "Kernel panic - not syncing"
STATE_ROOM_BYTES = 4 << 20

_AWAKE = (MachineState.RUNNING, MachineState.PAUSED, MachineState.NO_SPACE)
_SHUTDOWN_EVENTS = {"guest-reset": EventKind.RESET, "guest-shutdown": EventKind.POWEROFF, "guest-panic": EventKind.PANIC}


@dataclass(slots=True)
class Parts:
    """What the driver has made by the time QEMU answers."""

    child: Child
    vmm: Watched
    qmp: QmpClient
    serial: Tail
    group: Group
    confinement: Confinement


class QemuMachine:
    """See ``driver.Machine``. Made by ``QemuDriver`` only."""

    def __init__(self, spec: LaunchSpec, parts: Parts, state: MachineState) -> None:
        self.name = spec.name
        self.pid = parts.vmm.pid
        self.state = state
        self.confinement = parts.confinement
        self.ram_path = spec.ram.path
        self._spec = spec
        self._parts = parts
        self._qmp = parts.qmp
        self._disk = RootDisk(parts.qmp)
        self._events: asyncio.Queue[MachineEvent | None] = asyncio.Queue(EVENTS_MAX)
        self._writers: dict[ChannelName, asyncio.StreamWriter] = {}
        self._loading: asyncio.Future[str] | None = None
        self._ending: EventKind | None = None
        self._dead = asyncio.Event()
        self._clean = False
        self._stopping = False
        self._resumed_at = (0, 0)  # by QEMU's clock
        self._spent_fdsets: list[int] = []
        page_count = (spec.shape.memory_mib << 20) // PAGE_SIZE
        self.memory = ProcessMemory(self.pid, spec.ram.path.stat().st_ino, page_count, parts.vmm.is_alive)

    @property
    def disk(self) -> DiskChain:
        """The layers in use now, bottom first; shorter after ``collapse_disk``."""
        return self._disk.chain

    # ----------------------------------------------------------------------------------------------------------- commands

    async def attach_disk(self, disk: DiskChain) -> None:
        self._require("attach a disk", MachineState.PREPARED)
        if self._disk.chain.layers:
            raise Conflict(f"Machine {self.name} has its disk already.")
        await self._disk.attach(disk)

    async def load_devices(self, state: Path) -> None:
        self._require("load device state", MachineState.PREPARED)
        if not self._disk.chain.layers:
            raise Conflict(f"Machine {self.name} has no disk yet: attach it before loading device state.")
        self._loading = asyncio.get_running_loop().create_future()
        try:
            fd = os.open(state, os.O_RDONLY | os.O_CLOEXEC)
            try:
                await self._qmp.execute("getfd", {"fdname": "state"}, fd=fd)
            finally:
                os.close(fd)
            await self._qmp.execute("migrate-incoming", {"uri": "fd:state"})
            async with asyncio.timeout(LOAD_DEADLINE_S):
                status = await self._loading
        except (MachineDied, QmpError, TimeoutError) as error:
            raise await self._restore_failed(error) from error
        finally:
            self._loading = None
        if status != "completed":
            raise await self._restore_failed(None)
        self.state = MachineState.PAUSED

    async def open_below(self, disk: DiskChain) -> None:
        """The driver's second half of ``prepare``: open ahead what the disk will probably lie on."""
        await self._disk.open_below(disk)

    async def start_cold(self, disk: DiskChain) -> None:
        """The driver's second half of a cold boot: disk, then vCPUs."""
        await self._disk.attach(disk)
        await self.resume()

    async def pause(self) -> None:
        self._require("pause", *_AWAKE)
        # A collapse would go on writing to the active layer while the machine is captured.
        await self._disk.cancel_stream()
        if self.state is MachineState.RUNNING:
            # Stopping flushes the disk; what is written out while the guest still runs is not waited for with its vCPUs stopped.
            await asyncio.to_thread(self._disk.flush_file)
        self._stopping = True
        try:
            await self._qmp.execute("stop")
        finally:
            self._stopping = False
        self._check_alive()
        self.state = MachineState.PAUSED

    async def resume(self) -> None:
        self._require("resume", MachineState.PAUSED, MachineState.NO_SPACE, MachineState.RUNNING)
        # The state follows QEMU's own RESUME event: a late word of an earlier disk error must not be taken for a new one.
        await self._qmp.execute("cont")
        # What could wait until the guest runs again: take away descriptors that a capture has used up.
        await self._disk.tidy()
        while self._spent_fdsets:
            await self._qmp.execute("remove-fd", {"fdset-id": self._spent_fdsets.pop()})

    async def save_devices(self, destination: Path) -> None:
        self._require("save device state", MachineState.PAUSED)
        try:
            fd = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise AlreadyExists(f"{destination.name} exists already; device state goes to a new file.") from None
        except OSError as error:
            raise _no_room(destination, error.strerror or "") from error
        try:
            await self._save_to(fd)
        except QmpError as error:
            room = shutil.disk_usage(destination.parent).free
            destination.unlink(missing_ok=True)
            raise (_no_room(destination, error.description) if room < STATE_ROOM_BYTES else error) from None
        except BaseException:
            destination.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    async def _save_to(self, fd: int) -> None:
        fdset = (await self._qmp.execute("add-fd", {}, fd=fd))["fdset-id"]
        self._spent_fdsets.append(fdset)
        await self._qmp.execute("xen-save-devices-state", {"filename": f"/dev/fdset/{fdset}", "live": False})

    async def open_overlay(self, overlay: DiskLayer) -> None:
        self._require("open a disk layer", *_AWAKE)
        await self._disk.open_overlay(overlay)
        await asyncio.to_thread(self._disk.flush_file)  # what is flushed now does not lengthen the pause that follows

    async def switch_overlay(self) -> None:
        self._require("switch the disk layer", *_AWAKE)
        await self._disk.cancel_stream()
        await self._disk.switch()

    async def collapse_disk(self, keep: int) -> None:
        self._require("collapse disk layers", MachineState.RUNNING)
        await self._disk.collapse(keep)

    async def connect(self, channel: ChannelName) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._require("connect to a channel", *_AWAKE)
        previous = self._writers.pop(channel, None)
        if previous is not None:
            previous.transport.abort()
        # Through the directory's descriptor, because a socket's path may have 107 bytes only.
        directory = os.open(self._spec.run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                reader, writer = await asyncio.open_unix_connection(
                    f"/proc/self/fd/{directory}/{channel.value}", limit=CHANNEL_BUFFER
                )
        except (OSError, TimeoutError) as error:
            if not self._parts.vmm.is_alive():  # its sockets are gone before the loop is told of its end
                raise self._died() from error
            raise MachineFailed(
                f"The channel {channel.value} of machine {self.name} cannot be reached.", internal=str(error)
            ) from error
        finally:
            os.close(directory)
        self._writers[channel] = writer
        return reader, writer

    async def usage(self) -> NodeUsage:
        self._check_alive()
        try:
            return await asyncio.to_thread(_usage, self.pid)
        except (ProcessLookupError, FileNotFoundError):
            raise self._died() from None

    def cpu_s(self) -> float:
        self._check_alive()
        try:
            return _cpu_s(self.pid)
        except (ProcessLookupError, FileNotFoundError):
            raise self._died() from None

    async def kill(self) -> None:
        await end_process(self._parts.child, self._parts.vmm)
        await self._dead.wait()
        if not self._clean:
            self._clean = True
            await asyncio.to_thread(_remove, self._spec.run_dir, self._parts.group)
            qemu_leftovers.forget(self._spec)

    # ------------------------------------------------------------------------------------------------------------- events

    async def events(self) -> AsyncIterator[MachineEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    def console(self) -> str:
        """The last lines the guest's kernel and init wrote to the serial console, for explaining a boot that failed."""
        return self._parts.serial.text()

    def on_qmp_event(self, event: Event) -> None:
        """Called for each QMP event, in order."""
        name, data = event["event"], event.get("data", {})
        if name == "SHUTDOWN":
            self._on_shutdown(data.get("reason", ""))
        elif name == "GUEST_PANICKED":
            if self._ending is None:
                self._ending = EventKind.PANIC
                self._emit(EventKind.PANIC, self.console())
        elif name == "RESUME":
            self.state = MachineState.RUNNING
            self._resumed_at = _moment(event)
        elif name == "STOP":
            self._on_stop()
        elif name == "BLOCK_IO_ERROR" and _moment(event) >= self._resumed_at:
            # QEMU holds a second error back for up to a second: told after a resume, it is of what that has mended.
            self._on_io_error(data)
        elif name == "MIGRATION":
            self._on_migration(data.get("status", ""))
        elif name in ("BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"):
            self._disk.on_job_event(event)

    def _on_shutdown(self, reason: str) -> None:
        kind = _SHUTDOWN_EVENTS.get(reason)
        if kind is None or self._ending is not None:
            return
        # A kernel without a pvpanic driver panics into a reboot; its last words are on the console.
        self._parts.serial.drain()
        if kind is EventKind.RESET and PANIC_WORDS in self.console():
            kind = EventKind.PANIC
        self._ending = kind
        self._emit(kind, self.console() if kind is EventKind.PANIC else "")

    def _on_stop(self) -> None:
        """Neither asked for nor told by a disk error before: the accelerator gave up on the guest."""
        if self.state is MachineState.RUNNING and not self._stopping and self._ending is None:
            self.state = MachineState.PAUSED
            self._emit(EventKind.IO_ERROR, "the virtual machine monitor stopped the machine by itself")

    def _on_io_error(self, data: dict[str, Any]) -> None:
        if data.get("action") != "stop":
            return
        no_space = bool(data.get("nospace"))
        kind, state = (EventKind.NO_SPACE, MachineState.NO_SPACE) if no_space else (EventKind.IO_ERROR, MachineState.PAUSED)
        # Every request that was under way fails on its own; one event tells of them all.
        if self.state is not state:
            self.state = state
            self._emit(kind, f"{data.get('operation', 'access')} failed: {data.get('reason', 'unknown reason')}")

    def _on_migration(self, status: str) -> None:
        if self._loading is not None and not self._loading.done() and status in ("completed", "failed"):
            self._loading.set_result(status)

    def _emit(self, kind: EventKind, detail: str = "") -> None:
        if self._events.qsize() < EVENTS_MAX - 2:  # always room for EXITED and the end
            self._events.put_nowait(MachineEvent(kind, detail))

    def on_exit(self) -> None:
        """The process is reaped. Runs in the loop."""
        self.state = MachineState.DEAD
        self._qmp.close()
        self._disk.on_death()
        self.memory.close()
        if self._loading is not None and not self._loading.done():
            self._loading.set_result("died")
        for writer in self._writers.values():
            writer.transport.abort()
        self._writers.clear()
        self._events.put_nowait(MachineEvent(EventKind.EXITED, exit_detail(self._parts)))
        self._events.put_nowait(None)
        self._parts.serial.close()
        self._parts.child.stderr.close()
        self._dead.set()

    # ------------------------------------------------------------------------------------------------------------- errors

    def _require(self, what: str, *allowed: MachineState) -> None:
        self._check_alive()
        if self.state not in allowed:
            raise Conflict(f"Machine {self.name} is {self.state.value}: it cannot {what} now.")

    def _check_alive(self) -> None:
        if self.state is MachineState.DEAD:
            raise self._died()

    def _died(self) -> MachineDied:
        return MachineDied(f"Machine {self.name} is dead.", internal=exit_detail(self._parts))

    async def _restore_failed(self, cause: BaseException | None) -> RestoreFailed:
        """QEMU ends when a state does not fit; its last words say why."""
        with contextlib.suppress(DeadlineExceeded):
            await wait_for_exit(self._parts.child.watched, 2.0)
        detail = self._parts.child.stderr.text() or str(cause or "no reason given")
        return RestoreFailed(f"The device state could not be loaded: {detail.splitlines()[-1]}", internal=detail)


def exit_detail(parts: Parts) -> str:
    """Why the process ended, as far as can be told: memory limit, last words, or status."""
    detail = parts.child.stderr.text()
    if parts.group.out_of_memory():
        detail = f"killed by its memory limit\n{detail}".strip()
    return detail or f"exit status {parts.child.status}"


def _cpu_s(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()  # proc(5): utime and stime are the 12th and 13th after the state's bracket
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _usage(pid: int) -> NodeUsage:
    sizes = {"Rss:": 0, "Pss:": 0, "Private_Clean:": 0, "Private_Dirty:": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        key, *rest = line.split()
        if key in sizes:
            sizes[key] = int(rest[0]) * 1024
    return NodeUsage(
        cpu_s=_cpu_s(pid),
        rss_bytes=sizes["Rss:"],
        pss_bytes=sizes["Pss:"],
        private_bytes=sizes["Private_Clean:"] + sizes["Private_Dirty:"],
    )


def _remove(run_dir: Path, group: Group) -> None:
    group.remove()
    shutil.rmtree(run_dir, ignore_errors=True)


def _no_room(destination: Path, reason: str) -> NoSpace:
    return NoSpace(f"Device state cannot be written to {destination.name}: {reason}.", internal=str(destination))


def _moment(event: Event) -> tuple[int, int]:
    """When it happened, which may be before it was told: seconds and microseconds."""
    stamp = event["timestamp"]
    return stamp["seconds"], stamp["microseconds"]
