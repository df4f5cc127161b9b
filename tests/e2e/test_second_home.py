"""The object store in real servers: a second node that has nothing wakes the workspace of the first, what a node has lost comes
back, and a store that cannot be used is told in one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.core.errors import CorruptSnapshot, Unavailable
from perdure.sdk import Client, Workspace
from perdure.wire.node import MemoryFate
from tests.e2e.crashing import COMMAND, Keeper, Kept, Place
from tests.e2e.shared_images import share_images
from tests.fakes.database import empty_database, plant

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
async def database() -> AsyncIterator[str]:
    """URL of a database that the nodes share."""
    async with empty_database("homes") as url:
        yield url


@pytest.fixture
def scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="perdure-homes-", dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def ok(place: Place, *words: str) -> Any:
    """The JSON that a command prints."""
    done = subprocess.run([*COMMAND, *words, "--json"], env=place.environment, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, (words, done)
    return json.loads(done.stdout)


def demo(client: Client) -> Workspace:
    return Workspace.connect("demo", wake=False, client=client)


def test_any_node_with_the_store_wakes_it(database: str, scratch: Path, base_image: Path, images_dir: Path) -> None:
    share_images(images_dir, base_image.name, scratch / "images1")
    shared = {
        "PERDURE_DATABASE_URL": database,
        "PERDURE_STORE_URL": f"file://{scratch}/store",
        "PERDURE_STORE_ENCRYPTION": "true",
    }
    with Place.temporary(scratch / "images1", **shared) as first, Place.temporary(scratch / "images2", **shared) as second:
        first.up()
        assert not (first.home / "db").exists(), "a database of somebody else's is all it takes"
        begun = _first_makes_it(first)
        # The second has the keys of the tenants and the master key, and nothing else: no image, no snapshot.
        shutil.copytree(first.home / "keys", second.home / "keys")
        shutil.copy2(first.home / "master.key", second.home / "master.key")
        second.up()
        with second.client() as client, pytest.raises(Unavailable, match="holds a lease"):
            demo(client).wake()
        first.down()
        _second_goes_on(second, begun)
        second.down()
        first.up()
        with first.client() as client:
            report = demo(client).wake()
            assert (report.restored_from, report.memory) == ("store", MemoryFate.KEPT), "what the second made of it comes back"
            assert Keeper(demo(client)).tell() == Kept(memory=2, file=2, pid=begun.pid)
        done = ok(first, "tenant", "shred", "ten_default", "--delete-workspaces", "--yes")
        assert done["deleted"] == ["demo"]
        first.down()
        assert not _is_shredded(second), "it was away"
        second.up()  # and throws its own copy of the key away
        second.down()
        assert _is_shredded(first) and _is_shredded(second)


def _is_shredded(place: Place) -> bool:
    return (place.home / "keys" / "ten_default.key").read_bytes() == b"shredded\n"


def _first_makes_it(place: Place) -> Kept:
    with place.client() as client:
        workspace = Workspace.create("demo", client=client, idle_timeout_s=0)
        keeper = Keeper(workspace)
        keeper.start()
        begun = keeper.put(1)
    slept = ok(place, "sleep", "demo", "--durable", "store")["snapshot"]
    assert (slept["durable"], slept["upload"]) == ("store", None)
    assert [one["durable"] for one in ok(place, "snapshot", "ls", "demo")["snapshots"]] == ["store"]
    assert [one["durable"] for one in ok(place, "show", "demo")["snapshots"]] == ["store"]
    checks = {check["name"]: check for check in ok(place, "doctor")["checks"]}
    assert checks["object store"]["status"] == "ok", checks["object store"]
    return begun


def _second_goes_on(place: Place, begun: Kept) -> None:
    with place.client() as client:
        workspace = demo(client)
        report = workspace.wake()
        assert (report.restored_from, report.memory, report.disk) == ("store", MemoryFate.KEPT, "kept")
        assert report.fetched_bytes > 0
        inside = json.loads(workspace.files.read("/run/perdure/resume.json"))
        assert inside["restored_from"] == "store", inside
        keeper = Keeper(workspace)
        assert keeper.tell() == begun
        keeper.put(2)
        head = workspace.sleep(durable="store")
        # The disk of this node is lost, while the server runs.
        for folder in ("disks", "segments"):
            for path in (place.home / "store" / folder).iterdir():
                path.unlink()
        shutil.rmtree(place.home / "store/snapshots" / head.id)
        report = workspace.wake()
        assert (report.restored_from, report.snapshot_id, report.memory) == ("store", head.id, MemoryFate.KEPT)
        assert keeper.tell() == Kept(memory=2, file=2, pid=begun.pid)
        workspace.sleep(durable="store")


@pytest.mark.long
def test_what_neither_home_has_is_told(scratch: Path, base_image: Path, images_dir: Path) -> None:
    """The store does not answer, so nothing is uploaded; the workspace goes on all the same, until its node loses it."""
    nowhere = {
        "PERDURE_STORE_URL": "s3://bucket/prefix",
        "PERDURE_STORE_OPTIONS": "endpoint=http://127.0.0.1:9,access_key_id=a,secret_access_key=b,region=us-east-1",
    }
    with Place.temporary(images_dir, **nowhere) as place:
        place.up()
        with place.client() as client:
            workspace = Workspace.create("demo", client=client, idle_timeout_s=0)
            with pytest.raises(Unavailable, match="The object store did not"):
                workspace.sleep(durable="store")
            (shown,) = workspace.snapshots()
            assert shown.durable == "local"
            assert shown.upload is not None and shown.upload.error and shown.upload.retry_s is not None
            assert workspace.wake().restored_from == "node"
            head = workspace.sleep()
            shutil.rmtree(place.home / "store/snapshots" / head.id)
            for path in (place.home / "store/segments").iterdir():
                path.unlink()
            with pytest.raises((CorruptSnapshot, Unavailable)) as caught:
                workspace.wake()
            assert caught.value.hint
        doctor = subprocess.run([*COMMAND, "doctor"], env=place.environment, capture_output=True, timeout=300, check=False)
        assert doctor.returncode != 0 and b"The object store did not give" in doctor.stdout


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        pytest.param("ftp://host/dir", "", "is no object store", marks=pytest.mark.long),
        ("s3:///prefix", "", "names no bucket"),
        pytest.param("file:///etc/passwd/store", "", "cannot hold a store", marks=pytest.mark.long),
        pytest.param("s3://bucket", "endpoint", "is not NAME=VALUE", marks=pytest.mark.long),
    ],
)
def test_a_store_that_is_none_refuses_the_start_in_one_sentence(url: str, options: str, says: str, images_dir: Path) -> None:
    with Place.temporary(images_dir, PERDURE_STORE_URL=url, PERDURE_STORE_OPTIONS=options) as place:
        done = subprocess.run([*COMMAND, "up"], env=place.environment, capture_output=True, timeout=300, check=False)
        assert done.returncode == 1
        assert says in done.stderr.decode() and "Traceback" not in done.stderr.decode(), done.stderr.decode()


def test_a_store_that_does_not_say_whose_it_is_is_told_before_the_start_and_refused_by_it(
    images_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "photo").write_bytes(b"of somebody")
    with Place.temporary(images_dir, PERDURE_STORE_URL=f"file://{tmp_path}") as place:
        checks = {check["name"]: check for check in ok(place, "doctor")["checks"]}
        assert checks["object store"]["status"] == "warn" and checks["object store"]["hint"]
        plant(place.home)
        done = subprocess.run([*COMMAND, "up"], env=place.environment, capture_output=True, timeout=300, check=False)
        assert done.returncode == 1 and "The object store is not empty (it holds 'photo')" in done.stderr.decode()
