"""What only a real VMM can show: its jail, its end, its leftovers, and a host that is full."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure.core.errors import Busy, HostUnfit, InvalidRequest, MachineDied, RestoreFailed
from perdure.machines import cgroups, jail, qemu_leftovers
from perdure.machines.driver import Accelerator, DiskChain, DiskLayer, EventKind, Limits, MachineState
from perdure.machines.process import Watched, wait_for_exit
from perdure.machines.qemu import QemuConfig, QemuDriver, QemuMachine
from perdure.wire.node import Isolation
from tests.contract.machines.world import DEADLINE_S, World, ask, capture, make_qcow2, restore

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small file system or changes users")


#: Fill the start of the disk with bytes that are kept to compare.
NOISE = "dd if=/dev/urandom of=/tmp/noise bs=1M count=8 2>/dev/null; dd if=/tmp/noise of=/dev/vda bs=1M conv=fsync 2>/dev/null"


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], check=True)


def spawn(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


def status(pid: int, key: str) -> str:
    match = re.search(rf"^{key}:[ \t]*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def open_files(pid: int) -> Iterator[tuple[str, bool]]:
    """Paths (as the kernel names them) of open descriptors and whether each is writable."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            flags = re.search(r"^flags:\s*(\d+)$", Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text(), re.MULTILINE)
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        assert flags is not None
        yield target, int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY


def writable(pid: int, path: Path) -> bool:
    """Whether the process holds a descriptor of that file with which it could change it."""
    return any(can_write for target, can_write in open_files(pid) if Path(target).name == path.name)


# ----------------------------------------------------------------------------------------------------------------- confinement


