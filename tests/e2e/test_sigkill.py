"""SIGKILL of the server, and of the VMM, in the middle of create, wake, checkpoint and hibernate, at every named point.

One home and one workspace live through all of it. After each crash the workspace wakes with the memory, and the file, of the last
snapshot that exists; what its disk had beyond is in a branch that the ResumeReport names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.core.crashpoints import CrashPoint, Victim
from perdure.sdk import Workspace
from tests.e2e.crashing import Keeper, Place, World, act, file_block

pytestmark = [pytest.mark.qemu, pytest.mark.slow]

START = (
    CrashPoint.START_RECORDED, CrashPoint.START_CLAIMED, CrashPoint.START_RESTORED, CrashPoint.START_RUNNING,
    CrashPoint.START_AWAKE, CrashPoint.START_REPORTED,
)  # fmt: skip
CAPTURE = (
    CrashPoint.CAPTURE_READY, CrashPoint.CAPTURE_PAUSED, CrashPoint.CAPTURE_COPIED, CrashPoint.CAPTURE_WRITTEN,
    CrashPoint.CAPTURE_PUBLISHED, CrashPoint.CAPTURE_REPORTED, CrashPoint.CAPTURE_COMMITTED,
)  # fmt: skip
#: From here on the snapshot exists, whoever knows of it.
MADE = {
    CrashPoint.CAPTURE_PUBLISHED, CrashPoint.CAPTURE_ENDED, CrashPoint.CAPTURE_REPORTED, CrashPoint.CAPTURE_COMMITTED,
}  # fmt: skip
WITH_MACHINE_START = (
    CrashPoint.START_CLAIMED, CrashPoint.START_RESTORED, CrashPoint.START_RUNNING, CrashPoint.START_AWAKE,
)  # fmt: skip
WITH_MACHINE_CAPTURE = (
    CrashPoint.CAPTURE_READY, CrashPoint.CAPTURE_PAUSED, CrashPoint.CAPTURE_COPIED, CrashPoint.CAPTURE_PUBLISHED,
)  # fmt: skip

CASES = [
    *((Victim.SERVER, "create", point) for point in (CrashPoint.CREATE_RECORDED, *START)),
    *((Victim.SERVER, "wake", point) for point in (CrashPoint.WAKE_RECORDED, *START, CrashPoint.START_COMMITTED)),
    *((Victim.SERVER, "checkpoint", point) for point in (CrashPoint.CHECKPOINT_RECORDED, *CAPTURE)),
    *((Victim.SERVER, "sleep", point) for point in (CrashPoint.HIBERNATE_RECORDED, *CAPTURE, CrashPoint.CAPTURE_ENDED)),
    *((Victim.VMM, "create", point) for point in WITH_MACHINE_START if point is not CrashPoint.START_AWAKE),
    *((Victim.VMM, "wake", point) for point in WITH_MACHINE_START),
    *((Victim.VMM, "checkpoint", point) for point in WITH_MACHINE_CAPTURE),
    *((Victim.VMM, "sleep", point) for point in WITH_MACHINE_CAPTURE),
]

#: In ``make test``: for each operation the points that are most different from each other. The others are in the long form.
SHORT = {
    (Victim.SERVER, "create", CrashPoint.START_RUNNING),
    (Victim.SERVER, "wake", CrashPoint.START_RESTORED),
    (Victim.SERVER, "checkpoint", CrashPoint.CAPTURE_PUBLISHED),
    (Victim.SERVER, "sleep", CrashPoint.CAPTURE_PUBLISHED),
    (Victim.SERVER, "sleep", CrashPoint.CAPTURE_ENDED),
    (Victim.VMM, "wake", CrashPoint.START_RUNNING),
    (Victim.VMM, "checkpoint", CrashPoint.CAPTURE_COPIED),
    (Victim.VMM, "sleep", CrashPoint.CAPTURE_COPIED),
}


def cases(*actions: str) -> list[Any]:
    """Parameters (victim, action, point) of these operations."""
    return [
        pytest.param(*case, id=f"{case[0].value}-{case[1]}-{case[2].value}", marks=() if case in SHORT else pytest.mark.long)
        for case in CASES
        if case[1] in actions
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, images_dir: Path, base_image: Path) -> Iterator[World]:
    with Place.temporary(images_dir) as place:
        place.up()
        with place.client() as client:
            workspace = Workspace.create("keeper", client=client)
            keeper = Keeper(workspace)
            keeper.start()
            pid = keeper.tell().pid
            workspace.sleep()  # one that never had a snapshot would start anew after the first crash
            yield World(place, workspace, keeper, pid)


def lost_branches(world: World) -> set[str]:
    return {found.name for found in Workspace.list(client=world.workspace.client) if "@lost-" in found.name}


def awake_again(world: World, generation: int, expected: int, newer: int) -> None:
    """It wakes where the last snapshot was, says so, and what is newer is kept and named."""
    report = world.workspace.wake()
    assert report.generation > generation
    assert report.memory == "kept"
    found = world.keeper.tell()
    assert (found.memory, found.file, found.pid) == (expected, expected, world.pid)
    if newer != expected:
        assert report.lost_branch is not None
        assert report.disk == "rewound"
        assert report.lost_branch in lost_branches(world)
        assert any(file_block(newer) in disk.read_bytes() for disk in world.place.disks_of(report.lost_branch))
    world.place.check_journal()
    world.place.check_rows()


@pytest.mark.parametrize(("victim", "action", "point"), cases("create"))
def test_killed_while_it_is_created(world: World, victim: Victim, action: str, point: CrashPoint) -> None:
    client = world.workspace.client
    error = world.place.crash(point, victim, lambda: Workspace.create("cut-off", client=client))
    assert error is not None
    assert "cut-off" not in {found.name for found in Workspace.list(client=client)}, "the name is free again"
    world.place.check_rows()
    world.place.check_journal()


@pytest.mark.parametrize(("victim", "action", "point"), cases("wake"))
def test_killed_while_it_wakes(world: World, victim: Victim, action: str, point: CrashPoint) -> None:
    number = world.next()
    world.workspace.sleep()
    generation = world.workspace.info.generation
    error = world.place.crash(point, victim, act(world.workspace, action))
    assert error is not None or (victim, point) == (Victim.VMM, CrashPoint.START_AWAKE), "there it dies as one that is awake"
    world.place.until(lambda: world.workspace.refresh().state == "hibernated", "the loss is recorded")
    awake_again(world, generation, number, number)


@pytest.mark.parametrize(("victim", "action", "point"), cases("checkpoint", "sleep"))
def test_killed_while_it_is_captured(world: World, victim: Victim, action: str, point: CrashPoint) -> None:
    before = world.next()
    world.workspace.checkpoint()
    newer = world.next()
    generation = world.workspace.refresh().generation
    error = world.place.crash(point, victim, act(world.workspace, action))
    assert error is not None or victim is Victim.VMM
    world.place.until(lambda: world.workspace.refresh().state == "hibernated", "the loss is recorded")
    made = point in MADE or error is None
    awake_again(world, generation, newer if made else before, newer)


@pytest.mark.parametrize(("victim", "point"), [
    pytest.param(Victim.SERVER, CrashPoint.START_COMMITTED, id="server"),
    pytest.param(Victim.VMM, CrashPoint.START_AWAKE, id="vmm"),
])  # fmt: skip
def test_one_that_was_created_when_it_died_exists_and_starts_anew(world: World, victim: Victim, point: CrashPoint) -> None:
    client = world.workspace.client
    world.place.crash(point, victim, lambda: Workspace.create("made", client=client))
    made = Workspace.connect("made", wake=False, client=client)
    world.place.until(lambda: made.refresh().state == "hibernated", "the loss is recorded")
    report = made.wake()
    assert (report.generation, report.memory, report.memory_reason) == (2, "lost", "lost before its first snapshot")
    assert made.commands.run("hostname").stdout == "made\n"
    made.delete()


def test_the_name_of_a_cut_off_create_can_be_used(world: World) -> None:
    created = Workspace.create("cut-off", client=world.workspace.client)
    assert created.commands.run("hostname").stdout == "cut-off\n"
    created.delete()


def test_nothing_is_left_behind(world: World) -> None:
    """After everything above: processes, groups, files and rows are exactly those of what exists."""
    place, client = world.place, world.workspace.client
    world.workspace.sleep()
    place.down()
    assert [line for line in place.processes() if "postgres" not in line] == []
    assert place.processes() == []
    assert place.groups() == []
    place.up()
    place.check_rows()
    place.check_store()
    for workspace in Workspace.list(client=client):
        workspace.delete()
    place.until(lambda: place.rows("select id from snapshots") == [], "every snapshot is deleted")
    place.down()
    assert {name: place.stored(name) for name in ("live", "snapshots", "segments", "disks")} == {
        "live": set(), "snapshots": set(), "segments": set(), "disks": set(),
    }  # fmt: skip
