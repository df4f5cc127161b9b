"""Very many checkpoints in one wake of a real machine: nothing adds up, neither on disk nor in the clock nor in memory.

The short form takes 40; PERDURE_TEST_LONG=1 takes the issue's thousand.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.core.ids import SnapshotId, WorkspaceId
from perdure.wire.node import CaptureMode, FromSnapshot, MemoryFate, NodeEventKind, SnapshotFacts
from tests.contract.node.benches import Bench
from tests.contract.node.real import RealWorld, real_bench, shell

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(3600)]

CHECKPOINTS = 1000 if os.environ.get("PERDURE_TEST_LONG") else 40
#: As the control plane keeps them by default.
KEPT = 2
LAYERS_MAX = 16
CLOCK_STEP_MAX_S = 0.050
#: What a live chain of layers and one page log may hold after any number of checkpoints of a guest that does little.
STORE_GROWTH_MAX_BYTES = 96 << 20
#: Counts in memory only, says so when asked, and notices when the clock goes backwards.
COUNTER = r"""
import os, select, signal, time
count, asked, back, last = 0, False, 0, time.time()
def ask(*_):
    global asked
    asked = True
signal.signal(signal.SIGUSR1, ask)
block = bytearray(os.urandom(1 << 20))
with open("/run/pid.new", "w") as out:
    out.write(str(os.getpid()))
os.rename("/run/pid.new", "/run/pid")
while True:
    select.select([], [], [], 0.02)
    count += 1
    block[count * 4096 % len(block)] = count % 256
    now = time.time()
    back += now < last
    last = now
    if asked:
        asked = False
        with open("/run/answer.new", "w") as out:
            out.write(f"{os.getpid()} {count} {back}")
        os.rename("/run/answer.new", "/run/answer")
"""


@pytest.fixture
async def bench(base_image: Path, home: Path) -> AsyncIterator[Bench]:
    async with real_bench(home) as made:
        made.listen()
        yield made
        made.deafen()


async def counter(bench: Bench, workspace: WorkspaceId, generation: int) -> tuple[int, int, int]:
    """Pid, count and backward steps of the clock, as the program in the guest tells them."""
    wait = "until [ -s /run/answer ]; do kill -0 $(cat /run/pid) && sleep 0.1 || exit 1; done"
    line = f"rm -f /run/answer; kill -USR1 $(cat /run/pid); {wait}; cat /run/answer"
    pid, count, back = (await shell(bench, workspace, generation, line)).split()
    return int(pid), int(count), int(back)


async def clock_difference_s(bench: Bench, workspace: WorkspaceId, generation: int) -> float:
    """How far the guest's clock is from the host's at least, whatever the way between them took: 0 while they may agree."""
    smallest = float("inf")
    for _ in range(5):
        before = time.time()
        guest = float(await shell(bench, workspace, generation, "date +%s.%N"))
        after = time.time()
        smallest = min(smallest, max(before - guest, guest - after, 0.0))
    return smallest


def stored_bytes(home: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (home / "store").rglob("*") if path.is_file())


def live_layers(bench: Bench, workspace: WorkspaceId) -> int:
    world = bench.world
    assert isinstance(world, RealWorld)
    (record,) = [one for one in world.node._store.live() if one.workspace_id == workspace]
    return len(record.layers)


async def test_many_checkpoints_in_one_wake(bench: Bench, home: Path) -> None:
    workspace, _ = await bench.begin()
    await bench.write(workspace, 1, "/root/counter.py", COUNTER.encode())
    await shell(bench, workspace, 1, "nohup python3 /root/counter.py >/dev/null 2>&1 & until [ -s /run/pid ]; do sleep 0.1; done")
    pid, counted, _ = await counter(bench, workspace, 1)

    kept: list[SnapshotFacts] = []
    after_warm_up = 0
    for number in range(CHECKPOINTS):
        kept.append(await bench.capture(workspace, 1, CaptureMode.CHECKPOINT))
        assert kept[-1].quiesced
        if len(kept) > KEPT:
            await bench.node.delete_snapshots((kept.pop(0).snapshot_id,))
        assert live_layers(bench, workspace) <= LAYERS_MAX, f"after {number + 1} checkpoints"
        if number == 20:
            after_warm_up = stored_bytes(home)

    assert stored_bytes(home) - after_warm_up < STORE_GROWTH_MAX_BYTES
    assert await clock_difference_s(bench, workspace, 1) < CLOCK_STEP_MAX_S
    again, count, back = await counter(bench, workspace, 1)
    assert (again, back) == (pid, 0) and count > counted
    inventory = await bench.node.inventory()
    assert {facts.snapshot_id for facts in inventory.snapshots} == {facts.snapshot_id for facts in kept}

    # One more, so that the memory it must bring back is known; then the machine dies and the last one wakes.
    await shell(bench, workspace, 1, "echo last >/root/last")
    last = await bench.capture(workspace, 1, CaptureMode.CHECKPOINT)
    await bench.world.kill(workspace)
    await bench.event(NodeEventKind.DIED)
    await bench.node.stop(workspace, 1)
    _, report = await bench.begin(workspace, generation=2, source=FromSnapshot(SnapshotId(last.snapshot_id)))
    assert (report.memory, report.memory_reason) == (MemoryFate.KEPT, "")
    woken, recounted, _ = await counter(bench, workspace, 2)
    assert woken == pid and recounted >= count
    assert await shell(bench, workspace, 2, "cat /root/last") == "last"
    assert await clock_difference_s(bench, workspace, 2) < CLOCK_STEP_MAX_S
    await bench.node.snapshot(last.snapshot_id)  # every checksum holds
    await bench.node.stop(workspace, 2)
