"""Damage in a real store: what is offered really wakes, and a trial that is cut off leaves nothing."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from perdure.core.errors import CorruptSnapshot, PerdureError
from perdure.sdk import Workspace
from perdure.wire.node import MemoryFate
from tests.e2e.crashing import COMMAND, Keeper, Kept, Place

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def place(base_image: Path, images_dir: Path) -> Iterator[Place]:
    with Place.temporary(images_dir) as place:
        place.up()
        yield place


def manifest(place: Place, snapshot_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place.home / "store/snapshots" / snapshot_id / "manifest.json").read_bytes())
    return found


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def run(place: Place, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *words], env=place.environment, capture_output=True, timeout=300, check=False)


def test_a_damaged_snapshot_is_named_and_the_ancestor_that_is_offered_wakes(place: Place) -> None:
    with place.client() as client:
        workspace = Workspace.create("demo", client=client)
        keeper = Keeper(workspace)
        keeper.start()
        first = keeper.put(1)
        one = workspace.checkpoint("one")
        keeper.put(2)
        head = workspace.sleep()
        older, newer = (manifest(place, snapshot.id)["memory"]["segments"] for snapshot in (one, head))
        added = [(name, older.get(name, 64), end) for name, end in newer.items() if end > older.get(name, 64)]
        segment, begin, end = added[-1]
        flip(place.home / "store/segments" / f"{segment}.pages", (begin + end) // 2)
        file = f"segments/{segment}.pages"

        with pytest.raises(CorruptSnapshot) as caught:
            workspace.wake()
        assert caught.value.details == {"file": file, "snapshot_id": head.id, "ancestor": one.id, "disk": "intact"}
        assert f"{segment}.pages" in caught.value.message and one.id in caught.value.hint
        assert workspace.refresh().state.value == "failed"
        assert place.stored("live") == set()

        told = run(place, "snapshot", "verify", "demo", "--json")
        assert told.returncode == 1
        answer = json.loads(told.stdout)
        assert [damage["file"] for damage in answer["damage"]] == [file]
        assert {found["snapshot_id"]: found["ancestor"] for found in answer["snapshots"] if not found["intact"]} == {
            head.id: one.id
        }

        report = workspace.recover("rewind")
        assert (report.snapshot_id, report.memory) == (one.id, MemoryFate.KEPT)
        assert keeper.tell() == Kept(memory=1, file=1, pid=first.pid)
        (tried,) = workspace.verify("one", boot=True)
        assert tried.intact and tried.trial is not None and tried.trial.kind == "memory"
        assert keeper.tell().pid == first.pid, "a trial does not touch who is awake"


@pytest.mark.long
def test_a_bit_flipped_inside_a_disk_layer_is_found_by_the_wake(place: Place) -> None:
    with place.client() as client:
        workspace = Workspace.create("demo", client=client)
        keeper = Keeper(workspace)
        keeper.start()
        first = keeper.put(1)
        one = workspace.checkpoint("one")
        keeper.put(2)
        head = workspace.sleep()
        layer = place.home / "store/disks" / f"{manifest(place, head.id)['layers'][-1]['disk_id']}.qcow2"
        flip(layer, layer.stat().st_size // 2)

        with pytest.raises(CorruptSnapshot) as caught:
            workspace.wake()
        file = f"disks/{layer.name}"
        assert caught.value.details == {"file": file, "snapshot_id": head.id, "ancestor": one.id, "disk": "damaged"}
        assert workspace.refresh().state.value == "failed"
        assert place.stored("live") == set()
        with pytest.raises(CorruptSnapshot):
            workspace.recover("disk-boot")
        report = workspace.recover("rewind")
        assert (report.snapshot_id, report.memory) == (one.id, MemoryFate.KEPT)
        assert keeper.tell() == Kept(memory=1, file=1, pid=first.pid)


@pytest.mark.long
def test_a_trial_that_the_server_does_not_survive_leaves_nothing(place: Place) -> None:
    with place.client() as client:
        workspace = Workspace.create("demo", client=client)
        workspace.sleep()
        before = {name: place.stored(name) for name in ("snapshots", "segments", "disks")}

        def has_record() -> bool:
            return any(name.startswith("try_") for name in place.stored("live"))

        def has_machine() -> bool:
            return any("trial-" in line for line in place.processes())

        for moment in (has_record, has_machine):
            trial = threading.Thread(target=_verify, args=(place,))
            trial.start()
            place.until(moment, moment.__name__)
            place.kill()
            trial.join()
            place.up()
            assert place.stored("live") == set()
            assert {name: place.stored(name) for name in before} == before
            assert not has_machine()
        (tried,) = workspace.verify(boot=True)
        assert tried.intact and tried.trial is not None
        assert place.stored("live") == set()
        assert {name: place.stored(name) for name in before} == before
        assert not has_machine()
        assert workspace.wake().memory is MemoryFate.KEPT


def _verify(place: Place) -> None:
    with place.client() as client, suppress(PerdureError):
        for _ in client.verify("demo", boot=True):
            pass
