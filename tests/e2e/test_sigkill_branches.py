"""SIGKILL of the server in the middle of rewind and promote, at every named point of theirs, and of the VMM that they start.

One home and one workspace live through all of it. Whatever is interrupted, what the workspace was is in it or in a branch that
was kept of it, with its memory; nothing is half done, and the same call made again does what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.core.crashpoints import CrashPoint, Victim
from perdure.core.errors import PerdureError
from perdure.sdk import Workspace
from perdure.sdk._core import Call, workspace_path
from tests.e2e.crashing import Keeper, Kept, Place, World

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]

#: Before these nothing has moved, after them it has, whoever knows of it.
REWOUND = {CrashPoint.REWIND_RECORDED, CrashPoint.START_RUNNING, CrashPoint.START_COMMITTED}
PROMOTED = {CrashPoint.PROMOTE_RECORDED, CrashPoint.START_RUNNING}


class Family(World):
    def kept(self) -> list[Workspace]:
        """What was kept of the workspace, oldest first."""
        found = Workspace.list(client=self.workspace.client)
        return [one for one in found if one.info.parent_id == self.workspace.id and one.info.kind == "branch"]

    def clear(self) -> None:
        for branch in Workspace.list(client=self.workspace.client):
            if branch.info.kind != "workspace":
                branch.discard()

    def holds(self, workspace: Workspace, number: int) -> None:
        """With memory: the program has gone on since it was started at first."""
        assert Keeper(workspace).tell() == Kept(number, number, self.pid)


@pytest.fixture(scope="module")
def shared(images_dir: Path, base_image: Path) -> Iterator[Family]:
    with Place.temporary(images_dir) as place:
        place.up()
        with place.client() as client:
            workspace = Workspace.create("keeper", client=client)
            keeper = Keeper(workspace)
            keeper.start()
            yield Family(place, workspace, keeper, keeper.tell().pid)


@pytest.fixture
def world(shared: Family) -> Family:
    """Awake, with no branches."""
    shared.clear()
    shared.workspace.wake()
    return shared


def request(workspace: Workspace, action: str, **body: Any) -> Callable[[], Any]:
    """As one request that is not repeated when the server goes away."""
    return lambda: workspace.client.request(Call("POST", workspace_path(workspace.id, action), body=body or None))


def settled(world: Family) -> None:
    """Repaired, and nothing half done."""
    world.place.until(lambda: world.workspace.refresh().state in {"hibernated", "running"}, "the loss is recorded")
    world.place.check_rows()
    world.place.check_journal()


@pytest.mark.parametrize(("victim", "point"), [
    (Victim.SERVER, CrashPoint.REWIND_RECORDED),
    pytest.param(Victim.SERVER, CrashPoint.REWIND_ASLEEP, marks=pytest.mark.long),
    pytest.param(Victim.VMM, CrashPoint.START_RUNNING, marks=pytest.mark.long),
    pytest.param(Victim.SERVER, CrashPoint.START_RUNNING, marks=pytest.mark.long),
    pytest.param(Victim.SERVER, CrashPoint.START_COMMITTED, marks=pytest.mark.long),
])  # fmt: skip
def test_killed_while_it_is_rewound(world: Family, victim: Victim, point: CrashPoint) -> None:
    early = world.next()
    snapshot = world.workspace.checkpoint()
    late = world.next()
    generation = world.workspace.refresh().generation
    error = world.place.crash(point, victim, request(world.workspace, "rewind", snapshot=snapshot.id))
    assert isinstance(error, PerdureError)
    settled(world)
    report = world.workspace.wake()
    assert (report.generation > generation, report.memory) == (True, "kept")
    if point in REWOUND:
        world.holds(world.workspace, early)
        (kept,) = world.kept()
        if point is not CrashPoint.START_COMMITTED:  # there the report was made, and nobody was there to read it
            assert report.kept_branch == kept.name
        world.holds(kept, late)
    else:
        world.holds(world.workspace, late)
        assert world.kept() == [], "nothing has happened yet"
        again = world.workspace.rewind(snapshot.id)
        world.holds(world.workspace, early)
        assert again.kept_branch == world.kept()[0].name
    world.number = max(early, late)


@pytest.mark.parametrize(("victim", "point"), [
    (Victim.SERVER, CrashPoint.PROMOTE_RECORDED),
    pytest.param(Victim.SERVER, CrashPoint.PROMOTE_PARENT_ASLEEP, marks=pytest.mark.long),
    pytest.param(Victim.SERVER, CrashPoint.PROMOTE_ASLEEP, marks=pytest.mark.long),
    pytest.param(Victim.SERVER, CrashPoint.START_RUNNING, marks=pytest.mark.long),
    pytest.param(Victim.VMM, CrashPoint.START_RUNNING, marks=pytest.mark.long),
])  # fmt: skip
def test_killed_while_a_branch_is_promoted(world: Family, victim: Victim, point: CrashPoint) -> None:
    before = world.keeper.tell().memory
    (branch,) = world.workspace.fork(1)
    assert isinstance(branch, Workspace)
    mine = world.next()
    branchs = replace(world, workspace=branch, keeper=Keeper(branch)).next()
    world.number = branchs
    error = world.place.crash(point, victim, request(branch, "promote"))
    assert isinstance(error, PerdureError)
    settled(world)
    if point not in PROMOTED:
        if point is CrashPoint.PROMOTE_PARENT_ASLEEP:
            assert (world.workspace.info.state, world.kept()[0].id) == ("hibernated", branch.id), "both sleep, nothing moved"
        world.holds(branch, branchs)
        branch.promote()
    report = world.workspace.wake()
    assert report.memory == "kept"
    world.holds(world.workspace, branchs)
    (kept,) = world.kept()
    assert report.kept_branch == kept.name
    if point is CrashPoint.PROMOTE_ASLEEP:  # the parent was awake, and its machine died with the server
        assert report.lost_branch is not None, "its newer disk"
        world.holds(kept, before)
    else:
        world.holds(kept, mine)


def test_nothing_is_left_behind(world: Family) -> None:
    place = world.place
    world.clear()
    world.workspace.sleep()
    place.down()
    assert place.processes() == []
    assert place.groups() == []
    place.up()
    place.check_rows()
    place.until(lambda: place.rows("select id from snapshots where state = 'deleting'") == [], "what was discarded is deleted")
    place.check_store()
    place.down()
