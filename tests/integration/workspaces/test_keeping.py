"""How many snapshots stay, which may be removed, and what is said of them, over the fake node and a real database."""

from __future__ import annotations

import asyncio

import pytest

from perdure.core.errors import AlreadyExists, Conflict, InvalidRequest, NotFound, Unavailable
from perdure.core.ids import SnapshotId
from perdure.wire.node import Activity
from perdure.workspaces import lineage
from perdure.workspaces.model import Configuration, Kept, SnapshotPlace, Workspace
from tests.fakes.control_plane import CTX, OTHER, ControlPlane

NEVER = {"idle_timeout_s": 0.0, "checkpoint_interval_s": 60.0}


async def by_itself(plane: ControlPlane, workspace: Workspace, count: int = 1) -> None:
    """Automatic checkpoints of an awake workspace."""
    plane.node.busy[workspace.id] = Activity(1, 0, 0, 0.0, changed=True)
    for _ in range(count):
        plane.clock.advance(61)
        await plane.service.upkeep.tick()
        await plane.service.upkeep.drain()


async def kept(plane: ControlPlane, name: str = "demo") -> list[SnapshotId]:
    """After a cleaning, in which rows and files must agree."""
    await plane.service.upkeep.clean()
    found = [one.id for one in await plane.service.snapshots(CTX, name)]
    assert set(found) <= set(plane.node.stored)
    return found


async def place(plane: ControlPlane, ref: str, name: str = "demo") -> SnapshotPlace:
    (found,) = [one for one in await plane.service.lineage(CTX, name) if ref in {one.snapshot.id, one.snapshot.name}]
    return found


async def head(plane: ControlPlane, name: str = "demo") -> SnapshotId:
    found = (await plane.service.get(CTX, name)).head_snapshot_id
    assert found is not None
    return found


async def refer(plane: ControlPlane, snapshot_id: SnapshotId) -> None:
    """What an execution will do: a row says that it needs the snapshot."""
    await plane.execute(
        "insert into snapshot_references (tenant_id, snapshot_id, kind, holder) values ('ten_default', %s, 'execution', 'exe_1')",
        snapshot_id,
    )


# --------------------------------------------------------------------------------------------------------------------- policy


