"""Upgrading Perdure keeps every workspace: a home made by the release before, opened by this one.

The release before is the last commit of this repository before migration 0002, its code unpacked beside the test and run with
the present environment. It builds its own agent disk and golden on the root disk that is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.core.files import write_file
from perdure.db.migrations import head
from perdure.sdk import Workspace
from perdure.wire.node import MemoryFate
from tests.conftest import ROOT
from tests.e2e.crashing import COMMAND, PROGRAM, Keeper, Place
from tests.e2e.shared_images import share_images

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(1800)]
FIRST_OF_THIS_RELEASE = "src/perdure/db/migrations/versions/0002_branches.py"
#: A cold boot, and the golden before it, take a minute on a busy host.
PATIENT = {"PERDURE_WAKE_DEADLINE_S": "600"}


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source directory of the release before."""
    added = git("log", "--diff-filter=A", "--format=%H", "-1", "--", FIRST_OF_THIS_RELEASE)
    commit = git("rev-parse", "--verify", "--quiet", f"{added}^") if added else ""
    if not commit:
        pytest.skip("there is no git history here that has the release before (an unpacked archive, or a shallow clone)")
    place = tmp_path_factory.mktemp("earlier")
    archive = place / "release.tar"
    subprocess.run(["git", "-C", str(ROOT), "archive", "-o", str(archive), commit, "src"], check=True)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(place)], check=True)
    return place / "src"


@pytest.fixture
def images(earlier: Path, base_image: Path, images_dir: Path, home: Path) -> Iterator[Path]:
    """The image ``base`` as the release before describes images, without goldens."""
    home.chmod(0o711)
    own = home / "images"
    share_images(images_dir, base_image.name, own, goldens=False)
    described = own / "blobs" / base_image.name / "image.json"
    asked = "from perdure.images import registry; print(registry.FORMAT)"
    env = {"PYTHONPATH": str(earlier), "PATH": "/usr/bin:/bin"}
    answer = subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True, check=True)
    facts = json.loads(described.read_bytes())
    assert facts.pop("checksum"), "which the release before did not write"
    write_file(described, json.dumps({**facts, "format": int(answer.stdout)}).encode())
    yield own


def perdure(place: Place, *words: str, stdin: bytes | None = None) -> bytes:
    """``perdure WORDS`` of the release that ``place`` runs."""
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    done = subprocess.run([*COMMAND, *words], env=place.environment, capture_output=True, timeout=900, check=False, **given)
    assert done.returncode == 0, (words, done.stdout.decode(), done.stderr.decode(), place.log_tail())
    return done.stdout


def told(place: Place, *words: str) -> Any:
    return json.loads(perdure(place, "--json", *words))


def live_in(place: Place) -> None:
    """What somebody had before the upgrade: a workspace that sleeps with its programs, one that is awake when the server is
    stopped, a branch, and named checkpoints."""
    for name in ("demo", "second"):
        perdure(place, "create", name)
        perdure(place, "cp", "-", f"{name}:/root/keeper.py", stdin=PROGRAM.encode())
        perdure(place, "exec", "--detach", name, "--", "python3", "/root/keeper.py")
        put = "until [ -p /run/keeper.out ]; do sleep 0.1; done; echo put {} > /run/keeper.in; cat /run/keeper.out"
        perdure(place, "exec", name, "--", "sh", "-c", put.format(7))
        perdure(place, "checkpoint", name, "--name", "seven")
        perdure(place, "exec", name, "--", "sh", "-c", put.format(8))
    perdure(place, "fork", "demo", "--name", "branch")
    perdure(place, "sleep", "demo")


def known(place: Place) -> dict[str, tuple[Any, ...]]:
    """Every workspace by its id: what must not change, and the ids of its named snapshots."""
    same = ("name", "kind", "image", "memory_mib", "vcpus", "disk_gib", "hostname", "created_at")
    found = {}
    for one in told(place, "ls")["workspaces"]:
        snapshots = told(place, "snapshot", "ls", one["name"])["snapshots"]
        named = sorted((snapshot["name"], snapshot["id"]) for snapshot in snapshots if snapshot["name"])
        found[one["id"]] = (*(one.get(key) for key in same), *named)
    return found


@pytest.mark.long
def test_the_workspaces_of_the_release_before_go_on(earlier: Path, images: Path) -> None:
    with Place.temporary(images, planted=False, PYTHONPATH=str(earlier), **PATIENT) as place:
        perdure(place, "image", "build", "--if-missing")
        place.up()
        live_in(place)
        before = known(place)
        assert len(before) == 3
        assert place.rows("select version_num from alembic_version") == [("0001",)], "it was the release before"
        place.down()
        del place.extra["PYTHONPATH"]
        place.up()
        assert place.rows("select version_num from alembic_version") == [(head(),)]
        assert known(place) == before
        for name in ("branch", "demo", "second"):
            goes_on(place, name)
        place.down()
        place.up()
        place.check_journal()
        place.check_rows()
        place.down()


def goes_on(place: Place, name: str) -> None:
    """It is whole, it wakes, its file is there, and so is its memory if the report says so; from here on it is one of ours."""
    with place.client() as client:
        workspace = Workspace.connect(name, wake=False, client=client)
        assert all(verdict.intact for verdict in workspace.verify())
        generation = workspace.info.generation
        report = workspace.wake()
        assert (report.disk, report.generation) == ("kept", generation + 1)
        assert workspace.commands.run("head -n 1 /root/kept").stdout == "8\n"
        keeper = Keeper(workspace)
        if report.memory is MemoryFate.KEPT:
            kept = keeper.tell()
            assert (kept.memory, kept.file) == (8, 8)
        else:
            assert report.memory is MemoryFate.LOST
            assert report.memory_reason.startswith("fingerprint: "), report
            workspace.commands.run("rm -f /root/kept")
            keeper.start()
        assert keeper.put(9).memory == 9
        workspace.sleep()
        assert workspace.wake().memory is MemoryFate.KEPT
        assert keeper.tell().memory == 9
        workspace.sleep()
