"""Two wakes of one snapshot are the same machine, and draw different random numbers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.core.ids import WorkspaceId
from perdure.wire.node import CaptureMode, FromSnapshot, MemoryFate, NodeEventKind
from tests.contract.node.benches import Bench
from tests.contract.node.real import real_bench, shell

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(600)]

#: A program that lives through the snapshot. What it draws before fills the buffer that the C library keeps in its memory; its
#: own generator is seeded before, and shows that both wakes go on from the same instant.
DRAWING = r"""
import os, random, signal, uuid
own = random.Random(7)
held = open("/dev/urandom", "rb", buffering=0)
early = [os.urandom(8), os.getrandom(8), held.read(8), uuid.uuid4()]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
with open("/run/ready.new", "w") as out:
    out.write(str(os.getpid()))
os.rename("/run/ready.new", "/run/ready")
signal.sigwait({signal.SIGUSR1})
with open("/run/drawn.new", "w") as out:
    print(own.random(), os.urandom(32).hex(), os.getrandom(32).hex(), held.read(32).hex(), uuid.uuid4().hex, file=out)
os.rename("/run/drawn.new", "/run/drawn")
"""
WAIT = "until [ -s /run/{} ]; do sleep 0.1; done; cat /run/{}"
FRESH = (
    "head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n'; echo; cat /proc/sys/kernel/random/uuid; mktemp -u XXXXXXXXXXXXXXXX"
)


@pytest.fixture
async def bench(base_image: Path, home: Path) -> AsyncIterator[Bench]:
    async with real_bench(home) as made:
        made.listen()
        yield made
        made.deafen()


async def draw(bench: Bench, workspace: WorkspaceId, generation: int) -> tuple[str, list[str]]:
    """The number of the program's own generator, and random ones of the kernel: new programs' and the old program's."""
    fresh = await shell(bench, workspace, generation, FRESH)
    drawn = await shell(bench, workspace, generation, f"kill -USR1 $(cat /run/ready); {WAIT.format('drawn', 'drawn')}")
    own, *kernels = drawn.split()
    return own, [*fresh.split(), *kernels]


@pytest.mark.long
async def test_the_same_memory_draws_other_numbers_at_each_wake(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    await bench.write(workspace, 1, "/root/drawing.py", DRAWING.encode())
    await shell(bench, workspace, 1, f"nohup python3 /root/drawing.py >/root/log 2>&1 & {WAIT.format('ready', 'ready')}")
    asleep = await bench.capture(workspace, 1, CaptureMode.HIBERNATE)

    drawn = []
    for generation in (2, 3, 4):
        _, report = await bench.begin(workspace, generation=generation, source=FromSnapshot(asleep.snapshot_id))
        assert report.memory is MemoryFate.KEPT and report.problems == ()
        drawn.append(await draw(bench, workspace, generation))
        await bench.world.kill(workspace)
        await bench.event(NodeEventKind.DIED)
        await bench.node.stop(workspace, generation)

    assert len({own for own, _ in drawn}) == 1, "it is the same memory"
    assert [len(numbers) for _, numbers in drawn] == [7, 7, 7]
    every = list(itertools.chain.from_iterable(numbers for _, numbers in drawn))
    assert len(set(every)) == 21, every
