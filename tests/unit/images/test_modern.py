"""Which kernel and agent an image boots with, when its own speak another protocol than this release."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.core.errors import HostUnfit
from perdure.images import modern
from perdure.images.agentdisk import sources_digest
from perdure.images.build import _drop_old_releases
from perdure.images.golden import GoldenSpec, golden_parts
from perdure.images.model import Image
from perdure.images.modern import bootable
from perdure.images.registry import ImageStore
from perdure.machines.driver import Accelerator, VmmIdentity
from perdure.wire.guest import PROTOCOL
from perdure.wire.node import MachineSize
from tests.unit.images.test_registry import put

SIZE = MachineSize(512, 1)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def old(store: ImageStore) -> Image:
    return replace(put(store), agent_protocol=PROTOCOL - 1)


def put_release(store: ImageStore, name: str, protocol: int = PROTOCOL, *, sources: str = "s", made: int = 0) -> Path:
    directory = store.root / "agents" / name
    directory.mkdir(parents=True)
    facts = {"digest": name, "agent_digest": "a", "kernel_digest": f"kernel of {name}", "sources_digest": sources}
    facts |= {"kernel_version": "6.13"}
    (directory / "release.json").write_text(json.dumps({**facts, "agent_protocol": protocol, "packages": {}}))
    os.utime(directory, (made, made))
    return directory


def test_an_image_that_is_spoken_to_boots_as_it_is(store: ImageStore) -> None:
    image = replace(put(store), agent_protocol=PROTOCOL)
    put_release(store, "newer")
    assert bootable(store, image) is image
    assert image.shape(SIZE).kernel == image.directory / "kernel"


def test_another_one_boots_with_the_newest_agent_that_is_spoken_here(store: ImageStore, old: Image) -> None:
    put_release(store, "other-protocol", PROTOCOL + 1, made=9)
    put_release(store, "older", made=1)
    newest = put_release(store, "newest", made=5)
    image = bootable(store, old)
    shape = image.shape(SIZE)
    assert (shape.kernel, shape.initrd, shape.agent_disk) == (newest / "kernel", newest / "initrd", newest / "agent.raw")
    assert (image.agent_protocol, image.kernel_digest) == (PROTOCOL, "kernel of newest")
    assert (image.digest, image.directory, image.root) == (old.digest, old.directory, old.root), "the disk is its own"


def test_the_agent_of_this_very_version_is_preferred(store: ImageStore, old: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modern, "sources_digest", lambda: "mine")
    put_release(store, "newest", made=5)
    mine = put_release(store, "mine", sources="mine", made=1)
    assert bootable(store, old).boot_directory == mine


def test_what_was_chosen_once_is_kept_while_it_can_be_spoken_to(store: ImageStore, old: Image) -> None:
    first = put_release(store, "first", made=1)
    assert bootable(store, old).boot_directory == first
    newer = put_release(store, "newer", made=5)
    assert bootable(store, old).boot_directory == first
    described = json.loads((first / "release.json").read_text())
    (first / "release.json").write_text(json.dumps(described | {"agent_protocol": PROTOCOL - 1}))
    assert bootable(store, old).boot_directory == newer


def test_a_build_keeps_what_an_old_image_boots_with(store: ImageStore, old: Image) -> None:
    """Else its workspaces would come to another machine, and lose their memory."""
    first = put_release(store, "first", made=1)
    assert bootable(store, old).boot_directory == first
    unused = put_release(store, "unused", made=2)
    mine = put_release(store, "mine", sources=sources_digest(), made=3)
    _drop_old_releases(store)
    assert (first.exists(), unused.exists(), mine.exists()) == (True, False, True)
    assert bootable(store, old).boot_directory == first


def test_without_one_it_says_what_to_do(store: ImageStore, old: Image) -> None:
    put_release(store, "other-protocol", PROTOCOL + 1)
    with pytest.raises(HostUnfit) as caught:
        bootable(store, old)
    assert f"protocol {PROTOCOL - 1}" in caught.value.message
    assert "perdure image build" in caught.value.hint


async def test_memory_of_two_agents_of_one_protocol_is_told_apart(store: ImageStore, old: Image, tmp_path: Path) -> None:
    class Driver:
        async def identity(self, _accelerator: Accelerator) -> VmmIdentity:
            return VmmIdentity("qemu", (7, 2, 22), "build", "pc-q35-7.2", "max", None)

    found = []
    for name in ("one", "two"):
        image = replace(old, boot_directory=tmp_path, agent_protocol=PROTOCOL, kernel_digest="same", agent_release=name)
        found.append(await golden_parts(GoldenSpec(image, SIZE, store, Driver(), Accelerator.TCG, tmp_path)))  # type: ignore[arg-type]
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"agent_release"}
    own = await golden_parts(GoldenSpec(old, SIZE, store, Driver(), Accelerator.TCG, tmp_path))  # type: ignore[arg-type]
    assert "agent_release" not in own
