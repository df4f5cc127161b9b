"""Rewind, promote, discard and the tree: what a workspace was is never lost, and everything says where it is."""

from __future__ import annotations

import asyncio

import pytest

from perdure.core.errors import Conflict, CorruptSnapshot, NoSpace, NotFound, RestoreFailed, Unavailable
from perdure.core.ids import ExecId
from perdure.wire.node import ExecSpec, MemoryFate
from perdure.workspaces.model import DiskFate, Recovery, Workspace, WorkspaceKind, WorkspaceState
from tests.fakes.control_plane import CTX, OTHER, ControlPlane
from tests.fakes.memory_guest import Command

FILE = "/file"


async def with_a_past(plane: ControlPlane, name: str = "demo") -> Workspace:
    """Awake, with 'early' in a snapshot of that name and 'late' on its disk now."""
    workspace, _ = await plane.create(name)
    await plane.write(name, FILE, b"early")
    await plane.service.checkpoint(CTX, name, name="early")
    await plane.write(name, FILE, b"late")
    return workspace


def runs(plane: ControlPlane, workspace: Workspace, exec_id: str) -> None:
    """A program in its memory, to tell one memory from another."""
    plane.node.world(workspace.id).commands[exec_id] = Command(ExecSpec(ExecId(exec_id), argv=("x",)), 7)


async def kept_of(plane: ControlPlane, parent: Workspace) -> list[Workspace]:
    return [one for one in await plane.service.find(CTX) if one.parent_id == parent.id and "@before-" in one.name]


# ------------------------------------------------------------------------------------------------------------------------ rewind


async def test_rewind_of_an_awake_one_keeps_what_it_was_with_its_memory(plane: ControlPlane) -> None:
    before = await with_a_past(plane)
    runs(plane, before, "exe_late")
    rewound, report = await plane.service.rewind(CTX, "demo", "early")
    assert (rewound.state, rewound.generation) == (WorkspaceState.RUNNING, before.generation + 1)
    assert (report.memory, report.disk) == (MemoryFate.KEPT, DiskFate.REWOUND)
    assert "early" in report.memory_reason
    assert report.execs_running == (), "the program came after the snapshot"
    assert await plane.read("demo", FILE) == b"early"
    assert await plane.read("demo", "/etc-machine-id") == before.machine_id.encode(), "it is still who it was"
    (kept,) = await kept_of(plane, before)
    assert report.kept_branch == kept.name
    assert (kept.kind, kept.state, kept.expires_at) == (WorkspaceKind.BRANCH, WorkspaceState.HIBERNATED, None)
    _, woken = await plane.service.wake(CTX, kept.name)
    assert woken.execs_running == ("exe_late",)
    assert woken.memory is MemoryFate.KEPT
    assert await plane.read(kept.name, FILE) == b"late"
    assert await plane.read(kept.name, "/etc-machine-id") == kept.machine_id.encode(), "a branch is somebody else"


async def test_rewind_of_a_sleeper_by_id_and_back_by_promoting_what_was_kept(plane: ControlPlane) -> None:
    before = await with_a_past(plane)
    runs(plane, before, "exe_late")
    _, late = await plane.service.sleep(CTX, "demo")
    early = next(one for one in await plane.service.snapshots(CTX, "demo") if one.name == "early")
    _, report = await plane.service.rewind(CTX, "demo", early.id)
    assert await plane.read("demo", FILE) == b"early"
    assert report.kept_branch is not None
    again, report = await plane.service.promote(CTX, report.kept_branch)
    assert (again.id, again.head_snapshot_id) == (before.id, late.id)
    assert report.execs_running == ("exe_late",)
    assert await plane.read("demo", FILE) == b"late"
    assert await plane.read("demo", "/etc-machine-id") == before.machine_id.encode()


