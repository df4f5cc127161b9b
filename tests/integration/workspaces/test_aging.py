"""What becomes of workspaces that have been asleep for long, as their owners have said, over fake nodes and a real database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from perdure.core.errors import Conflict, InvalidRequest, NotFound, Unavailable
from perdure.core.ids import SnapshotId
from perdure.fleet.objects import StoreCatalogue
from perdure.wire.node import MemoryFate
from perdure.workspaces import aging
from perdure.workspaces.model import AsleepAction, Configuration, Workspace, WorkspaceState
from tests.fakes.control_plane import CTX, OTHER, ControlPlane, control_plane
from tests.fakes.second_home import FakeBucket, FakeSecondHome

KEEP, ARCHIVE, DELETE = AsleepAction
HIBERNATED = WorkspaceState.HIBERNATED
NEVER = {"idle_timeout_s": 0.0, "checkpoint_interval_s": 0.0}


async def swept(plane: ControlPlane, days: float = 0.0) -> None:
    """So many days later, in steps of one, as a server that runs would see to it."""
    while days > 0:
        plane.database.shift_clock(min(days, 1.0) * 86400)
        days -= 1.0
        await plane.service.upkeep.aging.sweep()
    await plane.service.upkeep.aging.sweep()


async def asleep(plane: ControlPlane, name: str = "demo", **policy: Any) -> Workspace:
    await plane.create(name, **NEVER, **policy)
    return (await plane.service.sleep(CTX, name))[0]


async def names(plane: ControlPlane) -> set[str]:
    return {one.name for one in await plane.service.find(CTX)}


async def entries(plane: ControlPlane, kind: str, ref: str = "demo") -> list[Any]:
    return [entry for entry in await plane.service.log(CTX, ref) if entry.kind == kind]


# ---------------------------------------------------------------------------------------------------------------- deletion


async def test_without_a_policy_nothing_ever_becomes_of_it(plane: ControlPlane) -> None:
    """A pause is no countdown (peers: row 5)."""
    await asleep(plane)
    await swept(plane, 400)
    assert await names(plane) == {"demo"}
    _, report = await plane.service.wake(CTX, "demo")
    assert report.memory is MemoryFate.KEPT


async def test_it_is_announced_a_day_before_and_then_deleted(plane: ControlPlane) -> None:
    workspace = await asleep(plane, asleep_after_days=10, asleep_action=DELETE)
    await swept(plane, 8.9)
    assert await entries(plane, "deletion-announced") == []
    await swept(plane, 0.2)
    (announced,) = await entries(plane, "deletion-announced")
    until = datetime.fromisoformat(announced.body["deletes_at"])
    assert timedelta(days=10) <= until - workspace.state_changed_at < timedelta(days=10.2)
    assert announced.body["asleep_after_days"] == 10
    await swept(plane, 0.5)
    assert await names(plane) == {"demo"}
    assert len(await entries(plane, "deletion-announced")) == 1
    await swept(plane, 0.6)
    assert await names(plane) == set()
    (deleted,) = await entries(plane, "deleted", workspace.id)
    assert (deleted.body["by"], deleted.body["cause"]) == ("policy", "asleep for 10 days, as its policy says")
    await plane.service.upkeep.clean()
    assert plane.node.stored == {}


async def test_a_server_that_was_away_announces_it_first(plane: ControlPlane) -> None:
    """Nobody is deleted who had no day to be saved in (peers: rows 5, 18)."""
    await asleep(plane, asleep_after_days=10, asleep_action=DELETE)
    await plane.crash()
    plane.database.shift_clock(100 * 86400)
    await plane.restart()
    await plane.service.upkeep.clean()
    assert await names(plane) == {"demo"}
    (announced,) = await entries(plane, "deletion-announced")
    assert datetime.fromisoformat(announced.body["deletes_at"]) >= announced.at + timedelta(days=1) - timedelta(seconds=5)
    await swept(plane, 0.9)
    assert await names(plane) == {"demo"}
    await swept(plane, 0.2)
    assert await names(plane) == set()


async def test_who_uses_it_after_the_announcement_saves_it(plane: ControlPlane) -> None:
    """And it has all of its days again (peers: row 6)."""
    await asleep(plane, asleep_after_days=10, asleep_action=DELETE)
    await swept(plane, 9.5)
    assert len(await entries(plane, "deletion-announced")) == 1
    await plane.write("demo", "/file", b"x")
    await swept(plane, 30)
    assert await names(plane) == {"demo"}, "awake it is nobody's to delete"
    await plane.service.sleep(CTX, "demo")
    await swept(plane, 8.9)
    assert len(await entries(plane, "deletion-announced")) == 1
    await swept(plane, 0.3)
    assert len(await entries(plane, "deletion-announced")) == 2
    assert await names(plane) == {"demo"}


async def test_a_policy_may_be_given_changed_and_taken_back_at_any_time(plane: ControlPlane) -> None:
    await asleep(plane)
    told = await plane.service.configure(CTX, "demo", Configuration(asleep_after_days=10, asleep_action=DELETE))
    assert (told.asleep_after_days, told.asleep_action) == (10, DELETE)
    await swept(plane, 9.5)
    assert len(await entries(plane, "deletion-announced")) == 1
    await plane.service.configure(CTX, "demo", Configuration(asleep_after_days=20))
    await swept(plane, 5)
    assert await names(plane) == {"demo"}
    await swept(plane, 5)
    assert len(await entries(plane, "deletion-announced")) == 2, "announced anew for the new day"
    told = await plane.service.configure(CTX, "demo", Configuration(asleep_action=KEEP))
    assert (told.asleep_after_days, told.asleep_action) == (None, KEEP)
    await swept(plane, 100)
    assert await names(plane) == {"demo"}
    bodies = [entry.body for entry in await entries(plane, "configured")]
    assert bodies[0] == {"asleep_after_days": 10, "asleep_action": "delete", "by": "test"}
    other_timers = await plane.service.configure(CTX, "demo", Configuration(idle_timeout_s=7.0))
    assert other_timers.asleep_after_days is None


async def test_another_timer_does_not_begin_an_announced_one_anew(plane: ControlPlane) -> None:
    await asleep(plane, asleep_after_days=10, asleep_action=DELETE)
    await swept(plane, 9.5)
    await plane.service.configure(CTX, "demo", Configuration(idle_timeout_s=7.0, keep_snapshots=3))
    await swept(plane, 1.5)
    assert await names(plane) == set()


@pytest.mark.parametrize("sleeps", [True, False])
async def test_what_branches_stand_on_is_not_deleted(plane: ControlPlane, sleeps: bool) -> None:
    await asleep(plane, asleep_after_days=10, asleep_action=DELETE)
    (child,) = await plane.service.fork(CTX, "demo", 1, names=("child",))
    assert isinstance(child, Workspace)
    assert (child.asleep_after_days, child.asleep_action) == (None, KEEP), "nobody said so of the branch"
    if sleeps:
        await plane.service.sleep(CTX, "child")
    await swept(plane, 30)
    assert await names(plane) == {"demo", "child"}
    assert await entries(plane, "deletion-announced") == [], "it is not announced either"
    await plane.service.delete(CTX, "child")
    await plane.service.upkeep.clean()
    await swept(plane)
    assert len(await entries(plane, "deletion-announced")) == 1
    await swept(plane, 1.1)
    assert await names(plane) == set()


async def test_what_is_referred_to_is_not_deleted(plane: ControlPlane) -> None:
    workspace = await asleep(plane, asleep_after_days=10, asleep_action=DELETE)
    await plane.execute(
        "insert into snapshot_references (tenant_id, snapshot_id, kind, holder) values ('ten_default', %s, 'execution', 'exe_1')",
        workspace.head_snapshot_id,
    )
    await swept(plane, 30)
    assert await names(plane) == {"demo"}
    await plane.execute("delete from snapshot_references")
    await swept(plane)
    await swept(plane, 1.1)
    assert await names(plane) == set()


async def test_what_a_rewind_kept_is_nobodys_to_delete(plane: ControlPlane) -> None:
    await plane.create(**NEVER, asleep_after_days=1, asleep_action=DELETE)
    await plane.service.checkpoint(CTX, "demo", name="early")
    await plane.write("demo", "/file", b"late")
    _, report = await plane.service.rewind(CTX, "demo", "early")
    kept = report.kept_branch
    assert kept is not None
    await swept(plane, 30)
    assert kept in await names(plane), "until somebody discards it"


async def test_one_that_is_to_wake_by_itself_is_not_deleted_before(plane: ControlPlane) -> None:
    await asleep(plane, asleep_after_days=10, asleep_action=DELETE)
    await plane.service.wake_at(CTX, "demo", timedelta(days=60))
    await swept(plane, 50)
    assert await names(plane) == {"demo"}
    await plane.service.wake_at(CTX, "demo", None)
    await swept(plane)
    await swept(plane, 1.1)
    assert await names(plane) == set()


async def test_many_are_seen_to_in_batches_and_none_is_forgotten(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aging, "BATCH", 2)
    for number in range(5):
        await asleep(plane, f"w{number}", asleep_after_days=1, asleep_action=DELETE)
    # The first two of each pass are held back by their branches, and keep nobody else from their turn.
    await plane.service.fork(CTX, "w0", 1, names=("c0",))
    await plane.service.fork(CTX, "w1", 1, names=("c1",))
    plane.database.shift_clock(2 * 86400)
    counts = [await plane.service.upkeep.aging.sweep() for _ in range(4)]
    assert max(counts) == 2, "a pass has a bound"
    plane.database.shift_clock(2 * 86400)
    for _ in range(6):
        await plane.service.upkeep.aging.sweep()
    assert await names(plane) == {"w0", "w1", "c0", "c1"}


# ----------------------------------------------------------------------------------------------------------------- archive


@pytest.fixture
async def stored() -> AsyncIterator[tuple[ControlPlane, FakeBucket, FakeSecondHome]]:
    async with control_plane() as plane:
        bucket = FakeBucket()
        home = FakeSecondHome(plane.node, bucket, StoreCatalogue(plane.database, of_snapshots=True))
        await plane.crash(node_too=False)
        await plane.restart()
        yield plane, bucket, home


async def uploaded(plane: ControlPlane) -> None:
    for _ in range(5):
        await plane.service.upkeep.uploads.begin()
        await plane.service.upkeep.uploads.drain()


Stored = tuple[ControlPlane, FakeBucket, FakeSecondHome]


async def test_an_archived_one_is_in_the_store_alone_and_its_wake_fetches_it(stored: Stored) -> None:
    """Two places are two states: it is called archived once the store has it, and never before (peers: row 17)."""
    plane, bucket, _ = stored
    await plane.create(**NEVER, asleep_after_days=30, asleep_action=ARCHIVE)
    await plane.write("demo", "/file", b"kept")
    await plane.service.checkpoint(CTX, "demo", name="one")
    await plane.service.sleep(CTX, "demo")
    await swept(plane, 31)
    assert len(plane.node.stored) == 2, "the store does not have it yet"
    assert await entries(plane, "archived") == []
    await uploaded(plane)
    await swept(plane)
    assert plane.node.stored == {} and len(bucket.content) == 2
    (archived,) = await entries(plane, "archived")
    assert archived.body["snapshots"] == 2
    await swept(plane, 30)
    assert len(await entries(plane, "archived")) == 1
    await plane.service.upkeep.reconcile()
    assert await plane.state("demo") is HIBERNATED
    _, report = await plane.service.wake(CTX, "demo")
    assert (report.restored_from, report.memory) == ("store", MemoryFate.KEPT)
    assert await plane.read("demo", "/file") == b"kept"
    await plane.service.sleep(CTX, "demo")
    await uploaded(plane)
    await plane.service.upkeep.clean()
    await swept(plane, 29.5)
    assert {one.name for one in await plane.service.snapshots(CTX, "demo")} == {"one", None}
    assert len(plane.node.stored) == 1, "its days begin anew"
    await swept(plane, 1)
    assert plane.node.stored == {}
    assert len(await entries(plane, "archived")) == 2


async def test_what_another_one_stands_on_stays_until_that_sleeps(stored: Stored) -> None:
    plane, _, _ = stored
    await asleep(plane, asleep_after_days=1, asleep_action=ARCHIVE)
    await plane.service.fork(CTX, "demo", 1, names=("child",))
    await uploaded(plane)
    await swept(plane, 2)
    assert len(plane.node.stored) == 1, "the branch is awake on it"
    assert await entries(plane, "archived") == []
    await plane.service.sleep(CTX, "child")
    await uploaded(plane)
    await swept(plane)
    assert [one.facts.workspace_id for one in plane.node.stored.values()] == [(await plane.service.get(CTX, "child")).id]
    assert len(await entries(plane, "archived")) == 1


async def test_a_store_that_is_not_ours_any_more_or_is_away_costs_nothing(stored: Stored) -> None:
    plane, bucket, home = stored
    await asleep(plane, asleep_after_days=1, asleep_action=ARCHIVE)
    await uploaded(plane)
    bucket.owner = "somebody else"
    await swept(plane, 2)
    assert len(plane.node.stored) == 1
    bucket.owner = "here"
    home.fail("claim", Unavailable("The object store does not answer."))
    await swept(plane)
    assert len(plane.node.stored) == 1
    await swept(plane)
    assert plane.node.stored == {}


async def test_one_that_cannot_be_seen_to_does_not_keep_the_others_from_it(stored: Stored) -> None:
    plane, _, home = stored
    for name in ("one", "two"):
        await asleep(plane, name, asleep_after_days=1, asleep_action=ARCHIVE)
    await uploaded(plane)
    plane.database.shift_clock(2 * 86400)
    home.fail("claim", Unavailable("The object store does not answer."))
    await plane.service.upkeep.aging.sweep()
    assert len(plane.node.stored) == 1
    await plane.service.upkeep.aging.sweep()
    assert plane.node.stored == {}


async def test_without_a_store_an_archive_is_refused(plane: ControlPlane) -> None:
    await asleep(plane)
    with pytest.raises(Conflict, match="has no object store") as caught:
        await plane.service.configure(CTX, "demo", Configuration(asleep_after_days=30, asleep_action=ARCHIVE))
    assert "PERDURE_STORE_URL" in caught.value.hint
    with pytest.raises(Conflict, match="has no object store"):
        await plane.create("other", asleep_after_days=30, asleep_action=ARCHIVE)
    assert await names(plane) == {"demo"}
    assert (await plane.service.get(CTX, "demo")).asleep_action is KEEP


async def test_a_server_that_has_lost_its_store_keeps_what_it_has(stored: Stored) -> None:
    plane, _, _ = stored
    await asleep(plane, asleep_after_days=1, asleep_action=ARCHIVE)
    await uploaded(plane)
    plane.node.second_home = None
    await swept(plane, 5)
    assert len(plane.node.stored) == 1
    assert await entries(plane, "archived") == []


# --------------------------------------------------------------------------------------------------------------- bad input


BAD = [
    (Configuration(asleep_action=DELETE), "After how many days"),
    (Configuration(asleep_after_days=30), "What is to become of it"),
    (Configuration(asleep_after_days=30, asleep_action=KEEP), "What is to become of it"),
    (Configuration(asleep_after_days=0.5, asleep_action=DELETE), "out of range"),
    (Configuration(asleep_after_days=float("nan"), asleep_action=DELETE), "out of range"),
    (Configuration(asleep_after_days=1e6, asleep_action=DELETE), "out of range"),
    (Configuration(idle_timeout_s=4.0), "no idle timeout"),
]


async def test_bad_policies_are_refused_and_change_nothing(plane: ControlPlane, subtests: pytest.Subtests) -> None:
    await asleep(plane)
    for number, (change, says) in enumerate(BAD):
        with subtests.test(says, number=number):
            with pytest.raises(InvalidRequest, match=says) as caught:
                await plane.service.configure(CTX, "demo", change)
            assert caught.value.hint
            assert await entries(plane, "configured") == []
    with pytest.raises(NotFound):
        await plane.service.configure(OTHER, "demo", Configuration(asleep_after_days=1, asleep_action=DELETE))


async def test_the_head_that_it_wakes_from_counts_even_if_it_is_another_ones(stored: Stored) -> None:
    """A branch that never slept wakes from its parent's snapshot; that alone is not its own to clear."""
    plane, _, _ = stored
    await asleep(plane)
    await plane.service.fork(CTX, "demo", 1, names=("child",))
    child = await plane.service.get(CTX, "child")
    plane.node.die(child.id)
    await plane.until("child", lambda found: found.state is HIBERNATED)
    await plane.service.configure(CTX, "child", Configuration(asleep_after_days=1, asleep_action=ARCHIVE))
    await swept(plane, 2)
    assert await entries(plane, "archived", "child") == [], "not in the store yet"
    await uploaded(plane)
    await swept(plane)
    assert len(await entries(plane, "archived", "child")) == 1
    head: SnapshotId | None = (await plane.service.get(CTX, "demo")).head_snapshot_id
    assert head in plane.node.stored, "the parent's stay where they are"
