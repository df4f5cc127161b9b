"""What SIGKILL costs when nothing is in the middle of anything, orderly ends, and a database that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.core.errors import PerdureError
from perdure.db.embedded import EmbeddedPostgres
from perdure.sdk import Client, Workspace
from tests.e2e.crashing import COMMAND, Keeper, Place

pytestmark = [pytest.mark.qemu, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(images_dir: Path, base_image: Path) -> Iterator[Place]:
    with Place.temporary(images_dir) as place:
        place.up()
        yield place
        if place.is_up:
            place.down()
        assert place.processes() == []
        assert place.groups() == []


@pytest.fixture
def client(place: Place) -> Iterator[Client]:
    """Of a server that runs, whatever an earlier test did, and has no workspace."""
    if not place.is_up:
        place.up()
    with place.client() as client:
        for left in Workspace.list(client=client):
            left.delete()
        yield client


def cli(place: Place, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words]
    return subprocess.run(command, env=place.environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.timeout(600)
def test_a_synced_file_outlives_the_server_in_the_lost_branch(place: Place, client: Client) -> None:
    workspace = Workspace.create("writer", client=client)
    workspace.commands.run("echo old > /root/note; sync")
    workspace.checkpoint()
    assert workspace.commands.run("echo new > /root/note && sync /root/note /root").exit_code == 0
    workspace.files.write("/root/sent", "whole\n")  # synced when it returns
    place.kill()
    place.up()
    assert workspace.files.read("/root/note") == "old\n", "memory and disk are those of the checkpoint"
    assert workspace.report is not None
    assert (workspace.report.memory, workspace.report.disk) == ("kept", "rewound")
    branch = workspace.report.lost_branch
    assert branch is not None
    assert branch.startswith("writer@lost-")
    lost = Workspace.connect(branch, client=client)  # boots: it is a disk without memory
    assert lost.report is not None
    assert lost.report.memory == "lost"
    assert lost.files.read("/root/note") == "new\n"
    assert lost.files.read("/root/sent") == "whole\n"
    lost.delete()
    workspace.delete()


@pytest.mark.timeout(600)
def test_down_hibernates_everything_and_wakes_keep_their_memory(place: Place, client: Client) -> None:
    keepers = [Keeper(Workspace.create(f"keeper-{number}", client=client)) for number in range(3)]
    for number, keeper in enumerate(keepers, 1):
        keeper.start()
        keeper.put(number)
    told = [keeper.tell() for keeper in keepers]
    stopped = cli(place, "down", "--json")
    assert stopped.returncode == 0, stopped.stderr
    assert '"hibernated": 3' in stopped.stdout
    assert "was not put to sleep" not in place.log_tail(), place.log_tail()
    assert place.ended() == 0
    assert place.processes() == []
    assert place.groups() == []
    again = cli(place, "down")
    assert again.returncode != 0
    assert "No Perdure server answers" in again.stderr
    place.up()
    assert {found.info.state for found in Workspace.list(client=client)} == {"hibernated"}
    second = cli(place, "up")
    assert second.returncode != 0
    assert "Another Perdure server runs with the home" in second.stderr
    assert [keeper.workspace.wake().memory for keeper in keepers] == ["kept"] * 3, place.log_tail()
    assert [keeper.tell() for keeper in keepers] == told
    place.check_journal()
    for keeper in keepers:
        keeper.workspace.delete()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["postmaster", pytest.param("backend", marks=pytest.mark.long)])
def test_a_killed_database_costs_no_workspace_anything(place: Place, client: Client, victim: str) -> None:
    keeper = Keeper(Workspace.create(f"db-{victim}", client=client))
    keeper.start()
    before = keeper.put(7)
    workspace, generation = keeper.workspace, keeper.workspace.refresh().generation
    postmaster = EmbeddedPostgres(place.home).pid()
    assert postmaster is not None
    if victim == "postmaster":
        os.kill(postmaster, signal.SIGKILL)
    else:
        query = "select pid from pg_stat_activity where application_name = 'perdure' order by pid"
        os.kill(int(place.rows(query)[0][0]), signal.SIGKILL)

    def goes_on() -> bool:
        try:
            return keeper.tell() == before
        except PerdureError:
            return False

    started = EmbeddedPostgres(place.home)
    place.until(lambda: started.pid() is not None and (started.pid() == postmaster) == (victim == "backend"), "it runs again")
    place.until(goes_on, "the server has its database again")
    assert workspace.refresh().generation == generation, "the same machine, which nobody stopped"
    snapshot = workspace.checkpoint()
    workspace.sleep()
    assert workspace.wake().memory == "kept"
    assert keeper.tell() == before
    assert snapshot.generation == generation
    place.check_journal()
    place.check_rows()
    workspace.delete()