async def test_rewind_spares_an_automatic_checkpoint_that_falling_asleep_would_drop(plane: ControlPlane) -> None:
    await plane.create(idle_timeout_s=0.0, checkpoint_interval_s=60.0)
    await plane.write("demo", FILE, b"early")
    plane.clock.advance(61)
    await plane.service.upkeep.tick()
    await plane.service.upkeep.drain()
    automatic = (await plane.service.get(CTX, "demo")).head_snapshot_id
    assert automatic is not None
    await plane.write("demo", FILE, b"late")
    await plane.service.rewind(CTX, "demo", automatic)
    await plane.service.upkeep.clean()
    assert await plane.read("demo", FILE) == b"early"
    await plane.service.sleep(CTX, "demo")
    await plane.service.upkeep.clean()
    await plane.service.wake(CTX, "demo")
    assert await plane.read("demo", FILE) == b"early"


async def test_rewind_to_where_a_sleeper_is_wakes_it_and_leaves_no_branch(plane: ControlPlane) -> None:
    workspace, _ = await plane.create()
    await plane.write("demo", FILE, b"x")
    _, head = await plane.service.sleep(CTX, "demo")
    _, report = await plane.service.rewind(CTX, "demo", head.id)
    assert (report.kept_branch, report.disk, report.memory) == (None, DiskFate.KEPT, MemoryFate.KEPT)
    assert await kept_of(plane, workspace) == []


async def test_what_a_rewind_refuses_is_left_as_it_is(plane: ControlPlane) -> None:
    mine = await with_a_past(plane)
    await with_a_past(plane, "other")
    others = await plane.service.checkpoint(CTX, "other")
    for ref in ("nope", others.id, ""):
        with pytest.raises(NotFound, match="has no snapshot"):
            await plane.service.rewind(CTX, "demo", ref)
    with pytest.raises(NotFound, match="no workspace"):
        await plane.service.rewind(OTHER, "demo", "early")
    plane.node.fail("snapshot", CorruptSnapshot("Its segment 7 is damaged.", hint="Choose another."))
    with pytest.raises(CorruptSnapshot):
        await plane.service.rewind(CTX, "demo", "early")
    now = await plane.service.get(CTX, "demo")
    assert (now.state, now.generation) == (WorkspaceState.RUNNING, mine.generation)
    assert await kept_of(plane, mine) == []
    await plane.service.delete(CTX, "demo")
    with pytest.raises(NotFound, match="is deleted"):
        await plane.service.rewind(CTX, mine.id, "early")


async def test_a_rewind_whose_capture_fails_leaves_it_awake(plane: ControlPlane) -> None:
    mine = await with_a_past(plane)
    plane.node.fail("capture", NoSpace("The disk is full."))
    with pytest.raises(NoSpace):
        await plane.service.rewind(CTX, "demo", "early")
    assert await plane.state("demo") is WorkspaceState.RUNNING
    assert await plane.read("demo", FILE) == b"late"
    assert await kept_of(plane, mine) == []


async def test_a_rewind_that_does_not_come_up_has_its_way_back(plane: ControlPlane) -> None:
    mine = await with_a_past(plane)
    plane.node.fail("start", RestoreFailed("It would not load."))
    with pytest.raises(RestoreFailed) as caught:
        await plane.service.rewind(CTX, "demo", "early")
    assert await plane.state("demo") is WorkspaceState.FAILED
    (kept,) = await kept_of(plane, mine)
    assert f"'perdure branch promote {kept.name}' goes back to it" in caught.value.hint
    _, report = await plane.service.promote(CTX, kept.name)
    assert await plane.read("demo", FILE) == b"late"
    assert report.kept_branch is not None, "the snapshot that would not load is kept too"


async def test_a_failed_one_can_be_rewound(plane: ControlPlane) -> None:
    mine = await with_a_past(plane)
    await plane.service.sleep(CTX, "demo")
    plane.node.fail("start", RestoreFailed("It would not load."))
    with pytest.raises(RestoreFailed):
        await plane.service.wake(CTX, "demo")
    _, report = await plane.service.rewind(CTX, "demo", "early")
    assert await plane.read("demo", FILE) == b"early"
    (kept,) = await kept_of(plane, mine)
    assert report.kept_branch == kept.name
    assert await plane.read(kept.name, FILE) == b"late"


