"""A real server backed up, killed in the middle, lost and brought back: from a backup, and from the object store alone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.backup.restore import MARK
from perdure.core.crashpoints import CrashPoint, Victim
from perdure.sdk import Workspace
from tests.e2e.crashing import COMMAND, FILE, Keeper, Place

pytestmark = [pytest.mark.qemu, pytest.mark.slow]
DEADLINE_S = 300


def cli(place: Place, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**place.environment, **extra}
    return subprocess.run([*COMMAND, *words], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def last(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last document of a --json command that went well."""
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@dataclass
class Saved:
    """A server with a workspace that runs and one that sleeps, and a backup of it with its key."""

    place: Place
    backups: Path
    pids: dict[str, int]
    backup: dict[str, Any]


@pytest.fixture(scope="module")
def saved(images_dir: Path, base_image: Path) -> Iterator[Saved]:
    backups = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp")) / "backups"
    with Place.temporary(images_dir) as place:
        place.up()
        pids = {}
        with place.client() as client:
            for name in ("awake", "asleep"):
                keeper = Keeper(Workspace.create(name, client=client))
                keeper.start()
                pids[name] = keeper.put(1).pid
            client_side = Workspace.connect("awake", client=client)
            client_side.checkpoint(name="good")
            Keeper(client_side).put(2)  # nobody has captured this
            Workspace.connect("asleep", client=client).sleep()
        backup = last(cli(place, "backup", str(backups), "--with-master-key", "--json"))["backup"]
        yield Saved(place, backups, pids, backup)
        if place.is_up:
            place.down()
        assert place.processes() == []
    shutil.rmtree(backups.parent, ignore_errors=True)


@pytest.fixture
def empty(saved: Saved, images_dir: Path) -> Iterator[Place]:
    """An empty home, and an empty image directory in it: images come back, too."""
    with Place.temporary(images_dir) as place:
        place.extra["PERDURE_IMAGE_DIR"] = str(place.home / "images")
        yield place
        if place.is_up:
            place.down()
        assert place.processes() == []


def is_whole(place: Place, saved: Saved) -> None:
    """The restored server wakes everything, with the memory that it had at the backup."""
    place.images_dir = place.home / "images"
    place.up()
    with place.client() as client:
        for name, pid in saved.pids.items():
            workspace = Workspace.connect(name, client=client)
            told = Keeper(workspace).tell()
            assert (told.memory, told.file, told.pid) == (1, 1, pid), "the same process, as of the last snapshot"
            report = workspace.report
            assert report is not None
            assert (report.memory, report.disk) == ("kept", "rewound")
            assert f"restored from the backup {saved.backup['id']}" in report.memory_reason
            assert report.generation > 1_000_000_000
            inside = json.loads(workspace.files.read("/run/perdure/resume.json"))
            assert inside["memory_reason"] == report.memory_reason
    place.check_rows()
    place.check_journal()


@pytest.mark.timeout(900)
def test_a_server_comes_back_from_its_backup(saved: Saved, empty: Place) -> None:
    assert (saved.backup["workspaces"], saved.backup["snapshots"], saved.backup["awake"]) == (2, 2, ["awake"])
    restored = last(cli(empty, "restore", str(saved.backups), "--json"))["restored"]
    assert (restored["backup"], restored["set_back"], restored["lost"]) == (saved.backup["id"], ["awake"], [])
    assert (empty.home / "master.key").read_bytes() == (saved.place.home / "master.key").read_bytes()
    is_whole(empty, saved)
    again = cli(empty, "restore", str(saved.backups))
    assert again.returncode == 1 and "Another Perdure server runs" in again.stderr
    empty.down()
    again = cli(empty, "restore", str(saved.backups))
    assert again.returncode == 1 and "is in use already" in again.stderr


