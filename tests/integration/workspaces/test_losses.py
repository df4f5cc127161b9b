"""What happens by itself: idle timers, machines that die, guests that reboot, servers that are killed."""

from __future__ import annotations

import asyncio

import pytest

from perdure.core.errors import MachineDied, NoSpace, StaleGeneration, Unavailable
from perdure.core.ids import ExecId, SnapshotId
from perdure.wire.node import Activity, CaptureMode, CaptureSpec, ExecSpec, MemoryFate
from perdure.workspaces.lifecycle import Event
from perdure.workspaces.model import DiskFate, SnapshotReason, Workspace, WorkspaceKind, WorkspaceState
from perdure.workspaces.store import WorkspaceStore
from tests.fakes.control_plane import CTX, ControlPlane

HIBERNATED, RUNNING, FAILED = WorkspaceState.HIBERNATED, WorkspaceState.RUNNING, WorkspaceState.FAILED


def is_state(state: WorkspaceState):  # type: ignore[no-untyped-def]
    return lambda workspace: workspace.state is state


async def only_lost(plane: ControlPlane) -> Workspace:
    lost = [found for found in await plane.service.find(CTX) if found.kind is WorkspaceKind.LOST]
    assert len(lost) == 1, [found.name for found in lost]
    return lost[0]


# -------------------------------------------------------------------------------------------------------------------- timers


async def test_idle_sleeps_after_its_timeout_and_not_before(plane: ControlPlane) -> None:
    await plane.create(idle_timeout_s=100.0, checkpoint_interval_s=0.0)
    plane.clock.advance(99)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    assert await plane.state("demo") is RUNNING
    plane.clock.advance(2)
    await plane.service.upkeep.tick()
    await plane.until("demo", is_state(HIBERNATED))
    entry = next(entry for entry in await plane.service.log(CTX, "demo") if entry.kind == "hibernating")
    assert entry.body["cause"] == "idle"


async def test_whoever_is_inside_keeps_it_awake(plane: ControlPlane) -> None:
    await plane.create(idle_timeout_s=100.0, checkpoint_interval_s=0.0)
    async with plane.service.awake(CTX, "demo"):
        plane.clock.advance(1000)
        await plane.service.upkeep.tick()
        assert await plane.state("demo") is RUNNING
    plane.clock.advance(99)
    await plane.service.upkeep.tick()
    assert await plane.state("demo") is RUNNING, "the timer begins when the last one leaves"
    plane.clock.advance(2)
    await plane.service.upkeep.tick()
    await plane.until("demo", is_state(HIBERNATED))


async def test_a_running_command_keeps_it_awake_watched_or_not(plane: ControlPlane) -> None:
    await plane.create(idle_timeout_s=100.0, checkpoint_interval_s=0.0)
    async with plane.service.awake(CTX, "demo") as awake:
        handle = await awake.guest.start_exec(ExecSpec(ExecId("exe_1"), argv=("hang",)))
    plane.clock.advance(1000)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    assert await plane.state("demo") is RUNNING
    await handle.close()
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    assert await plane.state("demo") is RUNNING
    async with plane.service.awake(CTX, "demo") as awake:
        await awake.guest.kill_exec(ExecId("exe_1"))
    plane.clock.advance(1000)
    await plane.service.upkeep.tick()
    await plane.until("demo", is_state(HIBERNATED))


async def test_keep_awake_and_its_end(plane: ControlPlane) -> None:
    await plane.create(idle_timeout_s=100.0, checkpoint_interval_s=0.0)
    await plane.service.keep_awake(CTX, "demo", 5000)
    plane.clock.advance(4999)
    await plane.service.upkeep.tick()
    assert await plane.state("demo") is RUNNING
    plane.clock.advance(2)
    await plane.service.upkeep.tick()
    await plane.until("demo", is_state(HIBERNATED))