async def test_a_refused_start_is_told_by_the_next_wake(plane: ControlPlane) -> None:
    mine = await with_a_past(plane)
    plane.node.fail("start", NoSpace("The disk is full."))
    with pytest.raises(NoSpace):
        await plane.service.rewind(CTX, "demo", "early")
    (kept,) = await kept_of(plane, mine)
    _, report = await plane.service.wake(CTX, "demo")
    assert report.kept_branch == kept.name
    assert "early" in report.memory_reason
    assert await plane.read("demo", FILE) == b"early"
    await plane.service.sleep(CTX, "demo")
    _, report = await plane.service.wake(CTX, "demo")
    assert (report.kept_branch, report.memory_reason) == (None, ""), "it is told once"


async def test_programs_that_did_not_stand_still_wake_with_memory_as_themselves_only(plane: ControlPlane) -> None:
    mine = await with_a_past(plane)
    runs(plane, mine, "exe_late")
    plane.node.is_quiet = False
    _, report = await plane.service.rewind(CTX, "demo", "early")
    plane.node.is_quiet = True
    (kept,) = await kept_of(plane, mine)
    assert "boots its disk" in kept.state_detail
    _, woken = await plane.service.wake(CTX, kept.name)
    assert (woken.memory, woken.memory_reason) == (MemoryFate.LOST, "not-quiesced")
    assert await plane.read(kept.name, FILE) == b"late"

    await plane.service.rewind(CTX, "demo", "early")
    plane.node.is_quiet = False
    _, report = await plane.service.rewind(CTX, "demo", "early")
    assert report.kept_branch is not None
    _, back = await plane.service.promote(CTX, report.kept_branch)
    assert back.memory is MemoryFate.KEPT, "the workspace that was captured so can have its memory back"


async def test_two_rewinds_before_a_wake_name_both_branches(plane: ControlPlane) -> None:
    await with_a_past(plane)
    plane.node.fail("start", NoSpace("The disk is full."))
    with pytest.raises(NoSpace):
        await plane.service.rewind(CTX, "demo", "early")
    await plane.service.checkpoint(CTX, "demo", name="again")  # wakes it, and tells
    await plane.service.sleep(CTX, "demo")
    plane.node.fail("start", NoSpace("The disk is full."))
    with pytest.raises(NoSpace):
        await plane.service.rewind(CTX, "demo", "again")
    _, report = await plane.service.rewind(CTX, "demo", "early")
    assert report.kept_branch is not None
    assert len(report.kept_branch.split(", ")) == 2


# ----------------------------------------------------------------------------------------------------------------------- promote


async def fork(plane: ControlPlane, name: str, *names: str) -> list[Workspace]:
    made = await plane.service.fork(CTX, name, len(names), names=names)
    return [one for one in made if isinstance(one, Workspace)]