async def test_a_workspace_keeps_as_many_as_it_was_told_asleep_too(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(keep_snapshots=3, **NEVER)
    assert workspace.keep_snapshots == 3
    await by_itself(plane, workspace, 5)
    awake = await kept(plane)
    assert len(awake) == 3
    await plane.service.sleep(CTX, "demo")
    asleep = await kept(plane)
    assert asleep[:2] == awake[1:]
    assert len(asleep) == 3
    assert set(plane.node.stored) == set(asleep)


async def test_without_a_wish_the_setting_counts_awake_and_the_head_alone_asleep(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(**NEVER)
    await by_itself(plane, workspace, 4)
    assert len(await kept(plane)) == plane.settings.keep_automatic_checkpoints
    await plane.service.sleep(CTX, "demo")
    assert await kept(plane) == [await head(plane)]
    await plane.service.wake(CTX, "demo")
    slept = await head(plane)
    await by_itself(plane, workspace)
    assert await kept(plane) == [slept, await head(plane)], "where it slept is a way back while it is awake"


async def test_a_new_policy_holds_at_once_and_can_be_given_back(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(keep_snapshots=10, **NEVER)
    await by_itself(plane, workspace, 6)
    all_six = await kept(plane)
    assert len(all_six) == 6
    changed = await plane.service.configure(CTX, "demo", Configuration(keep_snapshots=4, idle_timeout_s=7.0))
    assert (changed.keep_snapshots, changed.idle_timeout_s, changed.checkpoint_interval_s) == (4, 7.0, 60.0)
    assert [one.id for one in await plane.service.snapshots(CTX, "demo")] == all_six[2:], "before any cleaning"
    assert await kept(plane) == all_six[2:]
    back = await plane.service.configure(CTX, "demo", Configuration(keep_snapshots="default"))
    assert back.keep_snapshots is None
    assert await kept(plane) == all_six[4:]
    await plane.service.configure(CTX, "demo", Configuration(keep_snapshots=0))
    assert await kept(plane) == [await head(plane)]
    entries = [entry for entry in await plane.service.log(CTX, "demo") if entry.kind == "configured"]
    assert entries[0].body == {"keep_snapshots": 4, "idle_timeout_s": 7.0, "by": "test"}
    await plane.restart()
    assert (await plane.service.get(CTX, "demo")).keep_snapshots == 0


async def test_changed_timers_are_those_that_tick(plane: ControlPlane) -> None:
    await plane.create(idle_timeout_s=1000.0, checkpoint_interval_s=0.0)
    await plane.service.configure(CTX, "demo", Configuration(idle_timeout_s=10.0))
    plane.clock.advance(11)
    await plane.service.upkeep.tick()
    await plane.until("demo", lambda workspace: workspace.state.value == "hibernated")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Configuration(), "nothing to change"),
        (Configuration(keep_snapshots=-1), "-1 snapshots cannot be kept"),
        (Configuration(keep_snapshots=1001), "1001 snapshots cannot be kept"),
        (Configuration(idle_timeout_s=-1.0), "no idle timeout"),
        (Configuration(checkpoint_interval_s=float("nan")), "no checkpoint interval"),
    ],
)
async def test_bad_policies_are_refused_and_change_nothing(plane: ControlPlane, change: Configuration, says: str) -> None:
    before, _ = await plane.create(keep_snapshots=3)
    with pytest.raises(InvalidRequest, match=says) as caught:
        await plane.service.configure(CTX, "demo", change)
    assert caught.value.hint
    assert (await plane.service.get(CTX, "demo")).keep_snapshots == before.keep_snapshots
    with pytest.raises(InvalidRequest, match="cannot be kept"):
        await plane.create("other", keep_snapshots=-1)
    with pytest.raises(NotFound):
        await plane.service.configure(OTHER, "demo", Configuration(keep_snapshots=1))


async def test_branches_keep_as_much_as_their_parent(plane: ControlPlane) -> None:
    await plane.create(keep_snapshots=7)
    (child,) = await plane.service.fork(CTX, "demo", 1)
    assert isinstance(child, Workspace)
    assert child.keep_snapshots == 7


# ---------------------------------------------------------------------------------------------------------- what holds on to it


