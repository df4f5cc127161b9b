"""The base image booted for real: golden snapshots, and an agent that comes up whatever has become of the users' disk."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.core.errors import InvalidRequest, MachineFailed
from perdure.core.ids import DEFAULT_TENANT, ExecId, WorkspaceId
from perdure.images.golden import GoldenSpec, ensure_golden, find_golden
from perdure.images.model import Golden, Image
from perdure.images.registry import ImageStore
from perdure.machines.driver import Accelerator, DiskChain, DiskLayer, LaunchSpec, Machine, Ram
from perdure.machines.guestlink import GuestLink, WakeRequest
from perdure.machines.qemu import QemuDriver
from perdure.snapshots.layers import create_layer
from perdure.wire.node import ExecExited, ExecOutput, ExecSpec, Identity, MachineSize

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

HELLO_S = 300.0
SIZE = MachineSize(256, 1)


class CountingDriver(QemuDriver):
    """The real driver, which remembers what it booted."""

    def __init__(self) -> None:
        super().__init__()
        self.booted: list[Machine] = []

    async def boot(self, spec: LaunchSpec, disk: DiskChain):  # type: ignore[no-untyped-def]
        machine = await super().boot(spec, disk)
        self.booted.append(machine)
        return machine


@pytest.fixture
def image(base_image: Path, home: Path) -> Image:
    """The base image in a store of its own, without a golden snapshot and with little to warm up."""
    root = home / "images"
    copy = root / "blobs" / base_image.name
    copy.mkdir(parents=True)
    for file in base_image.iterdir():
        if file.is_file():
            _share(file, copy / file.name)
    (copy / "golden").mkdir()
    return replace(ImageStore(root).load(base_image.name), warm_up=("true",))


def _share(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except OSError:  # another file system
        shutil.copyfile(source, copy)


def spec_for(image: Image, home: Path, driver: QemuDriver, size: MachineSize = SIZE) -> GoldenSpec:
    return GoldenSpec(image, size, ImageStore(home / "images"), driver, Accelerator.TCG, home / "run", hello_deadline_s=HELLO_S)


def _is_running(pid: int) -> bool:
    """A jailed process whose parent is gone too may wait a moment for init to reap it; it does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def identity(generation: int) -> Identity:
    return Identity(WorkspaceId("ws_test"), DEFAULT_TENANT, generation, "tester", "0" * 31 + "1")


async def shell(link: GuestLink, command: str) -> tuple[int | None, str]:
    """Run a command; (exit code, stdout and stderr)."""
    handle = await link.start_exec(ExecSpec(ExecId(f"exe_{os.urandom(6).hex()}"), shell=command))
    output = bytearray()
    async for event in handle.events():
        if isinstance(event, ExecOutput):
            output += event.data
        elif isinstance(event, ExecExited):
            return event.exit_code, output.decode()
    raise AssertionError("the command never ended")


@asynccontextmanager
async def linked(machine: Machine) -> AsyncIterator[GuestLink]:
    link = GuestLink(machine.connect, generation=1, unresponsive_s=120)
    try:
        await link.open(HELLO_S)
        yield link
    finally:
        await link.close()
        await machine.kill()


@asynccontextmanager
async def booted(image: Image, home: Path, root: DiskLayer) -> AsyncIterator[GuestLink]:
    """A cold boot on ``root`` below a fresh layer, without a golden snapshot."""
    disk = home / "own.qcow2"
    create_layer(disk, image.disk_gib << 30)
    ram = home / "ram"
    with ram.open("wb") as file:
        file.truncate(SIZE.memory_mib << 20)
    launch = LaunchSpec("boot-test", home / "run" / "boot", image.shape(SIZE), Ram(ram), Accelerator.TCG)
    (home / "run").mkdir(exist_ok=True)
    machine = await QemuDriver().boot(launch, DiskChain((root, DiskLayer(disk, "qcow2"))))
    async with linked(machine) as link:
        yield link


