"""Old snapshots under new software: another QEMU, another agent. The disk is kept, and the report says why memory is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.core.errors import HostUnfit
from perdure.core.files import write_file
from perdure.images.registry import ImageStore, image_to_json
from perdure.sdk import Workspace
from perdure.wire.guest import PROTOCOL
from perdure.wire.node import MemoryFate
from tests.contract.machines.conftest import qemu_binaries
from tests.e2e.crashing import Keeper, Place
from tests.e2e.shared_images import share_images

pytestmark = [pytest.mark.qemu, pytest.mark.long, pytest.mark.timeout(1800)]
#: A cold boot, and the golden before it, take a minute on a busy host.
PATIENT = {"PERDURE_WAKE_DEADLINE_S": "600"}


def sleeping(place: Place) -> None:
    """A workspace ``demo`` that holds 1 in memory and in a file, asleep, and the server ended."""
    place.up()
    with place.client() as client:
        workspace = Workspace.create("demo", client=client)
        keeper = Keeper(workspace)
        keeper.start()
        keeper.put(1)
        workspace.sleep()
    place.down()


def wakes_without_memory(place: Place, part: str) -> None:
    """Its file is there, its memory is not, and the report names what differs; from here on it keeps its memory."""
    with place.client() as client:
        workspace = Workspace.connect("demo", wake=False, client=client)
        (tried,) = workspace.verify(workspace.info.head_snapshot_id, boot=True)
        assert tried.intact and tried.trial is not None
        assert (tried.trial.kind, tried.trial.problem) == ("disk", "")
        report = workspace.wake()
        assert (report.memory, report.disk) == (MemoryFate.LOST, "kept")
        assert report.memory_reason.startswith("fingerprint: ") and f"{part}: " in report.memory_reason
        assert report.memory_reason == tried.trial.reason
        assert workspace.commands.run("head -n 1 /root/kept").stdout == "1\n"
        workspace.commands.run("rm -f /root/kept; echo fresh > /run/note")
        workspace.sleep()
        report = workspace.wake()
        assert (report.memory, report.memory_reason) == (MemoryFate.KEPT, "")
        assert workspace.commands.run("cat /run/note").stdout == "fresh\n"
        keeper = Keeper(workspace)
        keeper.start()
        keeper.put(1)
        workspace.sleep()


def test_a_workspace_moves_to_another_qemu_and_back(base_image: Path, images_dir: Path) -> None:
    binaries = list(qemu_binaries().values())
    if len(binaries) < 2:
        pytest.skip("this host has one QEMU only: tools/fetch-qemu10.sh fetches a second one where the distribution has it")
    with Place.temporary(images_dir, PERDURE_QEMU=binaries[0], **PATIENT) as place:
        sleeping(place)
        for binary in (binaries[1], binaries[0]):
            place.extra["PERDURE_QEMU"] = binary
            place.up()
            wakes_without_memory(place, "vmm")
            place.down()


@pytest.fixture
def own_images(base_image: Path, images_dir: Path, home: Path) -> Iterator[Path]:
    """The image cache in a directory of its own, its big files shared with the usual one."""
    home.chmod(0o711)
    own = home / "images"
    share_images(images_dir, base_image.name, own)
    yield own


def make_old(images: Path, digest: str) -> None:
    """The image becomes one of an earlier release, whose agent spoke another protocol."""
    store = ImageStore(images)
    image = store.load(digest)
    facts = json.loads((image.directory / "image.json").read_bytes())["files"]
    write_file(image.directory / "image.json", image_to_json(replace(image, agent_protocol=PROTOCOL - 1), facts))


def test_an_old_disk_gets_the_newest_agent(base_image: Path, own_images: Path) -> None:
    with Place.temporary(own_images, **PATIENT) as place:
        sleeping(place)
        make_old(own_images, base_image.name)
        away = own_images / "agents-away"
        (own_images / "agents").rename(away)
        place.up()
        with place.client() as client:
            workspace = Workspace.connect("demo", wake=False, client=client)
            with pytest.raises(HostUnfit, match=f"speaks protocol {PROTOCOL - 1}"):
                workspace.wake()
            assert workspace.refresh().state.value == "hibernated", "nothing was lost"
        away.rename(own_images / "agents")
        wakes_without_memory(place, "agent_release")
