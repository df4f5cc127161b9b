"""Damage in what all workspaces of an image share is found and named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perdure.core.errors import CorruptData
from perdure.images.model import Golden
from perdure.images.registry import ImageStore, described_files, load_golden
from perdure.images.verify import ImageVerifier
from perdure.wire.node import Damage
from tests.unit.images.test_registry import DIGEST, OTHER, put, put_golden

IMAGE = ("image.json", "kernel", "initrd", "root.raw", "agent.raw")
GOLDEN = ("golden.json", "ram.base", "disk.qcow2", "devices.state")
PAGES = bytes(4096) + os.urandom(8192) + bytes(40960) + os.urandom(5000)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def golden(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> Golden:
    """An image with a golden; all their files have pages of zeros and pages of other things."""
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: write(path, data if path.suffix == ".json" else PAGES))
    made = put_golden(put(store))
    monkeypatch.undo()
    return made


def check(store: ImageStore, golden: Golden) -> list[Damage]:
    verifier = ImageVerifier(store, lambda _file, _count: None)
    return [*verifier.image(DIGEST), *verifier.golden(DIGEST, golden.ref)]


def place(golden: Golden, name: str) -> Path:
    return golden.directory / name if name in GOLDEN else golden.directory.parent.parent / name


def named(golden: Golden, name: str) -> str:
    return f"images/blobs/{DIGEST}/{f'golden/{golden.name}/' if name in GOLDEN else ''}{name}"


def test_what_is_whole_is_whole_and_read_once(store: ImageStore, golden: Golden) -> None:
    heard: list[str] = []
    verifier = ImageVerifier(store, lambda file, _count: heard.append(file))
    for _ in range(2):
        assert verifier.image(DIGEST) == verifier.golden(DIGEST, golden.ref) == ()
    for name in (*IMAGE, *GOLDEN):
        assert named(golden, name) in heard
    assert len([file for file in heard if file.endswith(".json")]) == 2


@pytest.mark.parametrize("where", [0, 0.1, 0.5, 0.9, -1])
@pytest.mark.parametrize("name", [*IMAGE, *GOLDEN])
def test_a_flipped_bit_is_found_and_its_file_named(store: ImageStore, golden: Golden, name: str, where: float) -> None:
    path = place(golden, name)
    content = bytearray(path.read_bytes())
    content[int(where * len(content)) if where >= 0 else -1] ^= 0x04
    path.write_bytes(content)
    (found,) = check(store, golden)
    assert found.file == named(golden, name)
    assert found.problem.endswith(".")


@pytest.mark.parametrize("name", [*IMAGE, *GOLDEN])
@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_is_cut_or_missing_is_named(store: ImageStore, golden: Golden, name: str, cut: bool) -> None:
    path = place(golden, name)
    if cut:
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    assert [damage.file for damage in check(store, golden)] == [named(golden, name)]


def test_all_damage_is_listed(store: ImageStore, golden: Golden) -> None:
    for name in ("kernel", "root.raw", "ram.base"):
        place(golden, name).unlink()
    assert {damage.file for damage in check(store, golden)} == {
        named(golden, name) for name in ("kernel", "root.raw", "ram.base")
    }


def test_the_description_of_another_image_is_not_taken_for_this_ones(store: ImageStore, golden: Golden) -> None:
    other = put(store, OTHER, "other")
    for name in IMAGE[1:]:
        (other.directory / name).write_bytes(PAGES)
    one, two = place(golden, "image.json"), other.directory / "image.json"
    one.unlink()
    one.write_bytes(two.read_bytes())
    assert check(store, golden)[0].file.startswith(f"images/blobs/{DIGEST}/")


def test_a_golden_made_again_is_not_the_one_that_a_snapshot_lies_on(store: ImageStore, golden: Golden) -> None:
    ref = f"{golden.name}.{'0' * 16}"
    (found,) = ImageVerifier(store, lambda _file, _count: None).golden(DIGEST, ref)
    assert found.file == named(golden, "golden.json")
    assert ref in found.problem


@pytest.mark.parametrize("name", ["image.json", "golden.json"])
def test_a_look_names_what_does_not_fit_too(store: ImageStore, golden: Golden, name: str) -> None:
    path = place(golden, name)
    path.write_bytes(path.read_bytes().replace(b'"format": 2', b'"format": 3'))
    with pytest.raises(CorruptData) as caught:
        load_golden(golden.directory) if name == "golden.json" else store.load(DIGEST)
    assert caught.value.file == named(golden, name)


def test_descriptions_of_earlier_releases_have_no_checksum_and_are_read(store: ImageStore, golden: Golden) -> None:
    path = place(golden, "image.json")
    before = path.read_bytes().replace(b'"format": 2', b'"format": 1')
    path.write_bytes(b"\n".join(line for line in before.split(b"\n") if b'"checksum"' not in line))
    assert "checksum" not in described_files(path)
    assert check(store, golden) == []