async def test_promote_makes_a_branchs_state_its_parents_and_ends_the_branch(plane: ControlPlane) -> None:
    parent = await with_a_past(plane)
    branch, sibling = await fork(plane, "demo", "try", "other")
    await plane.write("try", FILE, b"better")
    runs(plane, branch, "exe_try")
    await plane.service.checkpoint(CTX, "try", name="half-way")
    grandchild = (await fork(plane, "try", "deeper"))[0]
    await plane.write("demo", FILE, b"left alone")
    promoted, report = await plane.service.promote(CTX, "try")
    assert (promoted.id, promoted.name, promoted.state) == (parent.id, "demo", WorkspaceState.RUNNING)
    assert promoted.generation == parent.generation + 1
    assert (report.memory, report.execs_running) == (MemoryFate.KEPT, ("exe_try",))
    assert "try" in report.memory_reason
    assert await plane.read("demo", FILE) == b"better"
    assert await plane.read("demo", "/etc-machine-id") == parent.machine_id.encode(), "with its own identity"
    assert await plane.read("demo", "/etc-hostname") == b"demo"
    with pytest.raises(NotFound):
        await plane.service.get(CTX, "try")
    ended = [entry for entry in await plane.service.log(CTX, branch.id) if entry.kind == "deleted"]
    assert ended[0].body["into"] == parent.id
    (kept,) = await kept_of(plane, parent)
    assert report.kept_branch == kept.name
    assert await plane.read(kept.name, FILE) == b"left alone"
    assert "half-way" in {one.name for one in await plane.service.snapshots(CTX, "demo")}, "its history is the parent's"
    assert (await plane.service.get(CTX, "deeper")).parent_id == parent.id
    await plane.service.upkeep.clean()
    for name in ("deeper", "other"):
        await plane.service.sleep(CTX, name)
        await plane.service.wake(CTX, name)
    assert grandchild.id != sibling.id
    await plane.service.sleep(CTX, "demo")
    await plane.service.upkeep.clean()
    _, report = await plane.service.wake(CTX, "demo")
    assert report.memory is MemoryFate.KEPT
    assert await plane.read("demo", FILE) == b"better"
    await plane.service.rewind(CTX, "demo", "half-way")
    assert await plane.read("demo", "/etc-machine-id") == parent.machine_id.encode()


async def test_promote_of_sleepers_takes_no_capture(plane: ControlPlane) -> None:
    await with_a_past(plane)
    await fork(plane, "demo", "try")
    await plane.write("try", FILE, b"better")
    for name in ("demo", "try"):
        await plane.service.sleep(CTX, name)
    plane.node.calls.clear()
    await plane.service.promote(CTX, "try")
    assert "capture" not in plane.node.calls
    assert await plane.read("demo", FILE) == b"better"


async def test_promote_of_a_lost_branch_boots_its_disk_and_says_so(plane: ControlPlane) -> None:
    parent = await with_a_past(plane)
    plane.node.die(parent.id)
    await plane.until("demo", lambda one: one.state is WorkspaceState.HIBERNATED)
    (lost,) = [one for one in await plane.service.find(CTX) if one.kind is WorkspaceKind.LOST]
    promoted, report = await plane.service.promote(CTX, lost.name)
    assert promoted.id == parent.id
    assert (report.memory, report.memory_reason) == (MemoryFate.LOST, "no-memory-in-snapshot")
    assert report.lost_branch is None, "it is not there any more"
    assert await plane.read("demo", FILE) == b"late"
    assert report.kept_branch is not None
    _, kept = await plane.service.wake(CTX, report.kept_branch)
    assert kept.memory is MemoryFate.KEPT
    assert await plane.read(report.kept_branch, FILE) == b"early"


async def test_what_a_promotion_refuses_is_left_as_it_is(plane: ControlPlane) -> None:
    parent = await with_a_past(plane)
    (branch,) = await fork(plane, "demo", "try")
    with pytest.raises(Conflict, match="is a workspace, not a branch"):
        await plane.service.promote(CTX, "demo")
    with pytest.raises(NotFound):
        await plane.service.promote(CTX, "nope")
    with pytest.raises(NotFound):
        await plane.service.promote(OTHER, "try")
    plane.node.is_quiet = False
    with pytest.raises(Conflict, match="still moving"):
        await plane.service.promote(CTX, "try")
    plane.node.is_quiet = True
    assert await plane.state("demo") is WorkspaceState.RUNNING, "the parent was not touched"
    plane.node.fail("snapshot", CorruptSnapshot("Its segment 7 is damaged.", hint="Choose another."))
    await plane.service.wake(CTX, "try")
    with pytest.raises(CorruptSnapshot):
        await plane.service.promote(CTX, "try")
    assert (await plane.service.get(CTX, "demo")).generation == parent.generation
    assert await plane.state("try") is WorkspaceState.HIBERNATED, "captured, and whole for whoever uses it"
    await plane.service.delete(CTX, "demo")
    with pytest.raises(Conflict, match=r"was forked from \('demo'\) is deleted"):
        await plane.service.promote(CTX, "try")
    assert await plane.read("try", FILE) == b"late"
    assert branch.parent_id == parent.id


