"""Capture and restore with the real QEMU and the base image: a guest that keeps a checksummed block of memory and a file.

The guest's program changes both all the time and checks itself when it is asked, so a snapshot of something half written, a page
that came back wrong or a disk that does not belong to the memory would be told by the guest itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from perdure.core.errors import Conflict
from perdure.core.ids import DEFAULT_TENANT, ExecId, SnapshotId, WorkspaceId
from perdure.images.registry import ImageStore
from perdure.machines.driver import Accelerator
from perdure.machines.guestlink import GuestLink, WakeRequest
from perdure.machines.qemu import QemuDriver
from perdure.machines.qemu_machine import QemuMachine
from perdure.node.goldens import Goldens, Origin
from perdure.node.stillness import standing_still
from perdure.snapshots.capture import CaptureRequest, MachineRun, RunSpec
from perdure.snapshots.layers import checksum
from perdure.snapshots.start import begin
from perdure.snapshots.store import SnapshotStore
from perdure.wire.node import ExecExited, ExecOutput, ExecSpec, Identity, SnapshotFacts

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

NOW = datetime(2026, 1, 2, tzinfo=UTC)
ANSWER_S = 120.0
KEEPER = r"""
import os, random, select, signal, zlib
PAGE = 4096
block = bytearray(os.urandom(1024 * PAGE))
crcs = [zlib.crc32(block[i * PAGE:(i + 1) * PAGE]) for i in range(1024)]
file = open("/root/kept", "wb+")
file.write(block); file.flush(); os.fsync(file.fileno())
asked = False
def ask(*_):
    global asked
    asked = True
signal.signal(signal.SIGUSR1, ask)
open("/root/pid", "w").write(str(os.getpid()))
rounds = 0
while True:
    select.select([], [], [], 0.01)  # leave the emulated processor to others, too
    page, rounds = random.randrange(1024), rounds + 1
    new = bytes(PAGE) if rounds % 5 == 0 else os.urandom(PAGE)
    block[page * PAGE:(page + 1) * PAGE] = new
    crcs[page] = zlib.crc32(new)
    file.seek(page * PAGE); file.write(new); file.flush()
    if asked:
        asked = False
        good = all(zlib.crc32(block[i * PAGE:(i + 1) * PAGE]) == crcs[i] for i in range(1024))
        os.fsync(file.fileno())
        file.seek(0)
        same = file.read() == bytes(block)
        with open("/root/answer.new", "w") as out:
            out.write(f"{os.getpid()} {rounds} memory={good} file={same}")
        os.rename("/root/answer.new", "/root/answer")
