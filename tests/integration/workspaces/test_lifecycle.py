"""The main road: create, sleep, wake, checkpoint, fork, recover, delete."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from perdure.core.errors import (
    AlreadyExists,
    Busy,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    MachineDied,
    NoSpace,
    NotFound,
    PerdureError,
    RestoreFailed,
    StaleGeneration,
)
from perdure.core.ids import ExecId
from perdure.journal.entries import Journal
from perdure.wire.node import Activity, ExecSpec, MemoryFate
from perdure.workspaces.model import CreateWorkspace, DiskFate, Recovery, SnapshotReason, Wanted, WorkspaceKind, WorkspaceState
from tests.fakes.control_plane import CTX, OTHER, ControlPlane


async def test_create_returns_awake_with_a_report(plane: ControlPlane) -> None:
    workspace, report = await plane.create(metadata={"user": "u1"})
    assert workspace.state is WorkspaceState.RUNNING
    assert workspace.generation == report.generation == 1
    assert (report.memory, report.disk) == (MemoryFate.NEW, DiskFate.NEW)
    assert workspace.environment == {"LANG": "C.UTF-8"}
    assert [entry.kind for entry in await plane.service.log(CTX, "demo")] == ["creating", "running"]
    assert [found.name for found in await plane.service.find(CTX, Wanted(metadata={"user": "u1"}))] == ["demo"]
    assert await plane.service.find(CTX, Wanted(metadata={"user": "u2"})) == []


async def test_sleep_and_wake_keep_memory_and_disk(plane: ControlPlane) -> None:
    await plane.create()
    await plane.write("demo", "/file", b"kept")
    async with plane.service.awake(CTX, "demo") as awake:
        assert awake.report is None, "this call woke nothing"
        await awake.guest.start_exec(ExecSpec(ExecId("exe_1"), argv=("hang",)))
    asleep, snapshot = await plane.service.sleep(CTX, "demo")
    assert asleep.state is WorkspaceState.HIBERNATED
    assert asleep.head_snapshot_id == snapshot.id
    assert snapshot.reason is SnapshotReason.HIBERNATE
    assert plane.node.machines == {}, "asleep there is no machine"
    async with plane.service.awake(CTX, "demo") as awake:
        assert awake.report is not None
        assert awake.report.memory is MemoryFate.KEPT
        assert awake.report.disk is DiskFate.KEPT
        assert awake.report.snapshot_id == snapshot.id
        assert awake.report.execs_running == ("exe_1",)
        assert awake.workspace.generation == 2
    assert await plane.read("demo", "/file") == b"kept"
    assert (await plane.service.report(CTX, "demo")).generation == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("failure", [NoSpace("The disk is full."), RestoreFailed("It would not load."), MachineDied("It died.")])
async def test_a_wake_that_failed_does_not_shorten_the_sleep(plane: ControlPlane, failure: PerdureError) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    plane.database.shift_clock(1000)
    plane.node.fail("start", failure, failure)
    for how in (Recovery.RETRY, Recovery.DISK_BOOT):
        with pytest.raises(type(failure)):
            await plane.service.recover(CTX, "demo", how)
        plane.database.shift_clock(1000)
    _, report = await plane.service.recover(CTX, "demo", Recovery.DISK_BOOT)
    assert report.asleep_s >= 3000
    await plane.service.sleep(CTX, "demo")
    _, report = await plane.service.wake(CTX, "demo")
    assert report.asleep_s < 1000, "the next sleep is counted from its own beginning"


async def test_a_branch_that_began_asleep_sleeps_since_then(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.checkpoint(CTX, "demo", name="early")
    await plane.write("demo", "/file", b"late")
    _, report = await plane.service.rewind(CTX, "demo", "early")
    assert report.kept_branch is not None
    plane.database.shift_clock(1000)
    plane.node.fail("start", NoSpace("The disk is full."))
    with pytest.raises(NoSpace):
        await plane.service.wake(CTX, report.kept_branch)
    _, report = await plane.service.wake(CTX, report.kept_branch)
    assert report.asleep_s >= 1000


async def test_a_sleeping_one_that_is_told_to_sleep_returns_its_head(plane: ControlPlane) -> None:
    await plane.create()
    _, first = await plane.service.sleep(CTX, "demo")
    _, second = await plane.service.sleep(CTX, "demo")
    assert first == second


async def test_many_callers_cause_one_wake(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    plane.node.calls.clear()
    results = await asyncio.gather(*(plane.service.wake(CTX, "demo") for _ in range(100)))
    assert plane.node.calls.count("start") == 1
    assert {report.generation for _, report in results} == {2}
    _, again = await plane.service.wake(CTX, "demo")
    assert again == results[0][1], "an awake one returns its last report"


async def test_a_caller_waits_no_longer_than_its_deadline_and_the_wake_goes_on(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    plane.node.gate = asyncio.Event()
    with pytest.raises(DeadlineExceeded, match="was not awake after"):
        await plane.service.wake(CTX, "demo", deadline_s=0.05)
    patient = asyncio.create_task(plane.service.wake(CTX, "demo"))
    plane.node.gate.set()
    workspace, report = await patient
    assert (workspace.state, report.generation) == (WorkspaceState.RUNNING, 2)


async def test_a_caller_that_goes_away_does_not_stop_the_create(plane: ControlPlane) -> None:
    plane.node.gate = asyncio.Event()
    task = asyncio.create_task(plane.create())
    await plane.node.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    plane.node.gate.set()
    await plane.until("demo", lambda workspace: workspace.state is WorkspaceState.RUNNING)


async def test_an_inbox_has_a_limit(plane: ControlPlane) -> None:
    await plane.create()
    results = await asyncio.gather(*(plane.service.keep_awake(CTX, "demo", 1) for _ in range(80)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, BaseException)]
    assert refused
    assert all(isinstance(error, Busy) and error.retryable for error in refused)
    assert (await plane.service.get(CTX, "demo")).keep_awake_until is not None


async def test_checkpoint_keeps_named_ones_and_wakes_a_sleeper(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    named = await plane.service.checkpoint(CTX, "demo", name="before-upgrade")
    assert named.name == "before-upgrade"
    with pytest.raises(AlreadyExists, match="before-upgrade"):
        await plane.service.checkpoint(CTX, "demo", name="before-upgrade")
    for _ in range(3):
        await plane.service.sleep(CTX, "demo")
        await plane.service.wake(CTX, "demo")
    await plane.service.upkeep.clean()
    kept = await plane.service.snapshots(CTX, "demo")
    assert [snapshot.reason for snapshot in kept] == [SnapshotReason.REQUESTED, SnapshotReason.HIBERNATE]
    assert set(plane.node.stored) == {snapshot.id for snapshot in kept}, "superseded snapshots leave the node"


async def test_falling_asleep_drops_automatic_checkpoints_and_keeps_what_somebody_asked_for(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(idle_timeout_s=0.0, checkpoint_interval_s=60.0)
    plane.node.busy[workspace.id] = Activity(1, 0, 0, 0.0, changed=True)

    async def checkpoint_by_itself() -> None:
        plane.clock.advance(61)
        await plane.service.upkeep.tick()
        await plane.service.upkeep.drain()

    asked = await plane.service.checkpoint(CTX, "demo")
    await checkpoint_by_itself()
    forked_from = (await plane.service.get(CTX, "demo")).head_snapshot_id
    await plane.service.fork(CTX, "demo", 1, snapshot=forked_from, names=("child",))
    for _ in range(3):
        await checkpoint_by_itself()
    awake = [snapshot.reason for snapshot in await plane.service.snapshots(CTX, "demo")]
    assert awake == [SnapshotReason.REQUESTED, *[SnapshotReason.AUTOMATIC] * 3], "two by retention, one as a branch's origin"
    _, head = await plane.service.sleep(CTX, "demo")
    await plane.service.upkeep.clean()
    kept = [snapshot.id for snapshot in await plane.service.snapshots(CTX, "demo")]
    assert kept == [asked.id, forked_from, head.id]
    assert {key for key, stored in plane.node.stored.items() if stored.facts.workspace_id == workspace.id} == set(kept)
    await plane.service.wake(CTX, "demo")


async def test_fork_makes_branches_with_identities_of_their_own(plane: ControlPlane) -> None:
    parent, _ = await plane.create()
    await plane.write("demo", "/file", b"before")
    children = await plane.service.fork(CTX, "demo", 3)
    assert [child.name for child in children if not isinstance(child, PerdureError)] == ["demo-1", "demo-2", "demo-3"]
    assert plane.node.most_starting <= 2, "parallel_starts bounds the starts"
    await plane.write("demo-1", "/file", b"one")
    assert await plane.read("demo-1", "/file") == b"one"
    assert await plane.read("demo-2", "/file") == b"before"
    assert await plane.read("demo", "/file") == b"before"
    ids = {await plane.read(name, "/etc-machine-id") for name in ("demo", "demo-1", "demo-2", "demo-3")}
    assert len(ids) == 4
    branch = await plane.service.get(CTX, "demo-2")
    assert (branch.kind, branch.parent_id) == (WorkspaceKind.BRANCH, parent.id)
    await plane.service.sleep(CTX, "demo-2")
    assert await plane.read("demo-2", "/etc-machine-id") in ids, "waking keeps the identity"


async def test_a_branch_outlives_its_parent(plane: ControlPlane) -> None:
    await plane.create()
    await plane.write("demo", "/file", b"x")
    await plane.service.fork(CTX, "demo", 1, names=("child",))
    plane.node.die((await plane.service.get(CTX, "child")).id)
    await plane.until("child", lambda child: child.state is WorkspaceState.HIBERNATED)
    await plane.service.delete(CTX, "demo")
    await plane.service.upkeep.clean()
    assert len(plane.node.stored) == 1, "the snapshot it was forked from is still its head"
    assert await plane.read("child", "/file") == b"x"
    await plane.service.sleep(CTX, "child")
    await plane.service.upkeep.clean()
    assert [stored.facts.workspace_id for stored in plane.node.stored.values()] == [(await plane.service.get(CTX, "child")).id], (
        "once it has a snapshot of its own the parent's goes"
    )


async def test_a_branch_that_fails_does_not_fail_the_others(plane: ControlPlane) -> None:
    await plane.create()
    plane.node.fail("start", RestoreFailed("It would not load."))
    outcomes = await plane.service.fork(CTX, "demo", 3)
    failed = [outcome for outcome in outcomes if isinstance(outcome, PerdureError)]
    assert [error.code for error in failed] == ["restore_failed"]
    assert len(await plane.service.find(CTX)) == 3, "the parent and two branches; the failed one freed its name"
    forked, told = (await plane.service.log(CTX, "demo"))[-2:]
    assert (forked.kind, told.kind) == ("forked", "fork-failed")
    assert told.body["branch"] in forked.body["branches"]
    assert told.body["branch"] not in {found.name for found in await plane.service.find(CTX)}
    assert told.body["detail"] == "It was not created: It would not load."


async def test_a_fork_that_a_crash_cut_off_is_told_too(plane: ControlPlane) -> None:
    await plane.create()
    plane.node.gate = asyncio.Event()
    plane.node.entered.clear()
    forking = asyncio.create_task(plane.service.fork(CTX, "demo", 1, names=("child",)))
    await plane.node.entered.wait()
    await plane.crash()
    forking.cancel()
    await asyncio.gather(forking, return_exceptions=True)
    await plane.restart()
    told = [entry.body for entry in await plane.service.log(CTX, "demo") if entry.kind == "fork-failed"]
    assert [(body["branch"], body["detail"]) for body in told] == [("child", "Its creation was interrupted.")]
    await plane.restart()
    assert len([entry for entry in await plane.service.log(CTX, "demo") if entry.kind == "fork-failed"]) == 1


async def test_fork_refuses_a_snapshot_of_moving_programs(plane: ControlPlane) -> None:
    await plane.create()
    plane.node.is_quiet = False
    with pytest.raises(Conflict, match="still moving"):
        await plane.service.fork(CTX, "demo", 1)
    assert len(await plane.service.find(CTX)) == 1
    plane.node.is_quiet = True
    assert not isinstance((await plane.service.fork(CTX, "demo", 1))[0], PerdureError)


async def test_fork_with_a_name_in_use_makes_nothing(plane: ControlPlane) -> None:
    await plane.create()
    await plane.create("taken")
    with pytest.raises(AlreadyExists, match="'taken'"):
        await plane.service.fork(CTX, "demo", 2, names=("fresh", "taken"))
    assert {workspace.name for workspace in await plane.service.find(CTX)} == {"demo", "taken"}
    assert len(plane.node.machines) == 2


async def test_fork_from_a_named_snapshot_of_a_sleeper(plane: ControlPlane) -> None:
    await plane.create()
    await plane.write("demo", "/file", b"early")
    await plane.service.checkpoint(CTX, "demo", name="early")
    await plane.write("demo", "/file", b"late")
    await plane.service.sleep(CTX, "demo")
    await plane.service.fork(CTX, "demo", 1, snapshot="early", names=("past",))
    assert await plane.read("past", "/file") == b"early"
    assert await plane.state("demo") is WorkspaceState.HIBERNATED, "forking a sleeper does not wake it"
    with pytest.raises(NotFound, match="no snapshot 'nope'"):
        await plane.service.fork(CTX, "demo", 1, snapshot="nope")


async def test_resize_grows_only_and_takes_effect_at_a_disk_boot(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    assert (await plane.service.resize(CTX, "demo", 16)).disk_gib == 16
    with pytest.raises(InvalidRequest, match="can only grow"):
        await plane.service.resize(CTX, "demo", 8)
    await plane.service.sleep(CTX, "demo")
    await plane.service.wake(CTX, "demo")
    assert plane.node.machines[workspace.id].spec.disk_gib == 8, "a wake from memory keeps the disk that memory knows"
    await plane.service.sleep(CTX, "demo")
    _, report = await plane.service.recover(CTX, "demo", Recovery.DISK_BOOT)
    assert plane.node.machines[workspace.id].spec.disk_gib == 16
    assert (report.memory, report.memory_reason) == (MemoryFate.LOST, "requested")


async def test_a_larger_disk_at_creation_boots_once(plane: ControlPlane) -> None:
    workspace, report = await plane.create(disk_gib=20)
    assert workspace.disk_gib == plane.node.machines[workspace.id].spec.disk_gib == 20
    assert report.disk is DiskFate.NEW


async def test_delete_frees_everything_and_can_be_repeated(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.service.checkpoint(CTX, "demo", name="keep")
    await plane.service.delete(CTX, "demo")
    await plane.service.upkeep.clean()
    assert (plane.node.machines, plane.node.stored) == ({}, {})
    await plane.service.delete(CTX, workspace.id)
    with pytest.raises(NotFound, match="is deleted"):
        await plane.service.get(CTX, workspace.id)
    with pytest.raises(NotFound, match="'demo'"):
        await plane.service.get(CTX, "demo")
    assert [entry.kind for entry in await plane.service.log(CTX, workspace.id)][-1] == "deleted", "its thread stays"
    await plane.create()  # the name is free


async def test_another_tenants_workspace_does_not_exist(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    for ref in ("demo", workspace.id):
        for call in (plane.service.get, plane.service.wake, plane.service.sleep, plane.service.delete, plane.service.log):
            with pytest.raises(NotFound):
                await call(OTHER, ref)
    assert await plane.service.find(OTHER) == []
    await plane.service.create(OTHER, CreateWorkspace("demo"))  # names are per tenant


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": "Über"}, "is not a workspace name"),
    ({"name": "demo@lost"}, "is not a workspace name"),
    ({"image": "nope"}, "There is no image 'nope'"),
    ({"memory_mib": 1}, "1 MiB of memory"),
    ({"image": "large", "memory_mib": 512}, "512 MiB of memory are too little for the image 'large'"),
    ({"vcpus": 0}, "0 vCPUs"),
    ({"disk_gib": 2}, "smaller than that of image"),
    ({"disk_gib": 10**6}, "out of range"),
    ({"idle_timeout_s": -1.0}, "no idle timeout"),
    ({"metadata": {"a": "\0"}}, "zero character"),
    ({"egress_allow": ("example.org:443", "example.org")}, "'example.org' has no port"),
    ({"egress_allow": ("10.0.0.1/8:443",)}, "has host bits set"),
    ({"environment": {"a": "x" * 5000}}, "too large"),
]


async def test_bad_input_is_refused_with_a_sentence_and_makes_nothing(plane: ControlPlane, subtests: pytest.Subtests) -> None:
    for fields, says in BAD:
        with subtests.test(says):
            with pytest.raises((InvalidRequest, NotFound), match=says) as refusal:
                await plane.create(**{"name": "demo", **fields})
            assert refusal.value.hint
            assert await plane.service.find(CTX) == []
            assert "start" not in plane.node.calls


async def test_a_duplicate_name_makes_nothing(plane: ControlPlane) -> None:
    first, _ = await plane.create()
    with pytest.raises(AlreadyExists, match="named 'demo' exists already"):
        await plane.create()
    assert (await plane.service.get(CTX, "demo")).id == first.id
    assert plane.node.calls.count("start") == 1


@pytest.mark.parametrize("error", [NoSpace("No room."), RestoreFailed("It would not load."), InvalidRequest("Too small.")])
async def test_a_create_that_fails_leaves_nothing(plane: ControlPlane, error: PerdureError) -> None:
    plane.node.fail("start", error)
    with pytest.raises(type(error)):
        await plane.create()
    assert await plane.service.find(CTX) == []
    await plane.create()


async def test_a_wake_without_room_leaves_it_asleep(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    plane.node.fail("start", NoSpace("No room."))
    with pytest.raises(NoSpace):
        await plane.service.wake(CTX, "demo")
    assert await plane.state("demo") is WorkspaceState.HIBERNATED
    _, report = await plane.service.wake(CTX, "demo")
    assert report.generation == 3, "the refused attempt was a generation of its own"


async def test_a_machine_that_dies_while_waking_can_be_woken_again(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    plane.node.fail("start", MachineDied("Killed."))
    with pytest.raises(MachineDied):
        await plane.service.wake(CTX, "demo")
    _, report = await plane.service.wake(CTX, "demo")
    assert report.memory is MemoryFate.KEPT


async def test_failed_has_exits(plane: ControlPlane) -> None:
    await plane.create()
    await plane.write("demo", "/file", b"one")
    await plane.service.checkpoint(CTX, "demo", name="one")
    await plane.write("demo", "/file", b"two")
    await plane.service.sleep(CTX, "demo")
    plane.node.fail("start", RestoreFailed("It would not load."))
    with pytest.raises(RestoreFailed):
        await plane.service.wake(CTX, "demo")
    failed = await plane.service.get(CTX, "demo")
    assert (failed.state, failed.state_detail) == (WorkspaceState.FAILED, "It would not load.")
    with pytest.raises(Conflict, match="has failed: It would not load") as refusal:
        await plane.service.wake(CTX, "demo")
    assert 0 < refusal.value.hint.index("disk-boot") < refusal.value.hint.index("rewind"), "what gives up least is said first"
    with pytest.raises(Conflict, match="cannot do that now: it has failed") as refusal:
        await plane.service.sleep(CTX, "demo")
    assert "'perdure recover demo'" in refusal.value.hint
    plane.node.fail("start", RestoreFailed("Still not."))
    with pytest.raises(RestoreFailed):
        await plane.service.recover(CTX, "demo", Recovery.RETRY)
    _, report = await plane.service.recover(CTX, "demo", Recovery.REWIND)
    assert (report.disk, report.memory_reason) == (
        DiskFate.REWOUND,
        "rewound: on request, to the snapshot before the last",
    )
    assert await plane.read("demo", "/file") == b"one"
    assert report.kept_branch is not None, "its head was whole, and acknowledged"
    await plane.service.upkeep.clean()
    _, kept = await plane.service.wake(CTX, report.kept_branch)
    assert (kept.snapshot_id, kept.memory) == (failed.head_snapshot_id, MemoryFate.KEPT)
    assert await plane.read(report.kept_branch, "/file") == b"two"


async def test_retry_after_a_failure_wakes_from_the_head(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.sleep(CTX, "demo")
    plane.node.fail("start", RestoreFailed("It would not load."))
    with pytest.raises(RestoreFailed):
        await plane.service.wake(CTX, "demo")
    _, report = await plane.service.recover(CTX, "demo", Recovery.RETRY)
    assert report.memory is MemoryFate.KEPT
    await plane.service.sleep(CTX, "demo")
    with pytest.raises(Conflict, match="no snapshot before its last one") as refusal:
        await plane.service.recover(CTX, "demo", Recovery.REWIND)
    assert "boot its disk" in refusal.value.hint
    await plane.service.wake(CTX, "demo")
    with pytest.raises(Conflict, match="only a failed or sleeping"):
        await plane.service.recover(CTX, "demo", Recovery.RETRY)


async def test_a_capture_without_room_leaves_it_awake(plane: ControlPlane) -> None:
    await plane.create()
    await plane.write("demo", "/file", b"kept")
    plane.node.fail("capture", NoSpace("No room."))
    with pytest.raises(NoSpace):
        await plane.service.sleep(CTX, "demo")
    assert await plane.state("demo") is WorkspaceState.RUNNING
    plane.node.fail("capture", NoSpace("No room."))
    with pytest.raises(NoSpace):
        await plane.service.checkpoint(CTX, "demo")
    assert await plane.read("demo", "/file") == b"kept"
    assert await plane.service.snapshots(CTX, "demo") == []
    await plane.service.sleep(CTX, "demo")


async def test_a_write_of_an_older_generation_changes_no_row(plane: ControlPlane) -> None:
    from perdure.workspaces.lifecycle import Event
    from perdure.workspaces.store import WorkspaceStore

    await plane.create()
    store = WorkspaceStore(plane.database)
    old = await store.by_ref(CTX.tenant_id, "demo")
    await plane.service.sleep(CTX, "demo")
    await plane.service.wake(CTX, "demo")
    before = await store.by_id(old.id)
    with pytest.raises(StaleGeneration, match="moved on from generation 1"):
        await store.move(old, Event.HIBERNATE)
    with pytest.raises(StaleGeneration):
        await store.intend(old, plane.minted("snp"), SnapshotReason.AUTOMATIC)  # type: ignore[arg-type]
    after = await store.by_id(old.id)
    assert (before.workspace, before.report) == (after.workspace, after.report)


async def test_the_journal_tells_it_all_and_verifies(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.checkpoint(CTX, "demo", name="one")
    await plane.service.sleep(CTX, "demo")
    await plane.service.wake(CTX, "demo")
    await plane.service.fork(CTX, "demo", 1)
    entries = await plane.service.log(CTX, "demo")
    assert [entry.kind for entry in entries] == [
        *("creating", "running", "checkpoint", "hibernating", "hibernated", "waking", "running", "checkpoint", "forked")
    ]
    moves = [(entry.body["from"], entry.body["to"]) for entry in entries if "to" in entry.body]
    assert all(earlier[1] == later[0] for earlier, later in pairwise(moves)), "intervals meet"
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    checked, breaks = await Journal(plane.database).verify()
    assert (checked, breaks) == (len(entries) + 2, [])