async def test_automatic_checkpoints_while_changed_and_their_retention(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(idle_timeout_s=0.0)
    for number in range(4):
        await plane.write("demo", "/file", b"%d" % number)
        plane.clock.advance(61)
        await plane.service.upkeep.tick()
        await plane.service.upkeep.drain()
    await plane.service.upkeep.clean()
    plane.node.busy[workspace.id] = Activity(0, 0, 0, 0.0, changed=False)
    plane.clock.advance(1000)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    snapshots = await plane.service.snapshots(CTX, "demo")
    assert [snapshot.reason for snapshot in snapshots] == [SnapshotReason.AUTOMATIC] * 2
    assert plane.node.calls.count("capture") == 4, "nothing changed, nothing captured"
    assert set(plane.node.stored) == {snapshot.id for snapshot in snapshots}
    assert await plane.state("demo") is RUNNING, "an idle timeout of 0 is never"


# -------------------------------------------------------------------------------------------------------------------- losses


async def test_a_dead_machine_goes_back_to_its_last_snapshot_and_says_so(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.write("demo", "/file", b"old")
    checkpoint = await plane.service.checkpoint(CTX, "demo")
    await plane.write("demo", "/file", b"new")
    plane.node.die(workspace.id)
    asleep = await plane.until("demo", is_state(HIBERNATED))
    lost = await only_lost(plane)
    assert lost.name.startswith("demo@lost-20261129t120000z")
    assert lost.name in asleep.state_detail
    assert "ended by itself" in asleep.state_detail
    async with plane.service.awake(CTX, "demo") as awake:
        report = awake.report
    assert report is not None
    assert (report.disk, report.lost_branch, report.snapshot_id) == (DiskFate.REWOUND, lost.name, checkpoint.id)
    assert report.memory is MemoryFate.KEPT
    assert report.memory_reason.startswith("rewound: Its machine ended")
    assert await plane.read("demo", "/file") == b"old"
    assert await plane.read(lost.name, "/file") == b"new"
    branch_report = await plane.service.report(CTX, lost.name)
    assert branch_report is not None
    assert (branch_report.memory, branch_report.memory_reason) == (MemoryFate.LOST, "no-memory-in-snapshot")
    assert await plane.read(lost.name, "/etc-machine-id") != await plane.read("demo", "/etc-machine-id")
    await plane.service.sleep(CTX, "demo")
    _, after = await plane.service.wake(CTX, "demo")
    assert (after.disk, after.lost_branch) == (DiskFate.KEPT, None), "what was told is not told again"


async def test_lost_before_the_first_snapshot(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.write("demo", "/file", b"new")
    plane.node.die(workspace.id)
    await plane.until("demo", is_state(HIBERNATED))
    _, report = await plane.service.wake(CTX, "demo")
    assert (report.memory, report.disk) == (MemoryFate.LOST, DiskFate.REWOUND)
    assert report.memory_reason == "lost before its first snapshot"
    assert await plane.read((await only_lost(plane)).name, "/file") == b"new"


async def test_a_lost_branch_expires(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.write("demo", "/file", b"new")
    plane.node.die(workspace.id)
    await plane.until("demo", is_state(HIBERNATED))
    lost = await only_lost(plane)
    plane.database.shift_clock(6.9 * 86400)
    await plane.service.upkeep.clean()
    assert await plane.service.get(CTX, lost.name)
    plane.database.shift_clock(0.2 * 86400)
    await plane.service.upkeep.clean()
    assert [found.name for found in await plane.service.find(CTX)] == ["demo"]
    assert plane.node.stored == {}


async def test_a_guest_reboot_is_a_disk_boot_of_the_newest_disk(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.service.checkpoint(CTX, "demo")
    await plane.write("demo", "/file", b"new")
    await plane.service.resize(CTX, "demo", 16)
    plane.node.reboot(workspace.id)
    again = await plane.until("demo", lambda found: found.generation == 2 and found.state is RUNNING)
    report = await plane.service.report(CTX, "demo")
    assert report is not None
    assert (report.memory, report.memory_reason, report.disk) == (MemoryFate.LOST, "guest-reboot", DiskFate.KEPT)
    assert await plane.read("demo", "/file") == b"new"
    assert plane.node.machines[again.id].spec.disk_gib == 16
    assert len(await plane.service.find(CTX)) == 1


async def test_a_reboot_that_does_not_come_up_keeps_the_disk_as_a_branch(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.service.checkpoint(CTX, "demo")
    await plane.write("demo", "/file", b"new")
    plane.node.fail("start", NoSpace("No room."))
    plane.node.reboot(workspace.id)
    await plane.until("demo", is_state(HIBERNATED))
    assert await plane.read((await only_lost(plane)).name, "/file") == b"new"


async def test_a_power_off_keeps_the_disk_as_the_head(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.service.checkpoint(CTX, "demo")
    await plane.write("demo", "/file", b"new")
    plane.node.power_off(workspace.id)
    await plane.until("demo", is_state(HIBERNATED))
    _, report = await plane.service.wake(CTX, "demo")
    assert (report.memory, report.disk, report.lost_branch) == (MemoryFate.LOST, DiskFate.KEPT, None)
    assert await plane.read("demo", "/file") == b"new"
    assert len(await plane.service.find(CTX)) == 1


async def test_a_panic_is_a_loss(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.service.checkpoint(CTX, "demo")
    plane.node.panic(workspace.id)
    asleep = await plane.until("demo", is_state(HIBERNATED))
    assert "panicked" in asleep.state_detail
    _, report = await plane.service.wake(CTX, "demo")
    assert (report.disk, report.lost_branch) == (DiskFate.KEPT, None), "its disk held nothing newer"


async def test_a_guest_that_does_not_answer_is_failed_with_exits(plane: ControlPlane) -> None:
    from perdure.workspaces.model import Recovery

    workspace, _ = await plane.create()
    await plane.service.checkpoint(CTX, "demo")
    await plane.write("demo", "/file", b"new")
    plane.node.hang(workspace.id)
    failed = await plane.until("demo", is_state(FAILED))
    assert "did not answer for 20 s" in failed.state_detail
    assert plane.node.machines == {}, "its machine is gone"
    _, report = await plane.service.recover(CTX, "demo", Recovery.RETRY)
    assert report.lost_branch == (await only_lost(plane)).name


async def test_a_full_disk_is_said_while_it_lasts(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    plane.node.fill_disk(workspace.id, full=True)
    await plane.until("demo", lambda found: "full" in found.state_detail)
    plane.node.fill_disk(workspace.id, full=False)
    await plane.until("demo", lambda found: not found.state_detail)


async def test_a_machine_that_dies_going_to_sleep(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.write("demo", "/file", b"new")
    plane.node.fail("capture", MachineDied("Killed."))
    plane.node.machines[workspace.id].end()
    with pytest.raises(MachineDied):
        await plane.service.sleep(CTX, "demo")
    assert await plane.state("demo") is HIBERNATED
    assert await plane.read((await only_lost(plane)).name, "/file") == b"new"


# ------------------------------------------------------------------------------------------------------------------ restarts


async def test_sigkill_of_the_server_keeps_what_was_fsynced(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.checkpoint(CTX, "demo")
    await plane.write("demo", "/file", b"synced")
    await plane.crash()
    await plane.restart()
    assert await plane.state("demo") is HIBERNATED
    lost = await only_lost(plane)
    assert await plane.read(lost.name, "/file") == b"synced"
    _, report = await plane.service.wake(CTX, "demo")
    assert report.lost_branch == lost.name


async def test_a_control_plane_alone_that_restarts_adopts_what_is_awake(plane: ControlPlane) -> None:
    await plane.create()
    async with plane.service.awake(CTX, "demo") as awake:
        await awake.guest.start_exec(ExecSpec(ExecId("exe_1"), argv=("hang",)))
    await plane.crash(node_too=False)
    await plane.restart()
    async with plane.service.awake(CTX, "demo") as awake:
        assert awake.report is None, "it never slept"
        assert awake.workspace.generation == 1
        assert len(await awake.guest.list_execs()) == 1


async def test_a_create_that_was_interrupted_is_gone(plane: ControlPlane) -> None:
    plane.node.gate = asyncio.Event()
    task = asyncio.create_task(plane.create())
    await plane.node.entered.wait()
    await plane.crash()
    with pytest.raises((asyncio.CancelledError, StaleGeneration)):
        await task
    plane.node.gate = None
    await plane.restart()
    assert await plane.service.find(CTX) == []
    await plane.create()


async def test_a_hibernation_whose_snapshot_is_complete_rolls_forward(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.write("demo", "/file", b"kept")
    store = WorkspaceStore(plane.database)
    at = await store.by_id(workspace.id)
    snapshot_id = SnapshotId(plane.minted("snp"))
    await store.intend(at, snapshot_id, SnapshotReason.HIBERNATE)
    await store.move(at, Event.HIBERNATE)
    await plane.node.capture(CaptureSpec(workspace.id, 1, snapshot_id, CaptureMode.HIBERNATE))
    await plane.crash()
    await plane.restart()
    asleep = await plane.service.get(CTX, "demo")
    assert (asleep.state, asleep.head_snapshot_id) == (HIBERNATED, snapshot_id)
    assert await plane.read("demo", "/file") == b"kept"
    assert len(await plane.service.find(CTX)) == 1, "nothing was lost, so there is no lost branch"


async def test_a_checkpoint_that_finished_unseen_is_adopted(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.write("demo", "/file", b"captured")
    store = WorkspaceStore(plane.database)
    at = await store.by_id(workspace.id)
    snapshot_id = SnapshotId(plane.minted("snp"))
    await store.intend(at, snapshot_id, SnapshotReason.AUTOMATIC)
    await plane.node.capture(CaptureSpec(workspace.id, 1, snapshot_id, CaptureMode.CHECKPOINT))
    await plane.crash()
    await plane.restart()
    assert (await plane.service.get(CTX, "demo")).head_snapshot_id == snapshot_id
    assert await plane.read("demo", "/file") == b"captured"


async def test_what_no_row_names_is_removed(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    stranger = SnapshotId(plane.minted("snp"))
    await plane.node.capture(CaptureSpec(workspace.id, 1, stranger, CaptureMode.CHECKPOINT))
    store = WorkspaceStore(plane.database)
    intended = SnapshotId(plane.minted("snp"))
    await store.intend(await store.by_id(workspace.id), intended, SnapshotReason.AUTOMATIC)
    await plane.service.upkeep.reconcile()
    assert stranger not in plane.node.stored
    assert await store.unfinished(workspace.id) == [], "a pending row without files is removed"
    assert await plane.state("demo") is RUNNING


async def test_a_machine_of_a_deleted_workspace_is_stopped(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    plane.node.fail("stop", Unavailable("Not now."))
    await plane.service.delete(CTX, "demo")
    assert workspace.id in plane.node.machines
    await plane.service.upkeep.reconcile()
    assert plane.node.machines == {}


async def test_a_head_whose_files_are_gone_is_failed_and_said(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    plane.node.stored.clear()
    await plane.service.upkeep.reconcile()
    failed = await plane.service.get(CTX, "demo")
    assert failed.state is FAILED
    assert "are missing or cannot be read" in failed.state_detail
    await plane.service.delete(CTX, "demo")


async def test_an_event_that_was_missed_is_found_by_the_timer(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    plane.node.machines[workspace.id].end()  # nobody tells
    await plane.service.upkeep.reconcile()
    assert await plane.state("demo") is HIBERNATED


async def test_reconciling_twice_changes_nothing(plane: ControlPlane) -> None:
    await plane.create()
    await plane.create("other")
    await plane.write("other", "/file", b"x")
    await plane.service.sleep(CTX, "demo")
    await plane.crash()
    await plane.restart()
    before = await plane.service.find(CTX)
    journal = [len(await plane.service.log(CTX, found.id)) for found in before]
    await plane.service.upkeep.reconcile()
    await plane.service.upkeep.reconcile()
    assert await plane.service.find(CTX) == before
    assert [len(await plane.service.log(CTX, found.id)) for found in before] == journal


async def test_a_slow_guest_of_ours_is_not_taken_for_a_lost_one(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    store = WorkspaceStore(plane.database)
    await store.intend(await store.by_id(workspace.id), SnapshotId(plane.minted("snp")), SnapshotReason.AUTOMATIC)

    async def silent() -> float:
        raise MachineDied("No answer.")

    plane.node.machines[workspace.id].guest.ping = silent  # type: ignore[method-assign]
    await plane.service.upkeep.reconcile()
    assert await plane.state("demo") is RUNNING
    assert workspace.id in plane.node.machines