@pytest.mark.timeout(900)
@pytest.mark.long
def test_what_is_damaged_is_left_out_and_its_disk_comes_back(
    saved: Saved, empty: Place, images_dir: Path, tmp_path: Path
) -> None:
    last(cli(empty, "restore", str(saved.backups), "--json"))
    for path in (empty.home / "store/snapshots").glob("*/devices.state"):
        path.write_bytes(bytes(path.stat().st_size))
    where = str(tmp_path / "backups")
    refused = cli(empty, "backup", where)
    assert refused.returncode == 1 and "so there is no backup" in refused.stderr and "--skip-damaged" in refused.stderr
    made = cli(empty, "backup", where, "--skip-damaged", "--with-master-key", "--json")
    assert made.returncode == 3, made.stderr
    left_out = json.loads(made.stdout.splitlines()[-1])["backup"]["left_out"]
    assert sorted((one["workspace"], one["has_disk"]) for one in left_out) == [("asleep", True), ("awake", True)]
    with Place.temporary(images_dir) as place:
        place.extra["PERDURE_IMAGE_DIR"] = str(place.home / "images")
        restored = last(cli(place, "restore", where, "--json"))["restored"]
        assert len(restored["lost"]) == 2 and restored["snapshots"] == 2
        place.images_dir = place.home / "images"
        place.up()
        with place.client() as client:
            workspace = Workspace.connect("asleep", client=client)
            assert workspace.report is not None
            assert (workspace.report.memory, workspace.report.disk) == ("lost", "rewound")
            assert workspace.files.read(FILE, "bytes").startswith(b"1\n"), "what was on its disk"
            assert "left-out" in {entry.kind for entry in client.log("asleep")}
        place.down()


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("point", [CrashPoint.RESTORE_MARKED, CrashPoint.RESTORE_FETCHED, CrashPoint.RESTORE_SETTLED])
def test_a_restore_that_was_killed_goes_on(saved: Saved, empty: Place, point: CrashPoint) -> None:
    empty.crash_file.write_text(f"{point.value} {Victim.SERVER.value} 1")
    killed = cli(empty, "restore", str(saved.backups))
    assert killed.returncode == -signal.SIGKILL and not empty.crash_file.exists()
    assert (empty.home / MARK).exists()
    refused = cli(empty, "up", "--detach")
    assert refused.returncode == 1
    assert f"A restore of the backup {saved.backup['id']} into {empty.home} has not been finished." in refused.stderr
    assert "perdure restore" in refused.stderr
    last(cli(empty, "restore", str(saved.backups), "--json"))
    is_whole(empty, saved)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", [
    pytest.param(CrashPoint.BACKUP_HELD, marks=pytest.mark.long),
    CrashPoint.BACKUP_SENT,
    pytest.param(CrashPoint.BACKUP_FINISHED, marks=pytest.mark.long),
])  # fmt: skip
def test_a_server_killed_in_a_backup_holds_nothing_and_makes_the_next_one(saved: Saved, point: CrashPoint) -> None:
    place = saved.place
    if not place.is_up:
        place.up()
    before = {path.stem for path in (saved.backups / "backups").glob("*.json")}
    place.crash_file.write_text(f"{point.value} {Victim.SERVER.value} 1")
    assert cli(place, "backup", str(saved.backups)).returncode == 1
    assert place.ended() == -signal.SIGKILL
    whole = {path.stem for path in (saved.backups / "backups").glob("*.json")} - before
    assert len(whole) == (1 if point is CrashPoint.BACKUP_FINISHED else 0)
    place.up()
    assert place.rows("select * from snapshot_references") == []
    made = last(cli(place, "backup", str(saved.backups), "--json"))["backup"]
    assert made["sent_bytes"] < 10_000_000, "images and snapshots are there"


@pytest.mark.timeout(900)
def test_a_home_without_a_server_is_backed_up_too(saved: Saved) -> None:
    place = saved.place
    if place.is_up:
        place.down()
    made = last(cli(place, "backup", str(saved.backups), "--json"))["backup"]
    assert made["workspaces"] >= 2 and made["awake"] == [], "what a killed server's machines had is kept beside them"
    nothing = cli(place, "backup", str(saved.backups), PERDURE_HOME=str(place.home / "none"))
    assert nothing.returncode == 1 and "There is nothing to back up" in nothing.stderr
    inside = cli(place, "backup", str(place.home / "backups"))
    assert inside.returncode == 1 and "is what is backed up" in inside.stderr


@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_catalogue_comes_back_from_the_object_store_alone(images_dir: Path, base_image: Path) -> None:
    """The home is gone, with its database, its snapshots, its keys and its images."""
    store = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp")) / "store"
    try:
        with Place.temporary(images_dir, PERDURE_STORE_URL=store.as_uri()) as lost:
            lost.up()
            with lost.client() as client:
                keeper = Keeper(Workspace.create("precious", client=client))
                keeper.start()
                pid = keeper.put(1).pid
                keeper.workspace.checkpoint(name="good")
                keeper.put(2)
                keeper.workspace.sleep()
            assert cli(lost, "snapshot", "push", "precious").returncode == 0
            assert cli(lost, "snapshot", "push", "precious", "good").returncode == 0
            lost.kill()
        with Place.temporary(images_dir, PERDURE_STORE_URL=store.as_uri()) as found:
            _recovered(found, pid)
    finally:
        shutil.rmtree(store.parent, ignore_errors=True)


def _recovered(found: Place, pid: int) -> None:
    found.images_dir = found.home / "images"
    found.crash_file.write_text(f"{CrashPoint.RECOVER_CLAIMED.value} {Victim.SERVER.value} 1")
    assert cli(found, "recover", "--from-store").returncode == -signal.SIGKILL
    done = last(cli(found, "recover", "--from-store", "--json"))["recovered"]
    assert (done["workspaces"], done["snapshots"]) == (["precious"], 2)
    assert (done["nameless"], done["incomplete"], done["damaged"]) == ([], [], {})
    again = cli(found, "recover", "--from-store")
    assert again.returncode == 1 and "The database is not empty" in again.stderr
    found.up()
    with found.client() as client:
        workspace = Workspace.connect("precious", client=client)
        told = Keeper(workspace).tell()
        assert (told.memory, told.file, told.pid) == (2, 2, pid)
        report = workspace.report
        assert report is not None and report.restored_from == "store"
        assert "recovered from the object store" in report.memory_reason
        assert [one.name for one in workspace.snapshots()] == ["good", None]
    found.down()
    assert found.processes() == []
