"""Whether KVM works is found out once for a host and its images, not once for each home."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.core.config import Settings
from perdure.machines import probe
from perdure.machines.driver import Accelerator, DiskLayer, Machine, Shape
from perdure.node import accelerator
from tests.fakes.machine import FakeDriver


class Images:
    """A store with one image."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        (directory / "file").touch()

    def all(self) -> list[Any]:
        file = self._directory / "file"
        shape = Shape(file, file, file, 512, 1, 1 << 30)
        return [SimpleNamespace(disk_gib=1, default_size=None, root=DiskLayer(file, "raw"), shape=lambda _size: shape)]


@pytest.fixture(autouse=True)
def a_guest_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers(_machine: Machine) -> bool:
        return True

    (tmp_path / "kvm").touch()
    monkeypatch.setattr(probe, "KVM_DEVICE", tmp_path / "kvm")
    monkeypatch.setattr(accelerator, "_answers", answers)


async def test_a_second_home_with_the_same_images_boots_nothing(tmp_path: Path) -> None:
    driver, images = FakeDriver(), cast("Any", Images(tmp_path / "images"))
    for home in ("one", "two"):
        settings = Settings(home=tmp_path / home, image_dir=tmp_path / "images")
        assert (await accelerator.choose(settings, driver, images)).accelerator is Accelerator.KVM
    assert len(driver.machines) == 1


async def test_where_the_images_are_not_ours_to_write_each_home_remembers(tmp_path: Path) -> None:
    driver, images = FakeDriver(), cast("Any", Images(tmp_path / "elsewhere"))
    settings = Settings(home=tmp_path / "home", image_dir=tmp_path / "none")
    for _ in range(2):
        await accelerator.choose(settings, driver, images)
    assert len(driver.machines) == 1
    assert (tmp_path / "home/accelerator.json").exists()