async def test_the_jail_is_what_the_machine_says(qemu_machine: QemuMachine) -> None:
    said, pid = qemu_machine.confinement, qemu_machine.pid
    assert said.isolation is Isolation.VM_EMULATED
    assert said.seccomp
    assert status(pid, "Seccomp") == "2"
    for name in ("jail", "own_user", "memory_limit", "cpu_limit", "pids_limit", "readonly_base", "seccomp"):
        assert getattr(said, name) or said.missing[name], f"{name} is missing without a reason"
    if not said.jail:
        pytest.skip(f"no jail on this host: {said.missing['jail']}")
    for namespace in ("user", "pid", "net", "ipc", "uts", "mnt"):
        assert Path(f"/proc/{pid}/ns/{namespace}").readlink() != Path(f"/proc/self/ns/{namespace}").readlink(), namespace
    assert status(pid, "NSpid").split()[-1] == "1"
    assert status(pid, "NoNewPrivs") == "1"
    interfaces = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    visible = {entry.name for entry in Path(f"/proc/{pid}/root").iterdir()}
    assert visible <= {"usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "dev", "run", "var"}, visible
    assert not Path(f"/proc/{pid}/root{Path(__file__).resolve()}").exists()


@needs_root
async def test_its_own_user_where_it_says_so(qemu_machine: QemuMachine, qemu_world: World) -> None:
    pid = qemu_machine.pid
    identity = await qemu_world.make_driver().identity(Accelerator.TCG)
    if not qemu_machine.confinement.own_user:
        assert identity.version < (8, 2, 0), qemu_machine.confinement.missing["own_user"]
        assert not qemu_machine.confinement.readonly_base
        return
    assert status(pid, "Uid").split() == [str(jail.VMM_UID)] * 4
    assert status(pid, "Groups").strip() == ""
    assert int(status(pid, "CapEff"), 16) == int(status(pid, "CapPrm"), 16) == 0
    assert qemu_machine.confinement.readonly_base
    assert not writable(pid, qemu_world.ram)


async def test_limits_are_set_in_the_kernel(qemu_world: World) -> None:
    spec = qemu_world.spec(limits=Limits(memory_bytes=777 << 20, cpus=0.5, pids=50))
    machine = await qemu_world.make_driver().prepare(spec)
    try:
        if not machine.confinement.memory_limit:
            pytest.skip(f"no cgroups on this host: {machine.confinement.missing['memory_limit']}")
        found = cgroups.leftovers(cgroups.discover(), qemu_leftovers.group_name(spec))
        assert found
        assert all(str(machine.pid) in (group / "cgroup.procs").read_text().split() for group in found)
        names = ("memory.max", "memory.limit_in_bytes", "pids.max", "cpu.max", "cpu.cfs_quota_us")
        values = {name: (group / name).read_text().strip() for group in found for name in names if (group / name).exists()}
        assert str(777 << 20) in (values.get("memory.max"), values.get("memory.limit_in_bytes"))
        assert values["pids.max"] == "50"
        assert values.get("cpu.max", values.get("cpu.cfs_quota_us")) in ("50000 100000", "50000")
    finally:
        await machine.kill()
    assert not any(group.exists() for group in found)


async def test_a_start_without_limits_says_so(qemu_world: World) -> None:
    machine = await qemu_world.make_driver().prepare(qemu_world.spec(limits=Limits(pids=None)))
    try:
        assert not machine.confinement.memory_limit
        assert machine.confinement.missing["memory_limit"] == "no limit was asked for"
    finally:
        await machine.kill()


async def test_frozen_layers_are_out_of_the_vmms_reach(qemu_machine: QemuMachine, qemu_world: World) -> None:
    first = qemu_machine.disk.layers[-1]
    assert writable(qemu_machine.pid, first.path)
    for below in qemu_machine.disk.layers[:-1]:
        assert not writable(qemu_machine.pid, below.path)
    await qemu_machine.open_overlay(qemu_world.layer())
    await qemu_machine.pause()
    await qemu_machine.switch_overlay()
    await qemu_machine.resume()
    assert not writable(qemu_machine.pid, first.path)
    assert writable(qemu_machine.pid, qemu_machine.disk.layers[-1].path)


async def test_descriptors_do_not_pile_up(qemu_machine: QemuMachine, qemu_world: World) -> None:
    async def checkpoint() -> int:
        await qemu_machine.open_overlay(qemu_world.layer())
        await qemu_machine.pause()
        await qemu_machine.save_devices(qemu_world.state_file())
        await qemu_machine.switch_overlay()
        await qemu_machine.resume()
        await qemu_machine.collapse_disk(2)
        return len(list(Path(f"/proc/{qemu_machine.pid}/fd").iterdir()))

    before = await checkpoint()
    for _ in range(5):
        after = await checkpoint()
    assert after <= before
    assert await ask(qemu_machine, "store still writable") == ""


async def test_without_a_jail_it_says_so(qemu_world: World) -> None:
    binary = await qemu_binary(qemu_world)
    machine = await QemuDriver(QemuConfig(qemu=binary, jail="off")).prepare(qemu_world.spec())
    try:
        assert not machine.confinement.jail
        assert "PERDURE_JAIL=off" in machine.confinement.missing["jail"]
        assert len(machine.memory.written_pages()) == 0
    finally:
        await machine.kill()


async def qemu_binary(world: World) -> str:
    driver = world.make_driver()
    assert isinstance(driver, QemuDriver)
    return driver._config.qemu


# ------------------------------------------------------------------------------------------------------------- ends and leftovers


async def test_a_vmm_killed_from_outside_is_noticed(qemu_machine: QemuMachine) -> None:
    os.kill(qemu_machine.pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        events = [event.kind async for event in qemu_machine.events()]
    assert events == [EventKind.EXITED]
    with pytest.raises(MachineDied):
        await qemu_machine.pause()
    with pytest.raises(MachineDied):
        qemu_machine.memory.read_pages(np.array([1], dtype=np.uint32))


async def test_a_command_under_way_when_the_vmm_dies(qemu_machine: QemuMachine) -> None:
    os.kill(qemu_machine.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(qemu_machine.pause())
    await asyncio.sleep(0)
    os.kill(qemu_machine.pid, signal.SIGKILL)
    with pytest.raises(MachineDied):
        async with asyncio.timeout(DEADLINE_S):
            await waiting


async def test_a_vmm_that_answers_no_more_is_ended(qemu_machine: QemuMachine) -> None:
    os.kill(qemu_machine.pid, signal.SIGSTOP)
    with pytest.raises(MachineDied, match="did not answer"):
        await qemu_machine._qmp.execute("query-status", deadline_s=0.2)
    async with asyncio.timeout(DEADLINE_S):
        assert [event.kind async for event in qemu_machine.events()] == [EventKind.EXITED]


async def test_a_panic_tells_the_kernels_words(qemu_machine: QemuMachine) -> None:
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await ask(qemu_machine, "crash")
    async with asyncio.timeout(DEADLINE_S):
        events = [event async for event in qemu_machine.events()]
    assert events[0].kind is EventKind.PANIC
    assert "sysrq triggered crash" in events[0].detail


SERVER = """
import asyncio, sys
from pathlib import Path
from perdure.machines.driver import *
from perdure.machines.qemu import QemuConfig, QemuDriver
qemu, directory, kernel = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
shape = Shape(kernel, directory / "initrd", directory / "agent.raw", {memory}, 1, {disk})
spec = LaunchSpec("victim", directory / "run" / "victim", shape, Ram(directory / "ram.base"), Accelerator.TCG,
                  Limits(memory_bytes=1 << 30))
async def main():
    machine = await QemuDriver(QemuConfig(qemu=qemu)).prepare(spec)
    print(machine.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_killed_server_takes_its_vmms_along_and_the_next_one_sweeps(qemu_world: World) -> None:
    shape = qemu_world.shape
    script = SERVER.format(memory=shape.memory_mib, disk=shape.disk_bytes)
    arguments = [await qemu_binary(qemu_world), str(qemu_world.directory), str(shape.kernel)]
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *arguments, stdout=subprocess.PIPE)
    assert server.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        pid = int(await server.stdout.readline())
    watched = Watched(pid)
    server.kill()
    await server.wait()
    await wait_for_exit(watched, DEADLINE_S)
    run_root = qemu_world.directory / "run"
    assert (run_root / "victim").exists()
    assert "victim" not in (await qemu_leftovers.sweep(run_root, keep=["victim"])).killed
    assert (run_root / "victim").exists(), "a kept machine lost its directory"
    swept = await qemu_leftovers.sweep(run_root)
    assert swept.directories == (run_root / "victim",)
    assert not (run_root / "victim").exists()
    assert cgroups.leftovers(cgroups.discover(), f"{qemu_leftovers.token(run_root)}-victim") == []
    assert await qemu_leftovers.sweep(run_root) == qemu_leftovers.Swept()


async def test_an_orphan_is_swept_and_living_machines_are_not(qemu_machine: QemuMachine, qemu_world: World) -> None:
    run_root = qemu_world.directory / "run"
    name = f"guest=perdure-orphan.{qemu_leftovers.token(run_root)},debug-threads=on"
    command = [await qemu_binary(qemu_world), "-name", name, "-M", "none", "-display", "none", "-nodefaults"]
    orphan = spawn(command)
    try:
        (run_root / "not-ours").mkdir()
        swept = await qemu_leftovers.sweep(run_root, keep=["orphan"])
        assert swept.killed == ()
        swept = await qemu_leftovers.sweep(run_root)
        assert swept.killed == ("orphan",)
        assert orphan.wait(DEADLINE_S) == -signal.SIGKILL
        assert (run_root / "not-ours").is_dir()
    finally:
        orphan.kill()
        orphan.wait()
        (run_root / "not-ours").rmdir()
    assert await ask(qemu_machine, "echo alive") == "alive"


async def test_a_start_that_fails_leaves_nothing(qemu_world: World) -> None:
    spec = qemu_world.spec()
    not_a_kernel = qemu_world.directory / "not-a-kernel"
    not_a_kernel.write_bytes(b"\0" * 100)
    with pytest.raises(MachineDied, match="ended at its start"):
        await qemu_world.make_driver().prepare(replace(spec, shape=replace(spec.shape, kernel=not_a_kernel)))
    assert not spec.run_dir.exists()
    assert await qemu_leftovers.sweep(spec.run_dir.parent) == qemu_leftovers.Swept()


async def test_a_cancelled_start_leaves_nothing(qemu_world: World) -> None:
    spec = qemu_world.spec()
    driver = qemu_world.make_driver()
    await driver.identity(Accelerator.TCG)
    for steps in (1, 3, 10, 30):
        start = asyncio.create_task(driver.prepare(spec))
        for _ in range(steps):
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not spec.run_dir.exists()
    assert await qemu_leftovers.sweep(spec.run_dir.parent) == qemu_leftovers.Swept()


async def test_a_machine_is_started_from_the_main_thread(qemu_world: World) -> None:
    failures: list[BaseException] = []

    def start() -> None:
        try:
            asyncio.run(qemu_world.make_driver().prepare(qemu_world.spec()))
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert "main thread" in str(failures[0])


# ---------------------------------------------------------------------------------------------------------------- disk and state


@needs_root
async def test_a_full_host_disk_stops_the_machine_and_loses_nothing(qemu_machine: QemuMachine, qemu_world: World) -> None:
    small = qemu_world.directory / "small"
    small.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small))
    try:
        make_qcow2(small / "layer.qcow2")
        await qemu_machine.open_overlay(DiskLayer(small / "layer.qcow2", "qcow2"))
        await qemu_machine.switch_overlay()
        writing = asyncio.create_task(ask(qemu_machine, NOISE))
        async with asyncio.timeout(DEADLINE_S):
            event = await anext(qemu_machine.events())
        assert event.kind is EventKind.NO_SPACE
        assert qemu_machine.state is MachineState.NO_SPACE
        assert not writing.done()
        mount("-o", "remount,size=64m", str(small))
        await qemu_machine.resume()
        assert await writing == ""
        assert await ask(qemu_machine, "cmp -n 8388608 /tmp/noise /dev/vda && echo same") == "same"
        assert qemu_machine.state is MachineState.RUNNING
        await qemu_machine.kill()
    finally:
        unmount(small)


@needs_root
async def test_a_machine_without_room_can_be_captured(qemu_machine: QemuMachine, qemu_world: World) -> None:
    small = qemu_world.directory / "smaller"
    small.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small))
    try:
        make_qcow2(small / "layer.qcow2")
        await qemu_machine.open_overlay(DiskLayer(small / "layer.qcow2", "qcow2"))
        await qemu_machine.switch_overlay()
        writing = asyncio.create_task(
            ask(qemu_machine, "dd if=/dev/urandom of=/dev/vda bs=1M count=4 conv=fsync 2>/dev/null; remember written")
        )
        async with asyncio.timeout(DEADLINE_S):
            await anext(qemu_machine.events())
        captured = await capture(qemu_world, qemu_machine)
        assert qemu_machine.state is MachineState.PAUSED
        await qemu_machine.kill()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await writing
        mount("-o", "remount,size=64m", str(small))
        woken = await restore(qemu_world, captured)
        try:
            async with asyncio.timeout(DEADLINE_S):
                while await ask(woken, "recall; true", deadline_s=DEADLINE_S) != "written":
                    pass
        finally:
            await woken.kill()
    finally:
        unmount(small)


def slow_streams(machine: QemuMachine) -> Callable[..., Awaitable[Any]]:
    """Throttle block-stream, so that a capture surely falls into it."""
    execute = machine._qmp.execute

    async def slowed(command: str, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
        if command == "block-stream" and arguments is not None:
            arguments = {**arguments, "speed": 64 << 10}
        return await execute(command, arguments, **options)

    return slowed


async def test_a_capture_interrupts_a_collapse(
    qemu_machine: QemuMachine, qemu_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(
        qemu_machine,
        "dd if=/dev/urandom of=/tmp/noise bs=1M count=8 2>/dev/null; dd if=/tmp/noise of=/dev/vda bs=1M conv=fsync 2>/dev/null",
    )
    await qemu_machine.open_overlay(qemu_world.layer())
    await qemu_machine.switch_overlay()
    layers = qemu_machine.disk.layers
    with monkeypatch.context() as patch:
        patch.setattr(qemu_machine._qmp, "execute", slow_streams(qemu_machine))
        collapsing = asyncio.create_task(qemu_machine.collapse_disk(2))
        await ask(qemu_machine, "echo the stream runs beside")
        assert not collapsing.done()
        await qemu_machine.open_overlay(qemu_world.layer())
        await qemu_machine.pause()
        with pytest.raises(Busy, match="interrupted"):
            await collapsing
        await qemu_machine.save_devices(qemu_world.state_file())
        await qemu_machine.switch_overlay()
        await qemu_machine.resume()
    assert qemu_machine.disk.layers[:-1] == layers
    await qemu_machine.collapse_disk(2)
    assert len(qemu_machine.disk.layers) == 3
    assert await ask(qemu_machine, "cmp -n 8388608 /tmp/noise /dev/vda && echo same") == "same"


async def test_a_cancelled_collapse_stops(qemu_machine: QemuMachine, qemu_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await ask(qemu_machine, "dd if=/dev/urandom of=/dev/vda bs=1M count=4 conv=fsync 2>/dev/null")
    await qemu_machine.open_overlay(qemu_world.layer())
    await qemu_machine.switch_overlay()
    with monkeypatch.context() as patch:
        patch.setattr(qemu_machine._qmp, "execute", slow_streams(qemu_machine))
        collapsing = asyncio.create_task(qemu_machine.collapse_disk(2))
        await ask(qemu_machine, "echo running")
        collapsing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collapsing
    await qemu_machine.collapse_disk(2)
    assert len(qemu_machine.disk.layers) == 3


async def test_a_state_of_another_shape_is_refused(qemu_machine: QemuMachine, qemu_world: World) -> None:
    captured = await capture(qemu_world, qemu_machine)
    await qemu_machine.kill()
    with pytest.raises(RestoreFailed, match="could not be loaded"):
        await restore(qemu_world, captured, shape=replace(qemu_world.shape, vcpus=2))


async def test_two_vcpus(qemu_world: World, tmp_path: Path) -> None:
    """Another shape boots and is captured, too; its memory file is its own."""
    ram = tmp_path / "ram"
    with ram.open("wb") as file:
        file.truncate(qemu_world.shape.memory_mib << 20)
    assert qemu_world.golden is not None
    spec = replace(qemu_world.spec(ram=ram), shape=replace(qemu_world.shape, vcpus=2))
    disk = DiskChain((qemu_world.golden.disk.layers[0], qemu_world.layer()))
    machine = await qemu_world.make_driver().boot(spec, disk)
    try:
        assert await ask(machine, "grep -c ^processor /proc/cpuinfo") == "2"
        captured = await capture(qemu_world, machine)
        assert len(captured.pages) > 1000
    finally:
        await machine.kill()


# --------------------------------------------------------------------------------------------------------------------- bad input


async def test_a_missing_qemu_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(HostUnfit, match="not installed") as caught:
        await QemuDriver(QemuConfig(qemu="qemu-that-is-not-there")).identity(Accelerator.TCG)
    assert "apt-get install" in caught.value.hint


async def test_a_program_that_is_not_qemu() -> None:
    with pytest.raises(HostUnfit, match="does not say its version"):
        await QemuDriver(QemuConfig(qemu="true")).identity(Accelerator.TCG)


async def test_more_memory_than_the_host_has(qemu_world: World) -> None:
    spec = qemu_world.spec()
    with pytest.raises(HostUnfit, match="does not fit into this host"):
        await qemu_world.make_driver().prepare(replace(spec, shape=replace(spec.shape, memory_mib=1 << 30)))


async def test_more_vcpus_than_make_sense(qemu_world: World) -> None:
    spec = qemu_world.spec()
    with pytest.raises(InvalidRequest, match="vCPUs"):
        await qemu_world.make_driver().prepare(replace(spec, shape=replace(spec.shape, vcpus=10_000)))


async def test_a_name_that_could_not_be_a_file(qemu_world: World) -> None:
    for name in ("", "a/b", "a,b", "x" * 41, "-x"):
        with pytest.raises(InvalidRequest, match="not a machine name"):
            await qemu_world.make_driver().prepare(replace(qemu_world.spec(), name=name))


async def test_a_name_in_use(qemu_machine: QemuMachine, qemu_world: World) -> None:
    spec = replace(qemu_world.spec(), name=qemu_machine.name)
    with pytest.raises(InvalidRequest, match="runs already"):
        await qemu_world.make_driver().prepare(spec)
    assert await ask(qemu_machine, "echo unharmed") == "unharmed"
