"""The QEMU driver: finds the binary, judges the host, starts processes and hands out machines.

A start makes, in this order: the run directory with its marker, sockets and open files, the cgroup, the process (blocked
inside its jail until it is in its cgroup), the QMP session, the view of guest memory. Whatever fails undoes the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import DeadlineExceeded, HostUnfit, InvalidRequest, MachineDied, MachineFailed, NotFound
from perdure.machines import cgroups, jail, process, qemu_leftovers
from perdure.machines.driver import Accelerator, ChannelName, DiskChain, LaunchSpec, MachineState, VmmIdentity
from perdure.machines.jail import Jail, JailKind, JailPolicy
from perdure.machines.process import Child, Tail, Watched
from perdure.machines.qemu_args import Descriptors, Invocation, Start, arguments, readonly_base
from perdure.machines.qemu_machine import Parts, QemuMachine
from perdure.machines.qmp import Event, QmpClient
from perdure.wire.node import Confinement, Isolation

INSTALL_HINT = "Install it: apt-get install --no-install-recommends qemu-system-x86 qemu-utils (or set PERDURE_QEMU)."
OLDEST = (7, 2, 0)
QUERY_DEADLINE_S = 60.0
START_DEADLINE_S = 60.0
CONSOLE_TAIL_BYTES = 32 << 10
#: The frequency goes into the fingerprint; calibration differs a little from boot to boot of the host.
TSC_GRAIN_KHZ = 10_000


@dataclass(frozen=True, slots=True)
class QemuConfig:
    """``qemu``: name or path; ``data_dir``: its firmware (-L) when that is not found by itself."""

    qemu: str = "qemu-system-x86_64"
    data_dir: Path | None = None
    jail: JailPolicy = "auto"


@dataclass(frozen=True, slots=True)
class _Binary:
    path: Path
    version: tuple[int, int, int]
    build: str
    machine: str
    system: tuple[Path, ...]  # directories outside /usr it is made of


class QemuDriver:
    """Implements ``MachineDriver``. Its facts about the host are looked up once."""

    def __init__(self, config: QemuConfig | None = None) -> None:
        self._config = config or QemuConfig()
        self._lock = asyncio.Lock()
        self._binary: _Binary | None = None
        self._verdict: jail.Verdict | None = None
        self._hierarchies: cgroups.Hierarchies | None = None

    async def identity(self, accelerator: Accelerator) -> VmmIdentity:
        binary = await self._examine()
        return VmmIdentity(
            name="qemu",
            version=binary.version,
            build=binary.build,
            machine=binary.machine,
            cpu_model=cpu_model(accelerator),
            tsc_khz=tsc_khz() if accelerator is Accelerator.TCG else None,
        )

    async def jail_verdict(self) -> jail.Verdict:
        """Which jails work here, for ``doctor``. Raises HostUnfit when a required one does not."""
        binary = await self._examine()
        async with self._lock:
            if self._verdict is None:
                self._verdict = await jail.judge(self._config.jail, binary.path, binary.system)
            return self._verdict

    async def boot(self, spec: LaunchSpec, disk: DiskChain) -> QemuMachine:
        machine = await self._launch(spec, Start.BOOT)
        try:
            await machine.start_cold(disk)
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def prepare(self, spec: LaunchSpec) -> QemuMachine:
        if spec.ram.shared:
            raise InvalidRequest("A prepared machine maps its memory privately; shared memory is for making a golden snapshot.")
        return await self._launch(spec, Start.RESTORE)

    # -------------------------------------------------------------------------------------------------------------- start

    async def _launch(self, spec: LaunchSpec, start: Start) -> QemuMachine:
        process.assert_main_thread()
        binary = await self._examine()
        verdict = await self.jail_verdict()
        check_spec(spec)
        qemu_leftovers.claim(spec)
        group = cgroups.Group()
        try:
            if self._hierarchies is None:
                self._hierarchies = cgroups.discover()
            group = cgroups.create(self._hierarchies, qemu_leftovers.group_name(spec), spec.limits)
            return await self._spawn(spec, start, binary, verdict, group)
        except BaseException:
            group.remove()
            shutil.rmtree(spec.run_dir, ignore_errors=True)
            qemu_leftovers.forget(spec)
            raise

    async def _spawn(
        self, spec: LaunchSpec, start: Start, binary: _Binary, verdict: jail.Verdict, group: cgroups.Group
    ) -> QemuMachine:
        kind, own_user_missing = choose_jail(spec, binary.version, verdict)
        with _handles(spec) as handles:
            call = Invocation(
                guest_name=qemu_leftovers.guest_name(spec),
                version=binary.version,
                machine=binary.machine,
                cpu_model=cpu_model(spec.accelerator),
                accelerator=spec.accelerator,
                shape=spec.shape,
                shared_ram=spec.ram.shared,
                start=start,
                fds=handles.inherited,
                data_dir=str(self._config.data_dir) if self._config.data_dir else None,
            )
            wrapping = Jail(
                kind,
                binary.system,
                override_modes=not spec.ram.shared and not readonly_base(binary.version),
                kvm=spec.accelerator is Accelerator.KVM,
            )
            starting = _Starting(group)
            child = starting.spawn(wrapping, [str(binary.path), *arguments(call)], handles.inherited)
            handles.close_inherited()
            qmp_socket, serial_fd = handles.take()
        qmp = QmpClient(qmp_socket, starting.on_event)
        serial = Tail(serial_fd, CONSOLE_TAIL_BYTES)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                vmm = await starting.vmm(wrapping)
                await qmp.start(START_DEADLINE_S)
                if start is Start.RESTORE:
                    capability = {"capability": "events", "state": True}
                    await qmp.execute("migrate-set-capabilities", {"capabilities": [capability]})
            confinement = _confinement(spec, kind, group, binary.version, vmm.pid, verdict, own_user_missing)
            parts = Parts(child, vmm, qmp, serial, group, confinement)
            state = MachineState.PREPARED if start is Start.RESTORE else MachineState.PAUSED
            machine = QemuMachine(spec, parts, state)
        except (MachineDied, TimeoutError, OSError) as error:
            raise await _start_failed(child, qmp, serial, error) from error
        except BaseException:
            await _end(child, qmp, serial)
            raise
        starting.hand_over(machine)
        return machine

    # --------------------------------------------------------------------------------------------------------------- host

    async def _examine(self) -> _Binary:
        async with self._lock:
            if self._binary is None:
                self._binary = await _examine(self._config)
            return self._binary


class _Starting:
    """A process before it is a machine: keeps what happens until the machine can take it."""

    def __init__(self, group: cgroups.Group) -> None:
        self._group = group
        self._machine: QemuMachine | None = None
        self._early: list[Event] = []
        self._exited = False
        self._info: int | None = None
        self._release: int | None = None
        self._child: Child | None = None

    def spawn(self, wrapping: Jail, argv: list[str], inherited: Descriptors) -> Child:
        self._info, info_write = os.pipe2(os.O_CLOEXEC)
        block_read, self._release = os.pipe2(os.O_CLOEXEC)
        numbers = [getattr(inherited, name) for name in inherited.__slots__]
        try:
            command = jail.wrap(wrapping, argv, info_fd=info_write, block_fd=block_read)
            extra = [] if wrapping.kind is JailKind.NONE else [info_write, block_read]
            self._child = Child(command, fds=[*numbers, *extra], on_exit=self._on_exit)
        except BaseException:
            os.close(self._info)
            os.close(self._release)
            raise
        finally:
            os.close(info_write)
            os.close(block_read)
        return self._child

    async def vmm(self, wrapping: Jail) -> Watched:
        """The VMM process itself, inside its cgroup and let go. Raises MachineDied."""
        child, info, release = self._child, self._info, self._release
        assert child is not None
        assert info is not None
        assert release is not None
        try:
            if wrapping.kind is JailKind.NONE:
                self._group.add(child.pid)
                return Watched(child.pid)
            answer = await _read_info(info)
            vmm = Watched(int(answer["child-pid"]))
            self._group.add(vmm.pid)
            os.write(release, b"x")
            return vmm
        except (ValueError, KeyError, ProcessLookupError, BrokenPipeError):
            raise MachineDied("The jail ended before the virtual machine monitor started.") from None
        finally:
            os.close(info)
            os.close(release)

    def on_event(self, event: Event) -> None:
        if self._machine is None:
            self._early.append(event)
        else:
            self._machine.on_qmp_event(event)

    def _on_exit(self) -> None:
        self._exited = True
        if self._machine is not None:
            self._machine.on_exit()

    def hand_over(self, machine: QemuMachine) -> None:
        self._machine = machine
        for event in self._early:
            machine.on_qmp_event(event)
        self._early.clear()
        if self._exited:
            machine.on_exit()


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
class _Handles:
    """Descriptors on both sides of a start."""

    inherited: Descriptors
    _stack: ExitStack
    _qmp: socket.socket
    _serial: socket.socket

    def close_inherited(self) -> None:
        """The child has its copies."""
        self._stack.close()

    def take(self) -> tuple[socket.socket, int]:
        return self._qmp, self._serial.detach()


@contextmanager
def _handles(spec: LaunchSpec) -> Iterator[_Handles]:
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
        listeners = [_listen(stack, spec.run_dir, name) for name in (ChannelName.CONTROL, ChannelName.DATA)]
        inherited = Descriptors(
            qmp=qmp_child.fileno(), serial=serial_child.fileno(), control=listeners[0], data=listeners[1], **numbers
        )
        handles = _Handles(inherited, stack, qmp, serial)
        try:
            yield handles
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


# ----------------------------------------------------------------------------------------------------------------- failures


async def _end(child: Child, qmp: QmpClient, serial: Tail) -> None:
    qmp.close()
    child.watched.kill()  # in a jail the VMM dies with its jailer
    await process.wait_for_exit(child.watched)
    serial.close()
    child.stderr.close()


async def _start_failed(child: Child, qmp: QmpClient, serial: Tail, error: BaseException) -> MachineFailed:
    with contextlib.suppress(DeadlineExceeded):
        await process.wait_for_exit(child.watched, 2.0)  # it may be about to say why
    words = child.stderr.text()
    await _end(child, qmp, serial)
    last = words.splitlines()[-1] if words else str(error) or type(error).__name__
    return MachineDied(f"The virtual machine monitor ended at its start: {last}", internal=words)


def check_spec(spec: LaunchSpec) -> None:
    """Refuse what cannot work, before anything is made. Raises HostUnfit, NotFound or InvalidRequest."""
    wanted = spec.shape.memory_mib << 20
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > host:
        raise HostUnfit(
            f"A machine of {spec.shape.memory_mib} MiB does not fit into this host's {host >> 20} MiB of memory.",
            hint="Ask for less memory (--memory-mib).",
        )
    cpus = os.cpu_count() or 1
    if not 1 <= spec.shape.vcpus <= max(cpus, 1) * 4:
        raise InvalidRequest(
            f"{spec.shape.vcpus} vCPUs are not possible on this host's {cpus} CPUs.", hint=f"Ask for 1 to {cpus * 4}."
        )
    try:
        size = spec.ram.path.stat().st_size
    except FileNotFoundError:
        raise NotFound(f"{spec.ram.path.name} does not exist.", internal=str(spec.ram.path)) from None
    if size != wanted:
        raise InvalidRequest(
            f"The memory file {spec.ram.path.name} has {size} bytes, but a machine of {spec.shape.memory_mib} MiB needs {wanted}."
        )


def choose_jail(spec: LaunchSpec, version: tuple[int, int, int], verdict: jail.Verdict) -> tuple[JailKind, str]:
    """The best jail that this start can use, and why it has no user of its own, if so."""
    kinds = [kind for kind in verdict.kinds if kind is not JailKind.OWN_USER]
    if JailKind.OWN_USER not in verdict.kinds:
        return kinds[0], verdict.own_user_missing
    reason = ""
    if spec.ram.shared:
        reason = "this machine writes its memory to a file of the server's user, to make a golden snapshot"
    elif not readonly_base(version):
        reason = "QEMU before 8.2 opens the base memory for writing, which another user may not"
    else:
        for path in (spec.ram.path, spec.shape.kernel, spec.shape.initrd):
            if not path.stat().st_mode & 0o004:
                reason = f"{path.name} is not readable by other users"
    if not reason:
        return JailKind.OWN_USER, ""
    return (kinds[0], reason) if kinds else (JailKind.NONE, reason)


def _confinement(
    spec: LaunchSpec,
    kind: JailKind,
    group: cgroups.Group,
    version: tuple[int, int, int],
    pid: int,
    verdict: jail.Verdict,
    own_user_missing: str,
) -> Confinement:
    missing = {f"{controller}_limit": reason for controller, reason in group.missing.items()}
    if kind is JailKind.NONE:
        missing["jail"] = verdict.jail_missing
    if kind is not JailKind.OWN_USER:
        missing["own_user"] = own_user_missing or verdict.jail_missing
    seccomp = re.search(r"^Seccomp:\s*2$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is not None
    if not seccomp:
        missing["seccomp"] = "this QEMU runs without a system call filter"
    readonly = not spec.ram.shared and readonly_base(version)
    if not readonly:
        missing["readonly_base"] = (
            "the memory of a golden snapshot in the making is written" if spec.ram.shared else "needs QEMU 8.2 or later"
        )
    return Confinement(
        isolation=Isolation.VM_HARDWARE if spec.accelerator is Accelerator.KVM else Isolation.VM_EMULATED,
        jail=kind is not JailKind.NONE,
        seccomp=seccomp,
        own_user=kind is JailKind.OWN_USER,
        memory_limit="memory" not in group.missing,
        cpu_limit="cpu" not in group.missing,
        pids_limit="pids" not in group.missing,
        readonly_base=readonly,
        missing=missing,
    )


# --------------------------------------------------------------------------------------------------------------------- host


async def _examine(config: QemuConfig) -> _Binary:
    found = shutil.which(config.qemu)
    if found is None:
        raise HostUnfit(f"QEMU is not installed: there is no {config.qemu}.", hint=INSTALL_HINT)
    path = Path(found).absolute()
    status, text = await process.run([str(path), "--version"], QUERY_DEADLINE_S)
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)", text)
    if status != 0 or match is None:
        raise HostUnfit(f"{path} does not say its version: {text.splitlines()[-1] if text else status}", hint=INSTALL_HINT)
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version < OLDEST:
        raise HostUnfit(f"QEMU {'.'.join(match.groups())} is too old; 7.2 or later is needed.", hint=INSTALL_HINT)
    _, machines = await process.run([str(path), "-M", "help"], QUERY_DEADLINE_S)
    alias = re.search(r"^q35\s.*\(alias of (\S+)\)", machines, re.MULTILINE)
    if alias is None:
        raise HostUnfit(f"{path} has no q35 machine; Perdure needs qemu-system-x86_64.", hint=INSTALL_HINT)
    digest = await asyncio.to_thread(_sha256, path)
    return _Binary(path, version, f"{text.splitlines()[0]} {digest[:16]}", alias[1], _system_directories(path, config))


def _system_directories(binary: Path, config: QemuConfig) -> tuple[Path, ...]:
    """What of QEMU lies outside /usr: the tree of a binary that was unpacked elsewhere, and its data directory."""
    found = []
    resolved = binary.resolve()
    if Path("/usr") not in resolved.parents:
        found.append(resolved.parent.parent if resolved.parent.name == "bin" else resolved.parent)
    if config.data_dir and Path("/usr") not in config.data_dir.resolve().parents:
        found.append(config.data_dir.resolve())
    return tuple(found)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cpu_model(accelerator: Accelerator) -> str:
    """``max`` depends on the QEMU build alone. Under KVM a named model keeps snapshots movable between hosts of one make."""
    if accelerator is Accelerator.TCG:
        return "max"
    text = Path("/proc/cpuinfo").read_text()
    flags = set(re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)[0].split()) if "flags" in text else set()
    is_v3 = {"avx2", "bmi1", "bmi2", "fma", "movbe"} <= flags
    if "AuthenticAMD" in text:
        return "EPYC" if is_v3 else "Opteron_G3"
    return "Haswell-noTSX" if is_v3 else "Nehalem"


def tsc_khz() -> int | None:
    """The host's time stamp counter frequency, coarsely; None where the kernel does not tell."""
    cpufreq = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    base = cpufreq / "base_frequency"
    if base.exists():
        khz = float(base.read_text())
    else:
        match = re.search(r"^cpu MHz\s*:\s*([0-9.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        # With frequency scaling this line is the current clock, not the counter's.
        if match is None or cpufreq.exists():
            return None
        khz = float(match[1]) * 1000
    return round(khz / TSC_GRAIN_KHZ) * TSC_GRAIN_KHZ
