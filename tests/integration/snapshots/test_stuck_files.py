"""A file system that never answers, mounted by a user: whoever touches it waits, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.core.errors import GuestUnresponsive, PerdureError
from perdure.core.ids import WorkspaceId
from perdure.wire.node import CaptureMode, FromSnapshot, MemoryFate
from tests.contract.node.benches import Bench
from tests.contract.node.real import real_bench, shell

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 60.0
#: Mounts a FUSE file system and never reads what the kernel asks of it.
DEAD = r"""
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("/mnt/dead")
fd = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"dead", b"/mnt/dead", b"fuse", ctypes.c_ulong(0), options):
    raise OSError(ctypes.get_errno(), "mount")
with open("/run/dead.new", "w") as out:
    out.write(str(os.getpid()))
os.rename("/run/dead.new", "/run/dead")
signal.pause()
"""


@pytest.fixture
async def bench(base_image: Path, home: Path) -> AsyncIterator[Bench]:
    async with real_bench(home, unresponsive_s=2 * DEADLINE_S) as made:  # those who wait must do so to the end of a test
        made.listen()
        yield made
        made.deafen()


def touching(bench: Bench, workspace: WorkspaceId, generation: int) -> list[asyncio.Task[Any]]:
    """Every kind of file work, twice, each on the dead file system."""
    guest = bench.node.guest(workspace, generation)
    work: list[asyncio.Task[Any]] = []
    for name in ("a", "b"):
        path = f"/mnt/dead/{name}"
        work += [
            asyncio.create_task(guest.stat(path)),
            asyncio.create_task(guest.list_dir(path)),
            asyncio.create_task(bench.read(guest, path)),
            asyncio.create_task(bench.write(workspace, generation, path, b"never")),
            asyncio.create_task(guest.make_dir(path)),
            asyncio.create_task(guest.remove(path)),
        ]
    return work


async def everything_else(bench: Bench, workspace: WorkspaceId, generation: int) -> None:
    guest = bench.node.guest(workspace, generation)
    async with asyncio.timeout(DEADLINE_S):
        content = f"generation {generation}".encode() * 1000
        for path in ("/root/one", "/root/two"):
            await bench.write(workspace, generation, path, content)
            assert await bench.read(guest, path) == content
        await guest.rename("/root/two", "/root/three")
        assert (await guest.stat("/root/three")).size == len(content)
        assert {"one", "three"} <= {found.name for found in await guest.list_dir("/root")}
        await guest.remove("/root/three")
        assert await shell(bench, workspace, generation, "wc -c </root/one") == str(len(content))


async def test_file_work_that_hangs_holds_up_nothing_else(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    await bench.write(workspace, 1, "/root/dead.py", DEAD.encode())
    begun = "until [ -s /run/dead ]; do kill -0 $! || exit 1; sleep 0.1; done"
    await shell(bench, workspace, 1, f"nohup python3 /root/dead.py >/root/log 2>&1 & {begun}")
    await shell(bench, workspace, 1, "nohup stat /mnt/dead/c >/dev/null 2>&1 & exit 0")

    stuck = touching(bench, workspace, 1)
    await everything_else(bench, workspace, 1)
    assert not [task for task in stuck if task.done()]
    async with asyncio.timeout(DEADLINE_S):
        asleep = await bench.capture(workspace, 1, CaptureMode.HIBERNATE)
        ends = await asyncio.gather(*stuck, return_exceptions=True)
    assert all(isinstance(end, PerdureError) for end in ends), ends

    _, report = await bench.begin(workspace, generation=2, source=FromSnapshot(asleep.snapshot_id))
    assert (report.memory, report.problems) == (MemoryFate.KEPT, ())
    stuck = touching(bench, workspace, 2)
    await everything_else(bench, workspace, 2)
    assert not [task for task in stuck if task.done()]

    # With its server the mount's calls end, which shows that they had waited for it.
    await shell(bench, workspace, 2, "kill -9 $(cat /run/dead)")
    async with asyncio.timeout(DEADLINE_S):
        ends = await asyncio.gather(*stuck, return_exceptions=True)
    assert all(isinstance(end, PerdureError) and not isinstance(end, GuestUnresponsive) for end in ends), ends
    await shell(bench, workspace, 2, "umount /mnt/dead")
    assert await bench.node.guest(workspace, 2).list_dir("/mnt/dead") == ()