async def test_a_branch_that_is_used_meanwhile_is_not_promoted(plane: ControlPlane) -> None:
    await with_a_past(plane)
    await fork(plane, "demo", "try")
    await plane.service.sleep(CTX, "try")
    plane.node.gate = asyncio.Event()
    plane.node.entered.clear()
    woken_meanwhile = asyncio.Event()
    inventory = plane.node.snapshot

    async def while_its_parent_is_looked_at(snapshot_id: object) -> object:
        waking = asyncio.create_task(plane.service.wake(CTX, "try"))
        await plane.node.entered.wait()
        assert plane.node.gate is not None
        plane.node.gate.set()
        await waking
        woken_meanwhile.set()
        return await inventory(snapshot_id)  # type: ignore[arg-type]

    plane.node.snapshot = while_its_parent_is_looked_at  # type: ignore[method-assign, assignment]
    with pytest.raises(Conflict, match="was used while"):
        await plane.service.promote(CTX, "try")
    assert woken_meanwhile.is_set()
    assert await plane.read("demo", FILE) == b"late"
    assert await plane.state("try") is WorkspaceState.RUNNING


async def test_a_larger_disk_comes_along(plane: ControlPlane) -> None:
    parent = await with_a_past(plane)
    await fork(plane, "demo", "try")
    await plane.service.resize(CTX, "try", parent.disk_gib + 8)
    promoted, _ = await plane.service.promote(CTX, "try")
    assert promoted.disk_gib == parent.disk_gib + 8


async def test_a_branch_of_a_branch_is_promoted_into_the_branch(plane: ControlPlane) -> None:
    await with_a_past(plane)
    (branch,) = await fork(plane, "demo", "try")
    await fork(plane, "try", "deeper")
    await plane.write("deeper", FILE, b"deep")
    promoted, _ = await plane.service.promote(CTX, "deeper")
    assert promoted.id == branch.id
    assert promoted.kind is WorkspaceKind.BRANCH
    assert await plane.read("demo", FILE) == b"late"


# ---------------------------------------------------------------------------------------------------------- discard, tree, fork


async def test_discard_frees_a_branch_and_what_only_it_held(plane: ControlPlane) -> None:
    await with_a_past(plane)
    _, report = await plane.service.rewind(CTX, "demo", "early")
    assert report.kept_branch is not None
    kept = await plane.service.get(CTX, report.kept_branch)
    await plane.service.upkeep.clean()
    assert kept.head_snapshot_id in plane.node.stored
    with pytest.raises(Conflict, match="not a branch"):
        await plane.service.discard(CTX, "demo")
    await plane.service.discard(CTX, report.kept_branch)
    await plane.service.discard(CTX, kept.id)  # again
    await plane.service.upkeep.clean()
    assert kept.head_snapshot_id not in plane.node.stored
    assert await plane.read("demo", FILE) == b"early"
    with pytest.raises(NotFound):
        await plane.service.discard(CTX, report.kept_branch)