async def test_the_origin_of_a_branch_stays_as_long_as_the_branch_and_no_longer(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(**NEVER)
    await plane.service.fork(CTX, "demo", 1, names=("child",))
    origin = await head(plane)
    await by_itself(plane, workspace, 4)
    assert origin in await kept(plane)
    assert (await place(plane, origin)).branches == ("child",)
    assert (await place(plane, origin)).kept == (Kept.ORIGIN,)
    await plane.service.delete(CTX, "child")
    assert origin not in await kept(plane), "by the next cleaning, without a capture of the parent"


async def test_what_an_execution_refers_to_stays_even_without_its_workspace(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(**NEVER)
    await by_itself(plane, workspace)
    needed = await head(plane)
    await refer(plane, needed)
    await by_itself(plane, workspace, 4)
    assert needed in await kept(plane)
    assert (await place(plane, needed)).references == ("execution exe_1",)
    with pytest.raises(Conflict, match="'execution exe_1' needs it"):
        await plane.service.remove_snapshot(CTX, "demo", needed)
    await plane.service.delete(CTX, "demo")
    await plane.service.upkeep.clean()
    assert set(plane.node.stored) == {needed}
    await plane.execute("delete from snapshot_references")
    await plane.service.upkeep.clean()
    assert plane.node.stored == {}


async def test_the_head_of_a_branch_outlives_the_workspace_that_took_it(plane: ControlPlane) -> None:
    await plane.create()
    await plane.service.fork(CTX, "demo", 1, names=("child",))
    origin = await head(plane, "child")
    await plane.service.sleep(CTX, "demo")
    await plane.service.delete(CTX, "demo")
    await plane.service.upkeep.clean()
    assert set(plane.node.stored) == {origin}
    assert await plane.database.all("workspaces.names_using_image", image="ab" * 32) == [
        {"name": "child"},
        {"name": f"snapshot {origin}"},
    ], "the image is needed by both"
    _, own = await plane.service.sleep(CTX, "child")
    await plane.service.upkeep.clean()
    assert set(plane.node.stored) == {own.id}
    await plane.service.wake(CTX, "child")


async def test_whoever_is_about_to_stand_on_a_snapshot_is_seen(plane: ControlPlane) -> None:
    """A head that is set at the same time as retention decides: whichever is first, nobody stands on what goes."""
    workspace, _ = await plane.create(keep_snapshots=10, **NEVER)
    await by_itself(plane, workspace, 2)
    older, newer = await kept(plane)
    store = plane.service._store

    async def retain() -> int:
        async with plane.database.transaction() as tx:
            return await store.retain(tx, workspace.id, 1)

    await plane.execute("update workspaces set keep_snapshots = 1")
    async with plane.database.transaction() as tx:
        await store.hold(tx, older)
        deciding = asyncio.create_task(retain())
        for _ in range(30):
            await plane.database.one("clock.now")  # time enough to decide without waiting
        await tx.run("retention.rename", id=older, workspace_id=workspace.id, name="needed")
    assert await deciding == 0
    assert [one.id for one in await plane.service.snapshots(CTX, "demo")] == [older, newer]
    async with plane.database.transaction() as tx:
        await tx.run("retention.rename", id=older, workspace_id=workspace.id, name=None)
    assert await retain() == 1
    async with plane.database.transaction() as tx:
        with pytest.raises(NotFound, match="removed meanwhile"):
            await store.hold(tx, older)


# ---------------------------------------------------------------------------------------------------------------------- removal


async def test_removal_frees_it_and_hangs_its_children_on_its_parent(plane: ControlPlane) -> None:
    await plane.create()
    first = await plane.service.checkpoint(CTX, "demo", name="first")
    second = await plane.service.checkpoint(CTX, "demo")
    third = await plane.service.checkpoint(CTX, "demo")
    removed = await plane.service.remove_snapshot(CTX, "demo", second.id)
    assert removed.id == second.id
    assert (await place(plane, third.id)).snapshot.parent_id == first.id, "at once"
    assert await kept(plane) == [first.id, third.id]
    assert set(plane.node.stored) == {first.id, third.id}
    assert (await place(plane, third.id)).snapshot.parent_id == first.id, "and when its row is gone"
    await plane.service.remove_snapshot(CTX, "demo", "first")
    assert await kept(plane) == [third.id]
    assert (await place(plane, third.id)).snapshot.parent_id is None
    entries = [entry.body for entry in await plane.service.log(CTX, "demo") if entry.kind == "snapshot-removed"]
    assert [(body["snapshot_id"], body["name"]) for body in entries] == [(second.id, None), (first.id, "first")]
    again = await plane.service.checkpoint(CTX, "demo", name="first")
    assert again.parent_id == third.id, "its name is free again"


async def test_removals_of_several_in_a_row_keep_the_tree_connected(plane: ControlPlane) -> None:
    await plane.create()
    line = [await plane.service.checkpoint(CTX, "demo") for _ in range(6)]
    for one in (line[2], line[1], line[3]):
        await plane.service.remove_snapshot(CTX, "demo", one.id)
    await kept(plane)  # all three rows are dropped in one statement
    assert (await place(plane, line[4].id)).snapshot.parent_id == line[0].id
    assert (await place(plane, line[5].id)).snapshot.parent_id == line[4].id


async def test_what_somebody_stands_on_is_not_removed(plane: ControlPlane) -> None:
    await plane.create()
    origin = await plane.service.checkpoint(CTX, "demo", name="origin")
    with pytest.raises(Conflict, match=r"Snapshot 'origin' .* cannot be removed: 'demo' wakes from it\.") as caught:
        await plane.service.remove_snapshot(CTX, "demo", "origin")
    assert "next checkpoint" in caught.value.hint
    await plane.service.fork(CTX, "demo", 2, snapshot="origin", names=("one", "two"))
    await plane.service.checkpoint(CTX, "demo")
    with pytest.raises(Conflict, match="'one' and 'two' wake from it"):
        await plane.service.remove_snapshot(CTX, "demo", "origin")
    for name in ("one", "two"):
        await plane.service.sleep(CTX, name)
    with pytest.raises(Conflict, match="'one' and 'two' were forked from it") as caught:
        await plane.service.remove_snapshot(CTX, "demo", "origin")
    assert caught.value.hint == "Delete these first."
    assert origin.id in await kept(plane)
    with pytest.raises(InvalidRequest, match="not one of 'one'"):
        await plane.service.remove_snapshot(CTX, "one", origin.id)
    for name in ("one", "two"):
        await plane.service.delete(CTX, name)
    await plane.service.remove_snapshot(CTX, "demo", "origin")
    assert origin.id not in await kept(plane)


async def test_what_is_not_there_is_not_removed(plane: ControlPlane) -> None:
    await plane.create()
    mine = await plane.service.checkpoint(CTX, "demo", name="mine")
    await plane.service.checkpoint(CTX, "demo")
    await plane.create("other")
    for ref in ("nothing", "snp_nothing", ""):
        with pytest.raises(NotFound):
            await plane.service.remove_snapshot(CTX, "demo", ref)
    with pytest.raises(NotFound):
        await plane.service.remove_snapshot(CTX, "other", mine.id)
    with pytest.raises(NotFound):
        await plane.service.remove_snapshot(OTHER, "demo", "mine")
    await plane.service.remove_snapshot(CTX, "demo", "mine")
    with pytest.raises(NotFound):
        await plane.service.remove_snapshot(CTX, "demo", "mine")


async def test_two_who_remove_the_same_get_one_yes(plane: ControlPlane) -> None:
    await plane.create()
    one = await plane.service.checkpoint(CTX, "demo")
    await plane.service.checkpoint(CTX, "demo")
    answers = await asyncio.gather(
        *(plane.service.remove_snapshot(CTX, "demo", one.id) for _ in range(4)), return_exceptions=True
    )
    assert sum(not isinstance(answer, BaseException) for answer in answers) == 1
    assert all(isinstance(answer, NotFound) for answer in answers if isinstance(answer, BaseException))


# ------------------------------------------------------------------------------------------------------------------------ names


async def test_a_name_keeps_a_snapshot_and_its_loss_gives_it_back_to_retention(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(**NEVER)
    await by_itself(plane, workspace)
    automatic = await head(plane)
    named = await plane.service.name_snapshot(CTX, "demo", automatic, "good")
    assert (named.id, named.name) == (automatic, "good")
    await by_itself(plane, workspace, 4)
    assert automatic in await kept(plane)
    assert (await place(plane, "good")).kept == (Kept.NAMED,)
    renamed = await plane.service.name_snapshot(CTX, "demo", "good", "better")
    assert renamed.name == "better"
    cleared = await plane.service.name_snapshot(CTX, "demo", "better", None)
    assert cleared.name is None
    assert automatic not in await kept(plane)
    entries = [entry.body for entry in await plane.service.log(CTX, "demo") if entry.kind == "snapshot-named"]
    assert [(body["was"], body["name"]) for body in entries] == [(None, "good"), ("good", "better"), ("better", None)]


async def test_bad_names_and_names_in_use_are_refused(plane: ControlPlane) -> None:
    await plane.create()
    one = await plane.service.checkpoint(CTX, "demo", name="one")
    two = await plane.service.checkpoint(CTX, "demo", name="two")
    for bad in ("", " ", "snp_x", "a/b", "-a", "x" * 64):
        with pytest.raises(InvalidRequest, match="is not a snapshot name"):
            await plane.service.name_snapshot(CTX, "demo", "one", bad)
    with pytest.raises(AlreadyExists, match="'demo' has a snapshot named 'one' already") as caught:
        await plane.service.name_snapshot(CTX, "demo", two.id, "one")
    assert "--clear" in caught.value.hint
    with pytest.raises(NotFound):
        await plane.service.name_snapshot(CTX, "demo", "three", "x")
    assert await plane.service.name_snapshot(CTX, "demo", "one", "one") == one, "the same again changes nothing"
    assert [snapshot.name for snapshot in await plane.service.snapshots(CTX, "demo")] == ["one", "two"]


# ------------------------------------------------------------------------------------------------------------------------- tree


async def test_the_tree_says_what_is_where(plane: ControlPlane) -> None:
    await plane.create()
    early = await plane.service.checkpoint(CTX, "demo", name="early")
    await plane.service.fork(CTX, "demo", 1, snapshot="early", names=("child",))
    late = await plane.service.checkpoint(CTX, "demo")
    places = await plane.service.lineage(CTX, "demo")
    assert [(one.snapshot.id, one.snapshot.parent_id, one.is_head, one.branches) for one in places] == [
        (early.id, None, False, ("child",)),
        (late.id, early.id, True, ()),
    ]
    assert [one.kept for one in places] == [
        (Kept.HEAD, Kept.NAMED, Kept.REQUESTED, Kept.ORIGIN),
        (Kept.HEAD, Kept.REQUESTED),
    ], "the child, awake without a snapshot of its own, stands on the first"
    assert all(one.sizes is not None and one.sizes.total_bytes >= one.sizes.own_bytes > 0 for one in places)
    assert await plane.service.lineage(CTX, "child") == []
    _, own = await plane.service.sleep(CTX, "child")
    (only,) = await plane.service.lineage(CTX, "child")
    assert (only.snapshot.id, only.snapshot.parent_id) == (own.id, early.id), "it hangs on its parent's tree"
    with pytest.raises(NotFound):
        await plane.service.lineage(OTHER, "demo")


async def test_the_tree_is_told_without_sizes_when_the_node_does_not_say_them(plane: ControlPlane) -> None:
    await plane.create()
    one = await plane.service.checkpoint(CTX, "demo")
    plane.node.fail("stored_sizes", Unavailable("The node is away."))
    (found,) = await plane.service.lineage(CTX, "demo")
    assert (found.snapshot.id, found.sizes) == (one.id, None)
    del plane.node.stored[one.id]
    (found,) = await plane.service.lineage(CTX, "demo")
    assert found.sizes is None


async def test_after_a_rewind_what_was_left_beside_goes_with_its_branch(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(keep_snapshots=10, **NEVER)
    await plane.service.checkpoint(CTX, "demo", name="good")
    await by_itself(plane, workspace, 3)
    _, report = await plane.service.rewind(CTX, "demo", "good")
    assert report.kept_branch is not None
    aside = await head(plane, report.kept_branch)
    left = await kept(plane)
    assert aside in plane.node.stored
    assert await head(plane) in left
    await plane.service.wake(CTX, report.kept_branch)
    await plane.service.sleep(CTX, report.kept_branch)
    await plane.service.discard(CTX, report.kept_branch)
    await plane.service.upkeep.clean()
    names = [one.name for one in await plane.service.snapshots(CTX, "demo")]
    assert names == ["good"], "what came after it is on no way to anywhere"


async def test_nothing_is_crowded_after_a_cleaning(plane: ControlPlane) -> None:
    workspace, _ = await plane.create(**NEVER)
    await by_itself(plane, workspace, 3)
    await plane.service.fork(CTX, "demo", 2)
    await plane.service.delete(CTX, "demo-1")
    await plane.service.upkeep.clean()
    assert await lineage.crowded(plane.database, plane.node.node_id, plane.settings.keep_automatic_checkpoints) == []