async def restored(image: Image, golden: Golden, home: Path) -> Machine:
    """A machine from the golden snapshot, running."""
    disk = home / "restored.qcow2"
    create_layer(disk, image.disk_gib << 30)
    launch = LaunchSpec("restore-test", home / "run" / "restore", image.shape(golden.size), Ram(golden.ram), Accelerator.TCG)
    machine = await QemuDriver().prepare(launch)
    chain = golden.disk(image)
    await machine.attach_disk(DiskChain((*chain.layers, DiskLayer(disk, "qcow2"))))
    await machine.load_devices(golden.devices)
    await machine.resume()
    return machine


async def test_two_that_want_one_golden_boot_it_once_and_it_wakes(image: Image, home: Path) -> None:
    driver = CountingDriver()
    spec = spec_for(image, home, driver)
    assert await find_golden(spec) is None
    first, second = await asyncio.gather(ensure_golden(spec), ensure_golden(spec))
    assert first == second
    assert len(driver.booted) == 1
    assert await find_golden(spec) == first
    assert await ensure_golden(spec) == first
    assert len(driver.booted) == 1
    assert [path.name for path in (image.directory / "golden").iterdir()] == [first.name]
    assert list((home / "run").iterdir()) == []
    assert {path.stat().st_mode & 0o777 for path in first.directory.iterdir()} == {0o444}
    assert first.ram_bytes == SIZE.memory_mib << 20
    assert first.ram_stored_bytes < first.ram_bytes // 2  # zero pages are holes

    before = first.ram.stat()
    machine = await restored(image, first, home)
    async with linked(machine) as link:
        report = await link.wake(WakeRequest(identity(1), new_identity=True))
        assert report.problems == ()
        assert await shell(link, "hostname; git --version | cut -c1-11") == (0, "tester\ngit version\n")
        assert await shell(link, "test -e /usr/lib/modules/$(uname -r)/modules.dep.bin && echo ok") == (0, "ok\n")
    assert first.ram.stat() == before  # whatever a workspace does, its base stays


@pytest.mark.long
async def test_a_warm_up_that_fails_is_named_and_leaves_nothing(image: Image, home: Path) -> None:
    driver = CountingDriver()
    spec = spec_for(replace(image, warm_up=("exit 3",)), home, driver)
    with pytest.raises(MachineFailed, match="exit 3"):
        await ensure_golden(spec)
    assert list((image.directory / "golden").iterdir()) == []
    assert list((home / "run").iterdir()) == []
    assert not _is_running(driver.booted[0].pid)


async def test_a_size_that_cannot_boot_is_refused_before_anything_starts(image: Image, home: Path) -> None:
    driver = CountingDriver()
    with pytest.raises(InvalidRequest, match="memory_mib is 64, but must be between"):
        await ensure_golden(spec_for(image, home, driver, MachineSize(64, 1)))
    assert driver.booted == []


@pytest.mark.long
async def test_the_agent_starts_over_an_empty_disk_and_says_so(image: Image, home: Path) -> None:
    empty = home / "empty.raw"
    with empty.open("wb") as file:
        file.truncate(image.disk_gib << 30)
    async with booted(image, home, DiskLayer(empty, "raw")) as link:
        assert link.hello is not None
        assert any("disk cannot be mounted" in problem for problem in link.hello.problems), link.hello.problems
        assert await link.ping() > 0


@pytest.mark.long
async def test_commands_run_without_the_users_python_and_without_room(image: Image, home: Path) -> None:
    async with booted(image, home, image.root) as link:
        assert link.hello is not None
        assert link.hello.problems == ()
        await link.wake(WakeRequest(identity(1), new_identity=True))
        assert await shell(link, "rm -f /usr/bin/python3* && ! python3 -c 1 2>/dev/null && echo gone") == (0, "gone\n")
        fill = "fallocate -l 100G /fill 2>/dev/null; dd if=/dev/zero of=/rest bs=1M 2>/dev/null; df / | tail -n 1"
        code, output = await shell(link, fill)
        assert code == 0
        assert " 100% " in output
        assert await shell(link, "echo still here; ls /usr/bin/git") == (0, "still here\n/usr/bin/git\n")
        assert await link.quiesce(10) is True
        await link.thaw()
        assert await shell(link, "rm /fill /rest; echo room") == (0, "room\n")