async def test_the_tree_shows_what_hangs_on_what(plane: ControlPlane) -> None:
    await with_a_past(plane)
    await plane.service.fork(CTX, "demo", 1, snapshot="early", names=("past",))
    await fork(plane, "past", "deeper")
    await fork(plane, "demo", "try")
    await plane.service.sleep(CTX, "try")

    async def shape(ref: str) -> list[tuple[int, str, str]]:
        return [(node.depth, node.workspace.name, node.workspace.state.value) for node in await plane.service.tree(CTX, ref)]

    whole = [(0, "demo", "running"), (1, "past", "running"), (2, "deeper", "running"), (1, "try", "hibernated")]
    for ref in ("demo", "past", "deeper", "try"):
        assert await shape(ref) == whole
    nodes = {node.workspace.name: node for node in await plane.service.tree(CTX, "demo")}
    assert (nodes["demo"].forked_name, nodes["demo"].forked_at) == (None, None)
    assert nodes["past"].forked_name == "early"
    assert nodes["past"].forked_at is not None
    assert nodes["try"].own_bytes > 0
    assert nodes["deeper"].own_bytes == 0, "it has taken no snapshot yet"
    assert nodes["deeper"].total_bytes > 0
    await plane.service.delete(CTX, "past")
    assert (1, "past", "deleted") in await shape("demo"), "something that lives hangs on it"
    await plane.service.delete(CTX, "deeper")
    assert await shape("demo") == [(0, "demo", "running"), (1, "try", "hibernated")]
    await plane.service.delete(CTX, "demo")
    assert await shape("try") == [(0, "demo", "deleted"), (1, "try", "hibernated")]
    with pytest.raises(NotFound):
        await plane.service.tree(OTHER, "try")


async def test_branches_start_side_by_side(plane: ControlPlane) -> None:
    await plane.create()
    plane.node.gate = asyncio.Event()
    forking = asyncio.create_task(fork(plane, "demo", "one", "two", "three"))
    await plane.until("demo", lambda _: plane.node.starting == 2)
    plane.node.gate.set()
    assert len(await forking) == 3
    assert plane.node.most_starting == 2, "as many at a time as the setting allows"


async def test_parent_and_siblings_do_not_see_each_other(plane: ControlPlane) -> None:
    parent = await with_a_past(plane)
    one, two = await fork(plane, "demo", "one", "two")
    for name in ("demo", "one", "two"):
        await plane.write(name, "/own", name.encode())
    assert [await plane.read(name, "/own") for name in ("demo", "one", "two")] == [b"demo", b"one", b"two"]
    guests = {(parent.id, 1), (one.id, 1), (two.id, 1)}
    assert {(key, machine.generation) for key, machine in plane.node.machines.items()} == guests


# ----------------------------------------------------------------------------------------------------------- crashes in between


@pytest.mark.parametrize("node_too", [True, False])
async def test_a_server_killed_after_the_record_goes_on_from_the_target(plane: ControlPlane, node_too: bool) -> None:
    mine = await with_a_past(plane)
    plane.node.gate = asyncio.Event()
    plane.node.entered.clear()
    task = asyncio.create_task(plane.service.rewind(CTX, "demo", "early"))
    await plane.node.entered.wait()
    await plane.crash(node_too=node_too)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    plane.node.gate = None
    await plane.restart()
    assert await plane.state("demo") is WorkspaceState.HIBERNATED
    (kept,) = await kept_of(plane, mine)
    _, report = await plane.service.wake(CTX, "demo")
    assert report.kept_branch == kept.name
    assert await plane.read("demo", FILE) == b"early"
    assert await plane.read(kept.name, FILE) == b"late"


async def test_recover_says_what_is_wrong_with_a_failed_branch(plane: ControlPlane) -> None:
    await with_a_past(plane)
    await fork(plane, "demo", "try")
    await plane.service.sleep(CTX, "try")
    plane.node.fail("start", RestoreFailed("It would not load."))
    with pytest.raises(RestoreFailed):
        await plane.service.wake(CTX, "try")
    with pytest.raises(Conflict, match="is failed: only one that is awake or asleep can be promoted"):
        await plane.service.promote(CTX, "try")
    await plane.service.recover(CTX, "try", Recovery.RETRY)
    promoted, _ = await plane.service.promote(CTX, "try")
    assert promoted.name == "demo"


async def test_a_server_that_is_stopping_begins_nothing(plane: ControlPlane) -> None:
    await with_a_past(plane)
    await fork(plane, "demo", "try")
    plane.service.upkeep.stop()
    for call in (plane.service.rewind(CTX, "demo", "early"), plane.service.promote(CTX, "try")):
        with pytest.raises(Unavailable):
            await call
