"""What a start opens is closed when it comes to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.machines.driver import Accelerator, LaunchSpec, Limits, Ram, Shape
from perdure.machines.qemu_start import open_handles


def test_a_start_that_cannot_listen_leaves_no_descriptor_open(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    shape = Shape(file, file, file, 256, 1, 1 << 30)
    spec = LaunchSpec("vm", tmp_path / "no" / "directory", shape, Ram(file), Accelerator.TCG, Limits())
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileNotFoundError) as caught, open_handles(spec):
        pass
    assert set(Path("/proc/self/fd").iterdir()) == before, caught
