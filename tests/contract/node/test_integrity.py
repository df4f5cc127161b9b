"""What every node does with damage and with snapshots of another machine, and what is left of a trial: nothing."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from perdure.core.errors import CorruptSnapshot
from perdure.core.ids import ExecId, SnapshotId
from perdure.wire.node import (
    CaptureMode,
    Checking,
    ExecSpec,
    FromDisk,
    FromSnapshot,
    MemoryFate,
    SnapshotFacts,
    TrialKind,
    Verdict,
)
from tests.contract.node.benches import Bench

CHECKPOINT, HIBERNATE = CaptureMode.CHECKPOINT, CaptureMode.HIBERNATE


async def two_snapshots(bench: Bench) -> tuple[str, SnapshotFacts, SnapshotFacts]:
    """A sleeping workspace with a file, and a parent of its head from a wake before."""
    workspace, _ = await bench.begin()
    await bench.write(workspace, 1, "/root/file", b"first")
    first = await bench.capture(workspace, 1, HIBERNATE)
    await bench.begin(workspace, generation=2, source=FromSnapshot(first.snapshot_id))
    await bench.write(workspace, 2, "/root/file", b"second")
    return workspace, first, await bench.capture(workspace, 2, HIBERNATE)


async def verify(bench: Bench, *snapshot_ids: SnapshotId, trial: bool = False) -> list[Verdict]:
    verdicts: list[Verdict] = []
    heard: set[SnapshotId] = set()
    async with aclosing(bench.node.verify(snapshot_ids, trial=trial)) as events:
        async for event in events:
            if isinstance(event, Checking):
                assert event.read_bytes > 0 and event.file
                heard.add(event.snapshot_id)
            else:
                assert event.missing or event.snapshot_id in heard, "there is progress before a verdict"
                verdicts.append(event)
    assert [verdict.snapshot_id for verdict in verdicts] == list(snapshot_ids)
    return verdicts


async def test_damaged_pages_are_named_and_nothing_is_left_running(bench: Bench) -> None:
    workspace, first, second = await two_snapshots(bench)
    file = bench.world.damage(second.snapshot_id)
    with pytest.raises(CorruptSnapshot) as caught:
        await bench.begin(workspace, generation=3, source=FromSnapshot(second.snapshot_id))
    assert caught.value.file == file
    with pytest.raises(CorruptSnapshot):
        await bench.node.snapshot(second.snapshot_id)
    assert (await bench.node.inventory()).machines == ()
    one, two = await verify(bench, first.snapshot_id, second.snapshot_id)
    assert one == Verdict(first.snapshot_id)
    assert ([damage.file for damage in two.damage], two.disk_intact, two.intact) == ([file], True, False)
    _, report = await bench.begin(workspace, generation=4, source=FromSnapshot(first.snapshot_id))
    assert report.memory is MemoryFate.KEPT
    assert await bench.read(bench.node.guest(workspace, 4), "/root/file") == b"first"


async def test_a_damaged_disk_is_found_by_verifying_and_a_missing_snapshot_is_said_to_be(bench: Bench) -> None:
    _, first, second = await two_snapshots(bench)
    file = bench.world.damage(second.snapshot_id, disk=True)
    gone = bench.snapshot_id()
    one, two, three = await verify(bench, second.snapshot_id, gone, first.snapshot_id, trial=False)
    assert ([damage.file for damage in one.damage], one.disk_intact) == ([file], False)
    assert (two.missing, two.intact) == (True, False)
    assert three.intact


async def test_a_damaged_disk_is_found_before_a_guest_runs_on_it(bench: Bench) -> None:
    """By a wake, a fork and a boot of the disk; the snapshot before it wakes."""
    workspace, first, second = await two_snapshots(bench)
    file = bench.world.damage(second.snapshot_id, disk=True)
    others = (bench.workspace_id(), bench.workspace_id())
    for who, generation, source in (
        (workspace, 3, FromSnapshot(second.snapshot_id)),
        (others[0], 1, FromSnapshot(second.snapshot_id)),
        (others[1], 1, FromDisk(second.snapshot_id, "requested")),
    ):
        with pytest.raises(CorruptSnapshot) as caught:
            await bench.begin(who, generation=generation, source=source)
        assert caught.value.file == file
        assert (await bench.node.inventory()).machines == ()
    _, report = await bench.begin(workspace, generation=4, source=FromSnapshot(first.snapshot_id))
    assert report.memory is MemoryFate.KEPT
    assert await bench.read(bench.node.guest(workspace, 4), "/root/file") == b"first"


@pytest.mark.long_on("real")
async def test_a_damaged_disk_boots_when_somebody_wants_it_as_it_is(bench: Bench) -> None:
    """The last way to files; what is made of it is no more whole than before."""
    workspace, _, second = await two_snapshots(bench)
    file = bench.world.damage(second.snapshot_id, disk=True)
    _, report = await bench.begin(workspace, generation=3, source=FromDisk(second.snapshot_id, "requested", checked=False))
    assert report.memory is MemoryFate.LOST
    await bench.write(workspace, 3, "/root/more", b"saved")
    third = await bench.capture(workspace, 3, HIBERNATE)
    with pytest.raises(CorruptSnapshot) as caught:
        await bench.begin(workspace, generation=4, source=FromSnapshot(third.snapshot_id))
    assert caught.value.file == file


async def test_a_trial_wakes_a_snapshot_and_leaves_nothing(bench: Bench) -> None:
    workspace, first, second = await two_snapshots(bench)
    before = await bench.node.inventory()
    bench.world.damage(second.snapshot_id)
    one, two = await verify(bench, first.snapshot_id, second.snapshot_id, trial=True)
    assert one.intact and one.trial is not None
    assert (one.trial.kind, one.trial.reason, one.trial.problem) == (TrialKind.MEMORY, "", "")
    assert two.trial is None, "what is damaged is not started"
    after = await bench.node.inventory()
    assert (after.machines, after.snapshots) == ((), before.snapshots)
    _, report = await bench.begin(workspace, generation=3, source=FromSnapshot(first.snapshot_id))
    assert report.memory is MemoryFate.KEPT


@pytest.mark.long_on("real")
async def test_a_trial_of_a_running_workspaces_checkpoint_does_not_touch_it(bench: Bench) -> None:
    workspace, _ = await bench.begin()
    await bench.node.guest(workspace, 1).start_exec(ExecSpec(ExecId("exe_1"), argv=bench.world.forever))
    facts = await bench.capture(workspace, 1, CHECKPOINT)
    (verdict,) = await verify(bench, facts.snapshot_id, trial=True)
    assert verdict.intact and verdict.trial is not None
    assert [(machine.generation, machine.alive) for machine in (await bench.node.inventory()).machines] == [(1, True)]
    assert [info.exec_id for info in await bench.node.guest(workspace, 1).list_execs() if info.exited is None] == ["exe_1"]


@pytest.mark.long_on("real")
async def test_a_snapshot_of_another_machine_boots_from_its_disk_and_says_why(bench: Bench) -> None:
    workspace, _, second = await two_snapshots(bench)
    others = {"vmm": "6.0.0-old", "kernel": "0" * 16, "agent_protocol": "0", "arguments": "1" * 16}
    bench.world.estrange(second.snapshot_id, **others)
    (verdict,) = await verify(bench, second.snapshot_id, trial=True)
    assert verdict.intact and verdict.trial is not None
    assert verdict.trial.kind is TrialKind.DISK
    _, report = await bench.begin(workspace, generation=3, source=FromSnapshot(second.snapshot_id))
    assert report.memory is MemoryFate.LOST
    assert report.memory_reason == verdict.trial.reason
    assert report.memory_reason.startswith("fingerprint: ")
    for name, value in others.items():
        assert f"{name}: {value} is now " in report.memory_reason
    assert report.execs_running == ()
    assert await bench.read(bench.node.guest(workspace, 3), "/root/file") == b"second"
    # From here on it is this machine's: the next sleep keeps its memory.
    third = await bench.capture(workspace, 3, HIBERNATE)
    _, report = await bench.begin(workspace, generation=4, source=FromSnapshot(third.snapshot_id))
    assert (report.memory, report.memory_reason) == (MemoryFate.KEPT, "")
    assert await bench.read(bench.node.guest(workspace, 4), "/root/file") == b"second"


@pytest.mark.long_on("real")
async def test_damaged_memory_does_not_keep_a_disk_from_booting(bench: Bench) -> None:
    workspace, _, second = await two_snapshots(bench)
    bench.world.damage(second.snapshot_id)
    _, report = await bench.begin(workspace, generation=3, source=FromDisk(second.snapshot_id, "requested"))
    assert report.memory is MemoryFate.LOST
    assert await bench.read(bench.node.guest(workspace, 3), "/root/file") == b"second"


@pytest.mark.long_on("real")
async def test_a_verification_that_nobody_waits_for_ends(bench: Bench) -> None:
    _, first, second = await two_snapshots(bench)
    async with aclosing(bench.node.verify((first.snapshot_id, second.snapshot_id), trial=True)) as events:
        async for _ in events:
            break
    assert (await bench.node.inventory()).machines == ()
    assert [verdict.intact for verdict in await verify(bench, first.snapshot_id, second.snapshot_id)] == [True, True]
