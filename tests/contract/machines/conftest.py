"""The kinds of machine that must keep the contract: the fake, and every QEMU at hand."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.core.config import Settings
from perdure.machines import softdirty
from perdure.machines.driver import Machine, Shape
from perdure.machines.qemu import QemuConfig, QemuDriver
from tests.contract.machines import tinyguest
from tests.contract.machines.world import DISK_BYTES, World, make_golden, make_qcow2, restore
from tests.fakes.machine import FakeDriver

#: Where tools/fetch-qemu10.sh puts the second version to test.
QEMU10_PLACES = (
    Path("/var/cache/perdure/qemu10/bin/qemu-system-x86_64"),
    Path.home() / ".cache/perdure/qemu10/bin/qemu-system-x86_64",
)
MEMORY_MIB = 192
#: As on a host whose kernel has no soft-dirty bits, and as on one that has them.
FAKES = ("fake", "fake-soft-dirty")


def qemu_binaries() -> dict[str, str]:
    """Name -> binary: the system's own, and the fetched one where there is one."""
    found = {"qemu": Settings().qemu}
    for place in QEMU10_PLACES:
        if os.access(place, os.X_OK):
            found["qemu10"] = str(place)
            break
    return found


def make_qemu_world(name: str, binary: str, directory: Path, base_image: Path) -> World:
    tinyguest.build_initrd(base_image / "initrd", directory / "initrd")
    (directory / "agent.raw").write_bytes(b"agent disk".ljust(1 << 20, b"\0"))
    shape = Shape(base_image / "kernel", directory / "initrd", directory / "agent.raw", MEMORY_MIB, 1, DISK_BYTES)
    driver = QemuDriver(QemuConfig(qemu=binary))
    return World(name, lambda: driver, make_qcow2, directory, shape, softdirty.works())


def make_fake_world(directory: Path, *, tells_writes: bool) -> World:
    for name in ("kernel", "initrd", "agent.raw"):
        (directory / name).write_bytes(b"")
    shape = Shape(directory / "kernel", directory / "initrd", directory / "agent.raw", 16, 1, DISK_BYTES)
    make_driver = partial(FakeDriver, tells_writes=tells_writes)
    return World("fake", make_driver, lambda path: path.write_bytes(b""), directory, shape, tells_writes)


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> Iterator[Callable[[str], World]]:
    """The world of a name, each made once: a golden capture costs a boot."""
    directory = Path(tempfile.mkdtemp(prefix="perdure-machines-"))
    directory.chmod(0o755)

    @cache
    def made(name: str) -> World:
        place = directory / name
        place.mkdir()
        place.chmod(0o755)
        if name in FAKES:
            world = make_fake_world(place, tells_writes=name == "fake-soft-dirty")
        else:
            world = make_qemu_world(name, qemu_binaries()[name], place, request.getfixturevalue("base_image"))
        asyncio.run(make_golden(world))
        return world

    yield made
    shutil.rmtree(directory, ignore_errors=True)


_QEMUS = [pytest.param(name, marks=pytest.mark.qemu) for name in qemu_binaries()]
#: What only a QEMU can show is shown by the system's own; the other versions have the whole of it in the long form.
_FIRST, *_OTHERS = qemu_binaries()
_FIRST_QEMUS = [
    pytest.param(_FIRST, marks=pytest.mark.qemu),
    *(pytest.param(name, marks=(pytest.mark.qemu, pytest.mark.long)) for name in _OTHERS),
]


@pytest.fixture(scope="session", params=[*FAKES, *_QEMUS])
def world(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    """Every kind of machine."""
    return worlds(request.param)


@pytest.fixture(scope="session", params=_FIRST_QEMUS)
def qemu_world(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    """Every QEMU, for what a fake cannot show."""
    return worlds(request.param)


Restorer = Callable[[], Awaitable[Machine]]


@pytest_asyncio.fixture
async def machine(world: World) -> AsyncIterator[Machine]:
    """A running machine, woken from the golden capture."""
    assert world.golden is not None
    woken = await restore(world, world.golden)
    try:
        yield woken
    finally:
        await woken.kill()


@pytest_asyncio.fixture
async def qemu_machine(qemu_world: World) -> AsyncIterator[Machine]:
    assert qemu_world.golden is not None
    woken = await restore(qemu_world, qemu_world.golden)
    try:
        yield woken
    finally:
        await woken.kill()