"""


@dataclass
class Awake:
    run: MachineRun
    machine: QemuMachine
    link: GuestLink


@dataclass
class Node:
    store: SnapshotStore
    goldens: Goldens
    origin: Origin

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)

    def begin(self, source: SnapshotId | None, workspace: str, generation: int) -> MachineRun:
        origin = self.origin
        spec = RunSpec(
            workspace_id=WorkspaceId(workspace),
            tenant_id=DEFAULT_TENANT,
            generation=generation,
            image=origin.image.digest,
            size=origin.size,
            disk_gib=origin.image.disk_gib,
            base=self.goldens.base(origin, None if source is None else self.store.manifest(source)),
            fingerprint=origin.fingerprint,
            fingerprint_parts=origin.fingerprint_parts,
        )
        return begin(self.store, spec, source, memory=True, devices=origin.golden.devices)

    @asynccontextmanager
    async def awake(self, source: SnapshotId | None, workspace: str = "ws_one", generation: int = 1) -> AsyncIterator[Awake]:
        """A running machine; killed, and its run ended, afterwards."""
        run = self.begin(source, workspace, generation)
        machine = await self.goldens.driver.prepare(self.goldens.launch(self.origin, "test"))
        link = GuestLink(machine.connect, generation=generation, unresponsive_s=ANSWER_S)
        try:
            await run.restore(machine)
            await machine.resume()
            await link.open(ANSWER_S)
            identity = Identity(WorkspaceId(workspace), DEFAULT_TENANT, generation, "tester", f"{generation:032x}")
            await link.wake(WakeRequest(identity, new_identity=False))
            yield Awake(run, machine, link)
        finally:
            await link.close()
            await machine.kill()
            run.end()

    async def snapshot(self, awake: Awake, *, goes_on: bool) -> SnapshotFacts:
        name = SnapshotId(f"snp_{next(self._ids):026d}")
        await awake.run.ready(awake.machine, name, goes_on=goes_on)
        async with standing_still(awake.link) as still:
            await awake.machine.pause()
            captured = await awake.run.capture(awake.machine, CaptureRequest(name, NOW, still.frozen, goes_on))
            if goes_on:
                await awake.machine.resume()
            still.is_over = not goes_on
        return await asyncio.to_thread(awake.run.commit, captured, 0.0)


@pytest.fixture
async def node(base_image: Path, home: Path) -> AsyncIterator[Node]:
    images = ImageStore(base_image.parent.parent)
    image = images.load(base_image.name)
    store = SnapshotStore(home / "store")
    store.open()
    (home / "run").mkdir()
    goldens = Goldens(images, QemuDriver(), Accelerator.TCG, home / "run")
    yield Node(store, goldens, await goldens.origin(image.digest, image.default_size))
    store.close()


async def shell(awake: Awake, command: str) -> str:
    handle = await awake.link.start_exec(ExecSpec(ExecId(f"exe_{os.urandom(6).hex()}"), shell=command))
    output = bytearray()
    async for event in handle.events():
        if isinstance(event, ExecOutput):
            output += event.data
        elif isinstance(event, ExecExited):
            assert event.exit_code == 0, (command, event, output)
    return output.decode().strip()


async def keep(awake: Awake) -> int:
    """Start the program that keeps the block; returns its pid once it runs."""
    await shell(
        awake, f"nohup python3 -c {shlex.quote(KEEPER)} >/root/keeper.log 2>&1 & until [ -s /root/pid ]; do sleep 0.1; done"
    )
    return int(await shell(awake, "cat /root/pid"))


async def ask(awake: Awake, pid: int) -> int:
    """Let the program check itself; returns the rounds it has done."""
    command = f"rm -f /root/answer; kill -USR1 {pid}; until [ -s /root/answer ]; do kill -0 {pid} && sleep 0.1 || exit 1; done"
    await shell(awake, command)
    who, rounds, memory, file = (await shell(awake, "cat /root/answer")).split()
    assert (int(who), memory, file) == (pid, "memory=True", "file=True")
    return int(rounds)


@pytest.mark.long
async def test_memory_files_and_processes_survive_three_sleeps(node: Node) -> None:
    async with node.awake(None) as awake:
        pid = await keep(awake)
        rounds = await ask(awake, pid)
        facts = await node.snapshot(awake, goes_on=False)
    assert (facts.has_memory, facts.quiesced) == (True, True)
    assert facts.memory_total_bytes > 4 << 20
    for generation in (2, 3, 4):
        async with node.awake(facts.snapshot_id, generation=generation) as awake:
            later = await ask(awake, pid)
            assert later >= rounds
            rounds = later
            parent, facts = facts, await node.snapshot(awake, goes_on=False)
        assert facts.parent_id == parent.snapshot_id
        assert facts.memory_bytes < facts.memory_total_bytes, "what did not change was not written again"
        node.store.delete([parent.snapshot_id])
        node.store.verify(facts.snapshot_id, node.goldens.base(node.origin, None).ram)
    freed = node.store.delete([facts.snapshot_id])
    assert freed > facts.memory_total_bytes
    assert list(node.store.segments.iterdir()) == list(node.store.disks.iterdir()) == []


async def test_a_killed_machine_wakes_at_its_checkpoints_taken_under_load(node: Node) -> None:
    async with node.awake(None) as awake:
        pid = await keep(awake)
        checkpoints = []
        for step in range(3):
            await shell(awake, f"echo {step} > /root/step; dd if=/dev/urandom of=/root/noise{step} bs=1M count=2 2>/dev/null")
            checkpoints.append(await node.snapshot(awake, goes_on=True))
        await shell(awake, "echo late > /root/step; sync")
        await awake.machine.kill()
        awake.run.end(keep_layers=True)
        lost = node.store.salvage(WorkspaceId("ws_one"), 1, SnapshotId("snp_lost"), NOW)
    assert lost is not None
    assert (lost.has_memory, lost.parent_id) == (False, checkpoints[1].snapshot_id)
    for step, facts in enumerate(checkpoints):
        node.store.verify(facts.snapshot_id, node.goldens.base(node.origin, None).ram)
        async with node.awake(facts.snapshot_id, f"ws_{step}", 2) as awake:
            assert await shell(awake, "cat /root/step") == str(step)
            await ask(awake, pid)
    node.store.verify(SnapshotId("snp_lost"))


BUSY = (
    "while :; do for n in 1 5 9; do dd if=/dev/urandom of=/root/busy bs=4k seek=$((n * 17)) count=1 conv=notrunc,fsync; done;"
    " echo 1 > /proc/sys/vm/drop_caches; dd if=/root/more of=/dev/null bs=4k skip=3 count=5; done"
)


@pytest.mark.long
async def test_frozen_layers_do_not_change_and_a_deep_chain_is_collapsed(node: Node) -> None:
    async with node.awake(None) as awake:
        pid = await keep(awake)
        facts = [await node.snapshot(awake, goes_on=True) for _ in range(6)]
        frozen = {path: checksum(path) for path in node.store.disks.iterdir() if path.stem != awake.run.active_disk}
        # Small writes and reads past the page cache meet the stream at odd places: QEMU 7.2 died of that with other layers.
        await shell(awake, "dd if=/dev/urandom of=/root/more bs=1M count=3 2>/dev/null; sync")
        await shell(awake, f"({BUSY}) >/dev/null 2>&1 & echo $! > /root/busy.pid")
        await awake.run.collapse(awake.machine, 1)
        await shell(awake, "kill $(cat /root/busy.pid)")
        assert awake.run.layer_count == 2
        assert {path: checksum(path) for path in frozen} == frozen
        await ask(awake, pid)
        node.store.delete([f.snapshot_id for f in facts])
        last = await node.snapshot(awake, goes_on=False)
    assert len(node.store.manifest(last.snapshot_id).layers) == 2
    async with node.awake(last.snapshot_id, generation=2) as awake:
        await ask(awake, pid)


@pytest.mark.long
async def test_forks_run_side_by_side_on_shared_files(node: Node) -> None:
    async with node.awake(None) as awake:
        pid = await keep(awake)
        parent = await node.snapshot(awake, goes_on=False)
    async with node.awake(parent.snapshot_id, "ws_a", 2) as a, node.awake(parent.snapshot_id, "ws_b", 2) as b:
        await shell(a, "echo a > /root/mine")
        await shell(b, "echo b > /root/mine")
        assert await shell(a, "cat /root/mine") == "a"
        assert await shell(b, "cat /root/mine") == "b"
        await asyncio.gather(ask(a, pid), ask(b, pid))


async def test_a_hibernation_that_cannot_be_written_goes_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is killed only when its snapshot exists: here the commit is refused, and the guest has lost nothing."""
    async with node.awake(None) as awake:
        pid = await keep(awake)
        with monkeypatch.context() as patch:
            patch.setattr(node.store, "publish", _refuse)
            with pytest.raises(Conflict, match="refused"):
                await node.snapshot(awake, goes_on=False)
        await awake.machine.resume()
        await awake.link.thaw()
        await ask(awake, pid)
        facts = await node.snapshot(awake, goes_on=False)
    async with node.awake(facts.snapshot_id, generation=2) as awake:
        await ask(awake, pid)


def _refuse(manifest: object) -> None:
    raise Conflict("refused")
